"""Modules that drop by position, in the place of those that a model came with.

nn.Dropout modules get a subclass. In modules that drop by functions (F.dropout, F.scaled_dot_product_attention) a mode
takes these calls over; attention with dropout then runs in plain arithmetic, since no fused kernel takes such numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from weft.memory import Opaque
from weft.mesh import Mesh
from weft.parallel.context import AttentionDrop, context_of, dropped_attention
from weft.parallel.dropout.drops import Drops, DropSite
from weft.parallel.randomness import cut_part_of, drops_itself
from weft.private_torch import uncompiled
from weft.structure import become, repeated_blocks

_ATTRIBUTE = "_weft_drops"


class _Begin:
    """Hook of the whole model. An object, since copies of a module copy its hooks."""

    def __init__(self, drops: Drops | None):
        self._drops = drops

    def __call__(self, model: nn.Module, args: Any) -> None:
        del args
        if self._drops is not None:
            self._drops.before_forward(model)


class PositionDropout(nn.Module):
    """nn.Dropout by position."""

    _weft_site: DropSite

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        rate: Any = self.p
        if not self.training or rate == 0 or self._weft_site.is_plain:
            return super().forward(x)
        return self._weft_site.drop(x, rate)


class FunctionalDropout(nn.Module):
    """A module whose forward drops by functions: in training they go by position."""

    _weft_site: DropSite

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what its own class computes."""
        site = self._weft_site
        if not self.training or site.is_plain:
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling() and not (site.is_told and site.handle.is_open):
            return self._uncompiled(*args, **kwargs)
        with _ByPosition(site):
            return super().forward(*args, **kwargs)

    @uncompiled
    def _uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        return FunctionalDropout.forward(self, *args, **kwargs)


class DroppingBlock(nn.Module):
    """A block with dropout in it: its calls are counted anew in each forward, so that a replay counts alike."""

    _weft_sites: list[DropSite]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What its own class computes."""
        for site in self._weft_sites:
            site.calls = 0
        return super().forward(*args, **kwargs)


class _ByPosition(TorchFunctionMode):
    """While active, torch's functions that drop do so by position."""

    def __init__(self, site: DropSite):
        super().__init__()
        self._site = site

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            rate, training = _read(args, kwargs, 1, "p", 0.5), _read(args, kwargs, 2, "training", True)
            x = args[0] if args else kwargs["input"]
            return self._site.drop(x, rate) if training and rate > 0 else x
        if func is F.scaled_dot_product_attention and _read(args, kwargs, 4, "dropout_p", 0.0) > 0:
            return self._attend(*args, **kwargs)
        if func is Tensor.unflatten:  # which torch.compile does not follow from here; the two are the same
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        del enable_gqa  # heads are read off the shapes
        drop = self._site.attention(dropout_p, query.shape[0], query.shape[1], query.device)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        if not torch.compiler.is_compiling():
            return dropped_attention(query, key, value, attn_mask, is_causal, factor, drop)
        assert isinstance(drop.key, Tensor)
        inputs = [query, key, value, drop.key, drop.samples, *([] if attn_mask is None else [attn_mask])]
        shape = (*query.shape[:3], value.shape[3])
        return self._site.handle(
            shape, query.dtype, inputs, [float(is_causal), factor, dropout_p, float(drop.first_head)]
        )


def hold_dropped_attention(model: nn.Module, recomputes: bool) -> None:
    """Let compiled blocks hold attention that drops as one operator each. Call it before they are compiled."""
    sites = [module._weft_site for module in model.modules() if isinstance(module, FunctionalDropout)]
    if sites:
        opaque = Opaque(is_attention=True, recomputes=recomputes)
        for site in sites:
            site.handle = opaque.handle(_attend_dropping, site)


def _attend_dropping(site: DropSite, inputs: Sequence[Tensor], numbers: Sequence[float]) -> Tensor:
    """What `_ByPosition._attend` computes, of what it gives an operator."""
    del site
    query, key, value, drop_key, samples = inputs[:5]
    is_causal, scale, rate, first_head = numbers
    drop = AttentionDrop(rate, drop_key, samples, int(first_head))
    mask = inputs[5] if len(inputs) > 5 else None
    return dropped_attention(query, key, value, mask, bool(is_causal), scale, drop)


def _read(args: Any, kwargs: dict[str, Any], place: int, name: str, usual: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, usual)


def follow_positions(model: nn.Module, mesh: Mesh, seed: int = 0) -> Drops:
    """Let what the model drops, and draws with weft.randn_like, follow positions in training. In place.

    Call it when the model has been cut, before recompute. Dropout of whole channels and nn.MultiheadAttention's own
    keep to torch's generators.

    Args:
        model: with modules that drop, or without.
        mesh: of the ranks.
        seed: for steps and forwards that nobody gives a key.
    """
    found = {path: module for path, module in model.named_modules() if drops_itself(module)}
    part, context = cut_part_of(model), context_of(model)
    drops = Drops(mesh, seed, part, context)
    drops.name_modules(model)
    by_module: dict[nn.Module, DropSite] = {}
    for path, module in found.items():
        kind = PositionDropout if type(module).forward is nn.Dropout.forward else FunctionalDropout
        site = DropSite(drops, path)
        become(module, kind, site=site)
        by_module[module] = site
        drops.sites.append(site)
    for block in (repeated_blocks(model) or {"": model}).values():
        sites = [by_module[module] for module in block.modules() if module in by_module]
        if sites:
            become(block, DroppingBlock, sites=sites)
        block.__dict__["_weft_travels"] = drops
    if found:
        model.register_forward_pre_hook(_Begin(drops))
    setattr(model, _ATTRIBUTE, drops)
    return drops


def drops_of(model: nn.Module) -> Drops | None:
    """Return what `follow_positions` made for this model; None before."""
    return getattr(model, _ATTRIBUTE, None)
