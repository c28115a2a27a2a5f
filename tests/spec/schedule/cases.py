"""Hypothesis strategy of schedules with supported sizes."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.config.pipeline_schedule import Schedule, build_schedule
from weft.config.plan import SCHEDULES


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = SCHEDULES) -> Schedule:
    name = draw(st.sampled_from(names))
    num_ranks = draw(st.integers(2, 7))
    virtual = draw(st.integers(2, 4)) if "interleaved" in name else 2 if name.endswith("_v") else 1
    if "interleaved" in name:
        num_microbatches = num_ranks * draw(st.integers(1, 4))
    else:
        least = 2 * num_ranks if name == "dualpipe_v" else 1
        num_microbatches = draw(st.integers(least, least + 14))
    return build_schedule(name, num_ranks, num_microbatches, virtual)
