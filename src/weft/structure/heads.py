"""Attention heads of any module, read from the attributes that model code keeps.

Attention modules hold numbers of heads and widths under a handful of names, and shape their activations by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.spec import Style
from weft.spec.model import number

#: The names under which modules keep them.
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_GROUPS = ("num_key_value_groups", "n_rep", "num_kv_groups")
#: Widths that follow the heads. `embed_dim` and `hidden_size` are not here: they are the model's as often.
_WIDTHS = ("split_size", "all_head_size", "inner_dim")
_HEAD_DIMS = ("head_dim", "attention_head_size", "head_size", "d_kv", "dim_head", "key_value_proj_dim", "qk_head_dim")


@dataclass(frozen=True, slots=True)
class Heads:
    """count: query heads; 0 where the module has none. kv_count: key-value heads. width: features of one."""

    count: int = 0
    kv_count: int = 0
    width: int = 1

    @classmethod
    def of(cls, module: nn.Module) -> Heads:
        """Return the heads of a module around cut layers."""
        width = _number(module, _HEAD_DIMS)
        if width is None:
            return cls()
        config = getattr(module, "config", None)
        count = _number(module, _HEADS) or number(config, "heads") or _count_by_width(module, width)
        kv_count = _number(module, _KV_HEADS) or number(config, "kv_heads") or count
        return cls(count, kv_count, width)

    def pieces(self, style: Style, rows: int) -> list[tuple[int, int, bool]]:
        """Return a column-cut layer's rows, rows that stay together, and whether fewer than tp may be repeated."""
        parts = style.sizes(rows)
        if not self.count:
            return [(part, 1, False) for part in parts or (rows,)]
        if parts:
            return [(part, self.width if part % self.width == 0 else 1, False) for part in parts]
        whole = self.count * self.width
        if rows % self.width:
            return [(rows, 1, False)]
        if rows > whole and rows % whole == 0:
            return [(rows, rows // self.count, False)]  # query, key and value of one head after another
        return [(rows, self.width, rows < whole)]

    def numbers(self, tp: int) -> list[tuple[tuple[str, ...], int, int]]:
        """Return what modules count: its names, how many in the whole model, and how many on one of tp ranks."""
        count, kv_count = self.count // tp, max(1, self.kv_count // tp)
        return [
            (_HEADS, self.count, count),
            (_KV_HEADS, self.kv_count, kv_count),
            (_GROUPS, self.count // self.kv_count, count // kv_count),
            (_WIDTHS, self.count * self.width, count * self.width),
        ]


def _number(owner: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _count_by_width(module: nn.Module, width: int) -> int:
    """Heads of a module that only knows their width: its widest projection decides, and none has more outputs."""
    features = [child.out_features for child in module.children() if isinstance(child, nn.Linear)]
    inputs = [child.in_features for child in module.children() if isinstance(child, nn.Linear)]
    return min(max(features, default=0), max(inputs, default=0)) // width
