"""Single layers, and what a model says of its own: which are linear, which table reads the ids, which makes logits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from weft.config.hugging_face_config import number
from weft.config.layout import Layout, Style
from weft.errors import ModelError
from weft.private_torch import named_modules


@runtime_checkable
class KnownModel(Protocol):
    """A model that says of itself what is else found by looking: the project's own decoders do.

    Its layout keeps tokens apart outside of cut layers, and its attention can be replaced.
    """

    @property
    def family(self) -> str:
        """What people call its kind, such as "llama"."""
        ...

    @property
    def has_routers(self) -> bool:
        """Whether values decide which of its weights a token meets: then no forward without numbers shows its work."""
        ...

    def tensor_layout(self) -> Layout:
        """How tensor parallelism cuts it."""
        ...


def is_transposed(module: nn.Module) -> bool:
    """Whether the layer keeps its weight as (inputs, outputs), as the linear layer of GPT-2 in transformers does."""
    return type(module).__name__.endswith("Conv1D") and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a product with a matrix and a bias, and nothing else; an adapter beside it counts not."""
    own = _own_forward(type(module))
    return own is nn.Linear.forward or (is_transposed(module) and "addmm" in own.__code__.co_names)


def _own_forward(kind: type[nn.Module]) -> Any:
    """The forward that a layer had before it was given an adapter, whose class says `is_adapter`."""
    return next(
        vars(one)["forward"] for one in kind.__mro__ if "forward" in vars(one) and "is_adapter" not in vars(one)
    )


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight as (outputs, inputs); of one that is kept as bytes, the numbers that they stand for."""
    unpacked = getattr(module, "unpacked_weight", None)
    if unpacked is not None:
        return unpacked()
    weight = stored_weight(module)
    return weight.t() if is_transposed(module) else weight


def stored_weight(module: nn.Module) -> torch.Tensor:
    """The weight as the layer keeps it: (outputs, inputs), or the other way round where it is transposed, or bytes."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def is_packed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its frozen weight as bytes."""
    return hasattr(module, "times_weight")


def product(module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product of x with the layer's weight in the format of x, and a bias."""
    times: Any = getattr(module, "times_weight", None)
    return nn.functional.linear(x, weight_of(module).to(x.dtype), bias) if times is None else times(x, bias)


def bias_of(module: nn.Module) -> torch.Tensor | None:
    """The bias; None where the layer has none."""
    return getattr(module, "bias", None)


def find_lm_head(model: nn.Module) -> nn.Module | None:
    """The linear layer that makes a language model's logits; None where the model does not say which it is."""
    return _asked(model, "get_output_embeddings")


def input_embeddings(model: nn.Module) -> nn.Embedding | None:
    """The table that reads a model's token ids; None where the model does not say which it is."""
    table = _asked(model, "get_input_embeddings")
    return table if isinstance(table, nn.Embedding) else None


def table_params(module: nn.Module) -> set[nn.Parameter]:
    """The parameters in a module that are looked up by id, and multiplied with nothing."""
    tables = (part for part in module.modules() if isinstance(part, nn.Embedding))
    return {param for table in tables for param in table.parameters(recurse=False)}


def find_experts(model: nn.Module, layout: Layout | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Modules of stacked experts, by path: those that say so (`stacks_experts`), those that the plan of a model of
    transformers names, and those that a layout calls `expert`."""
    plan: dict[str, str] = getattr(getattr(model, "config", None), "base_model_ep_plan", None) or {}
    patterns = [key for key, style in plan.items() if style == "ep_dispatch_experts"]
    known = [re.compile(r"(?:.*\.)?" + re.escape(key).replace(r"\*", r"[^.]+")) for key in patterns]
    for path, module in named_modules(model):
        by_layout = layout is not None and layout.match(path) == "expert"
        if getattr(module, "stacks_experts", False) or by_layout or any(pattern.fullmatch(path) for pattern in known):
            yield path, module


def num_experts(path: str, experts: nn.Module) -> int:
    """How many experts are stacked in a module here; ModelError where its parameters do not say."""
    sizes = {parameter.shape[0] if parameter.ndim >= 2 else 0 for parameter in experts.parameters()}
    if len(sizes) != 1 or 0 in sizes:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in experts.named_parameters()) or "none"
        raise ModelError(
            f"module {path!r}: experts can be divided only if every parameter stacks them in dim 0, and its "
            f"parameters are {shapes}. Stack the experts, or leave the module out of the layout."
        )
    return sizes.pop()


def _asked(model: nn.Module, name: str) -> nn.Module | None:
    """What a model answers to a question of transformers'; None where it has no answer."""
    get = getattr(model, name, None)
    try:
        found = get() if callable(get) else None
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def parent_of(path: str) -> str:
    """Return the path of the module around another."""
    return path.rpartition(".")[0]


def own_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return by path the parameters that modules hold themselves beside linear layers, such as one number a head."""
    return {
        f"{path}.{name}" if path else name: param
        for path, module in modules.items()
        if any(is_linear(child) for child in module.children())
        for name, param in module.named_parameters(recurse=False)
    }


# Attention heads of any module, read from the attributes that model code keeps.

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
