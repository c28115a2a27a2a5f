"""Context parallelism for models whose samples are not one sequence of tokens: images, audio, or several towers.

Every cp rank gets full samples and computes embeddings, heads and the loss redundantly. Between the first and the last
block of a block list, or inside each block, each rank holds a contiguous range of the tokens: the memory of norms,
feed-forward layers and the residual stream shrinks with cp. Modules that mix tokens get all of them, as in
`full_mixers`.

Only the first cp rank counts its loss. Every collective in the blocks has its transpose in backward, so the gradients
of the ranks add up to that of one process, for parameters inside and outside the blocks alike.

B sequences, T tokens of this rank, S tokens of all ranks, D features.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.autograd import gather_from
from weft.comm.mesh import Axis, Mesh
from weft.config.plan import Plan
from weft.errors import LayoutError, ModelError
from weft.models.inspect import hugging_face, token_flow
from weft.models.inspect.blocks import join_path
from weft.models.inspect.dry_run import call_traced, example_of
from weft.models.inspect.layers import BATCH_NORMS, parent_of
from weft.parallel.context.apply import Context
from weft.parallel.context.attention import why_attention_fails
from weft.parallel.context.full_mixers import OF_ENCODER, chains_of, check_mixers
from weft.parallel.context.modes import SequenceOrder
from weft.private_torch import named_modules, tree_flatten, tree_unflatten

_TOKEN_DIM = 1
#: Arguments with which a transformers model returns tensors from inside its blocks.
_CAPTURES = ("output_hidden_states", "output_router_logits")
#: Smallest share of a block list's parameters in the modules that shard tokens inside its blocks.
_LEAST_SHARE = 0.25
#: Limits of the search, which traces a forward for each attempt: kinds of mixers in a block, and attempts for a model.
_MOST_MIXERS, _MOST_ATTEMPTS = 3, 8
#: Smallest share of the parameters of all block lists in a list that is worth an attempt.
_LEAST_LIST = 0.01
_TOKENS = (*hugging_face.TOKENS, "inputs_embeds", "decoder_inputs_embeds")


@dataclass(frozen=True, slots=True)
class ShardedChain:
    """A block list whose tokens are sharded.

    Attributes:
        blocks: paths of its blocks.
        runs: first and last block of each region in which tokens stay sharded.
        mixers: modules in the blocks that get all tokens.
        width: features of the hidden states.
    """

    blocks: tuple[str, ...]
    runs: tuple[tuple[str, str], ...]
    mixers: tuple[str, ...]
    width: int


@dataclass(frozen=True, slots=True)
class FullSamplesPlan:
    """Block lists that cp shards, and for each other one the reason why every rank computes all of its tokens."""

    chains: tuple[ShardedChain, ...]
    undivided: tuple[tuple[str, str], ...]


class FullSamples(Context):
    """Context in which every rank gets full samples, and blocks of some block lists get this rank's tokens."""

    shards_samples = False

    def __init__(self, plan: Plan, axis: Axis, chains: Sequence[ShardedChain]):
        super().__init__(plan, axis, 1, 1)
        self._blocks = tuple(path for chain in chains for path in chain.blocks)
        self._mixers = tuple(path for chain in chains for path in chain.mixers)

    def order(self, seq_len: int) -> SequenceOrder:
        """Return which tokens of a padded sequence this rank holds: a contiguous range."""
        return SequenceOrder("ulysses", self.axis.size, self.axis.rank, seq_len)

    def shard(self, batch: Any) -> Any:
        """Return the batch unchanged."""
        return batch

    def sees_full_sequence(self, path: str) -> bool:
        """Return True if a module gets all tokens: it is outside the sharded blocks, or mixes tokens."""
        return not _is_in(path, self._blocks) or _is_in(path, self._mixers)


