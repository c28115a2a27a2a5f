"""`weft explain`: where a step went wrong, and what the model saw there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart.", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Option(help="A step that went wrong, from 1; by default the last one.", show_default=False)
    ] = None,
    num: Annotated[int, typer.Option(min=0, help="Samples to show.")] = 3,
) -> None:
    """Say where a step went wrong, by module, rank and samples, and show the samples as the model saw them."""
    from weft.train import RunFolder
    from weft.train.run.telling import explained_lines

    for line in explained_lines(RunFolder(run), step, num):
        print(line)
