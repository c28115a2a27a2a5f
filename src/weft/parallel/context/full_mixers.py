"""Context parallelism for models whose attention cannot be replaced: every rank computes it for all tokens.

Outside its blocks the model works on full sequences, so its own code computes masks, positions and biases. From the
first block to the last, each rank holds a contiguous range of tokens: the memory of norms, dropout, feed-forward layers
and the residual stream shrinks with cp. Before a module that mixes tokens, ranks all-gather the tokens. Each rank
computes this module for all tokens and keeps only the output for its tokens, so attention costs each rank as much as
in one process. Layers that carry a state keep this rank's tokens (`state_layers`). The head gets only this rank's
tokens.

Every collective has its transpose in backward, and each rank's loss covers its own tokens. Gradients are therefore
partial sums over cp, as with sharded attention.

B sequences, T tokens of this rank, S tokens of the full sequence, D features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from weft.comm.autograd import gather_from
from weft.comm.mesh import Axis
from weft.config.plan import Plan
from weft.errors import LayoutError, ModelError
from weft.models.inspect import hugging_face, layers, token_flow
from weft.models.inspect.blocks import repeated_blocks
from weft.parallel.context.apply import Context
from weft.parallel.context.modes import SequenceOrder, full_sequence, shard_tensor
from weft.parallel.context.state_layers import (
    SHARDED_ROWS,
    ShardedRows,
    can_keep_tokens,
    keep_tokens,
    num_previous_tokens,
)
from weft.parallel.layers.documents import DocumentTracker
from weft.parallel.layers.state_mixers import documents_in, state_mixers
from weft.private_torch import tree_flatten, tree_unflatten

#: Inputs that contain no tokens: every rank reads them in full.
BESIDE_TOKENS = hugging_face.MEDIA
_TOKENS = (*hugging_face.TOKENS, "inputs_embeds", "decoder_inputs_embeds")
#: Prefixes of arguments that contain an encoder's output, for all of its tokens.
OF_ENCODER = ("encoder_", "key_value_states")
_TOKEN_DIM = 1
_Rebuild = Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class FullSequenceMixers(Context):
    """Context in which modules that mix tokens get all tokens. Each rank holds one contiguous range for any `cp_mode`.

    Args:
        blocks: paths of this rank's blocks.
        whole: paths of the modules inside blocks that get all tokens.
        is_own: True for a custom model, whose arguments and outputs may have any names.
    """

    def __init__(
        self, plan: Plan, axis: Axis, blocks: Collection[str], whole: Collection[str], *, is_own: bool = False
    ):
        super().__init__(plan, axis, 1, 1)
        self.is_own = is_own
        self._blocks, self._whole = tuple(blocks), tuple(whole)
        self.length = 0  #: length of the full sequences whose tokens the loss counts, in this forward
        self.shapes: set[tuple[int, int]] = set()  #: (sequences, tokens) of the inputs of this forward, all tokens

    def order(self, seq_len: int) -> SequenceOrder:
        """Return which tokens of a sequence this rank holds.

        Raises ModelError if `seq_len` is not a multiple of cp, or below 2 * cp.
        """
        cp = self.axis.size
        if seq_len % cp or seq_len < 2 * cp:
            raise ModelError(
                f"cp={cp}: a sequence is divided into {cp} equal chunks of at least 2 tokens, and one of {seq_len} "
                f"tokens cannot be. Pad the sequences to a multiple of {cp} tokens, at least {2 * cp}."
            )
        return SequenceOrder("ulysses", cp, self.axis.rank, seq_len)

    def shard(self, batch: Any) -> Any:
        """Return this rank's shard of a batch. Tokens of an encoder and a decoder are sharded separately.

        Raises ModelError if the batch has no tokens, if they do not divide evenly, or if labels are not shifted.
        """
        if self.is_own or not isinstance(batch, Mapping):
            return super().shard(batch)
        lengths = {batch[name].shape[1] for name in _TOKENS if isinstance(batch.get(name), Tensor)}
        if not lengths:
            raise ModelError(
                f"cp={self.axis.size}: the batch has no tokens to shard (it has {', '.join(batch)}). Use cp=1."
            )
        if "decoder_input_ids" not in batch:
            self.check_labels(batch)
        return {
            name: shard_tensor(value, self.order(value.shape[1])) if _has_tokens(name, value, lengths) else value
            for name, value in batch.items()
        }

    def sees_full_sequence(self, path: str) -> bool:
        """Return True if a module gets all tokens: it is outside the blocks, or mixes tokens."""
        return not _is_in(path, self._blocks) or _is_in(path, self._whole)


def _has_tokens(name: str, value: Any, lengths: Collection[int]) -> bool:
    is_beside = name in BESIDE_TOKENS or not isinstance(value, Tensor) or value.ndim < 2
    return not is_beside and value.shape[1] in lengths


def _is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


def chains_of(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the paths of the blocks of each block list, in order."""
    found: dict[str, list[str]] = {}
    for path in repeated_blocks(model):
        found.setdefault(layers.parent_of(path), []).append(path)
    return [tuple(paths) for paths in found.values()]


