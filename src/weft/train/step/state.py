"""What a checkpoint holds of model and optimizer: whole tensors by name, independent of the plan.

Weights are the masters, in the format in which they are trained. Shared weights appear once, under their first name.
An optimizer state of parameter `p` is named `p/state`. A third group, "wire", is there where gradients travel as a wire
that carries something from step to step: it fits the plan that made it, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from weft.checkpoint import Checkpoint
from weft.errors import CheckpointError
from weft.optim import build_optimizer, freeze
from weft.parallel import data_parallel
from weft.parallel.placement.state_guard import pieces_allowed
from weft.parallel.zero.wire_states import gather_carried, load_carried
from weft.spec.config import OptimizerSection


def capture(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool = True
) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of a parallelized model and its optimizer in groups: "model", "optimizer", and "wire" where it has any.

    All ranks call it: what is sharded is gathered piece by piece. keep: whether this rank is the one that writes;
    the others get nothing back and hold no more than one piece at a time. Tensors may be the live ones: write them
    before the next step.
    """
    tensors, engine = capture_model(model, keep=keep), data_parallel(model)
    groups = {"model": tensors, "optimizer": held(engine.states(optimizer), keep)}
    carried = held(gather_carried(engine), keep)
    return {**groups, "wire": carried} if carried else groups


def saved_groups(checkpoint: Checkpoint) -> dict[str, Mapping[str, torch.Tensor]]:
    """The groups of a checkpoint that `restore` takes. CheckpointError where it has no model or optimizer."""
    wire = [group for group in checkpoint.groups if group == "wire"]
    return {group: checkpoint.tensors(group) for group in ("model", "optimizer", *wire)}


def capture_model(model: nn.Module, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """The "model" group of `capture`, in the same manner."""
    engine = data_parallel(model)
    weights = held(chain(engine.weights(), engine.frozen()), keep)
    # On all ranks: under zero=3 looking at a module lets its gathered weights go.
    own = model_tensors(model)
    if not keep:
        return {}
    # What is trained or divided comes from the engine; the rest is whole on every rank.
    return {name: weights.get(name, own[name]) for name in own if engine.axes.saved_name(name) == name} | weights


def expected_bytes(model: nn.Module, optimizer: OptimizerSection, master: torch.dtype) -> int:
    """Bytes of what `capture` will give of a model that is trained; optimizer states exist only after a step.

    model: on the meta device; what the optimizer leaves alone is frozen in it. master: the format in which weights and
    states are kept.
    """
    freeze(model, optimizer)
    num_values = sum(tensor.numel() for tensor in model_tensors(model).values())
    for group in build_optimizer(model.named_parameters(), optimizer).param_groups:
        num_values += _states_each(group, optimizer) * sum(param.numel() for param in group["params"])
    return num_values * master.itemsize


def _states_each(group: Mapping[str, Any], optimizer: OptimizerSection) -> int:
    """Values that an optimizer keeps for each of a group's parameters; of a foreign class as many as AdamW."""
    if optimizer.name == "sgd":
        return int(group["momentum"] > 0)
    return 1 if group.get("matrices") else 2


def held(pairs: Iterable[tuple[str, torch.Tensor]], keep: bool) -> dict[str, torch.Tensor]:
    """Iterate to the end, as a collective wants it, and keep the tensors on the host where `keep`."""
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        if keep:
            kept[name] = tensor.detach().cpu()  # a device has no room for what is sharded because it did not fit
    return kept


def restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: Mapping[str, Mapping[str, torch.Tensor]]
) -> list[str]:
    """Give a parallelized model and its optimizer what `capture` gave under any plan. All ranks call it.

    Returns lines that say what is left out because it fits another plan only.
    """
    engine = data_parallel(model)
    own, saved, axes = model_tensors(model), groups["model"], engine.axes
    shapes = {axes.saved_name(name): axes.whole_shape(name, tensor.shape) for name, tensor in own.items()}
    # A stage of a pipeline takes its own tensors only.
    _check_names(shapes, saved if axes.stages.size == 1 else {name: saved[name] for name in saved if name in shapes})
    # A sharded parameter is a DTensor, a type of its own; the engine takes it, frozen or not.
    taken = {n for n, p in model.named_parameters() if p.requires_grad or type(p) is not nn.Parameter}
    taken |= axes.placements.keys()
    engine.load_weights({axes.saved_name(name): saved[axes.saved_name(name)] for name in own if name in taken})
    with torch.no_grad():
        for name, tensor in own.items():
            if name not in taken:
                tensor.copy_(saved[name])
    engine.load_states(optimizer, groups["optimizer"])
    return load_carried(engine, groups.get("wire", {}))


def restore_model(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy weights and buffers into a plain model. CheckpointError names what is missing, left over or misshapen."""
    own = model_tensors(model)
    _check_names({name: tensor.shape for name, tensor in own.items()}, tensors)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _check_names(shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, torch.Tensor]) -> None:
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
    """Parameters and persistent buffers by name, each storage once."""
    with pieces_allowed(model):
        names = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in names.items():
        first.setdefault(id(tensor), name)
    return {name: tensor.detach() for name, tensor in names.items() if first[id(tensor)] == name}
