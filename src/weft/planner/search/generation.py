"""Plans for generating texts, alone or within steps of learning from rewards (grpo): a question, and ranked plans."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weft.config.layout import common_divisors
from weft.config.plan import Plan
from weft.config.rules.plan_rules import CP_IN_INFERENCE, check
from weft.config.rules.rule import Facts
from weft.errors import ConfigError, PlanError, Problem, did_you_mean
from weft.planner.cost.generation import CacheKind, GenerationEstimate, Texts, cache_kinds, estimate_generation
from weft.planner.search.best_plans import answer
from weft.planner.search.candidate import Candidate
from weft.planner.search.model_source import read_model
from weft.planner.search.question import Question, read_fixed
from weft.planner.space.enumerate import Refused
from weft.planner.uncertainty import fits_chance, memory_error_scale, shipped
from weft.units import format_bytes

KINDS = ("generate", "grpo")
#: Fields of plans that generation depends on.
_FIELDS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "precision")
#: Completions that a rank samples at once in a step of grpo.
_GRPO_ROWS = 64
#: Training layouts that are tried for grpo.
_LAYOUTS = 40
#: Classes of memory outside tensors.
_OUTSIDE = ("communicators", "context", "reserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationQuestion:
    """Query for plans that generate.

    Attributes:
        kind: one of KINDS.
        asked: model, machines and, for grpo, the training job.
        texts: the texts that are generated together.
        completions: completions of each prompt.
        kinds: what the model's layers keep.
        fixed: values of plan fields that the user fixed.
    """

    kind: str
    asked: Question
    texts: Texts
    completions: int
    kinds: tuple[CacheKind, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(
        cls, kind: str, model: Any, cluster: Any, *, prompt: int | None, new: int | None, batch: str | None,
        fixed: str = "", **options: Any,
    ) -> GenerationQuestion:  # fmt: skip
        """Return a query from the words of a command.

        Args:
            kind: one of KINDS.
            model, cluster: as in `Question.of`.
            prompt: tokens of a prompt; None: 1000, or less for a short context.
            new: new tokens of a text; None: 250, or less.
            batch: number of texts; for grpo prompts x completions, such as "8x8".
            fixed: plan fields that the search must not change, as plan text.
            **options: other options of `Question.of`.

        Raises:
            ModelError, ConfigError, PlanError: for input that cannot be read, and models that do not generate text.
        """
        if kind not in KINDS:
            raise _error("for", f"for={kind}: it is {' or '.join(KINDS)}.{did_you_mean(kind, KINDS)} Use generate.")
        planned = read_model(model)
        if planned.texts > 1 or planned.frozen is not None:  # of the config's task, not of generation
            planned = replace(planned, texts=1, frozen=None)
        longest = planned.spec.max_seq_len
        prompt = min(1000, max(1, longest * 3 // 4)) if prompt is None else _count("prompt", prompt, 2000)
        new = max(1, min(250, longest - prompt)) if new is None else _count("new", new, 500)
        if prompt + new > longest:
            rule = f"{planned.name} reads at most {longest} tokens, prompt and new ones together"
            raise _error("prompt", f"prompt={prompt} new={new}: {rule}. Use fewer.")
        prompts, completions = _batch(kind, batch)
        kinds = planned.caches or cache_kinds(planned.shape)
        if not kinds or not planned.shape.vocab:
            rule = "it is no causal language model, or the sizes of its cache are unknown"
            raise _error("model", f"model={planned.name}: {rule}. Give a size or the folder of a Hugging Face model.")
        decided = read_fixed(fixed)
        if kind == "generate":
            _expect_used(decided)
        texts = Texts(prompt=prompt, new=new, batch=prompts * completions)
        asked = Question.of(planned, cluster, seq_len=prompt + new, global_batch=texts.batch, fixed=decided, **options)
        return cls(kind=kind, asked=asked, texts=texts, completions=completions, kinds=kinds, fixed=decided)

    @property
    def work(self) -> str:
        """Text that describes the texts."""
        texts, several = self.texts, f"{self.texts.batch} texts at once"
        if self.kind == "grpo":
            several = f"{texts.batch // self.completions} prompts x {self.completions} completions a step"
        return f"{several}, prompts of {texts.prompt} tokens, {texts.new} new ones each"


def _count(name: str, value: int, example: int) -> int:
    if not 1 <= value <= 10**7:
        raise _error(name, f"{name}={value}: a whole number from 1 to 10**7 is needed. Use e.g. --{name} {example}.")
    return value


def _batch(kind: str, text: str | None) -> tuple[int, int]:
    """Return the numbers of prompts and of completions of each."""
    is_grpo = kind == "grpo"
    text = text or ("8x8" if is_grpo else "64")
    parts = text.lower().split("x")
    numbers = [int(part) for part in parts if part.isdecimal() and 1 <= int(part) <= 10**6]
    if len(numbers) != len(parts) or len(parts) != 1 + is_grpo:
        rule = "prompts x completions" if is_grpo else "a whole number from 1 to 10**6"
        raise _error("batch", f"batch={text}: {rule} is needed. Use e.g. --batch {'8x8' if is_grpo else '64'}.")
    return (numbers[0], numbers[1]) if is_grpo else (numbers[0], 1)


def _expect_used(fixed: Mapping[str, Any]) -> None:
    """Raise PlanError for fields that generation refuses or does not use."""
    if fixed.get("cp", 1) > 1:
        raise PlanError([Problem.of("cp", fixed["cp"], CP_IN_INFERENCE)])
    unused = next((name for name in fixed if name not in _FIELDS), None)
    if unused is not None:
        rule = f"generation does not use this field. Leave it out, and fix some of {', '.join(_FIELDS)}."
        raise PlanError([Problem.of(unused, fixed[unused], rule)])
    if fixed.get("zero", 0) in (1, 2):
        rule = "generation has no gradients and no optimizer to shard. Use zero=0 or zero=3."
        raise PlanError([Problem.of("zero", fixed["zero"], rule)])


def _error(name: str, message: str) -> ConfigError:
    return ConfigError([Problem(name, message)])


# Candidates.


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCandidate:
    """One plan with its prediction. Times are in seconds; memory is in bytes on the rank that uses the most.

    Attributes:
        plan: the plan, for grpo with the fields of training.
        is_copied: True if each rank generates with a whole copy of the weights, as in steps of grpo under pp and cp.
        step: the plan's training step, for grpo.
        memory: bytes by class; for grpo of training or generation, whichever needs more.
        fits: probability that the plan fits into usable_bytes.
    """

    question: GenerationQuestion
    plan: Plan
    estimate: GenerationEstimate
    is_copied: bool = False
    step: Candidate | None = None
    memory: Mapping[str, float]
    usable_bytes: float
    fits: float

    @property
    def first_s(self) -> float:
        """Time until all texts that are generated at once have their first token."""
        return sum(self.estimate.first.values())

    @property
    def token_s(self) -> float:
        """Time of one further token of each text."""
        return sum(self.estimate.token.values())

    @property
    def terms(self) -> dict[str, float]:
        """Time of the whole batch by term."""
        found, waves = dict[str, float](), self.estimate.waves
        for times, part in ((1, self.estimate.first), (self.question.texts.new - 1, self.estimate.token)):
            for name, seconds in part.items():
                found[name] = found.get(name, 0.0) + waves * times * seconds
        return found

    @property
    def generation_s(self) -> float:
        """Time of the whole batch."""
        return sum(self.terms.values())

    @property
    def total_s(self) -> float:
        """Time by which plans are ranked: of the whole batch, and for grpo of the step with it."""
        return self.generation_s + (self.step.step_s if self.step is not None else 0.0)

    @property
    def prefill(self) -> float:
        """Share of generation until the first tokens."""
        return self.estimate.waves * self.first_s / self.generation_s

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second over all texts."""
        return self.question.texts.batch * self.question.texts.new / self.generation_s

    @property
    def text_tokens_per_s(self) -> float:
        """Tokens per second of one text after its first."""
        return 1 / self.token_s

    @property
    def total_bytes(self) -> float:
        """All bytes on the device."""
        return sum(self.memory.values())

    @property
    def allocated_bytes(self) -> float:
        """Bytes in tensors."""
        return sum(value for name, value in self.memory.items() if name not in _OUTSIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationAnswer:
    """Ranked plans, fastest first, and why others were refused.

    Attributes:
        ranked: plans that fit.
        too_large: plans that do not fit, the smallest first.
        refused: plans that break a rule or do not fit, by reason.
        num_plans: number of all plans.
        seconds: duration of the search.
    """

    question: GenerationQuestion
    ranked: tuple[GenerationCandidate, ...]
    too_large: tuple[GenerationCandidate, ...]
    refused: tuple[Refused, ...]
    num_plans: int
    seconds: float

    @property
    def best(self) -> GenerationCandidate | None:
        """The fastest plan that fits, or None."""
        return self.ranked[0] if self.ranked else None


def answer_generation(question: GenerationQuestion) -> GenerationAnswer:
    """Predict every plan of a query, and rank those that fit."""
    start = time.perf_counter()
    refused: dict[str, Refused] = {}
    if question.kind == "grpo":
        trained = answer(question.asked)
        found = [_with_step(question, one) for one in trained.layouts(_LAYOUTS)]
        refused = {one.name: one for one in trained.refused}
        num_plans = trained.num_plans
    else:
        plans = list(_plans(question))
        found = [generation_candidate(question, plan) for plan in plans if not _is_refused(question, plan, refused)]
        num_plans = len(plans)
    found.sort(key=lambda one: (float(f"{one.total_s:.3e}"), one.total_bytes))
    fitting = [one for one in found if one.fits >= question.asked.fits]
    too_large = sorted((one for one in found if one.fits < question.asked.fits), key=lambda one: one.total_bytes)
    for one in too_large:
        most = max((name for name in one.memory if name not in _OUTSIDE), key=lambda name: one.memory[name])
        known = refused.setdefault(f"memory-{most}", Refused(f"memory-{most}", 0, one.plan, _too_large(one)))
        known.count += 1
    return GenerationAnswer(
        question=question,
        ranked=tuple(fitting),
        too_large=tuple(too_large),
        refused=tuple(sorted(refused.values(), key=lambda each: -each.count)),
        num_plans=num_plans,
        seconds=time.perf_counter() - start,
    )


def _too_large(one: GenerationCandidate) -> str:
    parts = sorted(one.memory.items(), key=lambda part: -part[1])[:3]
    told = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts)
    return f"the fullest rank needs {format_bytes(one.total_bytes)} of {format_bytes(one.usable_bytes)}: {told}."


