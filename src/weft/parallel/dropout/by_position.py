"""Modules whose dropout is a function of positions. They replace the dropout modules of a model.

nn.Dropout modules get a subclass. In modules that call dropout functions (F.dropout, F.scaled_dot_product_attention), a
TorchFunctionMode replaces the calls. Attention with dropout then runs unfused: no fused kernel accepts a given dropout
mask.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from weft.comm.mesh import Mesh
from weft.memory.opaque import Opaque
from weft.models.inspect.blocks import class_before, repeated_blocks, replace_class
from weft.parallel.context.context import context_of
from weft.parallel.dropout.drop_state import Drops, DropSite
from weft.parallel.dropout.dropout_calls import (
    CHANNEL_DROPOUTS,
    ByPosition,
    attend_dropping,
    calls_dropout,
    draws_noise,
    recomputes_itself,
)
from weft.parallel.dropout.embedding_noise import add_embedding_noise
from weft.parallel.layers.index_check import StandIn
from weft.parallel.random.streams import drops_itself, shard_position_of
from weft.private_torch import uncompiled

_ATTRIBUTE, _IS_IDLE = "_weft_drops", "_weft_draws_nothing"
#: Layers of torch without random numbers.
_PLAIN_LAYERS = frozenset(
    (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.ModuleList, nn.Sequential, nn.GELU, nn.SiLU, nn.ReLU)
)


# Hooks of the full model. Copies and pickles of a module include its hooks, so they are not closures.


def _begin(drops: Drops | None, model: nn.Module, args: Any, kwargs: Any) -> None:
    if drops is not None:
        drops.before_forward(model, [args, kwargs])


def _end(drops: Drops | None, model: nn.Module, args: Any, output: Any) -> None:
    if drops is not None:
        drops.after_forward()


class PositionDropout(nn.Module):
    """nn.Dropout whose mask is a function of (seed, step, module path, position)."""

    _weft_site: DropSite
    inplace: bool

    def forward(self, x: Tensor) -> Tensor:
        rate: Any = self.p
        if not self.training or rate == 0 or self._weft_site.is_plain:
            return super().forward(x)
        dropped = self._weft_site.drop(x, rate)
        return x.copy_(dropped) if self.inplace else dropped


class FunctionalDropout(nn.Module):
    """A module whose forward calls dropout functions. In training, their masks are functions of positions."""

    _weft_site: DropSite

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward. In training, its dropout depends on positions."""
        site = self._weft_site
        if not self.training or site.is_plain:
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling() and not (site.has_stored_key and site.handle.is_open):
            return self._uncompiled(*args, **kwargs)
        with ByPosition(site):
            return super().forward(*args, **kwargs)

    @uncompiled
    def _uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        return FunctionalDropout.forward(self, *args, **kwargs)


