"""A small model of the same family and form as one of transformers, to see how such models behave."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import nn

from weft.spec.model import number, resize

#: Sizes of the copy. Heads times their width are the width of the model, which many configs take for granted.
_SIZES = {
    "vocab": 61, "hidden": 32, "heads": 4, "head_dim": 8, "rope_dim": 8, "q_rank": 8, "kv_rank": 8, "ffn": 32,
    "expert_ffn": 8, "num_experts": 4, "top_k": 2, "groups": 2, "top_groups": 1, "positions": 64, "dense_layers": 1,
    "expand": 1,
}  # fmt: skip
#: Beyond it are tokens of texts.
_LAST_PADDING = 4
#: A list with more values than this does not say of which kind layers are.
_MOST_KINDS = 4


def small_copy(model_class: type[nn.Module], config: Any, *, window: int) -> nn.Module:
    """A model of transformers of the same class and config, made small, with random weights in fp32.

    It has as many layers as it takes for one of each kind. Raises what transformers does where sizes do not fit.

    Args:
        model_class: of the model.
        config: of the model; it stays as it is.
        window: tokens of its windows and chunks, where it has some.
    """
    config = copy.deepcopy(config)
    for part in _parts(config):
        _make_small(part, window)
    return _filled(model_class, config)


def _parts(config: Any) -> list[Any]:
    """The config, and those of the models within."""
    inner = [part for name, part in vars(config).items() if name.endswith("_config")]
    return [config, *(part for part in inner if hasattr(part, "to_dict"))]


def _make_small(config: Any, window: int) -> None:
    num_layers = number(config, "layers") or 0
    kinds = _kinds(config, num_layers)
    few = max(2, 1 + max((rows.index(kind) for rows in kinds.values() for kind in rows), default=0))
    heads, kv_heads = number(config, "heads"), number(config, "kv_heads")
    # The latent of DeepSeek's attention gives each head keys of its own.
    shared = kv_heads is not None and kv_heads != heads and number(config, "kv_rank") is None
    resize(config, **_SIZES, window=window, kv_heads=min(2, kv_heads or 1) if shared else _SIZES["heads"])
    for name, value in kinds.items():
        with contextlib.suppress(AttributeError, NotImplementedError):  # worked out from others
            setattr(config, name, value[:few])
    resize(config, layers=min(few, num_layers) or few)
    if type(getattr(config, "qk_head_dim", None)) is int:
        with contextlib.suppress(AttributeError):
            config.qk_head_dim = _SIZES["head_dim"] + _SIZES["rope_dim"]
    if (getattr(config, "pad_token_id", None) or 0) > _LAST_PADDING:
        resize(config, padding=0)


def _kinds(config: Any, num_layers: int) -> dict[str, list[Any]]:
    """Lists of a config with an entry for each layer, few of them different."""
    names = {*vars(config), "layer_types", "layers_block_type"}
    found = {name: getattr(config, name, None) for name in sorted(names)}
    return {
        name: list(value)
        for name, value in found.items()
        if isinstance(value, list | tuple) and len(value) == num_layers and len(set(map(str, value))) <= _MOST_KINDS
    }


def _filled(kind: type[nn.Module], config: Any) -> nn.Module:
    """Such a model, with weights far enough from zero that tokens change each other. Random numbers elsewhere stay."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = kind(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.mul_(5.0)
                elif "bias" in name:
                    parameter.normal_(std=0.1)
    return model
