"""Lookups of sharded tables: unique ids are sent to the ranks that hold their rows, which return the rows.

In a train step a lookup returns a placeholder. Rows are fetched when an operation first uses a placeholder, for all
lookups that wait then. They are a leaf of autograd, so backward communicates nothing. Lookups that are fetched together
are gathered and pooled together. Letters as in `table.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from weft.data.batches import host_values
from weft.errors import ModelError
from weft.models.keras_model import KerasEmbedding
from weft.parallel.private_torch import plain_call, without_memory
from weft.parallel.tables.requests import joined_blocks, request_local, request_rows
from weft.parallel.tables.row_sums import gather_rows
from weft.parallel.tables.table import Bags, Lookup, LookupQueue, Table, TableCall, TableRequest
from weft.private_torch import split, tree_map_only, uncompiled, version_of

_tensor: Any = Tensor
_INTEGERS = (torch.int64, torch.int32)


def look_up(
    table: Table,
    inputs: tuple[Tensor | None, ...],
    ids_of: Callable[..., Tensor],
    shape: tuple[int, ...],
    ids: Tensor | None = None,
    bags: Bags | None = None,
) -> Tensor:
    """Return the result of a lookup, or a placeholder in a train step. All ranks call it unless the style is replicate.

    Args:
        inputs: tensors that determine the ids.
        ids_of: returns the ids of such tensors.
        shape: shape of the result.
        ids: the ids, which the caller does not change later; None to call `ids_of`.
        bags: how rows are pooled, or None for one row per id.

    Raises:
        ModelError: for an id out of range, or a lookup with gradients outside a train step.
        CommError: if another rank has an id out of range.
    """
    queue, trains = table.queue, torch.is_grad_enabled()
    if trains and not queue.is_open:
        raise ModelError(
            f"table {table.name!r}: its gradients are exchanged by run.train_step, and this forward is not in a step. "
            "Use run.train_step to train, run.evaluate to evaluate, or torch.no_grad()."
        )
    lookup = Lookup(table, ids_of(*inputs) if ids is None else ids, shape, bags, trains, inputs, ids_of)
    if table.dim is None:
        _arrive(*request_local(lookup))
        return result_of(lookup)
    queue.waiting.append(lookup)
    if not trains:
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
    try:
        found, most = _prefetched(queue) or request_rows(queue.waiting)
    except BaseException:
        queue.waiting.clear()  # else the next lookup would fail too
        raise
    if queue.is_open and queue.prefetches and not queue.first:
        queue.first = queue.waiting[: sum(len(request.lookups) for request, _ in found)]
    if any(request.trains for request, _ in found):
        queue.most += most
    for request, call in found:
        _arrive(request, call)
    queue.waiting = [one for one in queue.waiting if one.result is None]


def fetch_rest(queue: LookupQueue) -> None:
    """Fetch the rows of all waiting lookups. All ranks call it."""
    while queue.waiting:
        fetch_waiting(queue)


def _prefetched(queue: LookupQueue) -> tuple[list[tuple[TableRequest, TableCall]], int] | None:
    """Return the result of `request_rows` if the rows were prefetched. All ranks call it."""
    if queue.prefetch is None:
        return None
    prefetch, queue.prefetch = queue.prefetch, None
    found = prefetch.calls(queue.waiting)
    return None if found is None else (found, prefetch.most)


def _arrive(request: TableRequest, call: TableCall) -> None:
    """Set the results of the lookups of a request."""
    lookups, leaf = request.lookups, call.leaf
    assert leaf is not None
    if request.trains:
        leaf.requires_grad_()
        request.table.calls.append(call)
    parts = split(request.index, [len(one.ids) for one in lookups])
    for lookup, part in zip(lookups, parts, strict=True):
        lookup.rows_UD, lookup.index = leaf, part
    with torch.set_grad_enabled(request.trains), _without_hooks(request.table.name):
        results = _results(lookups)
    for lookup, result in zip(lookups, results, strict=True):
        lookup.result = result if lookup.trains else result.detach()


def _results(lookups: Sequence[Lookup]) -> list[Tensor]:
    """Return the modules' results of lookups that were fetched together."""
    groups: dict[object, list[int]] = {}
    for place, one in enumerate(lookups):
        key = None if one.bag is None else (one.bag.mode, one.bag.weights is None)
        groups.setdefault(key, []).append(place)
    found: dict[int, Tensor] = {}
    for places in groups.values():
        some = [lookups[place] for place in places]
        joint = _gathered(some) if some[0].bag is None else _pooled(some)
        sizes = [len(one.ids) if one.bag is None else len(one.bag.starts) for one in some]
        # Unlike those of split, these parts may be changed in place.
        parts = torch.unsafe_split_with_sizes(joint.to(some[0].table.compute), sizes)
        for place, one, part in zip(places, some, parts, strict=True):
            found[place] = part.view(one.shape)
    return [found[place] for place in range(len(lookups))]


def _joint_index(lookups: Sequence[Lookup]) -> Tensor:
    return joined_blocks([one.index for one in lookups if one.index is not None])


