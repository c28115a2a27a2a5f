"""Search space of plans: values of each field, and every combination of them that the rules allow.

All layers and stages of a plan are treated the same. The space is built in this order: meshes, numbers of microbatches,
schedules, flags (all other fields). A rule prunes as soon as the fields that it reads are assigned. A partial plan that
is pruned counts as all full plans that it represents. The values of flags depend only on which axes are in use. So a
part of the space is a table of meshes times a table of flags, and full plans are created only when they are read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.config import partitioning as shares
from weft.config.cluster import ClusterSpec
from weft.config.fields.layout import common_divisors
from weft.config.fields.plan_values import SearchFacts
from weft.config.plan import AXES, PLAN_FIELDS, Plan
from weft.config.rules.rule import Facts, Rule
from weft.planner.space.columns import Columns, Job, encoded
from weft.planner.space.partial import BROKEN, Crossed, Mask, PartialPlans, RuleReader, as_plan, broken, crossed

Choices = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Values that each field may have. Axes and numbers of microbatches have all divisors.

    Attributes:
        choices: values of each searched field. If a field is searched with others (`members`), its values are tuples.
        splits: how data-parallel ranks are divided into replicas and shards: "all" divisors, or "few", which follow the
            machine's domains.
        experts: True if the model is a mixture of experts.
        fixed: plan fields that the user fixed.
        left_out: descriptions of removed values.
    """

    choices: Choices
    splits: str = "all"
    experts: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left_out: tuple[str, ...] = ()

    @classmethod
    def full(cls, job: Job, cluster: ClusterSpec, fixed: Mapping[str, Any] | None = None) -> Space:
        """Return the full space for a job on a cluster."""
        facts, given = search_facts(job, cluster), dict(fixed or {})
        choices = {
            name: _decided(name, tuple(each.searched(facts)), given)
            for name, each in PLAN_FIELDS.items()
            if each.searched
        }
        return cls(choices=choices, experts=bool(job.shape.num_experts), fixed=given)

    def narrower(self) -> Space | None:
        """Return the next smaller space, or None if nothing can be removed.

        Values that are rarely among the best are removed first.
        """
        for words, changes in _NARROWER:
            if words not in self.left_out:
                return replace(self, **changes(self), left_out=(*self.left_out, words))
        return None

    def of_last_meshes(self) -> Space | None:
        """Return this space with `splits` "few", and the schedules of the first narrower space with few splits.

        Return None if this space has few splits already.
        """
        narrow: Space | None = self
        while narrow is not None and narrow.splits == "all":
            narrow = narrow.narrower()
        if narrow is None or narrow is self:
            return None
        kept = {name: narrow.choices[name] for name in narrow.choices if PLAN_FIELDS[name].needs == ("pp",)}
        return replace(self, splits=narrow.splits, choices={**self.choices, **kept})


def search_facts(job: Job, cluster: ClusterSpec) -> SearchFacts:
    """Return the properties of a job and a cluster that decide which values of plan fields are searched."""
    has = (name for name in ("bf16", "fp16") if cluster.device.peak_flops(name) is not None)
    return SearchFacts(layers=job.shape.layers, half_formats=tuple(has), flash=job.stack.flash)


@functools.cache
def members(name: str) -> tuple[str, ...]:
    """Return the fields that are searched together with a field, including itself."""
    return (name, *(other for other, each in PLAN_FIELDS.items() if each.searched_with == name))


def as_values(name: str, chosen: Any) -> dict[str, Any]:
    """Return a choice of a searched field as values by field name."""
    names = members(name)
    return dict(zip(names, chosen, strict=True)) if len(names) > 1 else {name: chosen}


def default_choice(name: str) -> Any:
    """Return the default of a searched field, as one of its choices."""
    defaults: tuple[Any, ...] = tuple(PLAN_FIELDS[member].default for member in members(name))
    return defaults if len(defaults) > 1 else next(iter(defaults))


