"""The report of a sweep: table, importance of the settings, curves, and the best config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from weft.experiments.sweep import SweepResult, SweepTrial, best_config, import_optuna, quiet
from weft.files import replace_text
from weft.units import counted, format_seconds

#: Trials that importance needs.
_FEWEST = 6


def importance(result: SweepResult) -> dict[str, float]:
    """Return each setting's share of the differences at the first rung (PED-ANOVA, arXiv 2304.10255), largest first.

    All trials took part in the first rung, so they are comparable. Empty with fewer than six results, or one setting.
    """
    optuna, rung = import_optuna(), result.config.rungs[0]
    done = [trial for trial in result.trials if rung in trial.curve]
    keys = [one.key for one in result.config.parameters]
    if len(done) < _FEWEST or len(keys) < 2:
        return {}
    with quiet():
        study = optuna.create_study(direction="minimize" if result.config.goal == "lowest" else "maximize")
        kinds, create = optuna.distributions, optuna.trial.create_trial
        distributions: dict[str, Any] = {}
        for one in result.config.parameters:
            if one.choices:
                distributions[one.key] = kinds.CategoricalDistribution([str(value) for value in one.choices])
            else:
                distributions[one.key] = kinds.FloatDistribution(float(one.low), float(one.high), log=one.log)
        for trial in done:
            params = {
                p.key: str(trial.values[p.key]) if p.choices else trial.values[p.key] for p in result.config.parameters
            }
            study.add_trial(create(value=trial.curve[rung], params=params, distributions=distributions))
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def rows_of(result: SweepResult, most: int | None = None) -> list[tuple[str, ...]]:
    """Return a table of the trials, best first, with its header."""
    keys = [one.key for one in result.config.parameters]
    rows = [("trial", result.config.metric, "step", *keys, "state")]
    for trial in result.ranked()[:most]:
        value = f"{trial.value:.5g}" if trial.curve else "-"
        values = (f"{one:.5g}" if isinstance(one, float) else str(one) for one in (trial.values[key] for key in keys))
        rows.append((f"{trial.number:04d}", value, str(trial.step), *values, trial.state))
    return rows


def summary(result: SweepResult) -> list[str]:
    """Return sentences about the best trial and the cost of the sweep."""
    config, best = result.config, result.best
    full = config.steps * len(result.trials)
    lines = []
    if best is not None:
        settings = " ".join(one.override(best.values[one.key]) for one in config.parameters)
        lines.append(
            f"Best: trial {best.number:04d} with {config.metric} {best.value:.5g} at step {best.step}: {settings}"
        )
    seconds = sum(trial.seconds for trial in result.trials)
    lines.append(
        f"{counted(len(result.trials), 'trial')}: {result.num_steps} steps, {result.num_steps / full:.0%} of all in "
        f"full; {format_seconds(seconds)} of training."
    )
    failed = [trial for trial in result.trials if trial.state == "failed"]
    if failed:
        lines.append(f"{counted(len(failed), 'trial')} failed. Trial {failed[0].number:04d}: {failed[0].reason}")
    if result.over_budget:
        lines.append(f"The sweep ended early. {result.over_budget}.")
    return lines


def write_report(result: SweepResult) -> None:
    """Write `report.md`, `report.png` and `best.toml` into the sweep's folder."""
    shares = importance(result)
    lines = [f"# Sweep {result.folder.name}", *summary(result), ""]
    header, *rows = rows_of(result)
    lines += [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if shares:
        lines += ["", "## Importance", f"Share of the differences at step {result.config.rungs[0]} (PED-ANOVA).", ""]
        lines += ["| setting | share |", "|---|---|", *(f"| `{key}` | {share:.0%} |" for key, share in shares.items())]
    if result.best is not None:
        lines += ["", "## Curves", "![curves](report.png)"]
        draw(result, shares, result.folder / "report.png")
    text = best_config(result)
    if text is not None:
        replace_text(result.folder / "best.toml", text)
        lines += ["", "## Best config", "```toml", text.strip(), "```", "", "`weft train best.toml` trains it again."]
    replace_text(result.folder / "report.md", "\n".join(lines) + "\n")


def draw(result: SweepResult, shares: dict[str, float], path: Path) -> None:
    """Draw the trials' curves, and the metric over the most important setting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    best, metric = result.best, result.config.metric
    for trial in result.trials:
        if trial.curve and trial is not best:
            _curve(left, trial, color="#9aa3ad", linewidth=1)
    if best is not None:
        _curve(left, best, color="#1a7f37", linewidth=2.5, label=f"trial {best.number:04d}, the best")
        left.legend(frameon=False)
    left.set(xlabel="optimizer step", ylabel=metric)
    key = next(iter(shares), result.config.parameters[0].key)
    parameter = next(one for one in result.config.parameters if one.key == key)
    rung = result.config.rungs[0]
    for trial in (one for one in result.trials if rung in one.curve):
        value = trial.values[key]
        colour = "#1a7f37" if trial is best else "#5b6470"
        right.scatter(str(value) if parameter.choices else value, trial.curve[rung], color=colour, s=36)
    if parameter.log:
        right.set_xscale("log")
    share = f" ({shares[key]:.0%} of the differences)" if key in shares else ""
    right.set(xlabel=f"{key}{share}", ylabel=f"{metric} at step {rung}")
    for axis in (left, right):
        axis.grid(visible=True, alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(draft, format="png")
    os.replace(draft, path)


def _curve(axis: Any, trial: SweepTrial, **style: Any) -> None:
    steps = sorted(trial.curve)
    axis.plot(steps, [trial.curve[step] for step in steps], marker="o", markersize=3.5, **style)
