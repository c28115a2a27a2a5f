"""Rows of a table in host memory or a mapped file, with a cache of hot rows on the device.

A row and its optimizer states move together. The cache never changes values. M rows of a call, C columns of a part.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import ConfigError, ModelError
from weft.private_torch import version_of
from weft.units import format_bytes

#: Minimum number of slots that the hand of the cache examines together.
_WINDOW = 1024
#: Number of threads that read or write rows of mapped files.
_THREADS = 16
#: Most elements that torch copies by index in one thread.
_SERIAL = 2**15 - 1


@dataclass(frozen=True, slots=True)
class TableSettings:
    """Settings of sharded tables.

    Attributes:
        cache: for style host, share of a rank's rows that its device caches, in (0, 1].
        folder: for style host, folder of the mapped files, or "" for host memory.
        prefetch: fetch the rows that the next microbatch looks up under this one's backward.

    Raises:
        ConfigError: for a share out of range, or a folder that does not exist.
    """

    cache: float = 0.05
    folder: str = ""
    prefetch: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.cache <= 1:
            raise ConfigError(f"table_cache={self.cache}: a share of the rows is above 0 and at most 1. Use 0.05.")
        if self.folder and not os.path.isdir(self.folder):
            raise ConfigError(f"table_folder={self.folder}: it is not a folder. Create it, or leave table_folder out.")

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory, or in a mapped file that is deleted when the process ends.

        Raises ConfigError if the folder has no space for the file.
        """
        number = math.prod(shape)
        if not self.folder or not number:
            return torch.zeros(tuple(shape), dtype=dtype)
        size = number * dtype.itemsize
        handle, path = tempfile.mkstemp(prefix="table-", suffix=".rows", dir=self.folder)
        try:
            _reserve(handle, size)
            mapped = torch.from_file(path, shared=True, size=number, dtype=dtype)
        except OSError as error:
            why = "it has too little space" if error.errno == errno.ENOSPC else os.strerror(error.errno or 0)
            raise ConfigError(
                f"table_folder={self.folder}: no file of {format_bytes(size)} can be made there, because {why}. Use "
                "another folder."
            ) from error
        finally:
            os.close(handle)
            os.unlink(path)  # the mapping remains
        _advise(mapped, mmap.MADV_RANDOM)
        return mapped.view(tuple(shape))


def _reserve(handle: int, size_bytes: int) -> None:
    """Reserve space for a file. A disk that is full later would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size_bytes)
    else:  # macOS
        os.ftruncate(handle, size_bytes)


def _advise(mapped: Tensor, advice: int) -> None:
    """Tell the kernel in which order a mapped file is read."""
    # Python's mmap would keep a file descriptor open for each tensor.
    address, size = ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes)
    ctypes.CDLL(None).madvise(address, size, advice)


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads that all tables of a process share. They do not exist in a forked child."""
    return ThreadPoolExecutor(_THREADS, "weft-table-rows")


