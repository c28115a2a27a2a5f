"""Metrics of a plan from its step time (tokens per second, MFU, energy, price), and the answer of a search."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.config.cluster import ClusterSpec
from weft.config.energy import J_PER_KWH, drawn_watts
from weft.config.plan import Plan
from weft.config.rules.plan_rules import check
from weft.planner.cost.traced import model_flops
from weft.planner.estimator import Estimates
from weft.planner.search.question import Question
from weft.planner.space.columns import Columns, Job
from weft.planner.space.enumerate import Refused
from weft.planner.space.shape import Shape, TracedShape

#: Power (W) of host, fans and switches per device, and the overhead of the building (power usage effectiveness).
HOST_WATTS, BUILDING = 125.0, 1.2


def matmul_params(shape: Shape) -> float:
    """Return the number of parameters in the matmuls of one token: with top_k experts, without the embedding."""
    dense = shape.attention_params + shape.mlp_params(shape.ffn)
    mixture = shape.moe_shared_params - shape.norm_params + shape.top_k * shape.expert_params
    return (shape.layers - shape.moe_layers) * dense + shape.moe_layers * mixture + shape.table_params


def flops_per_token(shape: Shape, seq_len: int, *, causal: bool) -> float:
    """Return the FLOPs of forward and backward for one token, without recompute.

    Args:
        causal: count half of the T x T attention matrix, as for a causal mask. If False, count the full matrix, as PaLM
            (Chowdhery et al. 2022, appendix B) and Megatron-LM do.
    """
    if isinstance(shape, TracedShape):
        return model_flops(shape, seq_len, causal=causal)
    full, windowed = shape.layers - shape.windowed_layers, shape.windowed_layers
    seen = full * seq_len + windowed * min(seq_len, shape.window)
    attention = 12.0 * shape.heads * shape.head_dim * seen * (0.5 if causal else 1.0)
    return 6.0 * matmul_params(shape) + attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one step.

    Attributes:
        price: dollars, or None if no price is available.
        energy_kwh: energy in kWh at the meter, or None.
    """

    price: float | None
    energy_kwh: float | None


def step_cost(cluster: ClusterSpec, step_s: float, busy: float, hour_price: float | None = None) -> Cost:
    """Return price and energy of one step in which devices compute for a share `busy` of the time.

    hour_price: dollars per device hour, or None for the usual price.
    """
    devices = cluster.num_devices
    price = usual_price(cluster) if hour_price is None else hour_price
    watts = cluster.device.watts
    drawn = None if watts is None else drawn_watts(watts, busy) + HOST_WATTS
    return Cost(
        price=None if price is None else devices * step_s * price / 3600,
        energy_kwh=None if drawn is None else devices * step_s * drawn * BUILDING / J_PER_KWH,
    )


def usual_price(cluster: ClusterSpec) -> float | None:
    """Return the usual price in dollars per device hour, averaged over device kinds, or None if a price is unknown."""
    if cluster.kinds:
        each = [(_prices().get(name.rstrip("*")), count) for name, count in cluster.kinds]
        known = [(price, count) for price, count in each if price is not None]
        return sum(price * count for price, count in known) / cluster.num_devices if len(known) == len(each) else None
    return _prices().get(cluster.device.name.rstrip("*"))


