"""Tensor parallelism: sharding of a model's large weights, as the layout specifies.

A column-sharded layer computes part of its output features. A row-sharded layer reads part of its input features, and
its output is summed over the ranks. Modules between such a pair work on their own heads or features and need no
collective. Embedding and head are sharded by rows of the vocabulary, padded if tp does not divide it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from weft.comm.autograd import prepare_operators
from weft.comm.collectives import broadcast
from weft.comm.mesh import Axis, Mesh
from weft.config.fields.layout import Layout, Style
from weft.config.plan import Plan
from weft.errors import LayoutError, PlanError, WeftWarning
from weft.models.inspect import hugging_face, layers, token_flow
from weft.models.inspect.find_layout import find_layout
from weft.models.inspect.state_layout import with_states
from weft.parallel.layers.float8 import refuse_partial
from weft.parallel.random.streams import keep_part
from weft.parallel.state.placement import Placement
from weft.parallel.tensor.head import LossChunking
from weft.parallel.tensor.language_head import fuse_head
from weft.parallel.tensor.linear import prepare_chunk_operators
from weft.parallel.tensor.read_layout import (
    check_sizes,
    entry_width,
    find_heads,
    gathers_per_layer,
    is_wide,
    nowhere,
    read_own,
    read_styles,
)
from weft.parallel.tensor.sequence import blocks_outside, plan_sequence
from weft.parallel.tensor.styles import (
    AttentionParallel,
    ParameterParallel,
    SequenceParallel,
    TensorContext,
    layer_styles,
    partial_parameters,
)
from weft.parallel.tensor.trial_step import (
    TrialError,
    divided_modules,
    general_path,
    is_tried,
    is_vetted,
    try_numbers,
    without_layers,
)


def shard_tensors(
    model: nn.Module,
    mesh: Mesh,
    layout: Layout | None = None,
    taken: Collection[str] = (),
    runs: Sequence[Sequence[str]] | None = None,
    is_whole: Callable[[str], bool] = nowhere,
    regions: token_flow.TokenRegions | None = None,
) -> dict[str, Placement]:
    """Apply the layout to the model: shard its parameters, and under sp the tokens between sharded layers.

    All tp ranks call it together. All parameters and buffers, except those in `taken`, first get the values of the
    first tp rank. Returns the placements of sharded parameters, and of replicated ones whose gradients are partial
    sums. Raises LayoutError if the layout does not fit the model. Raises PlanError if the plan's tp does not fit it.

    Args:
        layout: layout of the model, or None to derive it from the model.
        taken: names of parameters that another technique has sharded.
        runs: block paths of each local pipeline stage, or None if all blocks are local.
        is_whole: returns True for the path of a module that another technique keeps replicated.
        regions: regions in which sp shards tokens, from `check_full_model`, or None to derive them.
    """
    layout = _found_layout(model, mesh) if layout is None else layout
    if mesh.plan.sp and regions is None and runs is None:
        regions = _token_regions(model, layout, is_whole, mesh.plan)
    plan, axis = mesh.plan, mesh["tp"]
    modules = {path: module for path, module in model.named_modules() if not is_whole(path)}
    styles, own = read_styles(layout, modules, plan.tp), read_own(layout, modules)
    sequence = plan_sequence(model, layout, styles, runs, is_whole, regions) if plan.sp else None
    if plan.compile:
        prepare_operators(axis)
        if plan.tp_chunks > 1:
            prepare_chunk_operators(axis)
    heads = find_heads(modules, styles)
    check_sizes(modules, styles, heads, axis.size)
    _finalize(model, axis, taken)
    _check_covered(modules, styles, own, heads)
    context = TensorContext(model, mesh, modules, styles, heads, sequence)
    attention = AttentionParallel(context)  # reads the original layers
    for path, style in layer_styles(context).items():
        style.apply(path, modules[path])
    parameter = ParameterParallel(context)
    for path, style in own.items():
        if style.name == "colwise":
            parameter.apply(path, modules[path.rpartition(".")[0]])
    context.shards.replace_ties(model)
    for path in heads:
        attention.apply(path, modules[path])
    # Unsharded layers whose outputs are inputs of sharded layers.
    full = [path for path, style in styles.items() if style.name == "partial" and layers.is_linear(modules[path])]
    for path in full:
        refuse_partial(path, modules[path])
    context.part.whole_paths = tuple(full)
    SequenceParallel(context).apply("", model)
    keep_part(model, context.part)
    return partial_parameters(context, own, taken) | context.shards.placements(model)


def fuse_replicated_head(model: nn.Module, mesh: Mesh | None = None) -> None:
    """Make an unsharded language head compute the loss itself when it has labels and its logits would be large.

    Does nothing if the model has no linear language head.

    mesh: gives the device and whether the model is compiled; None for an uncompiled model on a CPU.
    """
    head = layers.find_lm_head(model)
    if head is not None and layers.is_linear(head):
        way = LossChunking.agreed(mesh["tp"], mesh.device, mesh.plan.compile) if mesh is not None else None
        fuse_head(head, hugging_face.scales_logits(model), way)


def check_full_model(
    model: nn.Module, mesh: Mesh, layout: Layout | None, is_whole: Callable[[str], bool] = nowhere, example: Any = None
) -> tuple[Layout, token_flow.TokenRegions | None]:
    """Check conditions that need the full model, before a pipeline removes parts of it.

    Returns the layout, and the regions in which sp shards tokens, or None without sp. Small custom models also run a
    trial step, on all tp ranks. If it fails with a derived layout, the layers of one module, and of modules whose paths
    differ only in numbers, are left unsharded, and rank 0 warns. Rank 0 also warns if sp shards fewer tokens than it
    could in other models.

    Raises LayoutError if the layout names a missing module, if sp would shard tokens that interact, or if no trial
    succeeds. Raises PlanError if the plan's tp does not fit the model.

    Args:
        layout: layout of the model, or None to derive it from the model.
        is_whole: returns True for the path of a module that another technique keeps replicated.
        example: arguments of a forward, or None to generate them.
    """
    modules = {path: module for path, module in model.named_modules() if not is_whole(path)}
    if layout is not None:
        return layout, _warned(_checked(model, mesh, layout, is_whole, example), mesh)
    layout = _found_layout(model, mesh, example)
    layout = layout.fitted((*modules, *layers.own_parameters(modules)))
    try:
        return layout, _warned(_checked(model, mesh, layout, is_whole, example), mesh)
    except TrialError as error:
        first = error
    for path in dict.fromkeys((first.path, *divided_modules(layout, model))):
        less = without_layers(layout, model, path)
        if less is None:
            continue
        try:
            found = _checked(model, mesh, less, is_whole, example)
        except (LayoutError, PlanError):
            continue
        if mesh.rank == 0:
            said = str(first).rstrip(".")
            warnings.warn(f"{path} stays undivided on every rank of tp, since {said}.", WeftWarning, stacklevel=3)
        return less, _warned(found, mesh)
    raise first


def _found_layout(model: nn.Module, mesh: Mesh, example: Any = None) -> Layout:
    """Find the layout. Layers with a recurrent state are sharded by heads, except under sp.

    These layers run packed documents as separate rows, whose lengths sp cannot shard.
    """
    found = find_layout(model, example)
    return found if mesh.plan.sp else with_states(found, model, mesh.plan.tp)


def _warned(regions: token_flow.TokenRegions | None, mesh: Mesh) -> token_flow.TokenRegions | None:
    """Warn, on rank 0, if sp gathers tokens after each block, or if ranks compute all or some modules for all tokens.

    Return `regions` unchanged.
    """
    if regions is not None and mesh.rank == 0:
        if regions.why_apart:
            said = f"sp=on: tokens are gathered after each block, which takes time: {regions.why_apart}"
            warnings.warn(said, WeftWarning, stacklevel=3)
        if regions.why_none:
            said = (
                "sp=on: every rank has all tokens, and only the inputs that sharded layers save for backward are "
                f"sharded, which saves less memory: {regions.why_none}"
            )
            warnings.warn(said, WeftWarning, stacklevel=3)
        if regions.full:
            names = ", ".join(dict.fromkeys(general_path(path) for path in regions.full))
            said = f"sp=on: every rank computes {names} for all tokens, which takes memory: {regions.why_full}"
            warnings.warn(said, WeftWarning, stacklevel=3)
    return regions


def _checked(
    model: nn.Module, mesh: Mesh, layout: Layout, is_whole: Callable[[str], bool], example: Any
) -> token_flow.TokenRegions | None:
    plan = mesh.plan
    modules = {path: module for path, module in model.named_modules() if not is_whole(path)}
    read_styles(layout, modules, plan.tp)
    regions = _token_regions(model, layout, is_whole, plan, example) if plan.sp else None
    if plan.ep > 1 or is_whole is not nowhere or not is_tried(model):
        return regions
    where = f"tp={plan.tp} sp=on" if plan.sp else f"tp={plan.tp}"

    def divide(divided: nn.Module) -> dict[str, Placement]:
        return shard_tensors(divided, mesh, layout, regions=regions)

    try:
        try_numbers(model, mesh["tp"], mesh.device, divide, example, where)
    except (TrialError, PlanError) as error:
        if regions is None or regions.why_none:
            raise
        regions = _without_regions(error, model, layout, is_whole, plan)
        try_numbers(model, mesh["tp"], mesh.device, divide, example, where)
    return regions


def _token_regions(
    model: nn.Module, layout: Layout, is_whole: Callable[[str], bool], plan: Plan, example: Any = None
) -> token_flow.TokenRegions:
    try:
        return find_token_regions(model, layout, is_whole, plan.tp, example)
    except LayoutError as error:
        return _without_regions(error, model, layout, is_whole, plan)


def _without_regions(
    error: LayoutError | PlanError, model: nn.Module, layout: Layout, is_whole: Callable[[str], bool], plan: Plan
) -> token_flow.TokenRegions:
    """Return empty regions for a custom model whose tokens cannot be sharded.

    Only the inputs that its column-sharded layers save for backward are then sharded. Raises `error` for models of Weft
    or transformers, for models with experts, if tp_chunks > 1, and if another technique keeps modules replicated.
    """
    has_experts = next(layers.find_experts(model, layout), None) is not None
    if is_vetted(model) or is_whole is not nowhere or has_experts or plan.tp_chunks > 1:
        raise error
    return token_flow.TokenRegions((), (), why_none=str(error).partition(": ")[2].removesuffix(" Use sp=off."))


def find_token_regions(
    model: nn.Module, layout: Layout, is_whole: Callable[[str], bool], tp: int, example: Any = None
) -> token_flow.TokenRegions:
    """Return the regions in which sp shards tokens. Raises LayoutError if sp would shard tokens that interact.

    is_whole: returns True for the path of a module that another technique keeps replicated. example: arguments of a
    forward, or None to generate them.
    """
    modules = {path: module for path, module in model.named_modules() if not is_whole(path)}
    styles = read_styles(layout, modules, tp)
    sequence = plan_sequence(model, layout, styles, is_whole=is_whole)
    entries: dict[str, int] = {}
    for path in (path for path, style in styles.items() if style.name == "colwise"):
        parent = layers.parent_of(path)
        if not gathers_per_layer(parent, modules, styles) and layers.is_linear(modules[path]):
            entries.setdefault(parent, entry_width(path, modules, styles))
    chains: dict[str, list[str]] = {}
    for path in blocks_outside(model, is_whole, styles):
        chains.setdefault(layers.parent_of(path), []).append(path)
    division = token_flow.TokenDivision(
        styles, sequence.whole, sequence.width, reading=sequence.reading, entries=entries
    )
    return token_flow.find_regions(model, list(chains.values()), division, example)


def _check_covered(
    modules: Mapping[str, nn.Module], styles: Mapping[str, Style], own: Mapping[str, Style], parents: Iterable[str]
) -> None:
    """Raise LayoutError if a module of `parents` contains parameters that no pattern of the layout covers.

    Modules whose column-sharded layers each gather their own input are not checked.
    """
    missing: list[str] = []
    for parent in parents:
        if is_wide(parent, modules, styles):
            continue
        for name, module in modules[parent].named_modules():
            path = f"{parent}.{name}" if name else parent
            direct = [each for each, _ in module.named_parameters(recurse=False) if f"{path}.{each}" not in own]
            if path not in styles and direct:
                missing.append(path)
    if missing:
        has = "has" if len(missing) == 1 else "have"
        raise LayoutError(
            f"layout: {', '.join(missing)} {has} parameters between sharded layers, and no pattern of the layout "
            f"covers them. Add {' '.join(f'{path}=replicate' for path in missing)}, with partial instead of "
            "replicate for each that works on this rank's heads or features."
        )


def _finalize(model: nn.Module, axis: Axis, taken: Collection[str]) -> None:
    """Broadcast the first rank's parameters and buffers, because initial values may differ between ranks.

    Names in `taken` and tensors on the meta device are skipped.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or name in taken:
            continue
        settled = broadcast(tensor.detach().contiguous(), axis)
        if settled.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(settled)
