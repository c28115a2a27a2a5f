"""LoRA, rsLoRA and DoRA adapters on linear layers: adding, disabling and merging them.

An adapter may also train modules in full (modules_to_save) and rows of embeddings (trainable_tokens).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ModelError
from weft.models.adapters_experts import (
    AdaptedExperts,
    AdapterKind,
    adapt_stacks,
    check_kind,
    chosen_stacks,
    merge_stack,
    pack_stacks,
    remove_stack_adapters,
    stack_names,
    stacked_parameters,
    unpack_stacks,
)
from weft.models.initialize import initialise_parameter, uniform_values
from weft.models.inspect import layers
from weft.models.inspect.blocks import replace_class, revert
from weft.models.quantized_linear import BASE_FORMATS, leave_packed, pack_layers, unpack_layer
from weft.models.token_rows import (
    TOKEN_ROWS,
    RowsEmbedding,
    RowsLinear,
    TokenRows,
    TrainedRows,
    add_rows,
    find_rows,
    fits,
    remove_rows,
    saved_modules,
    with_rows,
)

#: Names of an adapter's parameters within a layer.
ADAPTER_PARAMS = ("lora_A", "lora_B", "lora_magnitude")


@dataclass(frozen=True, slots=True)
class Adapted:
    """Record of the changes that `add_adapter` made to a model.

    Attributes:
        kind: settings of the adapter.
        layers: path -> True if the layer stores its weight transposed.
        base: "stored", or the format of the frozen weights.
        packed: path -> number of inputs, for layers whose weight is stored quantized.
        packed_stacks: path of a quantized stack of experts' weights -> weights per row, which is its last dim.
        saved: path of a module that is trained in full -> its tensors, as a dict from the name in the module's
            state_dict to the name in the full model.
        tokens: path -> ids of the trained rows.
        ties: path of another module with the weight of a module in `tokens` -> path of the module in `tokens`.
        experts: path of an adapted stack of experts' weights -> True if it is stored as (E, inputs, outputs).
    """

    kind: AdapterKind
    layers: Mapping[str, bool]
    base: str = "stored"
    packed: Mapping[str, int] = field(default_factory=dict[str, int])
    saved: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    ties: Mapping[str, str] = field(default_factory=dict[str, str])
    experts: Mapping[str, bool] = field(default_factory=dict[str, bool])
    packed_stacks: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Adapted:
        """Return the record from a JSON value that `to_json` returned."""
        kind = AdapterKind(said["rank"], said["alpha"], said["kind"], said["dropout"])
        base, packed = said.get("base_format", "stored"), said.get("packed", {})
        tokens = {path: tuple(ids) for path, ids in said.get("tokens", {}).items()}
        saved, ties, experts, stacks = (said.get(key, {}) for key in ("saved", "ties", "experts", "packed_stacks"))
        return cls(kind, said["layers"], base, packed, saved, tokens, ties, experts, stacks)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON value."""
        kind = self.kind
        said = {"rank": kind.rank, "alpha": kind.alpha, "kind": kind.kind, "dropout": kind.dropout}
        packed = {} if self.base == "stored" else {"base_format": self.base, "packed": dict(self.packed)}
        more = {
            "saved": {path: dict(names) for path, names in self.saved.items()},
            "tokens": {path: list(ids) for path, ids in self.tokens.items()},
            "ties": dict(self.ties),
            "experts": dict(self.experts),
            "packed_stacks": dict(self.packed_stacks),
        }
        return {**said, "layers": dict(self.layers), **packed, **{key: one for key, one in more.items() if one}}

    def packed_weights(self) -> dict[str, int]:
        """Return the weights per row of each quantized weight by name."""
        return {f"{path}.weight": width for path, width in self.packed.items()} | dict(self.packed_stacks)

    def params(self) -> Iterator[tuple[str, str]]:
        """Yield (layer path, parameter name) for each adapter parameter of the adapted layers."""
        names = ADAPTER_PARAMS if self.kind.kind == "dora" else ADAPTER_PARAMS[:2]
        return ((path, name) for path in self.layers for name in names)

    def tensor_names(self) -> set[str]:
        """Return the names of all tensors of the adapter, including token rows and saved modules."""
        rows = {f"{path}.{TOKEN_ROWS}" for path in self.tokens}
        saved = {name for names in self.saved.values() for name in names.values()}
        stacks = {f"{path}{end}" for path, end in stack_names(self.experts, self.kind.kind)}
        return {f"{path}.{name}" for path, name in self.params()} | stacks | rows | saved

    def merge_rest(self, tensors: dict[str, Tensor]) -> None:
        """Add token rows and experts' adapters to the full weights in `tensors` (by name), and remove their entries."""
        for path, is_transposed in self.experts.items():
            own = {end: tensors.pop(f"{path}{end}") for _, end in stack_names({path: False}, self.kind.kind)}
            tensors[path] = merge_stack(self.kind.scale, tensors[path], own, is_transposed)
        for path, ids in self.tokens.items():
            merged = with_rows(tensors[f"{path}.weight"], ids, tensors[f"{path}.{TOKEN_ROWS}"])
            for one in (path, *(other for other, first in self.ties.items() if first == path)):
                tensors.pop(f"{one}.{TOKEN_ROWS}", None)
                if f"{one}.weight" in tensors:
                    tensors[f"{one}.weight"] = merged


