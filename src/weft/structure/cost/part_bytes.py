"""From the rows of a traced run to what one layer moves and keeps: under each recompute policy, plain and compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from weft.structure.cost.kernel_recorder import KernelRecorder, Row

#: What of a part's bytes is cut by tp, what a column-cut layer reads whole, and the rest.
Bytes = tuple[float, float, float]


@dataclass(slots=True)
class PartOfRun:
    """One layer in one run. inputs: bytes of the activations it got, by storage. outputs: storages of what it gave."""

    path: str
    inputs: dict[int, int] = field(default_factory=dict[int, int])
    outputs: set[int] = field(default_factory=set[int])
    count: int = 1
    output_values: int = 0
    params_cut: int = 0
    params_whole: int = 0


@dataclass(slots=True)
class Measured:
    """What one run says of a part, in numbers: products and attentions in order, and bytes."""

    heavy: list[Row]
    moved: dict[str, Bytes]
    saved: dict[str, Bytes]
    reduced: float
    kernels: tuple[int, int]


def makers_of(recorder: KernelRecorder, passed: Set[int]) -> dict[int, int]:
    """The part that made each storage in forward, but for `passed`, which layers got as activations.

    What one part makes and another keeps, such as rotary tables, is kept once, by the one that made it.
    """
    found: dict[int, int] = {}
    for row in recorder.rows:
        if not row.backward:
            found |= dict.fromkeys(row.writes.keys() - found.keys() - passed, row.part)
    return found


class PartReader:
    """Reads one part's rows.

    ignored: storages of parameters, buffers and the model's inputs. makers: see `makers_of`.
    """

    def __init__(
        self, recorder: KernelRecorder, number: int, part: PartOfRun, ignored: set[int], makers: Mapping[int, int]
    ):
        self.recorder, self.part, self.ignored = recorder, part, ignored
        self.rows = [row for row in recorder.rows if row.part == number]
        self.forward = [row for row in self.rows if not row.backward]
        self.backward = [row for row in self.rows if row.backward]
        self.heavy = [row for row in self.forward if row.kind != "pass"]
        self.maker: dict[int, Row] = {}
        for row in self.forward:
            for key in row.writes:
                self.maker.setdefault(key, row)
        self.saved = {
            key: each
            for key, each in recorder.saved.items()
            if makers.get(key, each.part) == number and key not in ignored
        }
        self.operands = {key for row in self.heavy for key in row.reads}
        self.dropped = self._dropped()

    def measure(self) -> Measured:
        """All of it."""
        saved = {
            "none": self.saved.keys(),
            "attention": [key for key, each in self.saved.items() if not each.in_attention or key in self.operands],
            "compiled": self.saved.keys() - self.dropped,
        }
        sizes = {key: each.num_bytes for key, each in self.saved.items()}
        # What column-cut products read under sp is kept as the rank's own part, and gathered again in backward.
        none: frozenset[int] = frozenset()
        kept = {name: self._divided(((key, sizes[key]) for key in keys), none) for name, keys in saved.items()}
        kept["full"] = self._divided(self.part.inputs.items(), none)
        summed = {key for row in self.heavy if row.cut == "rows" for key in row.writes}  # kept before ranks add them up
        kept["selective"] = self._divided(self._selective().items(), summed)
        moved = {
            "moved_forward": self._moved(self.forward),
            "moved_backward": self._moved(self.backward),
            "fused_forward": self._fused(self.forward),
            "fused_backward": self._with_dropped(self._fused(self.backward)),
        }
        values = sum(row.dims[0] * row.dims[1] * row.dims[3] for row in self.heavy if row.cut == "rows")
        fused = len(self.heavy) + len(list(_chains(self.forward)))
        kernels = (len(self.forward), fused)
        return Measured(self.heavy, moved, kept, values, kernels)

    def _divided(self, items: Iterable[tuple[int, float]], gathered: Set[int]) -> Bytes:
        """Bytes that tp divides, that it does not divide even under sp, and that it divides under sp."""
        found = [0.0, 0.0, 0.0]
        for key, size in items:
            found[0 if key in self.recorder.cut else 1 if key in gathered else 2] += size
        return found[0], found[1], found[2]

    def _selective(self) -> dict[int, int]:
        """What the layer got, and what its heavy operations made up to the last thing that backward needs."""
        last = max((each.place for each in self.saved.values()), default=0)
        kept = dict(self.part.inputs)
        for place, row in enumerate(self.recorder.rows):
            if row.part == self.rows[0].part and row.is_heavy and place < last and not row.backward:
                kept |= row.writes
        return kept

    def _dropped(self) -> set[int]:
        """Saved tensors that compiled code makes again from others, since element-wise chains are cheap."""
        kept: set[int] = set()
        dropped: set[int] = set()
        for key in self.saved:
            row = self.maker.get(key)
            again = row is not None and row.kind == "pass"
            if row is not None and again and all(self._at_hand(each, kept, 64) for each in row.reads if each != key):
                dropped.add(key)
            else:
                kept.add(key)
        return dropped

    def _at_hand(self, key: int, kept: set[int], depth: int) -> bool:
        if key in kept or key in self.ignored or key in self.part.inputs:
            return True
        row = self.maker.get(key)
        if row is None:
            return True  # made before the layer, or a constant
        if row.kind != "pass" or depth == 0:
            return False
        return all(self._at_hand(each, kept, depth - 1) for each in row.reads if each != key)

    def _moved(self, rows: Iterable[Row]) -> Bytes:
        found = [0.0, 0.0, 0.0]
        for row in rows:
            if row.kind == "pass":
                size = sum(row.reads.values()) + sum(row.writes.values())
                found[0 if row.cut == "inside" else 2] += size
        return found[0], found[1], found[2]

    def _fused(self, rows: list[Row]) -> Bytes:
        """Bytes where each chain of element-wise kernels reads what comes into it and writes what leaves it."""
        found = [0.0, 0.0, 0.0]
        for chain in _chains(rows):
            members = {id(row) for row in chain}
            made = {key for row in chain for key in row.writes}
            read: dict[int, int] = {}
            for row in chain:
                for key, size in row.reads.items():
                    if key not in made:
                        read |= self._sources(key, size)
            outside = {key for row in self.rows if id(row) not in members for key in row.reads}
            used = {key for row in chain for key in row.reads}
            wanted = outside | self.part.outputs | (self.saved.keys() - self.dropped)
            written = {
                key: size
                for row in chain
                for key, size in row.writes.items()
                if key in wanted or (row.backward and key not in used)
            }
            size = sum(read.values()) + sum(written.values())
            found[0 if any(row.cut == "inside" for row in chain) else 2] += size
        return found[0], found[1], found[2]

    def _with_dropped(self, moved: Bytes) -> Bytes:
        """What backward moves, and the inputs of products that it writes again."""
        found = list(moved)
        for key in self.dropped & self.operands:
            found[0 if key in self.recorder.cut else 2] += self.saved[key].num_bytes
        return found[0], found[1], found[2]

    def _sources(self, key: int, size: int) -> Mapping[int, int]:
        """What is read in the place of a tensor that compiled code does not keep."""
        if key not in self.dropped:
            return {key: size}
        found: dict[int, int] = {}
        for each, part in self.maker[key].reads.items():
            if each != key:
                found |= self._sources(each, part)
        return found


def _chains(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """Runs of rows without a product or attention between them."""
    chain: list[Row] = []
    for row in rows:
        if row.kind == "pass":
            chain.append(row)
        elif chain:
            yield chain
            chain = []
    if chain:
        yield chain
