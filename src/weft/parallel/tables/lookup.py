"""Lookups of sharded tables: unique ids are sent to the ranks that hold their rows, which return the rows.

In a train step a lookup returns a placeholder. Rows are fetched when an operation first uses a placeholder, for all
lookups that wait then. They are a leaf of autograd, so backward communicates nothing. Letters as in `table.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from weft.errors import ModelError
from weft.models.keras_model import KerasEmbedding
from weft.parallel.private_torch import plain_call, without_memory
from weft.parallel.tables.requests import local_rows, request_rows
from weft.parallel.tables.table import Lookup, LookupQueue, Table, TableCall
from weft.private_torch import tree_map_only, uncompiled, version_of

_tensor: Any = Tensor


def look_up(table: Table, ids: Tensor, finish: Callable[[Lookup], Tensor], shape: tuple[int, ...] | None) -> Tensor:
    """Return the result of a lookup, or a placeholder in a train step. All ranks call it unless the style is replicate.

    Args:
        ids: ids of any shape.
        finish: returns the result from the rows of the unique ids.
        shape: shape of the result, or None to fetch the rows now.

    Raises:
        ModelError: for an id out of range, or a lookup with gradients outside a train step.
        CommError: if another rank has an id out of range.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise ModelError(
            f"table {table.name.rpartition('.')[0]!r}: its ids are {str(ids.dtype).removeprefix('torch.')}, and ids "
            "are int64 or int32. Convert them by ids.long()."
        )
    queue, trains = table.queue, torch.is_grad_enabled()
    if trains and not queue.is_open:
        raise ModelError(
            f"table {table.name!r}: its gradients are exchanged by run.train_step, and this forward is not in a step. "
            "Use run.train_step to train, run.evaluate to evaluate, or torch.no_grad()."
        )
    with torch.no_grad():
        unique_U, index = ids.detach().long().unique(return_inverse=True)
    lookup = Lookup(table, unique_U, index, finish, trains)
    if table.dim is None:
        return _arrive(lookup, local_rows(table, unique_U))
    queue.waiting.append(lookup)
    if shape is None or not trains:
        return result_of(lookup)
    like = table.weight.detach().new_empty(0, dtype=table.compute)
    placeholder = cast(LookupResult, without_memory(LookupResult, shape, like))
    plain_call(Tensor.requires_grad_, (placeholder,), {})
    placeholder.lookup, lookup.placeholder = lookup, placeholder
    queue.deferred.append(lookup)
    return placeholder


def result_of(lookup: Lookup) -> Tensor:
    """Return the result of a lookup. Fetches the rows of all lookups that wait, unless it has arrived."""
    while lookup.result is None:
        if lookup not in lookup.table.queue.waiting:
            raise ModelError(
                f"table {lookup.table.name!r}: rows were not fetched, because an earlier lookup failed. Look them up "
                "again."
            )
        fetch_waiting(lookup.table.queue)
    return lookup.result


def fetch_waiting(queue: LookupQueue) -> None:
    """Fetch the rows of the waiting lookups, as many as all ranks wait for. All ranks call it."""
    waiting = queue.waiting
    try:
        calls, most = request_rows(
            [one.table for one in waiting], [one.unique_U for one in waiting], [one.trains for one in waiting]
        )
    except BaseException:
        waiting.clear()  # else the next lookup would fail too
        raise
    if any(one.trains for one in waiting[: len(calls)]):
        queue.most += most
    for lookup, call in zip(waiting[: len(calls)], calls, strict=True):
        _arrive(lookup, call)
    del waiting[: len(calls)]


def _arrive(lookup: Lookup, call: TableCall) -> Tensor:
    lookup.rows_UD = call.leaf
    assert lookup.rows_UD is not None
    if lookup.trains:
        lookup.rows_UD.requires_grad_()
        lookup.table.calls.append(call)
    with torch.set_grad_enabled(lookup.trains), _without_hooks(lookup.table.name):
        lookup.result = lookup.finish(lookup)
    return lookup.result


@contextmanager
def _without_hooks(name: str) -> Generator[None]:
    """Hide tensors from hooks of the code that uses a result first, such as those of a checkpointed block."""
    hooks = saved_tensors_hooks(_same, _same)
    try:
        hooks.__enter__()
    except RuntimeError as error:
        raise ModelError(
            f"table {name!r}: torch.func.grad, or a similar transform, uses the result of a lookup first. Use the "
            "result before, as in x = x + 0."
        ) from error
    try:
        yield
    finally:
        hooks.__exit__(None, None, None)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def open_lookups(queue: LookupQueue) -> Generator[None]:
    """Enable lookups with gradients in this context, which is one microbatch with its backward."""
    queue.is_open, queue.waiting, queue.deferred = True, [], []
    try:
        yield
        while queue.waiting:  # results that nothing used still count as read
            fetch_waiting(queue)
        for lookup in queue.deferred:
            _add_gradient(lookup)
    finally:
        queue.is_open, queue.waiting, queue.deferred = False, [], []