_RECORD = "_weft_adapted"


def note_adapted(model: nn.Module, record: Adapted | None) -> None:
    """Store a record on an unsharded model, so that `adapted` returns it. None removes the record."""
    if record is None:
        delattr(model, _RECORD)
    else:
        setattr(model, _RECORD, record)


def adapted(model: nn.Module) -> Adapted | None:
    """Return the record that `add_adapter` stored on this model or pipeline stage, or None without an adapter."""
    return getattr(model, _RECORD, None)


# A linear layer with an adapter and a frozen weight.


class SingleProcess:
    """Communication that an adapter needs among the ranks that share its layer.

    In this class, one process has the full layer.
    """

    def drop(self, dropout: nn.Module, x: Tensor) -> Tensor:
        """Apply dropout to the adapter's inputs."""
        return dropout(x)

    def into_weight(self, x: Tensor) -> Tensor:
        """Return `x` ready for another matmul by the layer's own weight (DoRA with dropout). May communicate."""
        return x

    def low(self, h: Tensor) -> Tensor:
        """Return the input of B, (..., R), from the output of A."""
        return h

    def squares(self, total_F: Tensor) -> Tensor:
        """Return the sums of squares of rows, summed over the ranks that share the rows."""
        return total_F


_ALONE = SingleProcess()


