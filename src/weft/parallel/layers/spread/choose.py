"""Which modules of a model are spread: those that a layout names, and towers that must be called under zero=3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.errors import LayoutError
from weft.mesh import Mesh
from weft.models import BATCH_NORMS
from weft.parallel.layers.spread.encoders import Encoder, hook_encoders
from weft.parallel.layers.stand_in import StandIn
from weft.spec import Layout
from weft.structure import find_chain, hugging_face, layers, repeated_blocks

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: What modules call the share of what they drop, where they drop by functions.
_RATES = ("attention_dropout", "attn_dropout", "dropout", "activation_dropout", "layerdrop")


@dataclass(frozen=True)
class SpreadChoice:
    """Modules of a whole model that are encoders.

    shared: paths of those whose items are divided, and whether over data ranks too. watched: paths of those that all
    data ranks must call, and that stay with their rank. text: the first block that reads what they gave.
    """

    shared: Mapping[str, bool]
    watched: tuple[str, ...] = ()
    text: nn.Module | None = None

    def holds(self, path: str) -> bool:
        """Return whether a module is one of those whose items are divided, or inside of one."""
        return any(path == one or path.startswith(f"{one}.") for one in self.shared)

    def parameters(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of their parameters that are here: each rank's gradients are those of its items."""
        return tuple(name for name, _ in model.named_parameters() if self.holds(name.rpartition(".")[0]))


def choose_spread(model: nn.Module, mesh: Mesh, layout: Layout | None) -> SpreadChoice:
    """Return the encoders of a whole model.

    Args:
        model: before anything is cut.
        mesh: of the plan.
        layout: names modules whose items are divided.

    Raises:
        LayoutError: for a module that cannot be spread.
    """
    modules = dict(model.named_modules())
    named = layout.spread(modules) if layout is not None else {}
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
        return SpreadChoice({})
    inside = (*named, *watched)
    text = next(
        (block for path, block in repeated_blocks(model).items() if not any(_meets(path, one) for one in inside)), None
    )
    return SpreadChoice(named, watched, text)


def attach_spread(model: nn.Module, mesh: Mesh, choice: SpreadChoice) -> None:
    """Let ranks share the items of the encoders that are here. Call it when all other hooks hang.

    Args:
        model: whole, or a stage.
        mesh: of the plan.
        choice: made of the whole model.
    """
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
    """LayoutError where a plan divides what must stay whole."""
    if mesh.plan.cp > 1:
        raise LayoutError(
            f"{first}=spread: with cp={mesh.plan.cp} each rank has a part of the tokens, and Weft cannot tell whose "
            "items belong to them. Use cp=1."
        )
    if mesh.plan.pp == 1:
        return
    for site in find_chain(model).blocks:
        if (inside := next((path for path in named if _meets(site.path, path)), None)) is not None:
            raise LayoutError(
                f"{inside}=spread: with pp={mesh.plan.pp} its blocks are divided into stages, and an encoder that is "
                "spread lies whole on one. Use pp=1, or leave spread out."
            )


def _check(path: str, module: nn.Module, others: list[str]) -> None:
    if path == "" or any(_meets(path, one) for one in others):
        raise LayoutError(f"{path or 'the model'}=spread: it holds another module that is spread. Spread one of them.")
    for name, part in module.named_modules():
        where = f"{path}.{name}" if name else path
        if isinstance(part, BATCH_NORMS):
            raise LayoutError(
                f"{path}=spread: {where} takes statistics over items, and each rank would take those of its own. "
                "Leave spread out."
            )
        rate = float(part.p) if isinstance(part, _DROPOUTS) else _rate(part)
        if rate:
            raise LayoutError(
                f"{path}=spread: {where} drops at a rate of {rate:g}, and what it drops would follow the rank. Set the "
                "rate to 0, or leave spread out."
            )


def _rate(module: nn.Module) -> float:
    found: list[Any] = [vars(module).get(name) for name in _RATES]
    return next((float(one) for one in found if isinstance(one, int | float) and one), 0.0)


def _towers(model: nn.Module) -> tuple[str, ...]:
    """The towers of a model that writes images over its tokens: a batch of text alone calls none of them."""
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
    """Whether one of the modules is the other, or inside of it."""
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")
