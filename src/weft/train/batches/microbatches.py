"""The default call of a model on a batch, and the split of a batch into microbatches.

A batch is inputs followed by targets. From a sequence of tensors (torch's DataLoader on samples `(x, y)`), the model
gets as many as its forward requires, at least one. From a dict, it gets the entries that are parameters of its forward;
`labels` only if forward requires them, because the loss is computed outside the model, once for all ranks. If the
inputs are ambiguous, the user must pass `forward=`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.config import partitioning as shares
from weft.config.plan import PLAN_FIELDS, Plan
from weft.data.batches import move_batch, parts_of, tensors_in, with_parts
from weft.data.order.stream import rows_of
from weft.errors import ModelError, nearest_name
from weft.models.inspect.blocks import class_name
from weft.parallel.dropout.drop_state import MARK, marked_samples
from weft.parallel.random.streams import SampleNumbers

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
#: (model, batch) -> output.
ForwardFn = Callable[[nn.Module, Any], Any]
#: The key that only the loss function gets.
LABELS = "labels"


def call_model(model: nn.Module, batch: Any) -> Any:
    """Return the model's output: model(x) for x, (x, y) and [x, y]; a dict's entries are passed by keyword.

    If forward requires more than one input, it gets that many entries of a tuple or list. `labels` of a dict are passed
    only if forward requires them.

    Raises:
        ModelError: if the inputs are ambiguous.
    """
    if isinstance(batch, torch.Tensor):
        return model(*_first_inputs(model, (batch,)))
    if isinstance(batch, Mapping):
        return model(**_named_inputs(model, batch))
    if isinstance(batch, tuple | list) and batch:
        return model(*_first_inputs(model, batch))
    raise ModelError(
        f"batch of type {type(batch).__name__}: a batch is a tensor, or a tuple, list or dict of tensors. "
        f"Give forward=lambda model, batch: model(...) for anything else."
    )


def _first_inputs(model: nn.Module, batch: Sequence[Any]) -> Sequence[Any]:
    if len(batch) > 1 and all(isinstance(entry, Mapping | tuple | list) for entry in batch):
        raise ModelError(
            f"batch: a {type(batch).__name__} of {len(batch)} {type(batch[0]).__name__}s, and a batch is a tensor, or "
            "a tuple, list or dict of tensors. Stack the samples in the loader's collate_fn, pass microbatches as "
            "weft.Microbatches([...]), or pass forward=lambda model, batch: model(...)."
        )
    params = _parameters(model)
    if params is None:
        return batch[:1]
    needed = [param for param in params if param.kind in _POSITIONAL and param.default is param.empty]
    takes_more = any(param.kind is param.VAR_POSITIONAL for param in params) or any(
        param.kind in _POSITIONAL and param.default is not param.empty for param in params
    )
    number = max(len(needed), 1)
    # One remaining entry is the target. If forward accepts more inputs, several remaining entries are ambiguous.
    if len(batch) < number or (takes_more and len(batch) > number + 1):
        _refuse_row(model, params, batch)
    inputs = batch[:number]
    if not needed or number > 1:
        for entry in inputs:
            if not isinstance(entry, torch.Tensor):
                _refuse_row(model, params, batch)
    return inputs


def _named_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    params = _parameters(model)
    given = {name: value for name, value in batch.items() if name != LABELS}
    if params is None:
        return given
    known = {param.name: param for param in params if param.kind in _NAMED}
    needed = {name for name, param in known.items() if param.default is param.empty}
    if LABELS in needed and LABELS in batch:
        given[LABELS] = batch[LABELS]
    missing = sorted(needed - given.keys())
    if any(param.kind is param.VAR_KEYWORD for param in params) and not missing:
        return given
    # An entry that is not a parameter of forward is a target, unless it is probably a misspelled parameter.
    free = known.keys() - given.keys() - {LABELS}
    if missing or any(nearest_name(name, free) for name in given.keys() - known.keys()):
        names = ", ".join(name for name in known if name != LABELS or name in needed)
        _refuse(model, names, f"the batch has {', '.join(map(str, batch))}", _keywords(known, batch))
    return {name: value for name, value in given.items() if name in known}


def _parameters(model: nn.Module) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(getattr(model, "_orig_mod", model).forward).parameters.values())
    except (TypeError, ValueError):
        return None


def _refuse_row(model: nn.Module, params: list[inspect.Parameter], batch: Sequence[Any]) -> NoReturn:
    names = ", ".join(f"*{param.name}" if param.kind is param.VAR_POSITIONAL else param.name for param in params)
    inputs = ", ".join(f"batch[{index}]" for index in range(len(batch) - 1)) or "..."
    _refuse(
        model,
        names,
        "the batch is " + ("one tensor" if len(batch) == 1 else f"a {type(batch).__name__} of {len(batch)}"),
        inputs,
    )


def _refuse(model: nn.Module, names: str, found: str, inputs: str) -> NoReturn:
    raise ModelError(
        f"batch: {class_name(model)}.forward takes ({names}), and {found}, so it is unclear which are inputs. "
        f"Pass train_step(..., forward=lambda model, batch: model({inputs}))."
    )


def _keywords(known: Iterable[str], batch: Mapping[str, Any]) -> str:
    names = [str(name) for name in batch if name != LABELS]
    pairs = [(name if name in known else nearest_name(name, known), name) for name in names]
    return ", ".join(f'{ours}=batch["{name}"]' for ours, name in pairs if ours) or f'batch["{(names or [LABELS])[0]}"]'


# A batch and its microbatches: split by samples and then collated, or split along dim 0 if each row is a sample.


class DataRank(Protocol):
    """Position `rank` of this rank among the `size` ranks that read different samples."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class Microbatches:
    """A batch that is already split into the plan's microbatches: `step(Microbatches([first, second]))`.

    A plain list is one batch, because that is what torch's DataLoader returns.

    Args:
        batches: the microbatches, each in the model's format.
        samples: for each microbatch, the indices of its samples in the global batch, from 0 over all ranks. Random
            numbers derive from them. None uses the indices that are attached to the batches (see `mark`), or else
            assumes that ranks and microbatches have equal sizes. A microbatch with an empty list is a placeholder: it
            runs because all ranks must run the same number of microbatches, but is not counted.
        rows: row indices of each sample in tensors whose rows are not samples; None if there are no such tensors. Used
            only with `samples`.
        total: samples in the global batch. Used only with `samples`.
        any_number: accept another number of microbatches than the plan's, except in a pipeline, because the ranks
            agreed on it.
        records: if samples are units of privacy, the number of records of each, by microbatch.

    Raises:
        ModelError: if `batches`, `samples` and `rows` differ in length.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        samples: Iterable[Sequence[int]] | None = None,
        rows: Iterable[Sequence[Sequence[int]]] | None = None,
        total: int | None = None,
        *,
        any_number: bool = False,
        records: Sequence[Sequence[int]] | None = None,
    ):
        self._batches, self.any_number = tuple(batches), any_number
        self._samples = _all_marked(self._batches)
        if samples is not None:
            numbers = [one if isinstance(one, range) else tuple(map(int, one)) for one in samples]
            counts = [()] * len(numbers) if rows is None else list(rows)
            if not len(numbers) == len(counts) == len(self._batches):
                raise ModelError(
                    f"samples: sample numbers of {len(numbers)} microbatches were passed for {len(self._batches)} "
                    "microbatches. Pass one list for each, an empty one for a microbatch without samples."
                )
            units = [()] * len(numbers) if records is None else list(records)
            every = zip(numbers, counts, units, strict=True)
            self._samples = tuple(SampleNumbers(number, some, total, unit) for number, some, unit in every)

    @classmethod
    def of_samples(
        cls,
        sample_at: Callable[[int], Any],
        own: Sequence[Sequence[int]],
        collate: Callable[[list[Any]], Any],
        total: int | None = None,
    ) -> Microbatches:
        """Return a rank's microbatches, each made of its samples.

        Args:
            sample_at: function that returns a sample by its index in the global batch.
            own: sample indices of each microbatch, from `weft.config.partitioning.microbatch_samples`. Empty
                microbatches come last. They are made from one sample, as placeholders.
            collate: function that makes a batch from a list of samples.
            total: samples in the global batch.
        """
        parts = [[sample_at(number) for number in part or _stand_in(own)] for part in own]
        return cls([collate(part) for part in parts], own, [rows_of(part) for part in parts], total)

    @classmethod
    def of_rows(cls, batch: Any, plan: Plan, dp_rank: int) -> Microbatches:
        """Return a rank's microbatches of a global batch whose tensors have one row per sample.

        Args:
            batch: tensors of shape (samples, ...), nested in dicts, lists and tuples.
            plan: defines the number of microbatches per rank and of ranks that share the batch.
            dp_rank: this rank's index on the data-parallel axes.

        Raises:
            ModelError: if a tensor does not have one row per sample, or the batch contains an object of another type
                than tensors, containers, numbers and text.
        """
        count = samples_in(batch)
        own = shares.microbatch_samples(count, plan.dp_size, plan.microbatches_per_step, dp_rank, plan.shares)
        runs = [part or own[0][:1] or range(1) for part in own]
        return cls(_Splitting(runs, count, f"plan={plan.format()}").split(batch, "batch"), own, total=count)

    @property
    def samples(self) -> tuple[SampleNumbers, ...] | None:
        """The sample indices of each microbatch, or None if unknown."""
        return self._samples

    def to(self, device: torch.device) -> Microbatches:
        """Return the microbatches on `device`."""
        return self.map(lambda batch: move_batch(batch, device))

    def map(self, change: Callable[[Any], Any]) -> Microbatches:
        """Return microbatches of the same samples, with `change` applied to each batch."""
        changed = copy.copy(self)
        changed._batches = tuple(map(change, self._batches))
        return changed

    def marked(self) -> list[Any]:
        """Return the microbatches as a list, with the sample indices attached to each, for the step."""
        return [batch if samples is None else mark(batch, samples)
                for batch, samples in zip(self._batches, self._samples or [None] * len(self), strict=True)]  # fmt: skip

    def counted(self) -> Iterator[tuple[Any, bool]]:
        """Yield each microbatch, and True if it counts, False for a placeholder without samples."""
        for index, batch in enumerate(self._batches):
            yield batch, self._samples is None or not self._samples[index].is_empty

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        if self._samples is not None and any(one.is_empty for one in self._samples):
            raise ModelError(
                "batch: this rank has no sample for one microbatch, so a substitute is used, and only "
                "run.train_step leaves it out of the sums. In your own loop use drop_last=True, and a batch_size of "
                "at least one sample for each rank and microbatch."
            )
        return iter(self._batches)

    def __getitem__(self, index: int) -> Any:
        if isinstance(index, str):
            raise ModelError(
                f"batch[{index!r}]: with accumulation or a pipeline run.shard returns a batch of microbatches. Pass "
                "it to step(batch) unchanged, or iterate over it: for microbatch in batch."
            )
        return self._batches[index]


def _stand_in(own: Sequence[Sequence[int]]) -> Sequence[int]:
    return own[0][:1] or range(1)


def from_loader(
    batches: list[Any],
    numbers: Sequence[Sequence[int]],
    rows: list[Sequence[Sequence[int]]],
    *,
    is_plain: bool,
    total: int,
) -> Any:
    """Return the result of `run.shard`: `Microbatches`, or a plain batch with its sample indices attached.

    Args:
        batches: one batch per microbatch.
        numbers: for each batch, the indices of its samples in the global batch.
        rows: row indices of each sample in tensors whose rows are not samples.
        is_plain: return the only microbatch as a plain batch.
        total: samples in the global batch.
    """
    if not is_plain:
        return Microbatches(batches, numbers, rows, total)
    return mark(batches[0], SampleNumbers(numbers[0], rows[0], total))


def mark(batch: Any, samples: SampleNumbers) -> Any:
    """Add sample indices to the tensors of a batch, and return the batch."""
    for tensor in tensors_in(batch):
        setattr(tensor, MARK, samples)
    return batch


def _all_marked(batches: Sequence[Any]) -> tuple[SampleNumbers, ...] | None:
    """Return the attached sample indices of batches, or None unless all have them and no sample is in two batches."""
    marks = [marked_samples(batch) for batch in batches]
    known = tuple(found for found in marks if found is not None)
    numbers = [number for found in known for number in found.numbers]
    return known if len(known) == len(marks) and len(set(numbers)) == len(numbers) else None


class BatchSplit:
    """Splits each step's batch into this rank's microbatches."""

    def __init__(self, mesh: Mesh):
        self._mesh, self._plan, self._readers = mesh.replica, mesh.plan, mesh.reader
        self._count = mesh.plan.microbatches_per_step

    def __call__(self, batch: Any) -> tuple[list[Any], list[SampleNumbers]]:
        """Return a batch's microbatches on the device, and the sample indices of each.

        Raises:
            ModelError: if their number is not the plan's, or the batch cannot be split.
        """
        moved = move_batch(batch, self._mesh.device)
        if isinstance(moved, Microbatches) and len(moved) == self._count:
            microbatches = [one for one, _ in moved.counted()]
        else:
            microbatches = microbatches_of(moved, self._plan)
        if self._plan.shares and not isinstance(batch, Microbatches) and marked_samples(batch) is None:
            written = PLAN_FIELDS["shares"].kind.write(self._plan.shares)
            raise ModelError(
                f"shares={written}: the samples of this batch are unknown, and ranks have unequal parts. Pass the "
                "DataLoader through run.shard, and its batches to the step unchanged."
            )
        return microbatches, samples_of(batch, len(microbatches), self._readers)


def microbatches_of(batch: Any, plan: Plan) -> list[Any]:
    """Return the microbatches of a batch, which a step passes through the model one by one.

    Raises:
        ModelError: if `Microbatches` have another number than the plan without `any_number`, or if another batch cannot
            be split.
    """
    expected = plan.microbatches_per_step
    if not isinstance(batch, Microbatches):
        return split_batch(batch, expected, plan)
    if len(batch) != expected and not (batch.any_number and plan.pp == 1):
        field = "microbatches" if plan.pp > 1 else "accumulation"
        raise ModelError(
            f"{field}={expected}: a step has that many microbatches, and got {len(batch)}. Give {expected}."
        )
    return [one for one, _ in batch.counted()]


def samples_of(batch: Any, num_microbatches: int, data: DataRank) -> list[SampleNumbers]:
    """Return the sample indices of each microbatch of a step's input, before it is moved to the device.

    A plain batch is this rank's range of the global batch. `Microbatches` without indices are assumed to have equal
    sizes.

    Args:
        batch: the input of the step.
        num_microbatches: number of microbatches that a plain batch is split into.
        data: position of this rank among the ranks that read different samples.
    """
    if isinstance(batch, Microbatches):
        if batch.samples is not None:
            return list(batch.samples)
        count = samples_in(batch[0]) * data.size * len(batch)
        return list(_equal_samples(count, data.size, len(batch), data.rank))
    found = marked_samples(batch)
    if num_microbatches == 1 and found is not None:
        return [found]
    size = samples_in(batch)
    if found is None:
        found = SampleNumbers(range(data.rank * size, (data.rank + 1) * size), total=size * data.size)
    parts = shares.share_out(len(found.numbers), num_microbatches)
    return [SampleNumbers(found.numbers[part.start : part.stop], total=found.total) for part in parts]


@functools.lru_cache(maxsize=16)
def _equal_samples(count: int, num_ranks: int, num_microbatches: int, rank: int) -> tuple[SampleNumbers, ...]:
    runs = shares.microbatch_samples(count, num_ranks, num_microbatches, rank)
    return tuple(SampleNumbers(run, total=count) for run in runs)


def split_batch(batch: Any, num_parts: int, plan: Plan | None = None) -> list[Any]:
    """Split a batch into equal parts along dim 0 of its tensors, each of which has one row per sample.

    A list without tensors that has one entry per sample is split too. Numbers, text, None and 0-d tensors are put into
    every part. If `num_parts` is 1, the batch is returned as it is. `plan` is for error messages.

    Raises:
        ModelError: if rows are not samples, or the parts would not be equal.
    """
    if num_parts == 1:
        return [batch]
    field = f"{'microbatches' if plan is not None and plan.pp > 1 else 'accumulation'}={num_parts}"
    count = samples_in(batch)
    parts = _Splitting(shares.share_out(count, num_parts), count, field).split(batch, "batch")
    if count % num_parts:
        raise ModelError(
            f"{field}: the batch has {count} samples on this rank, which is not a multiple of {num_parts}. "
            f"Use a batch that is, or another accumulation."
        )
    return parts


def samples_in(batch: Any) -> int:
    """Return the number of samples of a batch: the size of dim 0 of its first tensor that is not 0-d, or 1."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim), 1)


