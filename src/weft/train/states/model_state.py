"""State of a model and its optimizer for checkpoints: slices to save, loading, and checkpoints of adapters.

A checkpoint of an adapter contains digests of the base model's weights instead of the weights.

The digest of a weight is a sum over elements of hashes of (position, value), so every rank digests its own elements and
the result is independent of the plan. The digest uses at most `SAMPLES` evenly spaced elements of a weight, rounded to
bfloat16, so that it does not change if precision=bf16 rounds frozen weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import nn

from weft.checkpoint.load import Checkpoint
from weft.checkpoint.read import Part
from weft.checkpoint.safetensors_files import torch_formats
from weft.checkpoint.save import SavedSlice
from weft.comm.collectives import all_reduce
from weft.config.sections import OptimizerSection
from weft.errors import CheckpointError
from weft.memory.offload import HostCopies
from weft.models.adapters import Adapted, adapted
from weft.models.quantized_linear import BASE_FORMATS, BaseFormat
from weft.optim.build import build_optimizer, freeze
from weft.optim.rounded_adamw import exact_moment
from weft.parallel.choose_engine import load_quantized_weights, quantized_slices
from weft.parallel.replicas.local_sgd import rare_sync
from weft.parallel.state.flat_slices import FlatSlice, SavedTensor, StateSource
from weft.parallel.state.gradients import DataParallel, data_parallel, is_attached, originals
from weft.parallel.state.materialize import allow_sharded_state
from weft.parallel.zero.states import load_carried, local_wire_state
from weft.train.states.averaged_weights import averaged_slices, load_trained
from weft.train.states.state_io import COUNTS, SavedReplicas, replica_slices, resume_replicas

#: Maximum number of elements of one weight in its digest.
SAMPLES = 2**14
#: Odd constants of the hash. Those above 2^63 are written as the negative int64 values that torch needs.
_PLACE, _VALUE, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def names_left_out(model: nn.Module) -> frozenset[str]:
    """Return the names of the tensors that a checkpoint omits: the frozen parameters of a model with an adapter."""
    if adapted(model) is None:
        return frozenset()
    if is_attached(model):
        return frozenset(name for name, one in originals(model).items() if one.is_parameter and not one.is_trained)
    return frozenset(name for name, param in model.named_parameters() if not param.requires_grad)


def adapter_state(model: nn.Module) -> dict[str, Any] | None:
    """Return a description of the model's adapter and its base for checkpoints, as JSON, or None without an adapter.

    All ranks call it if the model is parallelized.
    """
    record = adapted(model)
    return None if record is None else {**record.to_json(), "base": _digests(model)}


def check_base(model: nn.Module, saved: Mapping[str, Any] | None, path: object) -> None:
    """Raise an error if a checkpoint's base or adapter differs from the model's. All ranks call it.

    Args:
        saved: the result of `adapter_state` when the checkpoint was saved.

    Raises:
        CheckpointError: for the first difference.
    """
    record = adapted(model)
    if record is None or saved is None:
        _refuse_single(record, saved, path)
        return
    now = adapter_state(model) or {}
    for key in ("kind", "rank", "alpha"):
        if now[key] != saved[key]:
            raise CheckpointError(
                f"{path}: it has an adapter with {key}={saved[key]}, and the model's has {key}={now[key]}. Use "
                f"{key}={saved[key]}."
            )
    if differing := sorted(now["layers"].keys() ^ saved["layers"].keys()):
        which = "does not adapt" if differing[0] in now["layers"] else "adapts"
        raise CheckpointError(
            f"{path}: its adapter {which} {differing[0]!r}, and the model's differs. Use the targets it was saved with."
        )
    settings = {"tokens": "trainable_tokens", "saved": "modules_to_save", "experts": "targets"}
    for key, setting in settings.items():
        if now.get(key, {}) != saved.get(key, {}):
            raise CheckpointError(
                f"{path}: its adapter trains other parts than the model's. Use the {setting} it was saved with."
            )
    for name, digest in now["base"].items():
        _expect_equal(name, digest, saved["base"], path)


def expect_same_base(name: str, tensor: torch.Tensor, base: Mapping[str, str], path: object) -> None:
    """Raise an error if a full weight differs from the base on which an adapter was trained.

    Args:
        name: name of the weight.
        tensor: its values in the checkpoint's layout.
        base: the digests from `adapter_state`.
        path: path of the checkpoint, for the error.

    Raises:
        CheckpointError: if the weight has other values, or was not in the base.
    """
    digest = digest_of(tensor.detach().contiguous().view(-1), Part(tuple(tensor.shape)))
    _expect_equal(name, _as_text(digest), base, path)


def _expect_equal(name: str, digest: str, base: Mapping[str, str], path: object) -> None:
    if base.get(name) != digest:
        what = "had other values" if name in base else "was not there"
        raise CheckpointError(
            f"{path}: an adapter of another base: {name!r} {what} when it was saved. "
            "Start from the weights that the adapter was trained on."
        )


def _as_text(digest: int | torch.Tensor) -> str:
    return f"{int(digest) & (2**64 - 1):016x}"


def _refuse_single(record: Adapted | None, saved: Mapping[str, Any] | None, path: object) -> None:
    if saved is not None:
        raise CheckpointError(
            f"{path}: it has only an adapter (kind={saved['kind']}, rank={saved['rank']}), and the model has none. "
            "Call add_adapter on the base before parallelize."
        )
    if record is not None:
        raise CheckpointError(
            f"{path}: it has a full model, and this one trains only an adapter. Load it into a model without an "
            "adapter."
        )


def _digests(model: nn.Module) -> dict[str, str]:
    if not is_attached(model):
        params = dict(model.named_parameters())
        sums = {name: digest_of(params[name].detach().contiguous().view(-1), Part(tuple(params[name].shape)))
                for name in sorted(names_left_out(model))}  # fmt: skip
        return {name: _as_text(total) for name, total in sums.items()}
    engine, wanted = data_parallel(model), names_left_out(model)
    names = sorted(name for name in wanted if originals(model)[name].first == name)
    place = {name: index for index, name in enumerate(names)}
    totals = torch.zeros(len(names), dtype=torch.int64, device=engine.axes.mesh.device)
    for one in engine.model_slices():
        mine = one.mine(engine.axes.mesh.rank) if one.name in place else None
        if mine is not None:
            totals[place[one.name]] += digest_of(mine[1].detach(), one.part, mine[0]).to(totals.device)
    totals = all_reduce(totals, engine.axes.world)
    return {name: _as_text(total) for name, total in zip(names, totals.tolist(), strict=True)}


def digest_of(flat: torch.Tensor, part: Part, start: int = 0) -> torch.Tensor:
    """Return the contribution of consecutive elements to the digest of their tensor, int64, 0-d.

    Args:
        flat: the elements, 1-D.
        part: the elements of the full tensor that the flattened part holds.
        start: position of the first element in the flattened part.
    """
    numel = torch.Size(part.shape).numel()
    step = max(1, -(-numel // SAMPLES)) | 1  # odd, because an even step could skip some columns
    places = torch.arange(0, numel, step, device=flat.device)
    line, here = torch.zeros_like(places), torch.ones_like(places, dtype=torch.bool)
    rest = places
    strides = part.strides()
    for dim in reversed(range(len(part.shape))):
        index, rest = rest % part.shape[dim], rest // part.shape[dim]
        if part.rows is not None and dim == part.dim:
            index, here = _in_rows(index, part.rows)
        line += index * strides[dim]
    here &= (line >= start) & (line < start + flat.numel())
    values = flat[line[here] - start]
    if values.is_floating_point():
        values = values.to(torch.float32).to(torch.bfloat16).view(torch.int16)
    mixed = (places[here] + 1) * _PLACE ^ (values.to(torch.int64) + 2**20) * _VALUE
    return ((mixed ^ mixed >> 31) * _MIX).sum()


def _in_rows(index: torch.Tensor, rows: Iterable[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of each index in the concatenated ranges, and a mask of the indices inside a range.

    The position of an index outside all ranges is 0.
    """
    found, here, before = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool), 0
    for low, high in rows:
        inside = (index >= low) & (index < high)
        found, here, before = found.where(~inside, index - low + before), here | inside, before + high - low
    return found, here


