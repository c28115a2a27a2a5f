"""Styles of tensor parallelism: one class per kind of layer, whose `apply` shards a module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from weft.comm.mesh import Axis, Mesh
from weft.config.fields.layout import Style
from weft.errors import LayoutError, PlanError, Problem
from weft.models.adapters import AdaptedLinear
from weft.models.inspect import hugging_face, layers
from weft.models.inspect.blocks import replace_class
from weft.models.inspect.layers import Heads, WrittenHeads
from weft.models.inspect.rms_norm import rms_form
from weft.models.token_rows import TOKEN_ROWS, TrainedRows
from weft.parallel.layers.float8 import refuse_partial
from weft.parallel.random.streams import ShardPosition
from weft.parallel.state.placement import Placement
from weft.parallel.tensor.head import LossChunking
from weft.parallel.tensor.language_head import make_head
from weft.parallel.tensor.linear import SharedLayer
from weft.parallel.tensor.read_layout import (
    entry_width,
    gathers_per_layer,
    has_channels,
    is_ahead,
    is_inside,
    is_norm,
)
from weft.parallel.tensor.sequence import TokenSharding, second_states, shard_tokens
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
from weft.parallel.tensor.trial_step import is_vetted


class ParameterShards:
    """Replaces parameters with this rank's shards, and records placements. A tied parameter is sharded only once."""

    def __init__(self, axis: Axis, modules: Mapping[str, nn.Module]):
        self._axis = axis
        self._paths = {id(module): path for path, module in modules.items()}
        self._placements: dict[int, Placement] = {}
        self._locals: dict[int, nn.Parameter] = {}  # by id of the full parameter
        self._originals: list[nn.Parameter] = []  # kept alive, so that ids stay unique

    def replace(self, module: nn.Module, name: str, placement: Placement, dim: int) -> None:
        """Replace a parameter, if the module has it, with this rank's shard along `dim`.

        Raises LayoutError if the module computes it from other parameters.
        """
        full = getattr(module, name, None)
        if full is None:
            return
        if name not in dict(module.named_parameters(recurse=False, remove_duplicate=False)):
            path = self._paths[id(module)]
            raise LayoutError(
                f"layout: {path}.{name} is computed from other parameters (a weight norm?), and it "
                f"cannot be sharded. Set {path}=replicate in a layout, or use tp=1."
            )
        if id(full) not in self._locals:
            shape = tuple(full.shape) if placement.index is not None else ()
            placement = replace(placement, dim=dim, whole_shape=shape)
            part = placement.local(full.detach(), self._axis.rank, self._axis.size)
            local = nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=full.requires_grad)
            self._locals[id(full)] = self._locals[id(local)] = local
            self._placements[id(local)] = placement
            self._originals.append(full)
        setattr(module, name, self._locals[id(full)])

    def mark_partial(self, module: nn.Module, *names: str) -> None:
        """Record that a module's parameters `names`, if it has them, are replicated with partial sums as gradients."""
        for name in names:
            if (param := getattr(module, name, None)) is not None:
                self._placements[id(param)] = Placement(partial=("tp",))

    def replace_ties(self, model: nn.Module) -> None:
        """Replace a parameter that was sharded in one module also in other modules that are tied to it."""
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(param) in self._locals:
                    setattr(module, name, self._locals[id(param)])

    def placements(self, model: nn.Module) -> dict[str, Placement]:
        """Return the placements of sharded and marked parameters, by name."""
        found = {name: self._placements.get(id(param)) for name, param in model.named_parameters()}
        return {name: placement for name, placement in found.items() if placement is not None}