def microbatch_size(batch: Any, num_microbatches: int) -> tuple[int, int]:
    """Return the number of samples in a step's first microbatch, and the number of elements of its first tensor.

    Both are 0 if the batch has no tensor with rows.
    """
    is_cut = isinstance(batch, Microbatches)
    first = next((tensor for tensor in tensors_in(batch[0] if is_cut else batch) if tensor.ndim), None)
    if first is None:
        return 0, 0
    parts = 1 if is_cut else num_microbatches
    return first.shape[0] // parts, first.numel() // parts


def split_rows(batch: Any, runs: Sequence[range]) -> list[Any]:
    """Divide a batch whose rows are samples.

    Args:
        runs: range of the samples of each part, from 0.

    Raises:
        ModelError: if the batch cannot be divided by rows.
    """
    return _Splitting(runs, samples_in(batch), "batch").split(batch, "batch")


class _Splitting:
    """Splits one batch of `num_samples` samples."""

    def __init__(self, runs: Sequence[range], num_samples: int, field: str):
        self._runs, self._num_samples, self._field = runs, num_samples, field

    def split(self, batch: Any, name: str) -> list[Any]:
        """Return the parts of a batch, or of the nested value at path `name` in it."""
        if isinstance(batch, torch.Tensor):
            return self._split_tensor(batch, name)
        parts = parts_of(batch)
        if parts is None:
            if batch is None or isinstance(batch, bool | int | float | str | bytes):
                return [batch] * len(self._runs)
            raise ModelError(
                f"{self._field}: the batch holds a {type(batch).__name__}, which Weft cannot divide into "
                "microbatches. Pass step(weft.Microbatches([...])), or use accumulation=1."
            )
        is_column = isinstance(batch, tuple | list) and len(batch) == self._num_samples
        if is_column and next(tensors_in(batch), None) is None:
            return [batch[run.start : run.stop] for run in self._runs]
        columns = [self.split(part, inner) for part, inner in zip(parts, _names_in(batch, name), strict=True)]
        return [with_parts(batch, [column[index] for column in columns]) for index in range(len(self._runs))]

    def _split_tensor(self, tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
        if not tensor.ndim:
            return [tensor] * len(self._runs)
        if tensor.shape[0] != self._num_samples:
            raise ModelError(
                f"{self._field}: {name} has shape {tuple(tensor.shape)} in a batch of {self._num_samples} samples, "
                "so its rows are not samples and cannot be divided into microbatches. Pass the DataLoader through "
                "run.shard, which divides samples before they are collated, or pass weft.Microbatches([...]) to the "
                "step."
            )
        return [tensor[run.start : run.stop] for run in self._runs]


def _names_in(batch: Any, name: str) -> list[str]:
    if isinstance(batch, Mapping):
        return [f"{name}[{key!r}]" for key in batch]
    if is_dataclass(batch):
        return [f"{name}.{field.name}" for field in fields(batch)]
    return [f"{name}[{index}]" for index in range(len(batch))]