def _decided(name: str, choices: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the choices that match all fixed values, or else one choice of the fixed values and other defaults."""
    kept = tuple(
        one for one in choices
        if all(given.get(member, value) == value for member, value in as_values(name, one).items())
    )  # fmt: skip
    if kept:
        return kept
    values = {**as_values(name, default_choice(name)), **{key: given[key] for key in members(name) if key in given}}
    return (tuple(values.values()) if len(values) > 1 else values[name],)


def _without(name: str, *gone: Any) -> Callable[[Space], dict[str, Any]]:
    """Return a function that removes some values of a field, but never all of them."""
    return _plan_filter(name, lambda value: value not in gone)


def _plan_filter(name: str, keeps: Callable[[Any], bool]) -> Callable[[Space], dict[str, Any]]:
    def change(space: Space) -> dict[str, Any]:
        kept = tuple(value for value in space.choices[name] if keeps(value))
        return {"choices": {**space.choices, name: kept or space.choices[name]}}

    return change


def _first(name: str) -> Callable[[Space], dict[str, Any]]:
    return lambda space: {"choices": {**space.choices, name: space.choices[name][:1]}}


#: Values that are removed, in this order, from a space that is too large for a full search. Refinement tries them
#: again.
_NARROWER: tuple[tuple[str, Callable[[Space], dict[str, Any]]], ...] = (
    ("fp32 (half precision is faster)", _first("precision")),
    ("sp=off (sp=on needs less memory)", _without("sp", False)),
    ("schedule=gpipe", _without("schedule", ("gpipe", 1))),
    ("virtual_stages other than 1, 2, 4 and 8", _plan_filter("schedule", lambda pair: pair[1] in (1, 2, 4, 8))),
    ("splits of data parallelism inside a node", lambda space: {"splits": "few"}),
    ("offloads of activations", _plan_filter("offload", lambda names: "activations" not in names)),
    ("reshard=after_step", _without("zero", (3, "after_step"))),
    ("compile=off (compile=on is faster)", _without("compile", False)),
    ("cp by gather and ulysses", _first("cp_mode")),
    ("offload of parameters", _without("offload", ("params",))),
    ("zero=2", _without("zero", (2, "after_forward"))),
    ("offload", _without("offload", ("optimizer",))),
    ("recompute=selective", _without("recompute", "selective")),
)


# Every plan of a space as columns, and the reason for each plan that a rule rejects.

#: Fields that are searched only with a pipeline: each mesh with a pipeline is combined with their values.
_PIPED = tuple(name for name, each in PLAN_FIELDS.items() if each.searched and each.needs == ("pp",))
#: Fields that are assigned last: their values depend only on which axes are in use.
_FLAGS = tuple(
    name
    for name, each in PLAN_FIELDS.items()
    if each.columns and name not in (*AXES, "ep", *_PIPED) and not each.searched_with
)
#: Number of tokens per microbatch and rank above which no device gets faster.
MOST_TOKENS = 2**18

Counts = NDArray[np.int64]
Made = TypeVar("Made")


@dataclass(slots=True)
class Refused:
    """Number of plans that one rule rejects, an example, and the rule's message for it."""

    name: str
    count: int
    example: Plan
    message: str


@dataclass(slots=True)
class Tally:
    """Rejected plans by rule, and a cache of tables, which the spaces of one job share."""

    facts: Facts
    refused: dict[str, Refused] = field(default_factory=dict[str, Refused])
    reader: RuleReader = field(init=False)
    made: dict[tuple[Any, ...], tuple[Any, Any]] = field(default_factory=dict[tuple[Any, ...], tuple[Any, Any]])

    def __post_init__(self) -> None:
        self.reader = RuleReader(self.facts)

    def add(self, rule: Rule, count: int, values: Mapping[str, Any]) -> None:
        """Count plans that a rule rejects. The first call for a rule sets its example, from the values of one plan."""
        known = self.refused.get(rule.name)
        if known is None:
            plan = as_plan(values)
            violation = rule.check(plan, self.facts)
            message = violation.message if violation else rule.reason
            self.refused[rule.name] = Refused(rule.name, count, plan, message)
        else:
            known.count += count

    def prune(
        self, rules: list[Rule], table: PartialPlans, weights: Counts, rest: Mapping[str, Any] | None = None
    ) -> tuple[PartialPlans, Counts, list[Rule]]:
        """Remove and count the plans that a rule rejects. Return the remaining table, its weights, and undecided rules.

        Args:
            weights: number of full plans that each row represents.
            rest: values of fields that are not in the table, for the example of a rejected plan.
        """

        def judged() -> tuple[list[tuple[Rule, Mask]], list[Rule], Mask, PartialPlans]:
            found, still_open = broken(rules, table, self.reader)
            alive = np.ones(len(table), dtype=bool)
            for _, mask in found:
                alive &= ~mask
            return found, still_open, alive, table[alive]

        found, still_open, alive, left = self.once("judged", (table, *(rule.name for rule in rules)), judged)
        for rule, mask in found:
            self.add(rule, int(weights[mask].sum()), {**(rest or {}), **table.row(int(np.argmax(mask)))})
        return left, weights[alive], still_open

    def once(self, name: str, of: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        """Return the result of `make`, cached by `name` and `of`. Tables in `of` are compared by identity."""
        key = (name, *(id(each) if isinstance(each, PartialPlans) else each for each in of))
        if key not in self.made:
            self.made[key] = of, make()  # the tables are kept, so that their ids are not reused
        return self.made[key][1]


@dataclass(frozen=True, slots=True)
class PlanGrid:
    """Part of the space: every row of `meshes` with every row of `flags`, except pairs that open rules reject."""

    meshes: PartialPlans
    flags: PartialPlans
    open_rules: tuple[tuple[Rule, Crossed], ...]

    @property
    def num_rows(self) -> int:
        """Number of plans, including those that `open_rules` reject."""
        return len(self.meshes) * len(self.flags)

    def num_legal(self) -> int:
        """Return the number of plans that no rule rejects."""
        step = max(1, 2**18 // len(self.flags))
        starts = range(0, len(self.meshes), step) if self.open_rules else ()
        refused = 0
        for start in starts:
            rows = slice(start, min(start + step, len(self.meshes)))
            refused += int(np.logical_or.reduce([found.rows(rows) for _, found in self.open_rules]).sum())
        return self.num_rows - refused

    def chunks(self, most_rows: int, tally: Tally, job: Job) -> Iterator[Columns]:
        """Yield the plans that the rules allow, in chunks, and count the others in `tally`.

        A chunk has at most `most_rows` plans, or the plans of one mesh.
        """
        left, right = _columns(self.meshes), _columns(self.flags)
        step = max(1, most_rows // len(self.flags))
        for start in range(0, len(self.meshes), step):
            rows = slice(start, min(start + step, len(self.meshes)))
            alive = self._alive(rows, tally)
            mesh, flag = np.nonzero(alive)
            if len(mesh):
                values = {name: _taken(array[rows], mesh) for name, array in left.items()}
                values |= {name: _taken(array, flag) for name, array in right.items()}
                found = Columns.make(len(mesh), **values).with_recompute_share(job.shape.layers)
                yield found.with_largest_share(job)

    def _alive(self, rows: slice, tally: Tally) -> Mask:
        alive = np.ones((rows.stop - rows.start, len(self.flags)), dtype=bool)
        for rule, found in self.open_rules:
            refused = found.rows(rows) & alive
            count = int(refused.sum())
            if count:
                mesh, flag = divmod(int(np.argmax(refused)), len(self.flags))
                tally.add(rule, count, {**self.meshes.row(rows.start + mesh), **self.flags.row(flag)})
                alive &= ~refused
        return alive


def enumerate_space(space: Space, job: Job, cluster: ClusterSpec, rules: list[Rule], tally: Tally) -> list[PlanGrid]:
    """Return the parts of a space for a job on all devices of a cluster. Count rejected plans in `tally`."""
    meshes = tally.once("meshes", (space.splits,), lambda: _meshes(space, job, cluster))
    flags = {kind: _flags(space, kind, tally) for kind in _KINDS}
    num_piped = math.prod(len(space.choices[name]) for name in _PIPED)
    sizes = np.array([len(flags[kind]) for kind in _KINDS], dtype=np.int64)
    batches = tally.once(
        "batches", (meshes,), lambda: {dp: _batches(space, job, dp) for dp in meshes.levels["dp_size"]}
    )
    piped = meshes.values("pp") > 1
    num_batches = np.array([len(batches[dp]) for dp in meshes.levels["dp_size"]])[meshes.codes["dp_size"]]
    weights = sizes[_kind_of(meshes)] * np.where(piped, num_piped, 1) * num_batches
    meshes, _, still_open = tally.prune(rules, meshes, weights)
    meshes = tally.once("passes", (meshes,), lambda: _with_batches(meshes, batches, job, space))
    weights = sizes[_kind_of(meshes)] * np.where(meshes.values("pp") > 1, num_piped, 1)
    meshes, _, still_open = tally.prune(still_open, meshes, weights)
    schedules = tuple(space.choices[name] for name in _PIPED)
    meshes = tally.once("schedules", (meshes, schedules), lambda: _with_piped(meshes, space))
    meshes, weights, still_open = tally.prune(still_open, meshes, sizes[_kind_of(meshes)])
    kinds = _kind_of(meshes)
    of_kinds = tally.once("kinds", (meshes,), lambda: [meshes[kinds == index] for index in range(len(_KINDS))])
    blocks = [_block(some, flags[kind], still_open, tally) for some, kind in zip(of_kinds, _KINDS, strict=True)]
    return [block for block in blocks if block.num_rows]


#: Axes whose use decides which flags are searched, and every subset of them. Flags that need pp are not searched.
_DECISIVE = tuple(axis for axis in AXES if axis != "pp" and any(axis in PLAN_FIELDS[name].needs for name in _FLAGS))
_KINDS = [
    frozenset(itertools.compress(_DECISIVE, used)) for used in itertools.product((False, True), repeat=len(_DECISIVE))
]


def _kind_of(meshes: PartialPlans) -> Counts:
    place = np.zeros(len(meshes), dtype=np.int64)
    for axis in _DECISIVE:
        place = place * 2 + (meshes.values(axis) > 1)
    return place


def _meshes(space: Space, job: Job, cluster: ClusterSpec) -> PartialPlans:
    """Return every combination of axis sizes whose product is the number of devices, with every value of ep."""
    rest = np.array([cluster.num_devices], dtype=np.int64)
    divisors = np.array(common_divisors(cluster.num_devices), dtype=np.int64)
    found: dict[str, Counts] = {}
    for axis in ("tp", "cp", "pp", "dp_shard"):
        sizes = np.array([space.fixed[axis]]) if axis in space.fixed else divisors
        fits = rest[:, None] % sizes[None, :] == 0
        if axis == "dp_shard" and space.splits == "few" and axis not in space.fixed:
            fits &= _few_splits(rest, found["tp"] * found["cp"], sizes, cluster)
        rows, chosen = np.nonzero(fits)
        found = {name: values[rows] for name, values in found.items()} | {axis: sizes[chosen]}
        rest = rest[rows] // sizes[chosen]
    found["dp_replicate"] = rest
    if "dp_replicate" in space.fixed:
        kept = rest == space.fixed["dp_replicate"]
        found = {name: values[kept] for name, values in found.items()}
    if not job.shape.num_experts or "ep" in space.fixed:
        found["ep"] = np.full(len(found["tp"]), space.fixed.get("ep", 1))
    else:  # expert-parallel sizes divide the numbers of experts and of ranks
        sizes = np.array(common_divisors(job.shape.num_experts))
        rows, chosen = np.nonzero((found["dp_shard"] * found["cp"] * found["tp"])[:, None] % sizes[None, :] == 0)
        found = {name: values[rows] for name, values in found.items()} | {"ep": sizes[chosen]}
    table = PartialPlans({}, {})
    for name, values in found.items():
        table = table.with_values(name, values)
    table = table.with_values("dp_size", found["dp_shard"] * found["dp_replicate"])
    return table.with_values("world_size", np.full(len(rest) and len(table), cluster.num_devices))


def _few_splits(dp: Counts, inner: Counts, sizes: Counts, cluster: ClusterSpec) -> Mask:
    """Return a mask of shard sizes: 1, all data-parallel ranks, and the ranks of 1, 8 and 64 scale-up domains."""
    domain = max(1, min(cluster.device.scale_up_domain, cluster.devices_per_node))
    in_domain = np.maximum(1, domain // inner)[:, None]
    wanted = (sizes == 1) | (sizes == dp[:, None])
    for domains in (1, 8, 64):
        wanted |= sizes == in_domain * domains
    return wanted


def _batches(space: Space, job: Job, dp_size: int) -> list[int]:
    """Return the numbers of microbatches; [1] if the batch cannot be divided, which a rule rejects later."""
    given = space.fixed.get("microbatches", space.fixed.get("accumulation"))
    if given is not None:
        return [given]
    most = max(1, MOST_TOKENS // (job.seq_len * job.texts))
    even = shares.even_passes(job.global_batch, dp_size)
    return [each for each in even if shares.samples_per_microbatch(job.global_batch, dp_size, each) <= most] or [1]


def _with_batches(meshes: PartialPlans, batches: Mapping[int, list[int]], job: Job, space: Space) -> PartialPlans:
    """Return each mesh with each number of microbatches, in a pipeline or as gradient accumulation."""
    choices = [batches[dp] for dp in meshes.levels["dp_size"]]
    counts = np.array([len(each) for each in choices], dtype=np.int64)[meshes.codes["dp_size"]]
    table = meshes[np.repeat(np.arange(len(meshes)), counts)]
    codes: list[int] = meshes.codes["dp_size"].tolist()
    passes = np.array([one for code in codes for one in choices[code]], dtype=np.int64)
    piped = table.values("pp") > 1
    for name, values in (("microbatches", np.where(piped, passes, 1)), ("accumulation", np.where(piped, 1, passes))):
        table = table.with_values(name, np.where(passes > 0, values, space.fixed.get(name, 1)))
    table = table.with_values("microbatches_per_step", passes)
    return table.with_values("microbatch", job.sequences(table.values("dp_size"), passes))


def _with_piped(meshes: PartialPlans, space: Space) -> PartialPlans:
    """Return each mesh with a pipeline combined with each schedule, and the other meshes."""
    for name in _PIPED:
        choices = [default_choice(name), *space.choices[name]]
        piped = meshes.values("pp") > 1
        counts = np.where(piped, len(choices) - 1, 1)
        rows = np.repeat(np.arange(len(meshes)), counts)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = np.where(piped[rows], 1 + place, 0).astype(np.int32)
        table = meshes[rows]
        meshes = _with_choices(PartialPlans({**table.codes, name: chosen}, {**table.levels, name: choices}), name)
    return meshes


def _with_choices(table: PartialPlans, name: str) -> PartialPlans:
    """Return the table with the values of a searched field and the fields that are searched with it."""
    chosen, values = table.codes[name], [as_values(name, one) for one in table.levels[name]]
    levels = {member: [each[member] for each in values] for member in members(name)}
    codes = dict.fromkeys(levels, chosen.astype(np.int32))
    return PartialPlans({**table.codes, **codes}, {**table.levels, **levels})


def _flags(space: Space, used: frozenset[str], tally: Tally) -> PartialPlans:
    """Return every combination of flags for meshes that use these axes. Cached, because most spaces have the same."""
    choices = {name: tuple(_choices(space, name, used)) for name in _FLAGS}

    def made() -> PartialPlans:
        table = PartialPlans.product(choices)
        for name in _FLAGS:
            table = _with_choices(table, name)
        return table

    return tally.once("flags", (used, *choices.values()), made)


def _choices(space: Space, name: str, used: frozenset[str]) -> Sequence[Any]:
    known = PLAN_FIELDS[name]
    if known.searched is None:
        return (space.fixed.get(name, known.default),)
    if name == "zero":
        if not used and "zero" not in space.fixed:  # on a single rank, zero=3 is only useful for offload=params
            return (default_choice(name), (3, default_choice(name)[1]))
        # All stages, each with a `reshard`, if dp_shard is in use. States are also sharded over cp, and experts may be
        # the only sharded parameters.
        default, sharded, context = default_choice("zero"), "dp_shard" in used, "cp" in used
        unsharded = ((space.fixed.get("zero", default[0]), default[1]),)
        if context != sharded and "zero" not in space.fixed and (context or space.experts):
            return (*unsharded, *space.choices["zero"])
        return space.choices["zero"] if sharded else unsharded
    if not known.needs or used.intersection(known.needs) or (name in space.fixed and not known.auto_value):
        return space.choices[name]
    return (default_choice(name),)


def _block(meshes: PartialPlans, flags: PartialPlans, rules: list[Rule], tally: Tally) -> PlanGrid:
    flags = tally.once("filled", (flags, *meshes.codes), lambda: _filled(flags, meshes.codes))
    if not len(meshes):
        return PlanGrid(meshes, flags, ())
    flags, _, still_open = tally.prune(rules, flags, np.full(len(flags), len(meshes)), meshes.row(0))
    if not len(flags):
        return PlanGrid(meshes, flags, ())

    def asked() -> tuple[tuple[Rule, Crossed], ...]:  # the rules that some pair of mesh and flags breaks
        each = ((rule, crossed(rule, meshes, flags, tally.reader)) for rule in still_open)
        return tuple((rule, found) for rule, found in each if (found.grid == BROKEN).any())

    names = (rule.name for rule in still_open)
    return PlanGrid(meshes, flags, tally.once("crossed", (meshes, flags, *names), asked))


def _filled(flags: PartialPlans, decided: Mapping[str, Any]) -> PartialPlans:
    """Return the flags with the plan's default for fields that are not assigned."""
    left = {name: known for name, known in PLAN_FIELDS.items() if name not in decided and name not in flags.codes}
    codes = {name: np.zeros(len(flags), dtype=np.int32) for name in left}
    levels = {name: [known.default] for name, known in left.items()}
    return PartialPlans({**flags.codes, **codes}, {**flags.levels, **levels})


def _taken(array: NDArray[Any], rows: NDArray[np.intp]) -> NDArray[Any]:
    """Return the rows of an array, or one number if all are equal, which saves memory and time."""
    return array[0] if (array == array[0]).all() else array[rows]


def _columns(table: PartialPlans) -> dict[str, NDArray[Any]]:
    columns: dict[str, NDArray[Any]] = {}
    for name in PLAN_FIELDS:
        if name in table.codes:
            levels = encoded(name, table.levels[name])
            columns |= {column: numbers[table.codes[name]] for column, numbers in levels.items()}
    if "microbatch" in table.codes:
        columns |= {"microbatch": table.values("microbatch"), "num_micro": table.values("microbatches_per_step")}
    return columns
