"""`weft ab`: which of two settings is better, by pairs of runs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weft.cli.console import interrupt_on_signals, print_line, split_words, table
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.config.run_config import RunConfig
    from weft.experiments.ab import PairedComparison, PairResult, Runner

#: Separator of settings groups, as `weft.cli.app` passes "--".
GROUPS = "::"
_MOST_PAIRS = 1000
#: Largest number of pairs with --until if --pairs is not given.
_UNTIL_PAIRS = 20
#: Pairs from which on the interval of --until is finite.
_FEWEST_UNTIL = 3


def ab(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="A.toml B.toml [key=value ...] | CONFIG.toml [key=value ...] -- A's settings -- B's settings",
            help="Two configs, or one with two groups of settings; settings before the first -- are for both.",
            show_default=False,
        ),
    ],
    pairs: Annotated[
        int | None, typer.Option(help="Pairs of runs; with --until the largest number.", show_default="5; 20")
    ] = None,
    until: Annotated[
        float | None,
        typer.Option(
            help="Stop when the 95 % interval excludes 0, or lies within plus or minus this difference.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Metric that decides: eval.loss, eval.NAME, loss, tokens_per_s, step_s ...",
            show_default="eval.loss, or loss without evaluation",
        ),
    ] = None,
    best: Annotated[
        Literal["lowest", "highest"] | None,
        typer.Option(help="Better values of a metric of your own.", show_default=False),
    ] = None,
    at: Annotated[
        Literal["tokens", "steps", "time", "energy"], typer.Option(help="Amount that is equal for A and B.")
    ] = "tokens",
    aa: Annotated[bool, typer.Option("--aa", help="Compare A with itself under other seeds: the noise.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the comparison.", show_default="RUN.DIR/ab-NAME")
    ] = None,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Keep the checkpoints of finished runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two settings by pairs of runs that share seed, data order and initial weights.

    The same command continues a comparison that was interrupted.
    """
    from weft.experiments.ab import PairedComparison
    from weft.experiments.run_log import Measure

    a, b = read_configs(words, aa)
    measure = Measure.of(metric or default_metric(a, b), best)
    comparison = PairedComparison(a, b, measure, at, _num_pairs(pairs, until), until, other_seeds=aa)
    place = folder or Path(a.run.dir) / f"ab-{a.run.name}"
    interrupt_on_signals()
    try:
        _compare(comparison, place, keep_checkpoints, as_json)
    except KeyboardInterrupt as stopped:
        print_line(f"stopped. The same command continues the comparison in {place}.")
        raise typer.Exit(stopped.args[0] if stopped.args else 130) from None


def _compare(comparison: PairedComparison, folder: Path, keep_checkpoints: bool, as_json: bool) -> None:
    from weft.experiments.ab import Runner, estimate_of, is_decided, refuse_incomparable, tests, verdict, write_result
    from weft.train.folder import run_lock

    refuse_incomparable(comparison)
    results: list[PairResult] = []
    with run_lock(folder, comparison.a.run.mode):
        if differences := comparison.differences():
            for line in table([("setting", "A", "B"), *differences]):
                print_line(line)
        runner = Runner(comparison, folder, keep_checkpoints, print_line)
        for result in runner.results():
            results.append(result)
            if len(results) > 1:
                print_line(f"pair {len(results)}/{comparison.pairs}  {verdict(comparison, results)}")
                write_result(folder, comparison, results)
                if is_decided(comparison, estimate_of(comparison, results)):
                    break
        picture = _draw(runner, comparison, results)
    if as_json:
        print(json.dumps({**json.loads((folder / "ab.json").read_text()), "folder": str(folder)}, indent=1))
        return
    print("\n".join(_result_table(comparison, results)))
    print(verdict(comparison, results))
    print(tests(comparison, results))
    print(f"{picture}, {folder / 'ab.json'}", file=sys.stderr)


def read_configs(words: Sequence[str], aa: bool) -> tuple[RunConfig, RunConfig]:
    """Return the configs of A and B from a command's positional arguments.

    Raises:
        ConfigError: if the arguments are neither two configs nor one config with two groups of settings.
    """
    from weft.config.files import load_config

    groups: list[list[str]] = [[]]
    for word in words:
        if word == GROUPS:
            groups.append([])
        else:
            groups[-1].append(word)
    files = [word for word in groups[0] if "=" not in word]
    shared = [word for word in groups[0] if "=" in word]
    if aa and len(files) <= 1 and len(groups) == 1:
        path, overrides = split_words(groups[0])
        config = load_config(path, overrides).config
        return config, config
    if len(files) == 2 and len(groups) == 1 and not aa:
        a, b = ([file, *shared] for file in files)
    elif len(groups) == 3 and len(files) <= 1 and not aa:
        a, b = ([*groups[0], *group] for group in groups[1:])
    else:
        raise ConfigError(
            "weft ab: give two configs (weft ab A.toml B.toml), one config and two groups of settings (weft ab "
            "CONFIG.toml -- optimizer.lr=1e-3 -- optimizer.lr=2e-3), or one config and --aa."
        )
    loaded = [load_config(*split_words(side)).config for side in (a, b)]
    return loaded[0], loaded[1]


def default_metric(a: RunConfig, b: RunConfig) -> str:
    """Return "eval.loss" if both configs evaluate on held-out data, otherwise "loss"."""
    return "eval.loss" if all(one.data.eval or one.data.holdout > 0 for one in (a, b)) else "loss"


def _num_pairs(pairs: int | None, until: float | None) -> int:
    if until is not None and not (math.isfinite(until) and until > 0):
        raise ConfigError(f"--until {until:g}: it is a difference of the metric, above 0. Use e.g. --until 0.01.")
    number = pairs if pairs is not None else (_UNTIL_PAIRS if until is not None else 5)
    if not 2 <= number <= _MOST_PAIRS:
        raise ConfigError(f"--pairs {number}: an interval needs 2 to {_MOST_PAIRS} pairs. Use e.g. --pairs 5.")
    if until is not None and number < _FEWEST_UNTIL:
        raise ConfigError(f"--pairs {number}: --until needs at least {_FEWEST_UNTIL} pairs. Use e.g. --pairs 20.")
    return number


def _result_table(comparison: PairedComparison, results: Sequence[PairResult]) -> list[str]:
    rows: list[tuple[str, ...]] = [("pair", f"{comparison.measure.name} A", "B", "B - A", "s/step A", "B")]
    for number, one in enumerate(results, start=1):
        values = (*one.value, one.difference)
        rows.append((str(number), *(f"{value:.6g}" for value in values), *(f"{value:.4g}" for value in one.step_s)))
    return table(rows, right=(1, 2, 3, 4, 5))


def _draw(runner: Runner, comparison: PairedComparison, results: Sequence[PairResult]) -> Path:
    from weft.experiments.ab import estimate_of, verdict
    from weft.experiments.pictures import plot_pairs
    from weft.experiments.run_log import RunLog

    names = [[runner.run_name(pair, side) for side in ("a", "b")] for pair in range(len(results))]
    logs = [(RunLog.read(runner.folder / a), RunLog.read(runner.folder / b)) for a, b in names]
    measure = comparison.measure
    label = f"B - A, {measure.name}" + (f" ({measure.unit})" if measure.unit else "")
    differences = [one.difference for one in results]
    title, path = verdict(comparison, results).replace("; ", "\n"), runner.folder / "ab.png"
    return plot_pairs(logs, differences, estimate_of(comparison, results), label, comparison.axis, title, path)
