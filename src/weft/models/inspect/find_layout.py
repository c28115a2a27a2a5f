"""Find the layout of a model, and check that it covers the modules between sharded layers.

Such modules may process only a part of the features on each rank. The gradient of their parameters is then a partial
sum (for example the norm of queries), which shapes do not show. If the layout omits such a parameter or replicates it,
training continues with wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from weft.config.fields.layout import Layout
from weft.errors import LayoutError
from weft.models.inspect.blocks import repeated_blocks
from weft.models.inspect.layers import KnownModel, find_lm_head, input_embeddings, parent_of
from weft.models.inspect.layout_trace import FoundLayout, combined_features, trace_layout, works_on_parts
from weft.models.inspect.token_flow import mixing
from weft.private_torch import named_modules

#: Styles that apply to all parameters of a module, including submodules.
_ANSWERS = ("partial", "replicate", "expert")


def uncovered(around: str, styles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the modules inside `around` that have direct parameters and that no style covers.

    Args:
        around: path of a module with column-parallel layers.
        styles: names of styles by path.
        modules: all of the model's modules by path.
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
    """Return True if the layout omits a module with parameters among column- and row-parallel layers.

    Such a module may work on this rank's heads, which only tracing shows. Some families have norms of queries and keys
    only if their config enables them, and publish one plan for both cases.
    """
    styles = _names(layout, modules)
    for around in {parent_of(path) for path, style in styles.items() if style == "colwise"} - {""}:
        inside = (styles.get(f"{around}.{name}") for name, _ in named_modules(modules[around]))
        if "rowwise" in inside and next(uncovered(around, styles, modules), None) is not None:
            return True
    return False


def expect_parts_named(model: nn.Module, layout: Layout, example: Any = None) -> None:
    """Check that a manual layout has the style partial for modules that process sharded features.

    Args:
        model: the full model. It is called once on the meta device if a module may process sharded features.
        layout: the layout that the user wrote.
        example: arguments of a forward, for a model that takes neither ids nor images.

    Raises:
        LayoutError: if a module lacks the style, or if the model cannot be traced and the layout omits a module next
            to sharded layers. The message names the module and the style to add.
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
                f"layout: {_listed(beside)} parameters next to sharded layers, no pattern of the layout covers them, "
                f"and the model cannot be traced to find their inputs ({why}). {_remedy(beside)}"
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
        f"layout: {first} works on features of {missing[first][0]}, which the layout shards, and the layout "
        f"{said}{others}. Each rank's gradient would be partial. Add "
        f"{added}{' instead of replicate' if replaced else ''}."
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


# Finding the layout of a model: Weft's own families, the plans of Hugging Face models, else tracing.

#: Names of the styles in a transformers `base_model_tp_plan`, and Weft's names for them.
_HF_STYLES = {"colwise": "colwise", "rowwise": "rowwise", "replicated_with_grad_allreduce": "partial"}


def find_layout(model: nn.Module, example: Any = None) -> Layout:
    """Return the layout of any model. example: arguments of a forward, or None for generated ones.

    Raises:
        LayoutError: if no layer can be sharded.
    """
    return model.tensor_layout() if isinstance(model, KnownModel) else explain_layout(model, example).layout


def explain_layout(model: nn.Module, example: Any = None) -> FoundLayout:
    """Return the layout, its source, and reasons by pattern (none for Weft's own models with experts).

    example: arguments of a forward, for a model that takes neither ids nor images. Raises LayoutError if no layer can
    be sharded, or if the model must be traced and its forward fails.
    """
    if isinstance(model, KnownModel):
        reasons: Mapping[str, str] = {} if model.has_routers else trace_layout(model).reasons
        return FoundLayout(model.tensor_layout(), f"the project's own layout of {model.family}", reasons)
    found = _from_tp_plan(model)
    if found is None or _cuts_combined(model, found.layout, example):
        found = trace_layout(model, example)
    elif _replicated_attention(model, found.layout):
        found = _with_attention(model, example, found)
    whole = _replicated_attention(model, found.layout)
    if any("norm" in type(child).__name__.lower() for module in whole for child in module.children()):
        found = _with_attention(model, example, found, across_norms=True)
    return found


def _cuts_combined(model: nn.Module, layout: Layout, example: Any) -> bool:
    """Return True if an operation combines features of a layer that a published plan shards by columns, as a mean does.

    A rank would combine its own part alone. Raise LayoutError if the model cannot be traced.
    """
    return any(layout.match(path) == "colwise" for path in combined_features(model, example))


def _replicated_attention(model: nn.Module, layout: Layout) -> list[nn.Module]:
    """Return attention modules that a layout replicates fully, as published plans for latent attention do."""
    cut = [path for path, _ in named_modules(model) if layout.match(path) in ("colwise", "rowwise")]
    return [
        module
        for path, block in repeated_blocks(model).items()
        for name, module in named_modules(block)
        if name and mixing(module) == "attention" and not any(each.startswith(f"{path}.{name}.") for each in cut)
    ]


def _with_attention(model: nn.Module, example: Any, found: FoundLayout, across_norms: bool = False) -> FoundLayout:
    """Return the traced layout if it shards all layers that `found` shards; else return `found`."""
    try:
        traced = trace_layout(model, example, across_norms)
    except LayoutError:
        return found
    paths = [path for path, _ in named_modules(model)]
    kept = all(
        (traced.layout.match(path) or "").partition(":")[0] == style
        for path in paths
        if (style := found.layout.match(path)) in ("colwise", "rowwise", "vocab")
    )
    return traced if kept else found


def _from_tp_plan(model: nn.Module) -> FoundLayout | None:
    """Return the layout of a Hugging Face model's own plan, or None if it does not exist or Weft cannot use it.

    A plan cannot be used if it has an unknown style, or omits modules among sharded layers.
    """
    plan: dict[str, str] = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""
    paths = dict(named_modules(model))
    ids_table = input_embeddings(model)
    pairs: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for short, style in plan.items():
        pattern = prefix + short
        # The embedding of token ids is sharded by vocabulary below, experts by expert parallelism.
        if short.endswith("embed_tokens") or "experts" in short or paths.get(pattern, model) is ids_table:
            continue
        if Layout(((pattern, "replicate"),)).unused(paths):
            continue
        if style not in _HF_STYLES:
            return None
        pairs[pattern] = _HF_STYLES[style]
        reasons[pattern] = f"{style} in the model's base_model_tp_plan"
    if not pairs or says_too_little(Layout(tuple(pairs.items())), paths):
        return None
    return FoundLayout(_with_vocab(model, pairs, reasons), "the model's own base_model_tp_plan", reasons)


def _with_vocab(model: nn.Module, pairs: dict[str, str], reasons: dict[str, str]) -> Layout:
    names = {id(module): path for path, module in named_modules(model)}
    head = find_lm_head(model)
    embed = input_embeddings(model)
    ordered: dict[str, str] = {}
    if embed is not None and id(embed) in names:
        ordered[names[id(embed)]] = "vocab"
        reasons[names[id(embed)]] = "the model's input embeddings"
    ordered |= pairs
    if isinstance(head, nn.Linear) and id(head) in names:
        ordered[names[id(head)]] = "vocab"
        reasons[names[id(head)]] = "the model's output embeddings"
    try:
        return Layout(tuple(ordered.items()))
    except LayoutError:
        return Layout(tuple(pairs.items()))
