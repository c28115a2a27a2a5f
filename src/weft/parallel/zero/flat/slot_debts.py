"""What is owed of each parameter, as whole tensors by name: any plan reads them, whatever ranks and wire it has.

A replica r keeps what it rounded off of its own sums, `parameter/residual.r`; who owns a part of the total keeps what
it rounded off of that, `parameter/residual.owner`. What counts is their sum. The same number of replicas takes back
what it had; another one takes equal shares of the sum; and where nothing is fed back any more, the sum goes with the
gradients of the first step, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weft.checkpoint.parts import Deal
from weft.comm.wire import Coder
from weft.parallel.local_tensors import StateSource, Stretch
from weft.parallel.placement import AxisMap
from weft.parallel.zero.flat.bucket_sums import BucketSums
from weft.parallel.zero.flat.buckets import Bucket, Slot
from weft.parallel.zero.owed import read_owed, replicas_in

_OWNER = "owner"


class SlotDebts:
    """Debts of parameters in buckets.

    Args:
        sums: of the buckets.
        axes: of the module.
    """

    def __init__(self, sums: BucketSums, axes: AxisMap):
        self._sums, self._axes = sums, axes
        self.buckets: Sequence[Bucket] = ()

    def stretches(self) -> Iterator[Stretch]:
        """Yield what this rank owes, in its own memory; no collective."""
        for bucket in self.buckets:
            if (coder := self._sums.debtor(bucket)) is None:
                continue
            kept = dict(coder.states())
            for whose, key, low, high in self._keys(bucket):
                if (flat := kept.get(key)) is not None:
                    yield from self._of(bucket, whose, flat.view(-1), low, high)

    @torch.no_grad()
    def take(self, source: StateSource) -> list[str]:
        """Take over what any plan owed. Returns lines for people, where it is not as it was."""
        saved = replicas_in(source)
        if not saved:
            return []
        number = 0
        for bucket in self.buckets:
            coder, number = self._sums.debtor(bucket), bucket.over.outer.size
            if coder is None:
                own = bucket.own.start, bucket.own.stop
                self._sums.coders.owed[bucket.slots[0].name] = self._all_of(bucket, *own, source)
                continue
            found: dict[str, torch.Tensor] = {}
            for whose, key, low, high in self._keys(bucket):
                if saved == number:
                    found[key] = self._all_of(bucket, low, high, source, (whose,))
                elif whose != _OWNER:
                    found[key] = self._all_of(bucket, low, high, source) / number
            self._load(bucket, coder, found)
        if self._sums.coders.owed:
            return ["what compress rounded off before and still owes goes with the gradients of the first step"]
        return [] if saved == number else [f"what {saved} replicas owe of rounded gradients is shared by {number} now"]

    def _load(self, bucket: Bucket, coder: Coder, found: dict[str, torch.Tensor]) -> None:
        shaped = {name: tensor for name, tensor in coder.states() if not name.endswith("/residual")}
        for key, flat in found.items():
            rows, numel = map(int, key.removesuffix("/residual").rpartition("-")[2].split("x"))
            whole = torch.zeros(rows * numel, dtype=flat.dtype, device=flat.device)
            whole[: flat.numel()] = flat
            shaped[key] = whole.view(rows, numel)
        coder.load(shaped)

    def _keys(self, bucket: Bucket) -> Iterator[tuple[str, str, int, int]]:
        """Of what a bucket's coder keeps: whose it is, its name there, and the first element and end in the bucket."""
        outer, span = bucket.over.outer, self._span(bucket)
        numel, size = span.stop - span.start, outer.size
        if self._sums.divides(bucket) and not self._sums.coders.outer_wire.spec.rank:
            yield str(outer.rank), f"summands-{size}x{bucket.length}/residual", span.start, span.stop
            return
        if size == 2 or self._sums.coders.outer_wire.spec.rank:
            yield str(outer.rank), f"summands-1x{numel}/residual", span.start, span.stop
            return
        each = -(-numel // size)
        yield str(outer.rank), f"summands-{size}x{each}/residual", span.start, span.stop
        first = span.start + outer.rank * each
        yield _OWNER, f"sums-1x{each}/residual", min(first, span.stop), min(first + each, span.stop)

    def _span(self, bucket: Bucket) -> slice:
        """What of a bucket this rank sends over the outermost axis."""
        return slice(0, bucket.size) if self._sums.divides(bucket) or bucket.num_shards == 1 else bucket.own

    def _of(self, bucket: Bucket, whose: str, flat: torch.Tensor, low: int, high: int) -> Iterator[Stretch]:
        """Stretches of all parameters of which `flat` has elements: those of the bucket from `low` to `high`."""
        for slot in bucket.slots:
            start, end = max(slot.start, low), min(slot.start + slot.numel, high)
            if start < end:
                name = f"{self._axes.saved_name(slot.name)}/residual.{whose}"
                part = self._axes.part_of(slot.name, slot.param)
                deal = self._deal(bucket, slot, whose)
                yield Stretch(name, part, deal, start - slot.start, flat[start - low : end - low])

    def _deal(self, bucket: Bucket, slot: Slot, whose: str) -> Deal:
        """Who writes which elements of a parameter's debt: of ranks that owe the same the first."""
        kind, me = bucket.over, self._axes.mesh.rank
        near = kind.alike[0] - me
        shards = kind.shard.ranks if self._span(bucket) == bucket.own and bucket.num_shards > 1 else (me,)
        length = bucket.length if len(shards) > 1 else bucket.size
        if whose != _OWNER:
            return Deal(tuple(rank + near for rank in shards), length, slot.start)
        # Each of the parts is cut again for its owners, whose ranks lie from each other as those of this rank's do.
        ranks = tuple(rank + near + owner - me for rank in shards for owner in kind.outer.ranks)
        return Deal(ranks, length, slot.start, kind.outer.size, -(-length // kind.outer.size))

    def _all_of(
        self, bucket: Bucket, low: int, high: int, source: StateSource, whose: tuple[str, ...] = ()
    ) -> torch.Tensor:
        """What was owed of the elements from `low` to `high`: by some, or by all together."""
        total = torch.zeros(high - low, dtype=bucket.master.dtype, device=bucket.weights.device)
        for like in self._of(bucket, whose[0] if whose else _OWNER, total, low, high):
            read_owed(like, source, whose)
        return total
