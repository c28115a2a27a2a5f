"""What an estimate is of, as far as its errors depend on it: kind of model, device, format, scale, length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.planner.space import Job, Shape, TracedShape
from weft.spec import ClusterSpec

#: Makes of devices by what their names begin with; the first that fits.
_GENERATIONS = (
    ("volta", ("v100",)),
    ("ampere", ("a100", "a800")),
    ("hopper", ("h100", "h200", "h800", "h20", "gh200")),
    ("blackwell", ("b200", "b300", "gb200", "gb300")),
    ("cdna", ("mi300x", "mi325x", "mi350x", "mi355x")),
    ("tpu", ("tpu-v5p", "tpu-v6e")),
)
#: Those for which dozens of runs were published.
WELL_KNOWN = frozenset({"ampere", "hopper"})
#: Tokens of a sequence, and nodes, from which on few runs were published.
_LONG, _MANY = 16_384, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """experts: whether it has any. narrow: fp8 or fp4 products. nodes: of the run. stages: of its pipeline.

    decoder: whether the model reads tokens and says the next, as those of all published runs do. adapter: whether one
    is trained in place of the weights. graphs: whether steps are launched as CUDA graphs.
    """

    generation: str
    experts: bool
    narrow: bool
    seq_len: int
    nodes: int
    stages: int
    decoder: bool = True
    adapter: bool = False
    graphs: bool = False

    @property
    def doubts(self) -> dict[str, float]:
        """What makes an error larger, each from 0 (as in most published runs) upwards, by name."""
        return {
            "experts": float(self.experts),
            "narrow": float(self.narrow),
            "newer": float(self.generation not in WELL_KNOWN),
            "long": max(0.0, math.log2(self.seq_len / _LONG) + 1) if self.seq_len >= _LONG else 0.0,
            "many": max(0.0, math.log2(self.nodes / _MANY) + 1) if self.nodes >= _MANY else 0.0,
            "network": float(self.nodes > 1),
            "pipeline": float(self.stages > 1),
        }


def generation(device: str) -> str:
    """Return the make of a device by its name; "" where no run on its kind was published."""
    name = device.rstrip("*")
    return next((make for make, names in _GENERATIONS if name.startswith(names)), "")


def circumstances_of(job: Job, cluster: ClusterSpec, precision: str, stages: int, num_devices: int) -> Circumstances:
    """Return the circumstances of one plan.

    Args:
        job: model, sequence and batch.
        cluster: gives device and size of a node.
        precision: of the plan.
        stages: of its pipeline.
        num_devices: that it uses.
    """
    return Circumstances(
        generation=generation(cluster.device.name),
        experts=job.shape.moe_layers > 0,
        narrow=precision in ("fp8", "fp4"),
        seq_len=job.seq_len,
        nodes=-(-num_devices // cluster.devices_per_node),
        stages=stages,
        decoder=_is_decoder(job.shape),
        adapter=job.adapter is not None,
    )


def _is_decoder(shape: Shape) -> bool:
    if not isinstance(shape, TracedShape):
        return True
    attention = shape.traced.attention
    return shape.vocab > 0 and attention is not None and attention.causal


def unmeasured(one: Circumstances, device: str) -> tuple[str, ...]:
    """Return what no published run was like, in words; empty where there were some of every kind."""
    found: list[str] = []
    if not one.generation:
        found.append(f"no run on {device.rstrip('*')} or its kind")
    if not one.decoder:
        found.append("no model but decoders of text")
    if one.adapter:
        found.append("no run with an adapter")
    if one.graphs:
        found.append("no run with CUDA graphs")
    if one.narrow and one.generation not in ("hopper", "blackwell", "cdna"):
        found.append("no run in fp8 or fp4 on this device")
    if one.experts and one.generation in ("volta", "ampere"):
        found.append("no run with experts on this device")
    if one.seq_len > 2**18:
        found.append("no sequence beyond 262,144 tokens")
    if one.nodes > 2048:
        found.append("no run on more than 2,048 nodes")
    return tuple(found)
