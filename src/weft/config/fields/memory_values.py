"""Values of the plan fields that trade time for memory: recompute policies and budgets, and shares in host memory."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

from weft import units
from weft.config.fields.plan_values import Kind, ListKind, PlanColumn, Schema, choice, listed, number_of, numbered
from weft.errors import PlanError, Problem, shown

_BLOCKS = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)
_FRACTION = re.compile(r"0?\.0*[1-9][0-9]*|[1-9][0-9]?%")
_SHARE = re.compile(r"[01]|[01]?\.[0-9]{1,6}|[0-9]{1,3}%", re.ASCII)


@dataclass(frozen=True, slots=True)
class PolicyOrBudget(Kind):
    """A recompute policy, a policy for the first N blocks of each rank ("full:8"), or a budget ("12GiB", "50%").

    A list has a policy for each rank of a pipeline ("full+none"). The planner's first columns have rank 0's policy.
    """

    known: tuple[str, ...]

    def check(self, name: str, value: object) -> str:
        if isinstance(value, str):
            if all(map(self._is_policy, value.split("+"))) or _FRACTION.fullmatch(value):
                return value
            try:
                if not value.isdigit() and units.parse_bytes(value) > 0:
                    return "".join(value.split())
            except ValueError:
                pass  # neither a name nor a size: rejected below with the list of allowed values
        if isinstance(value, str) and "+" in value:
            rule = f"each rank of pp has one of {', '.join(self.known)}, and no budget. Use e.g. {name}=full+none."
            raise PlanError([Problem.of(name, shown(value), rule)])
        rule = f"not one of {', '.join(self.known)}, nor a budget. Use one of them, or e.g. {name}=full:8, "
        raise PlanError([Problem.of(name, shown(value), f"{rule}{name}=12GiB or {name}=50%.")])

    def _is_policy(self, text: str) -> bool:
        policy, colon, blocks = text.partition(":")
        return policy in self.known and (not colon or (policy != "none" and _BLOCKS.fullmatch(blocks) is not None))

    def words(self) -> str:
        names = f"{listed(self.known)}; all but `none` also for some blocks only (`full:8`)"
        return f"{names}; one for each rank of pp (`full+none`); or a memory budget (`12GiB`, `50%`)"

    def schema(self) -> Schema:
        return {"type": "string"}

    def columns(self, name: str) -> tuple[PlanColumn, ...]:
        columns = (
            (name, "uint8"), (f"{name}_blocks", "int64"), ("activation_budget", "float64"), (f"{name}_list", "int64"),
        )  # fmt: skip
        return tuple(PlanColumn(*column) for column in columns)

    def encode(self, value: Any) -> tuple[float, ...]:
        """Return (index of policy, blocks or 0 for all, budget, number of the list).

        The budget is in bytes, or a fraction below 1, or inf for no budget.
        """
        first, plus, _ = str(value).partition("+")
        policy, _, blocks = first.partition(":")
        if policy in self.known:
            return self.known.index(policy), int(blocks or 0), math.inf, number_of(value) if plus else 0
        return self.known.index("none"), 0, _budget(str(value)), 0

    def decode(self, *numbers: Any) -> str:
        if numbers[3]:
            return numbered(numbers[3])
        policy, blocks, budget = self.known[int(numbers[0])], int(numbers[1]), float(numbers[2])
        if math.isinf(budget):
            return f"{policy}:{blocks}" if blocks else policy
        return f"{budget * 100:.0f}%" if budget < 1 else f"{budget / 2**30:.2f}GiB"


def _budget(text: str) -> float:
    """Return the number of a budget: 0.5 for "50%", and the bytes for "12GiB"."""
    if text.endswith("%"):
        return float(text[:-1]) / 100
    return float(text) if text.startswith(("0.", ".")) else float(units.parse_bytes(text))


@dataclass(frozen=True, slots=True)
class NamedShares(ListKind):
    """Any of several names, each with an optional fraction: "optimizer", "optimizer:0.5", "optimizer:50%".

    A list has a fraction for each rank of a pipeline: "optimizer:1/0". The planner's columns have the largest one.
    """

    known: tuple[str, ...]

    def read(self, value: object) -> object:
        if isinstance(value, str):
            return tuple(part for part in value.split("+") if part != "none")
        return ListKind.read(self, value)

    def check(self, name: str, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = (value,)
        if not isinstance(value, tuple):
            rule = f"it lists what to keep in host memory. Use e.g. {name}=optimizer+activations."
            raise PlanError([Problem.of(name, shown(value), rule)])
        chosen: dict[str, str] = {}
        for part in cast(tuple[object, ...], value):
            word, shared = self._shared(name, part)
            if chosen.setdefault(word, shared) != shared:
                raise PlanError([Problem.of(name, shown(part), f"{word} already has another share. Keep one.")])
        return tuple(chosen[word] for word in self.known if word in chosen)

    def _shared(self, name: str, part: object) -> tuple[str, str]:
        """Return the name, and the name with its fraction: "optimizer" and "optimizer:0.5"."""
        if not isinstance(part, str):
            return choice(name, part, self.known), ""
        word, colon, share = part.partition(":")
        choice(name, word, self.known)
        if not colon:
            return word, word
        fractions = [_fraction(text) for text in share.split("/")]
        if not all(0 <= one <= 1 for one in fractions) or not any(fractions):
            rule = (
                f"each rank of pp has a share from 0 to 1, and not all are 0. Use e.g. {name}={word}:1/0."
                if len(fractions) > 1
                else f"a share is a number above 0 and at most 1. Use e.g. {name}={word}:0.5."
            )
            raise PlanError([Problem.of(name, shown(part), rule)])
        written = "/".join(f"{one.normalize():f}" for one in fractions)
        return word, word if written == "1" else f"{word}:{written}"

    def words(self) -> str:
        names = f"any of {listed(self.known)}, joined by `+`, each in full or with a share (`:0.5`)"
        return f"{names}; `{self.known[0]}` also with one for each rank of pp (`:1/0.5`)"

    def schema(self) -> Schema:
        return {"type": "array", "items": {"type": "string", "pattern": f"^({'|'.join(self.known)})(:.+)?$"}}

    def columns(self, name: str) -> tuple[PlanColumn, ...]:
        return (*(PlanColumn(f"{name}_{word}", "float64") for word in self.known), PlanColumn(f"{name}_list", "int64"))

    def encode(self, value: Any) -> tuple[float, ...]:
        number = number_of(value) if any("/" in part for part in value) else 0
        return (*(share_of(value, word) for word in self.known), number)

    def decode(self, *numbers: Any) -> tuple[str, ...]:
        if numbers[-1]:
            return numbered(numbers[-1])
        shares = [(word, float(share)) for word, share in zip(self.known, numbers[:-1], strict=True)]
        return tuple(word if share >= 1 else f"{word}:{share:.2g}" for word, share in shares if share > 0)


def share_of(value: Sequence[str], word: str) -> float:
    """Return the fraction for a name in a value of `NamedShares`: 0.0 to 1.0; of a list the largest."""
    shares = [part.partition(":")[2] or "1" for part in value if part.partition(":")[0] == word]
    return max(map(float, shares[0].split("/"))) if shares else 0.0


def _fraction(text: str) -> Decimal:
    """Return the fraction that a text names; above 1 for other texts."""
    if not _SHARE.fullmatch(text):
        return Decimal(2)
    return Decimal(text.rstrip("%")) / (100 if "%" in text else 1)


def share_on(value: Sequence[str], rank: int) -> tuple[str, ...]:
    """Return a value of `NamedShares` with the fractions of one rank of a pipeline."""
    found: list[str] = []
    for part in value:
        word, _, shares = part.partition(":")
        listed_shares = shares.split("/")
        own = listed_shares[min(rank, len(listed_shares) - 1)]
        if own != "0":
            found.append(f"{word}:{own}" if own not in ("", "1") else word)
    return tuple(found)