class _RowCopies:
    """Copies rows from and to host tensors.

    Rows of mapped files are copied by many threads, because each may wait for the disk. Rows in memory are copied at
    the call.

    Args:
        weight: the first of the host tensors.
    """

    def __init__(self, weight: Tensor):
        self._is_mapped = weight.untyped_storage().filename is not None
        self._at_once = max(1, _SERIAL // max(1, math.prod(weight.shape[1:])))
        self._writes: list[Future[None]] = []
        self._is_random = True  # as TableSettings.zeros has advised

    def expect(self, kept: Sequence[Tensor], is_random: bool) -> None:
        """Prepare files for steps, whose rows are in random order, or for checkpoints, which read all rows in order.

        Without advice, Linux reads ahead and caches the file in pages of up to 2 MiB. One changed row then writes its
        whole page to the disk.
        """
        if self._is_mapped and is_random != self._is_random:
            for one in kept:
                _advise(one, mmap.MADV_RANDOM if is_random else mmap.MADV_NORMAL)
        self._is_random = is_random

    def read(self, kept: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
        """Return rows of each tensor, (M, ...). A pending write must not contain any of these rows."""
        if not self._is_mapped or len(rows) <= self._at_once:
            return [one.index_select(0, rows) for one in kept]
        parts = _threads(os.getpid()).map(
            lambda part: [one.index_select(0, part) for one in kept], rows.split(self._at_once)
        )
        return [torch.cat(values) for values in zip(*parts, strict=True)]

    def begin_write(self, kept: Sequence[Tensor], rows: Tensor, values: Sequence[Tensor]) -> None:
        """Begin to copy values to rows of each tensor. The tensors' version counters do not change."""
        self.wait()
        if not self._is_mapped:
            _write(kept, [(rows, *values)])
            return
        pieces = [one.split(self._at_once) for one in (rows, *values)]
        parts = list(zip(*pieces, strict=True))
        number = min(len(parts), _THREADS)
        submit = _threads(os.getpid()).submit
        self._writes = [submit(_write, list(kept), parts[first::number]) for first in range(number)]

    def wait(self) -> None:
        """Wait until the values of `begin_write` are in the host tensors."""
        writes, self._writes = self._writes, []
        for one in writes:
            one.result()


def _write(kept: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
    """Copy values to rows of tensors. parts: rows, (M,), and their values in each tensor."""
    for rows, *values in parts:
        for one, value in zip(kept, values, strict=True):
            one.data.index_copy_(0, rows, value)


class CachedRows:
    """A cache on the device of rows of host tensors.

    A slot is reused if no call has read its row since the hand last passed it (the clock algorithm). A row that is read
    in training enters the cache, if a slot is free. Threads write changed rows that leave the cache to mapped files
    while the step continues. `read`, `update` and `flush` wait for pending writes.

    Args:
        weight: this rank's rows in host memory, (rows, C).
        share: slots over rows.
        device: device of the cache.
    """

    def __init__(self, weight: Tensor, share: float, device: torch.device):
        num_rows = len(weight)
        num_slots = min(num_rows, max(1, math.ceil(num_rows * share)))
        self._device = device
        self._kept: list[Tensor] = []
        self._cached: list[Tensor] = []
        self._versions: list[int] = []
        self._slot_of_row = torch.full((num_rows,), -1, dtype=torch.int32)
        self._row_of_slot = torch.full((num_slots,), -1)
        self._used, self._changed = (torch.zeros(num_slots, dtype=torch.bool) for _ in range(2))
        self._hand = 0
        self._copies = _RowCopies(weight)
        self.add(weight)

    @property
    def weight(self) -> Tensor:
        """The rows in host memory. `flush` makes them current."""
        return self._kept[0]

    def add(self, *kept: Tensor) -> None:
        """Cache rows of more host tensors, such as states of an optimizer. kept: tensors of (rows, ...)."""
        self.flush()
        self._clear()
        num_slots = len(self._row_of_slot)
        self._kept += kept
        self._cached += [torch.zeros(num_slots, *one.shape[1:], dtype=one.dtype, device=self._device) for one in kept]
        self._versions = [version_of(one) for one in self._kept]

    def read(self, rows: Tensor, enters: bool) -> Tensor:
        """Return rows of the weight on the device, (M, C).

        Args:
            rows: their indices on the device, (M,). They may repeat.
            enters: True to cache rows that are not cached.
        """
        self._copies.wait()
        self._copies.expect(self._kept, is_random=True)
        self._expect_current()
        where = rows.cpu()
        if enters:
            self._admit(where)
        slots = self._slot_of_row[where].long()
        is_cached = slots >= 0
        if bool(is_cached.all()):
            return self._cached[0].index_select(0, slots.to(self._device))
        found = torch.empty(len(rows), *self.weight.shape[1:], dtype=self.weight.dtype, device=self._device)
        cached, others = is_cached.nonzero().flatten(), (~is_cached).nonzero().flatten()
        found.index_copy_(0, cached.to(self._device), self._cached[0].index_select(0, slots[cached].to(self._device)))
        (values,) = self._copies.read([self.weight], where[others])
        return found.index_copy_(0, others.to(self._device), values.to(self._device))

    def update(
        self, rows: Tensor, kept: Sequence[Tensor], change: Callable[[list[Tensor], Tensor, Tensor], None]
    ) -> None:
        """Change rows of the weight and of other tensors.

        Args:
            rows: their indices on the device, (M,), each once.
            kept: the other host tensors, which `add` was called with.
            change: change(tensors, indices, mine) changes rows `indices` of the weight and the others on the
                device, of which `mine` are the positions in `rows`.
        """
        self._expect_current()
        where = rows.cpu()
        slots = self._slot_of_row[where].long()
        places = [0, *(next(place for place, own in enumerate(self._kept) if own is one) for one in kept)]
        is_cached = slots >= 0
        cached, others = is_cached.nonzero().flatten(), (~is_cached).nonzero().flatten()
        if len(cached):
            mine = slots[cached]
            self._changed[mine] = True
            change([self._cached[place] for place in places], mine.to(self._device), cached.to(self._device))
        self._copies.wait()
        if len(others):
            index, kept = where[others], [self._kept[place] for place in places]
            staged = [one.to(self._device) for one in self._copies.read(kept, index)]
            change(staged, torch.arange(len(others), device=self._device), others.to(self._device))
            self._copies.begin_write(kept, index, [one.cpu() for one in staged])
            self._copies.wait()

    def flush(self) -> None:
        """Copy changed rows to the host tensors. The cache stays valid."""
        if self._kept:
            self._expect_current()
            self._write_back(self._changed.nonzero().flatten())
            self._copies.wait()
            self._copies.expect(self._kept, is_random=False)

    def _expect_current(self) -> None:
        """Empty the cache if other code changed the host tensors, as loading a checkpoint does after `flush`.

        Raises ModelError if the cache has newer values of their rows.
        """
        if self._versions != [version_of(one) for one in self._kept]:
            if bool(self._changed.any()):
                raise ModelError(
                    f"table of {len(self.weight)} rows with style host: other code changed its weight, and the cache "
                    "has newer rows. Change weights before the first step, or by run.load; or use style rows."
                )
            self._clear()
            self._versions = [version_of(one) for one in self._kept]

    def _clear(self) -> None:
        self._slot_of_row.fill_(-1)
        self._row_of_slot.fill_(-1)
        self._used.zero_()
        self._changed.zero_()

    def _write_back(self, slots: Tensor) -> None:
        """Begin to copy the rows of slots to the host tensors."""
        if not len(slots):
            return
        there = slots.to(self._device)
        staged = [cached.index_select(0, there).cpu() for cached in self._cached]
        self._copies.begin_write(self._kept, self._row_of_slot[slots], staged)
        self._changed[slots] = False

    def _admit(self, where: Tensor) -> None:
        """Cache rows, as far as slots are free. Rows that are cached already keep their slots."""
        slots = self._slot_of_row[where].long()
        is_cached = slots >= 0
        self._used[slots[is_cached]] = True
        missing = where[~is_cached].unique()
        free = self._free_slots(len(missing))
        missing = missing[: len(free)]
        if not len(missing):
            return
        values = self._copies.read(self._kept, missing)
        self._write_back(free[self._changed[free]])
        before = self._row_of_slot[free]
        self._slot_of_row[before[before >= 0]] = -1
        there = free.to(self._device)
        for cached, value in zip(self._cached, values, strict=True):
            cached.index_copy_(0, there, value.to(self._device))
        self._row_of_slot[free] = missing
        self._slot_of_row[missing] = free.int()

    def _free_slots(self, number: int) -> Tensor:
        """Return at most `number` slots whose rows no call has read since the hand last passed them."""
        total, passed, found = len(self._used), 0, list[Tensor]()
        while number > 0 and passed < total:
            window = torch.arange(self._hand, self._hand + min(max(_WINDOW, 2 * number), total - passed)) % total
            free = window[~self._used[window]][:number]
            if len(free) == number:  # stop behind the last one
                window = window[: int((window == free[-1]).nonzero()) + 1]
            self._used[window] = False
            found.append(free)
            self._hand = (self._hand + len(window)) % total
            passed, number = passed + len(window), number - len(free)
        return torch.cat(found) if found else self._row_of_slot[:0]
