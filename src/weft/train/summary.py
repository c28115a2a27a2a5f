"""What a run says of itself before its first step and after its last."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from torch import nn

from weft.memory import offload_lines, recompute_of
from weft.mesh import Mesh
from weft.monitor import last_per_step, read_events
from weft.parallel import Precision
from weft.spec import ModelSpec, RunConfig
from weft.train.folder import RunFolder
from weft.train.progress import Progress
from weft.train.rates import more_steps
from weft.units import format_count


def opening_lines(folder: RunFolder, config: RunConfig, mesh: Mesh, model: nn.Module) -> list[str]:
    """Run, model, data, plan and precision, one line each."""
    train = config.train
    tokens = train.global_batch * train.seq_len
    recompute = recompute_of(model)
    return [
        f"run     {folder.path}",
        f"model   {model_line(folder, config)}",
        *(f"data    {line}" for line in folder.data().summary),
        f"batch   {train.global_batch} sequences of {train.seq_len} tokens: {format_count(tokens)} tokens a step, "
        f"{train.steps} steps, {format_count(tokens * train.steps)} tokens",
        f"plan    {mesh.plan} on {mesh.world_size} {mesh.device.type} rank{'s' if mesh.world_size > 1 else ''}",
        f"format  {Precision.of(mesh.plan)}",
        *([f"memory  recompute {recompute.describe()}"] if recompute and recompute.setting != "none" else []),
        *(f"offload {line}" for line in offload_lines(mesh.plan, mesh.device)),
    ]


def model_line(folder: RunFolder, config: RunConfig) -> str:
    """The model's name and size, such as "tiny: 6.29 M parameters"."""
    return f"{config.model.name}: {format_count(ModelSpec.of_decoder(folder.decoder()).num_params)} parameters"


def with_setting(command: Sequence[str], folder: RunFolder, key: str, value: object) -> str:
    """The command that started the run with one setting changed, to be pasted into a shell.

    command: its words; where nobody knows them (a run started from Python), the folder's own config is named.
    """
    words = list(command) or ["weft", "train", str(folder.path / "config.toml")]
    # Steps and epochs say the same thing, and are refused together.
    replaced = ("train.steps=", "train.epochs=") if key == "train.steps" else (f"{key}=",)
    kept = [word for word in words if not word.startswith((*replaced, "resume.step="))]
    return shlex.join([*kept, f"{key}={value}"])


def _go_on(command: Sequence[str]) -> str:
    """How an unfinished run goes on; the command that went back to an older step would go back once more."""
    kept = [word for word in command if not word.startswith("resume.step=")]
    if len(kept) < len(command):
        return f"{shlex.join(kept)}   goes on from here"
    return "the same command again goes on from here"


def already_done(folder: RunFolder, config: RunConfig, step: int, command: Sequence[str] = ()) -> list[str]:
    """For a run whose last step is done."""
    told = more_steps(config, step * 2)
    return [
        f"{folder.path} is complete: {step} steps are done.",
        f"Go on with more steps:  {with_setting(command, folder, 'train.steps', step * 2)}",
        *([f"                        {told}"] if told else []),
        f'Try the model:          weft generate {folder.path} --prompt "def "',
    ]


def closing_lines(
    folder: RunFolder,
    config: RunConfig,
    progress: Progress,
    reason: str,
    sample: str,
    times: Sequence[str] = (),
    command: Sequence[str] = (),
) -> list[str]:
    """How it ended, how the loss fell, a sample, where the time went, and what to type next."""
    evaluations = last_per_step(read_events(folder.events), kind="eval")
    lines = [""]
    if sample:
        lines += ["sample  " + sample.replace("\n", "\n        "), ""]
    lines.append(f"done    {progress.step} of {config.train.steps} steps: {reason}")
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        fall = f"{_evaluation(first)}  ->  " if first["step"] != last["step"] else ""
        lines.append(f"eval    {fall}{_evaluation(last)}")
    lines += [
        *times,
        f"folder  {folder.path}: events.jsonl, loss.png, samples/, checkpoints/, logs/",
        f'next    weft generate {folder.path} --prompt "def "',
    ]
    if progress.step < config.train.steps:
        lines.append(f"        {_go_on(command)}")
    else:
        wanted = config.train.steps * 2
        lines.append(f"        {with_setting(command, folder, 'train.steps', wanted)}   trains on from here")
        if told := more_steps(config, wanted):
            lines.append(f"        {told}")
    return lines


def _evaluation(event: dict[str, object]) -> str:
    text = f"step {event['step']}: loss {event['loss']:.3f}"
    return text + (f", {event['bits_per_byte']:.3f} bits per byte" if event.get("bits_per_byte") else "")
