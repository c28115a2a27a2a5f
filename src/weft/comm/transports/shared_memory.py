"""Shared-memory transport of an axis: a segment of counters, signatures and slots of bytes, and its link.

The memory is anonymous (memfd), so it is freed however the ranks exit. Rank 0 creates it, and the others open it
through /proc. It is allocated in full at creation, so a lack of memory raises an error there instead of a signal later.

    | token, 64 bytes | one line of 16 int64 for each rank | slots[rank][slot] |

Only a rank writes its line: published, reduced, consumed (monotonic counts of spans), failed (1 after a failure), then
for each slot the signature of its span. Writers rely on x86-64: stores become visible to other cores in program order.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import platform
import secrets
import threading
import weakref
from pathlib import Path

import torch

from weft import env
from weft.comm.transports.link import Combiner, Link, Operation, explain_signature, sign, unobserved
from weft.comm.transports.routes import Route, Span, route
from weft.comm.transports.scattered_tensor import Parts
from weft.errors import CommError

PUBLISHED, REDUCED, CONSUMED, FAILED, SIGNATURES = range(5)
NUM_SLOTS = 4
#: Size of one slot for few ranks. Measured with 2 and 4 ranks: half the size costs 10 to 30 %, double saves 0 to 10 %.
SLOT_BYTES = 1 << 20
#: Maximum size of all slots together, for any number of ranks, and the minimum size of a slot.
MOST_BYTES, LEAST_SLOT_BYTES = 64 << 20, 1 << 16

_TOKEN_BYTES, _LINE = 64, 16
assert SIGNATURES + NUM_SLOTS <= _LINE


def host_mark() -> tuple[bytes, str]:
    """Return (16 bytes that are equal on ranks which can share memory, ""), or (b"", reason) if this rank cannot."""
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
    """Return the bytes of a slot if `size` ranks share memory: a multiple of every element's size."""
    return max(LEAST_SLOT_BYTES, min(SLOT_BYTES, MOST_BYTES // (size * NUM_SLOTS) // 4096 * 4096))


class Segment:
    """The mapped memory from the view of one rank.

    fd: descriptor of the memory, which is closed when this object is freed.
    """

    def __init__(self, fd: int, rank: int, size: int):
        # The lock on this rank's byte is released when the process exits, however it exits; `has_ended` of the others
        # checks it. POSIX drops it when the process closes any descriptor of this file, so keep `fd` as long as the
        # mapping.
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
        """Return the size in bytes of the full segment for `size` ranks."""
        return Segment._slots_at(size) + size * NUM_SLOTS * slot_bytes(size)

    @staticmethod
    def _slots_at(size: int) -> int:
        return -(-(_TOKEN_BYTES + size * _LINE * 8) // mmap.PAGESIZE) * mmap.PAGESIZE

    @classmethod
    def make(cls, size: int) -> tuple[Segment, tuple[int, int, bytes]]:
        """Make new memory on rank 0. Also return the address (process, descriptor, token) for `find` on the others.

        Raises OSError if there is not enough memory.
        """
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
        """Map the memory that rank 0 made, on the other ranks. Raises OSError if the memory does not exist.

        address: (process, descriptor, token) of that memory.
        """
        pid, descriptor, token = address
        fd = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_size != cls.total_bytes(size) or os.pread(fd, 16, 0) != token:
            os.close(fd)
            raise OSError(errno.ENOENT, "another file is at the address of the shared memory")
        return cls(fd, rank, size)

    def count(self, rank: int, which: int) -> int:
        """Return a counter of `rank`: PUBLISHED, REDUCED, CONSUMED, FAILED, or SIGNATURES + slot for a signature."""
        return self._lines[rank * _LINE + which]

    def lowest(self, which: int) -> int:
        """Return the lowest value of a counter over all ranks."""
        return min(self._lines[which : self.size * _LINE : _LINE])

    def publish(self, which: int, value: int) -> None:
        self._lines[self.rank * _LINE + which] = value

    def slots(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Return each slot's memory as flat tensors (bytes / itemsize,) of `dtype`: `slots(dtype)[slot][rank]`."""
        if dtype not in self._slots:
            flat = torch.frombuffer(self._memory, dtype=dtype, offset=self._slots_at(self.size))
            slots = flat.view(self.size, NUM_SLOTS, -1)
            self._slots[dtype] = [[slots[rank, slot] for rank in range(self.size)] for slot in range(NUM_SLOTS)]
        return self._slots[dtype]

    def has_ended(self, rank: int) -> bool:
        """Return True if the process of `rank` has exited, or has freed its mesh."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, rank)
        return True


# The shared-memory transport: ranks of one host pass spans through slots of one segment.


class SharedLink(Link):
    """A link between ranks of one host over a segment.

    ranks: global ranks, in order of the axis. timeout_s: seconds without progress after which an operation fails.
    """

    transport = "shared memory"

    def __init__(self, segment: Segment, ranks: tuple[int, ...], timeout_s: float, reason: str):
        self.reason, self._segment, self._ranks, self._timeout_s = reason, segment, ranks, timeout_s
        self._combine = Combiner()
        self._lock = threading.Lock()
        # Acquiring a lock is a locked instruction: other cores observe all stores before it before the stores after
        # it.
        self._fence = threading.Lock()
        self._pieces: dict[int, tuple[Route[torch.Tensor] | Route[Parts], Span, int, bool]] = {}
        self._enqueued = self._published = self._reduced = self._consumed = 0
        self._failure = ""

    @property
    def busy(self) -> bool:
        return self._consumed < self._enqueued

    def start(self, operation: Operation) -> None:
        self._refuse_if_broken(operation)
        with unobserved():
            way = route(operation, self._segment.rank, self._segment.size, self._combine)
        signature = sign(operation)
        with self._lock:
            spans = way.spans(self._segment.slot_bytes)
            for span in spans:
                self._pieces[self._enqueued] = (way, span, signature, span is spans[-1])
                self._enqueued += 1
        self.advance()

    def advance(self) -> bool:
        """Publish, reduce and collect spans while there is progress. Returns True if there was any."""
        moved = False
        with self._lock, torch.no_grad(), unobserved():
            while self._publish() or self._reduce() or self._collect():
                moved = True
        return moved

    def _publish(self) -> bool:
        number = self._published
        if number == self._enqueued or number - NUM_SLOTS >= self._segment.lowest(CONSUMED):
            return False
        way, span, signature, _ = self._pieces[number]
        slot = number % NUM_SLOTS
        way.publish(span, self._segment.slots(way.source.dtype)[slot][self._segment.rank])
        way.operation.sent_bytes += way.published(span) * way.source.itemsize
        self._segment.publish(SIGNATURES + slot, signature)
        self._published += 1
        self._publish_counter(PUBLISHED, self._published)
        return True

    def _reduce(self) -> bool:
        number = self._reduced
        if number == self._published or self._segment.lowest(PUBLISHED) <= number:
            return False
        way, span, signature, _ = self._pieces[number]
        slot = number % NUM_SLOTS
        self._compare(way.operation, slot, signature)
        way.reduce(span, self._segment.slots(way.source.dtype)[slot])
        self._reduced += 1
        self._publish_counter(REDUCED, self._reduced)
        return True

    def _collect(self) -> bool:
        number = self._consumed
        if number == self._reduced:
            return False
        way, span, _, last = self._pieces[number]
        if way.two_phases:
            if self._segment.lowest(REDUCED) <= number:
                return False
            way.collect(span, self._segment.slots(way.source.dtype)[number % NUM_SLOTS])
        del self._pieces[number]
        self._consumed += 1
        self._publish_counter(CONSUMED, self._consumed)
        if last:
            way.operation.finished = True
        return True

    def _publish_counter(self, which: int, value: int) -> None:
        with self._fence:
            self._segment.publish(which, value)

    def _compare(self, operation: Operation, slot: int, signature: int) -> None:
        """Raise CommError if the ranks called different operations for this span."""
        theirs = [self._segment.count(rank, SIGNATURES + slot) for rank in range(self._segment.size)]
        if all(other == signature for other in theirs):
            return
        calls = "; ".join(
            f"rank {rank}: {explain_signature(other)}" for rank, other in zip(self._ranks, theirs, strict=True)
        )
        self._fail(
            f"{operation}: the ranks do not call the same operation here ({calls}). "
            f"Let every rank take the same path through the model and the training loop."
        )

    def late(self) -> tuple[int, ...]:
        segment = self._segment
        return tuple(self._ranks[at] for at in range(segment.size) if at != segment.rank and self._holds_up(at))

    def look(self, operation: Operation, waited_s: float) -> None:
        """Raise CommError if a late rank has exited or failed, or `waited_s` exceeds the group's timeout."""
        self._refuse_if_broken(operation)
        segment = self._segment
        late = [rank for rank in range(segment.size) if rank != segment.rank and self._holds_up(rank)]
        failed = [rank for rank in late if segment.count(rank, FAILED)]
        ended = [rank for rank in late if rank not in failed and segment.has_ended(rank)]
        # Data that a rank wrote before it exited is valid: advance again after its exit was detected.
        if (ended or failed) and not self.advance():
            # Failed ranks failed because of others, so name them only if no other cause is found.
            verb = "has ended" if ended else "has failed on this axis"
            text = f"{operation}: {self._names(ended or failed)} {verb}. Look at its log for the cause."
            self._fail(text, peer_ends=not ended)
        if waited_s > self._timeout_s:
            names = self._names(late) or "the other ranks"
            self._fail(
                f"{operation}: no message from {names} in {self._timeout_s:g} s, the timeout of the group. Look at "
                "the log and the stack of that rank; if it is only slow, raise launch.timeout, or weft.init(..., "
                "timeout=...)."
            )

    def _names(self, places: list[int]) -> str:
        return ", ".join(f"rank {self._ranks[place]}" for place in places)

    def _holds_up(self, rank: int) -> bool:
        """Return True if this rank's next step waits for `rank`."""
        count = self._segment.count
        return (
            count(rank, PUBLISHED) <= self._reduced
            or (self._consumed < self._reduced and count(rank, REDUCED) <= self._consumed)
            or count(rank, CONSUMED) <= self._published - NUM_SLOTS
        )

    def _fail(self, text: str, peer_ends: bool = False) -> None:
        self._failure = text
        self._segment.publish(FAILED, 1)
        error = CommError(text)
        error.peer_ends = peer_ends
        raise error

    def _refuse_if_broken(self, operation: Operation) -> None:
        if self._failure:
            raise CommError(f"{operation}: this axis has failed before. {self._failure}")
