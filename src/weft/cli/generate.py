"""`weft generate`: continue a prompt with the model of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.errors import ConfigError, did_you_mean


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, such as runs/quickstart.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many most likely tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed generates the same text.")] = 0,
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint to use.", show_default="newest valid")] = None,
) -> None:
    """Continue a prompt with a trained model."""
    refuse_no_run(run)
    from weft.train import generate_text

    text = generate_text(run, prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed, step=step)
    print(text)


def refuse_no_run(run: Path) -> None:
    """ConfigError when `run` is no folder that `weft train` made, or holds no checkpoint yet."""
    if not run.is_dir():
        siblings = [str(found.parent) for found in run.parent.glob("*/config.toml")] if run.parent.is_dir() else []
        hint = did_you_mean(str(run), siblings) or " Give a run's folder, such as runs/quickstart."
        raise ConfigError(f"RUN={run}: there is no such folder.{hint}")
    if not (run / "config.toml").is_file():
        inside = sorted(str(found.parent) for found in run.glob("*/config.toml"))
        hint = f"Use one of its runs: {', '.join(inside[:5])}." if inside else "Give a run's folder."
        raise ConfigError(f"RUN={run}: this folder is not a run; it has no config.toml. {hint}")
    from weft.checkpoint import step_in_name
    from weft.train import RunFolder

    kept = RunFolder(run).checkpoints
    if not kept.is_dir() or not any(step_in_name(path.name) is not None for path in kept.iterdir()):
        raise ConfigError(f"RUN={run}: this run has no checkpoint yet. Train it first: weft train {run}/config.toml")
