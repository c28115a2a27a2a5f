"""The best plan of a cluster with several kinds of devices, priced as mixed, and roles of kinds that slow it down."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.config.cluster import ClusterSpec, DeviceSpec, slowest_of
from weft.config.partitioning import largest_remainder
from weft.config.plan import Plan
from weft.config.rules.plan_rules import check
from weft.config.rules.share_rules import unsupported_with_shares
from weft.planner.cost.machine import Tables
from weft.planner.estimator import estimate
from weft.planner.mixed.placement import GridPlacement, GridProblem, GroupKind, anneal, exact, in_given_order, moves_for
from weft.planner.search.best_plans import answer
from weft.planner.search.candidate import Candidate, candidates
from weft.planner.search.pipeline_clock import passes
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated
from weft.planner.space.columns import Columns
from weft.planner.uncertainty import fits_chance, memory_error_scale
from weft.units import format_count, format_seconds

#: Terms of a step that grow with a rank's samples and layers. For other terms the slowest device and link decide.
_WORK = ("gemm", "attention", "memory_bound", "host", "recompute", "frozen", "tp", "cp")
#: Classes of memory that grow with layers, and with layers and samples. All other classes are constant.
_STATES, _ACTIVATIONS = ("parameters", "gradients", "optimizer", "buffers"), ("activations", "logits")
#: Layouts of which mixed placements are searched, and the largest number of groups that are placed exactly.
_LAYOUTS, _EXACT = 12, 8
#: Factors of microbatches that are tried too.
_MORE_PASSES = (2, 4)
#: A kind should speed up a step by at least this share to be used as ranks.
_WORTH = 0.02
#: Share of a training step's compute that an evaluation of the same samples takes.
_FORWARD = 1 / 3


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """A plan on a mixed cluster.

    Attributes:
        plan: with shares and split.
        step_s: seconds of a step.
        even_s: seconds of a step of the best plan that runs all devices at the speed of the slowest one.
        placement: kinds in the order of ranks, each with the number of consecutive ranks.
        is_exact: True if all placements and splits were tried, False if they were annealed.
    """

    plan: Plan
    step_s: float
    even_s: float
    placement: tuple[tuple[str, int], ...]
    is_exact: bool

    def lines(self) -> list[str]:
        """Return the plan as text."""
        placed = ", ".join(f"{count} {name}" for name, count in self.placement)
        how = "all placements tried" if self.is_exact else "annealed"
        ratio = self.even_s / self.step_s
        return [
            f"mixed     {self.plan}",
            f"          {format_seconds(self.step_s)} a step, {ratio:.2f} times as fast as equal parts at the speed of "
            f"the slowest device ({how})",
            f"          ranks in order: {placed}",
        ]


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of device that is too slow to be a rank.

    Attributes:
        kind, count: name and number of the devices.
        with_s, without_s: seconds of the best step with these devices as ranks, and without them.
        evaluates_per_s: samples per second that they could evaluate, all together; 0 if a copy does not fit.
        host_bytes: their host memory; None if unknown.
    """

    kind: str
    count: int
    with_s: float
    without_s: float
    evaluates_per_s: float
    host_bytes: float | None

    def lines(self) -> list[str]:
        """Return the numbers and the proposed roles as text."""
        uses = [f"evaluate ({format_count(self.evaluates_per_s)} samples/s)"] if self.evaluates_per_s else []
        uses.append("decode data")
        if self.host_bytes:
            uses.append(f"hold embedding tables ({self.host_bytes / 2**30:.0f} GiB of host memory)")
        with_them = f"A step takes {format_seconds(self.with_s)} with them and "
        if not math.isfinite(self.with_s):
            with_them = "No plan fits with them as ranks, and a step takes "
        return [
            f"role      {self.count} x {self.kind}: too slow to be ranks. {with_them}{format_seconds(self.without_s)} "
            "without them",
            f"          they could {', or '.join(uses)}",
            "          launch.evaluate_on=cpu evaluates on the CPU of the first host instead",
        ]


@dataclass(frozen=True, slots=True)
class MixedAnswer:
    """The best plan of all devices or of the faster kinds, and the roles of the others. best: None if nothing fits."""

    best: MixedPlan | None
    roles: tuple[Role, ...] = ()

    def lines(self) -> list[str]:
        """Return the answer as text."""
        if self.best is None:
            return ["mixed     no plan with unequal shares fits"]
        return [*self.best.lines(), *(line for role in self.roles for line in role.lines())]