def _add_gradient(lookup: Lookup) -> None:
    """Add the gradient of a placeholder that torch's C++ code used itself, as custom autograd functions do."""
    grad: Tensor | None = plain_call(_tensor.grad.__get__, (lookup.placeholder,), {})
    if grad is not None:
        if lookup.result is not None and version_of(lookup.result):
            raise ModelError(
                f"table {lookup.table.name!r}: the result of a lookup was changed in place, and then read by a custom "
                "autograd function or compiled code. Use operations that are not in place."
            )
        with torch.enable_grad():
            result = lookup.finish(lookup)
        torch.autograd.backward(result, grad.to(result.dtype))


class LookupResult(Tensor):
    """Placeholder for the result of a lookup. Operations compute with the result instead."""

    lookup: Lookup

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call a function with results. Shape, dtype and device need no rows."""
        if func in _METADATA and args[0].lookup.result is None:
            return plain_call(func, args, kwargs or {})
        args, kwargs = tree_map_only(LookupResult, _result, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Compute with results below autograd. `open_lookups` adds the placeholder's gradient later."""
        args, kwargs = tree_map_only(LookupResult, lambda one: _result(one).detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _result(placeholder: LookupResult) -> Tensor:
    return result_of(placeholder.lookup)


_METADATA = frozenset(
    {
        *(
            getattr(_tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta")
        ),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex),
    }
)


class _TablePart(nn.Module):
    """A module with a table. On several ranks its weight is a part, which only Weft reads."""

    _weft_table: Table

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self._weft_table.is_part:
            raise WeightRefused(_refusal(self._weft_table.name))
        return super().__getattr__(name)


class TableEmbedding(_TablePart, nn.Embedding):
    """An nn.Embedding whose table is sharded."""

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        return look_up(self._weft_table, input, _rows_of, (*input.shape, self.embedding_dim))


class KerasTable(_TablePart, KerasEmbedding):
    """The table of a Keras Embedding layer that is sharded."""

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        return look_up(self._weft_table, input, _rows_of, (*input.shape, self.embedding_dim))


def _rows_of(lookup: Lookup) -> Tensor:
    """Return the rows of all ids of a lookup."""
    assert lookup.rows_UD is not None
    return F.embedding(lookup.index, lookup.rows_UD).to(lookup.table.compute)


class TableBag(_TablePart, nn.EmbeddingBag):
    """An nn.EmbeddingBag whose table is sharded."""

    @uncompiled
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        shape = None
        if input.dim() == 2:
            shape = len(input), self.embedding_dim
        elif offsets is not None and offsets.dim() == 1:
            shape = len(offsets) - self.include_last_offset, self.embedding_dim

        # Copies, because the caller may change them before the rows arrive.
        starts = None if offsets is None else offsets.long().clone()
        factors = None if per_sample_weights is None else per_sample_weights.to(self._weft_table.weight.dtype).clone()

        def finish(lookup: Lookup) -> Tensor:
            assert lookup.rows_UD is not None
            pooled = F.embedding_bag(
                lookup.index,
                lookup.rows_UD,
                starts,
                mode=self.mode,
                per_sample_weights=factors,
                include_last_offset=self.include_last_offset,
                padding_idx=self._padding_in(lookup.unique_U),
            )
            return pooled.to(self._weft_table.compute)

        return look_up(self._weft_table, input, finish, shape)

    def _padding_in(self, unique_U: Tensor) -> int | None:
        """Return the position of padding_idx among the unique ids, or None if it is not among them."""
        if self.padding_idx is None or not unique_U.numel():
            return None
        position = (unique_U == self.padding_idx).nonzero().flatten().tolist()
        return position[0] if position else None


def refuse_weight(name: str) -> NoReturn:
    """Raise the error for a forward that uses a table's weight outside its module's lookup."""
    raise ModelError(_refusal(name))


def _refusal(name: str) -> str:
    return (
        f"table {name!r}: code outside its module computes with the weight, of which each rank holds a part. Look rows "
        "up by calling the module, or leave it out of layout."
    )


class WeightRefused(ModelError, AttributeError):
    """Raised if code reads the weight of a sharded table. Python's `hasattr` then returns False."""
