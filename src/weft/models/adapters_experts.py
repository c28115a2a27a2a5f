"""LoRA, rsLoRA and DoRA on stacked experts: parameters of shape (E, outputs, inputs), or (E, inputs, outputs).

Each expert has its own A and B. A parameter `gate_up_proj` gets `gate_up_proj_lora_A`, (E, R, inputs),
`gate_up_proj_lora_B`, (E, outputs, R), and under dora `gate_up_proj_lora_magnitude`, (E, outputs), in the same module.
They are stacked by expert like the weights, so the code that distributes experts over ranks distributes them too.

Experts whose matmuls Weft computes (Weft's and transformers' gated ones) add the adapter's products to the products of
the frozen weights. In other forwards, an access to the parameter returns the adapted weight, such as W + s B A. So the
module's code needs no change (as for peft's `target_parameters`).

Frozen stacks may be quantized, in blocks along their last dim: see `quantized_linear`. They are dequantized one expert
at a time, or when other code accesses them, and again in backward.

E experts, R rank.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.adapted_products import (
    MadeWeights,
    PackedStack,
    add_adapter_product,
    is_low_rank_cheaper,
    output_norms,
    packed_product,
    times_by_expert,
)
from weft.models.experts import Ends, combine_rows, grouped_linear, run_gated, scatter_rows, sort_by_expert
from weft.models.initialize import initialise_parameter, uniform_values
from weft.models.inspect import hugging_face, layers
from weft.models.inspect.blocks import replace_class, revert
from weft.models.quantized_linear import BASE_FORMATS
from weft.models.token_rows import fits
from weft.private_torch import uncompiled

KINDS = ("lora", "rslora", "dora")
#: Ends of the names of an adapter's parameters, after the name of the adapted one.
EXPERT_PARAMS = ("_lora_A", "_lora_B", "_lora_magnitude")


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """Settings of an adapter on a linear layer.

    Attributes:
        rank: rows of A and columns of B.
        alpha: the product of B and A is multiplied by alpha / rank, or by alpha / sqrt(rank) under rslora.
        kind: "lora", "rslora" or "dora".
        dropout: dropout rate of the adapter's inputs in training.
    """

    rank: int
    alpha: float
    kind: str = "lora"
    dropout: float = 0.0

    def __str__(self) -> str:
        drops = f", dropout {self.dropout:g}" if self.dropout else ""
        return f"{self.kind} of rank {self.rank}, alpha {self.alpha:g}{drops}"

    @property
    def scale(self) -> float:
        """The factor of the product of B and A."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an adapter's parameters on one weight, by name."""
        shapes: dict[str, tuple[int, ...]] = {"lora_A": (self.rank, inputs), "lora_B": (outputs, self.rank)}
        return shapes | ({"lora_magnitude": (outputs,)} if self.kind == "dora" else {})


def check_kind(adapter: AdapterKind) -> None:
    """Raise ModelError if a setting of an adapter is unknown or out of range."""
    if adapter.kind not in KINDS:
        raise ModelError(f"kind={adapter.kind!r}: an adapter is one of {', '.join(KINDS)}. Use kind='lora'.")
    if adapter.rank < 1:
        raise ModelError(f"rank={adapter.rank}: an adapter has a rank of at least 1. Use rank=16.")
    if not 0 <= adapter.dropout < 1:
        raise ModelError(f"dropout={adapter.dropout}: the share dropped is at least 0 and below 1. Use dropout=0.05.")
    if not adapter.alpha > 0:
        raise ModelError(f"alpha={adapter.alpha:g}: it must be above 0. Use alpha={2 * adapter.rank}.")


