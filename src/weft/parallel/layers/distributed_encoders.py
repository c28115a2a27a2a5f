"""Distribution of an encoder's items (images or clips) over ranks by cost.

Every rank computes the same assignment from the sizes of the items.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.collectives import all_gather
from weft.comm.mesh import Axis, Mesh
from weft.config.fields.layout import Layout
from weft.errors import LayoutError, ModelError
from weft.models.initialize import BATCH_NORMS
from weft.models.inspect import hugging_face, layers
from weft.models.inspect.blocks import repeated_blocks, replace_class
from weft.models.inspect.chain import find_chain
from weft.parallel.layers.encoder_items import (
    Division,
    HomeOnDemand,
    ItemCall,
    Items,
    Ranks,
    ReplicatedCalls,
    ZeroGradDependency,
    encode_calls,
    find_items,
    first_recorded,
    lists_of_states,
    parse_calls,
)
from weft.parallel.layers.index_check import StandIn
from weft.private_torch import graph_task, tree_flatten, tree_leaves, tree_unflatten, uncompiled


@dataclass(frozen=True, slots=True)
class ItemCost:
    """Relative FLOPs of an encoder item: a term per row, and a term per pair of rows that attend to each other."""

    per_row: float
    per_pair: float

    @classmethod
    def of(cls, module: nn.Module) -> ItemCost:
        """Return the cost function of an encoder's items, from its weights and the width and number of its blocks."""
        weights = sum(param.numel() for param in module.parameters() if param.dim() > 1)
        blocks = list(repeated_blocks(module).values())
        first = next((part for block in blocks for part in block.modules() if layers.is_linear(part)), None)
        width = layers.weight_of(first).shape[1] if first is not None else 0
        return cls(2.0 * max(weights, 1), 4.0 * width * len(blocks))

    def __call__(self, rows: int, span: int) -> float:
        return rows * (self.per_row + self.per_pair * span)


