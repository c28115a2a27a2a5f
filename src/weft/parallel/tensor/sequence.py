"""Sequence parallelism, and a lazy tensor that gathers its tokens only when they are needed.

If sharded layers gather tokens in chunks, the module around them gets the lazy tensor as input. The module may read its
shape and dtype and pass it to the layers. Any other operation gathers the tokens first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.autograd import copy_to, gather_from, gather_slice, slice_to
from weft.comm.mesh import Axis
from weft.config.fields.layout import Layout, Style
from weft.errors import LayoutError, PlanError
from weft.models.decoder import Decoder
from weft.models.inspect import hugging_face, layers, token_flow, token_regions
from weft.models.inspect.blocks import repeated_blocks
from weft.parallel.private_torch import plain_call, without_memory
from weft.parallel.random.streams import ShardPosition
from weft.parallel.tensor.linear import TOKENS as TOKENS_sequence
from weft.parallel.tensor.linear import SharedLayer, token_share, with_padding, with_sequences, without_padding
from weft.parallel.tensor.read_layout import is_inside, is_wide, nowhere
from weft.private_torch import tree_flatten, tree_map_only, tree_unflatten

#: Index of the token dim in activations: (batch, tokens, features).
TOKENS = 1

_untyped: Any = Tensor
#: Attributes of the lazy tensor that can be read without gathering.
_ASKED = {
    *(getattr(_untyped, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")),
    *(getattr(_untyped, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__")),
}


class ShardedTokens(Tensor):
    """Lazy tensor of all ranks' tokens, (B, T, D), or (B * T, D) if is_flat. Each rank stores (B, S, D) of them.

    An operation that reads values gathers the tokens first.
    """

    _own: Tensor
    _axis: Axis
    _is_flat: bool
    _whole: Tensor | None
    _has_grad: bool

    @staticmethod
    def of(x_BSD: Tensor, axis: Axis, *, is_flat: bool) -> ShardedTokens:
        """Create the lazy tensor of the tokens gathered from x."""
        batch, tokens, width = x_BSD.shape
        shape = (batch * axis.size * tokens, width) if is_flat else (batch, axis.size * tokens, width)
        found: Any = without_memory(ShardedTokens, shape, x_BSD)
        found._own, found._axis, found._is_flat, found._whole = x_BSD, axis, is_flat, None
        found._has_grad = torch.is_grad_enabled() and x_BSD.requires_grad
        return found

    def gather(self) -> Tensor:
        """Gather the tokens at the first call, and return them.

        Raises:
            PlanError: if gradients are disabled, as inside a custom autograd function, and the tokens' gradient would
                be lost.
        """
        if self._whole is None:
            if self._has_grad and not torch.is_grad_enabled():
                raise _hidden()
            found = gather_from(self._own, self._axis, TOKENS)
            self._whole = found.flatten(0, 1) if self._is_flat else found
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func in _ASKED:
            return plain_call(func, args, kwargs or {})
        if func is _untyped.requires_grad.__get__:
            return args[0]._has_grad
        args, kwargs = tree_map_only(cls, cls.gather, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del func, types, args, kwargs
        raise _hidden()


def _hidden() -> PlanError:
    return PlanError(
        "tp_chunks: a module around sharded layers passes its input to a custom autograd function, or reads it "
        "without gradients, before they have gathered it. Use tp_chunks=1."
    )


# Sequence parallelism: between sharded layers, each tp rank has its share of the tokens.

#: Name of a decoder block's argument for the encoder's output in transformers.
_ENCODER_STATES = "encoder_hidden_states"


@dataclass(frozen=True, slots=True)
class TokenSharding:
    """The modules that work on this rank's tokens only, by path.

    If `blocks` is empty, only the inputs that column-sharded layers save for backward are sharded.

    Attributes:
        blocks: blocks whose tokens are sharded, in order.
        runs: first and last block of each sequence of blocks. Tokens are sharded before the first and gathered after
            the last, unless `with_ends`.
        modules: modules whose gradients are partial sums.
        with_ends: True if embedding and head are sharded too, and pipeline stages exchange sharded tokens.
        width: number of features of the residual stream.
        whole: modules that mix tokens and that the layout leaves unsharded. Every rank gathers and computes all tokens.
        reading: blocks that read an encoder's output.
        summed: for each block, indices of its flattened arguments that come from outside the blocks and whose gradients
            are summed over the ranks.
        full: modules in the blocks that compute all tokens on every rank.
        pads: True to pad sequences whose number of tokens does not divide evenly.
    """

    blocks: tuple[str, ...]
    runs: tuple[tuple[str, str], ...]
    modules: tuple[str, ...]
    with_ends: bool
    width: int
    whole: tuple[str, ...] = ()
    reading: tuple[str, ...] = ()
    summed: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    full: Mapping[str, token_regions.FullModule] = field(default_factory=dict[str, token_regions.FullModule])
    pads: bool = False


def plan_sequence(
    model: nn.Module,
    layout: Layout,
    styles: Mapping[str, Style],
    runs: Sequence[Sequence[str]] | None = None,
    is_whole: Callable[[str], bool] = nowhere,
    regions: token_flow.TokenRegions | None = None,
) -> TokenSharding:
    """Choose the modules that work on this rank's tokens only.

    Raises LayoutError if the model has no blocks with column-sharded layers, or its block lists are not supported.

    Args:
        styles: styles of the local modules, by path.
        runs: block paths of each local pipeline stage, or None if all blocks are local.
        is_whole: returns True for the path of a module that keeps all tokens.
        regions: regions found on the full model, or None while they are being found.
    """
    if regions is not None and regions.why_none:
        return TokenSharding((), (), (), with_ends=False, width=0)
    blocks = blocks_outside(model, is_whole, styles)
    if regions is not None and (regions.why_apart or hugging_face.is_hugging_face(model)):
        modules = dict(model.named_modules())  # a stage may have no block of the sharded chain
        blocks = {path: modules[path] for path in regions.units if path in modules}
    chains: dict[str, list[str]] = {}
    for path in blocks:
        chains.setdefault(layers.parent_of(path), []).append(path)
    if not blocks:
        raise LayoutError(
            f"sp=on: tokens are divided from a block's entry to its end, and {type(model).__name__} has no repeated "
            "blocks. Use sp=off."
        )
    if hasattr(model, "base_model_prefix") and len(set(map(layers.parent_of, repeated_blocks(model)))) > 1:
        _refuse_batch_norms(blocks)
    modules = dict(model.named_modules())
    whole = tuple(place for path, block in blocks.items() for place in _replicated_mixers(path, block, styles, modules))
    width = _stream_width(model, tuple(blocks), styles)
    # Read this from the layout: embedding and head may be on other stages, and all stages must agree.
    found = [layout.style(path) for path in ("embed", "head")]
    ends = isinstance(model, Decoder) and all(style is not None and style.name == "vocab" for style in found)
    outside = ("norm", "pos_embed") if ends else ()
    inside = None if runs is None else [[path for path in run if path in blocks] for run in runs]
    here = list(chains.values()) if inside is None else list(filter(None, inside))
    if regions is not None and regions.why_apart:
        here = [[path] for path in blocks]
    ends_of_runs = tuple((run[0], run[-1]) for run in here)
    summed = {} if regions is None else regions.summed
    full = {} if regions is None else {path: each for path, each in regions.full.items() if path in modules}
    whole = tuple(path for path in whole if path not in full and not is_inside(path, full))
    # An unsharded encoder also returns all tokens. Each block that reads them keeps this rank's tokens.
    several = len(set(map(layers.parent_of, repeated_blocks(model)))) > 1
    reading = tuple(path for path, block in blocks.items() if several and _ENCODER_STATES in _names(block))
    pads = runs is None and len(chains) == 1 and not reading
    return TokenSharding(
        tuple(blocks), ends_of_runs, (*blocks, *outside), ends, width, whole, reading, summed, full, pads
    )


def _refuse_batch_norms(blocks: Mapping[str, nn.Module]) -> None:
    """Raise LayoutError if blocks have batch norms: their statistics are those of all tokens."""
    for path, block in blocks.items():
        for name, module in block.named_modules():
            if isinstance(module, layers.BATCH_NORMS):
                raise LayoutError(
                    f"sp=on: {path}.{name} ({type(module).__name__}) computes statistics over all tokens, and tokens "
                    "are sharded in its block. Use sp=off."
                )


def _is_pair(model: nn.Module) -> bool:
    """Return True if two lists of blocks are an encoder and a decoder that reads the encoder's states.

    The tokens of other lists, such as an audio encoder's convolutions, are not those of the blocks.
    """
    is_named = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return is_named and any(second_states(block) for block in repeated_blocks(model).values())


def _stream_width(model: nn.Module, blocks: Sequence[str], styles: Mapping[str, Style]) -> int:
    """Return the number of features of the residual stream, from a row-sharded layer if there is one.

    A column-sharded layer may read a narrower latent. Raises LayoutError if blocks have no column-sharded layer.
    """
    modules = dict(model.named_modules())
    inside = [path for path in styles if any(path.startswith(f"{block}.") for block in blocks)]
    row = next((path for path in inside if _is(styles, path, "rowwise")), None)
    column = next((path for path in inside if _is(styles, path, "colwise")), None)
    if column is None:
        raise LayoutError(
            f"sp=on: the layout shards no layer of {blocks[0]} by columns, nor of another block. Use sp=off."
        )
    return layers.weight_of(modules[column]).shape[1] if row is None else layers.weight_of(modules[row]).shape[0]


def blocks_outside(
    model: nn.Module, is_whole: Callable[[str], bool], styles: Mapping[str, Style]
) -> dict[str, nn.Module]:
    """Return the repeated blocks that tensor parallelism may shard, by path.

    Of a Hugging Face model with towers for images or audio, these are the blocks of its text decoder: the tokens of a
    tower are not those of the text. Of other models with several block lists, except an encoder and a decoder, it is
    the list with the most parameters among those with column-sharded layers.
    """
    blocks = {path: block for path, block in repeated_blocks(model).items() if not is_whole(path)}
    if not hugging_face.is_hugging_face(model):
        return blocks
    if getattr(model.config, "is_encoder_decoder", False):
        is_pair = len(set(map(layers.parent_of, blocks))) < 3 and _is_pair(model)
        return blocks if is_pair else _largest_chain(blocks, styles)
    decoder: Any = model.get_decoder()  # pyright: ignore[reportCallIssue] - the model itself without one
    place = next((path for path, module in model.named_modules() if module is decoder), "")
    text = {path: block for path, block in blocks.items() if not place or path.startswith(f"{place}.")}
    return _largest_chain(text or blocks, styles)


def _largest_chain(blocks: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> dict[str, nn.Module]:
    """Return the block list with the most parameters, of those with column-sharded layers if there are any."""
    chains: dict[str, dict[str, nn.Module]] = {}
    for path, block in blocks.items():
        chains.setdefault(layers.parent_of(path), {})[path] = block
    columns = [path for path in styles if _is(styles, path, "colwise")]

    def rank(chain: Mapping[str, nn.Module]) -> tuple[bool, int]:
        has_columns = any(path.startswith(f"{block}.") for block in chain for path in columns)
        return has_columns, sum(param.numel() for block in chain.values() for param in block.parameters())

    return max(chains.values(), key=rank, default={})


def _names(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def second_states(module: nn.Module) -> tuple[tuple[int, str], ...]:
    """Return indices and names of a module's arguments from which cross-attention computes keys and values."""
    found = enumerate(_names(module))
    return tuple((place, name) for place, name in found if name in (_ENCODER_STATES, "key_value_states"))