def _plans(question: GenerationQuestion) -> Iterator[Plan]:
    """Yield the plans for all devices that have the fixed values."""
    cluster, shape = question.asked.cluster, question.asked.job.shape
    count = cluster.num_devices
    peak = cluster.device.peak_flops
    half = next((name for name in ("bf16", "fp16") if peak(name)), "bf16") if not cluster.device.is_cpu else None
    formats = [question.fixed["precision"]] if "precision" in question.fixed else [half or "fp32"]
    for tp, pp in itertools.product(common_divisors(count), repeat=2):
        if count % (tp * pp):
            continue
        data = count // (tp * pp)
        experts = common_divisors(shape.num_experts, data * tp) if shape.num_experts else [1]
        for zero, ep, precision in itertools.product((0, 3) if data > 1 else (0,), experts, formats):
            shards = zero == 3 or ep > 1
            sizes = {"dp_shard": data} if shards else {"dp_replicate": data}
            plan = Plan(tp=tp, pp=pp, ep=ep, zero=zero, precision=precision, **sizes)
            if all(getattr(plan, name) == value for name, value in question.fixed.items()):
                yield plan


def rule_against(question: GenerationQuestion, plan: Plan) -> tuple[str, str] | None:
    """Return the name and the message of a rule that a plan for generation breaks, or None."""
    asked = question.asked
    facts = Facts(
        model=asked.model.spec, world_size=asked.cluster.num_devices, device=asked.cluster.device,
        limits=asked.model.limits,
    )  # fmt: skip
    for violation in check(plan, facts, asked.rules):
        return violation.rule, violation.message
    if plan.pp > asked.job.shape.layers:
        layers = asked.job.shape.layers
        return "pp-layers", f"pp={plan.pp}: the model has {layers} blocks. Use pp of at most {layers}."
    return None


