"""Placement of parameters: the part of the full tensor on this rank, and the axes over which its gradient is summed.

Tensor, expert and pipeline parallelism modify a module in place before data parallelism wraps it. They replace a
parameter by a plain parameter with this rank's part, under the same name, and return a `Placement` for each changed
parameter by name. A parameter without one is full on every rank, and its gradient is summed over `mesh.batch`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.checkpoint.read import Part, assign_evenly
from weft.comm.collectives import all_gather
from weft.comm.mesh import Axis, Mesh
from weft.comm.rank_positions import ENDS
from weft.errors import ModelError
from weft.parallel.state.flat_slices import FlatSlice


@dataclass(frozen=True, slots=True)
class Placement:
    """Position of this rank's part of one parameter in the full tensor.

    Attributes:
        cut: mesh axes that shard the tensor, such as ("tp",) or ("ep",); () if this rank holds the full tensor.
        dim: the sharded dim, divided into equal contiguous parts in order of the joined axis.
        parts: full sizes of segments of `dim` that are sharded separately (fused query-key-value, gate-up).
        index: indices of this rank's rows of `dim` if these are not an equal part; needs `whole_shape`. Several ranks
            may hold the same rows (fewer key-value heads than tp). Then `partial` contains the sharding axis, adjacent
            ranks hold the same rows, and gradients are summed over these ranks.
        whole_shape: full shape without padding; () if it follows from the part.
        partial: mesh axes, other than the data axes, over which the gradient is a partial sum.
        pad: rows of padding at the end of `dim` for equal parts. Not in checkpoints, and zero after loading.
        name: name in checkpoints if it differs from the name on this rank, for a weight that two stages share.

    Raises ModelError for `index` without `whole_shape`, or `parts` together with `pad` or `index`.
    """

    cut: tuple[str, ...] = ()
    dim: int = 0
    parts: tuple[int, ...] = ()
    index: tuple[int, ...] | None = None
    whole_shape: tuple[int, ...] = ()
    partial: tuple[str, ...] = ()
    pad: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if self.index is not None and not self.whole_shape:
            raise ModelError("placement: index= needs the full shape. Pass whole_shape=.")
        if self.parts and (self.pad or self.index is not None):
            raise ModelError(
                "placement: parts= cannot be combined with pad= or index=. Give the rows of this rank by index=."
            )

    @property
    def is_sharded(self) -> bool:
        """True if this rank holds only a part."""
        return bool(self.cut)

    def full_shape(self, local: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the full shape. local: shape of the part. size: number of ranks of the sharding axis."""
        if self.whole_shape or not self.cut:
            return self.whole_shape or tuple(local)
        shape = list(local)
        shape[self.dim] = shape[self.dim] * size - self.pad
        return tuple(shape)

    def num_equal(self, local: Sequence[int], size: int) -> int:
        """Return how many ranks of the sharding axis hold the same rows.

        It is 1 without `index`, or if an axis of `cut` is not in `partial`. local, size: as in `full_shape`.
        """
        if self.index is None or not set(self.cut) <= set(self.partial):
            return 1
        return size * local[self.dim] // (self.whole_shape[self.dim] + self.pad)

    def rows(self, local: Sequence[int], rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return the rows of `dim` that a rank holds, as ranges. Padding rows are after the full size.

        If `index` is set, these are the rows in it, for any `rank`.
        """
        if self.index is not None:
            return tuple(_ranges(self.index))
        if not self.parts:
            return ((rank * local[self.dim], (rank + 1) * local[self.dim]),)
        found, start = [], 0
        for part in self.parts:
            found.append((start + rank * part // size, start + (rank + 1) * part // size))
            start += part
        return tuple(found)

    def local(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Return a rank's part of the full tensor: a copy if `index`, `pad` or several `parts` are set, else a view.

        If `index` is set, the part has the rows in it, for any `rank`. Otherwise, raises ModelError if the number of
        rows is not a multiple of the number of ranks.
        """
        if not self.cut:
            return whole
        if self.pad:
            shape = list(whole.shape)
            shape[self.dim] = self.pad
            whole = torch.cat([whole, whole.new_zeros(shape)], self.dim)
        if self.index is not None:
            return whole.index_select(self.dim, torch.tensor(self.index, device=whole.device))
        pieces: list[torch.Tensor] = []
        for segment in whole.split(list(self.parts), self.dim) if self.parts else [whole]:
            rows, rest = divmod(segment.shape[self.dim], size)
            if rest:
                raise ModelError(
                    f"placement: {segment.shape[self.dim]} rows of dim {self.dim} are not a multiple of the {size} "
                    f"ranks of {'*'.join(self.cut)}. Give pad={size - rest}, or the rows of each rank by index=."
                )
            pieces.append(segment.narrow(self.dim, rank * rows, rows))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, parts: Sequence[torch.Tensor], indexes: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
        """Return the full tensor from the parts of all ranks of the sharding axis.

        `indexes` holds each rank's `index`, if it is used. If several ranks hold a row, the first rank's row is used.
        """
        if not self.cut:
            return parts[0]
        if self.index is not None:
            assert indexes is not None
            shape = list(self.whole_shape)
            shape[self.dim] += self.pad
            whole = parts[0].new_zeros(shape)
            for part, rows in zip(reversed(parts), reversed(indexes), strict=True):
                whole.index_copy_(self.dim, torch.tensor(list(rows), device=whole.device), part)
            return whole.narrow(self.dim, 0, self.whole_shape[self.dim])
        if not self.parts:
            whole = torch.cat(list(parts), self.dim)
        else:
            sizes = [size // len(parts) for size in self.parts]
            columns = zip(*(part.split(sizes, self.dim) for part in parts), strict=True)
            whole = torch.cat([piece for column in columns for piece in column], self.dim)
        return whole.narrow(self.dim, 0, whole.shape[self.dim] - self.pad)


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


#: Placement of a parameter that is not sharded.
WHOLE = Placement()


def merge_placements(*found: Mapping[str, Placement]) -> dict[str, Placement]:
    """Return the placements of several techniques as one mapping. Partial axes are combined.

    Raises ModelError if two techniques shard the same parameter.
    """
    merged: dict[str, Placement] = {}
    for placements in found:
        for name, placement in placements.items():
            before = merged.get(name, WHOLE)
            if before.is_sharded and placement.is_sharded:
                raise ModelError(
                    f"parameter {name!r}: it was sharded over {'*'.join(before.cut)} and then over "
                    f"{'*'.join(placement.cut)}. Shard it by one technique."
                )
            partial = (*before.partial, *(axis for axis in placement.partial if axis not in before.partial))
            saved = before.name or placement.name
            merged[name] = replace(placement if placement.is_sharded else before, partial=partial, name=saved)
    return merged


# Axes over which each parameter is sharded, reduced, gathered and kept equal, derived from its placement.

_DATA = ("dp_replicate", "dp_shard")
#: Axis of a single rank.
NOBODY = Axis("nobody", 1, 0, (0,))


@dataclass(frozen=True, slots=True)
class Axes:
    """Axes of the parameters with one kind of placement.

    Attributes:
        shard: ranks over which ZeRO shards the parameters; one rank under zero=0.
        replicate: ranks with equal shards, over which gradient sums of the shards are added.
        over: `shard` and `replicate` joined.
        same: all ranks that hold the same part of the parameter.
        cut: ranks over which tp or ep shards the parameter.
        extra: ranks outside the data axes and cp over which the gradient is a partial sum.
        share: (index of this rank among the ranks with equal gradient sums, number of these ranks).
        waits: True if its reductions must start only after all stages have finished their microbatches.
        holders: ranks that hold the same parts of tensors sharded over `shard`, including this rank, in order.
        alike: ranks with the same sums before the reduction over `outer`, including this rank.
        outer: within `over`, the axis to which `compress` applies: dp_replicate, or `shard` if dp_replicate is 1.
        inner: within `over`, the other ranks.
        beside: within `replicate`, the ranks that are not on `outer`.

    Without `compress`, the last three axes have one rank each.
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

    Attributes:
        batch: the default axis for gradient sums.
        stage: joins all ranks with the same modules.
        stages: the pp axis.
        world: joins all ranks.

    Args:
        placements: placements from techniques, by name. A tensor without one is full.
        sharded: True if the plan shards optimizer states (zero above 0).
    """

    def __init__(self, mesh: Mesh, placements: Mapping[str, Placement], *, sharded: bool):
        self.placements, self.mesh, self._sharded = placements, mesh, sharded
        self._kinds: dict[tuple[object, ...], Axes] = {}
        #: True if data ranks hold different rows of embedding tables.
        self.divides_tables = False
        self.batch = mesh.batch
        self.stage = self._joined((*_DATA, "cp", "tp"))
        self.stages = mesh["pp"]
        self.world = self.stage if self.stages.size == 1 else mesh.world
        #: All ranks of one model replica.
        self.replica = self._joined(("pp", "dp_shard", "cp", "tp"))

    @property
    def plain(self) -> Axes:
        """Axes of parameters without a placement."""
        return self.of("", ())

    def is_expert(self, name: str) -> bool:
        """Return True if a parameter is sharded over the expert axis."""
        return "ep" in self.placement(name).cut

    def divide_tables(self, placements: Mapping[str, Placement]) -> None:
        """Add the full shapes of embedding tables of which each data rank holds a part."""
        self.placements, self.divides_tables = {**self.placements, **placements}, True

    def check_names(self, model: nn.Module) -> None:
        """Raise ModelError if the module lacks a tensor that has a placement."""
        known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
        for name in self.placements:
            if name not in known:
                raise ModelError(f"placement of {name!r}: the model has no such parameter. Name it as it is now.")

    def placement(self, name: str) -> Placement:
        """Return the placement of a tensor's part on this rank."""
        return self.placements.get(name, WHOLE)

    def of(self, name: str, shape: Sequence[int]) -> Axes:
        """Return the axes of a parameter. shape: shape of its part on this rank.

        Raises ModelError for experts that are sharded over a second axis, or whose gradient is a partial sum over cp or
        tp. Also raises it if several axes shard a parameter of which several ranks hold the same rows.
        """
        placement = self.placement(name)
        times = placement.num_equal(shape, self._size(placement.cut))
        key = (placement.cut, tuple(sorted(placement.partial)), times)
        if key not in self._kinds:
            self._kinds[key] = self._build(name, placement, times)
        return self._kinds[key]

    def settling(self, name: str, buffer: torch.Tensor) -> Axis:
        """Return the axis over which a buffer is made equal: `batch`, or `same` if the buffer has a placement."""
        return self.of(name, buffer.shape).same if name in self.placements else self.batch

    def full_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the full shape of a tensor. shape: shape of its part on this rank."""
        placement = self.placement(name)
        return placement.full_shape(shape, self._size(placement.cut))

    def full_tensor(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return the full tensor from this rank's part, or from a tensor sharded like it. All ranks must call it."""
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
        """Return this rank's part of a full tensor."""
        placement = self.placement(name)
        if not placement.is_sharded:
            return whole
        axis = self.mesh[placement.cut]
        return placement.local(whole, axis.rank, axis.size)

    def part_of(self, name: str, tensor: torch.Tensor) -> Part:
        """Return the position and memory order of this rank's part of a tensor, or of one sharded like it."""
        shape = tuple(tensor.shape)
        order = tuple(sorted(range(len(shape)), key=lambda dim: -tensor.stride(dim))) if tensor.numel() else ()
        if order == tuple(range(len(shape))) or tensor.is_contiguous():
            order = ()
        placement = self.placement(name)
        if not self.is_divided(name):
            return Part(shape, order=order)
        axis = self.mesh[placement.cut]
        rows = placement.rows(shape, axis.rank, axis.size)
        return Part(self.full_shape(name, shape), placement.dim, rows, order)

    def slice_of(self, name: str, tensor: torch.Tensor) -> FlatSlice:
        """Return a tensor's flat slice, of its dtype, (numel,). Ranks with equal parts each write a range of it."""
        part, ranks = self.part_of(name, tensor), self.of(name, tensor.shape).same.ranks
        deal = assign_evenly(ranks, tensor.numel(), len(ranks), turn=self.turn(name))
        return FlatSlice.of_full(self.saved_name(name), tensor, part, deal)

    @staticmethod
    def turn(name: str) -> int:
        """Return a hash of the name, which decides with which rank the division of writes among ranks begins."""
        return zlib.crc32(name.encode())

    def agreed_fields(self, name: str) -> tuple[object, ...]:
        """Return the fields of a tensor's placement on which all ranks must agree, or () if it is full."""
        placement = self.placement(name)
        said = (placement.cut, placement.dim, placement.parts, placement.partial, placement.pad, placement.name)
        return said if name in self.placements else ()

    def saved_name(self, name: str) -> str:
        """Return a parameter's name in checkpoints."""
        return self.placement(name).name or name

    def is_divided(self, name: str) -> bool:
        """Return True if a parameter is sharded over more than one rank."""
        return self._size(self.placement(name).cut) > 1

    def refuse_sharded(self, names: Iterable[str], optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError if there are `names`: sharded parameters that an optimizer needs in full."""
        for name in sorted(names):
            cut = self.placement(name).cut
            raise ModelError(
                f"optimizer {type(optimizer).__name__}: it needs the full parameter {name!r}, which is sharded over "
                f"{'*'.join(cut)}. Use AdamW or SGD for it, or a plan with {' '.join(f'{axis}=1' for axis in cut)}."
            )

    def named(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full tensors with their names in checkpoints. Collective over the sharding axes."""
        return ((self.saved_name(name), self.full_tensor(name, tensor)) for name, tensor in pairs)

    def rest(self, *groups: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are sharded or on another pipeline stage, so that not every rank has them in full."""
        for pairs in groups:
            yield from ((n, t.detach()) for n, t in pairs if self.stages.size > 1 or self.placement(n).is_sharded)

    def _build(self, name: str, placement: Placement, times: int) -> Axes:
        cut, is_expert = placement.cut, "ep" in placement.cut
        if is_expert and (len(cut) > 1 or set(placement.partial) & {"cp", "tp"}):
            raise ModelError(
                f"placement of {name!r}: cut={'*'.join(cut)} partial={'*'.join(placement.partial)}: experts are "
                "sharded over ep only, and their gradients are summed over all other ranks. Use cut=('ep',) without "
                "partial."
            )
        if times > 1 and len(cut) > 1:
            raise ModelError(f"placement of {name!r}: rows of several ranks are sharded over one axis. Use one.")
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
            shard=self._joined(shard) if self._sharded else self._empty_axis("dp_shard"),
            replicate=self._joined(replicate) if self._sharded else over,
            over=over,
            same=same,
            cut=self.mesh[cut] if cut else self._empty_axis("tp"),
            extra=self._joined(extra) if extra else self._empty_axis("tp"),
            share=(sums.index(self.mesh.rank), len(sums)),
            waits=bool(of_stages),
            holders=sums,
        )

    def _empty_axis(self, name: str) -> Axis:
        return Axis(name, 1, 0, (self.mesh.rank,))

    def _size(self, names: tuple[str, ...]) -> int:
        return len(self.mesh.ranks_over(names)) if names else 1

    def _lasting(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Drop axes of size 1, which would only make names longer. Data axes are kept."""
        return tuple(name for name in names if name in (*_DATA, "beside_ep") or self._size((name,)) > 1)

    def _without(self, names: tuple[str, ...], outer: tuple[str, ...]) -> Axis:
        """Return the joined axes of `names` that have several ranks and are not in `outer`."""
        rest = tuple(name for name in names if name not in outer and self._size((name,)) > 1)
        return self.mesh[rest] if rest else NOBODY

    def _joined(self, names: tuple[str, ...]) -> Axis:
        return self.mesh[self._lasting(names)]
