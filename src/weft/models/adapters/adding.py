"""Adds an adapter to a model's linear layers and freezes all else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from weft.errors import ModelError
from weft.models.adapters.adapted_linear import AdaptedLinear
from weft.models.adapters.adapter_kind import ADAPTER_PARAMS, Adapted, AdapterKind, adapted, note_adapted
from weft.models.adapters.packed_linear import pack_layers
from weft.structure import become, layers

KINDS = ("lora", "rslora", "dora")


def add_adapter(
    model: nn.Module,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = (),
    dropout: float = 0.0,
    kind: str = "lora",
    base: str = "stored",
    seed: int = 0,
) -> nn.Module:
    """Give linear layers an adapter, in place, and freeze every other parameter. Call it before `parallelize`.

    Names of the model stay; a layer `q` gets the parameters `q.lora_A`, `q.lora_B` and, under dora, `q.lora_magnitude`.
    On the meta device they are shapes, which `parallelize` makes with its seed.

    Args:
        model: any nn.Module; layers are nn.Linear and the Conv1D of GPT-2 in transformers.
        rank: rows of A and columns of B.
        alpha: the product of B and A is multiplied by alpha / rank, under rslora by alpha / sqrt(rank); None: twice
            the rank.
        targets: patterns of layers, each a path or the end of one, such as "q_proj" or "blocks.0.attn.*"; `*` matches
            any text. (): all linear layers but the one that makes the logits and those that choose experts.
        dropout: share of the adapter's inputs that training drops.
        kind: "lora", "rslora" or "dora".
        base: how linear layers that may have an adapter keep their frozen weights: "stored", as they are; "int8" or
            "nf4", in blocks of 64 with one scale, unpacked in each product.
        seed: of the first values of A, with each parameter's name.

    Returns:
        The same model.

    Raises:
        ModelError: for a pattern that fits no layer or one that cannot be adapted, for a number out of its range, and
            for a model that has an adapter or is parallelized.
    """
    adapter = AdapterKind(rank, 2.0 * rank if alpha is None else float(alpha), kind, float(dropout))
    chosen = chosen_layers(model, targets)
    if base == "stored":
        return adapt_layers(model, chosen, adapter, seed)
    if kind == "dora":
        raise ModelError(f"base={base}: dora divides by norms of the weights as they were stored. Use kind=lora.")
    _check(adapter)
    packed = pack_layers(model, chosen_layers(model), base)
    adapt_layers(model, chosen, adapter, seed)
    note_adapted(model, replace(_noted(model), base=base, packed=packed))
    return model


def _noted(model: nn.Module) -> Adapted:
    record = adapted(model)
    assert record is not None
    return record


def adapt_layers(model: nn.Module, chosen: Mapping[str, nn.Module], adapter: AdapterKind, seed: int) -> nn.Module:
    """Give chosen layers an adapter and freeze all else, in place; the same model.

    Args:
        model: without an adapter.
        chosen: its layers by path, such as `chosen_layers` gives.
        adapter: one kind for all of them.
        seed: as `add_adapter` takes it.

    Raises:
        ModelError: for a number out of its range.
    """
    _check(adapter)
    for param in model.parameters():
        param.requires_grad_(False)
    for path, layer in chosen.items():
        _adapt(layer, path, adapter, seed)
    note_adapted(model, Adapted(adapter, {path: layers.is_transposed(layer) for path, layer in chosen.items()}))
    return model


def _check(adapter: AdapterKind) -> None:
    if adapter.kind not in KINDS:
        raise ModelError(f"kind={adapter.kind!r}: an adapter is one of {', '.join(KINDS)}. Use kind='lora'.")
    if adapter.rank < 1:
        raise ModelError(f"rank={adapter.rank}: an adapter has a rank of at least 1. Use rank=16.")
    if not 0 <= adapter.dropout < 1:
        raise ModelError(f"dropout={adapter.dropout}: the share dropped is at least 0 and below 1. Use dropout=0.05.")
    if not adapter.alpha > 0:
        raise ModelError(f"alpha={adapter.alpha:g}: it must be above 0. Use alpha={2 * adapter.rank}.")


def chosen_layers(model: nn.Module, targets: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Return the layers that patterns choose, by path, in the model's order.

    Args:
        model: without an adapter.
        targets: as `add_adapter` takes them.

    Raises:
        ModelError: as `add_adapter` raises it.
    """
    if adapted(model) is not None:
        raise ModelError(
            "model: it has an adapter already. Merge that one first (merge_adapter), or build a new model."
        )
    if any(name.startswith("_weft_") for name in vars(model)):
        raise ModelError("model: it is parallelized already. Add the adapter before parallelize.")
    linear = {path: module for path, module in model.named_modules() if path and layers.is_linear(module)}
    refused = dict(_refused(model, linear))
    if not targets:
        found = {path: module for path, module in linear.items() if path not in refused}
        if not found:
            raise ModelError(f"model of type {type(model).__name__}: it has no linear layer that an adapter fits.")
        return found
    chosen: set[str] = set()
    for pattern in targets:
        hits = {path for path, _ in model.named_modules() if path and _fits(path, pattern)}
        usable = hits & linear.keys()
        if not usable:
            if hits:
                first = min(hits)
                why = f"{first} is a {type(model.get_submodule(first)).__name__}, and adapters fit linear layers alone"
            else:
                why = "no module has such a path or ending"
            ends = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in linear if path not in refused))
            raise ModelError(f"targets={pattern}: {why}. Use some of {ends}.")
        if blamed := sorted(usable & refused.keys()):
            raise ModelError(f"targets={pattern}: {blamed[0]} {refused[blamed[0]]}. Leave it out of the targets.")
        chosen |= usable
    return {path: module for path, module in linear.items() if path in chosen}


def _fits(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def _refused(model: nn.Module, linear: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Linear layers that take no adapter, each with the reason."""
    head = layers.find_lm_head(model)
    gating = {path.rpartition(".")[0] for path, _ in layers.find_experts(model)}
    seen: dict[int, str] = {}
    for path, module in linear.items():
        if module is head:
            yield path, "makes the logits, which Weft computes inside of the loss"
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
    # Trained numbers start unrounded, whatever the frozen weight is kept in.
    options = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
    become(layer, AdaptedLinear, adapter=adapter, whole=whole, is_on=True)
    assert isinstance(layer, AdaptedLinear)
    layer.lora_A = nn.Parameter(torch.empty(adapter.rank, whole[1], **options))
    layer.lora_B = nn.Parameter(torch.empty(whole[0], adapter.rank, **options))
    layer.lora_magnitude = nn.Parameter(torch.empty(whole[0], **options)) if adapter.kind == "dora" else None
    layer.lora_dropout = nn.Dropout(adapter.dropout) if adapter.dropout else None
    for name in ADAPTER_PARAMS:
        param = getattr(layer, name)
        if param is not None and not param.is_meta:
            layer.fill_adapter(param, name, f"{path}.{name}", seed)
