"""Initial weights that depend only on (seed, parameter name), not on order, rank, device or the global generator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.decoder import INIT_STD
from weft.models.experts import Experts

#: Number of values that are drawn from one random stream. A matrix uses a sequence of streams, so a shard of it can be
#: computed separately, and a large matrix is never in host memory as a unit.
_BLOCK = 2**22

#: The base of all batch norms of torch, including lazy and synchronized ones. Their statistics come from the batch.
BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d.__bases__[0],)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *BATCH_NORMS)


def initialise(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Fill every parameter of `module` in place.

    Matrices are normal with the owning module's `init_std`, or 0.02 without one. Of the stacked expert weights only
    `down` uses `init_std`, because only `down` ends a residual branch. Norm weights are 1 and biases 0. A tied weight
    is filled once, under its first name. Adapters' parameters are filled by their module's `fill_adapter`. Buffers are
    reset by the `reset_buffers` of modules that have it.

    Args:
        module: the full model or a part of it.
        seed: seed of all weights, combined with each parameter's name in the full model.
        prefix: path of `module` in the full model, such as "blocks.3.". With it a part gets the same weights as in the
            full model.

    Raises:
        ModelError: if a parameter is on the meta device, has a quantized dtype, or is a vector of an unknown kind.
    """
    filled: set[Tensor] = set()
    for path, owner in module.named_modules():
        if callable(reset := getattr(owner, "reset_buffers", None)):
            reset()
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter in filled:
                continue
            filled.add(parameter)
            full_name = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
            _fill(parameter, full_name, owner, name, seed)


def initialise_parameter(whole: Tensor, full_name: str, owner: nn.Module, seed: int) -> None:
    """Fill one parameter of `owner` in place, as `initialise` does.

    Args:
        whole: any tensor of the full parameter's shape.
        full_name: name of the parameter in the full model.
        owner: the module that has it.
        seed: seed of the weights.
    """
    _fill(whole, full_name, owner, full_name.rpartition(".")[2], seed)


@torch.no_grad()
def _fill(parameter: Tensor, full_name: str, owner: nn.Module, name: str, seed: int) -> None:
    if parameter.is_meta:
        raise ModelError(f"parameter {full_name}: it is on the meta device. Call to_empty(device=...) first.")
    fill_adapter = getattr(owner, "fill_adapter", None)
    if fill_adapter is not None and fill_adapter(parameter, name, full_name, seed):
        return
    if not parameter.is_floating_point():
        raise ModelError(
            f"parameter {full_name}: it has quantized weights, which cannot be initialized from a seed. Load the "
            "weights before add_adapter(base=...)."
        )
    if name == "bias":
        parameter.zero_()
    elif isinstance(owner, _NORMS):
        parameter.fill_(1.0)
    elif parameter.ndim >= 2:
        flat = parameter.view(-1)
        # Of the stacked weights of experts only `down` ends a branch.
        ends_branch = not (isinstance(owner, Experts) and name == "gate_up")
        std = float(getattr(owner, "init_std", INIT_STD)) if ends_branch else INIT_STD
        for start, values in normal_values(seed, full_name, parameter.numel()):
            flat[start : start + values.numel()] = values.mul_(std).to(parameter.device)
    else:
        raise ModelError(
            f"parameter {full_name}: Weft has no rule for the initial values of a vector of {type(owner).__name__}. "
            "Fill it yourself and leave it out of initialise."
        )


def normal_values(seed: int, name: str, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield standard normal float32 values of a parameter, as (offset, block) pairs in order."""
    for start, size, stream in _streams(seed, name, count):
        yield start, torch.from_numpy(stream.standard_normal(size, dtype=np.float32))


def uniform_values(seed: int, name: str, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield uniform float32 values in [0, 1) of a parameter, as (offset, block) pairs in order."""
    for start, size, stream in _streams(seed, name, count):
        yield start, torch.from_numpy(stream.random(size, dtype=np.float32))


def _streams(seed: int, name: str, count: int) -> Iterator[tuple[int, int, np.random.Generator]]:
    """Yield (offset, size, generator) for each block of a parameter.

    numpy's generator is used because its values are the same on every kind of CPU, unlike torch's.
    """
    for start in range(0, count, _BLOCK):
        digest = hashlib.blake2b(f"{seed}/{name}/{start}".encode(), digest_size=16).digest()
        stream = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        yield start, min(_BLOCK, count - start), stream
