"""Reads the styles that a layout assigns to a model's modules, and checks that they fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from weft.config.fields.layout import Layout, Style
from weft.config.rules.rule import alternatives
from weft.errors import LayoutError, PlanError
from weft.models.inspect import layers
from weft.models.inspect.layers import Heads
from weft.models.inspect.rms_norm import rms_form
from weft.models.inspect.state_layout import state_heads
from weft.parallel.layers.index_check import StandIn


def nowhere(path: str) -> bool:
    del path
    return False


def read_styles(layout: Layout, modules: Mapping[str, nn.Module], tp: int) -> dict[str, Style]:
    """Return the style of each module that the layout names, except `StandIn`s.

    Raises LayoutError if a module cannot have its style, or nothing is sharded. If no module is a `StandIn`, it is also
    raised for a pattern that matches nothing.
    """
    if not any(isinstance(module, StandIn) for module in modules.values()):
        expect_used(layout, modules)
    here = (path for path, module in modules.items() if not isinstance(module, StandIn))  # local modules
    styles = {path: style for path in here if (style := layout.style(path)) is not None}
    cut = (path for path, style in styles.items() if style.name == "colwise")
    around = {layers.parent_of(path) for path in cut if layers.is_linear(modules[path])}
    for path, style in styles.items():
        module = modules[path]
        # A column of an embedding is a feature. A row is an entry of the vocabulary.
        tables = isinstance(module, nn.Embedding) and style.name in ("colwise", "vocab")
        norms = style == Style("colwise") and layers.parent_of(path) in around and is_norm(module)
        norms = norms and rms_form(module) is not None
        channels = style.name == "colwise" and has_channels(path, modules)
        if style.name in ("colwise", "rowwise", "vocab") and not (
            tables or norms or channels or layers.is_linear(module)
        ):
            what = "a linear layer" if style.name == "rowwise" else "an embedding or a linear layer"
            raise LayoutError(
                f"{path}={style.name}: {what} is needed, and this is a {type(module).__name__}. Use {path}=replicate."
            )
    if not any(style.name in ("colwise", "rowwise", "vocab") for style in styles.values()):
        raise LayoutError(f"tp={tp}: the layout shards nothing of this model. Use tp=1, or set a layout.")
    return styles


def read_own(layout: Layout, modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Return the style of each parameter that the layout names: sharded by heads along dim 0, partial or replicated.

    Raises LayoutError if a parameter has a style that parameters do not support.
    """
    styles = {path: style for path in layers.own_parameters(modules) if (style := layout.style(path)) is not None}
    for path, style in styles.items():
        if path not in modules and style != Style("colwise") and style.name not in ("partial", "replicate"):
            raise LayoutError(f"{path}={layout.match(path)}: a parameter is colwise, partial or replicate. Use one.")
    return {path: style for path, style in styles.items() if path not in modules}


def expect_used(layout: Layout, modules: Mapping[str, nn.Module]) -> None:
    """Raise an error unless every pattern of the layout matches a module or parameter.

    modules: modules of the full model. A stage does not have all of them.

    Raises:
        LayoutError: names the first pattern without a match.
    """
    if unused := layout.unused((*modules, *layers.own_parameters(modules))):
        raise LayoutError(f"layout pattern {unused[0]!r}: the model has no such module. See `weft layout MODEL`.")


def check_layout(model: nn.Module, layout: Layout, tp: int = 0) -> list[int]:
    """Return the smallest tp sizes that this layout allows for the model, at most eight.

    tp: size that must be allowed; 0 checks no size. Raises LayoutError if the layout does not fit the model. Raises
    PlanError if tp is not an allowed size.
    """
    modules = dict(model.named_modules())
    styles = read_styles(layout, modules, tp)
    return check_sizes(modules, styles, find_heads(modules, styles), tp or 1)


def find_heads(modules: dict[str, nn.Module], styles: dict[str, Style]) -> dict[str, Heads]:
    """Find the heads of each module that directly contains column-sharded layers."""
    cut = (path for path, style in styles.items() if style.name == "colwise" and not is_norm(modules[path]))
    parents = dict.fromkeys(map(layers.parent_of, cut))
    return {path: state_heads(modules[path]) or Heads.of(modules[path]) for path in parents}


