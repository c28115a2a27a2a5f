"""Does a layout say what stands between the layers that it cuts? Parameters there see a part of the features.

Such a parameter's gradient is a partial sum (the norm of queries is the common case), which no shape tells: where the
layout leaves it out, or calls it whole, training goes on with wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from weft.errors import LayoutError
from weft.private_torch import named_modules
from weft.spec import Layout
from weft.structure.layers import parent_of
from weft.structure.layouts.layout_trace import works_on_parts

#: Styles that answer for whatever a module holds.
_ANSWERS = ("partial", "replicate", "expert")


def uncovered(around: str, styles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the modules inside `around` that have parameters of their own and that no style answers for.

    Args:
        around: the path of a module that holds layers cut by columns.
        styles: names of styles by path.
        modules: all of the model's by path.
    """
    prefix = f"{around}." if around else ""
    for name, module in named_modules(modules[around]):
        path = f"{prefix}{name}"
        if not name or path in styles or next(module.parameters(recurse=False), None) is None:
            continue
        above = (path[:place] for place, letter in enumerate(path) if letter == "." and place > len(around))
        if not any(styles.get(each) in _ANSWERS for each in above):
            yield path


def says_too_little(layout: Layout, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module with parameters stands beside layers cut by columns and by rows, and the layout leaves it out.

    It may work on this rank's heads: only tracing tells. Some families have norms of queries and keys only where
    their config asks for them, and publish one plan for both.
    """
    styles = _names(layout, modules)
    for around in {parent_of(path) for path, style in styles.items() if style == "colwise"} - {""}:
        inside = (styles.get(f"{around}.{name}") for name, _ in named_modules(modules[around]))
        if "rowwise" in inside and next(uncovered(around, styles, modules), None) is not None:
            return True
    return False


def expect_parts_named(model: nn.Module, layout: Layout, example: Any = None) -> None:
    """Refuse a layout by hand that does not call partial what works on a part of what it cuts.

    Args:
        model: the whole; it is called once without numbers where a module may work on a part.
        layout: as the user wrote it.
        example: arguments of a forward, for a model that takes neither ids nor images.

    Raises:
        LayoutError: names the module, and the style to add.
    """
    modules = dict(named_modules(model))
    styles = _names(layout, modules)
    around = {parent_of(path) for path, style in styles.items() if style == "colwise"}
    whole = [path for path, style in styles.items() if style == "replicate" and _within(path, around)]
    doubtful = [path for each in sorted(around) for path in uncovered(each, styles, modules)]
    if not whole and not doubtful:
        return
    try:
        found = works_on_parts(model, example)
    except LayoutError as error:
        beside = [path for path in doubtful if parent_of(path) in around - {""}]
        if beside:
            why = str(error).removeprefix("layout: ").partition(" Give example=")[0].rstrip(".")
            raise LayoutError(
                f"layout: {_listed(beside)} parameters beside cut layers, no pattern of the layout covers them, and "
                f"the model cannot be traced to see what they work on ({why}). {_remedy(beside)}"
            ) from None
        return
    missing = {
        path: cut
        for path, sources in found.items()
        if not _is_partial(path, styles) and (cut := sorted(one for one in sources if styles.get(one) == "colwise"))
    }
    if not missing:
        return
    first = next(iter(missing))
    said = "calls it replicate" if first in whole else "leaves it out"
    others = f", and so do {', '.join(list(missing)[1:])}" if len(missing) > 1 else ""
    replaced = [path for path in missing if path in whole]
    added = " ".join(f"{path}=partial" for path in missing)
    raise LayoutError(
        f"layout: {first} works on features of {missing[first][0]}, which the layout cuts, and the layout {said}"
        f"{others}. Each rank's gradient would be a part of the sum. Add {added}"
        f"{' in place of replicate' if replaced else ''}."
    )


def _listed(paths: Sequence[str]) -> str:
    return f"{', '.join(paths)} {'has' if len(paths) == 1 else 'have'}"


def _remedy(paths: Sequence[str]) -> str:
    return (
        f"Give example=, or add {' '.join(f'{path}=replicate' for path in paths)} to the layout, with partial for each "
        "that works on this rank's heads or features."
    )


def _names(layout: Layout, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    return {path: style.name for path in modules if (style := layout.style(path)) is not None}


def _is_partial(path: str, styles: Mapping[str, str]) -> bool:
    return any(style == "partial" and (path == each or path.startswith(f"{each}.")) for each, style in styles.items())


def _within(path: str, around: set[str]) -> bool:
    return any(not each or path.startswith(f"{each}.") for each in around)
