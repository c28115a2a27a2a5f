"""Where a rank is in the parts of a model that tensor parallelism cut, for what draws random numbers there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from weft.comm.mesh import Axis

_PART = "_weft_cut_part"


class ShardPosition:
    """Where this rank is in the cut parts of one model: what draws random numbers there asks for it.

    is_open: it is between a column-cut layer and the row-cut one after it, where it has its own heads or features.
    is_whole: what is drawn for now is cut in neither way, wherever it is. sequences: how many the
    microbatch has, where tokens are cut; what a model flattens to (batch * tokens, features) no longer says it.
    """

    def __init__(self, axis: Axis):
        self.axis = axis
        self.is_open = self.is_whole = False
        self.sequences = 0
        self.token_paths: tuple[str, ...] = ()  # modules in which each rank has its part of the tokens
        self.whole_paths: tuple[str, ...] = ()  # modules there, or in a cut part, that get all tokens and features

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardPosition:
        return self  # a copy of the module runs on the same ranks

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @contextmanager
    def at(self, *, is_open: bool, is_whole: bool = False) -> Iterator[None]:
        """Let this rank stand elsewhere in the cut part, such as in front of a layer again."""
        before = self.is_open, self.is_whole
        self.is_open, self.is_whole = is_open, is_whole
        try:
            yield
        finally:
            self.is_open, self.is_whole = before

    def sees_sharded_tokens(self, path: str) -> bool:
        """Return whether the module of that path is given this rank's part of the tokens."""
        return _is_in(path, self.token_paths) and not self.sees_all(path)

    def sees_all(self, path: str) -> bool:
        """Return whether the module of that path is given what one process would give it, wherever it stands."""
        return _is_in(path, self.whole_paths)


def _is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


def keep_part(model: nn.Module, part: ShardPosition) -> None:
    """Leave it on the model, for `shard_position_of`."""
    setattr(model, _PART, part)


def shard_position_of(model: nn.Module) -> ShardPosition | None:
    """Return what tensor parallelism left on this model; None where nothing was cut."""
    return getattr(model, _PART, None)


# Which modules drop in training.

#: What modules call the share that they drop by functions.
_RATES = (
    "attention_dropout", "attn_dropout", "dropout", "attn_pdrop", "attention_probs_dropout_prob", "resid_dropout",
    "hidden_dropout",
)  # fmt: skip


def _is_dropout(module: nn.Module) -> TypeGuard[nn.Dropout]:
    return type(module).forward is nn.Dropout.forward


def drops_itself(module: nn.Module) -> bool:
    """Return whether a module is nn.Dropout, names a rate, or is attention with a dropout for it."""
    if _is_dropout(module):
        return module.p > 0
    kind = type(module).__name__.lower()
    for name in _RATES:
        value: Any = getattr(module, name, None)
        if isinstance(value, float) and value > 0:
            return True
        if isinstance(value, nn.Dropout) and value.p > 0 and ("attention" in kind or "attn" in kind):
            return True
    return False


# Random numbers that follow positions: what is drawn for an element depends on its place in the whole, on no rank.

#: Odd constants; those above 2^63 and 2^31 as the negative numbers that torch takes for them.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_FIRST_32, _SECOND_32 = 0x7FEB352D, 0x846CA68B - 2**32


def key_of(*parts: int | str) -> int:
    """Return a key from numbers and names, the same on every machine."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def lines_of(key: int | Tensor, places: Sequence[Tensor]) -> Tensor:
    """Return a number for each combination of places, int32 of shape (len(places[0]), len(places[1]), ...).

    key: a number, or the same as an int64 tensor without dims. places: int64 vectors on one device, at least one where
    the key is a number.
    """
    mixed = key if isinstance(key, Tensor) else torch.full((), key, dtype=torch.int64, device=places[0].device)
    for dim in places:
        mixed = _mix(mixed[..., None] + (dim + 1) * _STEP)
    return mixed.to(torch.int32)


def keeps(lines: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return which elements stay when each goes with probability `rate`; bool, of the two shapes together.

    Args:
        lines: of `lines_of` for all dims but the last, with a last dim of 1.
        columns: of `lines_of` for the last one.
        rate: 0 to 1.
    """
    return _hash(lines ^ columns) >= round(rate * 2**32) - 2**31


def integers_at(key: Tensor, places: Sequence[Tensor], bits: int) -> Tensor:
    """Draw an integer below 2^bits for each combination of positions, int64 of shape (len(places[0]), ...).

    Args:
        key: int64, 0-d.
        places: int64, 1-D, one for each dim.
        bits: 1 to 62.
    """
    high, low = (_words(mixed, places) for mixed in (key, key ^ _STEP))
    return ((high << 30) ^ (low >> 2)) >> (62 - bits)