# Checkpoints of model and optimizer: tensors by name, independent of the plan. Each rank writes its part.


def capture_model(model: nn.Module, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """Return the full parameters and buffers of a parallelized model. Sharded tensors are gathered.

    All ranks call it. The result may contain the live tensors, so use it before the next step.

    Args:
        keep: True if this rank needs the result. The other ranks return {}, and only hold one full tensor at a time.
    """
    engine = data_parallel(model)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in chain(engine.weights(), engine.frozen()):
        if keep:
            weights[name] = tensor.detach().cpu()  # a sharded tensor may not fit on the device in full
    # Call this on all ranks: under zero=3, accessing a module frees its gathered weights.
    own = model_tensors(model)
    if not keep:
        return {}
    # Trained or sharded tensors come from the engine. Every rank holds the others in full.
    return {name: weights.get(name, own[name]) for name in own if engine.axes.saved_name(name) == name} | weights


def expected_bytes(model: nn.Module, optimizer: OptimizerSection, master: torch.dtype) -> int:
    """Return the size in bytes of a training checkpoint, before optimizer states exist.

    Sets requires_grad=False on parameters in optimizer groups with lr=0.

    Args:
        model: the model on the meta device, in which other parameters that are not trained have requires_grad=False.
        master: dtype of master weights and optimizer states.
    """
    freeze(model, optimizer)
    left_out = names_left_out(model)
    num_values: float = sum(one.numel() for name, one in model_tensors(model).items() if name not in left_out)
    for group in build_optimizer(model.named_parameters(), optimizer).param_groups:
        # Number of state values per weight, of the masters' dtype. A user's optimizer class counts as AdamW.
        if optimizer.name == "sgd":
            states: float = int(group["momentum"] > 0)
        elif "weight_lr_power" in group:  # the trained weights, in addition to the model's averages
            states = 3
        else:
            states = 1 if group.get("matrices") else {"fp32": 2, "bf16": 1, "fp8": 0.5}[optimizer.states]
        num_values += states * sum(param.numel() for param in group["params"])
    return round(num_values * master.itemsize)


def state_slices(
    model: nn.Module, optimizer: torch.optim.Optimizer, copies: HostCopies | None = None
) -> Iterator[SavedSlice]:
    """Yield this rank's slices of weights, buffers and optimizer states for a checkpoint. Local; no communication.

    Args:
        model: the result of `parallelize`.
        optimizer: an optimizer that a train step manages.
        copies: host memory for copies of the tensors. If None, slices share the live memory and must be written before
            the next step.
    """
    found = _state_slices(model, optimizer)
    return found if copies is None else iter(copied(list(found), copies))


def copied(found: Sequence[SavedSlice], copies: HostCopies) -> list[SavedSlice]:
    """Return the slices with their tensors copied to the host, in memory that the next call overwrites.

    Raises CheckpointError if host memory is insufficient.
    """
    taken = copies.take([cast(torch.Tensor, one.data) for one in found])
    return [replace(one, data=copy) for one, copy in zip(found, taken, strict=True)]


def _state_slices(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[SavedSlice]:
    engine, left_out, sync = data_parallel(model), names_left_out(model), rare_sync(model)
    if sync is not None:
        found = replica_slices(sync, engine, optimizer)
        for group, one in found:
            if group != "model" or one.name not in left_out:
                yield from written(group, [one], engine)
        if sync.mesh.rank == 0:
            counts = torch.tensor([sync.since, sync.meetings, sync.replicas], dtype=torch.int64)
            yield SavedSlice.full(f"sync/{COUNTS}", counts)
        yield from (SavedSlice.full(f"wire/{name}", one.detach()) for name, one in local_wire_state(engine))
        return
    model_slices, trained = averaged_slices(engine, optimizer)
    yield from written("model", (one for one in model_slices if one.name not in left_out), engine)
    yield from written("trained", trained, engine)
    yield from written("optimizer", engine.state_slices(optimizer), engine)
    yield from written("seen", quantized_slices(engine), engine)
    yield from written("owed", engine.error_feedback.residual_slices(), engine)
    yield from (SavedSlice.full(f"wire/{name}", one.detach()) for name, one in local_wire_state(engine))


def written(group: str, stretches: Iterable[FlatSlice], engine: DataParallel) -> Iterator[SavedSlice]:
    """Yield the flat slices that this rank writes, as slices of a checkpoint group.

    Args:
        group: name of the group, such as "model".
        stretches: flat slices that this rank stores.
        engine: the model's engine.
    """
    for one in stretches:
        mine = one.mine(engine.axes.mesh.rank)
        if mine is None:
            continue
        part, (start, data) = one.part, mine
        if data.numel() == part.numel:  # complete parts are stored in their own shape, row-major
            order = part.order or tuple(range(len(part.shape)))
            local = data.view([part.local_shape[dim] for dim in order])
            data = local.permute([order.index(dim) for dim in range(len(order))]).contiguous()
            part = replace(part, order=())
        yield SavedSlice(f"{group}/{one.name}", part, one.deal, start, data.detach())


class GroupSource:
    """A group of a checkpoint, from which each rank reads the elements that it stores.

    Args:
        start: prefix of the tensor names in the group, which callers omit.
    """

    def __init__(self, checkpoint: Checkpoint, group: str, start: str = ""):
        entries = checkpoint.entries(group)
        self.entries = {name.removeprefix(start): one for name, one in entries.items() if name.startswith(start)}
        self._checkpoint, self._group, self._start = checkpoint, group, start

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a flattened part.

        Args:
            start: position in the flattened part at which reading begins, in elements.
        """
        self._checkpoint.read(self._group, f"{self._start}{name}", part, start, out)


class Averages(Protocol):
    """Moving averages of the weights (EMA), which `resume` restores in addition to the weights."""

    def restore(self, source: GroupSource, num_updates: int) -> None:
        """Restore the averages from a checkpoint."""
        ...


def resume(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, ema: Averages | None = None
) -> list[str]:
    """Load a checkpoint of any plan into a parallelized model and its optimizer. All ranks call it.

    Each rank reads only the elements that it stores. Returns messages about parts that are skipped because only another
    plan can use them.

    Args:
        model: the result of `parallelize`.
        optimizer: an optimizer that a train step manages.
        checkpoint: an open checkpoint.
        ema: averages of the weights to restore too.

    Raises:
        CheckpointError: if the checkpoint belongs to another model.
    """
    if ema is not None:
        ema.restore(GroupSource(checkpoint, "ema"), int(checkpoint.state["ema"]["num_updates"]))
    load_model(model, checkpoint)
    engine = data_parallel(model)
    load_trained(engine, optimizer, GroupSource(checkpoint, "trained"))
    told, states = resume_replicas(model, optimizer, SavedReplicas(checkpoint, GroupSource))
    engine.load_states(optimizer, states)
    _match_formats(optimizer)
    load_quantized_weights(engine, GroupSource(checkpoint, "seen"))
    told += load_carried(engine, checkpoint.private("wire", engine.axes.mesh.rank))
    return [*told, *engine.error_feedback.take(GroupSource(checkpoint, "owed"))]


def load_model(model: nn.Module, checkpoint: Checkpoint, *, is_part: bool = False) -> None:
    """Load the weights and buffers of a checkpoint of any plan into a parallelized model. All ranks call it.

    For a model with an adapter, the frozen parameters of its base are unchanged.

    Args:
        model: the result of `parallelize`.
        checkpoint: an open checkpoint.
        is_part: True if blocks were removed from the model before `parallelize`.

    Raises:
        CheckpointError: if the checkpoint belongs to another model.
    """
    weights, engine = GroupSource(checkpoint, "model"), data_parallel(model)
    check_base(model, checkpoint.state.get("adapter"), checkpoint.path)
    own, axes, saved, left_out = model_tensors(model), engine.axes, weights.entries, names_left_out(model)
    shapes = {axes.saved_name(name): axes.full_shape(name, tensor.shape) for name, tensor in own.items()}
    shapes = {name: shape for name, shape in shapes.items() if name not in left_out}
    is_part = is_part or axes.stages.size > 1  # a pipeline stage loads only its own tensors
    _check_names(shapes, {name: saved[name] for name in saved if name in shapes} if is_part else saved)
    if left_out:
        for one in engine.model_slices():
            if one.name not in left_out:
                one.fill(weights)
        engine.publish()
    else:
        engine.load_weights(weights)


#: Dtypes of moments that only AdamW with rounded states (optimizer.states) supports.
_ROUNDED = (torch.bfloat16, torch.int8, torch.uint8)


def _match_formats(optimizer: torch.optim.Optimizer) -> None:
    """Convert bf16 and quantized moments from a checkpoint to the parameters' dtype, for torch's AdamW and Adam."""
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        return
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dtype in _ROUNDED:
                state[key] = exact_moment(value).to(param.dtype)


def restore_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy weights and buffers of a checkpoint into a model that is not parallelized.

    For a model with an adapter, the frozen parameters of its base are unchanged.

    Raises:
        CheckpointError: if tensors are missing, left over or of another shape, or if an adapter's base differs.
    """
    check_base(model, checkpoint.state.get("adapter"), checkpoint.path)
    left_out, tensors = names_left_out(model), checkpoint.tensors("model")
    own = {name: tensor for name, tensor in model_tensors(model).items() if name not in left_out}
    _check_names({name: tensor.shape for name, tensor in own.items()}, tensors)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _check_names(shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, SavedTensor | torch.Tensor]) -> None:
    for name in sorted(shapes.keys() ^ tensors.keys()):
        where = "the checkpoint lacks it" if name in shapes else "the model has no such tensor"
        raise CheckpointError(f"tensor {name!r}: {where}. Load the checkpoint into the model it was saved from.")
    for name, shape in shapes.items():
        saved = tensors[name]
        if tuple(saved.shape) != tuple(shape):
            raise CheckpointError(
                f"tensor {name!r}: {tuple(saved.shape)} in the checkpoint, {tuple(shape)} in the model. "
                f"Load the checkpoint into the model it was saved from."
            )


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return detached parameters and persistent buffers by name. A shared tensor has only its first name."""
    with allow_sharded_state(model):
        names = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in names.items():
        first.setdefault(id(tensor), name)
    return {name: tensor.detach() for name, tensor in names.items() if first[id(tensor)] == name}


# Weights of a folder in a model's quantized format. They are read and quantized in chunks.

#: Quantization blocks per read, which are 8 million weights.
_AT_ONCE = 2**17


@dataclass(frozen=True, slots=True)
class _Packed:
    shape: tuple[int, ...]
    dtype: str = "U8"


class PackedSource:
    """A `StateSource` that quantizes some matrices, or stacks of matrices, of another source while they are read."""

    def __init__(self, source: StateSource, names: list[str], kept: BaseFormat):
        self._source, self._kept = source, kept
        shapes = {name: source.entries[name].shape for name in names if name in source.entries}
        self._packed = {name: _Packed((*lead, kept.row_bytes(width))) for name, (*lead, width) in shapes.items()}

    @property
    def entries(self) -> Mapping[str, SavedTensor]:
        """The tensors of the source by name."""
        return {**self._source.entries, **self._packed}

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a flattened part, as quantized bytes if the tensor is quantized.

        Args:
            start: position in the flattened part at which reading begins.
        """
        if name not in self._packed:
            self._source.read(name, part, start, out)
            return
        line = part.local_shape[-1]  # bytes per row of the part
        at, end, per = start, start + len(out), self._kept.block_bytes
        numbers = self._numbers(part, tuple(self._source.entries[name].shape))
        # Read complete rows, and drop the unneeded elements at both ends. Flat slices usually begin at a row.
        step = max(1, _AT_ONCE * per // line)
        while at < end:
            first = at // line
            last = min(first + step, -(-end // line))
            some = self._rows(name, numbers, first, last)
            low, high = at - first * line, min(end, last * line) - first * line
            out[at - start : at - start + high - low] = some[low:high].numpy().data
            at += high - low

    def _numbers(self, part: Part, shape: tuple[int, ...]) -> Part:
        if part.rows is None or part.dim < len(shape) - 1:
            return Part(shape, part.dim, part.rows)
        per, width = self._kept.block_bytes, shape[-1]
        rows = tuple((low // per * 64, min(high // per * 64, width)) for low, high in part.rows)
        return Part(shape, part.dim, rows)

    def _rows(self, name: str, numbers: Part, first: int, last: int) -> torch.Tensor:
        width = numbers.local_shape[-1]
        kind = torch_formats()[self._source.entries[name].dtype]
        stored = torch.empty((last - first) * width, dtype=kind)
        self._source.read(name, numbers, first * width, stored.view(torch.uint8).numpy().data)
        return self._kept.pack(stored.view(last - first, width)).view(-1)


def packed_source(model: nn.Module, source: StateSource) -> StateSource:
    """Return the source to load a model from: one that quantizes the weights that the model stores quantized.

    Without an adapter on quantized weights, this is `source` itself.
    """
    record = adapted(model)
    if record is None or not (packed := record.packed_weights()):
        return source
    return PackedSource(source, list(packed), BASE_FORMATS[record.base])