def _is(styles: Mapping[str, Style], path: str, name: str) -> bool:
    return path in styles and styles[path].name == name


def _replicated_mixers(
    path: str, block: nn.Module, styles: Mapping[str, Style], modules: Mapping[str, nn.Module]
) -> list[str]:
    """Return the outermost modules of a block that mix tokens and that each rank must compute for all tokens.

    They are not sharded, contain no sharded layer, and are not in a module that gathers tokens for its sharded layers.
    """
    cut = [place for place in styles if place.startswith(f"{path}.") and styles[place].name in ("colwise", "rowwise")]
    parts = {place.rpartition(".")[0] for place in cut}  # modules around sharded layers, which receive all tokens
    parts = {part for part in parts if not is_wide(part, modules, styles)}
    found: list[str] = []
    for name, module in block.named_modules():
        place = f"{path}.{name}"
        if not name or any(place.startswith(f"{one}.") for one in found) or not token_flow.mixing(module):
            continue
        near = any(one.startswith(f"{place}.") for one in cut) or any(place.startswith(f"{part}.") for part in parts)
        if not near and place not in cut:
            found.append(place)
    return found


def shard_tokens(model: nn.Module, sequence: TokenSharding, line: SharedLayer, part: ShardPosition) -> None:
    """Add hooks to a model that pass this rank's tokens to blocks, and all tokens to modules that need them.

    Column-parallel layers all-gather, and row-parallel layers reduce-scatter, without these hooks.
    """
    modules = dict(model.named_modules())
    for path, positions in sequence.summed.items():
        if positions and path in modules:
            modules[path].register_forward_pre_hook(_SumGradients(line, positions).before, with_kwargs=True)
    for path in sequence.reading:
        modules[path].register_forward_pre_hook(_ShardedStates(line, _names(modules[path])).before, with_kwargs=True)
    for path in sequence.whole:
        together = _GatheredMixer(line, sequence.width, part)
        modules[path].register_forward_pre_hook(together.before, with_kwargs=True)
        modules[path].register_forward_hook(together.after)
    for path, found in sequence.full.items():
        complete = _FullRegion(line, part, found)
        modules[path].register_forward_pre_hook(complete.before, with_kwargs=True)
        modules[path].register_forward_hook(complete.after)
    if sequence.with_ends:
        if (table := modules.get("pos_embed")) is not None:
            table.register_forward_pre_hook(_TakePositions(line).before)
    else:
        edge = _Edge(line, sequence.width, part, pads=sequence.pads and line.pieces == 1)
        for first, last in sequence.runs:
            modules[first].register_forward_pre_hook(edge.before, with_kwargs=True)
            modules[last].register_forward_hook(edge.after)


