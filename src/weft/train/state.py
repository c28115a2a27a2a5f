"""What a checkpoint holds of model and optimizer: whole tensors by name, independent of the plan.

Weights are the masters, in the format in which they are trained. Shared weights appear once, under their first name.
An optimizer state of parameter `p` is named `p/state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import nn

from weft.errors import CheckpointError
from weft.parallel import data_parallel


def capture(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool = True
) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of a parallelized model and its optimizer in two groups, "model" and "optimizer".

    All ranks call it: what is sharded is gathered piece by piece. keep: whether this rank is the one that writes;
    the others get nothing back and hold no more than one piece at a time. Tensors may be the live ones: write them
    before the next step.
    """
    engine = data_parallel(model)
    weights = _held(chain(engine.weights(), engine.frozen()), keep)
    states = _held(engine.states(optimizer), keep)
    own = model_tensors(model) if keep else {}
    # What is trained or sharded comes from the engine; the rest is whole on every rank.
    return {"model": {name: weights.get(name, tensor) for name, tensor in own.items()}, "optimizer": states}


def _held(pairs: Iterable[tuple[str, torch.Tensor]], keep: bool) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        if keep:
            held[name] = tensor.detach().cpu()  # a device has no room for what is sharded because it did not fit
    return held


def restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Give a parallelized model and its optimizer what `capture` gave under any plan. All ranks call it."""
    engine = data_parallel(model)
    own = model_tensors(model)
    _check_names(own, groups["model"])
    # A sharded parameter is a DTensor, a type of its own; the engine takes it, frozen or not.
    trained = {n for n, p in model.named_parameters() if p.requires_grad or type(p) is not nn.Parameter}
    engine.load_weights({name: groups["model"][name] for name in own if name in trained})
    with torch.no_grad():
        for name, tensor in own.items():
            if name not in trained:
                tensor.copy_(groups["model"][name])
    engine.load_states(optimizer, groups["optimizer"])


def restore_model(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy weights and buffers into a plain model. CheckpointError names what is missing, left over or misshapen."""
    own = model_tensors(model)
    _check_names(own, tensors)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _check_names(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name in sorted(own.keys() ^ tensors.keys()):
        where = "the checkpoint lacks it" if name in own else "the model has no such tensor"
        raise CheckpointError(f"tensor {name!r}: {where}. Load the checkpoint into the model it was saved from.")
    for name, tensor in own.items():
        saved = tensors[name]
        if saved.shape != tensor.shape:
            raise CheckpointError(
                f"tensor {name!r}: {tuple(saved.shape)} in the checkpoint, {tuple(tensor.shape)} in the model. "
                f"Load the checkpoint into the model it was saved from."
            )


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each storage once."""
    names = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in names.items():
        first.setdefault(id(tensor), name)
    return {name: tensor.detach() for name, tensor in names.items() if first[id(tensor)] == name}
