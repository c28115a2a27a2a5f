"""Lists the plans that tests try, derived from the plan rules, so that new legal plans are tested automatically.

`legal` lists every legal plan of N ranks. `covering` chooses few rows of a table that still contain all pairs. Nothing
here imports torch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from weft.config.legal_plans import legal_plans
from weft.config.plan import PLAN_FIELDS, Plan, plan_fields
from weft.config.rules.plan_rules import RULES
from weft.config.rules.rule import Facts, Rule
from weft.config.shapes.decoder_shape import DecoderSpec

#: Plan fields that divide the work among ranks. All others only affect the work of one rank.
LAYOUT_FIELDS = tuple(name for name, field in PLAN_FIELDS.items() if field.divides_work)

Row = Mapping[str, Hashable]


def values_tried(num_ranks: int, passes: Sequence[int] = (1, 4)) -> dict[str, Sequence[object]]:
    """Return the values of each field that tests try."""
    return {name: field.tried(num_ranks, passes) for name, field in PLAN_FIELDS.items()}


def legal(
    num_ranks: int,
    *,
    model: DecoderSpec | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    passes: Sequence[int] = (1, 4),
    rules: Sequence[Rule] = RULES,
    **only: Sequence[object],
) -> list[Plan]:
    """Return every legal plan of `num_ranks`, in a fixed order.

    Args:
        num_ranks: size of the world.
        model: shape of the model for the rules; None: rules about it are not applied.
        global_batch: sequences per step; None: rules about it are not applied.
        seq_len: tokens per sequence; None: rules about it are not applied.
        passes: numbers of microbatches to try.
        rules: the rules to apply.
        **only: values to try for single fields, instead of the default ones, such as zero=(3,).
    """
    facts = Facts(model=model, world_size=num_ranks, global_batch=global_batch, seq_len=seq_len)
    return list(legal_plans({**values_tried(num_ranks, passes), **only}, facts, rules))


def row_of(plan: Plan, **more: Hashable) -> dict[str, Hashable]:
    """Return a plan as a row for `covering`: its fields, its layout as one value, and the columns in `more`."""
    fields = {name: getattr(plan, name) for name in plan_fields()}
    return {**fields, "layout": layout_of(plan), **more}


def layout_of(plan: Plan) -> str:
    """Return the plan's fields that divide work among ranks, as text."""
    return Plan(**{name: getattr(plan, name) for name in LAYOUT_FIELDS}).format() or "one rank"


def pairs(columns: Sequence[str]) -> list[tuple[str, ...]]:
    return list(itertools.combinations(columns, 2))


#: Column groups for `covering`: all pairs of values of two fields occur, and every layout.
USUAL_GROUPS = (*pairs(plan_fields()), ("layout",))


def covering(
    rows: Sequence[Row], groups: Sequence[tuple[str, ...]] = USUAL_GROUPS, seed: int = 0, besides: Sequence[Row] = ()
) -> list[int]:
    """Choose few rows that contain, for each group of columns, all values that occur in `rows`; return indices.

    Greedy: the next row is the one with the most new values. The same rows and seed always give the same choice.

    Args:
        rows: values by column.
        groups: groups of columns. For a pair of columns, every pair of values in `rows` is covered.
        seed: decides among equal rows.
        besides: rows that are tried anyway, so that their values need not be covered again.
    """
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    numbers = _numbered([*(rows[index] for index in order), *besides], groups)
    numbers, tried = numbers[: len(rows)], numbers[len(rows) :]
    missing = np.zeros(max(numbers.max(initial=-1), tried.max(initial=-1)) + 1, dtype=bool)
    missing[numbers] = True
    missing[tried] = False
    chosen: list[int] = []
    while missing.any():
        best = int(missing[numbers].sum(axis=1).argmax())  # the first of equals
        chosen.append(order[best])
        missing[numbers[best]] = False
    return sorted(chosen)


def _numbered(rows: Sequence[Row], groups: Sequence[tuple[str, ...]]) -> npt.NDArray[np.int64]:
    """Return an integer for each row and group: equal integers are equal values, and groups share no integers."""
    columns: dict[str, npt.NDArray[np.int64]] = {}
    for name in {name for group in groups for name in group}:
        known: dict[Hashable, int] = {}
        columns[name] = np.array([known.setdefault(row[name], len(known)) for row in rows], dtype=np.int64)
    numbers = np.zeros((len(rows), len(groups)), dtype=np.int64)
    start = 0
    for place, group in enumerate(groups):
        mixed = np.zeros(len(rows), dtype=np.int64)
        for name in group:
            mixed = mixed * (int(columns[name].max(initial=0)) + 1) + columns[name]
        values, inverse = np.unique(mixed, return_inverse=True)
        numbers[:, place] = start + inverse
        start += len(values)
    return numbers


def sample(plans: Sequence[Plan], count: int, seed: int = 0) -> list[Plan]:
    """Return at most `count` of the plans, sampled with `seed`, in their original order."""
    if count >= len(plans):
        return list(plans)
    return [plans[index] for index in sorted(random.Random(seed).sample(range(len(plans)), count))]
