"""Random numbers as functions of position, and this rank's position in sharded layers and in the global batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.mesh import Axis

_PART = "_weft_cut_part"


class ShardPosition:
    """Which part of the current tensor this rank has in a model's sharded layers, for random numbers by position.

    `is_open` is True between a column-sharded layer and the following row-sharded one: the rank then has only its heads
    or features. `is_whole` is True if the current tensor has all tokens, although the module's tokens are sharded.
    `sequences` is the number of sequences in the microbatch if tokens are sharded, else 0: a tensor that is flattened
    to (batch * tokens, features) does not show it. `padding` is the number of tokens added to each sequence so that it
    divides evenly.
    """

    def __init__(self, axis: Axis):
        self.axis = axis
        self.is_open = self.is_whole = False
        self.sequences = self.padding = 0
        self.token_paths: tuple[str, ...] = ()  # modules in which each rank has only its tokens
        self.whole_paths: tuple[str, ...] = ()  # modules there, or in a sharded part, that get all tokens and features
        self.full_paths: tuple[str, ...] = ()  # modules in `token_paths` that get all tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardPosition:
        return self  # a copy of the module runs on the same ranks

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @contextmanager
    def at(self, *, is_open: bool, is_whole: bool = False) -> Iterator[None]:
        """Set `is_open` and `is_whole` within the context, and restore them at its end."""
        before = self.is_open, self.is_whole
        self.is_open, self.is_whole = is_open, is_whole
        try:
            yield
        finally:
            self.is_open, self.is_whole = before

    def sees_sharded_tokens(self, path: str) -> bool:
        """Return True if the module at `path` gets only this rank's tokens."""
        return _is_in(path, self.token_paths) and not _is_in(path, self.full_paths) and not self.sees_all(path)

    def sees_all(self, path: str) -> bool:
        """Return True if the module at `path` gets the same inputs as in one process."""
        return _is_in(path, self.whole_paths)


def _is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


def keep_part(model: nn.Module, part: ShardPosition) -> None:
    """Set the position as an attribute of the model, for `shard_position_of`."""
    setattr(model, _PART, part)


def shard_position_of(model: nn.Module) -> ShardPosition | None:
    """Return the position that tensor parallelism stored on this model, or None if nothing is sharded."""
    return getattr(model, _PART, None)


# Modules with dropout in training.

#: Names of attributes with dropout rates, in modules that call dropout functions.
_RATES = (
    "attention_dropout", "attn_dropout", "dropout", "attn_pdrop", "attention_probs_dropout_prob", "resid_dropout",
    "hidden_dropout",
)  # fmt: skip


def drops_itself(module: nn.Module) -> bool:
    """Return True if a module drops values with a rate above 0, by its class or by attributes with common names.

    It is an nn.Dropout, has a positive rate as an attribute such as `attention_dropout`, or is an attention class with
    an nn.Dropout in such an attribute.
    """
    if isinstance(module, nn.Dropout) and type(module).forward is nn.Dropout.forward:
        rate: Any = module.p
        return rate > 0
    kind = type(module).__name__.lower()
    for name in _RATES:
        value: Any = getattr(module, name, None)
        if isinstance(value, float) and value > 0:
            return True
        if isinstance(value, nn.Dropout) and value.p > 0 and ("attention" in kind or "attn" in kind):
            return True
    return False


# Random numbers by position: an element's value depends on its position in the full tensor and not on the rank.

#: Odd constants. Constants above 2^63 or 2^31 are written as negative numbers, as torch stores them.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_FIRST_32, _SECOND_32 = 0x7FEB352D, 0x846CA68B - 2**32


def key_of(*parts: int | str) -> int:
    """Return a 64-bit hash of numbers and names as a key for random numbers, identical on every machine."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def lines_of(key: int | Tensor, places: Sequence[Tensor]) -> Tensor:
    """Return a random number for each combination of positions, int32, with a dim for each of `places`.

    `key` is a Python integer, or a 0-d int64 tensor. `places` are int64 vectors on one device; at least one is needed
    if the key is a Python integer.
    """
    mixed = key if isinstance(key, Tensor) else torch.full((), key, dtype=torch.int64, device=places[0].device)
    for dim in places:
        mixed = _mix(mixed[..., None] + (dim + 1) * _STEP)
    return mixed.to(torch.int32)


def keeps(lines: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return a mask of kept elements if each is dropped with probability `rate`: bool, of the broadcast shape.

    lines: result of `lines_of` for all dims but the last, with a last dim of 1. columns: result of `lines_of` for the
    last dim. rate: 0 to 1.
    """
    return _hash(lines ^ columns) >= round(rate * 2**32) - 2**31


