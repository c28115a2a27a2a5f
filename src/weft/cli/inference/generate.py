"""`weft generate`: a trained model answers prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.inference.generate_file import (
    DeviceOption,
    DtypeOption,
    FileOptions,
    MemoryOption,
    OutOption,
    PlanOption,
    PromptsOption,
    RowsOption,
    SamplesOption,
    TextOptions,
    TopPOption,
    generate_for_file,
)
from weft.errors import ConfigError, did_you_mean
from weft.hub import downloaded_folder, is_hub_text

if TYPE_CHECKING:
    from weft.config.run_config import SampleSection
    from weft.data.text.turns import Turn
    from weft.train.tasks.generation import TextModel


PromptOption = Annotated[
    str | None,
    typer.Option(help="Question to answer, or text to continue.", show_default="the first one of the held-out data"),
]
TemperatureOption = Annotated[
    float, typer.Option(min=0.0, help="Sampling temperature; 0 always takes the most likely token.")
]
MessagesOption = Annotated[
    Path | None, typer.Option(help="JSON file with the messages of a conversation, and tools if there are any.")
]


def generate(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder such as runs/quickstart, a Hugging Face folder or OWNER/NAME.")
    ],
    prompt: PromptOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 200,
    temperature: TemperatureOption = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many most likely tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed generates the same text.")] = 0,
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint to use.", show_default="newest valid")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the template.")] = False,
    system: Annotated[str, typer.Option(help="System message before the question.")] = "",
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; may be repeated.")] = None,
    messages: MessagesOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask one question after the other, as a conversation.")] = False,
    prompts: PromptsOption = None,
    out: OutOption = None,
    plan: PlanOption = "",
    samples: SamplesOption = None,
    rows: RowsOption = None,
    top_p: TopPOption = 1.0,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    memory: MemoryOption = None,
) -> None:
    """Answer a question with a model that was trained on conversations, or continue a text with any other."""
    options = FileOptions(out, plan, samples, rows, top_p, dtype, device, memory)
    options.expect_prompts(prompts)
    if prompts is not None and (prompt is not None or messages or chat):
        raise ConfigError(f"--prompts={prompts}: the file has the prompts. Leave out --prompt, --messages and --chat.")
    if raw and (system or messages or chat):
        raise ConfigError("--raw: it leaves out the chat template, which --system, --messages and --chat need.")
    if messages is not None and (chat or prompt is not None):
        raise ConfigError(f"--messages={messages}: the file is the conversation. Leave out --prompt and --chat.")
    turns, tools = _read_messages(messages) if messages is not None else ([], "")
    folder = source_folder(run, step)
    if prompts is not None:
        texts = TextOptions(max_tokens, temperature, top_k, seed, step, _stops(stop), system, raw)
        generate_for_file(folder, prompts, options, texts)
        return
    from weft.config.run_config import SampleSection
    from weft.train.tasks.generation import open_text_model, sample_text

    section = SampleSection(prompt=prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k)
    stops, model = _stops(stop), open_text_model(folder, step)
    if chat:
        _converse(model, _system(system), prompt, section, seed, stops)
    elif turns:
        print(model.reply([*_system(system), *turns], section, seed, stops, tools))
    elif prompt is None and not raw and not system:
        print(sample_text(model, section, seed, stops))
    elif not raw and (system or model.is_chat):
        from weft.data.text.turns import Turn

        asked = model.first_prompt().words if prompt is None else prompt
        print(model.reply([*_system(system), Turn("user", asked)], section, seed, stops))
    else:
        text = model.first_prompt().words if prompt is None else prompt
        print(text + model.continue_text(text, section, seed, stops))


def source_folder(run: str, step: int | None = None) -> Path:
    """Return the folder of a run or a model. In a folder that exists, such as runs, a missing one is no hub name.

    Raises:
        ConfigError: for a folder that is neither a run with a checkpoint nor a Hugging Face folder, and for a step of a
            Hugging Face folder.
    """
    is_name = is_hub_text(run) or not Path(run).parent.is_dir()
    folder = Path(downloaded_folder(run, "RUN") if is_name else run)
    if not (folder / "config.json").is_file() or (folder / "config.toml").is_file():
        refuse_no_run(folder)
    elif step is not None:
        raise ConfigError(f"--step={step}: {run} is a Hugging Face folder, which has no checkpoints. Leave it out.")
    return folder


def _stops(texts: list[str] | None) -> tuple[str, ...]:
    if "" in (texts or ()):
        raise ConfigError('--stop="": an empty text would end each result at its first token. Leave it out.')
    return tuple(texts or ())


def _system(text: str) -> list[Turn]:
    from weft.data.text.turns import Turn

    return [Turn("system", text)] if text else []


def _read_messages(path: Path) -> tuple[list[Turn], str]:
    from weft.data.text.turns import Unusable, read_turns

    try:
        found: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--messages={path}: it cannot be read ({error.strerror}). Give a JSON file.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--messages={path}: not JSON ({error}). Give a list of messages.") from error
    tools = found.get("tools") if isinstance(found, dict) else None
    try:
        turns = read_turns(found.get("messages") if isinstance(found, dict) else found, "role", "content")
    except Unusable as error:
        raise ConfigError(
            f'--messages={path}: {error}. Give a list such as [{{"role": "user", "content": "Hi"}}].'
        ) from error
    if turns[-1].role == "assistant":
        raise ConfigError(f"--messages={path}: its last turn is the assistant's. End it with a question.")
    return list(turns), json.dumps(tools) if tools else ""


def _converse(
    model: TextModel, turns: list[Turn], prompt: str | None, section: SampleSection, seed: int, stops: tuple[str, ...]
) -> None:
    from weft.data.text.turns import Turn

    while True:
        if prompt is None:
            print("> ", end="", flush=True)
            if not (line := sys.stdin.readline()):
                print()
                return
            prompt = line.strip()
        if prompt:
            turns.append(Turn("user", prompt))
            answer = model.reply(turns, section, seed, stops)
            print(answer, flush=True)
            turns.append(Turn("assistant", answer))
        prompt = None


def refuse_no_run(run: Path) -> None:
    """Raise ConfigError if `run` is not a run folder of `weft train`, or has no checkpoint yet."""
    if not run.is_dir():
        siblings = [str(found.parent) for found in run.parent.glob("*/config.toml")] if run.parent.is_dir() else []
        hint = did_you_mean(str(run), siblings) or " Give a run's folder, such as runs/quickstart."
        raise ConfigError(f"RUN={run}: there is no such folder.{hint}")
    if not (run / "config.toml").is_file():
        inside = sorted(str(found.parent) for found in run.glob("*/config.toml"))
        hint = f"Use one of its runs: {', '.join(inside[:5])}." if inside else "Give a run's folder."
        raise ConfigError(f"RUN={run}: this folder is not a run; it has no config.toml. {hint}")
    from weft.checkpoint.folders import step_in_name
    from weft.train.folder import RunFolder

    kept = RunFolder(run).checkpoints
    if not kept.is_dir() or not any(step_in_name(path.name) is not None for path in kept.iterdir()):
        raise ConfigError(f"RUN={run}: this run has no checkpoint yet. Train it first: weft train {run}/config.toml")
