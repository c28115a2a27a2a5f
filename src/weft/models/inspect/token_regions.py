"""Regions of a model in which tokens are sharded, and the modules in these regions that get all tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.config.layout import Style


class TokensAt(NamedTuple):
    """Position of a tensor with tokens among a call's flattened values, and the dim of the tokens in it.

    Attributes:
        position: index among the flattened values.
        dim: the dim of the tokens.
        samples: number of sequences that are merged with the tokens in that dim.
        tokens: number of tokens of a sequence.
    """

    position: int
    dim: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FullModule:
    """Positions of tensors with tokens among the arguments and results of a module that gets all tokens."""

    inputs: tuple[TokensAt, ...]
    output: TokensAt


@dataclass(frozen=True, slots=True)
class TokenRegions:
    """Regions of a forward in which tokens are sharded.

    Attributes:
        runs: the first and the last module of each region.
        units: the modules whose parameters read a part of the tokens.
        summed: for each unit, positions of outside tensors among its flattened arguments (positional, then keyword),
            whose gradients are sums over the ranks.
        why_apart: reason why tokens are gathered after each unit, or "" if they stay sharded from one to the next.
        full: modules in the units that get all tokens and compute them on every rank.
        why_full: reason for the first of these modules, or "".
    """

    runs: tuple[tuple[str, str], ...]
    units: tuple[str, ...]
    summed: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    why_apart: str = ""
    full: Mapping[str, FullModule] = field(default_factory=dict[str, "FullModule"])
    why_full: str = ""


@dataclass(frozen=True, slots=True)
class TokenDivision:
    """How a parallelism technique shards tokens.

    Attributes:
        styles: styles of sharded layers.
        gathering: modules that mix tokens. Tokens are gathered before them and sharded after them.
        width: features of the hidden states.
        where: the setting, for messages.
        remedy: the fix, for messages.
        has_own_loss: True if each rank computes a loss for its tokens, so that all gradients are summed anyway.
        reading: modules that receive an encoder's states, which are sharded too.
        entries: modules around sharded layers that gather the tokens of the first argument with as many features as
            the value. A row-parallel layer inside or behind them shards the tokens again.
        full: modules that get all tokens and compute them on every rank.
    """

    styles: Mapping[str, Style]
    gathering: Collection[str]
    width: int
    where: str = "sp=on"
    remedy: str = "Use sp=off."
    has_own_loss: bool = False
    reading: Collection[str] = ()
    entries: Mapping[str, int] = field(default_factory=dict[str, int])
    full: Collection[str] = ()

    def gathers(self, path: str) -> bool:
        """Return True if a module gets all tokens."""
        return path in self.gathering or path in self.entries or self.style_of(path) in ("colwise", "rowwise")

    def style_of(self, path: str) -> str:
        """Return the name of a module's style, or ""."""
        style = self.styles.get(path)
        return "" if style is None else style.name