def integers_at(key: Tensor, places: Sequence[Tensor], bits: int) -> Tensor:
    """Draw an integer from 0 to 2^bits - 1 for each combination of positions, int64.

    key: 0-d int64. places: int64 positions along each dim. bits: 62 at most.
    """
    high, low = (_words(mixed, places) for mixed in (key, key ^ _STEP))
    return ((high << 30) ^ (low >> 2)) >> (62 - bits)


def _words(key: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Draw 32 bits for each combination of positions, as nonnegative int64."""
    if not places:
        return _hash(lines_of(key, ())).long() + 2**31
    lines, columns = lines_of(key, places[:-1])[..., None], lines_of(~key, places[-1:])
    return _hash(lines ^ columns).long() + 2**31


def _hash(x: Tensor) -> Tensor:
    """Mix the bits of each number in `x` (int32) in place, and return `x`."""
    x.mul_(_FIRST_32)
    x.bitwise_xor_((x >> 15).bitwise_and_((1 << 17) - 1))
    x.mul_(_SECOND_32)
    return x


def keep_mask_at(key: Tensor, places: Sequence[Tensor], rate: float) -> Tensor:
    """Draw a bool mask with an element for each combination of positions: False with probability `rate`, to drop it.

    In compiled code this is one operator. Code that inductor generates would treat positions as index arithmetic, which
    does not use 64 bits, and would compute other numbers. key: int64, 0-d. places: positions along each dim, int64,
    1-D. rate: 0 to 1.
    """
    if torch.compiler.is_compiling():
        return keep_mask_operator(key, places, rate)
    return keeps(lines_of(key, places[:-1])[..., None], lines_of(~key, places[-1:]), rate)


@torch.library.custom_op("weft::kept", mutates_args=(), schema="(Tensor key, Tensor[] places, float rate) -> Tensor")
def keep_mask_operator(key: Tensor, places: Sequence[Tensor], rate: float) -> Tensor:
    return keep_mask_at(key, places, rate)


@keep_mask_operator.register_fake
def _keep_mask_shape(key: Tensor, places: Sequence[Tensor], rate: float) -> Tensor:
    del rate
    return torch.empty([len(one) for one in places], dtype=torch.bool, device=key.device)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# Indices of a microbatch's samples: random numbers depend on them, and not on the rank that holds the samples.

#: Difference between the indices of consecutive rows of a sample. Row 0 has the sample's index.
_ROW = 2**32


@dataclass(frozen=True, slots=True)
class SampleNumbers:
    """Which samples of the global batch are in a microbatch.

    `numbers` are the samples' indices in the global batch, in the order of the microbatch. It is empty if the
    microbatch is a placeholder on a rank without samples. `rows` holds one tuple per tensor whose rows are not samples,
    with the number of rows of each sample. `total` is the number of samples in the global batch, or None if unset.
    `records` is set if samples are units of privacy: the number of records of each. All have as many rows as the
    largest, and the last ones do not count.
    """

    numbers: Sequence[int]
    rows: Sequence[Sequence[int]] = ()
    total: int | None = None
    records: Sequence[int] = ()

    @property
    def is_empty(self) -> bool:
        """True if the rank has no samples in this microbatch: it runs a placeholder that does not count."""
        return not self.numbers

    def row_numbers(self, count: int, device: torch.device) -> Tensor:
        """Return an index for each of a tensor's `count` rows, int64 (count,), independent of how batches are split.

        If there are as many rows as samples, each row is a sample. Otherwise the rows per sample come from `rows`, or
        every sample has the same number of rows. A row's index combines the sample's index and the row's index in the
        sample. If the rows per sample are unknown, rows are counted from the first sample's index.
        """
        numbers = self.numbers
        if count == len(numbers):
            if isinstance(numbers, range):
                return torch.arange(numbers.start, numbers.stop, numbers.step, device=device)
            return torch.tensor(numbers, dtype=torch.int64, device=device)
        per_sample = self.rows_of_each(count)
        if per_sample is None:
            first = numbers[0] if numbers else 0
            return torch.arange(first, first + count, device=device)
        rows = ((n + _ROW * row for row in range(many)) for n, many in zip(numbers, per_sample, strict=True))
        return torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64, device=device)

    def rows_of_each(self, count: int) -> list[int] | None:
        """Return the number of rows of each sample among a tensor's `count` rows, or None if it cannot be determined.

        Layers may have joined rows or split them evenly.
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
    """Return `SampleNumbers.row_numbers` for samples without `rows`, from their indices. For compiled code."""
    size, rest = divmod(count, len(numbers))
    if rest:
        return numbers[0] + torch.arange(count, device=numbers.device)
    if size == 1:
        return numbers
    return (numbers[:, None] + torch.arange(size, device=numbers.device) * _ROW).flatten()
