"""`weft map`: call a function with each line of a JSONL file, on the workers of a pool."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.console import interrupt_on_signals, print_line, progress_report
from weft.errors import ConfigError, DataError
from weft.pools.pool import Pool, failure_text, refuse_malformed_name
from weft.pools.task_folder import TaskFolder, open_folder
from weft.units import counted, format_seconds

#: Failed tasks that are reported while others run.
_REPORTED = 5


def map_items(
    function: Annotated[str, typer.Argument(help="package.module:function or path/to/file.py:function.")],
    over: Annotated[Path, typer.Option(help="JSONL file; each line is the function's argument.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of results.", show_default="maps/FUNCTION-FILE")
    ] = None,
    on: Annotated[str, typer.Option(help="local:WORKERS, slurm:PARTITION[:JOBS] or dask:HOST:PORT.")] = "local",
    timeout: Annotated[str | None, typer.Option(help="Time of a task, such as 60s.", show_default="no limit")] = None,
    retries: Annotated[int, typer.Option(help="Further tries after a worker died or the time was over.")] = 2,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Try again after an exception, too.")] = False,
    cores: Annotated[int, typer.Option(help="Cores of a worker.", show_default="not assigned")] = 0,
    gpus: Annotated[int, typer.Option(help="GPUs of a worker.", show_default="none assigned")] = 0,
) -> None:
    """Call a function with each line of a file. The same command again does only the tasks that have no result."""
    refuse_malformed_name(function)
    place = out or Path("maps") / f"{function.rpartition(':')[2]}-{over.stem}"
    interrupt_on_signals()
    pool = Pool(on, cores=cores, gpus=gpus, timeout=timeout, retries=retries, retry_errors=retry_errors)
    began = time.monotonic()
    with pool, open_folder(place, function, read_items(over)) as folder:
        if folder.num_damaged:
            print_line(
                f"{counted(folder.num_damaged, 'damaged line')} of {place}/journal.jsonl: these tasks run again."
            )
        before = folder.num_done
        try:
            with progress_report(sys.stderr) as progress:
                progress("tasks", before, folder.num_items)
                pool.run(function, folder, _reporter(progress))
        except KeyboardInterrupt as stopped:
            print_line(f"stopped: {folder.num_done} of {folder.num_items} results are in {place}/journal.jsonl. ")
            print_line("The same command does the others.")
            raise typer.Exit(stopped.args[0] if stopped.args else 130) from None
        new, took = folder.num_done - before, format_seconds(time.monotonic() - began)
        print_line(
            f"{folder.num_done} of {counted(folder.num_items, 'result')} in {place}/results.jsonl; {new} new in {took}."
        )
        if folder.num_failed:
            print(failure_text(folder.outcomes()), file=sys.stderr)
            raise typer.Exit(1)


def _reporter(progress: Any) -> Any:
    def report(outcome: dict[str, Any], folder: TaskFolder) -> None:
        nonlocal failed
        if "error" in outcome:
            failed += 1
            if failed <= _REPORTED:
                print_line(f"item {outcome['item']} failed: {outcome['error']}")
        done = folder.num_finished
        progress("tasks", done, folder.num_items)

    failed = 0
    return report


def read_items(path: Path) -> Iterator[str]:
    """Yield the JSON text of each line of a file, without empty lines.

    Raises:
        DataError: if the file cannot be read or has no items.
        ConfigError: for the first line that is not JSON.
    """
    number, found = 0, False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if text := line.strip():
                    json.loads(text, parse_constant=_refuse_constant)
                    found = True
                    yield text.decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise DataError(f"--over={path}: it cannot be read ({error.strerror}). Give a JSONL file.") from error
    except RecursionError:
        raise ConfigError(f"{path}:{number}: it is nested too deep. Write one JSON value per line.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}:{number}: it is not UTF-8. Save the file as UTF-8.") from None
    except ValueError as error:
        raise ConfigError(f"{path}:{number}: it is not JSON ({error}). Write one JSON value per line.") from None
    if not found:
        raise DataError(f"--over={path}: it has no lines. Write one JSON value per line.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")