class _Edge:
    """Hooks of the first and last block of a sequence of blocks.

    Methods of an object are deep-copied with the module. Closures would be shared by the copies.
    """

    def __init__(self, line: SharedLayer, width: int, part: ShardPosition, *, pads: bool):
        self._line, self._width, self._part, self._pads = line, width, part, pads

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep this rank's tokens of the hidden states, after padding.

        Sets `padding` and `sequences` of the position. Raises PlanError if the tokens do not divide evenly.
        """
        leaves, tree = tree_flatten((args, kwargs))
        place = self._find(leaves, module)
        hidden, axis = leaves[place], self._line.axis
        self._part.padding = -hidden.shape[TOKENS_sequence] % axis.size if self._pads else 0
        hidden = with_padding(hidden, self._part)
        token_share(hidden.shape, axis)
        self._part.sequences = hidden.shape[0]
        leaves[place] = slice_to(hidden, axis, TOKENS_sequence)
        return tree_unflatten(leaves, tree)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Gather all tokens and remove padding. The following modules process them identically on all ranks."""
        del args
        leaves, tree = tree_flatten(output)
        place = self._find(leaves, module)
        leaves[place] = without_padding(gather_slice(leaves[place], self._line.axis, TOKENS_sequence), self._part)
        return tree_unflatten(leaves, tree)

    def _find(self, leaves: list[Any], module: nn.Module) -> int:
        return _find_hidden(leaves, self._width, module)


