"""Over which ranks a bucket's gradients add up, one way after another, and what travels on each."""

from __future__ import annotations

import torch

from weft.comm import Pending, all_reduce, start_all_reduce
from weft.comm.links import Parts
from weft.comm.wire import Coder, Coders, Matrix, matrices_of
from weft.parallel.zero.flat.buckets import Bucket

#: The ways of a bucket's gradients: to the ranks that divide it, over those with equal parts, and in a user's own loop.
_WAYS = ("shard", "replicas", "own")


class BucketSums:
    """Starts sums of buckets. coders: what travels in place of gradients.

    What `compress` names travels over the outermost data axis alone, and last: of sums that are exact.
    """

    def __init__(self, coders: Coders):
        self.coders = coders

    def discard(self, bucket: Bucket) -> None:
        """Forget what the wires of a bucket would carry from this step."""
        for way in _WAYS:
            self._coder(bucket, way).discard()
            self._outer_coder(bucket, way).discard()

    def shard_coder(self, bucket: Bucket) -> Coder:
        """Return the wire of the way to the ranks that divide a bucket."""
        return self._sending(bucket, "shard") if self.divides(bucket) else self._coder(bucket, "shard")

    def divides(self, bucket: Bucket) -> bool:
        """Whether what goes over the outermost axis are the parts of the ranks that divide a bucket."""
        return bucket.num_shards > 1 and bucket.over.outer.ranks == bucket.over.shard.ranks

    def debtor(self, bucket: Bucket) -> Coder | None:
        """Return the coder that owes what it rounds off of a bucket; None: none does."""
        if not self.coders.outer_wire.feeds_back or bucket.over.outer.size == 1:
            return None
        return self._outer_coder(bucket, "shard" if self.divides(bucket) else "replicas")

    def over_replicas(self, bucket: Bucket, sums: torch.Tensor, parts: Parts | None = None) -> Pending:
        """Begin to add up, in place, over those with equal parts.

        Args:
            bucket: of the gradients.
            sums: what this rank has of them, and gets.
            parts: where they lie, if not in `sums` yet.
        """
        over, coder = bucket.over, self._coder(bucket, "replicas")
        if over.outer.size == 1 or self.divides(bucket):
            return start_all_reduce(sums, over.replicate, parts=parts, wire=coder)
        if parts is None:
            # What a wire made of a block that was not finite covers what lies between parameters too, and would stay.
            own = slice(0, bucket.size) if bucket.num_shards == 1 else bucket.own
            for gap in bucket.gaps:
                sums[max(gap.start - own.start, 0) : max(gap.stop - own.start, 0)].zero_()
        if over.beside.size > 1:
            start_all_reduce(sums, over.beside, parts=parts, wire=coder).wait()
            parts = None
        return start_all_reduce(sums, over.outer, parts=parts, wire=self._sending(bucket, "replicas"))

    def over_all(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        """Begin to add up a whole bucket, in place, in a user's own loop."""
        over, coder = bucket.over, self._coder(bucket, "own")
        if over.outer.size == 1:
            return start_all_reduce(flat, over.over, wire=coder)
        all_reduce(flat, over.inner, wire=coder)
        return start_all_reduce(flat, over.outer, wire=self._outer_coder(bucket, "own"))

    def _coder(self, bucket: Bucket, way: str) -> Coder:
        return self.coders[f"{bucket.slots[0].name} {way}"]

    def _outer_coder(self, bucket: Bucket, way: str) -> Coder:
        return self.coders.outer(f"{bucket.slots[0].name} {way}")

    def _sending(self, bucket: Bucket, way: str) -> Coder:
        """The same, which knows where matrices lie."""
        coder = self._outer_coder(bucket, way)
        if rank := coder.wire.spec.rank:
            # Row by row: a part of a bucket holds whole rows of a matrix and pieces of two, which travel as they are.
            span = slice(0, bucket.size) if self.divides(bucket) or bucket.num_shards == 1 else bucket.own
            coder.matrices = () if self.coders.is_exact else matrices_in(bucket, span, rank)
        return coder


def matrices_in(bucket: Bucket, span: slice, rank: int) -> list[Matrix]:
    """Return the matrices of a bucket's parameters, or those of their rows that lie in a span, counted from its start.

    Args:
        bucket: of the parameters.
        span: first element and end in the bucket.
        rank: at which a matrix must be worth its while.
    """
    found: list[Matrix] = []
    for slot in bucket.slots:
        start, end = slot.inside(span)
        sizes = sorted(zip(slot.stride, slot.shape, strict=True), reverse=True)
        shape = [size for _, size in sizes]
        found += matrices_of(shape, start - slot.start, end - slot.start, slot.start - span.start, rank)
    return sorted(found)