def mixers_of(model: nn.Module) -> list[str]:
    """Return the paths of the outermost modules in blocks that mix tokens, determined by their classes."""
    found: list[str] = []
    for path, block in repeated_blocks(model).items():
        states = state_mixers(block)
        for name, module in block.named_modules():
            place = f"{path}.{name}" if name else path
            # Classes of blocks around a mixer have its name too.
            is_around = name not in states and any(one.startswith(f"{name}." if name else "") for one in states)
            if token_flow.mixing(module) and not is_around and not _is_in(place, tuple(found)):
                found.append(place)
    return found


def check_mixers(model: nn.Module, axis: Axis) -> None:
    """Raise ModelError without blocks or for a block list without modules that mix tokens.

    Raise LayoutError if blocks also mix tokens in code outside these modules.

    Call it with the full model: a pipeline stage cannot be traced.
    """
    blocks, mixers = repeated_blocks(model), mixers_of(model)
    chains = {layers.parent_of(path) for path in blocks}
    mixing = {layers.parent_of(path) for path in blocks if any(one.startswith(f"{path}.") for one in mixers)}
    where, remedy = f"cp={axis.size}", "Use cp=1 for this model."
    if not blocks or chains != mixing:
        lists = ", ".join(sorted(chains - mixing)) or "none"
        raise ModelError(
            f"{where}: the attention of {type(model).__name__} needs all tokens, and they can be sharded only "
            f"between blocks with attention inside; its lists without are {lists}. {remedy}"
        )
    table = layers.input_embeddings(model)
    width = 0 if table is None else table.embedding_dim
    division = token_flow.TokenDivision({}, mixers, width, where, remedy, has_own_loss=True)
    token_flow.find_regions(model, chains_of(model), division)


def find_own_mixers(model: nn.Module, axis: Axis, example: Any = None) -> tuple[str, ...]:
    """Return paths of a custom model's modules that need all tokens, found by one traced forward.

    Raises ModelError if the model has no blocks, no embedding, or blocks that mix tokens in their own code.
    """
    where, remedy = f"cp={axis.size}", "Use cp=1 for this model."
    table = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    chains = chains_of(model)
    if not chains or table is None:
        lacks = "embedding of token ids" if chains else "repeated blocks"
        raise ModelError(f"{where}: {type(model).__name__} has no {lacks} between which tokens can be cut. {remedy}")
    division = token_flow.TokenDivision({}, (), table.embedding_dim, where, remedy, has_own_loss=True)
    try:
        return token_flow.find_mixers(model, chains, division, example)
    except LayoutError as error:
        raise ModelError(str(error)) from error


def gather_mixers(
    model: nn.Module, context: FullSequenceMixers, runs: Sequence[Sequence[str]], whole: Sequence[str]
) -> None:
    """Register hooks that give modules in `whole` all tokens, and other modules of blocks only this rank's.

    The hooks do nothing unless the context is in use. runs: paths of the blocks of each chain, or of each pipeline
    stage, on this rank.
    """
    modules = dict(model.named_modules())
    for path in whole:
        keeps = can_keep_tokens(modules[path], context.axis.size)
        mixer = (_StateLayer if keeps else _Mixer)(context, _names(modules[path]))
        if keeps:
            keep_tokens(modules[path])
        modules[path].register_forward_pre_hook(mixer.before, with_kwargs=True)
        modules[path].register_forward_hook(mixer.after, with_kwargs=True)
    for run in runs:
        edge = _Ends(context, _names(modules[run[0]]))
        modules[run[0]].register_forward_pre_hook(edge.before, with_kwargs=True)
        modules[run[-1]].register_forward_hook(edge.after)
    outer = _Outer(context, (), DocumentTracker(model) if hugging_face.is_hugging_face(model) else None)
    model.register_forward_pre_hook(outer.before, with_kwargs=True)
    model.register_forward_hook(outer.leave, always_call=True)
    model.register_forward_hook(outer.after)
    head = layers.find_lm_head(model)
    if head is not None:
        head.register_forward_pre_hook(outer.before_head)


