"""Positions of ranks on the mesh of a plan. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.config.plan import AXES, Plan

#: For experts, the ranks of dp_shard x cp x tp form these two axes instead (row-major, `ep` innermost).
EXPERT_AXES = ("beside_ep", "ep")
#: The first and the last stage of a pipeline, which may share a weight.
ENDS = "ends"


@dataclass(frozen=True, slots=True)
class Reader:
    """Position of a rank among the ranks that read different samples: index `rank` of `size`."""

    rank: int
    size: int

    @classmethod
    def for_rank(cls, rank: int, ranks: tuple[int, ...]) -> Reader:
        """Return the position of a rank among `ranks`, the ranks that read different samples, in order."""
        return cls(ranks.index(rank), len(ranks))

    def in_replica(self, replica: int, plan: Plan) -> Reader:
        """Return the position of this rank, which is in replica `replica`, among the readers of all replicas."""
        order, size = plan.axis_order, self.size * plan.dp_replicate
        if order.index("dp_replicate") < order.index("dp_shard"):
            return Reader(replica * self.size + self.rank, size)
        return Reader(self.rank * plan.dp_replicate + replica, size)


def joined(names: Iterable[str]) -> str:
    """Return the name of several axes joined, independent of the order of `names` and of the plan's axis order."""
    order = (ENDS, *AXES, *EXPERT_AXES)
    return "*".join(sorted(names, key=lambda name: order.index(name.partition("/")[0])))


def strides(plan: Plan, names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return (stride in ranks, size) by name, for each axis and for parts of axes in `names`, such as "tp/2"."""
    stride = 1
    found: dict[str, tuple[int, int]] = {}
    for name, size in reversed(plan.axis_sizes().items()):
        found[name] = (stride, size)
        stride *= size
    found["ep"] = (1, plan.ep)
    found["beside_ep"] = (plan.ep, plan.dp_shard * plan.cp * plan.tp // plan.ep)
    for name in names:
        axis, slash, number = name.partition("/")
        if slash and axis in AXES and number.isdigit() and int(number) and found[axis][1] % int(number) == 0:
            found[name] = (found[axis][0], int(number))
    return found


def members_of(plan: Plan, rank: int, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the global ranks that differ from `rank` only along `names`, in row-major order of those axes."""
    places = strides(plan, names)
    along = [places["pp" if name == ENDS else name] for name in names]
    base = rank - sum(rank // stride % size * stride for stride, size in along)
    members = [base]
    for name, (stride, size) in zip(names, along, strict=True):
        steps = sorted({0, size - 1}) if name == ENDS else range(size)
        members = [member + step * stride for member in members for step in steps]
    return tuple(members)