class AdaptedLinear(nn.Module):
    """Linear layer with an adapter. `replace_class` combines this class with the layer's own class."""

    #: `inspect.layers.is_linear` ignores this class when it looks up the layer's own forward.
    is_adapter = True

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude: nn.Parameter | None
    lora_dropout: nn.Module | None
    _weft_adapter: AdapterKind
    #: (F, D) of the unsharded layer.
    _weft_whole: tuple[int, int]
    _weft_is_on: bool

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer with its adapter: (..., D) to (..., F)."""
        return self.adapt(super().forward(x), x)

    def adapt(self, product: Tensor, x: Tensor, line: SingleProcess = _ALONE, *, has_bias: bool = True) -> Tensor:
        """Add the adapter's output to the layer's own output.

        Args:
            product: (..., F), the output of the matmul with the layer's weight. The caller must not use it afterwards.
            x: (..., D), input of the adapter.
            line: communication among the ranks that share the layer.
            has_bias: True if `product` includes the layer's bias.
        """
        if not self._weft_is_on:
            return product
        factor = self._weft_adapter.scale
        drops = self.lora_dropout is not None and self.training
        read = line.drop(self.lora_dropout, x) if self.lora_dropout is not None else x
        read = read.to(self.lora_A.dtype)
        low = line.low(F.linear(read, self.lora_A))
        if self.lora_magnitude is None and low.dtype == product.dtype:  # one kernel over the output instead of three
            return torch.addmm(product.flatten(0, -2), low.flatten(0, -2), self.lora_B.t(), alpha=factor).view(
                product.shape
            )
        added = (F.linear(low, self.lora_B) * factor).to(product.dtype)
        if self.lora_magnitude is None:
            return product + added
        weight, bias = layers.weight_of(self), layers.bias_of(self) if has_bias else None
        plain = product if bias is None else product - bias
        if drops:  # both terms use the inputs after dropout
            plain = F.linear(line.into_weight(read).to(weight.dtype), weight)
        grown = (self.lora_magnitude / self._norm(line)).to(product.dtype)
        return product + (grown - 1) * plain + grown * added

    @torch.no_grad()
    def _norm(self, line: SingleProcess = _ALONE) -> Tensor:
        """Return the norm of each row of W + s B A, (F,), without computing that matrix; at least in float32."""
        kept = torch.promote_types(self.lora_A.dtype, torch.float32)
        weight, a, b = layers.weight_of(self), self.lora_A, self.lora_B.to(kept)
        scale = self._weft_adapter.scale
        total = torch.linalg.vector_norm(weight, dim=1, dtype=kept).square()
        total += 2 * scale * (F.linear(weight.to(a.dtype), a).to(kept) * b).sum(1)
        total += scale * scale * (b @ (a.to(kept) @ a.to(kept).t()) * b).sum(1)
        return line.squares(total).sqrt()

    @torch.no_grad()
    def fill_adapter(self, parameter: Tensor, name: str, full_name: str, seed: int) -> bool:
        """Fill one of the adapter's full parameters with its initial values. Return False for any other parameter.

        A is uniform like the weight of a new `nn.Linear`, drawn from seed and name. B is zero, so the adapter has no
        effect at first. The magnitude is the norm of each row of the weight.

        Args:
            parameter: a tensor of the full shape.
            name: name within this layer.
            full_name: name in the full model.
            seed: seed of the weights.
        """
        if name == "lora_A":
            flat, bound = parameter.view(-1), 1 / math.sqrt(self._weft_whole[1])
            for start, values in uniform_values(seed, full_name, parameter.numel()):
                flat[start : start + values.numel()] = values.mul_(2).sub_(1).mul_(bound).to(parameter.device)
        elif name == "lora_B":
            parameter.zero_()
        elif name == "lora_magnitude":
            weight = layers.weight_of(self)
            if weight.is_meta or tuple(weight.shape) != self._weft_whole:
                # If the weight is sharded or not allocated yet, it is computed from seed and name too.
                stored = self._weft_whole[::-1] if layers.is_transposed(self) else self._weft_whole
                made = torch.empty(stored, dtype=parameter.dtype)
                initialise_parameter(made, full_name.removesuffix(name) + "weight", self, seed)
                weight = made.t() if layers.is_transposed(self) else made
            parameter.copy_(torch.linalg.vector_norm(weight, dim=1, dtype=parameter.dtype))
        else:
            return False
        return True


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Turn off the model's adapter inside the context, for example to compute reference log-probabilities.

    Raises:
        ModelError: if the model has no adapter, or one that changed the base model's own modules (modules_to_save).
    """
    found = [module for module in model.modules() if isinstance(module, AdaptedLinear | AdaptedExperts | TrainedRows)]
    if not found:
        raise ModelError(f"model of type {type(model).__name__}: it has no adapter. Call add_adapter first.")
    if (record := adapted(model)) is not None and record.saved:
        raise ModelError(
            f"modules_to_save={next(iter(record.saved))}: training replaced its weights, so the adapter cannot be "
            "turned off. Use trainable_tokens or targets instead, or a second model."
        )
    before = [layer._weft_is_on for layer in found]
    for layer in found:
        layer._weft_is_on = False
    try:
        yield
    finally:
        for layer, was_on in zip(found, before, strict=True):
            layer._weft_is_on = was_on


# Adds an adapter to a model's linear layers and freezes all else.


