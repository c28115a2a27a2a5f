"""What a checkpoint holds of model and optimizer: tensors by name, independent of the plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from weft.errors import CheckpointError


def capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of model and optimizer in two groups, "model" and "optimizer".

    Shared weights appear once, under their first name. An optimizer state of parameter `p` is named `p/state`.
    The tensors are the live ones, not copies.
    """
    states: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                states[f"{name}/{key}"] = value
    return {"model": _model_tensors(model), "optimizer": states}


def restore_model(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy weights and buffers into the model. CheckpointError names what is missing, left over or misshapen."""
    own = _model_tensors(model)
    for name in sorted(own.keys() ^ tensors.keys()):
        where = "the checkpoint lacks it" if name in own else "the model has no such tensor"
        raise CheckpointError(f"tensor {name!r}: {where}. Load the checkpoint into the model it was saved from.")
    with torch.no_grad():
        for name, tensor in own.items():
            saved = tensors[name]
            if saved.shape != tensor.shape:
                raise CheckpointError(
                    f"tensor {name!r}: {tuple(saved.shape)} in the checkpoint, {tuple(tensor.shape)} in the model. "
                    f"Load the checkpoint into the model it was saved from."
                )
            tensor.copy_(saved)


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give the optimizer the saved states of each parameter, on the parameter's device."""
    params = dict(model.named_parameters())
    for full_name, saved in tensors.items():
        name, _, key = full_name.rpartition("/")
        param = params.get(name)
        if param is None:
            raise CheckpointError(f"optimizer state {full_name!r}: the model has no parameter {name!r}.")
        # Step counters stay where the optimizer wants them: fused kernels read them on the device.
        optimizer.state[param][key] = saved.clone().to(param.device)


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each storage once."""
    names = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in names.items():
        first.setdefault(id(tensor), name)
    return {name: tensor.detach() for name, tensor in names.items() if first[id(tensor)] == name}
