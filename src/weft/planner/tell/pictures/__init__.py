"""What the planner draws: schedules and bars, memory against speed, a step as a waterfall."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Bar",
    "Dot",
    "Drawing",
    "Polyline",
    "Rect",
    "draw_bars",
    "draw_schedule",
    "fits",
    "html_page",
    "memory_by_rank",
    "pareto",
    "waterfall",
]

if TYPE_CHECKING:
    from weft.planner.tell.pictures.answer_page import html_page
    from weft.planner.tell.pictures.canvas import Dot, Drawing, Polyline, Rect
    from weft.planner.tell.pictures.charts import memory_by_rank, pareto, waterfall
    from weft.planner.tell.pictures.timeline import Bar, draw_bars, draw_schedule, fits

__getattr__ = loads(
    __name__,
    {
        "Bar": ".timeline",
        "Dot": ".canvas",
        "Drawing": ".canvas",
        "Polyline": ".canvas",
        "Rect": ".canvas",
        "draw_bars": ".timeline",
        "draw_schedule": ".timeline",
        "fits": ".timeline",
        "html_page": ".answer_page",
        "memory_by_rank": ".charts",
        "pareto": ".charts",
        "waterfall": ".charts",
    },
)
