"""Over which axes each parameter is divided, summed, joined and settled: read from its placement, once.

    parameter            its gradient adds up over              ZeRO divides it over
    whole                dp_replicate x dp_shard x cp           dp_shard x cp
    partial over tp      dp_replicate x dp_shard x cp x tp      dp_shard x cp
    cut over tp          dp_replicate x dp_shard x cp           dp_shard x cp
    experts, cut over ep dp_replicate x beside_ep               beside_ep

Parameters with the same axes are one kind: they may lie in one bucket.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.checkpoint.parts import Deal, Part, deal_out
from weft.comm import all_gather
from weft.errors import ModelError
from weft.mesh import ENDS, Axis, Mesh
from weft.parallel.local_tensors import Stretch
from weft.parallel.placement.placement import WHOLE, Placement

_DATA = ("dp_replicate", "dp_shard")
#: One rank alone.
NOBODY = Axis("nobody", 1, 0, (0,))


@dataclass(frozen=True, slots=True)
class Axes:
    """One kind of parameters.

    shard: ranks that divide a bucket. replicate: those with equal parts, whose sums add up. over: both joined.
    same: all ranks that hold the same part of the parameter. cut: those that hold its other parts.
    extra: those of `replicate` besides dp_replicate. share: this rank's place among those with equal sums, and their
    number.
    waits: whether its sums must not begin before all stages are at the end of their passes.
    holders: ranks that hold the same parts of what is divided over `shard`: those with this rank's, in their order.
    outer: of `over`, the axis that the plan's `compress` is for: dp_replicate, or where that has one rank `shard`.
    inner: of `over`, the other ranks. beside: of `replicate`, those that are not on `outer`. Without `compress` nobody
    is on the three.
    alike: ranks with the same sums before those of `outer` are added, this rank's among them.
    """

    shard: Axis
    replicate: Axis
    over: Axis
    same: Axis
    cut: Axis
    extra: Axis
    share: tuple[int, int]
    waits: bool = False
    holders: tuple[int, ...] = ()
    alike: tuple[int, ...] = ()
    outer: Axis = NOBODY
    inner: Axis = NOBODY
    beside: Axis = NOBODY


class AxisMap:
    """Axes and placements of a module's parameters and buffers by name.

    `batch`: ranks whose gradients add up where nothing is said; `stage`: all ranks with the same modules; `world`: all
    ranks.

    Args:
        mesh: of the ranks.
        placements: what techniques did, by name; a tensor that is not named is whole.
        sharded: whether the plan divides anything (zero above 0).
    """

    def __init__(self, mesh: Mesh, placements: Mapping[str, Placement], *, sharded: bool):
        self.placements = placements
        self.mesh = mesh
        self._sharded = sharded
        self._kinds: dict[tuple[object, ...], Axes] = {}
        self.batch = mesh.batch
        self.stage = self._joined((*_DATA, "cp", "tp"))
        self.stages = mesh["pp"]
        self.world = self.stage if self.stages.size == 1 else mesh.world
        #: All ranks of one replica of the model.
        self.replica = self._joined(("pp", "dp_shard", "cp", "tp"))

    @property
    def plain(self) -> Axes:
        """The axes of a parameter that nobody cut."""
        return self.of("", ())

    def is_expert(self, name: str) -> bool:
        """Return whether a parameter is cut over the expert view."""
        return "ep" in self.placement(name).cut

    def check_names(self, model: nn.Module) -> None:
        """Compare the names of placements with those of the module.

        Raises:
            ModelError: for a placement of a tensor that the module does not have.
        """
        known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
        for name in self.placements:
            if name not in known:
                raise ModelError(f"placement of {name!r}: the model has no such parameter. Name it as it is now.")

    def placement(self, name: str) -> Placement:
        """Return where the part that this rank holds lies in the whole."""
        return self.placements.get(name, WHOLE)

    def of(self, name: str, shape: Sequence[int]) -> Axes:
        """Return the kind of one parameter of this shape here."""
        placement = self.placement(name)
        times = placement.num_equal(shape, self._size(placement.cut))
        key = (placement.cut, tuple(sorted(placement.partial)), times)
        if key not in self._kinds:
            self._kinds[key] = self._build(name, placement, times)
        return self._kinds[key]

    def settling(self, name: str, buffer: torch.Tensor) -> Axis:
        """Return the axis over which a buffer is made equal: the ranks that see other samples, unless it was cut."""
        return self.of(name, buffer.shape).same if name in self.placements else self.batch

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole."""
        placement = self.placement(name)
        return placement.shape_of_whole(shape, self._size(placement.cut))

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return the whole, from this rank's part or something of its shape. A collective over the cut axis."""
        placement = self.placement(name)
        axis = self.of(name, part.shape).cut
        if axis.size == 1:
            return part
        parts = all_gather(part.contiguous(), axis).view(axis.size, *part.shape)
        if placement.index is None:
            return placement.join(list(parts))
        rows = torch.tensor(placement.index, dtype=torch.int64, device=part.device)
        return placement.join(list(parts), all_gather(rows, axis).view(axis.size, -1).tolist())

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor."""
        placement = self.placement(name)
        if not placement.is_cut:
            return whole
        axis = self.mesh[placement.cut]
        return placement.local(whole, axis.rank, axis.size)

    def part_of(self, name: str, tensor: torch.Tensor) -> Part:
        """Return where this rank's part of a tensor, or one cut alike, lies in the whole, and how in memory."""
        shape = tuple(tensor.shape)
        order = tuple(sorted(range(len(shape)), key=lambda dim: -tensor.stride(dim))) if tensor.numel() else ()
        if order == tuple(range(len(shape))) or tensor.is_contiguous():
            order = ()
        placement = self.placement(name)
        if not self.is_divided(name):
            return Part(shape, order=order)
        axis = self.mesh[placement.cut]
        rows = placement.rows(shape, axis.rank, axis.size)
        return Part(self.whole_shape(name, shape), placement.dim, rows, order)

    def stretch(self, name: str, tensor: torch.Tensor) -> Stretch:
        """Return a tensor of which every rank of its kind holds the same part."""
        part, deal = self.part_of(name, tensor), self.deal_of(name, tensor.shape)
        return Stretch.whole(self.saved_name(name), tensor, part, deal)

    def deal_of(self, name: str, shape: Sequence[int]) -> Deal:
        """Return who writes what of a part that every rank of its kind holds whole."""
        ranks, numel = self.of(name, shape).same.ranks, torch.Size(shape).numel()
        return deal_out(ranks, numel, len(ranks), turn=self.turn(name))

    @staticmethod
    def turn(name: str) -> int:
        """Return which of the ranks that hold the same comes first: the same on all ranks, another for each tensor."""
        return zlib.crc32(name.encode())

    def told(self, name: str) -> tuple[object, ...]:
        """Return what all ranks must agree on of a tensor's placement; nothing where it is whole."""
        placement = self.placement(name)
        said = (placement.cut, placement.dim, placement.parts, placement.partial, placement.pad, placement.name)
        return said if name in self.placements else ()

    def saved_name(self, name: str) -> str:
        """Return a parameter's name in checkpoints."""
        return self.placement(name).name or name

    def is_divided(self, name: str) -> bool:
        """Return whether a parameter is cut over more than one rank."""
        return self._size(self.placement(name).cut) > 1

    def refuse_cut(self, names: Iterable[str], optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that must see whole parameters, where these are cut.

        Raises:
            ModelError: for the first of the names.
        """
        for name in sorted(names):
            cut = self.placement(name).cut
            raise ModelError(
                f"optimizer {type(optimizer).__name__}: it must see the whole of parameter {name!r}, which is cut "
                f"over {'*'.join(cut)}. Use AdamW or SGD for it, or a plan with "
                f"{' '.join(f'{axis}=1' for axis in cut)}."
            )

    def named(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole tensors under the names that checkpoints have for them. A collective over the cut axes."""
        return ((self.saved_name(name), self.whole(name, tensor)) for name, tensor in pairs)

    def rest(self, *groups: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield those of the tensors that are not whole on every rank."""
        for pairs in groups:
            yield from ((n, t.detach()) for n, t in pairs if self.stages.size > 1 or self.placement(n).is_cut)

    def _build(self, name: str, placement: Placement, times: int) -> Axes:
        cut, is_expert = placement.cut, "ep" in placement.cut
        if is_expert and (len(cut) > 1 or set(placement.partial) & {"cp", "tp"}):
            raise ModelError(
                f"placement of {name!r}: cut={'*'.join(cut)} partial={'*'.join(placement.partial)}: experts are cut "
                f"over ep alone, and their gradients add up over all ranks beside it. Use cut=('ep',) without partial."
            )
        if times > 1 and len(cut) > 1:
            raise ModelError(f"placement of {name!r}: rows that several ranks hold are cut over one axis. Use one.")
        shard = ("beside_ep",) if is_expert else ("dp_shard", "cp")
        adjacent = tuple(f"{axis}/{times}" for axis in cut) if times > 1 else ()
        extra = (*adjacent, *(axis for axis in placement.partial if axis not in (*cut, *_DATA, "cp")))
        beside = () if is_expert else adjacent if "tp" in cut else ("tp",)
        of_stages = tuple(name for name in (ENDS, "pp") if name in extra)
        equal = ("dp_replicate", *beside, *of_stages)
        same = self._joined((*shard, *equal))
        if not self._sharded:
            equal = (*equal, *shard)
        sums = self.mesh.ranks_over(self._lasting(equal))
        over = self._joined(("dp_replicate", *shard, *extra))
        plan = self.mesh.plan
        outer = shard if plan.dp_replicate == 1 else ("dp_replicate",)
        coded = plan.compress != "none"
        replicate = ("dp_replicate", *extra) if self._sharded else ("dp_replicate", *shard, *extra)
        return Axes(
            alike=self.mesh.ranks_over(self._lasting(tuple(name for name in equal if name not in outer))),
            outer=self._joined(outer) if coded else NOBODY,
            inner=self._without(("dp_replicate", *shard, *extra), outer) if coded else NOBODY,
            beside=self._without(replicate, outer) if coded else NOBODY,
            shard=self._joined(shard) if self._sharded else self._nobody("dp_shard"),
            replicate=self._joined(replicate) if self._sharded else over,
            over=over,
            same=same,
            cut=self.mesh[cut] if cut else self._nobody("tp"),
            extra=self._joined(extra) if extra else self._nobody("tp"),
            share=(sums.index(self.mesh.rank), len(sums)),
            waits=bool(of_stages),
            holders=sums,
        )

    def _nobody(self, name: str) -> Axis:
        return Axis(name, 1, 0, (self.mesh.rank,))

    def _size(self, names: tuple[str, ...]) -> int:
        return len(self.mesh.ranks_over(names)) if names else 1

    def _lasting(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Without axes of size 1 that would only make names longer; data axes keep theirs."""
        return tuple(name for name in names if name in (*_DATA, "beside_ep") or self._size((name,)) > 1)

    def _without(self, names: tuple[str, ...], outer: tuple[str, ...]) -> Axis:
        """Those of the axes that have several ranks and are not of `outer`, joined."""
        rest = tuple(name for name in names if name not in outer and self._size((name,)) > 1)
        return self.mesh[rest] if rest else NOBODY

    def _joined(self, names: tuple[str, ...]) -> Axis:
        return self.mesh[self._lasting(names)]
