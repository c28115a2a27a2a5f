"""`weft watch`, `weft top` and `weft goodput`: looking at runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import say

_ROOT = Annotated[Path, typer.Argument(metavar="RUN_OR_FOLDER", help="A run folder, or the folder of several runs.")]
_PRICE = Annotated[
    str | None,
    typer.Option("--price", metavar="PRICE", help="What one device costs, such as 2.5usd/h; costs are shown then."),
]


def watch(
    root: _ROOT = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine it needs a token and TLS.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="A further name by which browsers call this server.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with what visitors must know; made where missing.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="Certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")] = None,
    price: _PRICE = None,
) -> None:
    """Serve a page that shows runs while they train and afterwards."""
    from weft.monitor import Price
    from weft.monitor.page import Serving, serve

    cost = None if price is None else Price.parse(price)
    serving = Serving(host, port, tuple(name or ()), token_file, tls_cert, tls_key, cost, _go_on)
    serve(root, serving, say)


def top(
    root: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the folder of several runs.")] = Path(
        "runs"
    ),
    once: Annotated[bool, typer.Option("--once", help="Show it once, as text, and end.")] = False,
    price: _PRICE = None,
) -> None:
    """Show a run in the terminal, as `weft watch` does on a page."""
    from weft.monitor import Price
    from weft.monitor.page import show_top

    show_top(root, sys.stdout, once=once, price=None if price is None else Price.parse(price))


def goodput(
    root: _ROOT = Path("runs"),
    price: _PRICE = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show where the time of runs went, over all their starts, and what it cost."""
    from weft.monitor import Price
    from weft.monitor.page import ledger_lines

    for line in ledger_lines(root, None if price is None else Price.parse(price), as_json=as_json):
        print(line)


def _go_on(folder: Path) -> None:
    """The word that a held run waits for. Raises LaunchError where no command waits."""
    from weft.errors import LaunchError
    from weft.monitor.alerts import HoldPlace

    place = HoldPlace(folder)
    if not place.is_held:
        raise LaunchError(f"No command waits in {folder} any more. Start it there: weft resume {folder}.")
    place.say([])
