"""What a checkpoint holds of model and optimizer: tensors by name, independent of the plan; each rank its part of them.

Weights are the masters, in the format in which they are trained. Shared weights appear once, under their first name.
An optimizer state of parameter `p` is named `p/state`. Of a model with an adapter the frozen base is left out. A third
group, "wire", is there where gradients travel as a wire that carries something from step to step: it fits the plan that
made it, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import nn

from weft.checkpoint import Checkpoint, SavedPiece
from weft.checkpoint.parts import Part
from weft.errors import CheckpointError
from weft.memory import HostCopies
from weft.optim import build_optimizer, exact_moment, freeze
from weft.parallel import DataParallel, data_parallel
from weft.parallel.local_tensors import SavedTensor, Stretch
from weft.parallel.placement import pieces_allowed
from weft.parallel.zero import carried_here, load_carried, rare_sync, seen_stretches, take_seen
from weft.spec.config import OptimizerSection
from weft.train.state.base import check_base, names_left_out
from weft.train.state.replicas import SavedReplicas, counts_here, replica_stretches, resume_replicas


def capture_model(model: nn.Module, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a parallelized model, whole. All ranks call it: what is sharded is gathered.

    keep: whether this rank wants them; the others get nothing back and hold no more than one tensor at a time. They may
    be the live ones: use them before the next step.
    """
    engine = data_parallel(model)
    weights = held(chain(engine.weights(), engine.frozen()), keep)
    # On all ranks: under zero=3 looking at a module lets its gathered weights go.
    own = model_tensors(model)
    if not keep:
        return {}
    # What is trained or divided comes from the engine; the rest is whole on every rank.
    return {name: weights.get(name, own[name]) for name in own if engine.axes.saved_name(name) == name} | weights


def expected_bytes(model: nn.Module, optimizer: OptimizerSection, master: torch.dtype) -> int:
    """Return the bytes of a checkpoint of a model that is trained; optimizer states exist only after a step.

    Args:
        model: on the meta device; what the optimizer leaves alone is frozen in it.
        optimizer: the section of the config.
        master: the format in which weights and states are kept.
    """
    freeze(model, optimizer)
    left_out = names_left_out(model)
    num_values: float = sum(one.numel() for name, one in model_tensors(model).items() if name not in left_out)
    for group in build_optimizer(model.named_parameters(), optimizer).param_groups:
        num_values += _states_each(group, optimizer) * sum(param.numel() for param in group["params"])
    return round(num_values * master.itemsize)


def _states_each(group: Mapping[str, Any], optimizer: OptimizerSection) -> float:
    """Values of the masters' size that an optimizer keeps for each of a group's weights, a foreign class as AdamW."""
    if optimizer.name == "sgd":
        return int(group["momentum"] > 0)
    return 1 if group.get("matrices") else {"fp32": 2, "bf16": 1, "fp8": 0.5}[optimizer.states]


def held(pairs: Iterable[tuple[str, torch.Tensor]], keep: bool) -> dict[str, torch.Tensor]:
    """Iterate to the end, as a collective wants it, and keep the tensors on the host where `keep`."""
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        if keep:
            kept[name] = tensor.detach().cpu()  # a device has no room for what is sharded because it did not fit
    return kept


def pieces(
    model: nn.Module, optimizer: torch.optim.Optimizer, copies: HostCopies | None = None
) -> Iterator[SavedPiece]:
    """Yield what this rank writes of a checkpoint: its share of weights and states, no collective.

    Args:
        model: what `parallelize` returned.
        optimizer: adopted by a step.
        copies: takes the tensors as they are now; None: tensors are in their own memory, to be written before the next
            step.
    """
    found = _pieces(model, optimizer)
    return found if copies is None else iter(copied(list(found), copies))


def copied(found: Sequence[SavedPiece], copies: HostCopies) -> list[SavedPiece]:
    """Copy the tensors of pieces as they are now. CheckpointError where the host has no room for it."""
    taken = copies.take([cast(torch.Tensor, one.data) for one in found])
    return [replace(one, data=copy) for one, copy in zip(found, taken, strict=True)]


def _pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[SavedPiece]:
    engine, left_out, sync = data_parallel(model), names_left_out(model), rare_sync(model)
    if sync is not None:
        found = replica_stretches(sync, engine, optimizer)
        for group, one in found:
            if group != "model" or one.name not in left_out:
                yield from written(group, [one], engine)
        yield from counts_here(sync)
        yield from (SavedPiece.whole(f"wire/{name}", one.detach()) for name, one in carried_here(engine))
        return
    yield from written("model", (one for one in engine.stretches() if one.name not in left_out), engine)
    yield from written("optimizer", engine.state_stretches(optimizer), engine)
    yield from written("seen", seen_stretches(engine), engine)
    yield from written("owed", engine.debts.stretches(), engine)
    yield from (SavedPiece.whole(f"wire/{name}", one.detach()) for name, one in carried_here(engine))


