"""Encoders whose items are divided by cost over ranks: whole on each, called once for the items that a rank is dealt.

    pictures of the batch -> this rank's -> encoder -> features of this rank's -> features of all, in order

A hook in front of the encoder keeps this rank's items, one behind it brings features together. A rank without items
encodes one more of another's, whose features are not used: its collectives take place, and its time is no longer than
theirs. Where data ranks must do alike (zero=3, `spread:data`) they tell each other how many items they have; a rank
whose model does not call the encoder calls it before its first block of text, as the others do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import all_gather
from weft.errors import LayoutError, ModelError
from weft.mesh import Axis, Mesh
from weft.parallel.layers.spread.deal import ItemCost, deal_items
from weft.parallel.layers.spread.item_division import Division, Ranks
from weft.parallel.layers.spread.items import Items, find_items
from weft.parallel.layers.spread.told_calls import ToldCalls, first_told, read_told, told
from weft.parallel.layers.spread.way_home import Beside, HomeOnDemand, ItemCall, lists_of_states
from weft.private_torch import graph_task, tree_flatten, tree_leaves, tree_unflatten, uncompiled
from weft.structure import become

#: Methods of models of transformers that call an encoder and what follows it, such as a projector.
FEATURES = ("get_image_features", "get_audio_features")
#: Items of a rank that does not call the encoder.
_NOT_CALLED = -1


#: A call of a method of the model's: its name, positional and named arguments.
Outer = tuple[str, tuple[Any, ...], dict[str, Any]]


class Encoder:
    """One module whose items are divided.

    Args:
        path: of the module.
        module: it.
        mesh: of the ranks.
        shares: whether items are divided at all, or ranks only see to it that all call the module.
        over_data: whether over data ranks too.
    """

    def __init__(self, path: str, module: nn.Module, mesh: Mesh, *, shares: bool, over_data: bool):
        self.path, self._module, self._device = path, module, mesh.device
        alone = Axis("alone", 1, 0, (mesh.rank,))
        self._over_data = over_data and mesh.data.size > 1
        self._ranks = Ranks(mesh.data if self._over_data else alone, mesh["tp"] if shares else alone)
        #: Ranks that must call the module alike.
        self.alike = mesh.data if self._over_data or mesh.plan.zero == 3 else alone
        self._cost = ItemCost.of(module)
        self._call: ItemCall | None = None
        self._told: list[int] = []  # items of each data rank, or _NOT_CALLED
        self._stands_by = False
        self.calls = 0
        #: What the module gave in this forward, which backward must pass through on all ranks.
        self.made: list[Tensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Encoder:
        return self  # a copy of the model runs on the same ranks

    def begin(self) -> None:
        """A forward of the model begins."""
        self.calls, self.made, self._call, self._stands_by = 0, [], None, False

    def before(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Outer | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Keep this rank's items of a call.

        Args:
            args: of the call.
            kwargs: of the call.
            outer: the call of the model's method that it is a part of.
        """
        self.calls += 1
        self._call = None
        if self.calls > 1 and self.alike.size > 1:
            if self._over_data:
                raise LayoutError(
                    f"{self.path}=spread:data: the model calls it {self.calls} times in a forward, and data ranks "
                    f"could not tell the calls apart. Use {self.path}=spread."
                )
            if self._ranks.per_home == 1:
                return None
        items = known = find_items(self.path, args, kwargs)
        if self._stands_by:
            return self._divided(items.without_any, items)
        counts = [len(items)]
        if self.alike.size > 1 and self.calls == 1:
            others = self._ask(items, outer)
            counts = self._told
            if not len(items) and others is not None:
                known = others.inner
        return self._divided(items, known) if max(counts) > 0 else None

    def _divided(self, home: Items, known: Items) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with this rank's items. home: those of its batch. known: of which one stands in for none."""
        home = home if len(home) else known.without_any
        division = self._divide(home)
        places = (*known.by_row, *known.by_item)
        replaced = {place: division.bring(home, place) for place in places}
        given = sum(division.rows[item] for item in division.own)
        if not division.own:
            cheapest = self._cheapest(known)
            replaced = {place: known.taken(place, [cheapest]) for place in places}
            given = known.rows[cheapest]
        self._call = ItemCall(division, given, known.rows[0] if self._stands_by else 0)
        return known.arguments(replaced)

    def _cheapest(self, items: Items) -> int:
        return min(range(len(items)), key=lambda one: self._cost(items.rows[one], items.spans[one]))

    def _divide(self, home: Items) -> Division:
        """Who computes what; where data ranks share, they tell each other the sizes of their items."""
        rows, spans, homes = home.rows, home.spans, (0,) * len(home)
        if self._over_data:
            counts = [max(count, 0) for count in self._told]
            told = torch.zeros(max(counts), 2, dtype=torch.int64)
            if len(home):
                told[: len(home)] = torch.tensor([rows, spans]).t()
            axis = self._ranks.data
            every = all_gather(told.to(self._device), axis).view(axis.size, -1, 2).tolist()
            found = [(rank, *one) for rank, count in enumerate(counts) for one in every[rank][:count]]
            homes, rows, spans = (tuple(column) for column in zip(*found, strict=True))
        costs = [self._cost(*sizes) for sizes in zip(rows, spans, strict=True)]
        per_home = self._ranks.per_home
        dealt = deal_items(costs, homes, self._ranks.data.size * per_home, per_home)
        return Division(self._ranks, rows, homes, dealt)

    def _ask(self, items: Items | None, outer: Outer | None = None) -> ToldCalls | None:
        """Learn how many items each data rank has; returns how others call it, where a rank needs that. A collective.

        items: of this rank; None: it does not call the module.
        """
        said = b""
        if items is not None and len(items):
            method, args, kwargs = outer or ("", (), {})
            around = find_items(self.path, args, kwargs) if method else items
            said = told(self.path, method, around, items, self._cheapest(items))
        own = torch.tensor([_NOT_CALLED if items is None else len(items), len(said)], device=self._device)
        every: list[list[int]] = all_gather(own, self.alike).view(-1, 2).tolist()
        self._told = [count for count, _ in every]
        if max(self._told) <= 0 or min(self._told) > 0:
            return None
        text = first_told(said, [size for _, size in every], self.alike, self._device)
        return read_told(text, self._device)

    def after(self, output: Any) -> Any:
        """Bring the features of all items of the batch together."""
        call, self._call = self._call, None
        if self.alike.size > 1:
            self.keep(output)
        if call is None or (self._ranks.per_home == 1 and not self._over_data and call.division.own):
            return output
        states = {} if self._over_data or call.expected else lists_of_states(output)
        lazy = {id(one) for some in states.values() for one in some}
        leaves, tree = tree_flatten(output)
        places = [
            place for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.dim() and id(leaf) not in lazy
        ]  # fmt: skip
        given = [leaves[place] for place in places]
        for place, leaf in zip(places, call.home(given), strict=True):
            leaves[place] = leaf
        found = tree_unflatten(leaves, tree)
        for name, some in states.items():
            found[name] = HomeOnDemand(some, call)
        return found

    def keep(self, output: Any) -> None:
        """Note what backward must pass through on this rank, as on the others."""
        self.made += [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def stand_by(self, model: nn.Module) -> None:
        """Call the module where the model did not, and other ranks' did. model: whose methods others called."""
        others = self._ask(None)
        if others is None:
            return
        args, kwargs = others.outer.arguments({})
        self._stands_by = True
        self.keep((getattr(model, others.method) if others.method else self._module)(*args, **kwargs))
        self._stands_by = False


class Encoders:
    """Those of one model on one rank, in the order in which its forward calls them.

    Args:
        encoders: of the model.
        holder: whose methods call them.
    """

    def __init__(self, encoders: list[Encoder], holder: nn.Module):
        self._encoders, self._holder = encoders, holder
        self._outer: Outer | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Encoders:
        return self  # a copy of the model runs on the same ranks

    def begin(self) -> None:
        """A forward of the model begins."""
        self._outer = None
        for encoder in self._encoders:
            encoder.begin()

    def inside(self, method: str, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a method of the holder's gives."""
        before, self._outer = self._outer, (method, args, kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            self._outer = before

    def enter(self, encoder: Encoder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model calls one: those before it that it has not called stand by first."""
        for one in self._encoders[: self._encoders.index(encoder)]:
            self._stand_by(one)
        return encoder.before(args, kwargs, self._outer)

    def _stand_by(self, encoder: Encoder) -> None:
        if encoder.alike.size > 1 and not encoder.calls:
            outer, self._outer = self._outer, None
            encoder.stand_by(self._holder)
            encoder.calls = max(encoder.calls, 1)
            self._outer = outer

    def meet_text(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before the first block of text: who was not called stands by, and what all gave is a part of the graph."""
        for encoder in self._encoders:
            self._stand_by(encoder)
        made = [tensor for encoder in self._encoders for tensor in encoder.made]
        for encoder in self._encoders:
            encoder.made = []
        leaves, tree = tree_flatten((args, kwargs))
        floats = (place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        place = next(floats, None)
        if not made or place is None or not torch.is_grad_enabled():
            return None
        leaves[place] = Beside.apply(leaves[place], *made)
        return tree_unflatten(leaves, tree)


class FeatureCalls(nn.Module):
    """A model of transformers that calls its encoders in methods: they note what they are given."""

    _weft_encoders: Encoders

    @staticmethod
    def members(own: type) -> dict[str, Any]:
        """Return its methods that do."""

        def noting(name: str) -> Any:
            @functools.wraps(getattr(own, name))
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                return self._weft_encoders.inside(name, functools.partial(getattr(own, name), self), args, kwargs)

            return call

        return {name: noting(name) for name in FEATURES if hasattr(own, name)}


class _Hooks:
    """Hooks of one encoder. An object, since copies of a module copy its hooks."""

    def __init__(self, encoders: Encoders, encoder: Encoder):
        self._encoders, self._encoder = encoders, encoder

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before its forward."""
        del module
        if graph_task() != -1:
            raise ModelError(
                f"{self._encoder.path}=spread: the whole encoder is recomputed in backward, where ranks meet for other "
                "things. Recompute its blocks (recompute=full), or leave spread out."
            )
        return self._encoders.enter(self._encoder, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Behind it."""
        del module, args
        return self._encoder.after(output)


class _Text:
    """Hooks of the whole model, and of its first block of text."""

    def __init__(self, encoders: Encoders):
        self._encoders = encoders

    def begin(self, module: nn.Module, args: Any) -> None:
        """Before the model's forward."""
        del module, args
        if graph_task() == -1:
            self._encoders.begin()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the block's."""
        del module
        return self._encoders.meet_text(args, kwargs) if graph_task() == -1 else None


def hook_encoders(model: nn.Module, text: nn.Module | None, encoders: Mapping[nn.Module, Encoder]) -> None:
    """Hang the hooks, in front of those that are there: other techniques' collectives come after.

    Args:
        model: whole, or a stage.
        text: its first block that reads what encoders gave; None: it is not here, or there is none.
        encoders: by their modules, in order.
    """
    inner = getattr(model, "model", None)
    holder = inner if isinstance(inner, nn.Module) and any(hasattr(inner, name) for name in FEATURES) else model
    every = Encoders(list(encoders.values()), holder)
    if any(hasattr(holder, name) for name in FEATURES):
        become(holder, FeatureCalls, FeatureCalls.members)
        holder.__dict__["_weft_encoders"] = every
    hooks = _Text(every)
    model.register_forward_pre_hook(uncompiled(hooks.begin), prepend=True)
    for module, encoder in encoders.items():
        own = _Hooks(every, encoder)
        module.register_forward_pre_hook(uncompiled(own.before), with_kwargs=True, prepend=True)
        module.register_forward_hook(uncompiled(own.after))
    if text is not None:
        text.register_forward_pre_hook(uncompiled(hooks.before), with_kwargs=True, prepend=True)