def _names(module: nn.Module) -> tuple[str, ...]:
    """Return the argument names of forward. Call it before the class is replaced, which hides the names."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD)


class _Hooks:
    """Base of the hook objects. A copied hook does nothing. They are objects because copies of a module copy hooks."""

    def __init__(self, context: FullSequenceMixers, names: tuple[str, ...]):
        self._context, self._names = context, names

    @property
    def _is_idle(self) -> bool:
        return self._context is None or not self._context.in_use

    def _own(self, x: Tensor) -> Tensor:
        order = self._context.order(x.shape[_TOKEN_DIM])
        return x.narrow(_TOKEN_DIM, order.rank * order.chunk_len, order.chunk_len)

    def _all(self, x: Tensor) -> Tensor:
        return gather_from(x, self._context.axis, _TOKEN_DIM)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], _Rebuild]:
        """Return arguments by name, and a function that rebuilds args and kwargs from them.

        Hidden states come before other arguments. Outputs of an encoder are omitted.
        """
        given = dict(zip(self._names, args, strict=False))
        given |= {str(place): value for place, value in enumerate(args) if place >= len(self._names)}
        given |= kwargs
        count = len(args)

        def rebuilt(values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            every = list((given | values).items())
            return tuple(value for _, value in every[:count]), dict(every[count:])

        mixed = {name: value for name, value in given.items() if not name.startswith(OF_ENCODER)}
        first = {"hidden_states": mixed["hidden_states"]} if "hidden_states" in mixed else {}
        return first | mixed, rebuilt

    def _stream(self, leaves: list[Any], module: nn.Module) -> int:
        """Return the index of the hidden states (B, tokens, features). Raises ModelError if no leaf has this shape."""
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim == 3:
                return place
        raise ModelError(
            f"cp={self._context.axis.size}: no hidden states of (batch, tokens, features) go into or out of "
            f"{type(module).__name__}. Use cp=1 for this model."
        )


class _Ends(_Hooks):
    """Hooks of the first and the last block of a chain, which enter and leave the sharded sequence."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_idle:
            return None
        given, rebuilt = self._split(args, kwargs)
        leaves, tree = tree_flatten(given)
        place = self._stream(leaves, module)
        first, second = leaves[place].shape[:2]
        if first != second and (second, first) in self._context.shapes:
            raise ModelError(
                f"cp={self._context.axis.size}: {type(module).__name__} gets hidden states of (tokens, sequences, "
                "features), and the tokens of (sequences, tokens, features) can be sharded. Use cp=1 for this model."
            )
        leaves[place] = self._own(leaves[place])
        shape = leaves[place].shape
        same_shape = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.shape == shape]
        if len(same_shape) > 1:  # the second tensor may have all tokens or one rank's
            raise ModelError(
                f"cp={self._context.axis.size}: {type(module).__name__} takes a second tensor of the shape "
                f"{tuple(shape)} that a rank's part of the tokens has. Pad the sequences to another length."
            )
        return rebuilt(tree_unflatten(leaves, tree))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Gather the hidden states of all tokens; each rank continues with its own loss."""
        del args
        if self._is_idle:
            return None
        leaves, tree = tree_flatten(output)
        place = self._stream(leaves, module)
        leaves[place] = self._all(leaves[place])
        return tree_unflatten(leaves, tree)


class _Mixer(_Hooks):
    """Hooks of a module in a block that gets all tokens."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_idle:
            return None
        given, rebuilt = self._split(args, kwargs)
        leaves, tree = tree_flatten(given)
        shape = leaves[self._stream(leaves, module)].shape
        joined: dict[int, Tensor] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape == shape:
                if id(leaf) not in joined:
                    joined[id(leaf)] = self._all(leaf)
                leaves[place] = joined[id(leaf)]
        return rebuilt(tree_unflatten(leaves, tree))

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        del args, kwargs
        if self._is_idle:
            return None
        leaves, tree = tree_flatten(output)
        place = self._stream(leaves, module)
        leaves[place] = self._own(leaves[place])
        return tree_unflatten(leaves, tree)


