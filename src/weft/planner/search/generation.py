"""Plans for generating texts, alone or within steps of learning from rewards (grpo): a question, and ranked plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.config.fields.layout import common_divisors
from weft.config.plan import PLAN_FIELDS, Plan
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
#: Completions that a rank samples together in a step of grpo, and training layouts that are tried.
_GRPO_ROWS, _LAYOUTS = 64, 40
#: Share of the free memory that a whole copy of the weights may take in a step of grpo.
_COPY_SHARE = 0.7
#: Classes of memory outside tensors, and classes that training keeps between steps.
_OUTSIDE, _STATES = ("communicators", "context", "reserve"), ("parameters", "gradients", "optimizer", "communicators")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationQuestion:
    """Query for plans that generate.

    Attributes:
        kind: one of KINDS.
        asked: model, machines, fixed fields and, for grpo, the training job.
        texts: the texts that are generated together.
        completions: completions of each prompt.
        kinds: caches of the model's layers.
    """

    kind: str
    asked: Question
    texts: Texts
    completions: int
    kinds: tuple[CacheKind, ...]

    @classmethod
    def of(
        cls, kind: str, model: Any, cluster: Any, *, prompt: int | None, new: int | None, batch: str | None,
        fixed: str = "", **options: Any,
    ) -> GenerationQuestion:  # fmt: skip
        """Return a query from options of a command.

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
            hint = did_you_mean(kind, KINDS) or " Use generate."
            raise _error("for", f"for={kind}: it is {' or '.join(KINDS)}.{hint}")
        planned = replace(read_model(model), texts=1, frozen=None)  # a config's task may set them
        kinds, longest = planned.caches or cache_kinds(planned.shape), planned.spec.max_seq_len
        if not kinds or not planned.shape.vocab:
            rule = "it is no causal language model, or the sizes of its cache are unknown"
            raise _error("model", f"model={planned.name}: {rule}. Give a size or the folder of a Hugging Face model.")
        prompt = min(1000, max(1, longest * 3 // 4)) if prompt is None else _count("prompt", prompt, 2000)
        new = max(1, min(250, longest - prompt)) if new is None else _count("new", new, 500)
        if prompt + new > longest:
            rule = f"{planned.name} reads at most {longest} tokens, prompt and new ones together"
            raise _error("prompt", f"prompt={prompt} new={new}: {rule}. Use fewer.")
        prompts, completions = _batch(kind, batch)
        decided = read_fixed(fixed)
        if kind == "generate":
            _expect_used(decided)
        texts = Texts(prompt=prompt, new=new, batch=prompts * completions)
        options |= {"seq_len": prompt + new, "global_batch": texts.batch, "fixed": decided}
        asked = Question.of(planned, cluster, **options)
        return cls(kind=kind, asked=asked, texts=texts, completions=completions, kinds=kinds)

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
    usual, wanted = ("8x8", 2) if kind == "grpo" else ("64", 1)
    parts = (text or usual).lower().split("x")
    if len(parts) != wanted or not all(part.isdecimal() and 1 <= int(part) <= 10**6 for part in parts):
        rule = "PROMPTSxCOMPLETIONS" if wanted == 2 else "a whole number from 1 to 10**6"
        raise _error("batch", f"batch={text}: {rule} is needed. Use e.g. --batch {usual}.")
    return int(parts[0]), int(parts[-1]) if wanted == 2 else 1


def _expect_used(fixed: Mapping[str, Any]) -> None:
    """Raise PlanError for fields that generation refuses or does not use."""
    unused = "generation does not use this field. Leave it out."
    rules = {name: unused for name in fixed if name not in _FIELDS}
    if fixed.get("cp", 1) > 1:
        rules["cp"] = CP_IN_INFERENCE
    if fixed.get("zero") in (1, 2):
        rules["zero"] = "generation has no gradients and no optimizer to shard. Use zero=0 or zero=3."
    if rules:
        raise PlanError(
            [Problem.of(name, PLAN_FIELDS[name].kind.write(fixed[name]), rule) for name, rule in rules.items()]
        )


def _error(name: str, message: str) -> ConfigError:
    return ConfigError([Problem(name, message)])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCandidate:
    """One plan with its prediction. Times are in seconds; memory is in bytes on the rank that uses the most.

    Attributes:
        plan: the plan, for grpo with the fields of training.
        is_copied: True if each rank generates with a whole copy of the weights, in steps of grpo.
        step: the plan's training step, for grpo.
        memory: bytes by class; for grpo of training or generation, whichever needs more.
        fits: probability that the plan fits into usable_bytes.
    """

    texts: Texts
    plan: Plan
    estimate: GenerationEstimate
    is_copied: bool = False
    step: Candidate | None = None
    memory: Mapping[str, float]
    usable_bytes: float
    fits: float

    @property
    def first_s(self) -> float:
        """Time until all texts of a batch have their first token."""
        return sum(self.estimate.first.values())

    @property
    def token_s(self) -> float:
        """Time of one further token of each text."""
        return sum(self.estimate.token.values())

    @property
    def terms(self) -> dict[str, float]:
        """Time of the whole batch by term."""
        first, token = self.estimate.first, self.estimate.token
        each = {name: first.get(name, 0.0) + (self.texts.new - 1) * token.get(name, 0.0) for name in {**first, **token}}
        return {name: self.estimate.waves * seconds for name, seconds in each.items()}

    @property
    def generation_s(self) -> float:
        """Time of the whole batch."""
        return sum(self.terms.values())

    @property
    def total_s(self) -> float:
        """Time that ranks plans: generation, and for grpo the training step too."""
        return self.generation_s + (self.step.step_s if self.step is not None else 0.0)

    @property
    def prefill(self) -> float:
        """Share of generation until the first tokens."""
        return self.estimate.waves * self.first_s / self.generation_s

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second over all texts."""
        return self.texts.batch * self.texts.new / self.generation_s

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
    """

    question: GenerationQuestion
    ranked: tuple[GenerationCandidate, ...]
    too_large: tuple[GenerationCandidate, ...]
    refused: tuple[Refused, ...]
    num_plans: int


def answer_generation(question: GenerationQuestion) -> GenerationAnswer:
    """Predict every plan of a query, and rank those that fit."""
    refused: dict[str, Refused] = {}
    if question.kind == "grpo":
        trained = answer(question.asked)
        tried = [_with_step(question, one) for one in trained.layouts(_LAYOUTS)]
        found = [one for one in tried if isinstance(one, GenerationCandidate)]
        refused, num_plans = {one.name: one for one in trained.refused}, trained.num_plans
        for one in tried:
            if isinstance(one, Refused):
                refused.setdefault(one.name, replace(one, count=0)).count += 1
    else:
        plans = list(_plans(question))
        found, num_plans = list[GenerationCandidate](), len(plans)
        for plan in plans:
            if (broken := _broken_rule(question, plan)) is None:
                found.append(_candidate(question, plan, plan))
            else:
                refused.setdefault(broken[0], Refused(broken[0], 0, plan, broken[1])).count += 1
    found.sort(key=lambda one: (float(f"{one.total_s:.3e}"), one.total_bytes))
    too_large = sorted((one for one in found if one.fits < question.asked.fits), key=lambda one: one.total_bytes)
    for one in too_large:
        name, size = max(one.memory.items(), key=lambda part: part[1] * (part[0] not in _OUTSIDE))
        message = f"the fullest rank needs {format_bytes(one.total_bytes)} of {format_bytes(one.usable_bytes)}; "
        message += f"the largest part is {name} ({format_bytes(size)})."
        refused.setdefault(f"memory-{name}", Refused(f"memory-{name}", 0, one.plan, message)).count += 1
    return GenerationAnswer(
        question=question,
        ranked=tuple(one for one in found if one.fits >= question.asked.fits),
        too_large=tuple(too_large),
        refused=tuple(sorted(refused.values(), key=lambda each: -each.count)),
        num_plans=num_plans,
    )


def _plans(question: GenerationQuestion) -> Iterator[Plan]:
    """Yield the plans for all devices that have the fixed values."""
    cluster, shape, fixed = question.asked.cluster, question.asked.job.shape, question.asked.fixed
    count, device = cluster.num_devices, cluster.device
    usual = "fp32" if device.is_cpu else next((name for name in ("bf16", "fp16") if device.peak_flops(name)), "fp32")
    for tp, pp in itertools.product(common_divisors(count), repeat=2):
        if count % (tp * pp):
            continue
        data = count // (tp * pp)
        experts = common_divisors(shape.num_experts, data * tp) if shape.num_experts else [1]
        for zero, ep in itertools.product((0, 3) if data > 1 else (0,), experts):
            plan = Plan(tp=tp, pp=pp, ep=ep, zero=zero, precision=fixed.get("precision", usual))
            plan = plan.replace(dp_shard=data) if zero == 3 or ep > 1 else plan.replace(dp_replicate=data)
            if all(getattr(plan, name) == value for name, value in fixed.items()):
                yield plan


def _broken_rule(question: GenerationQuestion, plan: Plan) -> tuple[str, str] | None:
    """Return the name and the message of a rule that a plan for generation breaks, or None."""
    asked, layers = question.asked, question.asked.job.shape.layers
    cluster, model = asked.cluster, asked.model
    facts = Facts(model=model.spec, world_size=cluster.num_devices, device=cluster.device, limits=model.limits)
    for violation in check(plan, facts, asked.rules):
        return violation.rule, violation.message
    if plan.pp > layers:
        return "pp-layers", f"pp={plan.pp}: the model has {layers} blocks. Use pp of at most {layers}."
    return None


def _with_step(question: GenerationQuestion, one: Candidate) -> GenerationCandidate | Refused:
    """Return a training plan with generation on its ranks, as `complete` of weft/train/generating.py does it."""
    plan, shape = one.plan, question.asked.job.shape
    limited = replace(question, texts=replace(question.texts, most_rows=_GRPO_ROWS))
    room = one.usable_bytes - sum(one.memory[name] for name in (*_STATES, "context"))
    copy = shape.num_params * (4.0 if plan.precision in ("fp32", "tf32") else 2.0)
    is_small, must = copy <= _COPY_SHARE * room, plan.pp > 1 or plan.cp > 1 or plan.sp
    if must and not is_small:
        needs = f"under pp, cp and sp, each rank needs {format_bytes(copy)} for a whole copy of the weights"
        return Refused("whole-copy", 1, plan, f"{needs}, and {format_bytes(room)} are free. Use tp or zero=3.")
    if must or (plan.zero == 3 and is_small):
        used = Plan(dp_replicate=plan.world_size, precision=plan.precision)
        return _candidate(limited, plan, used, one, is_copied=True)
    values = {name: getattr(plan, name) for name in _FIELDS}
    return _candidate(limited, plan, Plan().replace(**{**values, "zero": 3 if plan.zero == 3 else 0}), one)


def _candidate(
    question: GenerationQuestion, plan: Plan, used: Plan, step: Candidate | None = None, *, is_copied: bool = False
) -> GenerationCandidate:
    """Return a plan with its prediction. used: the plan of generation. step: the plan's training step."""
    asked, tables = question.asked, question.asked.tables
    estimate = estimate_generation(
        asked.job.shape, question.kinds, asked.cluster, tables, used, question.texts, copied=is_copied
    )
    memory = dict(estimate.memory)
    if step is not None:
        copy = memory["parameters"] if is_copied else 0.0
        memory |= {name: step.memory[name] for name in _STATES}
        memory["parameters"] += copy
        memory = memory if sum(memory.values()) > step.total_bytes else dict(step.memory)
    usable = tables.memory_bytes * tables.usable
    on_host = asked.cluster.device.is_cpu
    spread = shipped().memory.spread if on_host else memory_error_scale(asked.job, asked.cluster)
    room = math.log(usable / sum(memory.values())) if usable else math.inf
    return GenerationCandidate(
        texts=question.texts,
        plan=plan,
        estimate=estimate,
        is_copied=is_copied,
        step=step,
        memory={name: value for name, value in memory.items() if value},
        usable_bytes=usable,
        fits=float(fits_chance(np.array(room), spread)),
    )