class _SumGradients:
    """Hook of a block. In backward it sums the gradients of some arguments over the ranks.

    These arguments come from outside the blocks, and each rank's gradient comes from its own tokens.
    """

    def __init__(self, line: SharedLayer, positions: frozenset[int]):
        self._line, self._positions = line, positions

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        leaves, tree = tree_flatten((args, kwargs))
        for at in self._positions:
            if at < len(leaves) and isinstance(leaves[at], torch.Tensor) and leaves[at].requires_grad:
                leaves[at] = copy_to(leaves[at], self._line.axis)
        return tree_unflatten(leaves, tree)


class _ShardedStates:
    """Hook of a block that reads an encoder's output. It keeps this rank's tokens of the output.

    Sharded layers gather them again.
    """

    def __init__(self, line: SharedLayer, names: list[str]):
        self._line, self._place = line, names.index(_ENCODER_STATES)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        if len(args) > self._place and args[self._place] is not None:
            return (*args[: self._place], self._own_tokens(args[self._place]), *args[self._place + 1 :]), kwargs
        if kwargs.get(_ENCODER_STATES) is not None:
            return args, {**kwargs, _ENCODER_STATES: self._own_tokens(kwargs[_ENCODER_STATES])}
        return None

    def _own_tokens(self, states: torch.Tensor) -> torch.Tensor:
        token_share(states.shape, self._line.axis)
        return slice_to(states, self._line.axis, TOKENS_sequence)


