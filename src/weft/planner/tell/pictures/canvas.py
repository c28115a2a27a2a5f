"""Pictures as lists of shapes, and those as SVG text: enough for bars, curves and timelines, without a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

#: Colours that differ in lightness too, for those who see them otherwise and for print.
PALETTE = (
    "#2a6fbb", "#e09f3e", "#4c9a6a", "#d1495b", "#7a5195", "#58b5c9", "#9c755f", "#b8b84a", "#7f7f7f", "#f28ea8",
    "#2f4b7c", "#a05d2c", "#86bcb6", "#c0c0c0", "#d37295", "#3b7d4f",
)  # fmt: skip
INK, FAINT = "#222222", "#bbbbbb"


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle. title: shown where the pointer rests."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Polyline:
    """A polyline through points (x, y)."""

    points: tuple[tuple[float, float], ...]
    stroke: str = INK
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    fill: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text. anchor: "start", "middle" or "end" of the text lies at x."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "start"
    fill: str = INK


Shape = Rect | Polyline | Dot | Text


@dataclass(slots=True)
class Drawing:
    """Shapes on a white sheet; x goes right, y goes down."""

    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list[Shape])

    def add(self, *shapes: Shape) -> None:
        """Put shapes on top."""
        self.shapes.extend(shapes)

    def legend(self, names: Sequence[tuple[str, str]], x: float, y: float, width: float) -> float:
        """Draw names with their colours in lines; gives the y below them.

        Args:
            names: (name, colour).
            x: left edge.
            y: baseline of the first line.
            width: of a line.
        """
        left = x
        for name, colour in names:
            needed = 22 + 6.6 * len(name)
            if left + needed > x + width and left > x:
                left, y = x, y + 18
            self.add(Rect(left, y - 9, 11, 11, colour), Text(left + 15, y, name, 11))
            left += needed
        return y + 18

    def svg(self) -> str:
        """Return the picture as an SVG document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="sans-serif">'
        )
        sheet = f'<rect width="{self.width:g}" height="{self.height:g}" fill="#ffffff"/>'
        return "\n".join([head, sheet, *(_svg(shape) for shape in self.shapes), "</svg>"]) + "\n"


def _svg(shape: Shape) -> str:
    if isinstance(shape, Rect):
        body = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
        return _titled("rect", f'{body} fill="{shape.fill}"', shape.title)
    if isinstance(shape, Dot):
        body = f'cx="{shape.x:.2f}" cy="{shape.y:.2f}" r="{shape.radius:g}" fill="{shape.fill}"'
        return _titled("circle", body, shape.title)
    if isinstance(shape, Polyline):
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
        return f'<polyline points="{points}" fill="none" stroke="{shape.stroke}" stroke-width="{shape.width:g}"/>'
    place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}"'
    return f'<text {place} text-anchor="{shape.anchor}" fill="{shape.fill}">{escape(shape.text)}</text>'


def _titled(tag: str, body: str, title: str) -> str:
    return f"<{tag} {body}><title>{escape(title)}</title></{tag}>" if title else f"<{tag} {body}/>"
