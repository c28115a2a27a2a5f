"""What the planner answers: ranked candidates with their figures, and why every other plan is not among them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.planner.estimator import Estimates
from weft.planner.search.figures import Cost, model_flops_utilisation, step_cost
from weft.planner.search.question import Question
from weft.planner.space import Columns, Refused
from weft.spec.plan import Plan
from weft.spec.rules import check

#: Terms in which devices do arithmetic; the rest of a step they wait or move data.
_BUSY = ("gemm", "attention", "memory_bound", "recompute", "frozen", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One plan and what is expected of it. Times in seconds a step, memory in bytes on the fullest rank.

    terms: parts of the step, which add up to step_s. memory: by class; they add up to total_bytes, which is what the
    driver's tools show; reserved_bytes is what torch's allocator holds, allocated_bytes what lies in tensors.
    fits: probability that it fits into usable_bytes. clocked: its pipeline's schedule was run on a clock, stage by
    stage; else the bubble is a closed form. host_bytes: of a rank in its host's memory, of which it may pin host_limit.
    microbatch: sequences of a pass on a rank. products: the format in which it multiplies, where not the plan's.
    """

    question: Question
    plan: Plan
    microbatch: int
    terms: Mapping[str, float]
    step_s: float
    memory: Mapping[str, float]
    allocated_bytes: float
    reserved_bytes: float
    total_bytes: float
    usable_bytes: float
    fits: float
    clocked: bool = False
    host_bytes: float = 0.0
    host_limit: float = math.inf
    products: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return self.question.job.tokens / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs over peak, attention counted whole, as Megatron-LM and PaLM do; recompute not counted."""
        return self._utilisation(causal=False)

    @property
    def causal_mfu(self) -> float:
        """The same with attention counted as far as the causal mask leaves it."""
        return self._utilisation(causal=True)

    def _utilisation(self, *, causal: bool) -> float:
        question = self.question
        return model_flops_utilisation(
            question.job, question.cluster, self.step_s, self.products or self.plan.precision, causal=causal
        )

    @property
    def busy(self) -> float:
        """Share of the step in which devices compute."""
        return min(1.0, sum(self.terms.get(name, 0.0) for name in _BUSY) / self.step_s)

    def cost(self, hour_price: float | None = None) -> Cost:
        """Return price and energy of one step; hour_price: dollars of one device for one hour."""
        return step_cost(self.question.cluster, self.step_s, self.busy, hour_price)

    @property
    def built(self) -> bool:
        """Whether the runtime runs this plan today."""
        return not check(self.plan, self.question.facts)


One = TypeVar("One", bound=Candidate)
Found = TypeVar("Found", bound=Candidate, covariant=True)
Other = TypeVar("Other", bound=Candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[Found]):
    """Ranked candidates, fastest first, and the account of all others.

    ranked: the best plans. pareto: from least memory to least time. refused: plans that are out, by reason.
    num_plans: in the space; num_estimated: those that keep the rules; num_fit: those of them that fit.
    left_out: how the space was made narrower.
    nearest: where nothing fits, the plan that comes nearest to fitting. seconds: what the search took.
    """

    question: Question
    ranked: tuple[Found, ...]
    pareto: tuple[Found, ...]
    refused: tuple[Refused, ...]
    num_plans: int
    num_estimated: int
    num_fit: int
    left_out: tuple[str, ...]
    nearest: Found | None
    seconds: float

    def __len__(self) -> int:
        return len(self.ranked)

    def __getitem__(self, index: int) -> Found:
        return self.ranked[index]

    def __iter__(self) -> Iterator[Found]:
        return iter(self.ranked)

    @property
    def best(self) -> Found | None:
        """The fastest plan that fits, or None."""
        return self.ranked[0] if self.ranked else None

    def each(self, change: Callable[[Found], Other]) -> Answer[Other]:
        """Change every candidate, and return the answer with them."""
        return Answer(
            question=self.question,
            ranked=tuple(map(change, self.ranked)),
            pareto=tuple(map(change, self.pareto)),
            refused=self.refused,
            num_plans=self.num_plans,
            num_estimated=self.num_estimated,
            num_fit=self.num_fit,
            left_out=self.left_out,
            nearest=None if self.nearest is None else change(self.nearest),
            seconds=self.seconds,
        )

    def layouts(self, limit: int = 10) -> list[Found]:
        """Return the best plan of each layout, fastest first."""
        return layouts(self.ranked)[:limit]


def layouts(ranked: Iterable[One]) -> list[One]:
    """The first of each layout in a ranking: layouts differ in an axis of the mesh or in the ZeRO stage."""
    found: dict[tuple[object, ...], One] = {}
    for one in ranked:
        found.setdefault((*one.plan.axis_sizes().values(), one.plan.ep, one.plan.zero), one)
    return list(found.values())


def candidates(
    question: Question, columns: Columns, found: Estimates, plans: Sequence[Plan] | None = None
) -> list[Candidate]:
    """Rows of columns with their estimates, in their order. plans: those of the rows, where they are at hand."""
    sums = {
        name: getattr(found, name).tolist()
        for name in ("step_s", "allocated_bytes", "reserved_bytes", "total_bytes", "fits_probability", "host_bytes")
    }
    plans = columns.plans() if plans is None else plans
    microbatches, terms, memory = columns.microbatch.tolist(), _by_row(found.terms), _by_row(found.memory)
    return [
        Candidate(
            question=question,
            plan=plans[row],
            microbatch=microbatches[row],
            terms=terms[row],
            step_s=sums["step_s"][row],
            memory=memory[row],
            allocated_bytes=sums["allocated_bytes"][row],
            reserved_bytes=sums["reserved_bytes"][row],
            total_bytes=sums["total_bytes"][row],
            usable_bytes=found.usable_bytes,
            fits=sums["fits_probability"][row],
            host_bytes=sums["host_bytes"][row],
            host_limit=found.host_limit,
        )
        for row in range(len(columns))
    ]


class Estimated:
    """Rows of columns with their estimates; the few that are asked for become candidates.

    step_s: seconds of a step, row by row. fits: the chance that memory suffices.
    """

    def __init__(self, question: Question, columns: Columns, found: Estimates):
        self._of = question, columns, found
        self.step_s: list[float] = found.step_s.tolist()
        self.fits: list[float] = found.fits_probability.tolist()

    @functools.cached_property
    def _sums(self) -> dict[str, NDArray[np.float64]]:
        """Of all rows, as `candidates` adds them up: sums of single rows may differ in the last digit."""
        return {name: getattr(self._of[2], name) for name in ("allocated_bytes", "reserved_bytes", "total_bytes")}

    def candidate(self, row: int, plan: Plan) -> Candidate:
        """Return the candidate of a row. plan: its plan."""
        question, columns, found = self._of
        sums = {name: float(values[row]) for name, values in self._sums.items()}
        return Candidate(
            question=question,
            plan=plan,
            microbatch=int(columns.microbatch[row]),
            terms={name: float(values[row]) for name, values in found.terms.items()},
            step_s=self.step_s[row],
            memory={name: float(values[row]) for name, values in found.memory.items()},
            allocated_bytes=sums["allocated_bytes"],
            reserved_bytes=sums["reserved_bytes"],
            total_bytes=sums["total_bytes"],
            usable_bytes=found.usable_bytes,
            fits=self.fits[row],
            host_bytes=float(found.host_bytes[row]),
            host_limit=found.host_limit,
        )


def _by_row(arrays: Mapping[str, NDArray[np.float64]]) -> list[dict[str, float]]:
    """The arrays' values by name, row by row. Lists of Python numbers are read many times faster than arrays are."""
    rows = zip(*(values.tolist() for values in arrays.values()), strict=True)
    return [dict(zip(arrays, row, strict=True)) for row in rows]