def mixed_answer(question: Question, ranked: Sequence[Candidate]) -> MixedAnswer:
    """Return the best shares, split and placement on a mixed cluster, or on it without its slower kinds.

    Args:
        question: a query about a cluster of several kinds.
        ranked: its ranked plans, with all devices at the speed of the slowest.
    """
    found = [_best_of(question, ranked)]
    left, asked = _kinds(question.cluster), [question]
    while len(left) > 1:
        left = _without_slowest(left)
        asked.append(replace(question, cluster=_cluster_of(left, question.cluster.devices_per_node)))
        found.append(_best_of(asked[-1], answer(asked[-1]).ranked))
    seconds = [math.inf if one is None else one.step_s for one in found]
    chosen = min(range(len(found)), key=lambda index: seconds[index])
    # Prefer more devices, unless leaving some out is clearly faster or nearly as fast as using them.
    while chosen + 1 < len(found) and seconds[chosen + 1] <= seconds[chosen] * (1 + _WORTH):
        chosen += 1
    roles = [_role(question, asked, found, index) for index in range(chosen)]
    best = found[chosen]
    if best is not None and ranked and "shares" not in question.fixed:
        best = replace(best, even_s=ranked[0].step_s)
    return MixedAnswer(best, tuple(role for role in roles if role is not None))


def _kinds(cluster: ClusterSpec) -> list[tuple[DeviceSpec, int]]:
    return [(spec, count) for spec, (_, count) in zip(cluster.specs, cluster.kinds, strict=True)]


def _cluster_of(kinds: Sequence[tuple[DeviceSpec, int]], node: int) -> ClusterSpec:
    nodes = sum(count for _, count in kinds) // node
    if len(kinds) == 1:
        return ClusterSpec(nodes=nodes, devices_per_node=node, device=kinds[0][0])
    names = tuple((spec.name, count) for spec, count in kinds)
    specs = tuple(spec for spec, _ in kinds)
    return ClusterSpec(nodes=nodes, devices_per_node=node, device=slowest_of(kinds), kinds=names, specs=specs)


def _speed(spec: DeviceSpec) -> float:
    return spec.measured_flops or max(
        (peak for name, peak in spec.peaks if name in ("bf16", "fp16", "fp32")), default=0
    )


def _without_slowest(kinds: list[tuple[DeviceSpec, int]]) -> list[tuple[DeviceSpec, int]]:
    slowest = min(kinds, key=lambda kind: _speed(kind[0]))
    return [kind for kind in kinds if kind is not slowest]


def _best_of(question: Question, ranked: Sequence[Candidate]) -> MixedPlan | None:
    """Return the fastest mixed plan among the best layouts of a ranking, or None."""
    if not question.cluster.kinds:
        if not ranked:
            return None
        first, whole = ranked[0], ((question.cluster.device.name, question.cluster.num_devices),)
        return MixedPlan(first.plan, first.step_s, first.step_s, whole, is_exact=True)
    chosen: dict[tuple[object, ...], Candidate] = {}
    for one in ranked:
        plan = one.plan
        if plan.measures_shares:
            continue
        layout = (plan.pp, plan.dp_size, plan.tp, plan.cp, plan.zero, plan.reshard, plan.recompute_policy)
        if layout not in chosen and _is_known(plan):
            chosen[layout] = _even(one)
        if len(chosen) == _LAYOUTS:
            break
    several = [each for one in chosen.values() for each in _with_more_passes(one)]
    problems = [(one, problem) for one in several if (problem := _problem(one)) is not None]
    best: MixedPlan | None = None
    for one, problem in sorted(problems, key=lambda pair: pair[1].least_s + _other_s(pair[0])):
        if best is None or problem.least_s + _other_s(one) < best.step_s:
            found = _placed(one, problem)
            best = found if best is None or (found is not None and found.step_s < best.step_s) else best
    return best


def _even(one: Candidate) -> Candidate:
    """Return a candidate estimated with equal parts. Its problem has the shares and the split that the user fixed."""
    return one if not one.plan.shares else estimated([one.plan.replace(shares=())], one.question)[0]