def _words(key: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Draw 32 bits for each combination of positions, int64 of at least 0."""
    if not places:
        return _hash(lines_of(key, ())).long() + 2**31
    lines, columns = lines_of(key, places[:-1])[..., None], lines_of(~key, places[-1:])
    return _hash(lines ^ columns).long() + 2**31


def _hash(x: Tensor) -> Tensor:
    """Apply two rounds of multiply and shift to `x` (int32), and return it."""
    x.mul_(_FIRST_32)
    x.bitwise_xor_((x >> 15).bitwise_and_((1 << 17) - 1))
    x.mul_(_SECOND_32)
    return x


def keep_mask_at(key: Tensor, places: Sequence[Tensor], rate: float) -> Tensor:
    """Draw what `keeps` says of elements at all combinations of places: lines by the key, columns by its complement.

    Shape: (len(places[0]), len(places[1]), ...). One operator where it is compiled: generated code takes places for
    index arithmetic, which is not done in 64 bits, and would draw other numbers.

    Args:
        key: int64, 0-d.
        places: int64, 1-D, one for each dim.
        rate: 0 to 1.
    """
    if torch.compiler.is_compiling():
        return kept(key, places, rate)
    return keeps(lines_of(key, places[:-1])[..., None], lines_of(~key, places[-1:]), rate)


@torch.library.custom_op("weft::kept", mutates_args=(), schema="(Tensor key, Tensor[] places, float rate) -> Tensor")
def kept(key: Tensor, places: Sequence[Tensor], rate: float) -> Tensor:
    """`keep_mask_at` as an operator of torch."""
    return keep_mask_at(key, places, rate)


@kept.register_fake
def _keep_mask_shape(key: Tensor, places: Sequence[Tensor], rate: float) -> Tensor:
    del rate
    return torch.empty([len(one) for one in places], dtype=torch.bool, device=key.device)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# Which samples of the global batch a microbatch holds: what random numbers follow, whoever has the samples.

#: A row of a sample is so far from the next: row 0 has the sample's own number.
_ROW = 2**32


@dataclass(frozen=True, slots=True)
class SampleNumbers:
    """Which samples of the global batch a microbatch holds.

    numbers: of the samples in the global batch, in their order; empty where the microbatch stands in for one without
    samples. rows: how many rows each sample has in tensors whose rows are no samples, one tuple for each such tensor.
    total: how many samples the global batch has; None where nobody said.
    """

    numbers: Sequence[int]
    rows: Sequence[Sequence[int]] = ()
    total: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the rank has none here: the microbatch that it runs counts for nothing."""
        return not self.numbers

    def places(self, count: int, device: torch.device) -> Tensor:
        """Number the rows of a tensor with `count` of them, int64 (count,): the same however batches are cut.

        Rows are samples where there are as many; else those that each sample brought, or as many of every sample.
        A row's number is that of its sample and its place within it.
        """
        numbers = self.numbers
        if count == len(numbers):
            if isinstance(numbers, range):
                return torch.arange(numbers.start, numbers.stop, numbers.step, device=device)
            return torch.tensor(numbers, device=device)
        per_sample = self.rows_of_each(count)
        if per_sample is None:
            first = numbers[0] if numbers else 0
            return torch.arange(first, first + count, device=device)
        rows = ((n + _ROW * row for row in range(many)) for n, many in zip(numbers, per_sample, strict=True))
        return torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64, device=device)

    def rows_of_each(self, count: int) -> list[int] | None:
        """Return how many of a tensor's `count` rows each sample has; None where that cannot be told.

        Layers may have joined rows or divided them evenly.
        """
        if not self.numbers or not count:
            return None
        if count == len(self.numbers):
            return [1] * count
        scaled = [rows for rows in self.rows if sum(rows) and all(many * count % sum(rows) == 0 for many in rows)]
        for rows in scaled:
            if count <= sum(rows):
                return [many * count // sum(rows) for many in rows]
        size, rest = divmod(count, len(self.numbers))
        if not rest:
            return [size] * len(self.numbers)
        return [many * count // sum(scaled[0]) for many in scaled[0]] if scaled else None


def rows_of_samples(numbers: Tensor, count: int) -> Tensor:
    """Return `SampleNumbers.places` of samples without rows of their own, from their numbers; for compiled code."""
    size, rest = divmod(count, len(numbers))
    if rest:
        return numbers[0] + torch.arange(count, device=numbers.device)
    if size == 1:
        return numbers
    return (numbers[:, None] + torch.arange(size, device=numbers.device) * _ROW).flatten()
