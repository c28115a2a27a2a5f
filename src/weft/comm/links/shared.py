"""The shared-memory transport: ranks of one host pass pieces through slots of one segment.

Every rank numbers the pieces of all operations alike. A piece waits for its slot (all ranks have consumed the piece
that was there), is published, reduced when all have published, collected when all have reduced. Each stage keeps the
order of the pieces, so three counters for each rank are all the synchronisation there is. No thread does this in the
background: `advance` does, called when operations start and while anything is waited for.
"""

from __future__ import annotations

import threading

import torch

from weft.comm.links.combine import Combiner
from weft.comm.links.link import Operation, unobserved
from weft.comm.links.parts import Parts
from weft.comm.links.route_of import route
from weft.comm.links.routes import Route, Span
from weft.comm.links.segment import CONSUMED, FAILED, NUM_SLOTS, PUBLISHED, REDUCED, SIGNATURES, Segment
from weft.comm.links.signature import explain_signature, sign
from weft.errors import CommError


class SharedLink:
    """Ranks of one host, joined by a segment.

    Args:
        segment: the shared memory.
        ranks: their global ranks, in order of the axis.
        timeout_s: seconds without word after which an operation fails.
        reason: why this link was chosen, in words.
    """

    transport = "shared memory"
    self_driven = False

    def __init__(self, segment: Segment, ranks: tuple[int, ...], timeout_s: float, reason: str):
        self.reason = reason
        self._segment = segment
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._combine = Combiner()
        self._lock = threading.Lock()
        # Taking a lock is a locked instruction: all stores before it are seen by other cores before those after it.
        self._fence = threading.Lock()
        self._pieces: dict[int, tuple[Route[torch.Tensor] | Route[Parts], Span, int, bool]] = {}
        self._enqueued = self._published = self._reduced = self._consumed = 0
        self._failure = ""

    @property
    def busy(self) -> bool:
        """Whether a piece is under way."""
        return self._consumed < self._enqueued

    def start(self, operation: Operation) -> None:
        """Line up the operation's pieces, and carry on as far as that goes."""
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

    def block(self, operation: Operation) -> bool:
        """Return False: there is no backend to wait in."""
        return False

    def advance(self) -> bool:
        """Publish, reduce and collect pieces as long as one moves; True when one did."""
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
        self._segment.tell(SIGNATURES + slot, signature)
        self._published += 1
        self._tell(PUBLISHED, self._published)
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
        self._tell(REDUCED, self._reduced)
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
        self._tell(CONSUMED, self._consumed)
        if last:
            way.operation.finished = True
        return True

    def _tell(self, which: int, value: int) -> None:
        with self._fence:
            self._segment.tell(which, value)

    def _compare(self, operation: Operation, slot: int, signature: int) -> None:
        """Refuse a piece that the ranks understand differently."""
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
        """Return the global ranks whose counters lie behind what this rank needs."""
        segment = self._segment
        return tuple(self._ranks[at] for at in range(segment.size) if at != segment.rank and self._holds_up(at))

    def look(self, operation: Operation, waited_s: float) -> None:
        """Raise CommError where a late rank has ended or given up, or `waited_s` is above the group's timeout."""
        self._refuse_if_broken(operation)
        segment = self._segment
        late = [rank for rank in range(segment.size) if rank != segment.rank and self._holds_up(rank)]
        failed = [rank for rank in late if segment.count(rank, FAILED)]
        ended = [rank for rank in late if rank not in failed and segment.has_ended(rank)]
        # What a rank wrote before it ended counts: look once more, after its end was seen.
        if (ended or failed) and not self.advance():
            # Those that gave up did so because of others: name them only where no other cause is seen.
            verb = "has ended" if ended else "has failed on this axis"
            text = f"{operation}: {self._names(ended or failed)} {verb}. Look at its log for the cause."
            self._fail(text, peer_ends=not ended)
        if waited_s > self._timeout_s:
            names = self._names(late) or "the other ranks"
            self._fail(
                f"{operation}: no word from {names} in {self._timeout_s:g} s, the timeout of the group. Look at the "
                "log and the stack of that rank; if it is only slow, raise launch.timeout, "
                f"or weft.init(..., timeout=...)."
            )

    def _names(self, places: list[int]) -> str:
        return ", ".join(f"rank {self._ranks[place]}" for place in places)

    def _holds_up(self, rank: int) -> bool:
        """True when this rank's next step waits for `rank`."""
        count = self._segment.count
        return (
            count(rank, PUBLISHED) <= self._reduced
            or (self._consumed < self._reduced and count(rank, REDUCED) <= self._consumed)
            or count(rank, CONSUMED) <= self._published - NUM_SLOTS
        )

    def _fail(self, text: str, peer_ends: bool = False) -> None:
        self._failure = text
        self._segment.tell(FAILED, 1)
        error = CommError(text)
        error.peer_ends = peer_ends
        raise error

    def _refuse_if_broken(self, operation: Operation) -> None:
        if self._failure:
            raise CommError(f"{operation}: this axis has failed before. {self._failure}")
