"""The space of plans: which values each field may take, and every combination of them that the rules allow.

The space is homogeneous: all layers and stages are treated alike. It is built outside in: meshes, then passes of a
step, then schedules, then flags; a rule prunes as soon as what it reads is decided, and what it prunes is counted in
whole plans. Flags depend only on which axes are in use, so a block of the space is a table of meshes times a table
of flags, and rows are made only where they are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft.planner.space.columns import CP_MODES, Job
from weft.spec.cluster import ClusterSpec
from weft.spec.plan import RESHARDS

_STRAIGHT = ("gpipe", "1f1b", "zb_h1")
_TWO_STAGES = ("zb_v", "dualpipe_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values that each field may take; axes and passes take every divisor.

    schedules: with virtual stages, under a pipeline. shardings: ZeRO stage and reshard, where dp_shard is above 1.
    splits: how the data-parallel ranks may be split into replicas and shards: "all" divisors, or the "few" that lie
    on the borders of the machine. experts: the model is a mixture.
    fixed: fields that the user has decided. left_out: what was made narrower, in words.
    """

    schedules: tuple[tuple[str, int], ...]
    shardings: tuple[tuple[int, str], ...]
    recomputes: tuple[str, ...]
    offloads: tuple[tuple[str, ...], ...]
    precisions: tuple[str, ...]
    compiles: tuple[bool, ...] = (False, True)
    sequence_parallel: tuple[bool, ...] = (False, True)
    cp_modes: tuple[str, ...] = CP_MODES
    splits: str = "all"
    experts: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left_out: tuple[str, ...] = ()

    @classmethod
    def whole(cls, job: Job, cluster: ClusterSpec, fixed: Mapping[str, Any] | None = None) -> Space:
        """Everything that the planner knows, for a job on a cluster. fixed: plan fields with decided values."""
        deep = tuple(v for v in (2, 3, 4, 5, 6, 8, 10, 12) if 2 * v <= job.shape.layers)
        schedules = [*((name, 1) for name in _STRAIGHT), *((name, 2) for name in _TWO_STAGES)]
        schedules += [(name, v) for name in ("interleaved", "zb_interleaved") for v in deep]
        has = [name for name in ("bf16", "fp16") if cluster.device.peak_flops(name) is not None]
        space = cls(
            schedules=tuple(schedules),
            shardings=((1, RESHARDS[0]), (2, RESHARDS[0]), *((3, name) for name in RESHARDS)),
            recomputes=("none", "selective", "full", *(() if job.stack.flash else ("attention",))),
            offloads=((), ("optimizer",), ("params",), ("activations",), ("optimizer", "activations"),
                      ("params", "activations")),
            precisions=(*has[:1], "fp32"),
            experts=bool(job.shape.num_experts),
            fixed=dict(fixed or {}),
        )  # fmt: skip
        return space._settled()

    def _settled(self) -> Space:
        """With every decided flag as its only value."""
        given = self.fixed
        changes: dict[str, Any] = {}
        for name, one in (("recompute", "recomputes"), ("offload", "offloads"), ("precision", "precisions"),
                          ("compile", "compiles"), ("sp", "sequence_parallel"), ("cp_mode", "cp_modes")):  # fmt: skip
            if name in given:
                changes[one] = (given[name],)
        if "zero" in given or "reshard" in given:
            pairs = [
                (zero, reshard) for zero, reshard in self.shardings
                if given.get("zero", zero) == zero and given.get("reshard", reshard) == reshard
            ]  # fmt: skip
            changes["shardings"] = tuple(pairs) or ((given.get("zero", 3), given.get("reshard", RESHARDS[0])),)
        schedules = [
            (name, stages) for name, stages in self.schedules
            if given.get("schedule", name) == name and given.get("virtual_stages", stages) == stages
        ]  # fmt: skip
        if "schedule" in given or "virtual_stages" in given:
            changes["schedules"] = tuple(schedules) or (
                (given.get("schedule", "1f1b"), given.get("virtual_stages", 1)),
            )
        return replace(self, **changes)

    def narrower(self) -> Space | None:
        """The next smaller space: first goes what is hardly ever better. None where there is nothing left to take."""
        for words, changes in _NARROWER:
            if words not in self.left_out:
                return replace(self, **changes(self), left_out=(*self.left_out, words))
        return None


def _without(values: tuple[Any, ...], *gone: Any) -> tuple[Any, ...]:
    """The values without some of them, but never without all."""
    return tuple(value for value in values if value not in gone) or values


def _few_stages(space: Space) -> tuple[tuple[str, int], ...]:
    kept = tuple(pair for pair in space.schedules if pair[1] in (1, 2, 4, 8))
    return kept or space.schedules


#: What leaves a space that is too large to be looked at whole, in this order; refinement comes back to it.
_NARROWER: tuple[tuple[str, Callable[[Space], dict[str, Any]]], ...] = (
    ("fp32 (half precision is faster)", lambda space: {"precisions": space.precisions[:1]}),
    ("sp=off (sp=on needs less memory)", lambda space: {"sequence_parallel": _without(space.sequence_parallel, False)}),
    ("schedule=gpipe", lambda space: {"schedules": _without(space.schedules, ("gpipe", 1))}),
    ("virtual_stages other than 1, 2, 4 and 8", lambda space: {"schedules": _few_stages(space)}),
    ("splits of data parallelism inside a node", lambda space: {"splits": "few"}),
    ("offloads of activations", lambda space: {
        "offloads": tuple(each for each in space.offloads if "activations" not in each) or space.offloads}),
    ("reshard=after_step", lambda space: {"shardings": _without(space.shardings, (3, "after_step"))}),
    ("compile=off (compile=on is faster)", lambda space: {"compiles": _without(space.compiles, False)}),
    ("cp by gather and ulysses", lambda space: {"cp_modes": space.cp_modes[:1]}),
    ("offload of parameters", lambda space: {"offloads": _without(space.offloads, ("params",))}),
    ("zero=2", lambda space: {"shardings": _without(space.shardings, (2, "after_forward"))}),
    ("offload", lambda space: {"offloads": _without(space.offloads, ("optimizer",))}),
    ("recompute=selective", lambda space: {"recomputes": _without(space.recomputes, "selective")}),
)  # fmt: skip
