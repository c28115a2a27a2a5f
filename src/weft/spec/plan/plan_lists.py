"""Kinds of values of which a plan's field holds several, joined by "+": counts, axes, shares."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

from weft.errors import shown
from weft.spec.plan.plan_values import LARGEST, Kind, PlanColumn, Schema, choice, listed, refused

_COUNTS = re.compile(r"[1-9][0-9]{0,5}(\+[1-9][0-9]{0,5})*", re.ASCII)
_SHARE = re.compile(r"[01]|[01]?\.[0-9]{1,6}|[0-9]{1,3}%", re.ASCII)


class _Listed(Kind):
    """Several values, joined by "+"; "none" for none of them."""

    def read(self, value: object) -> object:
        if isinstance(value, str):
            return tuple(self.part(part) for part in value.split("+")) if value != "none" else ()
        return tuple(cast(list[object], value)) if isinstance(value, list) else value

    def part(self, text: str) -> object:
        """One of the values."""
        return text

    def write(self, value: Any) -> str:
        return "+".join(map(str, cast(tuple[object, ...], value))) or "none"


@dataclass(frozen=True, slots=True)
class Counts(_Listed):
    """Whole numbers from 1, one for each stage of a pipeline."""

    def read(self, value: object) -> object:
        if isinstance(value, str) and value != "none" and not _COUNTS.fullmatch(value):
            return value
        return _Listed.read(self, value)

    def part(self, text: str) -> object:
        return int(text)

    def check(self, name: str, value: object) -> tuple[int, ...]:
        counts = cast(tuple[object, ...], value) if isinstance(value, tuple) else (None,)
        if all(isinstance(count, int) and not isinstance(count, bool) and 0 < count <= LARGEST for count in counts):
            return cast(tuple[int, ...], counts)
        rule = f"each stage takes a whole number of blocks, at least 1. Use e.g. {name}=3+4+4+3, or leave it out."
        raise refused(name, f"{name}={shown(cast(object, value))}: {rule}")

    def words(self) -> str:
        return "whole numbers joined by `+`"

    def schema(self) -> Schema:
        counts: Schema = {"type": "array", "items": {"type": "integer", "minimum": 1}}
        return {"anyOf": [counts, {"type": "string", "pattern": f"^(none|{_COUNTS.pattern})$"}]}


@dataclass(frozen=True, slots=True)
class AxisOrder(_Listed):
    """Some of the axes, each once, outermost first. Those that are left out have one rank and come first."""

    axes: tuple[str, ...]

    def check(self, name: str, value: object) -> tuple[str, ...]:
        names = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
        for axis in names:
            choice(name, axis, self.axes)
        if len(set(names)) < len(names):
            rule = f"each axis may appear once. Use e.g. {name}=tp+dp_shard, or leave it out."
            raise refused(name, f"{name}={'+'.join(map(str, names))}: {rule}")
        return cast(tuple[str, ...], names)

    def words(self) -> str:
        return f"{listed(self.axes)}, joined by `+`"

    def schema(self) -> Schema:
        names: Schema = {"type": "array", "items": {"enum": list(self.axes)}, "uniqueItems": True}
        return {"anyOf": [names, {"type": "string"}]}

    def columns(self, name: str) -> tuple[PlanColumn, ...]:
        return (PlanColumn(name, "uint8"),)

    def encode(self, value: Any) -> tuple[float, ...]:
        return (orders(self.axes).index((*(axis for axis in self.axes if axis not in value), *value)),)

    def decode(self, *numbers: Any) -> tuple[str, ...]:
        return orders(self.axes)[int(numbers[0])]


@functools.cache
def orders(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return every order of the axes, first the usual one."""
    return tuple(itertools.permutations(axes))


@dataclass(frozen=True, slots=True)
class WordShares(_Listed):
    """Any of a few words, each whole or with a share of it: "optimizer", "optimizer:0.5", "optimizer:50%"."""

    known: tuple[str, ...]

    def read(self, value: object) -> object:
        if isinstance(value, str):
            return tuple(part for part in value.split("+") if part != "none")
        return _Listed.read(self, value)

    def check(self, name: str, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = (value,)
        if not isinstance(value, tuple):
            rule = f"it lists what to keep in host memory. Use e.g. {name}=optimizer+activations."
            raise refused(name, f"{name}={shown(value)}: {rule}")
        chosen: dict[str, str] = {}
        for part in cast(tuple[object, ...], value):
            word, shared = self._shared(name, part)
            if chosen.setdefault(word, shared) != shared:
                raise refused(name, f"{name}={shown(part)}: {word} already has another share. Keep one.")
        return tuple(chosen[word] for word in self.known if word in chosen)

    def _shared(self, name: str, part: object) -> tuple[str, str]:
        """ "optimizer", and "optimizer" or "optimizer:0.5": the word, and the word with its share."""
        if not isinstance(part, str):
            return choice(name, part, self.known), ""
        word, colon, share = part.partition(":")
        choice(name, word, self.known)
        if not colon:
            return word, word
        fraction = Decimal(share.rstrip("%")) / (100 if "%" in share else 1) if _SHARE.fullmatch(share) else Decimal(0)
        if not 0 < fraction <= 1:
            rule = f"a share is a number above 0 and at most 1. Use e.g. {name}={word}:0.5."
            raise refused(name, f"{name}={shown(part)}: {rule}")
        return word, word if fraction == 1 else f"{word}:{fraction.normalize():f}"

    def words(self) -> str:
        return f"any of {listed(self.known)}, joined by `+`, each whole or with a share (`:0.5`)"

    def schema(self) -> Schema:
        return {"type": "array", "items": {"type": "string", "pattern": f"^({'|'.join(self.known)})(:.+)?$"}}

    def columns(self, name: str) -> tuple[PlanColumn, ...]:
        return tuple(PlanColumn(f"{name}_{word}", "float64") for word in self.known)

    def encode(self, value: Any) -> tuple[float, ...]:
        return tuple(share_of(value, word) for word in self.known)

    def decode(self, *numbers: Any) -> tuple[str, ...]:
        shares = [(word, float(share)) for word, share in zip(self.known, numbers, strict=True)]
        return tuple(word if share >= 1 else f"{word}:{share:.2g}" for word, share in shares if share > 0)


def share_of(value: Sequence[str], word: str) -> float:
    """The share that a value of `WordShares` has of a word: 0.0 to 1.0."""
    shares = [part.partition(":")[2] or "1" for part in value if part.partition(":")[0] == word]
    return float(shares[0]) if shares else 0.0
