"""What a layout says of the modules of a model, and whether it fits them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from weft.config.layout import Layout, Style
from weft.config.rule import alternatives
from weft.errors import LayoutError, PlanError
from weft.models.inspect import layers
from weft.models.inspect.layers import Heads
from weft.models.inspect.rms_norm import rms_form
from weft.parallel.layers.index_check import StandIn


def nowhere(path: str) -> bool:
    """Say of no module that it is whole."""
    del path
    return False


def read_styles(layout: Layout, modules: Mapping[str, nn.Module], tp: int) -> dict[str, Style]:
    """The style of each module that the layout names. LayoutError where the module cannot have it."""
    if not any(isinstance(module, StandIn) for module in modules.values()):
        expect_used(layout, modules)
    here = (path for path, module in modules.items() if not isinstance(module, StandIn))  # of this stage's modules
    styles = {path: style for path in here if (style := layout.style(path)) is not None}
    cut = (path for path, style in styles.items() if style.name == "colwise")
    around = {layers.parent_of(path) for path in cut if layers.is_linear(modules[path])}
    for path, style in styles.items():
        module = modules[path]
        # A column of an embedding is a head's or a feature's; a row is an entry of the vocabulary.
        tables = isinstance(module, nn.Embedding) and style.name in ("colwise", "vocab")
        norms = style == Style("colwise") and layers.parent_of(path) in around and is_norm(module)
        norms = norms and rms_form(module) is not None
        if style.name in ("colwise", "rowwise", "vocab") and not (tables or norms or layers.is_linear(module)):
            what = "a linear layer" if style.name == "rowwise" else "an embedding or a linear layer"
            raise LayoutError(
                f"{path}={style.name}: {what} is needed, and this is a {type(module).__name__}. Use {path}=replicate."
            )
    if not any(style.name in ("colwise", "rowwise", "vocab") for style in styles.values()):
        raise LayoutError(f"tp={tp}: the layout cuts nothing of this model. Use tp=1, or give a layout.")
    return styles


def read_own(layout: Layout, modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """The style of each parameter that the layout names by itself: cut by heads along its first dim, or partial.

    Raises:
        LayoutError: for another style.
    """
    styles = {path: style for path in layers.own_parameters(modules) if (style := layout.style(path)) is not None}
    for path, style in styles.items():
        if path not in modules and style != Style("colwise") and style.name not in ("partial", "replicate"):
            raise LayoutError(f"{path}={layout.match(path)}: a parameter is colwise, partial or replicate. Use one.")
    return {path: style for path, style in styles.items() if path not in modules}


def expect_used(layout: Layout, modules: Mapping[str, nn.Module]) -> None:
    """Refuse a layout with a pattern that fits no module. modules: of the whole model; a stage has not all of them.

    Raises:
        LayoutError: names the first such pattern.
    """
    if unused := layout.unused((*modules, *layers.own_parameters(modules))):
        raise LayoutError(f"layout pattern {unused[0]!r}: the model has no such module. See `weft layout MODEL`.")


def check_layout(model: nn.Module, layout: Layout, tp: int = 0) -> list[int]:
    """Return the numbers of ranks that can share the model by this layout, at most eight.

    Args:
        model: the whole.
        layout: how its modules are cut.
        tp: a number that must be among them; 0: none.

    Raises:
        LayoutError: where the layout does not fit the model.
        PlanError: where tp is none of the numbers.
    """
    modules = dict(model.named_modules())
    styles = read_styles(layout, modules, tp)
    return check_sizes(modules, styles, find_heads(modules, styles), tp or 1)


def find_heads(modules: dict[str, nn.Module], styles: dict[str, Style]) -> dict[str, Heads]:
    """Heads of the module around each column-cut layer."""
    cut = (path for path, style in styles.items() if style.name == "colwise" and not is_norm(modules[path]))
    parents = dict.fromkeys(map(layers.parent_of, cut))
    return {path: Heads.of(modules[path]) for path in parents}


def check_sizes(modules: dict[str, nn.Module], styles: dict[str, Style], heads: dict[str, Heads], tp: int) -> list[int]:
    """PlanError with the legal values where tp does not divide what it cuts. Returns the legal values."""
    problems: list[str] = []
    counts: set[tuple[int, bool]] = set()
    for path, style in styles.items():
        if style.name not in ("colwise", "rowwise") or is_norm(modules[path]):
            continue
        weight = layers.weight_of(modules[path])
        is_table = isinstance(modules[path], nn.Embedding)  # its columns are cut one by one
        found = Heads() if is_table else heads.get(layers.parent_of(path), Heads())
        pieces = (
            found.pieces(style, weight.shape[1 if is_table else 0])
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


def is_norm(module: nn.Module) -> bool:
    """Whether a module that the layout cuts by columns is a norm of what such layers make."""
    return not (layers.is_linear(module) or isinstance(module, nn.Embedding))


def is_wide(parent: str, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> bool:
    """Whether the module around column-cut layers is more than one cut part: then each layer is an entry."""
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
    """Whether column-cut layers read what whole layers around them make, as latent attention has it: all that comes
    into the module then feeds this rank's heads alone, and its entry stands in front of it."""
    here = (path for path, style in styles.items() if style.name == "partial" and path.startswith(f"{parent}."))
    return any(layers.is_linear(modules[path]) for path in here)
