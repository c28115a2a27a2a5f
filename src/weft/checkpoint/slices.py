"""Slices of tensors in the manifest: which part of a tensor lies over which ranks' files, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.checkpoint.parts import Deal, Part

_NUMBERS = ("length", "start", "times", "each", "turn")
_MOST = 2**48


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a tensor, and who has which run of it. All slices together are the tensor."""

    part: Part
    deal: Deal

    def to_json(self, tables: RankLists) -> dict[str, object]:
        """For the manifest; what is as usual is left out."""
        deal, part = self.deal, self.part
        said: dict[str, object] = {"ranks": tables.index(deal.ranks)}
        said |= {name: getattr(deal, name) for name in _NUMBERS if getattr(deal, name) != _USUAL[name]}
        if part.rows is not None:
            said |= {"dim": part.dim, "rows": [list(one) for one in part.rows]}
        return said | ({"order": list(part.order)} if part.order else {})


_USUAL = {"length": -1, "start": 0, "times": 1, "each": 0, "turn": 0}


@dataclass(slots=True)
class RankLists:
    """Lists of ranks that many slices refer to."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def index(self, ranks: tuple[int, ...]) -> int:
        """The number of a list, which is added where it is new."""
        if ranks not in self._known:
            self._known[ranks] = len(self.rows)
            self.rows.append(ranks)
        return self._known[ranks]


def read_slices(said: Any, shape: tuple[int, ...], tables: RankLists) -> tuple[Slice, ...]:
    """Check and read slices from untrusted JSON. ValueError, TypeError or KeyError say what is wrong."""
    if not isinstance(said, list) or not said:
        raise ValueError("not a list of slices")
    return tuple(_read(one, shape, tables) for one in said)


def _read(said: Any, shape: tuple[int, ...], tables: RankLists) -> Slice:
    if not isinstance(said, dict):
        raise TypeError("a slice is not a table")
    order, rows, dim = said.get("order", []), said.get("rows"), said.get("dim", 0)
    if order and sorted(map(_whole_number, order)) != list(range(len(shape))):
        raise ValueError("order does not name each dim once")
    if rows is not None:
        if not isinstance(rows, list) or not 0 <= _whole_number(dim) < len(shape):
            raise ValueError("rows or dim are not those of the tensor")
        rows = tuple((_whole_number(low), _whole_number(high)) for low, high in rows)
        if any(low >= high for low, high in rows):
            raise ValueError("a range of rows is empty")
    part = Part(shape, dim if rows is not None else 0, rows, tuple(order))
    row = _whole_number(said["ranks"])
    if row >= len(tables.rows):
        raise ValueError("ranks names a list that is not there")
    deal = Deal(tables.rows[row], **{name: _whole_number(said.get(name, _USUAL[name])) for name in _NUMBERS})
    _check_deal(deal, part.numel)
    return Slice(part, deal)


def _check_deal(deal: Deal, numel: int) -> None:
    if not deal.length or not deal.times or len(deal.ranks) % deal.times or deal.turn >= deal.times:
        raise ValueError("the ranks do not share equal lengths")
    if deal.share * deal.times < deal.length or deal.start + numel > len(deal.ranks) // deal.times * deal.length:
        raise ValueError("the files have no room for all elements")


def check_cover(slices: Sequence[Slice], shape: tuple[int, ...]) -> None:
    """ValueError where slices are not all of the tensor, each element once."""
    if any(one.part.rows is None for one in slices):
        if len(slices) > 1:
            raise ValueError("the whole tensor and parts of it")
        return
    dims = {one.part.dim for one in slices}
    if len(dims) > 1:
        raise ValueError("parts are cut along several dims")
    size = shape[dims.pop()]
    rows = sorted((low, min(high, size)) for one in slices for low, high in one.part.rows or () if low < size)
    ends = [0, *(high for _, high in rows)]
    if ends[-1] != size or [low for low, _ in rows] != ends[:-1]:
        raise ValueError("parts do not join to the tensor")


def _whole_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError("a value is not a whole number from 0 to 2**48")
    return value


def shard_name(group: str, rank: int) -> str:
    """Return the name of a rank's file: ("model", 3) -> "model-00003.safetensors"."""
    return f"{group}-{rank:05d}.safetensors"


def rank_of(file: str) -> int:
    """Return the rank in the name of its file; 0 for a name without one."""
    number = file.removesuffix(".safetensors").rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
