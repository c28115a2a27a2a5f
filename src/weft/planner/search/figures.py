"""Figures of a plan that follow from its step time: tokens a second, MFU in its conventions, energy and price."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from weft.planner.cost import model_flops
from weft.planner.space import Job, Shape, TracedShape
from weft.spec import ClusterSpec

#: Watts of host, fans and switches for each device, and what the building takes beside (power usage effectiveness).
HOST_WATTS, BUILDING = 125.0, 1.2
#: Share of its rated power that a device draws while it waits.
_IDLE = 0.3


def matmul_params(shape: Shape) -> float:
    """Parameters that one token is multiplied with: of its top_k experts, without the embedding's table."""
    dense = shape.attention_params + shape.mlp_params(shape.ffn)
    mixture = shape.moe_shared_params - shape.norm_params + shape.top_k * shape.expert_params
    return (shape.layers - shape.moe_layers) * dense + shape.moe_layers * mixture + shape.table_params


def flops_per_token(shape: Shape, seq_len: int, *, causal: bool) -> float:
    """FLOPs of forward and backward for one token, recompute not counted.

    causal: attention counts what a causal mask leaves, half of the square; else the whole square, as PaLM
    (Chowdhery et al. 2022, appendix B) and Megatron-LM count it.
    """
    if isinstance(shape, TracedShape):
        return model_flops(shape, seq_len, causal=causal)
    full, windowed = shape.layers - shape.windowed_layers, shape.windowed_layers
    seen = full * seq_len + windowed * min(seq_len, shape.window)
    attention = 12.0 * shape.heads * shape.head_dim * seen * (0.5 if causal else 1.0)
    return 6.0 * matmul_params(shape) + attention


def _weight_gradients(job: Job) -> float:
    """FLOPs that the gradients of all weights take for one token."""
    if isinstance(job.shape, TracedShape):
        return float(job.shape.traced.weight_flops(1.0, float(job.seq_len))) / job.seq_len
    return 2.0 * matmul_params(job.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one step costs. price: in dollars, None where no price is known. energy: kWh at the meter."""

    price: float | None
    energy_kwh: float | None


def step_cost(cluster: ClusterSpec, step_s: float, busy: float, hour_price: float | None = None) -> Cost:
    """Price and energy of one step.

    busy: share of the step in which devices compute. hour_price: dollars of one device for one hour; None takes the
    usual price of the device, where there is one.
    """
    devices = cluster.num_devices
    price = usual_price(cluster) if hour_price is None else hour_price
    watts = cluster.device.watts
    drawn = None if watts is None else watts * (_IDLE + (1 - _IDLE) * busy) + HOST_WATTS
    return Cost(
        price=None if price is None else devices * step_s * price / 3600,
        energy_kwh=None if drawn is None else devices * step_s * drawn * BUILDING / 3.6e6,
    )


def usual_price(cluster: ClusterSpec) -> float | None:
    """Dollars that one device usually costs for one hour, the mean over several kinds; None where nothing is known."""
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
    """Share of the devices' dense peak that the model's own FLOPs take, recompute not counted.

    The peak is that of the precision. Of fp32 few devices' peaks are known: it counts against TF32's, as tf32 does.
    """
    peak = cluster.device.peak_flops(precision)
    if peak is None and precision == "fp32":
        peak = cluster.device.peak_flops("tf32")
    peak = peak or cluster.device.peak_flops("bf16") or cluster.device.peak_flops("fp16")
    if not peak:
        return float("nan")
    tokens = job.tokens
    flops = sum(share * flops_per_token(job.shape, length, causal=causal) for length, share in job.pieces)
    if job.adapter is not None:  # frozen weights have no gradients to make
        flops -= _weight_gradients(job)
    return flops * tokens / (step_s * cluster.num_devices * peak)
