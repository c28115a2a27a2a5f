"""Parameters of a model under zero=3: sharded in units, or replicated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.comm.mesh import Mesh
from weft.memory.offload import Host
from weft.parallel.state.flat_slices import FlatSlice
from weft.parallel.state.materialize import Materialise
from weft.parallel.state.placement import AxisMap
from weft.parallel.state.precision import Precision, cast_inputs, formats
from weft.parallel.zero_sharded.optimizer_states import ShardAdoption, ShardSlices
from weft.parallel.zero_sharded.shards import HostedShards, choose_hosted, find_shards
from weft.parallel.zero_sharded.units import Unit, finalize, find_units, kinds_of, shard_units, with_experts


class ShardedParameters:
    """Units, shards and unsharded tensors of a model, whose modules are sharded by the constructor.

    `plain` holds parameters that every rank stores in full: scalars, and those in another format than the computation.
    `members` holds the shards of each unit.
    model: model; its parameters may be on the meta device. host: host memory for the plan's share of states, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        axes: AxisMap,
        precision: Precision,
        materialise: Materialise,
        host: Host | None,
    ):
        self._axes = axes
        self.units = with_experts((*find_units(model), Unit("", model)), model, axes)
        self.unit_axes = [kind.shard for kind in kinds_of(self.units, axes)]
        cast_inputs(model, precision)
        dtypes = formats(model, precision)
        self.buffers = finalize(model, dtypes, precision, axes)
        originals = dict(model.named_parameters())
        self.kinds = {name: axes.of(name, param.shape) for name, param in originals.items()}
        self.plain = {
            name: param for name, param in originals.items() if param.ndim == 0 or dtypes[param] != precision.compute
        }
        materialise.make(self.plain.values())
        plain = set(self.plain.values())
        members, on_host = shard_units(self.units, self.unit_axes, mesh, precision, plain, materialise)
        self.shards = find_shards(model, list(originals), lambda name: self.kinds[name].shard)
        self.members = [[self.shards[name] for name in names] for names in members]
        self.modules = [unit.module for unit in self.units if isinstance(unit.module, FSDPModule)]
        self.slices = ShardSlices(self.shards, self.kinds, axes)
        self.hosted: HostedShards | None = None
        names = choose_hosted(self.shards, on_host, mesh.plan)
        if host is not None and names:
            self.hosted = HostedShards(host, self.shards, names)
            if axes.plain.replicate.size == 1:
                kinds = self.kinds
                self.hosted.watch(n for n in names if kinds[n].extra.size == 1 and kinds[n].shard.size > 1)
        self.adoption = ShardAdoption(self.shards, originals, axes.plain.shard, self.hosted)

    def local(self) -> Iterator[tuple[str, nn.Parameter]]:
        return chain(((name, shard.local) for name, shard in self.shards.items()), self.plain.items())

    def counted(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Yield this rank's shards and unsharded parameters, each with the number of ranks that store the same."""
        yield from ((shard.local, self.kinds[name].share[1]) for name, shard in self.shards.items())
        yield from ((param, self.kinds[name].same.size) for name, param in self.plain.items())

    def full(self, of: Callable[[nn.Parameter], torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors of the parameters for which `of` returns a local tensor. A collective."""
        for name, shard in self.shards.items():
            if (local := of(shard.local)) is not None:
                yield name, shard.gather(local)
        for name, param in self.plain.items():
            if (tensor := of(param)) is not None:
                yield name, tensor

    def model_slices(self) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of parameters and buffers. No collective."""
        yield from (one for name in self.shards if (one := self.slices.of(name)) is not None)
        for name, tensor in (*self.plain.items(), *self.buffers.items()):
            yield self._axes.slice_of(name, tensor)