def _with_more_passes(one: Candidate) -> list[Candidate]:
    """Return a candidate and variants with more microbatches, because a faster rank has larger ones."""
    plan, job = one.plan, one.question.job
    name = "microbatches" if plan.pp > 1 else "accumulation"
    most = 0 if name in one.question.fixed else job.global_batch // plan.dp_size
    counts = [count for factor in _MORE_PASSES if (count := plan.microbatches_per_step * factor) <= most]
    plans = [plan.replace(**{name: count}) for count in counts]
    if not plans:
        return [one]
    columns = Columns.of(plans, job)
    found = estimate(job, one.question.cluster, columns, one.question.tables)
    return [one, *candidates(one.question, columns, found, plans)]


def _is_known(plan: Plan) -> bool:
    """Return True for plans that can be priced on mixed devices: no experts over ranks, one stage on each rank."""
    with_shares = plan.replace(shares=(1,) * plan.dp_size) if plan.dp_size > 1 else plan
    is_uniform = plan.schedule in ("gpipe", "1f1b") and not (plan.differs_by_stage or plan.shard_shares)
    return plan.ep == 1 and is_uniform and not unsupported_with_shares(with_shares)


def _other_s(one: Candidate) -> float:
    """Return the seconds of a step that do not depend on the placement."""
    return sum(seconds for name, seconds in one.terms.items() if name not in (*_WORK, "bubble"))


def _problem(one: Candidate) -> GridProblem | None:
    """Return the placement problem of a candidate's plan, or None if a group would have several kinds, or none fits."""
    question, plan = one.question, one.plan
    specs = _kinds(question.cluster)
    groups = _group_counts([count for _, count in specs], _group_size(plan))
    kinds = [] if groups is None else [_group_kind(one, spec) for spec, _ in specs]
    if groups is None or any(kind is None for kind in kinds):
        return None
    before, after = _extras(one)
    shares = question.fixed.get("shares", ())
    return GridProblem(
        kinds=tuple(kind for kind in kinds if kind is not None), counts=groups, pp=plan.pp, dp=plan.dp_size,
        layers=question.job.shape.layers, samples=question.job.global_batch, microbatches=plan.microbatches_per_step,
        before=before, after=after, given_split=question.fixed.get("split", ()),
        given_counts=largest_remainder(question.job.global_batch, shares) if shares else (),
    )  # fmt: skip


def _placed(one: Candidate, problem: GridProblem) -> MixedPlan | None:
    """Return a candidate's plan with the best shares, split and placement, or None if it does not fit."""
    question, plan = one.question, one.plan
    is_exact = plan.pp * plan.dp_size <= _EXACT
    try:
        placed = exact(problem) if is_exact else anneal(problem, moves=moves_for(problem))
    except ValueError:
        placed, is_exact = anneal(problem), False
    if not math.isfinite(placed.seconds):
        return None
    placed = in_given_order(problem, placed)
    chosen = _with_shares(one, placed)
    if check(chosen, question.facts):
        return None
    placement = _in_order(chosen, placed, [spec.name for spec, _ in _kinds(question.cluster)], _group_size(plan))
    return MixedPlan(chosen, placed.seconds + _other_s(one), one.step_s, placement, is_exact)


def _group_size(plan: Plan) -> int:
    """Return the number of devices that share the layers of a stage of a replica."""
    return plan.world_size // (plan.pp * plan.dp_size)


