"""Dropout that is the same under every plan: what an element's number is depends on where it is, not on who has it.

A number is drawn from (seed, step, module path, place), where a place is (sample of the global batch, token of the
sequence, feature or head). So ranks that compute the same drop the same, ranks with a part of the tokens, heads or
features drop what one process would drop there, and no cut of a batch into ranks and microbatches shows.

nn.Dropout modules get a subclass. In modules that drop by functions (F.dropout, F.scaled_dot_product_attention) a mode
takes these calls over; attention with dropout then runs in plain arithmetic, since no fused kernel takes such numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from weft.memory import Handle, Opaque
from weft.mesh import Mesh
from weft.parallel.context import AttentionDrop, Context, context_of, dropped_attention
from weft.parallel.randomness import CutPart, SampleNumbers, cut_part_of, drops_itself, kept_at, key_of, rows_of_samples
from weft.private_torch import uncompiled
from weft.structure import become, repeated_blocks

_ATTRIBUTE = "_weft_drops"
#: Calls of one module in one forward of its block that a compiled block makes itself; later ones run outside of it.
_CALLS = 4


class Drops:
    """Where one model on one rank is in its random numbers: key of the step, samples of the microbatch."""

    def __init__(self, mesh: Mesh, seed: int, part: CutPart | None, context: Context | None):
        self.part = part or CutPart(mesh["tp"])
        self.sites: list[DropSite] = []
        #: Numbers of the samples, as a tensor that compiled blocks read; None where they follow from the rank, or where
        #: rows are no samples: then dropout runs outside of compiled blocks.
        self.told_samples: Tensor | None = None
        self.is_told = True
        self._data = mesh.data
        self._num_contexts = mesh["cp"].size
        self._device = mesh.device
        self._is_compiled = mesh.plan.compile
        self._context = context
        self._seed = seed
        self.num_keys = 0  #: how many were asked for here
        self._is_driven = False
        self._key = 0
        self._samples: SampleNumbers | None = None  # None: a rank's samples follow those of the rank before
        self._told: int | None = None  # the key that compiled blocks have

    def __deepcopy__(self, memo: dict[int, Any]) -> Drops:
        return self  # a copy of the model runs on the same ranks

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @property
    def key(self) -> int:
        """Key of this step's numbers, equal on all ranks."""
        return self._key

    def next_key(self) -> int:
        """A key from the seed and how many were asked for: for steps and forwards that nobody numbers."""
        self.num_keys += 1
        return key_of(self._seed, self.num_keys)

    @contextlib.contextmanager
    def microbatch(self, key: int, samples: SampleNumbers | None) -> Iterator[None]:
        """While inside, the model is given these samples of the global batch."""
        before = self._is_driven, self._key, self._samples
        self._is_driven, self._key, self._samples = True, key, samples
        self._tell_compiled()
        self.restart()
        try:
            yield
        finally:
            self._is_driven, self._key, self._samples = before

    def travelling(self) -> AbstractContextManager[None]:
        """What a later replay of what is computed now must run inside of."""
        return self.microbatch(self._key, self._samples)

    def restart(self) -> None:
        """A forward begins: no call of it has been made, and no rank is inside a cut part."""
        self.part.is_open = False
        for site in self.sites:
            site.calls = 0

    def before_forward(self, model: nn.Module) -> None:
        """Before the whole model's: in a loop that is not ours each training forward has a key of its own."""
        if self._is_driven or not model.training:
            return
        self._key, self._samples = self.next_key(), None
        self._tell_compiled()
        self.restart()

    def _tell_compiled(self) -> None:
        """Where blocks are compiled, give them keys and samples as tensors: numbers would be parts of their graphs."""
        if not self._is_compiled:
            return
        samples = self._samples
        self.is_told = samples is None or not (samples.is_empty or samples.rows)
        if samples is not None and self.is_told:
            self.told_samples = samples.places(len(samples.numbers), self._device)
        else:
            self.told_samples = None
        if self._told != self._key:
            keys = [[site.key(self._key, call) for call in range(1, _CALLS + 1)] for site in self.sites]
            for site, row in zip(self.sites, torch.tensor(keys, device=self._device).unbind(), strict=True):
                site.keys = row  # another tensor, since the replay of an earlier forward reads the one before
            self._told = self._key

    def samples(self, count: int, device: torch.device) -> Tensor:
        """For each row of a tensor, a number from its sample's in the global batch."""
        if torch.compiler.is_compiling() and self.told_samples is not None:
            return rows_of_samples(self.told_samples, count)
        if self._samples is None:
            return torch.arange(self._data.rank * count, (self._data.rank + 1) * count, device=device)
        # Made anew for each call: a replay must run what the forward ran.
        return self._samples.places(count, device)

    def rows(self, count: int, is_cut: bool, is_whole: bool, device: torch.device) -> Tensor:
        """The same of rows that are samples, or all sequences' tokens, of which a rank may have a part."""
        context = self._context
        in_context = context is not None and context.in_use and not is_whole
        sequences = self._num_sequences() if is_cut or in_context else 0
        if not sequences or count % sequences or (count == sequences and not is_cut):
            return self.samples(count, device)
        here = self.tokens(count // sequences, is_cut, is_whole, device)
        cuts = (self.part.axis.size if is_cut else 1) * (self._num_contexts if in_context else 1)
        return self.samples(count * cuts, device).view(sequences, -1)[:, here].flatten()

    def _num_sequences(self) -> int:
        """Of the microbatch; 0 where it cannot be told."""
        if self.part.sequences:
            return self.part.sequences
        if torch.compiler.is_compiling() and self.told_samples is not None:
            return len(self.told_samples)
        return len(self._samples.numbers) if self._samples is not None and not self._samples.rows else 0

    def sees_whole(self, path: str) -> bool:
        """Whether cp leaves a module all tokens."""
        return self._context is not None and self._context.sees_whole(path)

    def tokens(self, count: int, is_cut: bool, is_whole: bool, device: torch.device) -> Tensor:
        """Places in the sequence of this rank's tokens.

        Args:
            count: of the tokens that are here.
            is_cut: over tp, as between cut layers under sp.
            is_whole: over cp, where the module gets all tokens.
            device: of the places.
        """
        tp = self.part.axis
        whole = count * tp.size if is_cut else count
        context = self._context
        if context is not None and context.in_use and not is_whole:
            places = context.places(whole, device)
        else:
            places = torch.arange(whole, device=device)
        return places.narrow(0, tp.rank * count, count) if is_cut else places


class _Begin:
    """Hook of the whole model. An object, since copies of a module copy its hooks."""

    def __init__(self, drops: Drops | None):
        self._drops = drops

    def __call__(self, model: nn.Module, args: Any) -> None:
        del args
        if self._drops is not None:
            self._drops.before_forward(model)


class DropSite:
    """Where one module drops. path: its name."""

    def __init__(self, drops: Drops, path: str):
        self.calls = 0
        self.keys: Tensor | None = None  # of the first calls, for compiled blocks
        self.handle = Handle()  # of attention, for compiled blocks
        self._drops = drops  # None once the module went through a pickle: then it is a plain one
        self._path = path
        self._cuts_tokens = drops.part.sees_cut_tokens(path)  # each rank of tp has a part of them
        self._sees_all = drops.part.sees_all(path)
        self._sees_whole = drops.sees_whole(path)

    @property
    def is_plain(self) -> bool:
        """Whether the module was unpickled, away from the ranks it was laid over."""
        return self._drops is None

    def key(self, key: int, call: int) -> int:
        """Of one call in a forward of the block around it, from the step's."""
        return key_of(key, self._path, call)

    def _next_key(self) -> int:
        self.calls += 1
        return self.key(self._drops.key, self.calls)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """x with elements set to zero, each with probability `rate`, and the others scaled up; same shape.

        x: (samples, features), (samples, tokens, features) or (samples, heads, queries, keys), as parts of the whole.
        """
        if rate >= 1:
            return x * 0.0
        if x.ndim == 1:
            return self.drop(x[:, None], rate)[:, 0]
        if not torch.compiler.is_compiling() or not self.is_told:
            return self._drop_by_number(x, rate)
        return self._drop(x, rate, self._told_key())

    @property
    def is_told(self) -> bool:
        """Whether a compiled block can make the next call itself."""
        return self.keys is not None and self.calls < _CALLS and self._drops.is_told

    def _told_key(self) -> Tensor:
        assert self.keys is not None
        self.calls += 1
        return self.keys[self.calls - 1]

    @uncompiled
    def _drop_by_number(self, x: Tensor, rate: float) -> Tensor:
        return self._drop(x, rate, torch.full((), self._next_key(), dtype=torch.int64, device=x.device))

    def _drop(self, x: Tensor, rate: float, key: Tensor) -> Tensor:
        drops = self._drops
        places = [torch.arange(size, device=x.device) for size in x.shape]
        is_inside = drops.part.is_open and not self._sees_all
        is_cut = self._cuts_tokens and not is_inside and not drops.part.is_whole
        if x.ndim == 2:
            places[0] = drops.rows(len(x), is_cut, self._sees_whole, x.device)
        else:
            places[0] = drops.samples(x.shape[0], x.device)
        if is_inside:
            own = 1 if x.ndim > 3 else x.ndim - 1
            places[own] = places[own] + drops.part.axis.rank * x.shape[own]
        if x.ndim == 3 or (x.ndim == 4 and x.shape[1] == 1):  # what all heads share has a dim for them
            places[x.ndim - 2] = drops.tokens(x.shape[-2], is_cut, self._sees_whole, x.device)
        return torch.where(kept_at(key, places, rate), x * (1.0 / (1.0 - rate)), 0.0)

    def attention(self, rate: float, num_samples: int, num_heads: int, device: torch.device) -> AttentionDrop:
        """What a call of attention drops of its weights. num_heads: of this rank."""
        part = self._drops.part
        first_head = part.axis.rank * num_heads if part.is_open else 0
        key = self._told_key() if torch.compiler.is_compiling() else self._next_key()
        return AttentionDrop(rate, key, self._drops.samples(num_samples, device), first_head)


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
        """What its own class computes."""
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


def follow_positions(model: nn.Module, mesh: Mesh, seed: int = 0) -> Drops | None:
    """Let what the model drops in training follow positions, in place. None where it drops nothing.

    Call it when the model has been cut, before recompute. seed: for steps and forwards that nobody gives a key.
    Dropout of whole channels and nn.MultiheadAttention's own keep to torch's generators.
    """
    found = {path: module for path, module in model.named_modules() if drops_itself(module)}
    if not found:
        return None
    part, context = cut_part_of(model), context_of(model)
    drops = Drops(mesh, seed, part, context)
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
            become(block, DroppingBlock, sites=sites, travels=drops)
    model.register_forward_pre_hook(_Begin(drops))
    setattr(model, _ATTRIBUTE, drops)
    return drops


def drops_of(model: nn.Module) -> Drops | None:
    """Return what `follow_positions` made for this model."""
    return getattr(model, _ATTRIBUTE, None)