def _gathered(lookups: Sequence[Lookup]) -> Tensor:
    """Return the rows of all ids of lookups, (n, D)."""
    rows_UD = lookups[0].rows_UD
    assert rows_UD is not None
    return gather_rows(rows_UD, _joint_index(lookups))


def _pooled(lookups: Sequence[Lookup]) -> Tensor:
    """Return the bags of lookups of one mode, (B, D)."""
    rows_UD, bags = lookups[0].rows_UD, [one.bag for one in lookups if one.bag is not None]
    assert rows_UD is not None
    before = accumulate((len(one.ids) for one in lookups), initial=0)
    starts = torch.cat([one.starts + number for one, number in zip(bags, before, strict=False)])
    weights = [one.weights for one in bags if one.weights is not None]
    factors = torch.cat(weights) if weights else None
    return F.embedding_bag(_joint_index(lookups), rows_UD, starts, mode=bags[0].mode, per_sample_weights=factors)


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
        fetch_rest(queue)  # results that nothing used still count as read
        for lookup in queue.deferred:
            _add_gradient(lookup)
    finally:
        queue.is_open, queue.waiting, queue.deferred, queue.first, queue.prefetch = False, [], [], [], None


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
            result = _results([lookup])[0]
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

    def _ids_of(self, input: Tensor) -> Tensor:
        """Return ids of any shape as a new int64 tensor, (n,), because the caller may change them."""
        if input.dtype not in _INTEGERS:
            raise ModelError(
                f"table {self._weft_table.name.rpartition('.')[0]!r}: its ids are "
                f"{str(input.dtype).removeprefix('torch.')}, and ids are int64 or int32. Convert them by ids.long()."
            )
        return input.detach().reshape(-1).to(torch.int64, copy=True)


class TableEmbedding(_TablePart, nn.Embedding):
    """An nn.Embedding whose table is sharded."""

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        return look_up(self._weft_table, (input,), self._ids_of, (*input.shape, self.embedding_dim))


class KerasTable(_TablePart, KerasEmbedding):
    """The table of a Keras Embedding layer that is sharded."""

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        return look_up(self._weft_table, (input,), self._ids_of, (*input.shape, self.embedding_dim))


class TableBag(_TablePart, nn.EmbeddingBag):
    """An nn.EmbeddingBag whose table is sharded."""

    @uncompiled
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if not self._are_bags(input, offsets, per_sample_weights):
            # torch names the problem, before it reads a row.
            return F.embedding_bag(
                input, self._weft_table.weight, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
                include_last_offset=self.include_last_offset,
            )  # fmt: skip
        ids, bags = self._bags(input, offsets, per_sample_weights)
        inputs = input, offsets
        return look_up(self._weft_table, inputs, self._ids_in_bags, (len(bags.starts), self.embedding_dim), ids, bags)

    def _ids_in_bags(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        """Return the ids that count, (n,)."""
        if not self._are_bags(input, offsets, None):
            raise ModelError(f"table {self._weft_table.name!r}: its ids and offsets do not form bags.")
        return self._bags(input, offsets, None)[0]

    def _are_bags(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> bool:
        if weights is not None and (weights.shape != input.shape or self.mode != "sum"):
            return False
        if offsets is None:
            return input.dim() == 2
        if input.dim() != 1 or offsets.dim() != 1 or not len(offsets) or offsets.dtype not in _INTEGERS:
            return False
        known = host_values(offsets)
        ends = offsets if known is None else known  # on the host, the check does not wait for the device
        if not bool((ends[0] == 0) & (ends[-1] <= len(input)) & (ends.diff() >= 0).all()):
            # Bags of several lookups are pooled together, where torch would read rows of other lookups.
            raise ModelError(
                f"table {self._weft_table.name.rpartition('.')[0]!r}: its offsets do not rise from 0 to at most the "
                f"number of ids, {len(input)}. Give the position at which each bag starts, in order."
            )
        return True

    def _bags(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Bags]:
        """Return the ids that count, (n,), and their bags, without those at padding_idx and behind the last bag."""
        device, depends = ids.device, self.padding_idx is not None or self.include_last_offset
        known = [None if one is None else host_values(one) for one in (ids, offsets)]
        if depends and known[0] is not None and (offsets is None or known[1] is not None):
            ids, offsets = known[0], known[1]  # on the host, sizes that depend on values do not wait for the device
        if offsets is None:
            starts = torch.arange(len(ids), device=ids.device) * ids.shape[1]
        else:
            starts = offsets.detach().long().clone()  # the caller may change it before the rows arrive
        weights = None if weights is None else weights.reshape(-1).to(self._weft_table.weight.dtype)
        ids = self._ids_of(ids)
        if offsets is not None and self.include_last_offset:
            starts, last = starts[:-1], int(starts[-1])
            ids, weights = ids[:last], weights if weights is None else weights[:last]
        if self.padding_idx is not None:
            counts = ids != self.padding_idx
            starts = F.pad(counts.cumsum(0), (1, 0))[starts]
            ids, weights = ids[counts], weights if weights is None else weights[counts]
        return ids.to(device), Bags(starts.to(device), self.mode, weights if weights is None else weights.clone())


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
