"""Single layers, and the layers that a model names itself: linear layers, the input embedding, the output layer."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from weft.config.fields.layout import Layout, Style
from weft.config.shapes.hugging_face_config import number
from weft.errors import ModelError
from weft.private_torch import named_modules


@runtime_checkable
class KnownModel(Protocol):
    """Protocol of models, such as Weft's decoders, that report properties that are otherwise found by inspection.

    Outside sharded layers such a model computes each token separately, and its attention can be replaced.
    """

    @property
    def family(self) -> str:
        """Name of the model family, such as "llama"."""
        ...

    @property
    def has_routers(self) -> bool:
        """True if routing depends on values (MoE): a forward on the meta device does not show which experts run."""
        ...

    def tensor_layout(self) -> Layout:
        """Return the tensor-parallel layout."""
        ...


def is_transposed(module: nn.Module) -> bool:
    """Return True if the layer stores its weight as (inputs, outputs), as GPT-2's linear layer in transformers does."""
    return type(module).__name__.endswith("Conv1D") and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Return True if the module only multiplies by a matrix and adds a bias. An adapter is ignored."""
    # The layer's forward as it was before adapter classes were added.
    classes = [vars(one) for one in type(module).__mro__]
    own: Any = next(one["forward"] for one in classes if "forward" in one and "is_adapter" not in one)
    return own is nn.Linear.forward or (is_transposed(module) and "addmm" in own.__code__.co_names)


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return the weight as (outputs, inputs), dequantized if it is quantized."""
    unpacked = getattr(module, "unpacked_weight", None)
    if unpacked is not None:
        return unpacked()
    weight = stored_weight(module)
    return weight.t() if is_transposed(module) else weight


def stored_weight(module: nn.Module) -> torch.Tensor:
    """Return the weight as stored: (outputs, inputs), (inputs, outputs) if transposed, or quantized bytes."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def is_packed(module: nn.Module) -> bool:
    """Return True if a linear layer stores its frozen weight quantized."""
    return hasattr(module, "times_weight")


def product(module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the matmul of x with the layer's weight in the dtype of x, plus a bias."""
    times: Any = getattr(module, "times_weight", None)
    return nn.functional.linear(x, weight_of(module).to(x.dtype), bias) if times is None else times(x, bias)


def bias_of(module: nn.Module) -> torch.Tensor | None:
    """Return the bias or None."""
    return getattr(module, "bias", None)


def find_lm_head(model: nn.Module) -> nn.Module | None:
    """Return the output layer of a language model, or None if the model does not identify it."""
    return _asked(model, "get_output_embeddings")


def input_embeddings(model: nn.Module) -> nn.Embedding | None:
    """Return the embedding of a model's token ids, or None if the model does not identify it."""
    table = _asked(model, "get_input_embeddings")
    return table if isinstance(table, nn.Embedding) else None


