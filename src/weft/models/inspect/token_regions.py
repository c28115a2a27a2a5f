"""Regions of a model in which tokens are sharded, and the modules in these regions that get all tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from weft.config.fields.layout import Style


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


def tokens_at(output: Tensor, position: int, inputs: Sequence[TokensAt]) -> TokensAt | None:
    """Return the dim with the tokens of the output of a module that got all tokens, or None if it is not unique.

    It is the only dim of the tokens' size, unless this is dim 0. If no dim has that size, it is dim 0 with all tokens
    of all samples.

    position: index of the output among the flattened results. inputs: tensors with tokens among the arguments.
    """
    count = inputs[0].tokens
    dims = [dim for dim, size in enumerate(output.shape) if size == count]
    if any(one.tokens != count for one in inputs) or len(dims) > 1:
        return None
    if dims:
        return TokensAt(position, dims[0], 1, count) if dims[0] else None
    samples = [one.samples for one in inputs if one.samples > 1]
    is_flat = bool(samples) and output.dim() > 1 and output.shape[0] == samples[0] * count
    return TokensAt(position, 0, samples[0], count) if is_flat else None


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
        units: the modules that compute on sharded tokens: the blocks, or called modules inside them.
        summed: for each unit, the indices of the arguments (flattened, positional first) that require a gradient and
            come from outside the blocks. Their gradients must be summed over the ranks.
        why_apart: reason why tokens are gathered after each unit, or "" if they stay sharded from one to the next.
        full: modules in the units that get all tokens and compute them on every rank.
        why_full: reason for the first of these modules, or "".
        why_none: reason why there is no region, or "".
    """

    runs: tuple[tuple[str, str], ...]
    units: tuple[str, ...]
    summed: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    why_apart: str = ""
    full: Mapping[str, FullModule] = field(default_factory=dict[str, "FullModule"])
    why_full: str = ""
    why_none: str = ""


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
        has_full_output: with has_own_loss, True if the model's output must have all tokens.
        reading: modules that receive an encoder's states, which are sharded too.
        entries: modules around sharded layers -> number of features. They gather the tokens of the first argument with
            that many features. A row-parallel layer inside or behind them shards the tokens again.
        full: modules that get all tokens and compute them on every rank.
    """

    styles: Mapping[str, Style]
    gathering: Collection[str]
    width: int
    where: str = "sp=on"
    remedy: str = "Use sp=off."
    has_own_loss: bool = False
    has_full_output: bool = False
    reading: Collection[str] = ()
    entries: Mapping[str, int] = field(default_factory=dict[str, int])
    full: Collection[str] = ()

    def gathers(self, path: str) -> bool:
        """Return True if tokens are gathered before a module because of its style, `gathering` or `entries`."""
        return path in self.gathering or path in self.entries or self.style_of(path) in ("colwise", "rowwise")

    def style_of(self, path: str) -> str:
        """Return the name of a module's style, or ""."""
        style = self.styles.get(path)
        return "" if style is None else style.name