class _GatheredMixer:
    """Hooks of a replicated module that mixes tokens. They gather all tokens before it, and keep this rank's after it.

    Each rank's gradients come from its own tokens, so they are summed like gradients of other modules in the block.
    """

    def __init__(self, line: SharedLayer, width: int, part: ShardPosition):
        self._line, self._width, self._part = line, width, part

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather all tokens of the hidden states, and of other tensors with their shape."""
        leaves, tree = tree_flatten((args, kwargs))
        hidden = leaves[_find_hidden(leaves, self._width, module)]
        if hidden.dim() < 3:
            token_share(hidden.shape, self._line.axis)
        joined: dict[int, torch.Tensor] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.shape == hidden.shape:
                if id(leaf) not in joined:
                    joined[id(leaf)] = without_padding(gather_from(leaf, self._line.axis, TOKENS_sequence), self._part)
                leaves[place] = joined[id(leaf)]
        return tree_unflatten(leaves, tree)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        del args
        leaves, tree = tree_flatten(output)
        place = _find_hidden(leaves, self._width, module)
        leaves[place] = with_padding(leaves[place], self._part)
        axis, tokens = self._line.axis, leaves[place].shape[TOKENS_sequence]
        leaves[place] = leaves[place].narrow(TOKENS_sequence, axis.rank * tokens // axis.size, tokens // axis.size)
        return tree_unflatten(leaves, tree)


class _FullRegion:
    """Hooks of a module that every rank computes for all tokens.

    They gather tokens before it, and keep this rank's after it. All ranks compute the same, so the module's gradients
    are full and not summed.
    """

    def __init__(self, line: SharedLayer, part: ShardPosition, found: token_regions.FullModule):
        self._line, self._part, self._found = line, part, found

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        leaves, tree = tree_flatten((args, kwargs))
        joined: dict[tuple[int, int], torch.Tensor] = {}
        for position, dim, samples, _ in self._found.inputs:
            x, is_flat = leaves[position], samples > 1
            dim = TOKENS if is_flat else dim
            if (id(x), dim) not in joined:
                split = with_sequences(x.flatten(1), self._part.sequences, self._line.axis) if is_flat else x
                full = without_padding(gather_slice(split, self._line.axis, dim), self._part, dim)
                joined[id(x), dim] = full.reshape(-1, *x.shape[1:]) if is_flat else full
            leaves[position] = joined[id(x), dim]
        return tree_unflatten(leaves, tree)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        leaves, tree = tree_flatten(output)
        position, dim, samples, _ = self._found.output
        x = leaves[position]
        if samples > 1:
            full = with_padding(with_sequences(x.flatten(1), self._part.sequences, self._line.axis), self._part)
            leaves[position] = slice_to(full, self._line.axis, TOKENS).reshape(-1, *x.shape[1:])
        else:
            leaves[position] = slice_to(with_padding(x, self._part, dim), self._line.axis, dim)
        return tree_unflatten(leaves, tree)


def _find_hidden(leaves: list[Any], width: int, module: nn.Module) -> int:
    if (found := token_flow.hidden_index(leaves, width)) is not None:
        return found
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.shape[-1:] == (width,):
            return place
    raise LayoutError(
        f"sp=on: no hidden states of {width} features go into or out of {type(module).__name__}. Use sp=off."
    )


class _TakePositions:
    """Hook of a position embedding. It keeps the positions of this rank's tokens."""

    def __init__(self, line: SharedLayer):
        self._line = line

    def before(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return this rank's positions, (B, S) or (1, S), of (B, T) or (1, T).

        Raises PlanError if the tokens do not divide evenly.
        """
        del module
        size, rest = divmod(args[0].shape[1], self._line.axis.size)
        if rest:
            token_share((*args[0].shape, 1), self._line.axis)
        return (args[0].narrow(1, self._line.axis.rank * size, size), *args[1:])
