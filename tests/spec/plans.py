"""Random plans for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.config.fields.memory_values import NamedShares, PolicyOrBudget
from weft.config.fields.plan_text import Counts
from weft.config.fields.plan_values import (
    AxisOrder,
    Integer,
    Kind,
    OneOf,
    ReshardPolicy,
    Switch,
    SyncEvery,
)
from weft.config.plan import PLAN_FIELDS, Plan

_budgets = st.builds("{}{}".format, st.integers(1, 999), st.sampled_from(["GiB", "MB", "kib"])) | st.builds(
    "{}%".format, st.integers(1, 99)
)
_shares = (
    st.just("")
    | st.integers(1, 10**6).map(lambda number: f":{number / 10**6:.6f}")
    | st.integers(1, 100).map(":{}%".format)
    | st.sampled_from([":1/0", ":0.5/25%/0"])
)


def _values(kind: Kind) -> st.SearchStrategy:
    """Return a strategy of values of a kind."""
    match kind:
        case Integer():
            return st.integers(kind.low, min(64, kind.high)) | st.integers(kind.low, kind.high)
        case Switch():
            return st.booleans()
        case ReshardPolicy():
            return st.sampled_from(kind.known) | st.integers(2, 999_999).map(f"{kind.known[0]}:{{}}".format)
        case OneOf():
            return st.sampled_from(kind.known)
        case PolicyOrBudget():
            lists = st.lists(st.sampled_from(kind.known), min_size=2, max_size=4).map("+".join)
            return st.sampled_from(kind.known) | _budgets | lists
        case Counts():
            return st.lists(st.integers(1, 99), max_size=8).map(tuple)
        case AxisOrder():
            return st.permutations(kind.axes).flatmap(
                lambda axes: st.integers(0, len(axes)).map(lambda count: tuple(axes[:count]))
            )
        case NamedShares():
            return st.dictionaries(st.sampled_from(kind.known), _shares).map(
                lambda found: tuple(name + share for name, share in found.items())
            )
        case SyncEvery():
            methods = st.builds("{}:{}".format, st.sampled_from(["average", "diloco"]), st.integers(1, 999_999))
            streamed = st.builds("{}/{}".format, methods, st.integers(1, 99)).filter(
                lambda text: int(text.partition("/")[2]) <= int(text.partition(":")[2].partition("/")[0])
            )
            return st.just("step") | methods | streamed
    raise TypeError(f"draw values of {type(kind).__name__} here")


plans = st.builds(Plan, **{name: _values(field.kind) for name, field in PLAN_FIELDS.items()})
