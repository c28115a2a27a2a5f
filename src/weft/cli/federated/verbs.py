"""`weft federate`: train with clients that keep their records, on this machine's workers or a cluster's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import interrupt_on_signals, print_line


def federate(
    file: Annotated[Path, typer.Argument(metavar="FEDERATED.toml", help="File with clients, rounds and [server].")],
    on: Annotated[
        str | None,
        typer.Option(help="local:WORKERS, slurm:PARTITION[:JOBS] or dask:HOST:PORT.", show_default="the file's"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder.", show_default="federated/NAME")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the last round as JSON.")] = False,
) -> None:
    """Simulate federated training. The same command again continues; more rounds are allowed."""
    from weft.federated.config import read_federated
    from weft.federated.simulation import federated_folder, run_federated
    from weft.pools.pool import Pool

    config, folder = read_federated(file, on), out or Path("federated") / file.stem
    interrupt_on_signals()
    pool = Pool(config.on, cores=config.cores, gpus=config.gpus, timeout=config.timeout)
    try:
        with pool, federated_folder(config, folder):
            result = run_federated(config, folder, pool, print_line)
    except KeyboardInterrupt as stopped:
        print_line(f"stopped. The same command continues the run in {folder}.")
        raise typer.Exit(stopped.args[0] if stopped.args else 130) from None
    last = {**(result.rounds[-1] if result.rounds else {}), "refused_in_total": result.state.refused}
    if result.epsilon is not None:
        last |= {"epsilon": result.epsilon, "delta": config.privacy.delta}
    if as_json:
        print(json.dumps(last))
        return
    if result.epsilon is not None:
        is_test = config.privacy.key.startswith("test:")
        print(f"epsilon {result.epsilon:.3f} at delta {config.privacy.delta:.2g}, for one client")
        if is_test:
            print("NOT PRIVATE: the key is known (privacy.key=test:...), so anyone can subtract the noise")
    if result.state.refused:
        print(f"{result.state.refused} updates were refused and left out")
    print(f"Weights: {folder}/model.safetensors   Rounds: {folder}/rounds.jsonl")
