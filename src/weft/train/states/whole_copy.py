"""A whole copy of a sharded model on each rank, to generate with: its weights are gathered once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.devices import access
from weft.errors import ModelError
from weft.models.adapters import adapted, merged_tensors
from weft.models.decoder import Decoder, as_shapes
from weft.models.inspect import hugging_face
from weft.models.registry import build_decoder
from weft.parallel.replicas.local_sgd import anchored
from weft.parallel.state.gradients import originals
from weft.parallel.state.precision import Precision
from weft.train.states.model_state import capture_model
from weft.units import format_bytes

#: Part of the free memory that the copies may take. The rest is for keys and values.
_SHARE = 0.7


def can_copy(model: nn.Module, mesh: Mesh) -> bool:
    """Return True if each rank has memory for a whole copy of the weights. All ranks call it."""
    return _shortest(_plain_model(model), mesh) is None


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
    if (short := _shortest(plain, mesh)) is not None:
        raise ModelError(
            f"generation with a whole copy of the weights: each rank needs {format_bytes(_bytes(plain, mesh))}, and "
            f"one has {format_bytes(short)} free. Use a plan without pp, cp and sp, whose ranks generate with sharded "
            "weights."
        )
    whole = full_tensors(mesh, model, everywhere=True)
    if adapted(model) is not None:
        whole = merged_tensors(model, whole)
    wanted, dtype = plain.state_dict(keep_vars=True), Precision.of(mesh.plan).compute
    found = {name: whole.pop(name) for name in list(whole) if name in wanted}
    for name, tensor in found.items():
        is_weight = isinstance(wanted[name], nn.Parameter) and tensor.is_floating_point()
        found[name] = tensor.to(mesh.device, dtype if is_weight else tensor.dtype)
    plain.load_state_dict(found, strict=False, assign=True)
    tie: Any = getattr(plain, "tie_weights", None) or getattr(plain, "tie", None)
    if tie is not None:
        tie()
    missing = next((name for name, param in plain.named_parameters() if param.is_meta), None)
    if missing is not None:
        raise ModelError(f"parameter {missing!r}: the sharded model has no such weight. Generate with another plan.")
    yield plain.to(mesh.device).requires_grad_(False).eval()


def _plain_model(model: nn.Module) -> nn.Module:
    """Return the model's class with its config, on the meta device."""
    if isinstance(model, Decoder):
        return build_decoder(model.spec, device="meta")
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ModelError(
            f"generation with {type(model).__name__}: only decoders and causal models of transformers can be copied. "
            "Use a plan without pp, cp and sp."
        )
    with as_shapes(vectors=True):
        return hugging_face.causal_model(config)


def _bytes(plain: nn.Module, mesh: Mesh) -> int:
    return sum(param.numel() for param in plain.parameters()) * Precision.of(mesh.plan).compute.itemsize


def _shortest(plain: nn.Module, mesh: Mesh) -> int | None:
    """Return the free bytes of the rank with the least if they are too few for a copy, else None. Collective."""
    free, sharing = access.free_bytes(mesh.device), 1
    if free is None:
        import psutil

        free, sharing = psutil.virtual_memory().available, mesh.world_size
    least = int(all_reduce(torch.tensor([free // sharing], device=mesh.device), mesh.world, "min")[0])
    return least if _bytes(plain, mesh) > least * _SHARE else None


def full_tensors(mesh: Mesh, model: nn.Module, *, everywhere: bool = False) -> dict[str, torch.Tensor]:
    """Return the full tensors by names of the plain model: on rank 0, or `everywhere`. Other ranks get {}.

    All ranks call it.
    """
    keeps = everywhere or mesh.rank == 0
    with anchored(model):
        found = capture_model(model, keep=keeps)
        # Copy each tensor, because it may be live or a view of a larger tensor.
        own = {name: tensor.clone() for name, tensor in found.items()}
    if not keeps:
        return {}
    return {name: own[one.first] for name, one in originals(model).items()}