@dataclass(slots=True)
class TensorContext:
    """Data that all styles read.

    Attributes:
        model: full model, or a pipeline stage.
        mesh: mesh of the plan.
        modules: the model's modules by path, without those that another technique keeps replicated.
        styles: styles of modules by path.
        heads: heads of attention modules by path.
        sequence: sharding of tokens under sp, or None.
        shards: replaces parameters, and records their placements.
        part: position of this rank in sharded layers.
        line: sharding of layers in blocks, whose tokens are sharded under sp.
        outside: sharding of layers outside blocks. Each rank has all tokens there.
        ends: sharding of embedding and head.
    """

    model: nn.Module
    mesh: Mesh
    modules: Mapping[str, nn.Module]
    styles: Mapping[str, Style]
    heads: Mapping[str, Heads]
    sequence: TokenSharding | None
    shards: ParameterShards = field(init=False)
    part: ShardPosition = field(init=False)
    line: SharedLayer = field(init=False)
    outside: SharedLayer = field(init=False)
    ends: SharedLayer = field(init=False)

    def __post_init__(self) -> None:
        plan, axis = self.mesh.plan, self.axis
        self.shards, self.part = ParameterShards(axis, self.modules), ShardPosition(axis)
        self.line = SharedLayer(axis, cuts_tokens=plan.sp, pieces=plan.tp_chunks)
        self.outside = SharedLayer(axis, saves_share=self.sequence is not None and not self.sequence.blocks)
        self.ends = SharedLayer(axis, cuts_tokens=self.sequence is not None and self.sequence.with_ends)

    @property
    def axis(self) -> Axis:
        return self.mesh["tp"]

    @property
    def is_compiled(self) -> bool:
        return self.mesh.plan.compile

    def line_of(self, path: str) -> SharedLayer:
        """Return the sharding of a layer. Outside the blocks and in modules with all tokens, tokens are not sharded."""
        if self.sequence is None:
            return self.line
        is_divided = is_inside(path, self.sequence.blocks) and not is_inside(path, self.sequence.full)
        return self.line if is_divided else self.outside

    def placement_of_rows(self, path: str, total: int) -> Placement:
        """Return the placement of a column-sharded dim of `total` output features.

        If there are fewer key-value heads than ranks, several ranks store the same head, and its gradients are partial
        sums.
        """
        style, heads = self.styles[path], self.heads.get(layers.parent_of(path), Heads())
        parts, pieces = style.sizes(total), heads.row_groups(style, total)
        if not parts and pieces[0][2] and (count := pieces[0][0] // pieces[0][1]) % self.axis.size:
            unit = pieces[0][1]
            first = self.axis.rank * count // self.axis.size * unit
            rows = tuple(range(first, first + unit))
            return Placement(cut=("tp",), index=rows, partial=("tp",), whole_shape=(0,))  # set in `replace`
        return Placement(cut=("tp",), parts=parts)

    def check_chunks(self, path: str, module: nn.Module) -> None:
        """Raise PlanError if tp_chunks > 1 and the layer has an adapter or a quantized weight."""
        if self.line.pieces > 1 and (isinstance(module, AdaptedLinear) or layers.is_packed(module)):
            has = "has an adapter" if isinstance(module, AdaptedLinear) else "keeps its weight as bytes"
            rule = f"layer {path} {has}, and only a plain product is computed in chunks"
            raise PlanError([Problem("tp_chunks", f"tp_chunks={self.line.pieces}: {rule}. Use tp_chunks=1.")])


class LayerStyle(Protocol):
    """Shards one kind of layer."""

    def apply(self, path: str, module: nn.Module) -> None:
        """Shard a module.

        Raises LayoutError if the module cannot be sharded. Raises PlanError if the plan does not fit the module.
        """
        ...


class ColumnParallel:
    """Linear layer that computes a part of its output features."""

    def __init__(self, context: TensorContext):
        self._context = context
        self._entries: dict[str, Entry] = {}
        self._rows = [path for path, style in context.styles.items() if style.name == "rowwise"]
        # Found on the original layers: sharding replaces their classes.
        self._separate = separate_parents(context.modules, context.styles)

    def apply(self, path: str, module: nn.Module) -> None:
        """Shard the output features of a linear layer."""
        context, shards = self._context, self._context.shards
        context.check_chunks(path, module)
        entry = self._entry(path, module)
        placement = context.placement_of_rows(path, layers.weight_of(module).shape[0])
        if placement.partial:
            refuse_partial(path, module)
        shards.replace(module, "weight", placement, dim=1 if layers.is_transposed(module) else 0)
        for name in ("bias", "lora_B", "lora_magnitude"):
            shards.replace(module, name, placement, dim=0)
        if entry.line.cuts_tokens or entry.is_ahead:
            shards.mark_partial(module, "lora_A")
        _set_sizes(module)
        _share_scales(module, outer=context.axis)
        enters = entry.line.cuts_tokens and self._entries.get(path) is entry
        replace_class(module, ColumnLinear, entry=entry, enters=enters, place=len(entry.members))
        entry.members.append(module)

    def _entry(self, path: str, module: nn.Module) -> Entry:
        context, parent = self._context, layers.parent_of(path)
        around = context.modules[parent]
        alone = parent in self._separate
        key = path if alone else parent
        if key in self._entries:
            return self._entries[key]
        ahead = not alone and is_ahead(parent, context.modules, context.styles)
        width = layers.weight_of(module).shape[1] if alone else entry_width(path, context.modules, context.styles)
        entry = Entry(context.line_of(path), width, context.part, is_compiled=context.is_compiled, is_ahead=ahead)
        self._entries[key] = entry
        if not alone:
            ends = any(name.startswith(f"{parent}.") for name in self._rows)
            reads = context.sequence is not None and bool(context.sequence.reading)
            hooks = Enter(entry, ends, second_states(around) if reads else ())
            if entry.line.cuts_tokens or ahead:
                around.register_forward_pre_hook(hooks.before, with_kwargs=True)
            around.register_forward_hook(hooks.after)
        return entry


class RowParallel:
    """Linear layer that reads a part of its input features and sums its output over tp."""

    def __init__(self, context: TensorContext):
        self._context = context

    def apply(self, path: str, module: nn.Module) -> None:
        """Shard the input features of a linear layer."""
        context, size = self._context, self._context.axis.size
        context.check_chunks(path, module)
        width = layers.weight_of(module).shape[1]
        if layers.is_packed(module) and width % (64 * size):
            raise LayoutError(
                f"layout: {path} keeps its {width} inputs in blocks of 64, which tp={size} cannot divide "
                "at block boundaries. Use adapter.base=stored, or a smaller tp."
            )
        placement, shards = Placement(cut=("tp",)), context.shards
        shards.replace(module, "weight", placement, dim=0 if layers.is_transposed(module) else 1)
        shards.replace(module, "lora_A", placement, dim=1)
        shards.mark_partial(module, "lora_B", "lora_magnitude")
        _set_sizes(module)
        _share_scales(module, inner=context.axis)
        settings = {"line": context.line_of(path), "part": context.part, "is_compiled": context.is_compiled}
        replace_class(module, RowLinear, **settings)


class EmbeddingParallel:
    """Embedding that stores a part of its features."""

    def __init__(self, context: TensorContext):
        self._context = context

    def apply(self, path: str, module: nn.Module) -> None:
        del path
        assert isinstance(module, nn.Embedding)
        for name in ("weight", TOKEN_ROWS):
            self._context.shards.replace(module, name, Placement(cut=("tp",)), dim=1)
        module.embedding_dim = module.weight.shape[1]


class NormParallel:
    """Norm over features that are sharded over tp."""

    def __init__(self, context: TensorContext):
        self._context = context

    def apply(self, path: str, module: nn.Module) -> None:
        form, [weight] = rms_form(module), module.parameters()
        assert form is not None  # checked in read_styles
        placement = self._context.placement_of_rows(path, len(weight))
        self._context.shards.replace(module, "weight", placement, dim=0)
        replace_class(module, ShardedNorm, form=form, axis=self._context.axis)


class ChannelParallel:
    """Depthwise convolution, or norm over groups of channels, that works on this rank's channels."""

    def __init__(self, context: TensorContext):
        self._context = context

    def apply(self, path: str, module: nn.Module) -> None:
        context, channels = self._context, layers.weight_of(module).shape[0]
        for name in ("weight", "bias"):
            context.shards.replace(module, name, context.placement_of_rows(path, channels), dim=0)
        if isinstance(module, nn.Conv1d):
            module.in_channels = module.out_channels = module.groups = module.weight.shape[0]


class VocabParallel:
    """Embedding or language head that stores a part of the vocabulary, padded if tp does not divide it."""

    def __init__(self, context: TensorContext):
        self._context = context

    def apply(self, path: str, module: nn.Module) -> None:
        """Shard the vocabulary of an embedding or head."""
        context, axis = self._context, self._context.axis
        vocab = layers.weight_of(module).shape[0]
        placement = Placement(cut=("tp",), pad=-vocab % axis.size)
        context.shards.replace(module, "weight", placement, dim=1 if layers.is_transposed(module) else 0)
        context.shards.replace(module, "bias", placement, dim=0)
        if isinstance(module, TrainedRows):
            count = layers.stored_weight(module).shape[0]
            module.take_range(axis.rank * count, count)
            context.shards.mark_partial(module, TOKEN_ROWS)
        if isinstance(module, nn.Embedding):
            rows = module.weight.shape[0]
            if module.padding_idx is not None:
                local = module.padding_idx - axis.rank * rows
                inside = local if 0 <= local < rows else None
                module.padding_idx = inside  # pyright: ignore[reportAttributeAccessIssue] - torch infers an int alone
            module.num_embeddings = rows
            replace_class(module, VocabEmbedding, inside=_looks_up_below(path, module), line=context.ends)
            return
        _set_sizes(module)
        entry = Entry(context.ends, layers.weight_of(module).shape[1], None)
        entry.members.append(module)
        chunking = LossChunking.agreed(axis, context.mesh.device, context.is_compiled)
        make_head(module, context.ends, vocab, entry, hugging_face.scales_logits(context.model), chunking)


def _looks_up_below(path: str, module: nn.Embedding) -> bool:
    """Return True if a subclass of nn.Embedding calls its forward and computes with the result, such as a norm of it.

    Raises:
        LayoutError: if it reads the table in its own code, which would get a rank's rows.
    """
    own = type(module).__mro__[: type(module).__mro__.index(nn.Embedding)]
    forwards = [kind.__dict__["forward"] for kind in own if "forward" in kind.__dict__]
    foreign = [each for each in forwards if not each.__module__.startswith("weft.")]
    if any(not {"super", "forward"} <= set(each.__code__.co_names) for each in foreign):
        raise LayoutError(
            f"layout: {path} ({type(module).__name__}) reads its table in a forward of its own, and with "
            f"{path}=vocab a rank has a part of the table. Use {path}=replicate."
        )
    return bool(foreign) and len(foreign) == len(forwards)


class ParameterParallel:
    """Parameter that a module uses directly, sharded along its first dim."""

    def __init__(self, context: TensorContext):
        self._context = context

    def apply(self, path: str, module: nn.Module) -> None:
        """Shard one parameter. path: name of the parameter. module: its module."""
        self._context.shards.replace(module, path.rpartition(".")[2], Placement(cut=("tp",)), dim=0)


class AttentionParallel:
    """Attention that computes a part of its heads."""

    def __init__(self, context: TensorContext):
        self._context, modules = context, context.modules
        separate = separate_parents(modules, context.styles)
        parents = {layers.parent_of(path) for path, style in context.styles.items() if style.name == "colwise"}
        together = () if is_vetted(context.model) else parents - separate
        self._written = {path: WrittenHeads.of(modules[path]) for path in together}

    def apply(self, path: str, module: nn.Module) -> None:
        """Set the numbers of heads of a module, and constants for them in its code, to this rank's numbers."""
        localise(module, self._context.heads[path], self._context.axis.size)
        if (written := self._written.get(path)) is not None:
            replace_class(module, LocalHeads, written=written, ranks=self._context.axis.size)


class SequenceParallel:
    """Blocks that work on this rank's tokens between sharded layers."""

    def __init__(self, context: TensorContext):
        self._context = context

    def apply(self, path: str, module: nn.Module) -> None:
        """Shard the tokens of all blocks. path: "". module: the model."""
        del path
        context, sequence = self._context, self._context.sequence
        if sequence is not None:
            shard_tokens(module, sequence, context.line, context.part)
            context.part.token_paths = sequence.modules
            context.part.full_paths = tuple(sequence.full)
            context.part.whole_paths += sequence.whole


def layer_styles(context: TensorContext) -> dict[str, LayerStyle]:
    """Return the style of each layer to shard. Layers that read sharded features come last."""
    column, row, vocab = ColumnParallel(context), RowParallel(context), VocabParallel(context)
    embedding, norm, channels = EmbeddingParallel(context), NormParallel(context), ChannelParallel(context)
    first: dict[str, LayerStyle] = {}
    last: dict[str, LayerStyle] = {}
    for path, style in context.styles.items():
        module = context.modules[path]
        if style.name == "colwise":
            is_table, of_channels = isinstance(module, nn.Embedding), has_channels(path, context.modules)
            first[path] = embedding if is_table else channels if of_channels else norm if is_norm(module) else column
        elif style.name == "vocab":
            first[path] = vocab
        elif style.name == "rowwise":
            last[path] = row
    return first | last


def separate_parents(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> set[str]:
    """Return the paths of modules whose column-sharded layers each gather their own input."""
    parents = {layers.parent_of(path) for path, style in styles.items() if style.name == "colwise"}
    return {path for path in parents if gathers_per_layer(path, modules, styles)}


def partial_parameters(
    context: TensorContext, own: Mapping[str, Style], taken: Collection[str]
) -> dict[str, Placement]:
    """Return placements of replicated parameters whose gradients are partial sums, without those in `taken`."""
    partial = [path for path, style in context.styles.items() if style.name == "partial"]
    divided, full = (context.sequence.modules, context.sequence.full) if context.sequence else ((), ())
    single = {path for path, style in own.items() if style.name == "partial"}
    return {
        name: Placement(partial=("tp",))
        for name, _ in context.model.named_parameters()
        if name not in taken
        and (name in single or is_inside(name, partial) or (is_inside(name, divided) and not is_inside(name, full)))
    }


def _share_scales(module: nn.Module, **axes: Axis) -> None:
    form: Any = getattr(module, "_weft_float8", None)
    if form is not None:
        module._weft_float8 = replace(form, **axes)  # pyright: ignore[reportArgumentType] - torch infers modules and tensors


def _set_sizes(module: nn.Module) -> None:
    names = ("nf", "nx") if layers.is_transposed(module) else ("out_features", "in_features")
    for name, size in zip(names, layers.weight_of(module).shape, strict=True):
        setattr(module, name, size)
