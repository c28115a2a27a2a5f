"""How one block runs under a policy: what of its forward is kept for backward, and what is computed again.

torch's non-reentrant checkpoint does the work. It replays the block's forward, with the same random numbers, when
backward first asks for something that was not kept, and stops where the last such thing has been made again. What is
kept is kept as autograd keeps it: hooks on saved tensors, such as those that bring it to the host, see all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from weft.comm.links import unobserved
from weft.errors import ModelError
from weft.memory.block_state import BlockState
from weft.memory.selective import OWN_HOOKS, SelectiveChoice, selective_contexts
from weft.structure import hugging_face

Forward = Callable[..., Any]

#: Calls that hold the core of attention. nn.MultiheadAttention gives no access to its core alone.
ATTENTION_CALLS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


def is_attention(func: Any) -> bool:
    """Whether a function that a mode was shown is attention: one of torch's, or one that says so of itself."""
    return func in ATTENTION_CALLS or getattr(func, "is_attention", False)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a block computes again in backward.

    name: "none", "full", "attention" or "selective". saved: which heavy operations keep their output under
    "selective", by their order in forward. buffers: names of those that forward changes.
    """

    name: str
    saved: frozenset[int] = frozenset()
    buffers: tuple[str, ...] = ()


def run_block(policy: Policy, block: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `forward(block, *args, **kwargs)` under a policy."""
    # Under every policy: a cache that one block fills is no longer empty for the next.
    args, kwargs = [without_cache(value) for value in args], {k: without_cache(v) for k, v in kwargs.items()}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    if policy.name == "none":
        return forward(block, *args, **kwargs)
    if policy.name == "attention":
        with _RecomputedAttention():
            return forward(block, *args, **kwargs)
    if torch.compiler.is_compiling():
        return _run_traced(policy, block, forward, args, kwargs)
    selective = policy.name == "selective"
    choice = SelectiveChoice(policy.saved)
    keeping, replaying = choice.contexts() if selective else _no_contexts()
    around: list[Callable[[], AbstractContextManager[Any]]] = []
    if policy.buffers:
        # Batch statistics and their like count a batch once: the replay reads and writes copies of this moment.
        copies = [block.get_buffer(name).detach().clone() for name in policy.buffers]
        around.append(partial(spare_buffers, block, policy.buffers, copies))
    state = BlockState.of(block)
    if state is not None:
        around.append(state.restored)
    # Forward reads more than its arguments, and another microbatch may have changed it before the replay.
    draws = state_of(block)
    around.append(lambda: draws)
    replaying = _Replay(around, replaying)
    pair = keeping, replaying
    settings = {**(OWN_HOOKS if selective else {}), **_kept_randomness()}
    outputs = checkpoint(forward, block, *args, use_reentrant=False, context_fn=lambda: pair, **settings, **kwargs)
    if selective:
        choice.keep_as_autograd_does(keeping.storage)
    if state is not None:
        state.compare(policy.buffers)
    return outputs


def state_of(block: nn.Module) -> AbstractContextManager[Any]:
    """Return the context in which the forward that begins now can be run again with the same result.

    Args:
        block: a repeated block.
    """
    state = getattr(block, "_weft_travels", None)
    return nullcontext() if state is None else state.travelling()


def _run_traced(policy: Policy, block: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The same inside of torch.compile, whose tracer takes no contexts but torch's own.

    Compiled code writes buffers once, whatever it computes twice.
    """
    if policy.name == "selective":
        return checkpoint(
            forward, block, *args, use_reentrant=False, context_fn=partial(selective_contexts, policy.saved), **kwargs
        )
    return checkpoint(forward, block, *args, use_reentrant=False, **kwargs)


def without_cache(value: Any) -> Any:
    """None in place of an empty key-value cache: replaying a block would add to it twice.

    Models of Hugging Face make one in every training forward unless they are told use_cache=False. Raises
    ModelError where tokens are in it already.
    """
    if not hugging_face.is_cache(value):
        return value
    if hugging_face.holds_tokens(value):
        raise ModelError(
            f"{type(value).__name__} in a recomputed block: it holds tokens already, and replaying the block would "
            f"add to it twice. Use recompute=none, or train without a cache."
        )
    return None


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """What a hook on saved tensors returns to keep a tensor as it is.

    The tensor itself would not do: the output of an operation that saves it holds that operation, which would hold it.
    Backward breaks the ring; where none comes, block and mesh would stay for ever, and no garbage collector sees it.
    """
    with unobserved():
        return tensor.detach()


@contextlib.contextmanager
def spare_buffers(
    module: nn.Module, names: Sequence[str], values: Sequence[torch.Tensor] | None = None
) -> Iterator[None]:
    """While inside, the named buffers are copies: what is written into them is lost. values: the copies."""
    owners = [(module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in names]
    originals = [getattr(owner, name) for owner, name in owners]
    copies = [tensor.clone() if tensor is not None else None for tensor in values or originals]
    for (owner, name), copied in zip(owners, copies, strict=True):
        setattr(owner, name, copied)
    try:
        yield
    finally:
        for (owner, name), tensor in zip(owners, originals, strict=True):
            setattr(owner, name, tensor)


def _kept_randomness() -> dict[str, bool]:
    """Settings of a checkpoint: while a CUDA graph is recorded, the state of torch's generator cannot be asked for.

    Whoever records refuses models that draw from it.
    """
    return {"preserve_rng_state": not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())}


def _no_contexts() -> tuple[Any, Any]:
    return contextlib.nullcontext(), contextlib.nullcontext()


class _Replay:
    """Contexts of a replay, the last outermost. Those of `around` are made for each replay: backward may run twice."""

    def __init__(self, around: Sequence[Callable[[], AbstractContextManager[Any]]], inner: AbstractContextManager[Any]):
        self._around, self._inner = around, inner
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in reversed(self._around):
                stack.enter_context(make())
            stack.enter_context(self._inner)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


class _RecomputedAttention(TorchFunctionMode):
    """While active, calls of fused attention keep their inputs alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_attention(func):
            return checkpoint(func, *args, use_reentrant=False, **_kept_randomness(), **kwargs)
        return func(*args, **kwargs)