def add_adapter(
    model: nn.Module,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = (),
    dropout: float = 0.0,
    kind: str = "lora",
    base: str = "stored",
    modules_to_save: Sequence[str] = (),
    trainable_tokens: Mapping[str, Sequence[int]] | Sequence[int] = (),
    seed: int = 0,
) -> nn.Module:
    """Add an adapter to linear layers in place and freeze every other parameter. Call it before `parallelize`.

    Module names stay the same. A layer `q` gets the parameters `q.lora_A`, `q.lora_B` and, under dora,
    `q.lora_magnitude`, and an embedding `embed` with trained rows gets `embed.token_rows`. On the meta device they have
    shapes only, and `parallelize` fills them from its seed.

    Args:
        model: any nn.Module. Its nn.Linear layers and the Conv1D layers of GPT-2 in transformers can have an adapter.
        rank: rows of A and columns of B.
        alpha: the product of B and A is multiplied by alpha / rank, or by alpha / sqrt(rank) under rslora. None for
            twice the rank.
        targets: patterns of layers, each a path or the end of one, such as "q_proj" or "blocks.0.attn.*". `*` matches
            any text. (): all linear layers except the output layer, routers, and layers whose weight is computed or
            shared with an earlier layer. A pattern such as "experts.down_proj" adapts stacked experts.
        dropout: dropout rate of the adapter's inputs in training.
        kind: "lora", "rslora" or "dora".
        base: format of the frozen weights of all linear layers that may have an adapter, and of all stacked experts.
            "stored": unchanged. "int8" or "nf4": quantized in blocks of 64 with one scale, dequantized for each matmul.
        modules_to_save: patterns of modules, as for `targets`, whose parameters are trained in full and saved with the
            adapter. Their layers get no adapter.
        trainable_tokens: ids of tokens whose rows are trained in the input embedding and in layers that share its
            weight, as peft's `trainable_token_indices`. A mapping has ids by path of an embedding or output layer.
        seed: seed of the initial values of A, combined with each parameter's name.

    Returns:
        The same model.

    Raises:
        ModelError: if a pattern matches no layer or a layer that cannot be adapted, if a setting is unknown, out of
            range or cannot be combined with another, if a token has no row, or if the model already has an adapter or
            is parallelized.
    """
    adapter = AdapterKind(rank, 2.0 * rank if alpha is None else float(alpha), kind, float(dropout))
    stacks, chosen, usable, saved = _choose(model, targets, modules_to_save)
    rows = find_rows(model, trainable_tokens, saved)
    _check_combination(adapter, base, stacks)
    packed = {} if base == "stored" else pack_layers(model, usable, base)
    adapt_layers(model, chosen, adapter, seed, stacks)
    packed_stacks = {} if base == "stored" else pack_stacks(model, adapter, base, saved)
    train_more(model, saved, rows)
    note_adapted(model, replace(_expected(model), base=base, packed=packed, packed_stacks=packed_stacks))
    return model


def _check_combination(adapter: AdapterKind, base: str, stacks: Mapping[str, bool]) -> None:
    check_kind(adapter)
    if stacks and adapter.dropout:
        raise ModelError(
            f"dropout={adapter.dropout}: the adapter of {next(iter(stacks))} is added to the weights, and dropout "
            "needs its inputs. Use dropout=0, or leave the experts out of the targets."
        )
    if base != "stored" and adapter.kind == "dora":
        raise ModelError(f"base={base}: dora divides by norms of the weights as they were stored. Use kind=lora.")


def _choose(
    model: nn.Module, targets: Sequence[str], modules_to_save: Sequence[str]
) -> tuple[dict[str, bool], dict[str, nn.Module], dict[str, nn.Module], dict[str, dict[str, str]]]:
    stacks, rest = chosen_stacks(model, targets)
    usable = chosen_layers(model, optional=bool(stacks))
    chosen = usable if not targets else chosen_layers(model, rest) if rest else {}
    saved = saved_modules(model, modules_to_save)
    inside = {path for path in usable | chosen | stacks if any(f"{path}.".startswith(f"{one}.") for one in saved)}
    if targets and (both := sorted(inside & (chosen.keys() | stacks.keys()))):
        raise ModelError(f"targets={both[0]}: modules_to_save trains this layer in full. Leave it out of one of them.")
    chosen, usable = ({path: one for path, one in some.items() if path not in inside} for some in (chosen, usable))
    if not chosen and not stacks:
        raise ModelError(f"modules_to_save={modules_to_save[0]}: no layer is left for the adapter. Save fewer modules.")
    return stacks, chosen, usable, saved


def train_more(model: nn.Module, saved: Mapping[str, Mapping[str, str]], rows: Mapping[str, TokenRows]) -> nn.Module:
    """Make modules and token rows of an adapted model trainable, and record them as in `Adapted`. Return the model."""
    for path in saved:
        model.get_submodule(path).requires_grad_(True)
    add_rows(rows)
    record = _expected(model)
    tokens = {path: one.ids for path, one in rows.items()}
    ties = {other: path for path, one in rows.items() for other in one.sharing if other != path}
    note_adapted(model, replace(record, saved=saved, tokens=tokens, ties=ties))
    return model


def adapt_layers(
    model: nn.Module,
    chosen: Mapping[str, nn.Module],
    adapter: AdapterKind,
    seed: int,
    stacks: Mapping[str, bool] | None = None,
) -> nn.Module:
    """Add an adapter to the chosen layers in place and freeze all else. Return the same model.

    Args:
        model: a model without an adapter.
        chosen: its layers by path, as returned by `chosen_layers`.
        adapter: settings for all of these layers.
        seed: see `add_adapter`.
        stacks: stacked weights of experts, as returned by `chosen_stacks`.

    Raises:
        ModelError: if a setting of the adapter is unknown or out of range.
    """
    check_kind(adapter)
    for param in model.parameters():
        param.requires_grad_(False)
    for path, layer in chosen.items():
        _adapt(layer, path, adapter, seed)
    adapt_stacks(model, stacks or {}, adapter, seed)
    transposed = {path: layers.is_transposed(layer) for path, layer in chosen.items()}
    note_adapted(model, Adapted(adapter, transposed, experts=dict(stacks or {})))
    return model


