"""The order in which a rank gathers and reduces units, compared with the other ranks once and then with its own record.

Blocks are alike, so a rank that skips one would gather its shard of block 3 together with another rank's shard of
block 4, and compute with weights that never existed. In the first step the ranks therefore tell each other, before
every gather and reduction, what it is for. What they agreed on is the record of the steps that follow: a rank that
does what the record says asks nobody, and a rank that does something else asks the others. Where all ranks changed in
the same way they agree on the rest of this step, and it is the new record. Where others did not change, they are in the
gather or reduction of the record while this rank is in a comparison. The transport tells both that the two do not fit;
where it cannot (nccl), the hang is reported as any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import IntEnum

import torch

from weft.comm import all_gather
from weft.errors import CommError
from weft.mesh import Axis

#: Forwards without a step add up (evaluation does); beyond this many acts there is no record to keep.
_MOST = 1 << 16
_REMEDY = (
    "Call the same modules in the same order on all of them; where one has nothing to compute, multiply its output "
    "by zero."
)


class Act(IntEnum):
    """What a rank is about to do with a unit."""

    GATHER = 0
    REDUCE = 1
    SUM = 2
    END = 3

    def told(self, unit: str) -> str:
        """In words, for an error."""
        if self is Act.END:
            return "ends the step"
        return f"{('gathers the weights', 'reduces the gradients', 'sums the gradients')[self]} of {unit}"


#: What a rank does, with which unit, in how many elements.
Entry = tuple[Act, int, int]


class Order:
    """What this rank does with the units over one axis, from one end of a step to the next.

    units: their names, by number.
    """

    def __init__(self, axis: Axis, units: Sequence[str]):
        self._axis = axis
        self._units = units
        self._record: list[Entry] = []
        self._done: list[Entry] = []  # in this step, while it is compared
        self._place = 0  # in the record, while this rank follows it
        self._follows = False

    def meet(self, act: Act, unit: int = 0, num_elements: int = 0) -> None:
        """Say what comes; CommError where ranks come for different things. No collective while it is as recorded."""
        if self._axis.size == 1:
            return
        entry = (act, unit, num_elements)
        if self._follows and self._record[self._place] != entry:
            self._leave_record(entry)
        elif self._follows:
            self._place += 1
        else:
            self._compare(entry)
            self._done.append(entry)
        if act is Act.END:
            self._end()
        elif len(self._done) > _MOST:
            self._done = []
            self._record = []

    def explain(self, error: CommError) -> CommError:
        """What to raise where a gather or reduction that was met for failed."""
        if not self._follows or not self._place:
            return error
        act, unit, _ = self._record[self._place - 1]
        return CommError(
            f"rank {self._rank} {act.told(self._units[unit])} as in the step before, and another rank does not "
            f"({error}) {_REMEDY}"
        )

    def first_gathers(self) -> list[int]:
        """Return the units that a step begins to gather, in order, up to the first that it does anything else with."""
        gathers = itertools.takewhile(lambda entry: entry[0] is Act.GATHER, self._record)
        return list(dict.fromkeys(unit for _, unit, _ in gathers))

    @property
    def _rank(self) -> int:
        return self._axis.ranks[self._axis.rank]

    def _end(self) -> None:
        if not self._follows:
            self._record, self._done = self._done, []
        self._follows = bool(self._record)
        self._place = 0

    def _leave_record(self, entry: Entry) -> None:
        """This rank does not do what it did in the step before: right where all ranks changed in the same way."""
        self._done = self._record[: self._place]
        self._follows = False
        act, unit, _ = self._record[self._place]
        before = act.told(self._units[unit])
        try:
            self._compare(entry)
        except CommError as error:
            if isinstance(error, _Disagreement):
                raise
            now = entry[0].told(self._units[entry[1]])
            size = f" in {entry[2]} elements" if now == before else ""
            raise CommError(
                f"rank {self._rank} {now}{size}, and in the step before it was {before!r} here; other ranks did not "
                f"change ({error}) {_REMEDY}"
            ) from error
        self._done.append(entry)

    def _compare(self, entry: Entry) -> None:
        """All ranks' entries. In whole numbers, as no gather of weights is: two that do not fit are told apart."""
        mine = torch.tensor(entry, dtype=torch.int64)
        found = all_gather(mine, self._axis).view(-1, 3).tolist()
        rows: list[Entry] = [(Act(act), unit, size) for act, unit, size in found]
        if all(row == rows[0] for row in rows):
            return
        ranks = self._axis.ranks
        other = next(index for index, row in enumerate(rows) if row != rows[0])
        (act, unit, size), (other_act, other_unit, other_size) = rows[0], rows[other]
        ours, theirs = act.told(self._units[unit]), other_act.told(self._units[other_unit])
        if (act, unit) == (other_act, other_unit):
            raise _Disagreement(
                f"rank {ranks[0]} {ours} in {size} elements and rank {ranks[other]} in {other_size}: the ranks used "
                f"different parameters of it in this step. Use the same ones on all ranks; where one has nothing to "
                f"compute, multiply its output by zero."
            )
        raise _Disagreement(
            f"rank {ranks[0]} {ours} while rank {ranks[other]} {theirs}: the ranks call different modules, and with "
            f"zero=3 each call needs all ranks. {_REMEDY}"
        )


class _Disagreement(CommError):
    """Ranks that compared what they do, and do different things."""
