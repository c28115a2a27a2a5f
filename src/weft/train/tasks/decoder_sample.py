"""Text out of a trained model: the sample at the end of a run, and `weft generate`."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.checkpoint import load_checkpoint, newest_checkpoint
from weft.checkpoint.targets import Location
from weft.data import Tokenizer
from weft.errors import CheckpointError, ConfigError
from weft.mesh import pick_device
from weft.models import Decoder, build_decoder, generate
from weft.spec.config import TRAINS, SampleSection
from weft.train.folder import RunFolder
from weft.train.state import restore_model
from weft.train.task import with_adapter
from weft.train.tasks.decoder_files import base_of, decoder_of, tokenizer_of


def generate_text(
    run: RunFolder | Path | str,
    prompt: str,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    step: int | None = None,
) -> str:
    """Continue `prompt` with the model of a run; returns prompt and continuation.

    Args:
        run: what `prepare_run` gave, or the path of its folder.
        prompt: text.
        max_tokens: at most this many are added.
        temperature: of sampling; 0 takes the likeliest token each time.
        top_k: sample from this many likeliest tokens.
        seed: of sampling.
        step: which checkpoint; None takes the newest valid one.

    Raises:
        CheckpointError: when there is no such checkpoint.
        ConfigError: for a run whose task is no decoder on text.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(Path(run))
    config = folder.config()
    task = config.task.name
    if task is not None and TRAINS.get(task) != "decoder" and not (folder.path / "model.json").exists():
        raise ConfigError(
            f"RUN={folder.path}: task.name={task} does not train a text decoder, so it cannot "
            "generate. Give a run that trains one."
        )
    section = SampleSection(max_tokens=max_tokens, temperature=temperature, top_k=top_k)
    if base_of(folder).is_dir():
        from weft.train.tasks.continuation import pretrained_text

        return pretrained_text(folder, _find(folder, step), prompt, section, seed)
    spec = decoder_of(folder)
    tokenizer = Tokenizer.load(tokenizer_of(folder))
    model = with_adapter(build_decoder(spec, seed=config.seed), config)  # an adapter's checkpoint has no base
    restore_model(model, load_checkpoint(_find(folder, step)))
    model.to(pick_device("auto", 0))
    return continue_text(model, tokenizer, prompt, section, seed)


def continue_text(model: Decoder, tokenizer: Tokenizer, prompt: str, section: SampleSection, seed: int = 0) -> str:
    """`prompt` and what the model writes after it, up to the end-of-document token or `max_tokens`."""
    model.eval()
    ids = tokenizer.encode(prompt) or [tokenizer.end_id]
    with torch.no_grad():
        new_ids = generate(
            model,
            ids,
            max_tokens=section.max_tokens,
            temperature=section.temperature,
            top_k=section.top_k,
            seed=seed,
            stop_ids=(tokenizer.end_id,),
            num_ids=tokenizer.vocab_size,
        )
    return prompt + tokenizer.decode(new_ids)


def write_sample(folder: RunFolder, section: SampleSection, step: int) -> str:
    """Write samples/step_N.txt from the checkpoint of a step and return its text; empty when no sample is asked for.

    It is read from disk, not from the running model: under a plan that shards weights one rank alone has only a part.
    """
    room = _room(folder, section.prompt)
    if not section.prompt or room < 1:
        return ""
    text = generate_text(
        folder, section.prompt, min(section.max_tokens, room), section.temperature, section.top_k, step=step
    )
    samples = folder.path / "samples"
    samples.mkdir(exist_ok=True)
    (samples / f"step_{step:08d}.txt").write_text(text + "\n")
    return text


def _room(folder: RunFolder, prompt: str) -> int:
    """Tokens that fit behind a prompt."""
    if base_of(folder).is_dir():
        from weft.train.tasks.continuation import pretrained_room

        return pretrained_room(folder, prompt)
    return decoder_of(folder).max_seq_len - len(Tokenizer.load(tokenizer_of(folder)).encode(prompt))


def _find(folder: RunFolder, step: int | None) -> Location:
    if step is None:
        found = newest_checkpoint(folder.checkpoints)
        if found is None:
            raise CheckpointError(
                f"run folder {str(folder.path)!r}: it has no checkpoint yet. Train until the first one is saved."
            )
        return found.path
    return folder.checkpoint(step)
