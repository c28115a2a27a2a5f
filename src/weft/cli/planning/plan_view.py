"""Output of `weft plan`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from weft.cli.console import print_line
from weft.cli.planning.plan_compile import compiled_lines, compiled_table
from weft.errors import ConfigError
from weft.planner.report import tables as report
from weft.planner.report.energy_front import SortBy, energy_front
from weft.planner.report.explanation import explain, fit_words
from weft.planner.report.full_run import full_runs
from weft.planner.report.verdict import nearest_yes
from weft.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from weft.jax_engine.compiled import CompiledStep
    from weft.planner.mixed.answer import MixedAnswer
    from weft.planner.report.pictures import Drawing
    from weft.planner.report.scenario import Fit, Scenario
    from weft.planner.report.verdict import Comparison, WhyNot
    from weft.planner.search.candidate import Answer, Candidate
    from weft.planner.search.question import Question
    from weft.planner.space.enumerate import Refused


#: Exit code if no plan fits. It is also the exit code of a rank that runs out of memory.
NOTHING_FITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All results of one `weft plan` command.

    compiled: the step of the best plan, if it was compiled. mixed: the plan of a cluster of several kinds.
    """

    answer: Answer[Candidate]
    why_not: WhyNot | None = None
    comparison: Comparison | None = None
    scenarios: tuple[Scenario, ...] = ()
    sort: SortBy = "time"
    grid: float | None = None
    compiled: CompiledStep | None = None
    mixed: MixedAnswer | None = None

    @property
    def only_judges(self) -> bool:
        """True if the user requested an evaluation of given plans, not the best plan."""
        return self.why_not is not None or self.comparison is not None


# Text output of `weft plan`: the ranked table, and details of the best plan or of the plans named in options.

#: Text width without a terminal, so that lines in files are not wrapped.
_WIDE = 150


def console() -> Console:
    """Return where `weft plan` prints."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)


def assumed_words(question: Question) -> str:
    """Return the defaults that were filled in, as text for a heading."""
    return f" (assumed: {' '.join(question.assumed)})" if question.assumed else ""


def table_of(texts: Sequence[str], numbers: Sequence[str], last: str, *more: str) -> Table:
    """Return a table with columns of short texts, of numbers, of more short texts, and of text that may be folded."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for title in texts:
        table.add_column(title, no_wrap=True)
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    for title in more:
        table.add_column(title, no_wrap=True)
    table.add_column(last, overflow="fold")
    return table


def print_findings(found: Findings, *, top: int, reasons: bool, hour_price: float | None) -> None:
    """Print all results as text. top: number of plans to list. hour_price: dollars per device and hour, or None."""
    screen = console()
    _heading(screen, found.answer)
    if found.scenarios:  # requested variants are printed before the results of the unchanged query
        screen.print(_scenarios(found.answer, found.scenarios))
        screen.print()
    if found.answer.best is None:
        _nothing(screen, found.answer)
    elif not found.only_judges:
        screen.print(_ranking(found, top, hour_price))
        screen.print()
        if found.sort != "time":
            screen.print(_front(found))
            screen.print()
        screen.print(explain(found.answer.best, hour_price), markup=False, soft_wrap=True)
    if found.mixed is not None:
        screen.print("\n".join(["", *found.mixed.lines()]), markup=False, soft_wrap=True)
    if found.compiled is not None and found.answer.best is not None:
        lines = compiled_lines(found.answer.best, found.compiled)
        screen.print("\n".join(["", *lines]), markup=False, soft_wrap=True)
    if reasons:
        print_reasons(screen, found.answer.refused)
    for part in (found.why_not, found.comparison):
        if part is not None:
            screen.print()
            screen.print("\n".join(part.lines()), markup=False, soft_wrap=True)


def print_reasons(console: Console, refused: Sequence[Refused]) -> None:
    """Print the number of refused plans by reason, with an example each."""
    table = Table(box=None, pad_edge=False, header_style="bold", title="\nrefused", title_justify="left")
    table.add_column("plans", justify="right", no_wrap=True)
    table.add_column("reason", no_wrap=True)
    table.add_column("an example and its error", overflow="fold")
    for each in refused:
        table.add_row(f"{each.count:,}", each.name, f"{each.example}\n{each.message}")
    console.print(table)


