"""Wire formats of gradients and weights, with their cost, without torch. `weft.comm.wire` has the codecs.

To add a format, add one file with its codec and one `register` call. Its name is then a valid value of the plan's
`reduce`, and of `compress` if it rounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from weft.errors import PlanError


@dataclass(frozen=True, slots=True)
class WireSpec:
    """Properties of a wire format for planner and plan.

    Attributes:
        name: value in the plan.
        codec: its class as "module:Class", imported when ranks use it.
        exact: no rounding.
        element_bytes: bytes of one value on the wire; 0: as in memory.
        block, block_bytes: additional bytes (a scale) per block of values.
        state_bytes: bytes that each rank keeps from step to step, per value it sends.
        outer_only: valid for `compress` only.
        rank: rank of the low-rank matrices that are sent; 0: values are encoded one by one.
        kept: number of values of each block that are sent (the others are added to the residual); 0: all.
        exact_steps: number of first steps of a run that do not use the format.
    """

    name: str
    codec: str
    exact: bool = False
    element_bytes: float = 0.0
    block: int = 1
    block_bytes: float = 0.0
    state_bytes: float = 0.0
    outer_only: bool = False
    rank: int = 0
    kept: int = 0
    exact_steps: int = 0

    def num_bytes(self, numel: Any, own_bytes: Any = 4.0) -> Any:
        """Return the encoded bytes of `numel` values that have `own_bytes` each in memory.

        Accepts numbers and numpy arrays.
        """
        values = numel * (self.element_bytes or own_bytes)
        if self.element_bytes % 1:
            values = -(-values // 1)  # a row ends with a whole byte
        return values + -(-numel // self.block) * self.block_bytes if self.block_bytes else values

    def copy_bytes(self, own_bytes: float = 4.0) -> float:
        """Return bytes per value of the encoded copy while a gradient is being sent; 0 if it is sent as in memory."""
        many = 1 << 20
        return self.num_bytes(many, own_bytes) / many if self.element_bytes else 0.0


#: Formats by name, in the order of registration. It only grows, because planner columns store indices into it.
_KNOWN: dict[str, WireSpec] = {}


def register(wire: WireSpec) -> WireSpec:
    """Make a format a valid value of `reduce` and `compress`, or of `compress` alone if `outer_only`.

    Registering it again has no effect. Raise PlanError for a taken name.
    """
    if _KNOWN.setdefault(wire.name, wire) != wire:
        raise PlanError(f"reduce={wire.name}: another wire format has this name. Register it under another name.")
    return wire


def wire_spec(name: str) -> WireSpec:
    """Return the wire format of a name, which may be one of GATHERS except "none".

    A format with a new parameter, such as `powersgd:4` or `top:0.02`, is registered.
    """
    if name not in _KNOWN and (rank := rank_of(name)) is not None:
        register(_low_rank(rank))
    if name not in _KNOWN and num_values_sent(name) is not None:
        register(_largest(name))
    if name in _OF_WEIGHTS:
        return _OF_WEIGHTS[name]
    return _KNOWN["int4" if name == "diff4" else name]  # differences have the bytes of int4


#: Names of low-rank formats end with the rank. A higher rank would send more than int8 for typical matrices.
LOW_RANK, LARGEST_RANK = "powersgd", 64


def rank_of(name: str) -> int | None:
    """Return the rank in a low-rank name (4 for `powersgd:4`), or None for another format."""
    found = re.fullmatch(rf"{LOW_RANK}:([1-9][0-9]?)", name, re.ASCII)
    return int(found[1]) if found and int(found[1]) <= LARGEST_RANK else None


def _low_rank(rank: int) -> WireSpec:
    # 2 r n values of an n x n matrix are sent. The planner assumes n = 1024, and later reductions of the same size.
    return WireSpec(
        f"{LOW_RANK}:{rank}", "weft.comm.wire.low_rank:LowRank", element_bytes=4.0 * 2 * rank / 1024, state_bytes=4.0,
        outer_only=True, rank=rank, exact_steps=100,
    )  # fmt: skip


#: Top-k format: its name (followed by the fraction of values that are sent), the maximum fraction, and values per
#: block.
LARGEST_VALUES, MOST_SHARE, _NEIGHBOURS = "top", 0.25, 4096


def num_values_sent(name: str) -> int | None:
    """Return the number of values sent per block of 4096 (82 for `top:0.02`), or None for another format."""
    found = re.fullmatch(rf"{LARGEST_VALUES}:(0\.[0-9]{{1,6}})", name, re.ASCII)
    share = float(found[1]) if found else 0.0
    return math.ceil(share * _NEIGHBOURS) if 0 < share <= MOST_SHARE else None


def _largest(name: str) -> WireSpec:
    kept = num_values_sent(name) or 1
    return WireSpec(
        name, "weft.comm.wire.codes:Largest", element_bytes=2.0 * kept / _NEIGHBOURS, block=_NEIGHBOURS,
        block_bytes=2.0, state_bytes=4.0, outer_only=True, kept=kept,
    )  # fmt: skip


#: Formats of weights: for zero=3 as `comm/wire/codes.py` encodes them; for zero=1 and 2 as differences in int4.
GATHERS = ("none", "int8", "diff4", "fp8")
#: Formats for weights only. In fp8 each row has one scale; the planner assumes rows of this length.
_OF_WEIGHTS = {"fp8": WireSpec("fp8", "weft.comm.wire.codes:RowCodes", element_bytes=1.0, block=4096, block_bytes=2.0)}

#: How replicas synchronize: gradients in every step, or after several steps the average of weights, or DiLoCo's outer
#: step.
SYNCS = ("step", "average", "diloco")
_SYNC = re.compile(r"(average|diloco):([1-9][0-9]{0,5})(?:/([1-9][0-9]{0,5}))?", re.ASCII)


def sync_of(text: str) -> tuple[str, int, int]:
    """Return method, steps and fragments of a `sync` value, such as ("diloco", 50, 4) for `diloco:50/4`.

    "step" is ("step", 1, 0). 0 fragments: all parameters are synchronized together, without overlapped computation.

    Raises:
        ValueError: if the text is not one of SYNCS with a number of steps, and at most as many fragments.
    """
    if text == SYNCS[0]:
        return text, 1, 0
    found = _SYNC.fullmatch(text)
    if found is None or int(found[3] or 0) > int(found[2]):
        raise ValueError(text)
    return found[1], int(found[2]), int(found[3] or 0)


def has_number(name: str) -> bool:
    """Return True for the name of a wire format with a parameter, such as `powersgd:4` or `top:0.02`."""
    return rank_of(name) is not None or num_values_sent(name) is not None


class _Names(Sequence[str]):
    """Names of all registered wire formats, including those registered later."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def _all(self) -> tuple[str, ...]:
        return tuple(name for name, wire in _KNOWN.items() if not wire.outer_only)


class _RoundingNames(_Names):
    """ "none", and names of the lossy wire formats, with any rank or fraction."""

    def __contains__(self, name: object) -> bool:
        return name in self._all() or (isinstance(name, str) and has_number(name))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the index of a name. Register the format if its name has a new parameter."""
        if isinstance(value, str) and has_number(value):
            wire_spec(value)
        return self._all().index(value, start, len(self._all()) if stop is None else stop)

    def _all(self) -> tuple[str, ...]:
        return ("none", *(name for name, wire in _KNOWN.items() if not wire.exact))


WIRES = _Names()
#: Lossy formats of gradients for the outermost data axis only.
COMPRESSES = _RoundingNames()

register(WireSpec("fp32", "weft.comm.wire.codes:AsIs", exact=True))
register(WireSpec("bf16", "weft.comm.wire.codes:Bf16", element_bytes=2.0))
register(WireSpec("int8", "weft.comm.wire.codes:Int8", element_bytes=1.0, block=256, block_bytes=2.0))
register(WireSpec("int4", "weft.comm.wire.codes:Int4", element_bytes=0.5, block=64, block_bytes=2.0, state_bytes=4.0,
                  outer_only=True))  # fmt: skip
register(_low_rank(4))