def chosen_layers(model: nn.Module, targets: Sequence[str] = (), *, optional: bool = False) -> dict[str, nn.Module]:
    """Return the layers that patterns choose, by path, in the model's order.

    Args:
        model: a model without an adapter.
        targets: patterns, as in `add_adapter`.
        optional: True to return {} if `targets` is empty and no layer can be adapted.

    Raises:
        ModelError: if a pattern matches no linear layer or a layer that cannot be adapted, if no layer can be adapted
            and `optional` is False, or if the model has an adapter or is parallelized.
    """
    if adapted(model) is not None:
        raise ModelError("model: it has an adapter already. Merge it first (merge_adapter), or build a new model.")
    if any(name.startswith("_weft_") for name in vars(model)):
        raise ModelError("model: it is parallelized already. Add the adapter before parallelize.")
    linear = {path: module for path, module in model.named_modules() if path and layers.is_linear(module)}
    refused = dict(_refused(model, linear))
    if not targets:
        found = {path: module for path, module in linear.items() if path not in refused}
        if not found and not optional:
            raise ModelError(f"model of type {type(model).__name__}: it has no linear layer that an adapter fits.")
        return found
    chosen: set[str] = set()
    for pattern in targets:
        hits = {path for path, _ in model.named_modules() if path and fits(path, pattern)}
        usable = hits & linear.keys()
        if not usable:
            if hits:
                first = min(hits)
                why = f"{first} is a {type(model.get_submodule(first)).__name__}, and adapters fit linear layers alone"
            else:
                why = "no module has such a path or ending"
            names = [path.rpartition(".")[2] for path in linear if path not in refused]
            names += [".".join(path.split(".")[-2:]) for path in stacked_parameters(model)]
            ends = ", ".join(dict.fromkeys(names))
            raise ModelError(f"targets={pattern}: {why}. Use some of {ends}.")
        if blamed := sorted(usable & refused.keys()):
            raise ModelError(f"targets={pattern}: {blamed[0]} {refused[blamed[0]]}. Leave it out of the targets.")
        chosen |= usable
    return {path: module for path, module in linear.items() if path in chosen}


