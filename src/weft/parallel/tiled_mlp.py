"""MLPs computed in tiles of tokens, so that intermediate activations exist for one tile at a time.

Forward stores the input of a tile, and backward recomputes the tile, as in ALST (Bekman et al. 2025). The gradient of a
weight is the sum over tiles, which autograd adds up before any hook of the parameter runs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ModelError, PlanError
from weft.memory.policy import Policy, run_block
from weft.models.decoder import GeluFFN, SwiGLU
from weft.models.inspect.blocks import class_before, repeated_blocks, replace_class
from weft.models.inspect.layers import is_transposed
from weft.parallel.dropout.by_position import FunctionalDropout
from weft.parallel.random.streams import ShardPosition
from weft.parallel.tensor.sharded_modules import RowLinear

_FULL = Policy("full")
#: Names that the forward of an MLP uses for functions that treat each token separately.
_BY_TOKEN = {"chunk", "nn", "functional", "F", "torch", "gelu", "relu", "silu", "sigmoid", "tanh"}


class TiledMLP(nn.Module):
    """A module that treats each token separately, called for one tile of tokens after another.

    Under sp, hooks of the module gather its tokens. They run for each tile, which holds a tile of each rank's tokens.
    """

    _weft_tiles: int
    _weft_part: ShardPosition | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output for x (..., tokens, features)."""
        if self._weft_part is not None and self._weft_part.padding:
            raise PlanError(
                f"mlp_tiles={self._weft_tiles}: sp=on pads this batch, whose number of tokens is not a multiple of tp, "
                "and tiles would change what is padded. Use a multiple of tp, or mlp_tiles=1."
            )
        num_tiles = max(1, min(self._weft_tiles, x.shape[-2]))
        outputs = [run_block(_FULL, self, _untiled, (tile,), {}) for tile in x.tensor_split(num_tiles, dim=-2)]
        return torch.cat(outputs, dim=-2)


def _untiled(module: Any, x: Tensor) -> Tensor:
    own: Any = super(TiledMLP, module)
    return own.__call__(x.contiguous())  # in here, so that the copy is not saved


def tile_mlps(model: nn.Module, num_tiles: int) -> None:
    """Compute the MLPs in the model's blocks in tiles of tokens, in place.

    These are Weft's feed-forward layers, and the modules of transformers whose class name ends in MLP and whose forward
    contains only linear layers and activations.

    Raises:
        ModelError: if the blocks have no such module, or one of them has dropout.
    """
    found = {
        f"{path}.{name}": module
        for path, block in repeated_blocks(model).items()
        for name, module in block.named_modules()
        if _is_mlp(module)
    }
    if not found:
        raise ModelError(
            f"mlp_tiles={num_tiles}: the blocks of {type(model).__name__} have no MLP that is known to treat each "
            "token separately: Weft's own, or one of transformers with linear layers and activations. Use mlp_tiles=1."
        )
    for path, module in found.items():
        rates = [
            getattr(part, "p", 1.0) for part in module.modules() if isinstance(part, nn.Dropout | FunctionalDropout)
        ]
        if any(rates):
            raise ModelError(
                f"mlp_tiles={num_tiles}: {path} has dropout, whose masks follow positions in the full sequence. Set "
                "its dropout to 0, or use mlp_tiles=1."
            )
        parts = [part._weft_part for part in module.modules() if isinstance(part, RowLinear)]
        replace_class(module, TiledMLP, tiles=num_tiles, part=parts[0] if parts else None)


def _is_mlp(module: nn.Module) -> bool:
    kind = class_before(module)
    if kind in (SwiGLU, GeluFFN):
        return True
    is_named = kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("MLP")
    return is_named and _treats_tokens_separately(module, kind)


def _treats_tokens_separately(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True if forward(self, x) uses only linear layers, activations and functions of `_BY_TOKEN`."""
    code = inspect.unwrap(kind.forward).__code__
    others = set(code.co_names) - {name for name, _ in module.named_children()} - _BY_TOKEN
    chunks_features = "chunk" not in code.co_names or (-1 in code.co_consts and {0, 1}.isdisjoint(code.co_consts))
    layers = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    is_linear = all(isinstance(part, nn.Linear) or is_transposed(part) for part in layers)
    return code.co_argcount == 2 and not others and chunks_features and is_linear