class AdaptedExperts(nn.Module):
    """Module of stacked experts, adapted or quantized. `replace_class` combines this class with the module's own."""

    _weft_adapter: AdapterKind
    #: Name of an adapted parameter -> (shape of the full parameter, True if it is stored as (E, inputs, outputs)).
    _weft_stacks: Mapping[str, tuple[tuple[int, ...], bool]]
    #: Name of a quantized parameter -> its format.
    _weft_packed: Mapping[str, PackedStack]
    _weft_is_on: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with adapted weights. Each is computed once per call."""
        return self._merged_in(super().__call__, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the experts' own forward with adapted weights, also if it is called without `__call__`."""
        # `inspect` traces with batched_mm, whose shapes do not depend on values.
        is_batched = getattr(getattr(self, "config", None), "_experts_implementation", None) == "batched_mm"
        if hugging_face.has_gated_experts(self) and not is_batched:
            given = inspect.signature(super().forward).bind(*args, **kwargs).arguments
            return self._gated(*given.values())
        return self._merged_in(super().forward, args, kwargs)

    @uncompiled
    def _gated(self, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor) -> Tensor:
        """Compute what transformers' gated experts do, (M, D), without the matrices B A."""
        order = sort_by_expert(ids_MK, layers.num_experts(type(self).__name__, self), drops=False)
        return combine_rows(run_gated(self, scatter_rows(x_MD, order), order.ends_E), weights_MK, order)

    def times_adapted(self, name: str, x_RD: Tensor, ends: Ends) -> Tensor:
        """Return the product of rows sorted by expert with an adapted or quantized stack: `experts.times_stack`."""
        look = cast("Callable[[str], Tensor]", super().__getattr__)
        stored = look(name)
        form, own, scale = self._weft_packed.get(name), self._adapter_of(name), self._weft_adapter.scale
        is_transposed = bool(getattr(self, "is_transposed", False))
        if form is None:
            stored = stored.mT if is_transposed else stored
            if own and not is_low_rank_cheaper(x_RD.shape[0], stored, self._weft_adapter.rank):
                return grouped_linear(x_RD, merged_stack(scale, stored, own, False), ends)
            plain = grouped_linear(x_RD, stored, ends)
        else:
            plain = packed_product(x_RD, stored, form, ends, is_transposed)
        if not own:
            return plain
        product = add_adapter_product(plain, x_RD, own, scale, ends)
        if (magnitude := own.get("_lora_magnitude")) is None:
            return product
        return times_by_expert(product, magnitude / output_norms(stored, own, scale), ends)

    def _adapter_of(self, name: str) -> dict[str, Tensor]:
        """Return the adapter's parameters on a stack by the ends of their names, or {} without one or if it is off."""
        if not self._weft_is_on or name not in self._weft_stacks:
            return {}
        look = cast("Callable[[str], Tensor]", super().__getattr__)
        ends = EXPERT_PARAMS if self._weft_adapter.kind == "dora" else EXPERT_PARAMS[:2]
        return {end: look(f"{name}{end}") for end in ends}

    # The compiler does not trace attribute lookups that compute.
    @uncompiled
    def _merged_in(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.__dict__.get("_weft_made") is not None or not (self._weft_is_on or self._weft_packed):
            return call(*args, **kwargs)
        made = self.__dict__["_weft_made"] = MadeWeights()
        self.__dict__["_weft_dtype"] = next(
            (one.dtype for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None
        )
        try:
            with torch.autograd.graph.saved_tensors_hooks(made.pack, made.unpack):
                return call(*args, **kwargs)
        finally:
            made.weights.clear()
            self.__dict__["_weft_made"] = None

    def __getattr__(self, name: str) -> Any:
        found: Any = super().__getattr__(name)
        made: MadeWeights | None = self.__dict__.get("_weft_made")
        if made is None or (name not in self._weft_stacks and name not in self._weft_packed):
            return found
        own, form, scale = self._adapter_of(name), self._weft_packed.get(name), self._weft_adapter.scale
        if not own and form is None:
            return found
        is_transposed = bool(own) and self._weft_stacks[name][1]
        dtype = self.__dict__["_weft_dtype"]

        def make() -> Tensor:
            stored = found if form is None else form.unpack(found, dtype)
            return merged_stack(scale, stored, own, is_transposed) if own else stored

        return made.make(name, make)

    @torch.no_grad()
    def fill_adapter(self, parameter: Tensor, name: str, full_name: str, seed: int) -> bool:
        """Fill one of the adapter's full parameters with its initial values. Return False for any other parameter.

        The values are as in `AdaptedLinear.fill_adapter`.
        """
        end = next((one for one in EXPERT_PARAMS if name.endswith(one)), None)
        if end is None or (own := name.removesuffix(end)) not in self._weft_stacks:
            return False
        shape, is_transposed = self._weft_stacks[own]
        if end == "_lora_A":
            flat, bound = parameter.view(-1), 1 / math.sqrt(parameter.shape[-1])
            for start, values in uniform_values(seed, full_name, parameter.numel()):
                flat[start : start + values.numel()] = values.mul_(2).sub_(1).mul_(bound).to(parameter.device)
        elif end == "_lora_B":
            parameter.zero_()
        else:
            weight: Tensor = self._parameters[own]  # pyright: ignore[reportAssignmentType] - it is never None
            if weight.is_meta or tuple(weight.shape) != shape:
                # If the weight is sharded or not allocated yet, it is computed from seed and name too.
                weight = torch.empty(shape, dtype=parameter.dtype)
                initialise_parameter(weight, full_name.removesuffix(end), self, seed)
            parameter.copy_(torch.linalg.vector_norm(weight.to(parameter.dtype), dim=1 if is_transposed else 2))
        return True


def merged_stack(scale: float, stored: Tensor, own: Mapping[str, Tensor], is_transposed: bool) -> Tensor:
    """Return stacked weights with their adapters, in the dtype and layout of the stored ones; differentiable.

    Args:
        scale: factor of the product of B and A.
        stored: (E, outputs, inputs), or (E, inputs, outputs) if transposed.
        own: the adapter's parameters by the ends of their names.
        is_transposed: layout of `stored`.
    """
    a, b = own["_lora_A"].to(stored.dtype), own["_lora_B"].to(stored.dtype)
    weight = torch.baddbmm(stored.mT if is_transposed else stored, b, a, alpha=scale)
    if (magnitude := own.get("_lora_magnitude")) is not None:
        norms = torch.linalg.vector_norm(weight.detach(), dim=2, dtype=torch.promote_types(weight.dtype, torch.float32))
        weight = weight * (magnitude / norms).to(weight.dtype)[..., None]
    return weight.mT if is_transposed else weight


@torch.no_grad()
def merge_stack(scale: float, stored: Tensor, own: Mapping[str, Tensor], is_transposed: bool) -> Tensor:
    """Return the result of `merged_stack` in the stored dtype, computed in the adapter's."""
    wide = stored.to(torch.promote_types(stored.dtype, own["_lora_A"].dtype))
    return merged_stack(scale, wide, own, is_transposed).contiguous().to(stored.dtype)


@torch.no_grad()
def pack_stacks(model: nn.Module, adapter: AdapterKind, base: str, left_out: Iterable[str]) -> dict[str, int]:
    """Quantize the stacked weights of a model's experts. Call it after `adapt_stacks`.

    Args:
        model: the model.
        adapter: the model's adapter.
        base: "int8" or "nf4".
        left_out: paths of modules whose stacks stay as they are.

    Returns:
        Weights per row by path of the parameter.
    """
    kept, widths = BASE_FORMATS[base], dict[str, int]()
    for path, (module, name) in stacked_parameters(model).items():
        if any(path.startswith(f"{one}.") for one in left_out):
            continue
        weight = module.get_parameter(name)
        experts = _as_adapted(module, adapter)
        experts._weft_packed = {**experts._weft_packed, name: PackedStack(kept, weight.shape[-1], weight.dtype)}
        setattr(module, name, nn.Parameter(kept.pack(weight), requires_grad=False))
        widths[path] = weight.shape[-1]
    return widths


@torch.no_grad()
def unpack_stacks(model: nn.Module, paths: Iterable[str]) -> None:
    """Replace quantized stacks by their dequantized values, in the dtype before quantization."""
    for path in paths:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        assert isinstance(module, AdaptedExperts)
        form = module._weft_packed[name]
        values = form.unpack(module.get_parameter(name)).to(form.dtype)
        module._weft_packed = {one: kept for one, kept in module._weft_packed.items() if one != name}
        setattr(module, name, nn.Parameter(values, requires_grad=False))


def _as_adapted(module: nn.Module, adapter: AdapterKind) -> AdaptedExperts:
    if not isinstance(module, AdaptedExperts):
        replace_class(module, AdaptedExperts, adapter=adapter, stacks={}, packed={}, is_on=True)
    assert isinstance(module, AdaptedExperts)
    return module


def stacked_parameters(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the stacked matrices of all experts by path, as (module, name within it)."""
    known = {id(module) for _, module in layers.find_experts(model)}
    return {
        f"{path}.{name}": (module, name)
        for path, module in model.named_modules()
        if id(module) in known or hugging_face.computes_tokens_separately(module)
        for name, param in module.named_parameters(recurse=False)
        if param.ndim == 3 and not name.endswith(EXPERT_PARAMS)
    }


def chosen_stacks(model: nn.Module, targets: Sequence[str]) -> tuple[dict[str, bool], list[str]]:
    """Return the stacked parameters that patterns name, and the other patterns.

    A pattern names a parameter if it ends in the names of the module and of the parameter, as "experts.down_proj". The
    value of a path is True for a parameter that is stored as (E, inputs, outputs).
    """
    stacks, chosen, rest = stacked_parameters(model), dict[str, bool](), list[str]()
    for pattern in targets:
        ending = pattern.split(".")[-2:]
        hits = [path for path in stacks if len(ending) == 2 and path.split(".")[-2:] == ending and fits(path, pattern)]
        chosen |= {path: bool(getattr(stacks[path][0], "is_transposed", False)) for path in hits}
        rest += [] if hits else [pattern]
    return {path: chosen[path] for path in stacks if path in chosen}, rest


def adapt_stacks(model: nn.Module, chosen: Mapping[str, bool], adapter: AdapterKind, seed: int) -> None:
    """Add adapters in place to the stacks that `chosen_stacks` returned. seed: as in `add_adapter`."""
    stacks = stacked_parameters(model)
    for path, is_transposed in chosen.items():
        name = stacks[path][1]
        module = _as_adapted(stacks[path][0], adapter)
        weight = module.get_parameter(name)
        module._weft_stacks = {**module._weft_stacks, name: (tuple(weight.shape), is_transposed)}
        options = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
        for end, shape in stack_shapes(weight, adapter, is_transposed).items():
            param = nn.Parameter(torch.empty(shape, **options))
            module.register_parameter(f"{name}{end}", param)
            if not param.is_meta:
                module.fill_adapter(param, f"{name}{end}", f"{path}{end}", seed)


def stack_shapes(weight: Tensor, adapter: AdapterKind, is_transposed: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's parameters on a stack of experts, by the ends of their names."""
    count, outputs, inputs = weight.mT.shape if is_transposed else weight.shape
    return {f"_{name}": (count, *shape) for name, shape in adapter.shapes(outputs, inputs).items()}


def remove_stack_adapters(model: nn.Module, chosen: Iterable[str]) -> None:
    """Remove the adapters of experts without merging them, and restore the experts' classes.

    chosen: paths of adapted stacks, and of stacks that were quantized.
    """
    stacks = stacked_parameters(model)
    for module in {id(stacks[path][0]): stacks[path][0] for path in chosen}.values():
        assert isinstance(module, AdaptedExperts)
        for name in module._weft_stacks:
            for end in EXPERT_PARAMS:
                if f"{name}{end}" in dict(module.named_parameters(recurse=False)):
                    delattr(module, f"{name}{end}")
        for name in ("adapter", "stacks", "packed", "is_on"):
            delattr(module, f"_weft_{name}")
        for name in ("_weft_made", "_weft_dtype"):
            module.__dict__.pop(name, None)
        revert(module, AdaptedExperts)


def stack_names(chosen: Mapping[str, bool], kind: str) -> Iterator[tuple[str, str]]:
    """Yield (path of the adapted parameter, end of the name) of each parameter of the adapters of experts."""
    return ((path, end) for path in chosen for end in (EXPERT_PARAMS if kind == "dora" else EXPERT_PARAMS[:2]))