def _is_in(path: str, places: Collection[str]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


# Choice of the block lists.


def choose_full_samples(model: nn.Module, mesh: Mesh, example: Any = None) -> FullSamplesPlan | None:
    """Return how cp shards a transformers model that needs full samples, or None if cp shards its batches.

    Call it with the full model, before other techniques change it. example: arguments of a forward, which are used if
    the model fails with generated ones; or None.

    Raises ModelError if no block list can be sharded, or if the plan combines it with unsupported techniques.
    """
    axis = mesh["cp"]
    if axis.size == 1 or not hugging_face.is_hugging_face(model):
        return None
    reason = _why_full_samples(model, axis)
    if reason is None:
        return None
    _refuse_plan(mesh.plan, type(model).__name__)
    found, undivided = _sharded_chains(model, axis, example)
    if not found:
        why = undivided[0][1] if undivided else f"cp={axis.size}: {reason}. Use cp=1 for this model."
        raise ModelError(why)
    return FullSamplesPlan(tuple(found), tuple(undivided))


def _why_full_samples(model: nn.Module, axis: Axis) -> str | None:
    """Return the reason why every rank needs full samples, or None if sequences can be sharded outside the model."""
    taken, kind = inspect.signature(model.forward).parameters, type(model).__name__
    if not any(name in taken for name in _TOKENS):
        return f"{kind} takes no tokens"
    why = token_flow.why_fixed_attention(model)
    has_media = hugging_face.takes_media(model) and (why or len(chains_of(model)) > 1)
    if has_media and not getattr(model.config, "is_encoder_decoder", False):
        return f"{kind} takes media in addition to its tokens"
    if why:
        try:
            check_mixers(model, axis)
        except (ModelError, LayoutError) as error:
            return str(error)
        return None
    if failure := why_attention_fails(model):
        return failure
    return None


def _refuse_plan(plan: Plan, kind: str) -> None:
    """Raise ModelError for techniques that do not support full samples on every cp rank."""
    conflicts = (
        (plan.pp > 1, f"pp={plan.pp}", "pp=1"),
        (plan.ep > 1, f"ep={plan.ep}", "ep=1"),
        (plan.sp, "sp=on", "sp=off"),
        (plan.compile, "compile=on", "compile=off"),
        (plan.graphs, "graphs=on", "graphs=off"),
    )
    for is_on, setting, remedy in conflicts:
        if is_on:
            raise ModelError(
                f"cp={plan.cp} {setting}: every rank of cp gets full samples of {kind} and shards tokens between its "
                f"blocks only, which does not support {setting}. Use {remedy} or cp=1 for this model."
            )


def _sharded_chains(model: nn.Module, axis: Axis, example: Any) -> tuple[list[ShardedChain], list[tuple[str, str]]]:
    """Return the block lists that can be sharded, and for each other one its path and the reason."""
    found: list[ShardedChain] = []
    undivided: list[tuple[str, str]] = []
    attempts = iter(range(_MOST_ATTEMPTS))
    inner = [(path, module) for path, module in named_modules(model) if path and hugging_face.is_hugging_face(module)]
    parts = [_Part("", model, example), *(_Part(path, module) for path, module in inner)]
    sizes = {chain: sum(_num_parameters(model.get_submodule(path)) for path in chain) for chain in chains_of(model)}
    for chain in sorted(sizes, key=lambda chain: -sizes[chain]):
        if sizes[chain] < _LEAST_LIST * sum(sizes.values()):
            undivided.append((parent_of(chain[0]), f"cp={axis.size}: {parent_of(chain[0])} has few of the weights."))
            continue
        around = (part for part in parts if chain[0].startswith(join_path(part.path, "")) and part.calls(chain))
        part = next(around, None)
        if part is None:
            reason = (
                f"cp={axis.size}: {chain[0]} ({type(model.get_submodule(chain[0])).__name__}) is not called as one "
                "module in a forward that Weft can trace, so there is no block in which tokens could be sharded. Use "
                "cp=1 for this model."
            )
            undivided.append((parent_of(chain[0]), reason))
            continue
        try:
            found += _shard_chain(part, chain, axis, attempts)
        except (LayoutError, ModelError) as error:
            inside = _shard_inside(part, chain, axis, attempts)
            found += inside
            if not inside:
                undivided.append((parent_of(chain[0]), str(error)))
    return found, undivided


def _num_parameters(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


class _Part:
    """A transformers model inside a model, and a forward of it in which its blocks can be traced. path: its path."""

    def __init__(self, path: str, module: nn.Module, example: Any = None):
        self.path, self.module, self._given = path, module, example
        self.called: set[str] = set()  #: paths in this part of the modules that the forward calls

    @functools.cached_property
    def _traced(self) -> tuple[Any, dict[str, int]]:
        for is_given in (False, True):
            widths: dict[str, int] = {}
            self.called.clear()
            try:
                example = self._given if is_given else example_of(self.module, batch=2)
                if example is not None:
                    _watch(self.module, example, partial(self._note, widths))
                    return example, widths
            except (LayoutError, ModelError):
                pass
        return None, {}

    def _note(self, widths: dict[str, int], path: str, leaves: Sequence[Any]) -> None:
        self.called.add(path)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() >= 3:
                widths.setdefault(join_path(self.path, path), leaf.shape[-1])
                return

    @property
    def example(self) -> Any:
        """Arguments of the forward, generated or given."""
        return self._traced[0]

    @property
    def widths(self) -> dict[str, int]:
        """Features of the first input (batch, tokens, ..., features) of each called module, by path in the model.

        Empty if the forward fails.
        """
        return self._traced[1]

    def num_parameters(self, path: str) -> int:
        """Return the number of parameters of a module of the whole model, by path."""
        return _num_parameters(self.module.get_submodule(self.inside(path)))

    def calls(self, chain: Sequence[str]) -> bool:
        """Return True if the forward calls a block of the chain."""
        return not self.widths.keys().isdisjoint(chain)

    @property
    def is_complete(self) -> bool:
        """True if the traced forward is one as in training: code between blocks may read media and captured states."""
        return not self.path and not hugging_face.reads_images_as_tokens(self.module)

    def inside(self, path: str) -> str:
        return path[len(self.path) + 1 :] if self.path else path


def _shard_chain(part: _Part, chain: Sequence[str], axis: Axis, attempts: Iterator[int]) -> list[ShardedChain]:
    """Return the chain with tokens sharded from its first block to its last, or else inside each block.

    Blocks of different widths are separate chains. Raises LayoutError or ModelError if a block cannot be sharded.
    """
    groups: dict[int, list[str]] = {}
    for path in chain:
        if path in part.widths:
            groups.setdefault(part.widths[path], []).append(part.inside(path))
    found: list[ShardedChain] = []
    for width, blocks in groups.items():
        apart = tuple((path, path) for path in blocks)
        regions = [((blocks[0], blocks[-1]),), apart] if part.is_complete and len(blocks) > 1 else [apart]
        division = _division(width, axis)
        for runs in regions:
            if next(attempts, None) is None:
                raise LayoutError(
                    f"cp={axis.size}: {type(part.module).__name__} has more block lists than Weft tries to shard. Use "
                    "cp=1 for this model."
                )
            try:
                mixers = token_flow.find_mixers(part.module, [blocks], division, part.example, runs, _MOST_MIXERS)
            except (LayoutError, ModelError):
                if runs is regions[-1]:
                    raise
                continue
            mixers = tuple(path for path in mixers if _is_in(path, blocks))
            mixers = (*mixers, *_uncalled_mixers(part, blocks, mixers))
            _check_contents(part.module, blocks, mixers, axis)
            place = partial(join_path, part.path)
            ends = tuple((place(first), place(last)) for first, last in runs)
            found.append(ShardedChain(tuple(map(place, blocks)), ends, tuple(map(place, mixers)), width))
            break
    return found


def _shard_inside(part: _Part, chain: Sequence[str], axis: Axis, attempts: Iterator[int]) -> list[ShardedChain]:
    """Return the modules inside the blocks of a chain, such as MLPs, that treat each token separately.

    Tokens are sharded inside each of them. A module counts if it has at least two weight matrices, so that it saves
    tensors between them.
    """
    blocks = tuple(map(part.inside, chain))
    kinds: dict[tuple[str, int], list[str]] = {}
    mixing: list[str] = []
    for path, module in named_modules(part.module):
        width = part.widths.get(join_path(part.path, path))
        if path not in blocks and token_flow.mixing(module) and not _is_in(path, mixing):
            mixing.append(path)
        is_inside = path not in blocks and _is_in(path, blocks) and not _is_in(path, mixing)
        if width is not None and is_inside and sum(param.dim() > 1 for param in module.parameters()) > 1:
            kinds.setdefault((re.sub(r"\d+", "*", path), width), []).append(path)
    found: list[ShardedChain] = []
    for (_, width), paths in kinds.items():
        if _is_in(paths[0], [part.inside(path) for one in found for path in one.blocks]):
            continue
        try:
            _check_contents(part.module, paths, (), axis, least=0)
        except ModelError:
            continue
        if next(attempts, None) is None:
            break
        if not token_flow.why_mixed(part.module, paths, _division(width, axis), part.example):
            places = tuple(join_path(part.path, path) for path in paths)
            found.append(ShardedChain(places, tuple((path, path) for path in places), (), width))
    share = sum(map(part.num_parameters, (path for one in found for path in one.blocks)))
    return found if share >= _LEAST_SHARE * sum(map(part.num_parameters, chain)) else []


def _division(width: int, axis: Axis) -> token_flow.TokenDivision:
    return token_flow.TokenDivision(
        {}, (), width, f"cp={axis.size}", "Use cp=1 for this model.", has_own_loss=True, has_full_output=True
    )


def _uncalled_mixers(part: _Part, blocks: Sequence[str], mixers: Sequence[str]) -> list[str]:
    """Return modules in the blocks that mix tokens by their class, and that the example's forward does not call."""
    found: list[str] = []
    for path, module in named_modules(part.module):
        is_new = _is_in(path, blocks) and path not in blocks and path not in part.called
        if is_new and token_flow.mixing(module) and not _is_in(path, (*mixers, *found)):
            found.append(path)
    return found


def _check_contents(model: nn.Module, blocks: Sequence[str], mixers: Sequence[str], axis: Axis, least: int = 2) -> None:
    """Raise ModelError unless the blocks have matrices, and no batch norms, that get this rank's tokens.

    least: fewest blocks of a list without modules that mix tokens.
    """
    has_matrix = False
    for path, module in named_modules(model):
        if not _is_in(path, blocks) or _is_in(path, mixers):
            continue
        if isinstance(module, BATCH_NORMS):
            raise ModelError(
                f"cp={axis.size}: {path} ({type(module).__name__}) computes statistics over all tokens, and tokens "
                "are sharded there. Use cp=1 for this model."
            )
        has_matrix = has_matrix or any(param.dim() > 1 for param in module.parameters(recurse=False))
    if not has_matrix or (len(blocks) < least and not mixers):
        raise ModelError(
            f"cp={axis.size}: {blocks[0]} ({type(model.get_submodule(blocks[0])).__name__}) has no weight matrices "
            "outside modules that mix tokens, so sharding tokens would save nothing. Use cp=1 for this model."
        )


def _watch(model: nn.Module, example: Any, note: Callable[[str, Sequence[Any]], object]) -> None:
    """Run one forward without values, and call `note` with the path and the flattened arguments of each call."""

    def watched(path: str) -> Any:
        return lambda module, args, kwargs: note(path, tree_flatten((args, kwargs))[0]) and None

    handles = [
        module.register_forward_pre_hook(watched(path), with_kwargs=True) for path, module in named_modules(model)
    ]
    try:
        call_traced(model, example, lambda inputs: contextlib.nullcontext())
    finally:
        for handle in handles:
            handle.remove()


# Hooks.


def apply_full_samples(model: nn.Module, mesh: Mesh, chosen: FullSamplesPlan) -> FullSamples:
    """Register hooks that give blocks this rank's tokens, and their mixers all tokens. Return the context."""
    context = FullSamples(mesh.plan, mesh["cp"], chosen.chains)
    modules = dict(model.named_modules())
    captures = hugging_face.take_captures(model)  # they must record gathered outputs
    states: list[_ChainState] = []
    for chain in chosen.chains:
        state = _ChainState(context, chain.width)
        states.append(state)
        for path in chain.mixers:
            mixer = _MixerHooks(state, modules[path])
            modules[path].register_forward_pre_hook(mixer.before, with_kwargs=True)
            modules[path].register_forward_hook(mixer.after)
        for first, last in chain.runs:
            edge = _EdgeHooks(state, modules[first])
            modules[first].register_forward_pre_hook(edge.before, with_kwargs=True)
            modules[last].register_forward_hook(edge.after)
    for capture in captures:
        capture.module.register_forward_hook(capture.hook)
    model.register_forward_pre_hook(_ModelHook(context, states).before, with_kwargs=True)
    return context


class _ChainState:
    """State of the hooks of one block list. A copied model is not parallelized, so a copy of the state is idle.

    num_tokens: tokens of all ranks in this forward of the model, or 0 before its first block runs.
    """

    def __init__(self, context: FullSamples, width: int):
        self.context, self.width, self.num_tokens = context, width, 0

    @property
    def is_idle(self) -> bool:
        return self.context is None or not self.context.in_use

    def find(self, leaves: Sequence[Any], module: nn.Module) -> int:
        """Return the index of the hidden states. Raises ModelError without any."""
        place = token_flow.hidden_index(leaves, self.width)
        if place is None:
            raise ModelError(
                f"{self.where}: no hidden states of (batch, tokens, {self.width} features) go into or out of "
                f"{type(module).__name__}. Use cp=1 for this model."
            )
        return place

    @property
    def where(self) -> str:
        return f"cp={self.context.axis.size}"

    def own(self, x_BSD: Tensor, module: nn.Module) -> Tensor:
        """Return this rank's tokens, (B, T, ...), after padding with copies of the last token."""
        size = self.context.axis.size
        if x_BSD.shape[_TOKEN_DIM] != self.num_tokens:
            raise ModelError(
                f"{self.where}: {type(module).__name__} returns {x_BSD.shape[_TOKEN_DIM]} tokens for "
                f"{self.num_tokens}, and tokens are sharded there. Use cp=1 for this model."
            )
        padding = -self.num_tokens % size
        if padding:
            last = x_BSD.detach().narrow(_TOKEN_DIM, self.num_tokens - 1, 1)
            x_BSD = torch.cat((x_BSD, *[last] * padding), _TOKEN_DIM)
        share = (self.num_tokens + padding) // size
        return x_BSD.narrow(_TOKEN_DIM, self.context.axis.rank * share, share).contiguous()

    def all(self, x_BTD: Tensor) -> Tensor:
        """Return all tokens without padding, (B, S, ...). Backward sums the ranks' gradients."""
        return gather_from(x_BTD, self.context.axis, _TOKEN_DIM).narrow(_TOKEN_DIM, 0, self.num_tokens)


class _Hooks:
    """Base of the hooks of a module."""

    def __init__(self, state: _ChainState, module: nn.Module):
        self._state, self._names = state, tuple(inspect.signature(module.forward).parameters)

    def _same(self, leaves: Sequence[Any], place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Return the indices of the leaves that have the shape of the leaf at `place`, without an encoder's states."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        others = {id(value) for name, value in given.items() if name.startswith(OF_ENCODER)}
        return [
            at
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
            and leaf.is_floating_point()
            and leaf.shape == leaves[place].shape
            and (at == place or id(leaf) not in others)
        ]


class _EdgeHooks(_Hooks):
    """Hooks of the first and the last block of a region with sharded tokens."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep this rank's tokens.

        Raises ModelError for a single token, or if the number of tokens changes within one forward of the model.
        """
        state = self._state
        if state.is_idle:
            return None
        leaves, tree = tree_flatten((args, kwargs))
        place = state.find(leaves, module)
        count = leaves[place].shape[_TOKEN_DIM]
        if count < 2 or state.num_tokens not in (0, count):
            raise ModelError(
                f"{state.where}: {type(module).__name__} is called with {count} tokens"
                + (f" after {state.num_tokens}" if state.num_tokens else "")
                + ", and cp shards at least 2, of one number in each forward. Use cp=1 for this model."
            )
        state.num_tokens = count
        leaves[place] = state.own(leaves[place], module)
        if len(self._same(leaves, place, args, kwargs)) > 1:  # a mixer would gather the other tensor too
            shape = tuple(leaves[place].shape)
            raise ModelError(
                f"{state.where}: {type(module).__name__} takes a second tensor of the shape {shape} that a "
                "rank's part of the tokens has. Pad the samples to another length."
            )
        return tree_unflatten(leaves, tree)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Gather all tokens."""
        del args
        if self._state.is_idle:
            return None
        leaves, tree = tree_flatten(output)
        place = self._state.find(leaves, module)
        leaves[place] = self._state.all(leaves[place])
        return tree_unflatten(leaves, tree)


class _MixerHooks(_Hooks):
    """Hooks of a module that mixes tokens: it gets all tokens, and its output keeps this rank's."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather the hidden states, and other tensors of their shape."""
        state = self._state
        if state.is_idle:
            return None
        leaves, tree = tree_flatten((args, kwargs))
        joined: dict[int, Tensor] = {}
        for place in self._same(leaves, state.find(leaves, module), args, kwargs):
            leaf = leaves[place]
            if id(leaf) not in joined:
                joined[id(leaf)] = state.all(leaf)
            leaves[place] = joined[id(leaf)]
        return tree_unflatten(leaves, tree)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Keep this rank's tokens."""
        del args
        if self._state.is_idle:
            return None
        leaves, tree = tree_flatten(output)
        place = self._state.find(leaves, module)
        leaves[place] = self._state.own(leaves[place], module)
        return tree_unflatten(leaves, tree)


class _ModelHook:
    """Hook of the model that begins a forward."""

    def __init__(self, context: FullSamples, states: Sequence[_ChainState]):
        self._context, self._states = context, states

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reset the number of tokens, and turn caches off.

        Raises ModelError if the call returns tensors from inside the blocks.
        """
        if self._context is None or not self._context.in_use:
            return None
        for state in self._states:
            state.num_tokens = 0
        names = list(inspect.signature(model.forward).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in _CAPTURES:
            default = getattr(getattr(model, "config", None), name, False)
            if default if given.get(name) is None else given[name]:
                raise ModelError(
                    f"cp={self._context.axis.size}: {name}=True returns tensors from blocks, which have one rank's "
                    f"tokens. Leave {name} out, or use cp=1."
                )
        if "use_cache" in names[len(args) :]:
            return args, kwargs | {"use_cache": False}
        return None


def sharded_paths(chosen: FullSamplesPlan) -> list[str]:
    """Return the paths of the sharded block lists, for messages."""
    return list(dict.fromkeys(parent_of(chain.blocks[0]) for chain in chosen.chains))