def _refused(model: nn.Module, linear: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    head = layers.find_lm_head(model)
    gating = {path.rpartition(".")[0] for path, _ in layers.find_experts(model)}
    seen: dict[int, str] = {}
    for path, module in linear.items():
        if module is head:
            yield path, "makes the logits, which Weft computes inside the loss"
        elif path.rpartition(".")[0] in gating and path.rpartition(".")[2] in ("gate", "router"):
            yield path, "chooses experts, and its scores are balanced as they are"
        elif isinstance(own := module.weight, nn.Parameter) and id(own) in seen:
            yield path, f"shares its weight with {seen[id(own)]}"
        elif not isinstance(own, nn.Parameter):
            yield path, "computes its weight from other parameters"
        seen.setdefault(id(module.weight), path)


def _adapt(layer: nn.Module, path: str, adapter: AdapterKind, seed: int) -> None:
    weight = layers.weight_of(layer)
    whole = (weight.shape[0], weight.shape[1])
    shapes = adapter.shapes(*whole)
    # Trained parameters are not rounded, whatever the dtype of the frozen weight.
    options = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
    replace_class(layer, AdaptedLinear, adapter=adapter, whole=whole, is_on=True)
    assert isinstance(layer, AdaptedLinear)
    for name in ADAPTER_PARAMS:
        setattr(layer, name, nn.Parameter(torch.empty(shapes[name], **options)) if name in shapes else None)
    layer.lora_dropout = nn.Dropout(adapter.dropout) if adapter.dropout else None
    for name in ADAPTER_PARAMS:
        param = getattr(layer, name)
        if param is not None and not param.is_meta:
            layer.fill_adapter(param, name, f"{path}.{name}", seed)


# Merging adapters into their layers' weights.

#: Classes that `add_adapter` puts in front of a module's own class.
_CLASSES = (AdaptedLinear, AdaptedExperts, RowsEmbedding, RowsLinear)


def merge_adapter(model: nn.Module) -> nn.Module:
    """Add each adapter to its layer's weight in place and restore the layers' classes from before `add_adapter`.

    Quantized weights are dequantized, because the adapter was trained with the quantized values. For a parallelized
    model, use `merged_tensors` on the full tensors. Returns the same model. The layers' weights stay frozen.

    Raises:
        ModelError: if the model has no adapter or is parallelized.
    """
    record = _expected(model)
    stacks = [*record.experts, *record.packed_stacks]
    around = dict.fromkeys(path.rpartition(".")[0] for path in stacks)
    for path in (*record.layers, *around, *record.tokens, *record.ties):
        # An adapted class has one of these as its first base. A later class replacement would come before it.
        if type(model.get_submodule(path)).__bases__[0] not in _CLASSES:
            raise ModelError(
                f"model: {path} was changed after add_adapter, such as by parallelize. Merge the full tensors: "
                "merged_tensors(model, run.full_state_dict(model))."
            )
    found = {path: cast(AdaptedLinear, model.get_submodule(path)) for path in record.layers}
    for path in record.packed:
        unpack_layer(model.get_submodule(path))
    unpack_stacks(model, record.packed_stacks)
    for path, layer in found.items():
        weight = layers.stored_weight(layer)
        own = {name: getattr(layer, name) for name in ADAPTER_PARAMS if getattr(layer, name) is not None}
        with torch.no_grad():
            weight.copy_(merged_weight(record, path, weight, own))
        for name in (*ADAPTER_PARAMS, "lora_dropout", "_weft_adapter", "_weft_whole", "_weft_is_on"):
            delattr(layer, name)
        revert(layer, AdaptedLinear)
    for path in record.packed:
        leave_packed(model.get_submodule(path))
    params = dict(model.named_parameters())
    rest = {name: param.detach() for name, param in params.items()}
    record.merge_rest(rest)
    for name in (*record.experts, *(f"{path}.weight" for path in record.tokens)):
        params[name].data = rest[name]
    remove_stack_adapters(model, stacks)
    for path in (*record.tokens, *record.ties):
        remove_rows(model.get_submodule(path))
    note_adapted(model, None)
    return model


def merged_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the full tensors of a model with its adapters merged into the weights and their parameters removed.

    Args:
        model: the adapted model, parallelized or not, on any device. Only its record is read.
        tensors: full tensors by name, as returned by `run.full_state_dict(model)`. They are not changed.

    Raises:
        ModelError: if the model has no adapter.
    """
    record, merged = _expected(model), dict(tensors)
    own: dict[str, dict[str, Tensor]] = {}
    for path, name in record.params():
        own.setdefault(path, {})[name] = merged.pop(f"{path}.{name}")
    for name, width in record.packed_weights().items():
        path = name.removesuffix(".weight")
        trained = own[path]["lora_A"] if path in own else tensors.get(f"{name}_lora_A")
        dtype = torch.float32 if trained is None else trained.dtype
        merged[name] = BASE_FORMATS[record.base].unpack(tensors[name], width, dtype)
    for path, parts in own.items():
        merged[f"{path}.weight"] = merged_weight(record, path, merged[f"{path}.weight"], parts)
    record.merge_rest(merged)
    return merged


@torch.no_grad()
def merged_weight(record: Adapted, path: str, stored: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    """Return a layer's weight with its adapter merged. It has the weight's dtype and is computed in the adapter's.

    Args:
        record: the record that `adapted` returns for the model.
        path: path of the layer.
        stored: the weight as stored: (F, D), or (D, F) if the layer stores it transposed.
        own: the layer's adapter parameters by their names within it.
    """
    kind, is_transposed = record.kind, record.layers[path]
    weight = (stored.t() if is_transposed else stored).to(own["lora_A"].dtype)
    weight = weight + kind.scale * (own["lora_B"] @ own["lora_A"])
    if (magnitude := own.get("lora_magnitude")) is not None:
        weight = weight * (magnitude / torch.linalg.vector_norm(weight, dim=1))[:, None]
    return (weight.t() if is_transposed else weight).to(stored.dtype)


def _expected(model: nn.Module) -> Adapted:
    record = adapted(model)
    if record is None:
        raise ModelError(f"model of type {type(model).__name__}: it has no adapter to merge. Call add_adapter first.")
    return record
