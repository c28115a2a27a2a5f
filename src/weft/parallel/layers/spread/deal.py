"""Who computes which item, found by cost: every rank finds the same, so nothing is sent for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from weft.structure import layers, repeated_blocks


@dataclass(frozen=True, slots=True)
class ItemCost:
    """FLOPs of an item, up to a factor: a part for each of its rows, and one for each pair that attends."""

    per_row: float
    per_pair: float

    @classmethod
    def of(cls, module: nn.Module) -> ItemCost:
        """Return that of an encoder, from its weights and the width and number of its blocks."""
        weights = sum(param.numel() for param in module.parameters() if param.dim() > 1)
        blocks = list(repeated_blocks(module).values())
        first = next((part for block in blocks for part in block.modules() if layers.is_linear(part)), None)
        width = layers.weight_of(first).shape[1] if first is not None else 0
        return cls(2.0 * max(weights, 1), 4.0 * width * len(blocks))

    def __call__(self, rows: int, span: int) -> float:
        """Return the cost of an item.

        Args:
            rows: that it has.
            span: how many of them attend to each other.
        """
        return rows * (self.per_row + self.per_pair * span)


def deal_items(costs: Sequence[float], homes: Sequence[int], num_ranks: int, ranks_per_home: int) -> list[list[int]]:
    """Return the items of each rank, ascending: always the most costly that is left, to the rank that has least.

    Args:
        costs: of each item.
        homes: which data rank brought it.
        num_ranks: that share all items.
        ranks_per_home: ranks of each data rank, which lie together; of equally costly items a rank gets its own first.
    """
    alike: dict[float, dict[int, list[int]]] = {}
    for item in reversed(range(len(costs))):
        alike.setdefault(costs[item], {}).setdefault(homes[item], []).append(item)
    sums, found = [0.0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for cost in sorted(alike, reverse=True):
        waiting = alike[cost]
        for _ in range(sum(map(len, waiting.values()))):
            rank = min(range(num_ranks), key=lambda one: (sums[one], one))
            home = rank // ranks_per_home
            if not waiting.get(home):
                home = max(waiting, key=lambda one: (len(waiting[one]), -one))
            found[rank].append(waiting[home].pop())
            sums[rank] += cost
    return [sorted(own) for own in found]
