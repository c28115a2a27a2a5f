"""Initial weights that depend on (seed, parameter name) only: no order, no rank, no device, no global generator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.decoder import INIT_STD
from weft.models.experts import Experts

#: Values drawn from one stream. A matrix is a row of such streams, so that a part of it can be made alone
#: and a large one never lies in host memory as a whole.
_BLOCK = 2**22

#: Norms whose statistics are of the samples at hand.
#: The base of all batch norms of torch, lazy and synchronized ones included.
BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d.__bases__[0],)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *BATCH_NORMS)


def initialise(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Fill every parameter of `module` in place.

    Matrices are normal with the owning module's `init_std` (0.02 where it has none; of stacked experts only `down`
    follows it, for it alone ends a branch), norm weights 1, biases 0. A tied weight is filled once, under its first
    name. Modules that have buffers reset them.

    Args:
        module: the whole model, or a part of it.
        seed: of the weights, with each parameter's name in the whole model.
        prefix: path of `module` in the whole model, such as "blocks.3."; with it a part gets the very weights it has in
            the whole.

    Raises:
        ModelError: for a parameter on the meta device, or one whose kind is not known.
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
    """Fill one parameter of `owner` as `initialise` does, in place.

    Args:
        whole: any tensor of the whole parameter's shape.
        full_name: of the parameter in the whole model.
        owner: the module that has it.
        seed: of the weights.
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
            f"parameter {full_name}: it holds bytes of a packed weight, which no seed makes. Give the model weights "
            "before add_adapter(base=...)."
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
    """Standard normal float32 values of a parameter, as (offset, block) pairs in order."""
    for start, size, stream in _streams(seed, name, count):
        yield start, torch.from_numpy(stream.standard_normal(size, dtype=np.float32))


def uniform_values(seed: int, name: str, count: int) -> Iterator[tuple[int, Tensor]]:
    """Float32 values between 0 and 1 of a parameter, as (offset, block) pairs in order."""
    for start, size, stream in _streams(seed, name, count):
        yield start, torch.from_numpy(stream.random(size, dtype=np.float32))


def _streams(seed: int, name: str, count: int) -> Iterator[tuple[int, int, np.random.Generator]]:
    """(Offset, size, generator) of each block of a parameter.

    numpy's generator is used because its bits are the same on every kind of CPU; torch's are not.
    """
    for start in range(0, count, _BLOCK):
        digest = hashlib.blake2b(f"{seed}/{name}/{start}".encode(), digest_size=16).digest()
        stream = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        yield start, min(_BLOCK, count - start), stream
