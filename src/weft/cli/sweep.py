"""`weft sweep`: search for good settings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import interrupt_on_signals, print_line, table


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="File with [search] and other settings.")],
    on: Annotated[
        str | None,
        typer.Option(help="local:WORKERS, slurm:PARTITION[:JOBS] or dask:HOST:PORT.", show_default="the file's"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder.", show_default="sweeps/NAME")] = None,
) -> None:
    """Search for good settings of a run. The same command again continues."""
    from weft.experiments.sweep import import_optuna, run_sweep, sweep_folder
    from weft.experiments.sweep_config import read_sweep
    from weft.pools.pool import Pool

    import_optuna()
    config, folder = read_sweep(file, on), out or Path("sweeps") / file.stem
    interrupt_on_signals()
    pool = Pool(config.on, cores=config.cores, gpus=config.gpus, timeout=config.timeout)
    try:
        with pool, sweep_folder(config, folder):
            from weft.experiments.sweep_report import rows_of, summary, write_report

            result = run_sweep(config, folder, pool, print_line, write_report)
            write_report(result)
    except KeyboardInterrupt as stopped:
        print_line(f"stopped. The same command continues the sweep in {folder}.")
        raise typer.Exit(stopped.args[0] if stopped.args else 130) from None
    print("\n".join(table(rows_of(result, 10), right=(1, 2))))
    print("\n".join(summary(result)))
    print(f"Report: {folder}/report.md   Config: {folder}/best.toml")
    if any(trial.state == "failed" for trial in result.trials):
        raise typer.Exit(1)
