"""Tensor parallelism: shard the large matrices in place, as the layout specifies.

A column-sharded layer computes part of its output features. A row-sharded layer reads part of its input features, and
its output is summed over the ranks. Modules between such a pair work on their own heads or features and need no
collective. Embedding and head are sharded by rows of the vocabulary, padded if tp does not divide it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.comm.autograd import prepare_operators
from weft.comm.collectives import broadcast
from weft.comm.mesh import Axis, Mesh
from weft.config.layout import Layout, Style
from weft.errors import LayoutError, PlanError, Problem, WeftWarning
from weft.models.adapters import AdaptedLinear
from weft.models.inspect import hugging_face, layers, token_flow
from weft.models.inspect.blocks import replace_class
from weft.models.inspect.find_layout import find_layout
from weft.models.inspect.layers import Heads, WrittenHeads
from weft.models.inspect.rms_norm import rms_form
from weft.parallel.layers.float8 import refuse_partial
from weft.parallel.random.streams import ShardPosition, keep_part
from weft.parallel.state.placement import Placement
from weft.parallel.tensor.head import LossChunking
from weft.parallel.tensor.language_head import fuse_head, make_head
from weft.parallel.tensor.linear import SharedLayer, prepare_chunk_operators
from weft.parallel.tensor.read_layout import (
    check_sizes,
    entry_width,
    find_heads,
    gathers_apart,
    is_ahead,
    is_inside,
    is_norm,
    is_wide,
    nowhere,
    read_own,
    read_styles,
)
from weft.parallel.tensor.sequence import TokenSharding, blocks_outside, plan_sequence, second_states, shard_tokens
from weft.parallel.tensor.sharded_modules import (
    ColumnLinear,
    Enter,
    Entry,
    LocalHeads,
    RowLinear,
    ShardedNorm,
    VocabEmbedding,
    localise,
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
    """Divide the model's parameters in place as the layout specifies, and with sp the tokens between sharded layers.

    Returns the placements of the changed parameters.

    Args:
        model: full model, or a pipeline stage.
        mesh: mesh of the plan.
        layout: layout of the model; None derives it from the model.
        taken: parameters that another technique has sharded.
        runs: block paths of each local pipeline stage, or None if all blocks are local.
        is_whole: returns True for the path of a module that another technique keeps replicated.
        regions: regions in which sp divides tokens, from `check_full_model`; None derives them here.

    Raises:
        LayoutError: if the layout does not fit the model.
        PlanError: if tp does not divide the model.
    """
    layout = find_layout(model) if layout is None else layout
    if mesh.plan.sp and regions is None and runs is None:
        regions = find_token_regions(model, layout, is_whole, mesh.plan.tp)
    return _Cutter(model, mesh, layout, taken, runs, is_whole, regions).cut()


def fuse_replicated_head(model: nn.Module, mesh: Mesh | None = None) -> None:
    """Make a head with an unsharded vocabulary compute the loss directly if its logits would be large.

    mesh: gives the device and whether the model is compiled. None means an uncompiled model on a CPU.
    """
    head = layers.find_lm_head(model)
    if head is not None and layers.is_linear(head):
        way = LossChunking.agreed(mesh["tp"], mesh.device, mesh.plan.compile) if mesh is not None else None
        fuse_head(head, hugging_face.scales_logits(model), way)


def check_full_model(
    model: nn.Module, mesh: Mesh, layout: Layout | None, is_whole: Callable[[str], bool] = nowhere, example: Any = None
) -> tuple[Layout, token_flow.TokenRegions | None]:
    """Check conditions that need the full model, before a pipeline removes parts of it.

    Returns the layout, and the regions in which tokens are divided if the plan has sp. A trial step runs on small user
    models. If the trial fails with a derived layout, one module is left unsharded, and a warning names it.

    Args:
        model: full model.
        mesh: mesh of the plan.
        layout: layout of the model; None derives it from the model.
        is_whole: returns True for the path of a module that another technique keeps replicated.
        example: arguments of a forward, or None to generate them.

    Raises:
        LayoutError: if the layout names a missing module, sp would divide tokens that interact, or a trial fails.
    """
    modules = {path: module for path, module in model.named_modules() if not is_whole(path)}
    if layout is not None:
        return layout, _warned(_checked(model, mesh, layout, is_whole, example), mesh)
    layout = find_layout(model, example).fitted((*modules, *layers.own_parameters(modules)))
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


def _warned(regions: token_flow.TokenRegions | None, mesh: Mesh) -> token_flow.TokenRegions | None:
    """Return `regions`, after a warning if tokens are gathered more often than for sharded layers."""
    if regions is not None and mesh.rank == 0:
        if regions.why_apart:
            said = f"sp=on: tokens are gathered after each block, which takes time: {regions.why_apart}"
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
    regions = find_token_regions(model, layout, is_whole, plan.tp, example) if plan.sp else None
    if plan.ep == 1 and is_whole is nowhere and is_tried(model):
        where = f"tp={plan.tp} sp=on" if plan.sp else f"tp={plan.tp}"

        def divide(divided: nn.Module) -> dict[str, Placement]:
            return shard_tensors(divided, mesh, layout, regions=regions)

        try_numbers(model, mesh["tp"], mesh.device, divide, example, where)
    return regions


def find_token_regions(
    model: nn.Module, layout: Layout, is_whole: Callable[[str], bool], tp: int, example: Any = None
) -> token_flow.TokenRegions:
    """Return the regions in which sp divides tokens.

    Args:
        model: full model.
        layout: layout of the model.
        is_whole: returns True for the path of a module that another technique keeps replicated.
        tp: number of tp ranks.
        example: arguments of a forward, or None to generate them.

    Raises:
        LayoutError: if sp would divide tokens that interact.
    """
    modules = {path: module for path, module in model.named_modules() if not is_whole(path)}
    styles = read_styles(layout, modules, tp)
    sequence = plan_sequence(model, layout, styles, is_whole=is_whole)
    entries: dict[str, int] = {}
    for path in (path for path, style in styles.items() if style.name == "colwise"):
        parent = layers.parent_of(path)
        if not gathers_apart(parent, modules, styles) and layers.is_linear(modules[path]):
            entries.setdefault(parent, entry_width(path, modules, styles))
    chains: dict[str, list[str]] = {}
    for path in blocks_outside(model, is_whole):
        chains.setdefault(layers.parent_of(path), []).append(path)
    division = token_flow.TokenDivision(
        styles, sequence.whole, sequence.width, reading=sequence.reading, entries=entries
    )
    return token_flow.find_regions(model, list(chains.values()), division, example)


class _Cutter:
    """One call of `shard_tensors`."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        layout: Layout,
        taken: Collection[str],
        runs: Sequence[Sequence[str]] | None,
        is_whole: Callable[[str], bool],
        regions: token_flow.TokenRegions | None,
    ):
        self.model, self.axis, self.layout = model, mesh["tp"], layout
        self.taken, self.device = taken, mesh.device
        self.modules = {path: module for path, module in model.named_modules() if not is_whole(path)}
        self.names = {id(module): path for path, module in self.modules.items()}
        self.styles = read_styles(layout, self.modules, mesh.plan.tp)
        self.rows = [path for path, style in self.styles.items() if style.name == "rowwise"]
        self.own = read_own(layout, self.modules)
        parents = {layers.parent_of(path) for path, style in self.styles.items() if style.name == "colwise"}
        # Found on the original layers: sharding replaces their classes.
        self.alone = {path for path in parents if gathers_apart(path, self.modules, self.styles)}
        together = () if is_vetted(model) else parents - self.alone
        self.written = {path: WrittenHeads.of(self.modules[path]) for path in together}
        self.sequence: TokenSharding | None = None
        if mesh.plan.sp:
            self.sequence = plan_sequence(model, layout, self.styles, runs, is_whole, regions)
        self.line = SharedLayer(self.axis, cuts_tokens=mesh.plan.sp, pieces=mesh.plan.tp_chunks)
        self.line_outside = SharedLayer(self.axis)
        ends_cut = self.sequence is not None and self.sequence.with_ends
        self.ends = SharedLayer(self.axis, cuts_tokens=ends_cut)
        self.placed: dict[int, Placement] = {}
        self.locals: dict[int, nn.Parameter] = {}  # by id of the full parameter: a tied weight is sharded once
        self.wholes: list[nn.Parameter] = []  # kept alive, so that ids stay unique
        self.entries: dict[str, Entry] = {}
        self.part = ShardPosition(self.axis)
        self.is_compiled = mesh.plan.compile
        if self.is_compiled:
            prepare_operators(self.axis)
            if mesh.plan.tp_chunks > 1:
                prepare_chunk_operators(self.axis)

    def cut(self) -> dict[str, Placement]:
        heads = find_heads(self.modules, self.styles)
        check_sizes(self.modules, self.styles, heads, self.axis.size)
        _finalize(self.model, self.axis, self.taken)
        self._check_partial(heads)
        for path, style in self.styles.items():
            module = self.modules[path]
            if style.name == "colwise" and isinstance(module, nn.Embedding):
                self._replace(module, "weight", Placement(cut=("tp",)), dim=1)
                module.embedding_dim = module.weight.shape[1]
            elif style.name == "colwise" and is_norm(module):
                self._norm(path, module, heads.get(layers.parent_of(path), Heads()))
            elif style.name == "colwise":
                self._column(path, module, style, heads[layers.parent_of(path)])
            elif style.name == "vocab":
                self._vocab(path, module)
        for path, style in self.styles.items():
            if style.name == "rowwise":
                self._row(path, self.modules[path])
        for path, style in self.own.items():
            if style.name == "colwise":
                around, _, name = path.rpartition(".")
                self._replace(self.modules[around], name, Placement(cut=("tp",)), dim=0)
        self._apply_to_ties()
        self._localise(heads)
        self.part.whole_paths = tuple(self._ahead())
        if self.sequence is not None:
            shard_tokens(self.model, self.sequence, self.line, self.part)
            self.part.token_paths = self.sequence.modules
            self.part.full_paths = tuple(self.sequence.full)
            self.part.whole_paths += self.sequence.whole
        keep_part(self.model, self.part)
        return self._placements()

    def _localise(self, heads: dict[str, Heads]) -> None:
        """Set the numbers of heads of modules, and those that code of unknown models writes down, to this rank's."""
        for path, found in heads.items():
            localise(self.modules[path], found, self.axis.size)
            if (written := self.written.get(path)) is not None:
                replace_class(self.modules[path], LocalHeads, written=written, ranks=self.axis.size)

    def _ahead(self) -> list[str]:
        """Return the paths of unsharded layers whose outputs feed sharded layers."""
        found = [path for path, style in self.styles.items() if style.name == "partial" and self._is_linear(path)]
        for path in found:
            refuse_partial(path, self.modules[path])
        return found

    def _line(self, path: str) -> SharedLayer:
        """Return the sharding of a layer. Outside the blocks and in modules with all tokens, tokens are not divided."""
        if self.sequence is None:
            return self.line
        is_divided = is_inside(path, self.sequence.blocks) and not is_inside(path, self.sequence.full)
        return self.line if is_divided else self.line_outside

    def _is_linear(self, path: str) -> bool:
        return layers.is_linear(self.modules[path])

    def _check_partial(self, heads: dict[str, Heads]) -> None:
        """Raise LayoutError if modules inside a sharded part have parameters that no pattern covers."""
        missing: list[str] = []
        for parent in heads:
            if is_wide(parent, self.modules, self.styles):
                continue
            for name, module in self.modules[parent].named_modules():
                path = f"{parent}.{name}" if name else parent
                own = [each for each, _ in module.named_parameters(recurse=False) if f"{path}.{each}" not in self.own]
                if path not in self.styles and own:
                    missing.append(path)
        if missing:
            has = "has" if len(missing) == 1 else "have"
            raise LayoutError(
                f"layout: {', '.join(missing)} {has} parameters between sharded layers, and no pattern of the layout "
                f"covers them. Add {' '.join(f'{path}=replicate' for path in missing)}, with partial instead of "
                "replicate for each that works on this rank's heads or features."
            )

    def _entry(self, path: str, module: nn.Module) -> Entry:
        """Return the entry of the module around the layer, or of the layer itself."""
        parent = layers.parent_of(path)
        around = self.modules[parent]
        alone = parent in self.alone
        place = path if alone else parent
        if place not in self.entries:
            ahead = not alone and is_ahead(parent, self.modules, self.styles)
            width = layers.weight_of(module).shape[1] if alone else entry_width(path, self.modules, self.styles)
            entry = Entry(self._line(path), width, self.part, is_compiled=self.is_compiled, is_ahead=ahead)
            self.entries[place] = entry
            if not alone:
                ends = any(name.startswith(f"{parent}.") for name in self.rows)
                hooks = Enter(entry, ends, second_states(around) if self.sequence and self.sequence.reading else ())
                if entry.line.cuts_tokens or ahead:
                    around.register_forward_pre_hook(hooks.before, with_kwargs=True)
                around.register_forward_hook(hooks.after)
        return self.entries[place]

    def _column(self, path: str, module: nn.Module, style: Style, heads: Heads) -> None:
        self._check_chunked(path, module)
        entry = self._entry(path, module)
        weight = layers.weight_of(module)
        placement = self._rows(style, heads, weight.shape[0])
        if placement.partial:
            refuse_partial(path, module)
        self._replace(module, "weight", placement, dim=1 if layers.is_transposed(module) else 0)
        for name in ("bias", "lora_B", "lora_magnitude"):
            self._replace(module, name, placement, dim=0)
        if entry.line.cuts_tokens or entry.is_ahead:
            self._partial(module, "lora_A")
        _set_sizes(module)
        self._float8(module, outer=self.axis)
        enters = entry.line.cuts_tokens and self.entries.get(path) is entry
        replace_class(module, ColumnLinear, entry=entry, enters=enters, place=len(entry.members))
        entry.members.append(module)

    def _rows(self, style: Style, heads: Heads, total: int) -> Placement:
        """Return the placement of a column-sharded dim of `total` output features."""
        parts, pieces = style.sizes(total), heads.pieces(style, total)
        if not parts and pieces[0][2] and (count := pieces[0][0] // pieces[0][1]) % self.axis.size:
            unit = pieces[0][1]
            first = self.axis.rank * count // self.axis.size * unit
            rows = tuple(range(first, first + unit))
            return Placement(cut=("tp",), index=rows, partial=("tp",), whole_shape=(0,))  # set in `_replace`
        return Placement(cut=("tp",), parts=parts)

    def _norm(self, path: str, module: nn.Module, heads: Heads) -> None:
        form, [weight] = rms_form(module), module.parameters()
        assert form is not None  # checked in read_styles
        self._replace(module, "weight", self._rows(self.styles[path], heads, len(weight)), dim=0)
        replace_class(module, ShardedNorm, form=form, axis=self.axis)

    def _row(self, path: str, module: nn.Module) -> None:
        self._check_chunked(path, module)
        width = layers.weight_of(module).shape[1]
        if layers.is_packed(module) and width % (64 * self.axis.size):
            raise LayoutError(
                f"layout: {path} keeps its {width} inputs in blocks of 64, which tp={self.axis.size} cannot divide "
                "at block boundaries. Use adapter.base=stored, or a smaller tp."
            )
        self._replace(module, "weight", Placement(cut=("tp",)), dim=0 if layers.is_transposed(module) else 1)
        self._replace(module, "lora_A", Placement(cut=("tp",)), dim=1)
        self._partial(module, "lora_B", "lora_magnitude")
        _set_sizes(module)
        self._float8(module, inner=self.axis)
        replace_class(module, RowLinear, line=self._line(path), part=self.part, is_compiled=self.is_compiled)

    def _check_chunked(self, path: str, module: nn.Module) -> None:
        """Raise PlanError if the layer should multiply in chunks but is more than a plain matrix product."""
        if self.line.pieces > 1 and (isinstance(module, AdaptedLinear) or layers.is_packed(module)):
            has = "has an adapter" if isinstance(module, AdaptedLinear) else "keeps its weight as bytes"
            rule = f"layer {path} {has}, and only a plain product is computed in chunks"
            raise PlanError([Problem("tp_chunks", f"tp_chunks={self.line.pieces}: {rule}. Use tp_chunks=1.")])

    def _float8(self, module: nn.Module, **shared: Axis) -> None:
        """Set the axis over which a float8 layer shares its scales."""
        form: Any = getattr(module, "_weft_float8", None)
        if form is not None:
            module._weft_float8 = replace(form, **shared)  # pyright: ignore[reportArgumentType] - torch infers modules and tensors

    def _vocab(self, path: str, module: nn.Module) -> None:
        vocab = layers.weight_of(module).shape[0]
        pad = -vocab % self.axis.size
        dim = 1 if layers.is_transposed(module) else 0
        self._replace(module, "weight", Placement(cut=("tp",), pad=pad), dim)
        self._replace(module, "bias", Placement(cut=("tp",), pad=pad), 0)
        if isinstance(module, nn.Embedding):
            rows = module.weight.shape[0]
            if module.padding_idx is not None:
                local = module.padding_idx - self.axis.rank * rows
                inside = local if 0 <= local < rows else None
                module.padding_idx = inside  # pyright: ignore[reportAttributeAccessIssue] - torch infers an int alone
            module.num_embeddings = rows
            replace_class(module, VocabEmbedding, line=self.ends)
            return
        _set_sizes(module)
        entry = Entry(self.ends, layers.weight_of(module).shape[1], None)
        entry.members.append(module)
        way = LossChunking.agreed(self.axis, self.device, self.is_compiled)
        make_head(module, self.ends, vocab, entry, hugging_face.scales_logits(self.model), way)

    def _replace(self, module: nn.Module, name: str, placement: Placement, dim: int) -> None:
        """Replace a parameter by this rank's shard of it."""
        whole = getattr(module, name, None)
        if whole is None:
            return
        if name not in dict(module.named_parameters(recurse=False, remove_duplicate=False)):
            raise LayoutError(
                f"layout: {self.names[id(module)]}.{name} is computed from other parameters (a weight norm?), and it "
                f"cannot be sharded. Set {self.names[id(module)]}=replicate in a layout, or use tp=1."
            )
        if id(whole) not in self.locals:
            shape = tuple(whole.shape) if placement.index is not None else ()
            placement = Placement(
                cut=placement.cut, dim=dim, parts=placement.parts, index=placement.index,
                whole_shape=shape, partial=placement.partial, pad=placement.pad,
            )  # fmt: skip
            part = placement.local(whole.detach(), self.axis.rank, self.axis.size)
            local = nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)
            self.locals[id(whole)] = self.locals[id(local)] = local
            self.placed[id(local)] = placement
            self.wholes.append(whole)
        setattr(module, name, self.locals[id(whole)])

    def _partial(self, module: nn.Module, *names: str) -> None:
        """Mark parameters that are replicated but whose gradients are partial sums."""
        for name in names:
            if (param := getattr(module, name, None)) is not None:
                self.placed[id(param)] = Placement(partial=("tp",))

    def _apply_to_ties(self) -> None:
        """Replace a tied weight or bias in every module that registers it."""
        for module in self.model.modules():
            for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(param) in self.locals:
                    setattr(module, name, self.locals[id(param)])

    def _placements(self) -> dict[str, Placement]:
        named = dict(self.model.named_parameters())
        placements = {name: self.placed[id(param)] for name, param in named.items() if id(param) in self.placed}
        partial = [path for path, style in self.styles.items() if style.name == "partial"]
        alone = {path for path, style in self.own.items() if style.name == "partial"}
        divided, full = (self.sequence.modules, self.sequence.full) if self.sequence is not None else ((), ())
        for name in named:
            if name in placements or name in self.taken:
                continue
            if name in alone or is_inside(name, partial) or (is_inside(name, divided) and not is_inside(name, full)):
                placements[name] = Placement(partial=("tp",))
        return placements


def _set_sizes(module: nn.Module) -> None:
    """Set the size attributes of a layer to its sharded shape."""
    names = ("nf", "nx") if layers.is_transposed(module) else ("out_features", "in_features")
    for name, size in zip(names, layers.weight_of(module).shape, strict=True):
        setattr(module, name, size)


def _finalize(model: nn.Module, axis: Axis, taken: Collection[str]) -> None:
    """Broadcast the first rank's weights, since ranks may have initialized them differently.

    taken: parameters that are already sharded across ranks.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or name in taken:
            continue
        settled = broadcast(tensor.detach().contiguous(), axis)
        if settled.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(settled)
