"""The files that `weft plan` writes: pictures and a config."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.console import say
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.planner.search import Answer, Candidate
    from weft.planner.tell.pictures import Drawing


def write_pareto(found: Answer[Candidate], path: Path) -> None:
    """Memory against speed, as .svg or .png."""
    from weft.planner.tell.pictures import pareto

    _write(path, _picture(pareto(found), path))


def write_waterfall(best: Candidate, path: Path) -> None:
    """The parts of the best plan's step."""
    from weft.planner.tell.pictures import waterfall

    _write(path, _picture(waterfall(best), path))


def write_memory(best: Candidate, path: Path) -> None:
    """The best plan's memory, rank by rank of its pipeline."""
    from weft.planner.search import memory_by_rank as bytes_by_rank
    from weft.planner.tell.pictures import memory_by_rank

    _write(path, _picture(memory_by_rank(best, bytes_by_rank(best)), path))


def write_page(found: Answer[Candidate], path: Path, hour_price: float | None) -> None:
    """The whole answer as one HTML page."""
    from weft.planner.tell.pictures import html_page

    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"html={path}: a page is an HTML file. Use {path.with_suffix('.html')}.")
    _write(path, html_page(found, hour_price).encode())


def write_schedule(best: Candidate, path: Path) -> None:
    """The best plan's pipeline schedule, as .svg, with the seconds that were estimated."""
    from weft.planner.search import drawn_schedule
    from weft.planner.tell.pictures import draw_schedule

    if path.suffix != ".svg":
        raise ConfigError(f"draw={path}: a schedule is drawn as SVG. Use {path.with_suffix('.svg')}.")
    _write(path, draw_schedule(*drawn_schedule(best)).encode())


def write_config(best: Candidate, path: Path) -> None:
    """A config that `weft train` runs with the best plan."""
    from weft.planner.tell import config_text

    if path.suffix != ".toml":
        raise ConfigError(f"out={path}: a config is a TOML file. Use {path.with_suffix('.toml')}.")
    text = config_text(best)
    _write(path, text.encode())
    for line in text.splitlines():
        if line.startswith("# fill in: "):
            say(line.removeprefix("# "))


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

    from weft.planner.tell.pictures import Dot, Polyline, Rect

    dots_per_inch = 100
    figure = Figure(figsize=(drawing.width / dots_per_inch, drawing.height / dots_per_inch), dpi=2 * dots_per_inch)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    for order, shape in enumerate(drawing.shapes):
        if isinstance(shape, Rect):
            place, size = (shape.x, shape.y), (shape.width, shape.height)
            axes.add_patch(Rectangle(place, *size, color=shape.fill, linewidth=0, zorder=order))
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
    say(f"wrote {path}.")