def table_params(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a module's embeddings, which are looked up by id and not multiplied."""
    tables = (part for part in module.modules() if isinstance(part, nn.Embedding))
    return {param for table in tables for param in table.parameters(recurse=False)}


def find_experts(model: nn.Module, layout: Layout | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules of stacked experts by path.

    These are modules with `stacks_experts`, modules in the expert plan of a transformers model or of a part such as its
    text decoder, and modules that a layout calls `expert`.
    """
    config = getattr(model, "config", None)
    configs = [config, *vars(config).values()] if hasattr(config, "base_model_ep_plan") else []
    plans: list[dict[str, str]] = [getattr(one, "base_model_ep_plan", None) or {} for one in configs]
    patterns = [key for plan in plans for key, style in plan.items() if style == "ep_dispatch_experts"]
    known = [re.compile(r"(?:.*\.)?" + re.escape(key).replace(r"\*", r"[^.]+")) for key in patterns]
    for path, module in named_modules(model):
        by_layout = layout is not None and layout.match(path) == "expert"
        if getattr(module, "stacks_experts", False) or by_layout or any(pattern.fullmatch(path) for pattern in known):
            yield path, module


def num_experts(path: str, experts: nn.Module) -> int:
    """Return the number of experts in a module on this rank. Raise ModelError if its parameters do not determine it."""
    sizes = {parameter.shape[0] if parameter.ndim >= 2 else 0 for parameter in experts.parameters()}
    if len(sizes) != 1 or 0 in sizes:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in experts.named_parameters()) or "none"
        raise ModelError(
            f"module {path!r}: experts can be divided only if every parameter stacks them in dim 0, and its "
            f"parameters are {shapes}. Stack the experts, or leave the module out of the layout."
        )
    return sizes.pop()


def _asked(model: nn.Module, name: str) -> nn.Module | None:
    get = getattr(model, name, None)
    try:
        found = get() if callable(get) else None
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def parent_of(path: str) -> str:
    """Return the path of the parent module of the module at `path`."""
    return path.rpartition(".")[0]


def own_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return by path the parameters that modules with linear children hold directly, such as one number per head."""
    return {
        f"{path}.{name}" if path else name: param
        for path, module in modules.items()
        if any(is_linear(child) for child in module.children())
        for name, param in module.named_parameters(recurse=False)
    }


# Attention heads of any module, read from common attribute names.

#: Batch norms, whose statistics cover all tokens.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
#: Attribute names for the number of heads.
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_GROUPS = ("num_key_value_groups", "n_rep", "num_kv_groups")
#: Attribute names for widths that are proportional to the heads, unlike `embed_dim` and `hidden_size`, which are often
#: the model's.
_WIDTHS = ("split_size", "all_head_size", "inner_dim")
_HEAD_DIMS = ("head_dim", "attention_head_size", "head_size", "d_kv", "dim_head", "key_value_proj_dim", "qk_head_dim")


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a module.

    Attributes:
        count: query heads; 0 for a module without heads.
        kv_count: key-value heads.
        width: features of one head.
    """

    count: int = 0
    kv_count: int = 0
    width: int = 1

    @classmethod
    def of(cls, module: nn.Module) -> Heads:
        """Return the heads of a module around sharded layers, or no heads if it has no attribute for their width."""
        width = _number(module, _HEAD_DIMS)
        if width is None:
            return cls()
        config = getattr(module, "config", None)
        count = _number(module, _HEADS) or number(config, "heads") or _count_by_width(module, width)
        kv_count = _number(module, _KV_HEADS) or number(config, "kv_heads") or count
        return cls(count, kv_count, width)

    def row_groups(self, style: Style, rows: int) -> list[tuple[int, int, bool]]:
        """Return (rows, rows per unit, may repeat) for each part of a column-parallel layer.

        Rows of one unit stay on one rank. `may repeat` is True if several ranks may have the same unit when there are
        fewer units than tp ranks, as for key-value heads.
        """
        parts = style.sizes(rows)
        if not self.count:
            return [(part, 1, False) for part in parts or (rows,)]
        if parts:
            return [(part, self.width if part % self.width == 0 else 1, False) for part in parts]
        whole = self.count * self.width
        if rows % self.width:
            return [(rows, 1, False)]
        if rows > whole and rows % whole == 0:
            return [(rows, rows // self.count, False)]  # query, key and value of each head are adjacent
        return [(rows, self.width, rows < whole)]

    def numbers(self, tp: int) -> list[tuple[tuple[str, ...], int, int]]:
        """Return (attribute names, value of the full model, value on one of tp ranks) for each count."""
        count, kv_count = self.count // tp, max(1, self.kv_count // tp)
        return [
            (_HEADS, self.count, count),
            (_KV_HEADS, self.kv_count, kv_count),
            (_GROUPS, self.count // self.kv_count, count // kv_count),
            (_WIDTHS, self.count * self.width, count * self.width),
        ]


@dataclass(frozen=True, slots=True)
class WrittenHeads:
    """Heads of a module whose code uses their number, or the width of all of them, in reshapes and splits.

    counts: numbers of query heads and of key-value heads. width: features of one head.
    """

    counts: frozenset[int]
    width: int

    @classmethod
    def of(cls, module: nn.Module) -> WrittenHeads | None:
        """Return the heads of a module, read from its attributes, or None if they cannot be determined.

        Without an attribute for the width of a head, the width is the inputs of the linear children divided by the
        number of heads. The children must all have the same number of inputs, which the heads divide.
        """
        known = Heads.of(module)
        if known.count:
            return cls(frozenset((known.count, known.kv_count)), known.width)
        count = _number(module, _HEADS)
        inputs = {child.in_features for child in module.children() if isinstance(child, nn.Linear)}
        if count is None or len(inputs) != 1 or (total := inputs.pop()) % count:
            return None
        return cls(frozenset((count, _number(module, _KV_HEADS) or count)), total // count)

    @property
    def totals(self) -> frozenset[int]:
        """Number of features of all query heads, and of all key-value heads."""
        return frozenset(count * self.width for count in self.counts)

    def local_sizes(self, sizes: Sequence[int], shape: Sequence[int], ranks: int) -> list[int] | None:
        """Return the sizes to which a rank's part is reshaped.

        Return None if the code's sizes fit the part, or if no split of the heads does.

        Args:
            sizes: sizes of the full tensor as the code computes them. Dims for heads follow the dims that do not
                change.
            shape: shape of the part.
            ranks: number of ranks that share the heads.
        """
        total, product = math.prod(shape), math.prod(sizes)
        if product == total or (
            product < 0 and total % product == 0 and not self._splits_heads(sizes, -total // product)
        ):
            return None
        found: list[list[int]] = []
        for at, size in enumerate(sizes):
            stays = at - 1 if at and sizes[at - 1] == 3 else at  # after the dim for q, k and v of a fused layer
            before, after = [*sizes[:at]], [*sizes[at + 1 :]]
            if before[:stays] != [*shape[:stays]]:
                continue
            if size in self.counts and size % ranks == 0 and after and after[0] in (-1, self.width):
                found.append([*before, size // ranks, self.width, *after[1:]])
            elif size * ranks in self.counts and after and after[0] == self.width * ranks:
                found.append([*before, size, self.width, *after[1:]])
            elif size in self.totals and size % ranks == 0:
                found.append([*before, size // ranks, *after])
        return next((each for each in reversed(found) if math.prod(each) == total), None)

    def _splits_heads(self, sizes: Sequence[int], rest: int) -> bool:
        """Return True if the size -1 follows a number of heads and would become `rest`, which is not their width."""
        at = sizes.index(-1)
        return at > 0 and sizes[at - 1] in self.counts and rest != self.width


def _number(owner: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _count_by_width(module: nn.Module, width: int) -> int:
    """Return the number of heads: the smaller of the most outputs and inputs of linear children, divided by `width`."""
    features = [child.out_features for child in module.children() if isinstance(child, nn.Linear)]
    inputs = [child.in_features for child in module.children() if isinstance(child, nn.Linear)]
    return min(max(features, default=0), max(inputs, default=0)) // width


def made_from(tensor: torch.Tensor, params: Collection[int]) -> bool:
    """Return True if a tensor is a parameter with its id in `params`, or depends only on such parameters."""
    if tensor.grad_fn is None:
        return id(tensor) in params
    nodes, seen = [tensor.grad_fn], set[Any]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None and id(variable) not in params:
            return False
        nodes += [each for each, _ in node.next_functions]
    return True