@functools.cache
def _prices() -> dict[str, float]:
    text = Path(__file__).with_name("prices.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["dollars_per_hour"]


def model_flops_utilisation(job: Job, cluster: ClusterSpec, step_s: float, precision: str, *, causal: bool) -> float:
    """Return the model FLOPs utilization: FLOP/s without recompute, as a share of the devices' dense peak.

    The peak depends on the precision. Few fp32 peaks are published: without one, fp32 is compared with the TF32
    peak. Formats without any peak are compared with the half-precision peak. NaN if the device has no published peak.
    """
    peak = cluster.device.peak_flops(precision)
    if peak is None and precision == "fp32":
        peak = cluster.device.peak_flops("tf32")
    peak = peak or cluster.device.peak_flops("bf16") or cluster.device.peak_flops("fp16")
    if not peak:
        return float("nan")
    tokens = job.tokens
    flops = sum(share * flops_per_token(job.shape, length, causal=causal) for length, share in job.segments)
    if job.adapter is not None:  # frozen weights have no gradients
        shape, length = job.shape, float(job.seq_len)
        if isinstance(shape, TracedShape):
            flops -= float(shape.traced.weight_flops(1.0, length)) / length
        else:
            flops -= 2.0 * matmul_params(shape)
    return flops * tokens / (step_s * cluster.num_devices * peak)


#: Share by which a plan with offloading must be faster to be preferred, since the host's rates vary more than a
#: device's.
_OFFLOAD_MARGIN = 0.02


def rank_seconds(columns: Columns, step_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the step time (s) that plans are ranked by: 2 % more for plans with offloading."""
    offloads = (columns.offload_optimizer > 0) | (columns.offload_params > 0) | (columns.offload_activations > 0)
    return np.where(offloads, 1 + _OFFLOAD_MARGIN, 1.0) * step_s


# Answer of the planner: ranked candidates with their metrics, and the reasons why all other plans were rejected.

#: Terms in which devices compute. During the other terms they wait or move data.
_BUSY = ("gemm", "attention", "memory_bound", "recompute", "frozen", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One plan with its estimate. Times are seconds per step, memory is bytes on the rank with the highest memory use.

    Attributes:
        microbatch: sequences of a microbatch on a rank.
        terms: parts of the step; they sum to step_s.
        memory: bytes by class; they sum to total_bytes.
        allocated_bytes: bytes in tensors.
        reserved_bytes: bytes of torch's allocator.
        total_bytes: all bytes on the device, as nvidia-smi reports them.
        fits: probability that the plan fits into usable_bytes.
        clocked: True if its pipeline schedule was simulated stage by stage, False if the bubble is a closed form.
        host_bytes: host memory of a rank.
        host_limit: host memory that a rank may pin.
        products: format of the matmuls if it differs from the plan's.
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
    def rank_s(self) -> float:
        """Step time (s) that plans are ranked by (`rank_seconds`)."""
        return self.step_s * (1 + _OFFLOAD_MARGIN) if self.plan.offload else self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices together."""
        return self.question.job.tokens / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization with full attention, as in Megatron-LM and PaLM, without recompute."""
        return self._utilisation(causal=False)

    @property
    def causal_mfu(self) -> float:
        """Model FLOPs utilization with only the causal half of attention."""
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
        """Return price and energy of one step.

        hour_price: dollars per device hour, or None for the usual price.
        """
        return step_cost(self.question.cluster, self.step_s, self.busy, hour_price)

    @property
    def built(self) -> bool:
        """True if the runtime supports this plan."""
        return not check(self.plan, self.question.facts)


One = TypeVar("One", bound=Candidate)
Found = TypeVar("Found", bound=Candidate, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[Found]):
    """Result of a search: ranked candidates, fastest first, and a summary of all other plans.

    Attributes:
        ranked: the best plans.
        pareto: Pareto front, from least memory to least time.
        refused: rejected plans, by reason.
        num_plans: number of plans in the space that was searched.
        num_estimated: number of plans that satisfy the rules.
        num_fit: number of plans that also fit into memory.
        left_out: descriptions of values removed from the space.
        nearest: plan with the least memory among those that do not fit on the device, or None.
        seconds: duration of the search.
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

    def layouts(self, limit: int = 10) -> list[Found]:
        """Return the best plan of each layout, fastest first."""
        return layouts(self.ranked)[:limit]


def layouts(ranked: Iterable[One]) -> list[One]:
    """Return the first plan of each layout in a ranking. Layouts differ in an axis size, ep, or the ZeRO stage."""
    found: dict[tuple[object, ...], One] = {}
    for one in ranked:
        found.setdefault((*one.plan.axis_sizes().values(), one.plan.ep, one.plan.zero), one)
    return list(found.values())


def candidates(
    question: Question, columns: Columns, found: Estimates, plans: Sequence[Plan] | None = None
) -> list[Candidate]:
    """Return rows of columns with estimates as candidates, in order. `plans` are their plans, if available."""
    rows = Estimated(question, columns, found)
    return [rows.candidate(*each) for each in enumerate(columns.plans() if plans is None else plans)]


class Estimated:
    """Plans as rows of columns, with their estimates. Only requested rows are converted to candidates.

    Attributes:
        rank_s: step time (s) that plans are ranked by.
        fits: probability that memory suffices, for each row.
    """

    def __init__(self, question: Question, columns: Columns, found: Estimates):
        self._of = question, columns, found
        self.rank_s: list[float] = rank_seconds(columns, found.step_s).tolist()
        self.fits: list[float] = found.fits_probability.tolist()

    @functools.cached_property
    def _sums(self) -> dict[str, NDArray[np.float64]]:
        """Sums over terms and classes, for all rows. Sums for single rows may differ in the last digit."""
        names = ("step_s", "allocated_bytes", "reserved_bytes", "total_bytes", "host_bytes")
        return {name: getattr(self._of[2], name) for name in names}

    def candidate(self, row: int, plan: Plan) -> Candidate:
        """Return the candidate of a row with its plan."""
        question, columns, found = self._of
        sums = {name: float(values[row]) for name, values in self._sums.items()}
        return Candidate(
            question=question,
            plan=plan,
            microbatch=int(columns.microbatch[row]),
            terms={name: float(values[row]) for name, values in found.terms.items()},
            step_s=sums["step_s"],
            memory={name: float(values[row]) for name, values in found.memory.items()},
            allocated_bytes=sums["allocated_bytes"],
            reserved_bytes=sums["reserved_bytes"],
            total_bytes=sums["total_bytes"],
            usable_bytes=found.usable_bytes,
            fits=self.fits[row],
            host_bytes=sums["host_bytes"],
            host_limit=found.host_limit,
        )