def written(group: str, stretches: Iterable[Stretch], engine: DataParallel) -> Iterator[SavedPiece]:
    """Yield what of the stretches this rank writes, as pieces of a group.

    Args:
        group: such as "model".
        stretches: what this rank holds.
        engine: of the model.
    """
    for one in stretches:
        mine = one.mine(engine.axes.mesh.rank)
        if mine is None:
            continue
        part, (start, data) = one.part, mine
        if data.numel() == part.numel:  # all of a part lies in its own shape, row-major
            order = part.order or tuple(range(len(part.shape)))
            local = data.view([part.local_shape[dim] for dim in order])
            data = local.permute([order.index(dim) for dim in range(len(order))]).contiguous()
            part = replace(part, order=())
        yield SavedPiece(f"{group}/{one.name}", part, one.deal, start, data.detach())


class GroupSource:
    """A group of a checkpoint, of which each rank reads what it holds.

    Args:
        checkpoint: open.
        group: such as "model".
        start: of the names that are meant, which are given without it.
    """

    def __init__(self, checkpoint: Checkpoint, group: str, start: str = ""):
        entries = checkpoint.entries(group)
        self.entries = {name.removeprefix(start): one for name, one in entries.items() if name.startswith(start)}
        self._checkpoint, self._group, self._start = checkpoint, group, start

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a part's line.

        Args:
            name: of the tensor.
            part: which elements of the whole tensor.
            start: place in its line where reading begins, in elements.
            out: filled to its end, in the saved dtype.
        """
        self._checkpoint.read(self._group, f"{self._start}{name}", part, start, out)


class Averages(Protocol):
    """Averages of weights that are kept beside them."""

    def restore(self, source: GroupSource, num_updates: int) -> None:
        """Take what a checkpoint has of them."""
        ...


def resume(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, ema: Averages | None = None
) -> list[str]:
    """Give a parallelized model and its optimizer what `pieces` gave under any plan. All ranks call it.

    Each reads what it holds, and nothing else. Returns lines that say what is left out because it fits another plan
    only.

    Args:
        model: what `parallelize` returned.
        optimizer: adopted by a step.
        checkpoint: open.
        ema: averages of the weights, to be restored too.

    Raises:
        CheckpointError: for a checkpoint of another model.
    """
    if ema is not None:
        ema.restore(GroupSource(checkpoint, "ema"), int(checkpoint.state["ema"]["num_updates"]))
    weights, engine = GroupSource(checkpoint, "model"), data_parallel(model)
    check_base(model, checkpoint.state.get("adapter"), checkpoint.path)
    own, axes, saved, left_out = model_tensors(model), engine.axes, weights.entries, names_left_out(model)
    shapes = {axes.saved_name(name): axes.whole_shape(name, tensor.shape) for name, tensor in own.items()}
    shapes = {name: shape for name, shape in shapes.items() if name not in left_out}
    # A stage of a pipeline takes its own tensors only.
    _check_names(shapes, saved if axes.stages.size == 1 else {name: saved[name] for name in saved if name in shapes})
    if left_out:
        for one in engine.stretches():
            if one.name not in left_out:
                one.fill(weights)
        engine.publish()
    else:
        engine.load_weights(weights)
    told, states = resume_replicas(model, optimizer, SavedReplicas(checkpoint, GroupSource))
    engine.load_states(optimizer, states)
    _match_formats(optimizer)
    take_seen(engine, GroupSource(checkpoint, "seen"))
    told += load_carried(engine, checkpoint.private("wire", axes.mesh.rank))
    return [*told, *engine.debts.take(GroupSource(checkpoint, "owed"))]


#: Formats of moments that only the rounded AdamW takes.
_ROUNDED = (torch.bfloat16, torch.int8, torch.uint8)


def _match_formats(optimizer: torch.optim.Optimizer) -> None:
    """torch's AdamW and Adam want moments of the parameters' format: a run with rounded ones may have saved them."""
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        return
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dtype in _ROUNDED:
                state[key] = exact_moment(value).to(param.dtype)


def restore_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy weights and buffers of a checkpoint into a plain model; those of an adapter alone where it has one.

    Raises:
        CheckpointError: names what is missing, left over or misshapen, or what of an adapter's base differs.
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
    """Return parameters and persistent buffers by name, each storage once."""
    with pieces_allowed(model):
        names = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in names.items():
        first.setdefault(id(tensor), name)
    return {name: tensor.detach() for name, tensor in names.items() if first[id(tensor)] == name}
