"""Changes that make plans fit, similar queries for which a plan fits, and verdicts on a user's plan.

Memory estimates of the suggested changes are closed forms. They are accurate to about a fifth for supported families,
which is enough to rank suggestions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from weft.config.cluster import devices
from weft.config.fields.plan_text import split_plan
from weft.config.plan import PLAN_FIELDS, Plan, plan_fields
from weft.config.rules.plan_rules import LASTING, check
from weft.config.rules.rule import Facts, Violation
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import PlanError, Problem
from weft.planner.cost.memory_terms import layer_bytes
from weft.planner.report.explanation import TERM_WORDS, differences, fit_words, term_changes
from weft.planner.report.scenario import Scenario, change
from weft.planner.search.best_plans import answer, host_message
from weft.planner.search.candidate import Answer, Candidate
from weft.planner.search.question import Question
from weft.planner.search.refine import changed_words, estimated, neighbours
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape
from weft.units import format_bytes, format_seconds

_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "fp8": 2, "tf32": 4}
#: Share of the blocks' activations that each recompute policy keeps, for models of unknown shape.
_LEFT = {"none": 1.0, "attention": 1.0, "selective": 0.55, "full": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes on one rank, by class, at the peak.

    Attributes:
        optimizer: optimizer states and master weights, even if they are not allocated yet.
        activations: activations and temporaries.
        num_rows, num_tokens: sequences and tokens of one microbatch; 0 if unknown.
        num_blocks: number of repeated blocks of the model.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_blocks: int = 1


@dataclass(frozen=True, slots=True)
class MemoryRemedy:
    """A change of a plan that saves memory.

    Attributes:
        plan: the changed plan.
        change: the changed fields, as plan text.
        saved_bytes: approximate bytes saved on each rank.
        enough: True if the change alone saves all of the missing bytes.
    """

    plan: Plan
    change: str
    saved_bytes: int
    enough: bool


def activation_bytes(shape: DecoderSpec, num_tokens: int, precision: str, recompute: str) -> int:
    """Return the bytes that one microbatch of a decoder stores at the end of forward, including fp32 logits and loss.

    With recompute, one layer is stored in full during its backward. A budget is assumed to keep everything.
    """
    width = _WIDTHS[precision]
    job = Job(shape=Shape.of_decoder(shape), seq_len=num_tokens, global_batch=1)
    plan = Plan(precision=precision, recompute=recompute if recompute in _LEFT else "none")
    layer = layer_bytes(job, Columns.of([plan], job))
    whole, kept = float(layer.whole[0]), float(layer.kept[0])
    ends = num_tokens * (2 * shape.dim * width + shape.vocab_size * (width + max(width, 4)))
    return int(shape.num_layers * kept + (whole - kept) + ends)


def remedies(
    plan: Plan,
    usage: Usage,
    missing_bytes: int,
    facts: Facts | None = None,
    shape: DecoderSpec | None = None,
    can_offload: bool = True,
) -> list[MemoryRemedy]:
    """Return up to three changes of a plan that save memory.

    Changes that save `missing_bytes` precede the others, the least disruptive first: number of microbatches, sharding,
    recompute, number formats, offloading, more devices. Other changes follow, the largest saving first. Changes that a
    rule rejects are excluded.

    Args:
        plan: the plan.
        usage: memory under the plan.
        missing_bytes: bytes to save; 0 if unknown.
        facts: facts for plan rules.
        shape: shape of the model if it is a decoder.
        can_offload: False on a CPU, where offloading saves nothing.
    """
    found: list[MemoryRemedy] = []
    for fields in _changes(plan, usage, missing_bytes, shape):
        if "offload" in fields and not can_offload:
            continue
        candidate = plan.replace(**fields)
        if check(candidate, facts if candidate.world_size == plan.world_size else None):
            continue
        saved = _saved(plan, candidate, usage, shape)
        if saved > 0:
            old, new = (set(each.format().split()) for each in (plan, candidate))
            words = " ".join(sorted(new - old, key=candidate.format().split().index)) or str(candidate)
            found.append(MemoryRemedy(candidate, words, saved, saved >= missing_bytes))
    enough = [remedy for remedy in found if remedy.enough]
    rest = sorted((remedy for remedy in found if not remedy.enough), key=lambda remedy: -remedy.saved_bytes)
    return [*enough, *rest][:3]


def _changes(plan: Plan, usage: Usage, missing: int, shape: DecoderSpec | None) -> list[dict[str, object]]:
    """Return changes of fields, least disruptive first.

    The number of microbatches is multiplied by the smallest factor that suffices, or else by the largest.
    """
    ranks = plan.dp_size
    changes: list[dict[str, object]] = []
    field, passes = ("microbatches", plan.microbatches) if plan.pp > 1 else ("accumulation", plan.accumulation)
    factors = [factor for factor in range(2, usage.num_rows + 1) if usage.num_rows % factor == 0]
    for factor in factors:
        more = {field: passes * factor}
        if factor == factors[-1] or _saved(plan, plan.replace(**more), usage, shape) >= missing:
            changes.append({**more})
            break
    sharded: dict[str, object] = {"dp_shard": ranks, "dp_replicate": 1} if plan.zero == 0 else {}
    stages = range(plan.zero + 1, 4) if ranks > 1 else range(0)
    changes += [{"zero": zero, **sharded} for zero in stages if zero < 3]
    if plan.recompute in ("none", "attention"):
        changes.append({"recompute": "selective"})
    if plan.recompute != "full":
        changes.append({"recompute": "full"})
    changes += [{"zero": zero, **sharded} for zero in stages if zero == 3]
    if plan.precision in ("fp32", "tf32", "fp64"):
        changes.append({"precision": "bf16"})
    for part in ("optimizer", "activations"):
        if part not in plan.offload:
            changes.append({"offload": (*plan.offload, part)})
    changes.append({"dp_shard": 2 * max(plan.dp_shard, 1), "zero": max(plan.zero, 1)})
    changes.append({"dp_shard": 2 * max(plan.dp_shard, 1), "zero": 3})
    return changes


def _saved(plan: Plan, other: Plan, usage: Usage, shape: DecoderSpec | None) -> int:
    return int(_total(plan, plan, usage, shape) - _total(plan, other, usage, shape))


def _total(measured: Plan, plan: Plan, usage: Usage, shape: DecoderSpec | None) -> float:
    parameters = usage.parameters * _share(plan, 3) / _share(measured, 3)
    if plan.zero == 3 and measured.zero < 3:
        parameters += 2 * usage.parameters / (usage.num_blocks + 2)  # two units are gathered at the same time
    gradients = usage.gradients * _share(plan, 2) / _share(measured, 2)
    optimizer = usage.optimizer * _share(plan, 1) / _share(measured, 1)
    if plan.precision == "bf16" and measured.precision in ("fp32", "tf32", "fp64"):
        ratio = _WIDTHS["bf16"] / _WIDTHS[measured.precision]
        optimizer += usage.parameters / _share(measured, 3) * _share(plan, 1)  # master weights
        parameters *= ratio
    if "optimizer" in plan.offload:
        optimizer = 0.0
    return parameters + gradients + optimizer + _activations(measured, plan, usage, shape)


def _share(plan: Plan, stage: int) -> float:
    return 1 / plan.dp_shard if plan.zero >= stage else 1.0


def _activations(measured: Plan, plan: Plan, usage: Usage, shape: DecoderSpec | None) -> float:
    if "activations" in plan.offload and "activations" not in measured.offload:
        return 2 * usage.activations / (usage.num_blocks + 2)
    passes = measured.microbatches_per_step / plan.microbatches_per_step
    if shape is not None and usage.num_tokens and measured.recompute in _LEFT and plan.recompute in _LEFT:
        return activation_bytes(shape, int(usage.num_tokens * passes), plan.precision, plan.recompute)
    kept, before = (_LEFT.get(each.recompute, 0.5) for each in (plan, measured))
    # The block that is being recomputed is stored in full.
    left = (kept + (1 - kept) / usage.num_blocks) / (before + (1 - before) / usage.num_blocks)
    return usage.activations * passes * left * _WIDTHS[plan.precision] / _WIDTHS[measured.precision]


# If no plan fits: the smallest changes of the query that have an answer.

#: Number of plans that suffices to find out if any plan fits.
_FEW_PLANS = 60_000
_MOST_DEVICES = 4096


def nearest_yes(question: Question) -> list[Scenario]:
    """Return up to five variants of the query for which a plan fits into memory, one for each kind of change.

    The kinds are: fewer fixed fields, an adapter, more devices, a larger device, shorter sequences. If no plan has the
    fixed fields, only the first kind is tried.
    """
    few = replace(question, most_plans=_FEW_PLANS)
    keeps_rules = not question.fixed or answer(few).num_estimated > 0
    shorter = _changed(few, _lengths(few))
    more = (_adapters(few), _more_devices(few), _larger_devices(few), shorter) if keeps_rules else ()
    scenarios = (
        next(
            (found for found in (Scenario(text, asked, answer(asked)) for text, asked in ways) if found.answer.best),
            None,
        )
        for ways in (_fewer_words(few), *more)
    )
    return [found for found in scenarios if found is not None]


def _changed(question: Question, texts: Iterable[str]) -> Iterator[tuple[str, Question]]:
    return ((text, change(question, text)) for text in texts)


def _fewer_words(question: Question) -> Iterator[tuple[str, Question]]:
    names = list(question.fixed)
    for left_out in [*([name] for name in names), *([names] if len(names) > 1 else [])]:
        fixed = {name: value for name, value in question.fixed.items() if name not in left_out}
        words = (f"{name}={PLAN_FIELDS[name].kind.write(question.fixed[name])}" for name in left_out)
        yield f"without {' '.join(words)}", replace(question, fixed=fixed)


def _more_devices(question: Question) -> Iterator[tuple[str, Question]]:
    cluster = question.cluster
    count = 1 if not cluster.device.is_cpu else 2 * _MOST_DEVICES  # more ranks would use the same cores
    while count <= cluster.num_devices:
        count *= 2
    while count <= _MOST_DEVICES:
        per_node = min(count, max(8, cluster.devices_per_node))
        larger = replace(cluster, nodes=count // per_node, devices_per_node=per_node)
        yield f"cluster={count // per_node}x{per_node}x{cluster.device.name}", replace(question, cluster=larger)
        count *= 2


def _larger_devices(question: Question) -> Iterator[tuple[str, Question]]:
    now = question.cluster.device
    maker = now.title.partition(" ")[0]
    larger = [
        one
        for one in devices().values()
        if one.memory_bytes > now.memory_bytes
        and (not maker or one.title.startswith(f"{maker} "))
        and (now.peak_flops("bf16") is None or one.peak_flops("bf16") is not None)  # older devices are no alternative
    ]
    yield from _changed(question, (f"device={one.name}" for one in sorted(larger, key=lambda one: one.memory_bytes)))


def _adapters(question: Question) -> Iterator[tuple[str, Question]]:
    now = question.job.adapter
    if now is not None and now.base != "stored":
        return
    ways = [f"qlora={now.rank}"] if now is not None else ["adapter=16", "qlora=16"]
    if question.model.adapter_of(16).width:
        yield from _changed(question, [*ways, *(f"{way},{shorter}" for way in ways for shorter in _lengths(question))])


def _lengths(question: Question) -> Iterator[str]:
    length = question.job.seq_len // 2
    while length >= 512:
        yield f"seq={length}"
        length //= 2


# Verdict on a plan: the first limit that it exceeds, in numbers, and the smallest changes that fix it.

#: Maximum number of listed changes and of consecutive changes; number of plans from which each next change starts.
_MOST, _DEPTH, _BEAM = 6, 8, 12
#: Number of listed plans if the rules have no fix.
_CLOSEST = 3
_UNSAID = "the plan names no precision, so it is one in fp32. Add precision={} for one in half precision."


@dataclass(frozen=True, slots=True)
class Remedy:
    """Change of the plan, as plan text, that makes it fit or satisfy the rules, and the resulting candidate."""

    words: str
    after: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """Verdict on one plan.

    Attributes:
        kind: "rule" (the plan breaks one), "memory" (it does not fit), "slower" (than the best plan) or "best".
        sentence: the first limit that the plan exceeds, with numbers.
        candidate: the plan with its estimate, or None if it breaks a rule.
        remedies: smallest changes first.
        best: best plan of the search, or None if none fits.
        details: further text lines.
    """

    kind: str
    sentence: str
    plan: Plan
    candidate: Candidate | None
    violations: tuple[Violation, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    best: Candidate | None = None
    details: tuple[str, ...] = field(default=())

    def lines(self) -> list[str]:
        """Return the verdict as text."""
        lines = [f"plan    {self.plan}", f"why not {self.sentence}", *(f"        {line}" for line in self.details)]
        if self.remedies:
            lines.append(f"changes that {'fit' if self.kind == 'memory' else 'mend it'}, the smallest first")
        base = self.candidate.step_s if self.candidate else None
        for one in self.remedies:
            lines.append(f"  {one.words:<44} {_outcome(one.after, base)}")
        if self.best is not None and self.kind != "best":
            lines.append(f"best    {self.best.plan}")
            lines.append(f"        {_outcome(self.best, base)}")
        return lines


def _outcome(one: Candidate, base: float | None) -> str:
    change = "" if base is None else f", {one.step_s / base - 1:+.1%} time"
    return f"{format_seconds(one.step_s)} a step{change}; {format_bytes(one.total_bytes)}, {fit_words(one.fits)}"


def why_not(text: str, question: Question, found: Answer[Candidate]) -> WhyNot:
    """Return the verdict on a user's plan.

    Args:
        text: the plan.
        question: the query.
        found: answer to the query.

    Raises:
        PlanError: if the text is not a plan.
    """
    plan = read_plan(text, question)
    # In half precision, if the text does not set the precision.
    half = "bf16" if question.cluster.device.peak_flops("bf16") else "fp16"
    names = {word.partition("=")[0] for word in text.split()}
    is_open = "precision" not in names and plan.precision == "fp32" and question.cluster.device.peak_flops(half)
    meant = plan.replace(precision=half) if is_open else plan
    unsaid = (_UNSAID.format(half),) if is_open else ()
    violations = check(plan, question.facts, LASTING) or check(plan, question.facts, question.rules)
    best = found.best
    if violations:
        judged = _against_rules(plan, meant, violations, question, found)
        return replace(judged, details=(*judged.details, *unsaid))
    candidate = estimated([plan], question)[0]
    if candidate.fits < question.fits:
        judged = _too_large(candidate, meant, question, best)
        return replace(judged, details=(*judged.details, *unsaid))
    if best is None or candidate.rank_s <= best.rank_s * 1.0005:
        sentence = "this is the best plan: no other plan that was tried is faster."
        return WhyNot(kind="best", sentence=sentence, plan=candidate.plan, candidate=candidate, best=best)
    slower = candidate.step_s / best.step_s - 1
    gap = f"{slower:.1%} more than the best" if slower > 0 else (
        f"{-slower:.1%} less than the best, but a plan with offload is preferred only if it gains 2 %"
    )  # fmt: skip
    sentence = f"it runs and {fit_words(candidate.fits)}, and takes {format_seconds(candidate.step_s)} a step, {gap}."
    nearby = [one for one in estimated(neighbours(candidate.plan, question), question) if one.fits >= question.fits]
    better = sorted((one for one in nearby if one.step_s < candidate.step_s * 0.999), key=lambda one: one.step_s)
    return WhyNot(
        kind="slower",
        sentence=sentence,
        plan=candidate.plan,
        candidate=candidate,
        remedies=tuple(Remedy(changed_words(candidate.plan, one.plan), one) for one in better[:_MOST]),
        best=best,
        details=(*term_changes(best, candidate)[:5], *unsaid),
    )


def read_plan(text: str, question: Question) -> Plan:
    """Parse the text of a plan. `*` gets the devices that the other axes leave.

    Raises:
        PlanError: if the text is not a plan.
    """
    words, problems = split_plan(text)
    if problems:
        raise PlanError(problems)
    return Plan.from_mapping(words, question.cluster.num_devices)


def _against_rules(
    plan: Plan, meant: Plan, violations: Sequence[Violation], question: Question, found: Answer[Candidate]
) -> WhyNot:
    mended = _mended(meant, question)
    if mended is not None:
        # A plan that satisfies the rules but does not fit is no fix. In that case, continue to plans that fit.
        ends = _ends(estimated([mended], question)[0], question)
    else:  # no rule has a fix: use the found plans that agree most with this plan
        ends = sorted(found.ranked, key=lambda one: len(_all_changes(plan, one.plan).split()))[:_CLOSEST]
    remedies = [Remedy(_all_changes(plan, each.plan), each) for each in ends]
    return WhyNot(
        kind="rule",
        sentence=violations[0].message,
        plan=plan,
        candidate=None,
        violations=tuple(violations),
        remedies=tuple(remedies),
        best=found.best,
        details=tuple(violation.message for violation in violations[1:]),
    )


def _ends(one: Candidate, question: Question) -> list[Candidate]:
    return [one] if one.fits >= question.fits else [each.after for each in fitting_changes(one, question)]


def _all_changes(before: Plan, after: Plan) -> str:
    changed = [name for name in plan_fields() if getattr(after, name) != getattr(before, name)]
    words = {part.partition("=")[0]: part for part in str(after).split()}
    return " ".join(words.get(name, f"without {name}") for name in changed)


def _mended(plan: Plan, question: Question) -> Plan | None:
    for _ in range(8):
        broken = check(plan, question.facts, LASTING) or check(plan, question.facts, question.rules)
        if not broken:
            return plan
        fix = next((violation.fix for violation in broken if violation.fix is not None), None)
        if fix is None or fix == plan:
            return None
        plan = fix
    return None


def _too_large(candidate: Candidate, meant: Plan, question: Question, best: Candidate | None) -> WhyNot:
    parts = sorted(candidate.memory.items(), key=lambda part: -part[1])
    shown = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts if value >= candidate.total_bytes / 100)
    missing = candidate.total_bytes - candidate.usable_bytes
    short = f"{format_bytes(missing)} too much" if missing > 0 else "too near the limit"
    where = "the fullest rank" if question.cluster.num_devices > 1 else "the device"
    if meant.precision == candidate.plan.precision:
        remedies = fitting_changes(candidate, question)
    else:
        ends = _ends(estimated([meant], question)[0], question)
        remedies = [Remedy(changed_words(candidate.plan, each.plan), each) for each in ends]
    sentence = (
        f"out of memory on {where}: {format_bytes(candidate.total_bytes)} of {format_bytes(candidate.usable_bytes)}, "
        f"{short} ({fit_words(candidate.fits)})."
    )
    if on_host := candidate.host_bytes > candidate.host_limit:
        sentence = f"out of memory on the host: {host_message(candidate.host_bytes, candidate.host_limit)}"
    return WhyNot(
        kind="memory",
        sentence=sentence,
        plan=candidate.plan,
        candidate=candidate,
        remedies=tuple(remedies),
        best=best,
        details=() if on_host else (f"{shown}.",),
    )


def fitting_changes(candidate: Candidate, question: Question) -> list[Remedy]:
    """Return the smallest changes that make a plan fit: with the fewest fields first, then the fastest.

    Single changes are tried first, in small steps. If none suffices, further changes of the plans that need the least
    memory are tried, up to eight changes in total. Return [] if none suffices.
    """
    beam, seen = [candidate.plan], {candidate.plan}
    for depth in range(_DEPTH):
        near = (one for seed in beam for one in neighbours(seed, question, fine=depth == 0))
        reached = {one: None for one in near if one not in seen}
        nearby = estimated(reached, question)
        fitting = [one for one in nearby if one.fits >= question.fits]
        if fitting:
            found: dict[tuple[str, ...], Remedy] = {}
            for one in sorted(fitting, key=lambda one: one.step_s):
                words = changed_words(candidate.plan, one.plan)
                found.setdefault(tuple(word.partition("=")[0] for word in words.split()), Remedy(words, one))
            smallest = sorted(found.items(), key=lambda item: (len(item[0]), item[1].after.step_s))
            return [remedy for _, remedy in smallest[:_MOST]]
        seen |= set(reached)
        # Required share of the available memory, on the device or on its host.
        needs = {
            one.plan: max(one.total_bytes / one.usable_bytes, one.host_bytes / max(1.0, one.host_limit))
            for one in nearby
        }
        beam = sorted(needs, key=needs.__getitem__)[:_BEAM]
    return []


# Comparison of two plans: time by term, memory by class.


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two candidates of the same query."""

    left: Candidate
    right: Candidate

    @property
    def time_rows(self) -> list[tuple[str, float, float]]:
        """(term, left, right) times in s, largest difference first, without nearly equal terms."""
        return differences(self.left.terms, self.right.terms)

    @property
    def memory_rows(self) -> list[tuple[str, float, float]]:
        """(class, left, right) in bytes, largest difference first, without nearly equal classes."""
        return differences(self.left.memory, self.right.memory)

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        left, right = self.left, self.right
        lines = [f"A       {left.plan}", f"B       {right.plan}"]
        lines.append(f"change  {changed_words(left.plan, right.plan) or 'none'}")
        lines.append(_row("", "A", "B", "B - A"))
        lines += [_differing(TERM_WORDS.get(row[0], row[0]), *row[1:], format_seconds) for row in self.time_rows]
        lines.append(_differing("step", left.step_s, right.step_s, format_seconds))
        lines += [_differing(*row, format_bytes) for row in self.memory_rows]
        lines.append(_differing("memory", left.total_bytes, right.total_bytes, format_bytes))
        lines.append(_row("", fit_words(left.fits), fit_words(right.fits)))
        more = right.total_bytes - left.total_bytes
        change = f"{'+' if more >= 0 else ''}{format_bytes(more)}"
        lines.append(f"B takes {right.step_s / left.step_s - 1:+.1%} time and {change} memory.")
        return lines


def compare(left: str, right: str, question: Question) -> Comparison:
    """Compare two plans, given as text.

    Raises:
        PlanError: if a text is not a plan or breaks a rule.
    """
    plans = [read_plan(text, question) for text in (left, right)]
    problems = [
        Problem(violation.field, f"{name}: {violation.message}")
        for name, plan in zip("AB", plans, strict=True)
        for violation in check(plan, question.facts, LASTING)
    ]
    if problems:
        raise PlanError(problems)
    return Comparison(*estimated(plans, question))


def _row(name: str, left: str, right: str, change: str = "") -> str:
    return f"  {name:<40} {left:>14} {right:>14} {change:>14}".rstrip()


def _differing(name: str, before: float, after: float, write: Callable[[float], str]) -> str:
    return _row(name, write(before), write(after), f"{'+' if after >= before else ''}{write(after - before)}")