def assign_items(costs: Sequence[float], homes: Sequence[int], num_ranks: int, ranks_per_home: int) -> list[list[int]]:
    """Return the items of each rank, ascending. The most costly remaining item goes to the rank with the least cost.

    Of items with equal costs, a rank first gets items of its data rank. homes: each item's data rank. ranks_per_home:
    ranks per data rank.
    """
    alike: dict[float, dict[int, list[int]]] = {}
    for item in reversed(range(len(costs))):
        alike.setdefault(costs[item], {}).setdefault(homes[item], []).append(item)
    sums, found = [0.0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for cost in sorted(alike, reverse=True):
        waiting = alike[cost]
        for _ in range(sum(map(len, waiting.values()))):
            rank = min(range(num_ranks), key=lambda one: (sums[one], one))
            home = rank // ranks_per_home
            if not waiting.get(home):
                home = max(waiting, key=lambda one: (len(waiting[one]), -one))
            found[rank].append(waiting[home].pop())
            sums[rank] += cost
    return [sorted(own) for own in found]


# Encoders whose items are distributed over ranks by cost. Each rank holds the full encoder and calls it once, for its
# assigned items.

#: Methods of transformers models that call an encoder and the modules that follow it, such as a projector.
FEATURES = ("get_image_features", "get_audio_features")
#: Item count of a rank that does not call the encoder.
_NOT_CALLED = -1


#: A call to a model's method: its name, positional and keyword arguments.
Outer = tuple[str, tuple[Any, ...], dict[str, Any]]


class Encoder:
    """A module whose items are distributed over ranks.

    shares: True to distribute items; if False, the ranks only ensure that all of them call the module. over_data: True
    if data ranks share items too.
    """

    def __init__(self, path: str, module: nn.Module, mesh: Mesh, *, shares: bool, over_data: bool):
        self.path, self._module, self._device = path, module, mesh.device
        alone = Axis("alone", 1, 0, (mesh.rank,))
        self._over_data = over_data and mesh.data.size > 1
        self._ranks = Ranks(mesh.data if self._over_data else alone, mesh["tp"] if shares else alone)
        #: Ranks on which the calls to the module must be identical.
        self.alike = mesh.data if self._over_data or mesh.plan.zero == 3 else alone
        self._cost = ItemCost.of(module)
        self._call: ItemCall | None = None
        self._item_counts: list[int] = []  # items of each data rank, or _NOT_CALLED
        self._stands_by = False
        self.calls = 0
        #: Outputs of the module in this forward. Backward must pass through them on all ranks.
        self.made: list[Tensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Encoder:
        return self  # a copy of the model runs on the same ranks

    def begin(self) -> None:
        self.calls, self.made, self._call, self._stands_by = 0, [], None, False

    def before(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Outer | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return a call's arguments with the items that this rank computes, or None to leave the call unchanged.

        outer: call to the model's method that calls the encoder, or None.

        Raises LayoutError if the items cannot be determined, or if data ranks share items and the model calls the
        encoder twice in a forward.
        """
        self.calls += 1
        self._call = None
        if self.calls > 1 and self.alike.size > 1:
            if self._over_data:
                raise LayoutError(
                    f"{self.path}=spread:data: the model calls it {self.calls} times in a forward, and data ranks "
                    f"cannot distinguish the calls. Use {self.path}=spread."
                )
            if self._ranks.per_home == 1:
                return None
        items = known = find_items(self.path, args, kwargs)
        if self._stands_by:
            return self._divided(items.without_any, items)
        counts = [len(items)]
        if self.alike.size > 1 and self.calls == 1:
            others = self._ask(items, outer)
            counts = self._item_counts
            if not len(items) and others is not None:
                known = others.inner
        return self._divided(items, known) if max(counts) > 0 else None

    def _divided(self, home: Items, known: Items) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the items that this rank computes.

        A rank to which no item is assigned computes the cheapest item of `known` instead.

        home: items of this rank's batch. known: the same or, if there are no items, items of another rank.
        """
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
        """Assign items to ranks. If data ranks share items, they exchange item sizes first."""
        rows, spans, homes = home.rows, home.spans, (0,) * len(home)
        if self._over_data:
            counts = [max(count, 0) for count in self._item_counts]
            told = torch.zeros(max(counts), 2, dtype=torch.int64)
            if len(home):
                told[: len(home)] = torch.tensor([rows, spans]).t()
            axis = self._ranks.data
            every = all_gather(told.to(self._device), axis).view(axis.size, -1, 2).tolist()
            found = [(rank, *one) for rank, count in enumerate(counts) for one in every[rank][:count]]
            homes, rows, spans = (tuple(column) for column in zip(*found, strict=True))
        costs = [self._cost(*sizes) for sizes in zip(rows, spans, strict=True)]
        per_home = self._ranks.per_home
        dealt = assign_items(costs, homes, self._ranks.data.size * per_home, per_home)
        return Division(self._ranks, rows, homes, dealt)

    def _ask(self, items: Items | None, outer: Outer | None = None) -> ReplicatedCalls | None:
        """Gather the number of items of each data rank into `_item_counts`. All ranks must call it.

        If only some ranks have items, return a call that the other ranks can repeat, else None.

        items: this rank's items, or None if it does not call the module.
        """
        said = b""
        if items is not None and len(items):
            method, args, kwargs = outer or ("", (), {})
            around = find_items(self.path, args, kwargs) if method else items
            said = encode_calls(self.path, method, around, items, self._cheapest(items))
        own = torch.tensor([_NOT_CALLED if items is None else len(items), len(said)], device=self._device)
        every: list[list[int]] = all_gather(own, self.alike).view(-1, 2).tolist()
        self._item_counts = [count for count, _ in every]
        if max(self._item_counts) <= 0 or min(self._item_counts) > 0:
            return None
        text = first_recorded(said, [size for _, size in every], self.alike, self._device)
        return parse_calls(text, self._device)

    def after(self, output: Any) -> Any:
        """Return the module's output with the features of all items of this rank's batch, gathered from other ranks.

        Unless data ranks share items, tuples of one tensor per layer are gathered only when they are read.
        """
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
        """Store the outputs through which backward must pass on all ranks."""
        self.made += [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def stand_by(self, model: nn.Module) -> None:
        """Call the module if this rank's model did not, but other ranks' models did.

        If they called it through a method, the same method of `model` is called.
        """
        others = self._ask(None)
        if others is None:
            return
        args, kwargs = others.outer.arguments({})
        self._stands_by = True
        self.keep((getattr(model, others.method) if others.method else self._module)(*args, **kwargs))
        self._stands_by = False


class Encoders:
    """Encoders of one model on one rank, in the order in which its forward calls them."""

    def __init__(self, encoders: list[Encoder], holder: nn.Module):
        self._encoders, self._holder = encoders, holder
        self._outer: Outer | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Encoders:
        return self  # a copy of the model runs on the same ranks

    def begin(self) -> None:
        self._outer = None
        for encoder in self._encoders:
            encoder.begin()

    def inside(self, method: str, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of the model that calls encoders, and record its arguments for them. Returns its result."""
        before, self._outer = self._outer, (method, args, kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            self._outer = before

    def enter(self, encoder: Encoder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a call to an encoder. Returns its new arguments, or None.

        Earlier encoders that this rank's model skipped are called first, because other ranks call them.
        """
        for one in self._encoders[: self._encoders.index(encoder)]:
            self._stand_by(one)
        return encoder.before(args, kwargs, self._outer)

    def _stand_by(self, encoder: Encoder) -> None:
        if encoder.alike.size > 1 and not encoder.calls:
            outer, self._outer = self._outer, None
            encoder.stand_by(self._holder)
            encoder.calls = max(encoder.calls, 1)
            self._outer = outer

    def prepare_text(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Call the encoders that the model skipped, and connect all encoder outputs to the autograd graph.

        Return the changed arguments. Return None if there are no encoder outputs, if no argument is a floating-point
        tensor, or if gradients are disabled.
        """
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
        leaves[place] = ZeroGradDependency.apply(leaves[place], *made)
        return tree_unflatten(leaves, tree)


class FeatureCalls(nn.Module):
    """Mixin for transformers models that call their encoders in methods. It records the arguments of these methods."""

    _weft_encoders: Encoders

    @staticmethod
    def members(own: type) -> dict[str, Any]:
        """Return wrappers of the class's feature methods, by name."""

        def noting(name: str) -> Any:
            @functools.wraps(getattr(own, name))
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                return self._weft_encoders.inside(name, functools.partial(getattr(own, name), self), args, kwargs)

            return call

        return {name: noting(name) for name in FEATURES if hasattr(own, name)}


class _Hooks:
    def __init__(self, encoders: Encoders, encoder: Encoder):
        self._encoders, self._encoder = encoders, encoder

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        if graph_task() != -1:
            raise ModelError(
                f"{self._encoder.path}=spread: the full encoder is recomputed in backward, during other collectives. "
                "Recompute its blocks (recompute=full), or leave spread out."
            )
        return self._encoders.enter(self._encoder, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        return self._encoder.after(output)


class _Text:
    """Hooks of the model, and of the first block that reads encoder outputs."""

    def __init__(self, encoders: Encoders):
        self._encoders = encoders

    def begin(self, module: nn.Module, args: Any) -> None:
        del module, args
        if graph_task() == -1:
            self._encoders.begin()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        return self._encoders.prepare_text(args, kwargs) if graph_task() == -1 else None


def hook_encoders(model: nn.Module, text: nn.Module | None, encoders: Mapping[nn.Module, Encoder]) -> None:
    """Add hooks that distribute the items of encoders, and wrap the model's methods that call encoders.

    The pre-hooks run before existing ones, so that collectives of other techniques run later.

    text: first block that reads encoder outputs, or None if it is not on this rank or does not exist. encoders:
    encoders by module, in call order.
    """
    inner = getattr(model, "model", None)
    holder = inner if isinstance(inner, nn.Module) and any(hasattr(inner, name) for name in FEATURES) else model
    every = Encoders(list(encoders.values()), holder)
    if any(hasattr(holder, name) for name in FEATURES):
        replace_class(holder, FeatureCalls, FeatureCalls.members)
        holder.__dict__["_weft_encoders"] = every
    hooks = _Text(every)
    model.register_forward_pre_hook(uncompiled(hooks.begin), prepend=True)
    for module, encoder in encoders.items():
        own = _Hooks(every, encoder)
        module.register_forward_pre_hook(uncompiled(own.before), with_kwargs=True, prepend=True)
        module.register_forward_hook(uncompiled(own.after))
    if text is not None:
        text.register_forward_pre_hook(uncompiled(hooks.before), with_kwargs=True, prepend=True)


# Choice of the encoders: modules that a layout names, and encoders that every data rank must call under zero=3.

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: Attributes with a dropout rate in modules that call dropout functions.
_RATES = ("attention_dropout", "attn_dropout", "dropout", "activation_dropout", "layerdrop")


@dataclass(frozen=True)
class EncoderChoice:
    """Encoders of a full model whose items are distributed, or that all data ranks must call.

    `shared` maps the paths of encoders whose items are distributed to True if data ranks share them too. `watched`
    holds the paths of encoders that all data ranks must call and whose items stay on their rank. `text` is the first
    block that reads encoder outputs.
    """

    shared: Mapping[str, bool]
    watched: tuple[str, ...] = ()
    text: nn.Module | None = None

    def holds(self, path: str) -> bool:
        """Return True if the module's items are distributed, or it is inside a module whose items are."""
        return any(path == one or path.startswith(f"{one}.") for one in self.shared)

    def parameters(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of this rank's parameters of encoders whose items are distributed.

        Each rank's gradients of them come only from the items that it computes.
        """
        return tuple(name for name, _ in model.named_parameters() if self.holds(name.rpartition(".")[0]))


def choose_encoders(model: nn.Module, mesh: Mesh, layout: Layout | None) -> EncoderChoice:
    """Return the encoders of an unsharded model.

    Raises LayoutError if the items of a module that the layout names cannot be distributed, or if a `spread` pattern
    matches no module.
    """
    modules = dict(model.named_modules())
    named = layout.divided_modules(modules) if layout is not None else {}
    if layout is not None and (unused := Layout(tuple(p for p in layout.pairs if p[1].startswith("spread")))).pairs:
        for pattern in unused.unused(modules):
            raise LayoutError(f"layout pattern {pattern!r}: the model has no such module. See `weft layout MODEL`.")
    for path in named:
        _check(path, modules[path], [one for one in named if one != path])
    if named:
        _check_plan(next(iter(named)), model, mesh, named)
    watched = _towers(model) if mesh.plan.zero == 3 and mesh.data.size > 1 else ()
    watched = tuple(path for path in watched if not any(_meets(path, one) for one in named))
    if not named and not watched:
        return EncoderChoice({})
    inside = (*named, *watched)
    text = next(
        (block for path, block in repeated_blocks(model).items() if not any(_meets(path, one) for one in inside)), None
    )
    return EncoderChoice(named, watched, text)


def distribute_encoders(model: nn.Module, mesh: Mesh, choice: EncoderChoice) -> None:
    """Add hooks that distribute the items of this rank's encoders. Call it after all other hooks are registered."""
    here = {path: module for path, module in model.named_modules() if not isinstance(module, StandIn)}
    found = {
        here[path]: Encoder(
            path, here[path], mesh, shares=path in choice.shared, over_data=choice.shared.get(path, False)
        )
        for path in here
        if path in choice.shared or path in choice.watched
    }
    if found:
        is_here = choice.text is not None and any(module is choice.text for module in model.modules())
        hook_encoders(model, choice.text if is_here else None, found)


def _check_plan(first: str, model: nn.Module, mesh: Mesh, named: Mapping[str, bool]) -> None:
    """Raise LayoutError if the plan shards something that distributed encoders need in full."""
    if mesh.plan.cp > 1:
        raise LayoutError(
            f"{first}=spread: with cp={mesh.plan.cp} each rank has a part of the tokens, and their items are "
            "unknown. Use cp=1."
        )
    if mesh.plan.pp == 1:
        return
    for site in find_chain(model).blocks:
        if (inside := next((path for path in named if _meets(site.path, path)), None)) is not None:
            raise LayoutError(
                f"{inside}=spread: with pp={mesh.plan.pp} its blocks are divided into stages, and a spread encoder "
                "must be on one stage. Use pp=1, or leave spread out."
            )


def _check(path: str, module: nn.Module, others: list[str]) -> None:
    if path == "" or any(_meets(path, one) for one in others):
        raise LayoutError(
            f"{path or 'the model'}=spread: it contains another spread module. Use spread for one of them."
        )
    for name, part in module.named_modules():
        where = f"{path}.{name}" if name else path
        if isinstance(part, BATCH_NORMS):
            raise LayoutError(
                f"{path}=spread: {where} uses statistics over items, and each rank would use only its own. Leave "
                "spread out."
            )
        rate = float(part.p) if isinstance(part, _DROPOUTS) else _rate(part)
        if rate:
            raise LayoutError(
                f"{path}=spread: {where} drops at a rate of {rate:g}, and its dropout would depend on the rank. Set "
                "the rate to 0, or leave spread out."
            )


def _rate(module: nn.Module) -> float:
    found: list[Any] = [vars(module).get(name) for name in _RATES]
    return next((float(one) for one in found if isinstance(one, int | float) and one), 0.0)


def _towers(model: nn.Module) -> tuple[str, ...]:
    """Return the encoders of a model that replaces placeholder tokens with image features.

    A batch without images does not call them. Return () for other models.
    """
    if not hugging_face.is_hugging_face(model) or not hugging_face.reads_images_as_tokens(model):
        return ()
    lists = dict.fromkeys(layers.parent_of(path) for path in repeated_blocks(model))
    towers = (getattr(part, "language_model", None) for part in (model, getattr(model, "model", None)))
    text = {id(part) for tower in towers if isinstance(tower, nn.Module) for part in tower.modules()}
    of_text = [path for path in lists if id(model.get_submodule(path)) in text]
    found: dict[str, None] = {}
    for path in lists:
        if path in of_text or not of_text:
            continue
        keys = path.split(".")
        above = (".".join(keys[: place + 1]) for place in range(len(keys)))
        found[next(one for one in above if not any(_meets(one, other) for other in of_text))] = None
    return tuple(found)


def _meets(path: str, other: str) -> bool:
    """Return True if two module paths are equal, or one module is inside the other."""
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")