def _group_counts(counts: Sequence[int], size: int) -> tuple[int, ...] | None:
    """Return the groups of `size` devices of each kind, or None if a group would have several kinds."""
    return None if any(count % size for count in counts) else tuple(count // size for count in counts)


def _on_kind(one: Candidate, spec: DeviceSpec) -> Candidate:
    """Return the estimate of a candidate's plan on a cluster of one kind."""
    asked = replace(one.question, cluster=replace(one.question.cluster, device=spec, kinds=(), specs=()))
    columns, tables = Columns.of([one.plan], asked.job), Tables.of(spec, asked.tier)
    return candidates(asked, columns, estimate(asked.job, asked.cluster, columns, tables), [one.plan])[0]


def _extras(one: Candidate) -> tuple[float, float]:
    """Return the work of the embedding and of the head, in layers."""
    parts = passes(one)
    layer = sum(parts.layer) or 1.0
    return sum(parts.embedding) / layer, sum(parts.head) / layer


def _group_kind(one: Candidate, spec: DeviceSpec) -> GroupKind | None:
    """Return the time and the room of a group of one kind, or None if not even the constant memory fits."""
    try:
        own = _on_kind(one, spec)
    except (KeyError, ZeroDivisionError):
        return None
    plan, job = one.plan, one.question.job
    before, after = _extras(one)
    layers = job.shape.layers / plan.pp
    work = (job.shape.layers + before + after) / plan.pp
    samples = job.global_batch / plan.dp_size
    busy = sum(own.terms.get(name, 0.0) for name in _WORK)
    states = sum(own.memory[name] for name in _STATES) / layers
    held = samples / plan.microbatches_per_step * min(plan.microbatches_per_step, plan.pp)
    activations = sum(own.memory[name] for name in _ACTIVATIONS) / layers / max(held, 1e-9)
    constant = own.total_bytes - sum(own.memory[name] for name in (*_STATES, *_ACTIVATIONS))
    # The same margin for errors as for plans of one kind.
    usable = own.usable_bytes / _margin(own)
    if not busy > 0 or usable <= constant:
        return None
    return GroupKind(busy / (work * samples), (usable - constant) / states, activations / states)


@functools.lru_cache(maxsize=256)
def _margin_of(fits: float, spread: float) -> float:
    low, high = 0.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if float(fits_chance(np.array([middle]), spread)[0]) >= fits else (middle, high)
    return math.exp(high)


def _margin(one: Candidate) -> float:
    """Return usable bytes over the most bytes that fit with the probability of the query."""
    return _margin_of(one.question.fits, memory_error_scale(one.question.job, one.question.cluster))


def _with_shares(one: Candidate, placed: GridPlacement) -> Plan:
    common = math.gcd(*placed.counts)
    shares = tuple(count // common for count in placed.counts)
    plan = one.plan.replace(shares=one.question.fixed.get("shares", () if len(set(shares)) == 1 else shares))
    if plan.pp == 1 or "split" in one.question.fixed:
        return plan
    usual = tuple(one.question.job.shape.stage_layers(plan.pp))
    return plan.replace(split=() if placed.split == usual else placed.split)


def _in_order(plan: Plan, placed: GridPlacement, names: Sequence[str], size: int) -> tuple[tuple[str, int], ...]:
    """Return the kinds of the ranks in order, as runs of consecutive ranks."""
    kinds: list[str] = []
    order = [axis for axis in plan.axis_order if axis in ("pp", "dp_replicate", "dp_shard")]
    sizes = plan.axis_sizes()
    inner = plan.axis_order.index("tp") > max(plan.axis_order.index(axis) for axis in order)
    for index in range(plan.pp * plan.dp_size):
        where, rest = dict[str, int](), index
        for axis in reversed(order):
            rest, where[axis] = divmod(rest, sizes[axis])
        data = 0
        for axis in order:
            if axis != "pp":
                data = data * sizes[axis] + where[axis]
        kinds += [names[placed.grid[where["pp"]][data]]] * (size if inner else 1)
    runs: list[tuple[str, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return tuple(runs)


def _role(question: Question, asked: Sequence[Question], found: Sequence[MixedPlan | None], index: int) -> Role | None:
    """Return the role of the kind that the query after `index` leaves out."""
    known = {spec.name for spec, _ in _kinds_of(asked[index + 1])}
    spec, count = next(kind for kind in _kinds_of(asked[index]) if kind[0].name not in known)
    with_plan, without = found[index], found[index + 1]
    if without is None:
        return None
    alone = answer(replace(question, cluster=_cluster_of([(spec, count)], question.cluster.devices_per_node)))
    rate = 0.0
    if alone.best is not None:
        busy = sum(alone.best.terms.get(name, 0.0) for name in _WORK)
        rate = question.job.global_batch / (busy * _FORWARD) if busy > 0 else 0.0
    host = None if not spec.host_memory_bytes else spec.host_memory_bytes * count
    return Role(spec.name, count, math.inf if with_plan is None else with_plan.step_s, without.step_s, rate, host)


def _kinds_of(question: Question) -> list[tuple[DeviceSpec, int]]:
    cluster = question.cluster
    return _kinds(cluster) if cluster.kinds else [(cluster.device, cluster.num_devices)]
