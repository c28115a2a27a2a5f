"""Random plans for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.spec.context import CP_MODES
from weft.spec.plan import AXES, OFFLOADS, PRECISIONS, RECOMPUTES, REDUCES, RESHARDS, SCHEDULES, Plan

_sizes = st.integers(1, 64) | st.integers(1, 999_999_999)
_budgets = st.builds("{}{}".format, st.integers(1, 999), st.sampled_from(["GiB", "MB", "kib"])) | st.builds(
    "{}%".format, st.integers(1, 99)
)

_shares = st.integers(1, 10**6).map(lambda number: f":{number / 10**6:.6f}") | st.integers(1, 100).map(":{}%".format)
_offloads = st.dictionaries(st.sampled_from(OFFLOADS), st.just("") | _shares).map(
    lambda found: tuple(name + share for name, share in found.items())
)

plans = st.builds(
    Plan,
    pp=_sizes,
    dp_replicate=_sizes,
    dp_shard=_sizes,
    cp=_sizes,
    tp=_sizes,
    ep=_sizes,
    order=st.permutations(AXES).flatmap(lambda axes: st.integers(0, 5).map(lambda count: tuple(axes[:count]))),
    zero=st.integers(0, 3),
    sp=st.booleans(),
    cp_mode=st.sampled_from(CP_MODES),
    schedule=st.sampled_from(SCHEDULES),
    reshard=st.sampled_from(RESHARDS),
    microbatches=_sizes,
    virtual_stages=_sizes,
    split=st.lists(st.integers(1, 99), max_size=8).map(tuple),
    accumulation=_sizes,
    precision=st.sampled_from(PRECISIONS),
    reduce=st.sampled_from(REDUCES),
    recompute=st.sampled_from(RECOMPUTES) | _budgets,
    offload=_offloads,
    compile=st.booleans(),
)