class UncompiledDropout(FunctionalDropout):
    """A torch layer that contains dropout. In training, it runs outside compiled code."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self.training and not self._weft_site.is_plain:
            return self._uncompiled(*args, **kwargs)
        return super().forward(*args, **kwargs)


class NoisyModule(nn.Module):
    """A module that draws random noise. In training, the noise of a sample depends on its index in the global batch."""

    _weft_site: DropSite

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or self._weft_site.is_plain or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with ByPosition(self._weft_site):
            return super().forward(*args, **kwargs)


class RecurrentDropout(UncompiledDropout):
    """A recurrent network of torch with dropout between its layers."""

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._weft_site.is_plain:
            self._weft_site.packed_order = input.sorted_indices if isinstance(input, PackedSequence) else None
        return super().forward(input, *args, **kwargs)


class DroppingBlock(nn.Module):
    """A block that contains dropout. Each forward counts calls from zero, so that a recomputation counts the same."""

    _weft_sites: list[DropSite]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for site in self._weft_sites:
            site.calls = 0
        return super().forward(*args, **kwargs)


def register_dropped_attention(model: nn.Module, recomputes: bool) -> None:
    """Make attention with dropout an operator of compiled blocks. Call it before they are compiled."""
    sites = [module._weft_site for module in model.modules() if isinstance(module, FunctionalDropout)]
    if sites:
        opaque = Opaque(is_attention=True, recomputes=recomputes)
        for site in sites:
            site.handle = opaque.handle(attend_dropping, site)


def drop_by_position(model: nn.Module, mesh: Mesh, seed: int = 0) -> Drops:
    """Make dropout, weft.randn_like, and noise from torch functions such as torch.randn_like depend on positions.

    This applies to training. Noise from torch functions depends on positions only if its rows are samples, and not
    under cp, compile or graphs. Other random numbers of a forward come from torch's generators, which are seeded for
    each microbatch.

    Call it after the model was sharded, before recompute. seed: seed of steps without an index, and of forwards outside
    train steps.
    """
    drops = Drops(mesh, seed, shard_position_of(model), context_of(model))
    drops.model = weakref.ref(model)
    kinds = _replacements(model, drops)
    is_idle = not kinds and all(map(_never_draws, model.modules()))
    setattr(model, _IS_IDLE, is_idle)
    by_module: dict[nn.Module, DropSite] = {}
    for path, kind in kinds.items():
        module, site = model.get_submodule(path), DropSite(drops, path)
        replace_class(module, kind, site=site)
        by_module[module] = site
        drops.sites.append(site)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            for module in layer.modules():
                if isinstance(module, nn.Dropout) and module in by_module:
                    by_module[module].is_sequence_first = not layer.self_attn.batch_first
    for block in (repeated_blocks(model) or {"": model}).values():
        sites = [by_module[module] for module in block.modules() if module in by_module]
        if sites:
            replace_class(block, DroppingBlock, sites=sites)
        if not is_idle:
            block.__dict__["_weft_travels"] = drops
    if not is_idle:
        model.register_forward_pre_hook(functools.partial(_begin, drops), with_kwargs=True)
        model.register_forward_hook(functools.partial(_end, drops), always_call=True)
    setattr(model, _ATTRIBUTE, drops)
    return drops


def _replacements(model: nn.Module, drops: Drops) -> dict[str, type[nn.Module]]:
    """Return the classes that replace modules with dropout or noise, by path."""
    known, noisy = dict[tuple[type, bool], bool](), dict[tuple[type, bool], bool]()
    kinds: dict[str, type[nn.Module]] = {}
    for path, module in model.named_modules():
        kind = NoisyModule
        if drops_itself(module) or calls_dropout(module, known):
            kind = _kind_of(module)
        elif not drops.may_place_noise or not draws_noise(module, noisy):
            continue
        if kind not in (FunctionalDropout, NoisyModule) or not recomputes_itself(module):
            kinds[path] = kind
    return kinds


def draws_nothing(model: nn.Module) -> bool:
    """Return True if no module of a parallelized model draws random numbers and no module has a custom forward hook."""
    return getattr(model, _IS_IDLE, False) and all(map(_has_known_hooks, model.modules()))


def _never_draws(module: nn.Module) -> bool:
    """Return True for layers without random numbers and without custom code, such as a hook or a replaced forward."""
    if isinstance(module, StandIn):  # on another pipeline stage: all ranks get the same answer
        return all(map(_never_draws, module.stands_for.modules()))
    kind, own = class_before(module), vars(module)
    if kind not in _PLAIN_LAYERS and kind.__module__ not in ("weft.models.decoder", "weft.models.attention"):
        return False
    return "forward" not in own and _has_known_hooks(module)


def _has_known_hooks(module: nn.Module) -> bool:
    """Return True if all forward hooks of a module come from Weft or from torch's fully_shard.

    Weft's NEFTune hook does not count as known, because it draws noise.
    """
    own = vars(module)
    hooks = [*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values()]
    hooks = [hook.func if isinstance(hook, functools.partial) else hook for hook in hooks]
    homes = [getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks]
    known = ("weft.", "torch.distributed.fsdp.")
    return all(home.startswith(known) and home != add_embedding_noise.__module__ for home in homes)


def _kind_of(module: nn.Module) -> type[nn.Module]:
    if isinstance(module, nn.Dropout) and type(module).forward is nn.Dropout.forward:
        return PositionDropout
    if isinstance(module, nn.RNNBase):
        return RecurrentDropout
    return UncompiledDropout if isinstance(module, (nn.MultiheadAttention, *CHANNEL_DROPOUTS)) else FunctionalDropout


def drops_of(model: nn.Module) -> Drops | None:
    """Return the result of `drop_by_position` for this model, or None for a model that was not parallelized."""
    return getattr(model, _ATTRIBUTE, None)