def check_sizes(modules: dict[str, nn.Module], styles: dict[str, Style], heads: dict[str, Heads], tp: int) -> list[int]:
    """Return the smallest valid values of tp, at most eight.

    Raises PlanError, which names valid values, if tp does not divide the heads or features of a sharded layer.
    """
    problems: list[str] = []
    counts: set[tuple[int, bool]] = set()
    for path, style in styles.items():
        if style.name not in ("colwise", "rowwise") or is_norm(modules[path]):
            continue
        weight = layers.weight_of(modules[path])
        is_table = isinstance(modules[path], nn.Embedding)  # sharded by single columns
        found = Heads() if is_table else heads.get(layers.parent_of(path), Heads())
        pieces = (
            found.row_groups(style, weight.shape[1 if is_table else 0])
            if style.name == "colwise"
            else [(weight.shape[1], 1, False)]
        )
        for size, unit, repeats in pieces:
            counts.add((size // unit, repeats))
            if not _fits(size // unit, repeats, tp):
                what = "features" if unit == 1 else "heads"
                problems.append(f"{path} has {size // unit} {what}, and {size // unit} is not a multiple of {tp}")
    least = min((count for count, repeats in counts if not repeats), default=1)
    legal = [ranks for ranks in range(1, least + 1) if all(_fits(count, again, ranks) for count, again in counts)]
    if problems:
        raise PlanError(f"tp={tp}: {problems[0]}. {alternatives(legal, 'tp')}.")
    return legal[:8]


def _fits(count: int, repeats: bool, tp: int) -> bool:
    return count % tp == 0 or (repeats and tp % count == 0)


def has_channels(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return True for a norm or depthwise convolution directly in a layer with a recurrent state."""
    parent = modules.get(layers.parent_of(path))
    return is_norm(modules[path]) and parent is not None and state_heads(parent) is not None


def is_norm(module: nn.Module) -> bool:
    """Return True if a column-sharded module is neither linear nor an embedding, but a norm or a convolution."""
    return not (layers.is_linear(module) or isinstance(module, nn.Embedding))


def is_wide(parent: str, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> bool:
    """Return True if each column-sharded layer of the module `parent` gathers its own input.

    This is so for the root. If `makes_ahead` is False, it is also so for modules of which the layout names a submodule
    that is not a direct child, and for modules with norms if the layout names none of the norms.
    """
    if parent == "":
        return True
    if makes_ahead(parent, modules, styles):
        return False
    module = modules[parent]
    inside = [name for path in styles if (name := path.removeprefix(f"{parent}.")) != path]
    nested = any("." in name for name in inside)
    norms = any("norm" in type(child).__name__.lower() for child in module.children())
    styled = any(styles[path].name == "partial" or is_norm(modules[path]) for path in (f"{parent}.{n}" for n in inside))
    return nested or (norms and not styled)


def makes_ahead(parent: str, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> bool:
    """Return True if column-sharded layers read outputs of unsharded layers in the same module, as in latent attention.

    Then the module's input feeds only this rank's heads, and is gathered in front of the module.
    """
    here = (path for path, style in styles.items() if style.name == "partial" and path.startswith(f"{parent}."))
    return any(layers.is_linear(modules[path]) for path in here)


def is_ahead(parent: str, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> bool:
    """Return True if `makes_ahead` is True for a module and it directly contains a row-sharded layer."""
    return bool(_rows(parent, styles)) and makes_ahead(parent, modules, styles)


def _rows(parent: str, styles: Mapping[str, Style]) -> list[str]:
    return [path for path, style in styles.items() if style.name == "rowwise" and layers.parent_of(path) == parent]


def gathers_per_layer(parent: str, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> bool:
    """Return True if each column-sharded layer of a module gathers its own input.

    This is so if `is_wide` is True, and for cross-attention, whose layers read different inputs.
    """
    return is_wide(parent, modules, styles) or bool(getattr(modules[parent], "is_cross_attention", False))


def entry_width(path: str, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> int:
    """Return the number of input features of the module around a column-sharded layer.

    If unsharded layers run first, this is the number of output features of the module's row-sharded layer, because the
    column-sharded layer may read fewer features.
    """
    parent = layers.parent_of(path)
    if is_ahead(parent, modules, styles):
        return layers.weight_of(modules[_rows(parent, styles)[0]]).shape[0]
    return layers.weight_of(modules[path]).shape[1]


def is_inside(path: str, around: Iterable[str]) -> bool:
    """Return True if a module or parameter is in one of the modules `around`."""
    return any(path.startswith(f"{each}.") for each in around)
