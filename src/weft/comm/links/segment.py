"""Memory that the ranks of one axis share: counters, signatures and slots of bytes.

The memory has no name (memfd), so nothing is left behind however the ranks end: rank 0 makes it, the others open it
through /proc. It is allocated in full at once: a machine short of memory says so here, not by a signal later.

    | token, 64 bytes | one line of 16 int64 for each rank | slots[rank][slot] |

A line is written by its rank only: published, reduced, consumed (numbers of pieces, only growing), failed (1 when it
has given up), then for each slot the signature of the piece in it. Writers rely on x86-64: stores become visible to
other cores in program order.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import platform
import secrets
import weakref
from pathlib import Path

import torch

from weft import env

PUBLISHED, REDUCED, CONSUMED, FAILED, SIGNATURES = range(5)
NUM_SLOTS = 4
#: Bytes of one slot, for few ranks. Measured for 2 and 4: half of it costs 10 to 30 % more, double saves 0 to 10 %.
SLOT_BYTES = 1 << 20
#: All slots together, however many ranks there are (until a slot would be smaller than the last figure).
MOST_BYTES, LEAST_SLOT_BYTES = 64 << 20, 1 << 16

_TOKEN_BYTES, _LINE = 64, 16
assert SIGNATURES + NUM_SLOTS <= _LINE


def host_mark() -> tuple[bytes, str]:
    """Return (16 bytes that are equal on ranks which can share memory, ""), or (b"", why this rank cannot)."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return b"", f"this machine is {platform.machine()}, and shared memory relies on the order of x86-64's stores"
    if not hasattr(os, "memfd_create"):
        return b"", "this system has no memfd_create (Linux only)"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # /proc/<pid>/fd of another rank can be opened only within one process namespace, by the same user.
        names = f"{boot} {os.readlink('/proc/self/ns/pid')} {env.pretended_host()}"
        text = f"{names} {os.getuid()} {NUM_SLOTS} {SLOT_BYTES}"
    except OSError as error:
        return b"", f"/proc cannot be read ({error.strerror})"
    return hashlib.sha256(text.encode()).digest()[:16], ""


def slot_bytes(size: int) -> int:
    """Bytes of a slot where `size` ranks share: a multiple of every element's size."""
    return max(LEAST_SLOT_BYTES, min(SLOT_BYTES, MOST_BYTES // (size * NUM_SLOTS) // 4096 * 4096))


class Segment:
    """The mapped memory, seen from one rank. Memory and file go when the object goes.

    Args:
        fd: descriptor of the memory; it is closed with the object.
        rank: this one's place on the axis.
        size: ranks on the axis.
    """

    def __init__(self, fd: int, rank: int, size: int):
        # The lock on this rank's byte ends with the process, however it ends: `has_ended` of the others sees it.
        # POSIX drops it when the process closes any descriptor of this file: keep `fd` as long as the mapping.
        weakref.finalize(self, os.close, fd)
        self.rank, self.size = rank, size
        self._fd = fd
        self._memory = mmap.mmap(fd, self.total_bytes(size))
        self.slot_bytes = slot_bytes(size)
        self._lines = memoryview(self._memory).cast("q")[_TOKEN_BYTES // 8 :]
        self._slots: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @staticmethod
    def total_bytes(size: int) -> int:
        """Return the bytes of the whole segment for `size` ranks."""
        return Segment._slots_at(size) + size * NUM_SLOTS * slot_bytes(size)

    @staticmethod
    def _slots_at(size: int) -> int:
        return -(-(_TOKEN_BYTES + size * _LINE * 8) // mmap.PAGESIZE) * mmap.PAGESIZE

    @classmethod
    def make(cls, size: int) -> tuple[Segment, tuple[int, int, bytes]]:
        """Make new memory on rank 0, and the address (process, descriptor, token) that the others `find` it by."""
        fd = os.memfd_create("weft-axis")
        try:
            os.posix_fallocate(fd, 0, cls.total_bytes(size))
        except OSError:
            os.close(fd)
            raise
        segment = cls(fd, 0, size)
        token = secrets.token_bytes(16)
        segment._memory[:16] = token
        return segment, (os.getpid(), fd, token)

    @classmethod
    def find(cls, address: tuple[int, int, bytes], rank: int, size: int) -> Segment:
        """Map the memory that rank 0 made, on the other ranks.

        Args:
            address: (process, descriptor, token) of that memory.
            rank: this one's place on the axis.
            size: ranks on the axis.

        Raises:
            OSError: when it is not there.
        """
        pid, descriptor, token = address
        fd = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_size != cls.total_bytes(size) or os.pread(fd, 16, 0) != token:
            os.close(fd)
            raise OSError(errno.ENOENT, "another file is at the address of the shared memory")
        return cls(fd, rank, size)

    def count(self, rank: int, which: int) -> int:
        """Return a counter of `rank`: PUBLISHED, REDUCED, CONSUMED, FAILED; SIGNATURES + slot for a signature."""
        return self._lines[rank * _LINE + which]

    def lowest(self, which: int) -> int:
        """Return the lowest value of a counter over all ranks."""
        return min(self._lines[which : self.size * _LINE : _LINE])

    def tell(self, which: int, value: int) -> None:
        """Set this rank's counter."""
        self._lines[self.rank * _LINE + which] = value

    def slots(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Return each slot's memory as flat tensors (bytes / itemsize,) of `dtype`: `slots(dtype)[slot][rank]`."""
        if dtype not in self._slots:
            flat = torch.frombuffer(self._memory, dtype=dtype, offset=self._slots_at(self.size))
            slots = flat.view(self.size, NUM_SLOTS, -1)
            self._slots[dtype] = [[slots[rank, slot] for rank in range(self.size)] for slot in range(NUM_SLOTS)]
        return self._slots[dtype]

    def has_ended(self, rank: int) -> bool:
        """Return True when the process of `rank` has ended, or has dropped its mesh."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, rank)
        return True
