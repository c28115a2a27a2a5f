"""Loading of base weights into a model that already has an adapter, and initialization of DoRA magnitudes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from weft.checkpoint.manifest import DTYPE_BYTES, TensorEntry
from weft.checkpoint.read import Part
from weft.checkpoint.read_tensors import copy_part
from weft.checkpoint.safetensors_files import torch_formats
from weft.comm.collectives import all_reduce
from weft.errors import ModelError
from weft.models.adapters import Adapted, adapted
from weft.models.adapters_experts import stack_names
from weft.models.token_rows import TOKEN_ROWS
from weft.parallel.state.flat_slices import FlatSlice, SavedTensor, StateSource
from weft.parallel.state.gradients import data_parallel


@torch.no_grad()
def load_base(model: nn.Module, source: StateSource) -> None:
    """Read this rank's part of a model's base weights. An adapter starts as `add_adapter` initializes it.

    All ranks call it, before the first step. model: result of `parallelize`, with or without an adapter. source:
    weights of the model without its adapter.
    """
    record, engine = adapted(model), data_parallel(model)
    if record is None:
        engine.load_weights(source)
        return
    own = {f"{path}.{name}" for path, name in record.params()}
    own |= {f"{path}{end}" for path, end in stack_names(record.experts, "lora")}
    source = BaseSource(source, record)
    for one in engine.model_slices():
        if one.name not in own:
            one.fill(source)
    engine.publish()
    start_magnitudes(model)


class BaseSource:
    """Source of base weights, and of the adapter tensors that are initialized from them.

    These adapter tensors are the rows of embeddings that are trained, and the magnitudes of experts under dora.
    """

    def __init__(self, source: StateSource, record: Adapted):
        self._source, entries = source, dict(source.entries)
        self._rows, self._norms = dict[str, tuple[str, Part]](), dict[str, tuple[str, bool]]()
        for path, ids in record.tokens.items():
            weight, name = source.entries[f"{path}.weight"], f"{path}.{TOKEN_ROWS}"
            part = Part(tuple(weight.shape), 0, tuple((token, token + 1) for token in ids))
            self._rows[name] = f"{path}.weight", part
            entries[name] = TensorEntry("", weight.dtype, part.local_shape)
        for path, is_transposed in record.experts.items() if record.kind.kind == "dora" else ():
            count, first, second = source.entries[path].shape
            self._norms[f"{path}_lora_magnitude"] = path, is_transposed
            shape = (count, second if is_transposed else first)
            entries[f"{path}_lora_magnitude"] = TensorEntry("", "F64", shape)
        self.entries: Mapping[str, SavedTensor] = entries

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a flattened part from index `start` on, in the dtype of `entries`."""
        if name in self._rows:
            weight, rows = self._rows[name]
            full = np.empty(rows.local_shape, f"V{DTYPE_BYTES[self.entries[name].dtype]}")
            self._source.read(weight, rows, 0, full.reshape(-1).view(np.uint8).data)
            copy_part(full, part, start, out)
        elif name in self._norms:
            weight, is_transposed = self._norms[name]
            copy_part(self._norms_of(weight, is_transposed, part), part, start, out)
        else:
            self._source.read(name, part, start, out)

    def _norms_of(self, name: str, is_transposed: bool, part: Part) -> np.ndarray:
        """Return the norm of each output of the experts in a part, (experts, outputs); zeros for other experts."""
        entry = self._source.entries[name]
        found = np.zeros(part.shape)
        for low, high in part.rows if part.rows is not None and part.dim == 0 else ((0, part.shape[0]),):
            for expert in range(low, min(high, part.shape[0])):
                one = Part(tuple(entry.shape), 0, ((expert, expert + 1),))
                weight = torch.empty(entry.shape[1:], dtype=torch_formats()[entry.dtype])
                self._source.read(name, one, 0, weight.view(-1).view(torch.uint8).numpy().data)
                found[expert] = torch.linalg.vector_norm(weight.double(), dim=0 if is_transposed else 1).numpy()
        return found


@torch.no_grad()
def start_magnitudes(model: nn.Module) -> None:
    """Set the magnitude of each adapted layer to its full weight's norm per output, so DoRA starts as its base model.

    `add_adapter` does this if weights exist, and `parallelize` if it creates them. Only code that fills the frozen
    weights of a parallelized model needs to call this. All ranks call it, before the first step. It does nothing for
    other kinds of adapter. model: result of `parallelize`. Raises ModelError for a model without an adapter.
    """
    record = adapted(model)
    if record is None:
        raise ModelError(
            f"model of type {type(model).__name__}: it has no adapter. Call add_adapter before parallelize."
        )
    if record.kind.kind != "dora":
        return
    engine = data_parallel(model)
    mesh, found = engine.axes.mesh, list(engine.model_slices())
    # Each layer's outputs have a range in one vector, equal on all ranks. A pipeline stage contributes only its own
    # layers.
    sizes = torch.zeros(len(record.layers), dtype=torch.int64, device=mesh.device)
    index = {path: place for place, path in enumerate(record.layers)}
    for one in found:
        path, _, name = one.name.rpartition(".")
        if path in index and name == "lora_magnitude":
            sizes[index[path]] = one.part.shape[0]
    ends = all_reduce(sizes, engine.axes.world, op="max").cumsum(0).tolist()
    first = dict(zip(record.layers, [0, *ends[:-1]], strict=True))
    totals = torch.zeros(ends[-1], dtype=torch.float64, device=mesh.device)
    for one in found:
        path, _, name = one.name.rpartition(".")
        if path in first and name == "weight":
            _add_squares(totals[first[path] :], one, mesh.rank, outputs=1 if record.layers[path] else 0)
    norms = all_reduce(totals, engine.axes.world).sqrt()
    for one in found:
        path, _, name = one.name.rpartition(".")
        if path in first and name == "lora_magnitude":
            for view in one.part.views(one.start, one.start + one.flat.numel()):
                low, high = view.box[0]
                own = norms[first[path] + low : first[path] + high]
                one.flat[view.offset : view.offset + high - low].copy_(own)
    engine.publish()


def _add_squares(totals: torch.Tensor, one: FlatSlice, rank: int, outputs: int) -> None:
    """Add the squares of the weight elements that this rank writes to `totals`, by output. outputs: the output dim."""
    mine = one.mine(rank)
    if mine is None:
        return
    start, data = mine
    for view in one.part.views(start, start + data.numel()):
        block = data.as_strided(
            [high - low for low, high in view.box], view.strides, data.storage_offset() + view.offset
        )
        low, high = view.box[outputs]
        totals[low:high] += torch.linalg.vector_norm(block, dim=1 - outputs, dtype=torch.float64).square()
