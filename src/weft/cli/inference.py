"""`weft generate` and `weft eval`: a trained model answers prompts, or the tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft import env
from weft.cli.ckpt import ONE_HELP, one_of
from weft.cli.console import print_line, table
from weft.cli.generate_file import FileOptions, generate_for_file
from weft.errors import ConfigError, MissingExtra, did_you_mean
from weft.hub import downloaded_folder, is_hub_text

if TYPE_CHECKING:
    from weft.checkpoint.load import Checkpoint
    from weft.config.run_config import SampleSection
    from weft.data.text.turns import Turn
    from weft.train.folder import RunFolder
    from weft.train.tasks.generation import TextModel

# pyright: reportMissingImports=false, reportUnknownVariableType=false
# lm-eval is an optional dependency that only this module uses.


def generate(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder such as runs/quickstart, a Hugging Face folder or OWNER/NAME.")
    ],
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Question to answer, or text to continue.", show_default="the first one of the held-out data"
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many most likely tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed generates the same text.")] = 0,
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint to use.", show_default="newest valid")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    system: Annotated[str, typer.Option(help="System message before the question.")] = "",
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; may be repeated.")] = None,
    messages: Annotated[
        Path | None, typer.Option(help="JSON file with the messages of a conversation, and tools if there are any.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask for one question after the other, as a conversation.")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file of prompts, each with its own text in --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="With --prompts: JSONL file to write.")] = None,
    plan: Annotated[str, typer.Option("--plan", "-p", help="With --prompts: plan of the ranks, such as tp=2.")] = "",
    samples: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="With --prompts: texts for each prompt.", show_default="1")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="With --prompts: texts that a rank generates at once.", show_default="32")
    ] = None,
    top_p: Annotated[
        float, typer.Option(help="With --prompts: sample among the likeliest tokens that add up to this.")
    ] = 1.0,
    dtype: Annotated[
        str | None, typer.Option(help="With --prompts: fp32, bf16, fp16 or fp64.", show_default="the plan's")
    ] = None,
    device: Annotated[str, typer.Option(help="With --prompts: auto, cpu or cuda.")] = "auto",
) -> None:
    """Answer a question with a model that was trained on conversations, or continue a text with any other."""
    options = FileOptions(out, plan, samples, rows, top_p, dtype, device)
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
        generate_for_file(
            folder, prompts, options, max_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed, step=step,
            stops=tuple(stop or ()), system=system, raw=raw,
        )  # fmt: skip
        return
    from weft.config.run_config import SampleSection
    from weft.train.tasks.generation import open_text_model, sample_text

    section = SampleSection(prompt=prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k)
    stops, model = tuple(stop or ()), open_text_model(folder, step)
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


# `weft eval`: tasks of EleutherAI's lm-evaluation-harness, with data on this machine.

#: Columns that are omitted from the table. Standard errors are omitted too: they are shown next to their values.
_SILENT = ("alias", "sample_len", "name")


def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help=ONE_HELP)],
    tasks: Annotated[str, typer.Option(help="Names of tasks of lm-eval, with commas.")],
    task_folder: Annotated[
        Path | None, typer.Option(help="Folder with tasks of your own: YAML files as lm-eval reads them.")
    ] = None,
    few_shot: Annotated[int | None, typer.Option(min=0, help="Examples in a prompt.", show_default="task's")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task.", show_default="all")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions that are computed together.")] = 8,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the tokenizer's chat template.")] = False,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.", show_default="as saved")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a trained model with lm-eval on local data. Nothing is downloaded."""
    env.default_for_libraries(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TQDM_DISABLE="1")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError("--tasks: it names no task. Use --tasks arc_easy or a task of --task-folder.")
    known = _known_tasks(task_folder)
    for name in names:
        if not known.match_tasks([name]):
            hint = did_you_mean(name, known.all_tasks) or " `lm-eval ls tasks` lists those that lm-eval has."
            raise ConfigError(f"--tasks={name}: lm-eval has no such task.{hint}")
    from weft.checkpoint.load import load_checkpoint

    folder, opened = _trained(run), load_checkpoint(one_of(run), verify=True)
    _expect_data(known, names)
    settings = {"num_fewshot": few_shot, "limit": limit, "apply_chat_template": chat}
    with tempfile.TemporaryDirectory(dir=folder.path, prefix=".weft-eval-") as work:
        model = _written(opened, folder, Path(work) / "model", dtype)
        found = _figures(model, known, names, batch_size, settings)
    file = folder.path / "evals" / f"step_{opened.step:08d}.json"
    file.parent.mkdir(exist_ok=True)
    before = json.loads(file.read_text()) if file.is_file() else {}  # earlier results of other tasks at this step
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(before | found, indent=1) + "\n")
    os.replace(draft, file)
    if as_json:
        print(json.dumps({"step": opened.step, "tasks": found}, indent=1))
        return
    for line in _table(found):
        print(line)
    print_line(f"step {opened.step} of {folder.path}: also in {file}.")


def _known_tasks(folder: Path | None) -> Any:
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--task-folder={folder}: there is no such folder. Give one with YAML files of tasks.")
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("lm_eval", "datasets", "accelerate"):
            raise
        raise MissingExtra("lm-eval", "eval", "weft eval") from error
    return TaskManager(include_path=str(folder) if folder is not None else None)


def _expect_data(known: Any, names: Sequence[str]) -> None:
    try:
        known.load(known.match_tasks(list(names)))
    except Exception as error:  # data readers may raise any exception
        said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"--tasks={','.join(names)}: their data cannot be read ({said.rstrip('.')}). Weft downloads nothing: "
            "fetch it with the datasets package before, or give a --task-folder whose tasks name local files."
        ) from error


def _trained(run: str) -> RunFolder:
    from weft.train.folder import RunFolder
    from weft.train.tasks.export import is_exportable

    path = Path(run)
    folder = RunFolder(path if path.is_dir() else Path(run.rpartition("@")[0] or run))
    if not (folder.path / "config.toml").is_file():
        raise ConfigError(f"RUN={run}: this folder is not a run; it has no config.toml. Give a run's folder.")
    if not is_exportable(folder):
        raise ConfigError(
            f"RUN={run}: transformers does not support this model, and lm-eval needs it. Use another run."
        )
    return folder


def _written(opened: Checkpoint, folder: RunFolder, out: Path, dtype: str | None) -> Path:
    from weft.cli.export import expect_format, export_weights

    expect_format(dtype)
    export_weights(opened, out, dtype=dtype, run=folder, merged=opened.state.get("adapter") is not None)
    return out


def _figures(
    model: Path, known: Any, names: Sequence[str], batch_size: int, settings: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from weft.comm.gpu_settings import pick_device

    answers = simple_evaluate(
        model=HFLM(pretrained=str(model), dtype="auto", device=str(pick_device("auto", 0)), batch_size=batch_size),
        tasks=list(names), task_manager=known, log_samples=False, bootstrap_iters=1000, **settings,
    )  # fmt: skip
    results: dict[str, dict[str, Any]] = answers["results"]
    return {
        task: {key.removesuffix(",none"): value for key, value in figures.items() if key not in _SILENT}
        for task, figures in results.items()
    }


def _table(found: dict[str, dict[str, Any]]) -> list[str]:
    rows: list[tuple[str, ...]] = [("task", "figure", "value", "+-")]
    for task, figures in found.items():
        for key, value in figures.items():
            if isinstance(value, float) and "_stderr" not in key:
                name, _, kind = key.partition(",")
                error = figures.get(f"{name}_stderr" + (f",{kind}" if kind else ""))
                rows.append((task, key, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "-"))
    return table(rows, right=(2, 3))
