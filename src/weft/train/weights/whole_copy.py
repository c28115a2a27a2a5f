"""A whole copy of a sharded model on each rank, to generate with: its weights are gathered once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.errors import ModelError
from weft.models.adapters import adapted, merged_tensors
from weft.models.decoder import Decoder, as_shapes
from weft.models.inspect import hugging_face
from weft.models.registry import build_decoder
from weft.parallel.state.precision import Precision
from weft.train.script.script_export import full_tensors
from weft.units import format_bytes

#: Part of the free memory that the copies may take. The rest is for keys and values.
_SHARE = 0.7


@contextmanager
def whole_copy(model: nn.Module, mesh: Mesh) -> Iterator[nn.Module]:
    """Give each rank a plain model with the current weights, in evaluation mode, until the context ends.

    The weights have the dtype of the plan's forward. An adapter is merged. All ranks call it.

    Args:
        model: a Decoder or a causal language model of transformers, parallelized.
        mesh: its mesh.

    Raises:
        ModelError: on all ranks if the model is of another kind, or a rank has too little memory.
    """
    plain = _plain_model(model)
    dtype = Precision.of(mesh.plan).compute
    expected = sum(param.numel() for param in plain.parameters()) * dtype.itemsize
    _expect_room(expected, mesh)
    whole = full_tensors(mesh, model, everywhere=True)
    if adapted(model) is not None:
        whole = merged_tensors(model, whole)
    wanted = plain.state_dict(keep_vars=True)
    found = {name: tensor for name, tensor in whole.items() if name in wanted}
    for name, tensor in found.items():
        is_weight = isinstance(wanted[name], nn.Parameter)
        found[name] = tensor.to(mesh.device, dtype if is_weight and tensor.is_floating_point() else tensor.dtype)
    plain.load_state_dict(found, strict=False, assign=True)
    missing = [name for name, param in plain.named_parameters() if param.is_meta]
    if missing:
        raise ModelError(f"parameter {missing[0]!r}: the sharded model has no such weight. Use a plan without pp.")
    _tie(plain)
    yield plain.to(mesh.device).requires_grad_(False).eval()


def _plain_model(model: nn.Module) -> nn.Module:
    """Return the model's class with its config, on the meta device."""
    if isinstance(model, Decoder):
        return build_decoder(model.spec, device="meta")
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ModelError(
            f"generation with {type(model).__name__}: only decoders and causal models of transformers can be copied. "
            "Use a plan without pp and cp."
        )
    with as_shapes(vectors=True):
        return hugging_face.causal_model(config)


def _tie(plain: nn.Module) -> None:
    tie: Any = getattr(plain, "tie_weights", None) or getattr(plain, "tie", None)
    if tie is not None:
        tie()


def _expect_room(expected: int, mesh: Mesh) -> None:
    """Raise ModelError on all ranks if a copy does not fit into the memory of one of them."""
    if mesh.device.type == "cuda":
        free, sharing = torch.cuda.mem_get_info(mesh.device)[0], 1
    else:
        import psutil

        free, sharing = psutil.virtual_memory().available, mesh.world_size
    short = torch.tensor([int(expected * sharing > free * _SHARE)], device=mesh.device)
    if all_reduce(short, mesh.world, "max")[0]:
        raise ModelError(
            f"generation with a whole copy of the weights: each rank needs {format_bytes(expected)}, and rank "
            f"{mesh.rank} has {format_bytes(free // sharing)} free. Use a plan without pp and cp, whose ranks generate "
            "with sharded weights."
        )
