"""Find the layout of a model: the project's own families, Hugging Face's own plans, else by tracing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from weft.errors import LayoutError
from weft.private_torch import named_modules
from weft.spec import Layout
from weft.structure.blocks import repeated_blocks
from weft.structure.layers import KnownModel, find_lm_head, input_embeddings
from weft.structure.layouts.covered import says_too_little
from weft.structure.layouts.layout_trace import FoundLayout, trace_layout
from weft.structure.token_flow import mixing

#: How the styles of a `base_model_tp_plan` of transformers are called here.
_HF_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicated_with_grad_allreduce": "partial",
}


def find_layout(model: nn.Module, example: Any = None) -> Layout:
    """Return the layout of any model. example: arguments of a forward, or None for invented ones.

    Raises:
        LayoutError: if nothing is found that can be cut.
    """
    return model.tensor_layout() if isinstance(model, KnownModel) else explain_layout(model, example).layout


def explain_layout(model: nn.Module, example: Any = None) -> FoundLayout:
    """Return the layout with its reasons.

    example: arguments of a forward, for a model that takes neither ids nor images.
    """
    if isinstance(model, KnownModel):
        reasons: Mapping[str, str] = {} if model.has_routers else trace_layout(model).reasons
        return FoundLayout(model.tensor_layout(), f"the project's own layout of {model.family}", reasons)
    found = _from_tp_plan(model)
    if found is None:
        found = trace_layout(model, example)
    elif _whole_attention(model, found.layout):
        found = _with_attention(model, example, found)
    whole = _whole_attention(model, found.layout)
    if any("norm" in type(child).__name__.lower() for module in whole for child in module.children()):
        found = _with_attention(model, example, found, across_norms=True)
    return found


def _whole_attention(model: nn.Module, layout: Layout) -> list[nn.Module]:
    """Attention of blocks that a layout leaves whole on every rank, as plans published for latent attention do."""
    cut = [path for path, _ in named_modules(model) if layout.match(path) in ("colwise", "rowwise")]
    return [
        module
        for path, block in repeated_blocks(model).items()
        for name, module in named_modules(block)
        if name and mixing(module) == "attention" and not any(each.startswith(f"{path}.{name}.") for each in cut)
    ]


def _with_attention(model: nn.Module, example: Any, found: FoundLayout, across_norms: bool = False) -> FoundLayout:
    """What tracing finds where that cuts all that `found` does, and more; else `found`."""
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
    """The layout that a Hugging Face model brings along; None without one, or with styles that say too little."""
    plan: dict[str, str] = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""
    paths = dict(named_modules(model))
    ids_table = input_embeddings(model)
    pairs: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for short, style in plan.items():
        pattern = prefix + short
        # The table of ids is cut by vocabulary below, experts by expert parallelism.
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
    """Add the embedding of the ids and the head."""
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
