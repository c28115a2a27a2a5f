"""Layouts of transformers' layers that carry a state along the row, by heads or channels.

Each head of a state space or of linear attention, and each channel of a short convolution, has its own state, so ranks
share them as they share attention heads. Tracing cannot find these layers: scans mix features of a head in loops.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.config.fields.layout import Layout, Style
from weft.models.inspect.blocks import class_before
from weft.models.inspect.layers import Heads
from weft.private_torch import named_modules


def _delta(mixer: Any, columns: tuple[str, ...], fused: bool = False, norm: str = "norm", out: str = "out_proj") -> Any:
    channels = f"colwise:{mixer.key_dim}+{mixer.key_dim}+{mixer.value_dim}"
    qkv = {"in_proj_qkv": channels} if fused else {}
    own = dict.fromkeys((*columns, "A_log", "dt_bias"), "colwise")
    return {**qkv, "conv1d": channels, **own, norm: "partial", out: "rowwise"}


def _scan(mixer: Any) -> dict[str, str]:
    width, states = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    channels = f"{width}+{states}+{states}"
    own = dict.fromkeys(("A_log", "dt_bias", "D", "norm"), "colwise")
    projected = f"colwise:{width}+{channels}+{mixer.num_heads}"
    return {"in_proj": projected, "conv1d": f"colwise:{channels}", **own, "out_proj": "rowwise"}


def _split_delta(mixer: Any) -> dict[str, str]:
    return _delta(mixer, ("in_proj_z", "in_proj_b", "in_proj_a"), fused=True)


def _fused_delta(mixer: Any) -> dict[str, str]:
    return _delta(mixer, ("in_proj_qkvz", "in_proj_ba"))  # the rows of each key head are adjacent


def _plain_delta(mixer: Any) -> dict[str, str]:
    columns = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")
    return _delta(mixer, columns, norm="o_norm", out="o_proj")


def _short_conv(mixer: Any) -> dict[str, str]:
    del mixer
    return {"in_proj": "colwise:3", "conv": "colwise", "out_proj": "rowwise"}


_HEADS = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
_GROUPS = ("n_groups", "num_heads", "intermediate_size", "conv_dim")
#: By class: styles of its modules and parameters, and the sizes that ranks share, after the number of units.
_KINDS: dict[str, tuple[Callable[[Any], dict[str, str]], tuple[str, ...]]] = {
    **dict.fromkeys(
        ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "LaraMiniGatedDeltaNet"), (_split_delta, _HEADS)
    ),
    "Qwen3NextGatedDeltaNet": (_fused_delta, _HEADS),
    "OlmoHybridGatedDeltaNet": (_plain_delta, _HEADS),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), (_short_conv, ())),
    **dict.fromkeys(("Mamba2Mixer", "NemotronHMamba2Mixer"), (_scan, _GROUPS)),
}


@dataclass(frozen=True, slots=True)
class StateHeads(Heads):
    """Heads of a layer that carries a state.

    count: number of units that ranks share. sizes: its attributes that are proportional to it.
    """

    sizes: tuple[tuple[str, int], ...] = ()

    def row_groups(self, style: Style, rows: int) -> list[tuple[int, int, bool]]:
        """Return (rows, rows per unit, False) for each part of a column-parallel layer."""
        return [(part, part // self.count, False) for part in style.sizes(rows) or (rows,)]

    def numbers(self, tp: int) -> list[tuple[tuple[str, ...], int, int]]:
        """Return (attribute name, value of the full model, value on one of tp ranks) for each size."""
        return [((name,), size, size // tp) for name, size in self.sizes]


def state_heads(module: nn.Module) -> StateHeads | None:
    """Return the heads of a layer whose state ranks can share, or None for other modules.

    If mamba_ssm is installed, also return None for Mamba layers.
    """
    kind = class_before(module)
    if kind.__name__ not in _KINDS or not kind.__module__.startswith("transformers.models."):
        return None
    if _KINDS[kind.__name__][0] is _scan and importlib.util.find_spec("mamba_ssm") is not None:
        return None  # its kernel multiplies with the weight of out_proj, without the sum over ranks
    sizes = tuple((name, int(getattr(module, name))) for name in _KINDS[kind.__name__][1])
    count = sizes[0][1] if sizes else next(one.groups for one in module.children() if isinstance(one, nn.Conv1d))
    return StateHeads(count, count, 1, sizes)


def with_states(layout: Layout, model: nn.Module, tp: int) -> Layout:
    """Return the layout in which tp ranks share the layers that carry a state.

    A layer stays replicated if tp does not divide its heads.
    """
    styles: dict[str, str] = {}
    paths: list[str] = []
    for path, module in named_modules(model):
        paths += [path, *(f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))]
        if (heads := state_heads(module)) is not None and heads.count % tp == 0:
            found = _KINDS[class_before(module).__name__][0](module)
            styles |= {f"{path}.{name}": style for name, style in found.items()}
    pairs: dict[str, str] = {}
    for path, style in styles.items():
        # One pattern for all layers, unless it matches other modules too, such as attention in a block of that name.
        pattern = re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", path)
        matches = re.compile(pattern.replace(".", r"\.").replace("*", "[^.]+"))
        is_shared = all(styles.get(one) == style for one in paths if matches.fullmatch(one))
        pairs[pattern if is_shared else path] = style
    return Layout((*pairs.items(), *(pair for pair in layout.pairs if pair[0] not in pairs))) if pairs else layout