class _StateLayer(_Mixer):
    """Hooks of a layer that carries a state. It gets only this rank's tokens if `can_keep_tokens`.

    It gets all tokens if its convolution reads more previous tokens than a rank has.
    """

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass this rank's part of a mask, and the rows in which the other tokens are."""
        if self._is_idle:
            return None
        given, rebuilt = self._split(args, kwargs)
        axis, documents = self._context.axis, documents_in(module)
        hidden_states, mask = given["hidden_states"], given.get("attention_mask")
        batch, num_tokens = hidden_states.shape[:2]
        is_short = num_tokens < num_previous_tokens(module)
        is_other = documents is not None and documents.shape != (batch, num_tokens * axis.size)
        if is_short or is_other or not can_keep_tokens(module, axis.size):
            return super().before(module, args, kwargs)
        if mask is not None and mask.shape[1] != num_tokens:
            given["attention_mask"] = self._own(mask)
        # Some models pass an empty cache in training.
        return rebuilt(given | {"cache": None, SHARDED_ROWS: ShardedRows(axis, documents)})

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        return None if SHARDED_ROWS in kwargs else super().after(module, args, kwargs, output)


class _Outer(_Hooks):
    """Hooks of the full model and of its head: inputs get all tokens, outputs only this rank's.

    They also begin and end the `DocumentTracker`'s calls, which separate the documents of packed rows.
    """

    def __init__(self, context: FullSequenceMixers, names: tuple[str, ...], tracker: DocumentTracker | None):
        super().__init__(context, names)
        self._tracker = tracker

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_idle:
            return None
        signature = inspect.signature(model.forward)
        given = dict(signature.bind(*args, **kwargs).arguments)
        extra = given.pop(next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), ""), {})
        given |= extra
        names = list(given) if self._context.is_own else _TOKENS
        tokens = {name: given[name] for name in names if isinstance(given.get(name), Tensor)}
        if self._context.is_own:
            tokens = {name: ids for name, ids in tokens.items() if ids.ndim == 2 and not ids.is_floating_point()}
        if not tokens:
            raise ModelError(
                f"cp={self._context.axis.size}: {type(model).__name__} gets no tokens (it gets {', '.join(given)}). "
                "Use cp=1 for this model."
            )
        lengths = {name: value.shape[1] for name, value in tokens.items()}
        size = self._context.axis.size
        counted = [length for name, length in lengths.items() if name.startswith("decoder_")] or [*lengths.values()]
        self._context.length = size * counted[0]
        self._context.shapes = {(value.shape[0], size * value.shape[1]) for value in tokens.values()}
        for name, value in given.items():
            if name != "labels" and _has_tokens(name, value, lengths.values()):
                order = self._context.order(size * value.shape[1])
                is_real = value.is_floating_point() and value.requires_grad
                given[name] = self._all(value) if is_real else full_sequence(value, self._context.axis, order)
        if "use_cache" in signature.parameters:
            given["use_cache"] = False
        tracked = None if self._tracker is None else self._tracker.begin(model, (), given)
        return tracked or ((), given)

    def leave(self, model: nn.Module, args: Any, output: Any) -> None:
        """End the call, also after an exception."""
        if not self._is_idle and self._tracker is not None:
            self._tracker.leave(model, args, output)

    def before_head(self, head: nn.Module, args: tuple[Any, ...]) -> Any:
        del head
        if self._is_idle or not args or args[0].ndim != 3 or args[0].shape[1] != self._context.length:
            return None
        return (self._own(args[0]), *args[1:])

    def after(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Return the output, with only this rank's tokens in tensors of shape (batch, tokens, features).

        Raises ModelError if a custom model returns another tensor that requires a gradient.
        """
        del model, args
        if self._is_idle:
            return None
        leaves, tree = tree_flatten(output)
        for place, leaf in enumerate(leaves):
            is_divided = isinstance(leaf, Tensor) and leaf.ndim == 3 and leaf.shape[1] == self._context.length
            if is_divided:
                leaves[place] = self._own(leaf)
            elif self._context.is_own and isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ModelError(
                    f"cp={self._context.axis.size}: the model returns a tensor of shape {tuple(leaf.shape)}, and each "
                    "rank computes the loss of its own tokens. Return (batch, tokens, features), or use cp=1."
                )
        return tree_unflatten(leaves, tree)