def _heading(console: Console, answer: Answer[Candidate]) -> None:
    question = answer.question
    console.print(
        f"[bold]{question.model.name}[/], {format_count(question.job.shape.num_params)} parameters, on "
        f"[bold]{question.cluster}[/]: {question.work}{assumed_words(question)}"
    )
    kind = "plans" if question.built_only else "plans, including those that Weft does not run yet"
    console.print(
        f"{answer.num_plans:,} {kind}: {answer.num_plans - answer.num_estimated:,} break a rule, "
        f"{answer.num_estimated:,} estimated in {answer.seconds:.2f} s, {answer.num_fit:,} fit in memory",
        style="dim",
    )
    if answer.left_out:
        console.print(f"skipped: {'; '.join(answer.left_out)}", style="dim")


def _ranking(found: Findings, top: int, hour_price: float | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    answer, unit = found.answer, found.answer.question.unit
    energy = _energy_titles(found)
    for title in ("#", "step", f"{unit}/s", "MFU", "memory", f"$/B {unit}", *energy):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    table.add_column("plan (the best of each layout)", overflow="fold")
    for place, one in enumerate(answer.layouts(top), start=1):
        *figures, fits = _figures(one, hour_price)
        table.add_row(str(place), *figures, *_energy_figures(one, found), fits, str(one.plan))
    return table


def _energy_titles(found: Findings) -> list[str]:
    unit = found.answer.question.unit
    if found.sort == "time" and found.grid is None:
        return []
    return [f"kWh/B {unit}", *([] if found.grid is None else [f"kg CO2/B {unit}"])]


def _energy_figures(one: Candidate, found: Findings) -> list[str]:
    titles, kwh = _energy_titles(found), one.cost().energy_kwh
    if kwh is None:
        return ["-"] * len(titles)
    each = kwh * 1e9 / one.question.job.tokens
    return [f"{each:,.3g}", *([] if found.grid is None else [f"{each * found.grid / 1e3:,.3g}"])][: len(titles)]


def _front(found: Findings) -> Table:
    """Return the Pareto front of time against energy, as estimates under power caps."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.title = "time against energy, estimated, with a power cap of each device"
    for title in ("step", "power cap", *_energy_titles(found)):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    for one in energy_front(found.answer):
        cells = format_seconds(one.candidate.step_s), f"{one.watts:,.0f} W"
        table.add_row(*cells, *_energy_figures(one.candidate, found), str(one.candidate.plan))
    return table


def _figures(one: Candidate, hour_price: float | None) -> tuple[str, ...]:
    price = one.cost(hour_price).price
    tokens = one.question.job.tokens
    return (
        format_seconds(one.step_s),
        format_count(one.tokens_per_s),
        f"{one.mfu:.1%}",
        format_bytes(one.total_bytes),
        "-" if price is None else f"{price * 1e9 / tokens:,.0f}",
        fit_words(one.fits).removeprefix("fits ").strip("()"),
    )


def _nothing(console: Console, answer: Answer[Candidate]) -> None:
    question = answer.question
    if answer.num_estimated:
        console.print(f"\n[bold red]No plan fits[/] {question.model.name} on {question.cluster}.")
    else:
        console.print(f"\n[bold red]Every plan breaks a rule[/] for {question.model.name} on {question.cluster}:")
        for each in answer.refused[:3]:
            text = f"  {each.message}  ({each.count:,} plans, such as {each.example})"
            console.print(text, markup=False, soft_wrap=True)
    if answer.nearest is not None:
        one = answer.nearest
        console.print(
            f"The plan that needs the least memory: {one.plan}\n  {format_bytes(one.total_bytes)} on the fullest "
            f"rank, of {format_bytes(one.usable_bytes)}.",
            markup=False,
        )
    changes = nearest_yes(question)
    console.print("The nearest changes that fit:" if changes else "No small change helps.")
    for found in changes:
        best = found.answer.best
        if best is not None:
            figures = f"{format_seconds(best.step_s)} a step, {format_bytes(best.total_bytes)}"
            console.print(f"  {found.text:<28} {figures}  {best.plan}", markup=False, soft_wrap=True)


def _scenarios(answer: Answer[Candidate], scenarios: tuple[Scenario, ...]) -> Table:
    base, unit = answer.best, answer.question.unit
    table = table_of(
        ("what if",), ("step", f"{unit}/s", "speed", "MFU", "memory", f"$/B {unit}", f"kWh/B {unit}"), "best plan"
    )
    rows = [(each.text, each.answer.best) for each in scenarios]
    for text, best in rows if base is None else [("(unchanged)", base), *rows]:
        if best is None:
            table.add_row(text, *"-------", "no plan fits")
            continue
        step, tokens, mfu, memory, price, _ = _figures(best, None)
        speed = "" if base is None else f"{best.tokens_per_s / base.tokens_per_s:.2f}x"
        kwh = best.cost().energy_kwh
        energy = "-" if kwh is None else f"{kwh * 1e9 / best.question.job.tokens:,.3g}"
        table.add_row(text, step, tokens, speed, mfu, memory, price, energy, str(best.plan))
    return table


# Output of `weft plan --run`: a full training run on each cluster, the cheapest first, and details of the first.


def print_runs(
    model: Any, clusters: str, text: str, price: float | None, settings: dict[str, Any], *, as_json: bool,
    sort: SortBy = "time",
) -> bool:  # fmt: skip
    """Print the best full training run on each cluster. Return True if the model fits on any of them."""
    found = full_runs(model, clusters, text, price, sort, **settings)
    if as_json:
        rows = [
            {"cluster": str(reply.question.cluster), "run": None if run is None else run.table()}
            | {"plan": None if reply.best is None else report.candidate_table(reply.best, price)}
            for reply, run in found
        ]
        print(json.dumps(rows, indent=2))
        return any(run is not None for _, run in found)
    screen, table = console(), table_of(("on",), ("tokens", "days", "dollars", "goodput", "step"), "best plan")
    for reply, run in found:
        cluster = str(reply.question.cluster)
        if run is None:
            table.add_row(cluster, *"-----", "no plan fits")
            continue
        money = "-" if run.dollars is None else f"{run.dollars:,.0f}"
        figures = format_count(run.tokens), f"{run.days:,.3g}", money, f"{run.goodput:.1%}"
        table.add_row(cluster, *figures, format_seconds(run.candidate.step_s), str(run.candidate.plan))
    first = found[0][0].question
    params = format_count(first.job.shape.num_params)
    screen.print(f"[bold]{first.model.name}[/], {params} parameters{assumed_words(first)}")
    screen.print(table)
    best = found[0][1]
    if best is not None:
        screen.print()
        screen.print("\n".join(best.lines()), markup=False, soft_wrap=True)
    return best is not None


# Output of `weft plan --tune all`: fine-tuning methods by machine, with the best plan of each that fits.


def print_fits(found: Sequence[Fit], *, as_json: bool) -> None:
    """Print the methods that fit on machines, as a table or as JSON."""
    if as_json:
        rows = [
            {
                "cluster": str(one.question.cluster),
                "tune": one.tune,
                "num_trained": _num_trained(one),
                "fits": one.answer.best is not None,
                "plan": None if one.smallest is None else report.candidate_table(one.smallest),
            }
            for one in found
        ]
        print(json.dumps(rows, indent=1))
        return
    screen, first = console(), found[0].question
    params = format_count(first.job.shape.num_params)
    screen.print(f"[bold]{first.model.name}[/], {params} parameters: {first.work}{assumed_words(first)}")
    table = table_of(("on", "tune"), ("trained", "memory", "of", "step", f"{first.unit}/s"), "best plan")
    for one in found:
        cells, plan = [str(one.question.cluster), one.tune, format_count(_num_trained(one))], one.smallest
        if plan is None:
            table.add_row(*cells, *"----", "no plan keeps all rules")
            continue
        cells += [format_bytes(plan.total_bytes), format_bytes(plan.usable_bytes)]
        if one.answer.best is None:
            table.add_row(*cells, "-", "-", f"does not fit; needs least: {plan.plan}")
        else:
            table.add_row(*cells, format_seconds(plan.step_s), format_count(plan.tokens_per_s), str(plan.plan))
    screen.print(table)


def _num_trained(one: Fit) -> float:
    job = one.question.job
    return job.shape.num_params if job.adapter is None else job.shape.layers * job.adapter.params


# `weft plan --json`: all results, for programs.


def print_json(found: Findings, top: int, hour_price: float | None) -> None:
    """Print one JSON object on standard output."""
    table = report.answer_table(found.answer, top, hour_price)
    table["sort"], table["grid_g_per_kwh"] = found.sort, found.grid
    if found.sort != "time":
        table["energy_front"] = [
            {"device_watts": one.watts, "step_energy_kwh": one.kwh, "step_s": one.candidate.step_s,
             "plan": str(one.candidate.plan)}
            for one in energy_front(found.answer)
        ]  # fmt: skip
    if found.mixed is not None:
        table["mixed"] = report.mixed_table(found.mixed)
    if found.compiled is not None and found.answer.best is not None:
        table["compiled"] = compiled_table(found.answer.best, found.compiled)
    if found.answer.best is None:
        table["nearest_changes"] = [report.scenario_table(each) for each in nearest_yes(found.answer.question)]
    if found.why_not is not None:
        table["why_not"] = report.why_not_table(found.why_not)
    if found.comparison is not None:
        table["compare"] = report.comparison_table(found.comparison)
    if found.scenarios:
        table["what_if"] = [report.scenario_table(each) for each in found.scenarios]
    typer.echo(json.dumps(table, indent=2))


# Files that `weft plan` writes: charts and a config.


def write_files(found: Findings, hour_price: float | None, **paths: Path | None) -> None:
    """Write the requested files: charts (draw, pareto, waterfall, memory), a page (html) and a config (out).

    Raises:
        ConfigError: for a file of another type, or one that cannot be written, or if there is no plan to show.
    """
    for name, path in paths.items():
        best = found.answer.best
        if path is None:
            continue
        if best is None and name != "pareto":
            rule = "no plan fits, so there is nothing to write"
            raise ConfigError(f"{path}: {rule}. Leave it out to see what would fit.")
        if name == "out" and best is not None:
            _write_config(best, path)
            continue
        from weft.planner.report import pictures
        from weft.planner.search.pipeline_clock import memory_by_rank, timed_schedule

        if name == "html":
            if path.suffix not in (".html", ".htm"):
                raise ConfigError(f"html={path}: a page is an HTML file. Use {path.with_suffix('.html')}.")
            _write(path, pictures.html_page(found.answer, hour_price).encode())
        elif best is None or name == "pareto":
            _write(path, _picture(pictures.pareto(found.answer), path))
        elif name == "draw":
            _write(path, _picture(pictures.draw_schedule(*timed_schedule(best)), path))
        elif name == "waterfall":
            _write(path, _picture(pictures.waterfall(best), path))
        else:
            _write(path, _picture(pictures.memory_by_rank(best, memory_by_rank(best)), path))


def _write_config(best: Candidate, path: Path) -> None:
    from weft.planner.report.write_config import config_text

    if path.suffix != ".toml":
        raise ConfigError(f"out={path}: a config is a TOML file. Use {path.with_suffix('.toml')}.")
    text = config_text(best)
    _write(path, text.encode())
    for line in text.splitlines():
        if line.startswith("# fill in: "):
            print_line(line.removeprefix("# "))


def _picture(drawing: Drawing, path: Path) -> bytes:
    if path.suffix == ".svg":
        return drawing.svg().encode()
    if path.suffix == ".png":
        return _png(drawing)
    raise ConfigError(f"{path}: pictures are .svg or .png files. Use {path.with_suffix('.svg')}.")


def _png(drawing: Drawing) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle, Rectangle

    from weft.planner.report.pictures import Dot, Polyline, Rect

    dots_per_inch = 100
    figure = Figure(figsize=(drawing.width / dots_per_inch, drawing.height / dots_per_inch), dpi=2 * dots_per_inch)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    for order, shape in enumerate(drawing.shapes):
        if isinstance(shape, Rect):
            place, size = (shape.x, shape.y), (shape.width, shape.height)
            axes.add_patch(Rectangle(place, *size, color=shape.fill, linewidth=0, zorder=order))
            middle = (shape.x + shape.width / 2, shape.y + shape.height / 2)
            axes.text(*middle, shape.label, fontsize=12 * 0.72, ha="center", va="center", zorder=order)
        elif isinstance(shape, Dot):
            axes.add_patch(Circle((shape.x, shape.y), shape.radius, color=shape.fill, linewidth=0, zorder=order))
        elif isinstance(shape, Polyline):
            xs, ys = zip(*shape.points, strict=True) if shape.points else ((), ())
            axes.plot(xs, ys, color=shape.stroke, linewidth=shape.width * 0.72, zorder=order)
        else:
            side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            size = shape.size * 0.72
            axes.text(
                shape.x, shape.y, shape.text, fontsize=size, ha=side, va="baseline", color=shape.fill, zorder=order
            )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be written ({error.strerror}). Use another path.") from error
    print_line(f"wrote {path}.")
