"""Selection of the linear layers that multiply in float8.

These are the linear layers inside repeated blocks, including layers before and after their norms. Embeddings, the head,
norms, stacked experts, routers, and frozen base weights stored as bytes are excluded. Both dims of a layer's full
weight must be multiples of 16. The user can exclude more layers. Selection depends on the model and not on the plan, so
every plan of a model rounds the same layers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from weft.errors import ModelError, PlanError, WeftWarning
from weft.models.adapters import AdaptedLinear
from weft.models.inspect import layers
from weft.models.inspect.blocks import repeated_blocks, replace_class
from weft.parallel.layers.deferred_gradients import HoldingLayer, linear
from weft.parallel.layers.float8_products import MULTIPLE, RECIPES, Float8
from weft.parallel.private_torch import multiplies_float8

#: An entry of `keep` for the first or last N blocks.
_END = re.compile(r"(first|last):(\d+)")


class Float8Linear(HoldingLayer):
    """A linear layer that multiplies in float8."""

    def forward(self, x: Tensor) -> Tensor:
        transposed = layers.is_transposed(self)
        out = linear(x, self.weight, self.bias, self._weft_held, transposed=transposed, form=self._weft_float8)
        return self.adapt(out, x) if isinstance(self, AdaptedLinear) else out


def choose_float8(
    model: nn.Module, device: torch.device, keep: Sequence[str] = (), recipe: str = RECIPES[0], *, speaks: bool
) -> None:
    """Choose the layers that will multiply in float8. Call it on the full model, before any technique shards it.

    Raises ModelError if no layer fits, if an entry of `keep` matches no fitting layer, if `keep` excludes all of them,
    or if the recipe is unknown.

    Args:
        keep: layers that stay in bf16: patterns of paths (`*.down_proj`), and `first:N` or `last:N` blocks.
        recipe: one of RECIPES.
        speaks: True if this rank warns of layers that stay in bf16, and of a device without float8 matmuls.
    """
    if recipe not in RECIPES:
        raise ModelError(f"fp8_recipe={recipe!r}: it is {' or '.join(RECIPES)}. Use fp8_recipe={RECIPES[0]!r}.")
    chosen, left = 0, list[str]()
    fitting = _fitting(model, left)
    kept = _bf16_paths(fitting, list(repeated_blocks(model)), keep)
    for path, module in fitting.items():
        if path not in kept:
            module._weft_float8 = Float8(recipe=recipe)  # pyright: ignore[reportArgumentType] - torch infers modules and tensors
            chosen += 1
    if kept and not chosen:
        raise ModelError(
            f"bf16_layers={list(keep)}: all {len(kept)} linear layers that could multiply in float8 stay in bf16. Keep "
            "fewer, or use precision=bf16."
        )
    if not chosen:
        raise ModelError(
            f"precision=fp8: model of type {type(model).__name__} has no linear layer in repeated blocks whose sides "
            f"are multiples of {MULTIPLE}. Use precision=bf16."
        )
    if speaks and left:
        said = f"{len(left)} of {chosen + len(left)} linear layers in blocks stay in bf16, the first is {left[0]}"
        warnings.warn(f"precision=fp8: {said}: their sides are no multiples of {MULTIPLE}.", WeftWarning, stacklevel=4)
    if speaks and not multiplies_float8(torch.empty(0, dtype=torch.bfloat16, device=device)):
        warnings.warn(
            f"precision=fp8: this {device.type} has no products of float8. Weft rounds as such a device would and "
            "multiplies in bf16: the same numbers, and slower than precision=bf16.",
            WeftWarning,
            stacklevel=4,
        )


def _fitting(model: nn.Module, left: list[str]) -> dict[str, nn.Module]:
    """Return the linear layers in blocks that can multiply in float8, by path.

    Path and shape of layers whose dims are not multiples of 16 are appended to `left`. Routers and quantized layers are
    skipped.
    """
    found: dict[str, nn.Module] = {}
    for path, block in repeated_blocks(model).items():
        routers = _routers(block)
        for name, module in block.named_modules():
            if not layers.is_linear(module) or layers.is_packed(module) or id(module) in routers:
                continue
            shape, whole = tuple(layers.weight_of(module).shape), f"{path}.{name}" if name else path
            if any(side % MULTIPLE for side in shape):
                left.append(f"{whole} {shape}")
            else:
                found[whole] = module
    return found


def _bf16_paths(fitting: Mapping[str, nn.Module], blocks: list[str], keep: Sequence[str]) -> set[str]:
    """Return the paths of `fitting` that an entry of `keep` matches. Raises ModelError if an entry matches none."""
    kept = set[str]()
    for word in keep:
        named = {path for path in fitting if fnmatchcase(path, word)}
        if end := _END.fullmatch(word):
            count = int(end[2])
            chosen = blocks[:count] if end[1] == "first" else blocks[max(0, len(blocks) - count) :]
            named = {path for path in fitting if any(path == one or path.startswith(f"{one}.") for one in chosen)}
        if not named:
            raise ModelError(
                f"bf16_layers={word!r}: no linear layer in blocks has this name. Use first:N, last:N or a pattern of "
                f"paths such as {next(iter(fitting), 'blocks.0.*')!r}, in which * matches anything."
            )
        kept |= named
    return kept


def use_float8(model: nn.Module) -> None:
    """Make the selected layers that no technique has sharded multiply in float8. Sharded ones already do."""
    for module in model.modules():
        if getattr(module, "_weft_float8", None) is not None and not isinstance(module, HoldingLayer):
            replace_class(module, Float8Linear)


def refuse_partial(path: str, module: nn.Module) -> None:
    """Raise PlanError for a selected layer whose output gradient is a partial sum on each rank.

    The rounded summands would not add up to the rounded sum.
    """
    if getattr(module, "_weft_float8", None) is not None:
        raise PlanError(
            f"precision=fp8: under tp each rank has a part of the gradient of {path}'s output, and rounding parts is "
            "not rounding their sum. Use tp=1, a smaller tp where key and value heads are fewer than tp, or "
            "precision=bf16."
        )


def _routers(block: nn.Module) -> set[int]:
    """Return `id()` of the routers: linear layers next to stacked experts that have one output per expert."""
    modules, found = dict(block.named_modules()), set[int]()
    for path, experts in layers.find_experts(block):
        count, around = layers.num_experts(path, experts), modules[layers.parent_of(path)]
        found |= {
            id(module)
            for name, module in around.named_modules()
            if not name.startswith(f"{path.rpartition('.')[2]}.")
            and layers.is_linear(module)
            and layers.weight_of(module).shape[0] == count
        }
    return found