def _is_refused(question: GenerationQuestion, plan: Plan, refused: dict[str, Refused]) -> bool:
    broken = rule_against(question, plan)
    if broken is not None:
        refused.setdefault(broken[0], Refused(broken[0], 0, plan, broken[1])).count += 1
    return broken is not None


def generation_candidate(question: GenerationQuestion, plan: Plan) -> GenerationCandidate:
    """Return a plan with its prediction."""
    asked = question.asked
    estimate = estimate_generation(asked.job.shape, question.kinds, asked.cluster, asked.tables, plan, question.texts)
    return _candidate(question, plan, estimate, estimate.memory)


def _with_step(question: GenerationQuestion, one: Candidate) -> GenerationCandidate:
    """Return a training plan with generation on its ranks."""
    asked, plan = question.asked, one.plan
    copies = plan.pp > 1 or plan.cp > 1
    texts = replace(question.texts, most_rows=_GRPO_ROWS)
    if copies:
        used = Plan(dp_replicate=plan.world_size, precision=plan.precision)
    else:
        used = Plan(**{name: getattr(plan, name) for name in _FIELDS} | {"zero": 3 * (plan.zero == 3)})
    estimate = estimate_generation(
        asked.job.shape, question.kinds, asked.cluster, asked.tables, used, texts, copied=copies
    )
    memory = dict(estimate.memory)
    memory["parameters"] = one.memory["parameters"] + (memory["parameters"] if copies else 0.0)
    memory |= {name: one.memory[name] for name in ("gradients", "optimizer", "communicators")}
    if sum(memory.values()) < one.total_bytes:
        memory = dict(one.memory)
    return replace(_candidate(question, plan, estimate, memory), step=one, is_copied=copies)


def _candidate(
    question: GenerationQuestion, plan: Plan, estimate: GenerationEstimate, memory: Mapping[str, float]
) -> GenerationCandidate:  # fmt: skip
    asked = question.asked
    usable = asked.tables.memory_bytes * asked.tables.usable
    is_host = asked.cluster.device.is_cpu
    spread = shipped().memory.spread if is_host else memory_error_scale(asked.job, asked.cluster)
    room = math.log(usable / sum(memory.values())) if usable else math.inf
    return GenerationCandidate(
        question=question,
        plan=plan,
        estimate=estimate,
        memory={name: value for name, value in memory.items() if value},
        usable_bytes=usable,
        fits=float(fits_chance(np.array(room), spread)),
    )
