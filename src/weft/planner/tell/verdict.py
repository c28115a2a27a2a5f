"""Why a plan is not the answer: the first limit that it breaks, in numbers, and the smallest changes that mend it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from weft.errors import PlanError
from weft.planner.search import Answer, Candidate, Question, changed_words, estimated, host_message, neighbours
from weft.planner.tell.explanation import TERM_WORDS, differences, fit_words
from weft.spec.plan import Plan, plan_fields, split_plan
from weft.spec.rules import LASTING, Violation, check
from weft.units import format_bytes, format_seconds

#: Changes that are shown; how many are made one after another, and from how many plans each time.
_MOST, _DEPTH, _BEAM = 6, 8, 12
#: Plans that are shown where the rules know no way to mend one.
_CLOSEST = 3
_UNSAID = "the plan names no precision, so it is one in fp32. Add precision={} for one in half precision."


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of the plan that makes it fit, or legal: as it is typed, and what comes of it."""

    words: str
    after: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """The verdict on one plan.

    kind: "rule" (it breaks one), "memory" (it does not fit), "slower" (than the best) or "best".
    sentence: the first limit that is broken, with numbers. remedies: the smallest changes first.
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
            lines.append(
                "changes " + ("that fit" if self.kind == "memory" else "that mend it") + ", the smallest first"
            )
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
    """Judge a plan that the user typed.

    Args:
        text: the plan.
        question: what is asked.
        found: the answer to the same question.

    Raises:
        PlanError: where the text is no plan.
    """
    plan = read_plan(text, question)
    meant = _meant(text, plan, question)
    unsaid = () if meant is plan else (_UNSAID.format(meant.precision),)
    violations = check(plan, question.facts, LASTING) or check(plan, question.facts, question.rules)
    best = found.best
    if violations:
        return _with_details(_against_rules(plan, meant, violations, question, found), unsaid)
    candidate = estimated([plan], question)[0]
    if candidate.fits < question.fits:
        return _with_details(_too_large(candidate, meant, question, best), unsaid)
    if best is None or candidate.step_s <= best.step_s * 1.0005:
        sentence = "this is the best plan: no other plan that was tried is faster."
        return WhyNot(kind="best", sentence=sentence, plan=candidate.plan, candidate=candidate, best=best)
    slower = candidate.step_s / best.step_s - 1
    sentence = (
        f"it runs and {fit_words(candidate.fits)}, and takes {format_seconds(candidate.step_s)} a step, "
        f"{slower:.1%} more than the best."
    )
    rows = differences(best.terms, candidate.terms)[:5]
    details = [f"{TERM_WORDS.get(name, name)}: {_signed(after - before)}" for name, before, after in rows]
    return WhyNot(
        kind="slower",
        sentence=sentence,
        plan=candidate.plan,
        candidate=candidate,
        remedies=tuple(_faster(candidate, question)),
        best=best,
        details=(*details, *unsaid),
    )


def _meant(text: str, plan: Plan, question: Question) -> Plan:
    """The plan with what people take for granted: without a precision it is one in fp32, and they mean half precision.

    Where nothing is left out, the plan itself.
    """
    named = {word.partition("=")[0] for word in text.split()}
    half = "bf16" if question.cluster.device.peak_flops("bf16") else "fp16"
    if "precision" in named or plan.precision != "fp32" or not question.cluster.device.peak_flops(half):
        return plan
    return plan.replace(precision=half)


def _with_details(found: WhyNot, more: tuple[str, ...]) -> WhyNot:
    return replace(found, details=(*found.details, *more))


def read_plan(text: str, question: Question) -> Plan:
    """A plan from its text; `*` takes the devices that the other axes leave. Raises PlanError."""
    words, problems = split_plan(text)
    if problems:
        raise PlanError(problems)
    return Plan.from_mapping(words, question.cluster.num_devices)


def _against_rules(
    plan: Plan, meant: Plan, violations: Sequence[Violation], question: Question, found: Answer[Candidate]
) -> WhyNot:
    mended = _mended(meant, question)
    if mended is not None:
        # What keeps the rules and does not fit mends nothing: then go on from there to what does.
        ends = _ends(estimated([mended], question)[0], question)
    else:  # no rule knows a way out: of the plans that were found, those that say most of what this one says
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
    """The candidate itself where it fits; else what the smallest changes make of it that do."""
    return [one] if one.fits >= question.fits else [each.after for each in fitting_changes(one, question)]


def _all_changes(before: Plan, after: Plan) -> str:
    """The words of a plan that differ from those of one that breaks a rule."""
    changed = [name for name in plan_fields() if getattr(after, name) != getattr(before, name)]
    words = {part.partition("=")[0]: part for part in str(after).split()}
    return " ".join(words.get(name, f"without {name}") for name in changed)


def _mended(plan: Plan, question: Question) -> Plan | None:
    """The plan after every broken rule's own fix, one after another; None where that does not end well."""
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
    if candidate.host_bytes > candidate.host_limit:
        return WhyNot(
            kind="memory",
            sentence=f"out of memory on the host: {host_message(candidate.host_bytes, candidate.host_limit)}",
            plan=candidate.plan,
            candidate=candidate,
            remedies=tuple(remedies),
            best=best,
        )
    sentence = (
        f"out of memory on {where}: {format_bytes(candidate.total_bytes)} of {format_bytes(candidate.usable_bytes)}, "
        f"{short} ({fit_words(candidate.fits)})."
    )
    return WhyNot(
        kind="memory",
        sentence=sentence,
        plan=candidate.plan,
        candidate=candidate,
        remedies=tuple(remedies),
        best=best,
        details=(f"{shown}.",),
    )


def fitting_changes(candidate: Candidate, question: Question) -> list[Remedy]:
    """The smallest changes that make a plan fit: as few fields as possible, then as fast as possible.

    One change is tried everywhere, in small steps; where none is enough, another one from the plans that then need
    least memory.
    """
    beam, seen = [candidate.plan], {candidate.plan}
    for depth in range(_DEPTH):
        near = (one for seed in beam for one in neighbours(seed, question, fine=depth == 0))
        reached = {one: None for one in near if one not in seen}
        nearby = estimated(reached, question)
        fitting = [one for one in nearby if one.fits >= question.fits]
        if fitting:
            return _smallest(candidate, fitting)
        seen |= set(reached)
        beam = [one.plan for one in sorted(nearby, key=_need)[:_BEAM]]
    return []


def _need(one: Candidate) -> float:
    """What a plan needs over what there is: of the device's memory or of its host's, whichever is scarcer."""
    return max(one.total_bytes / one.usable_bytes, one.host_bytes / one.host_limit)


def _smallest(before: Candidate, fitting: Iterable[Candidate]) -> list[Remedy]:
    """One remedy for each set of fields that changes."""
    found: dict[tuple[str, ...], Remedy] = {}
    for one in sorted(fitting, key=lambda one: one.step_s):
        words = changed_words(before.plan, one.plan)
        found.setdefault(tuple(word.partition("=")[0] for word in words.split()), Remedy(words, one))
    smallest = sorted(found.items(), key=lambda item: (len(item[0]), item[1].after.step_s))
    return [remedy for _, remedy in smallest[:_MOST]]


def _faster(candidate: Candidate, question: Question) -> list[Remedy]:
    """Single changes that fit and are faster, the fastest first."""
    nearby = [one for one in estimated(neighbours(candidate.plan, question), question) if one.fits >= question.fits]
    better = sorted((one for one in nearby if one.step_s < candidate.step_s * 0.999), key=lambda one: one.step_s)
    return [Remedy(changed_words(candidate.plan, one.plan), one) for one in better[:_MOST]]


def _signed(seconds: float) -> str:
    return f"+{format_seconds(seconds)}" if seconds >= 0 else format_seconds(seconds)
