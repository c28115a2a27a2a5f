"""Work and memory of a traced model, for every distinct way to cut its layers: what formulas say of known families.

A layer is the mean over the model's layers, as everywhere in the estimate. Letters as in `layer_cost`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.kernels import bytes_s, flash_s, gemm_s
from weft.planner.cost.tables import Tables
from weft.planner.space.shape import Shape
from weft.spec import DecoderSpec, TracedModel
from weft.spec.traced import Parts, TracedLayer

Array = NDArray[np.float64]

#: Times the FLOPs of fused attention's forward that its backward does: scores are made again.
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedShape(Shape):
    """The widths that a traced model has, and the trace that says all else. Without a sequence, a sample is a token."""

    traced: TracedModel

    @property
    def num_params(self) -> int:
        return self.traced.num_params

    @property
    def dense_layer_params(self) -> int:
        return round(self.mean(lambda layer: layer.num_params))

    def mean(self, value: Callable[[TracedLayer], Any]) -> Any:
        """The mean of a number over all layers."""
        return sum(layer.count * value(layer) for layer in self.traced.layers) / self.traced.num_layers

    @classmethod
    def of(cls, traced: TracedModel) -> TracedShape:
        """The shape of a description."""
        attention = traced.attention
        return cls(
            vocab=traced.vocab,
            hidden=traced.hidden,
            layers=traced.num_layers,
            heads=attention.heads if attention else 1,
            kv_heads=attention.kv_heads if attention else 1,
            head_dim=attention.head_dim if attention else 1,
            ffn=0,
            tied=traced.tied,
            traced=traced,
        )


def as_rules_see_it(traced: TracedModel) -> DecoderSpec:
    """Heads, widths and layers of a traced model; what else it forbids is in its limits."""
    attention = traced.attention
    legal = math.lcm(*dict(traced.limits)["tp"].values) if "tp" in dict(traced.limits) else 1
    return DecoderSpec(
        vocab_size=max(1, traced.vocab),
        dim=traced.hidden,
        num_layers=traced.num_layers,
        num_heads=attention.heads if attention else legal,
        num_kv_heads=attention.kv_heads if attention else legal,
        ffn_dim=legal,
        max_seq_len=traced.max_seq_len,
        tied=traced.tied,
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """How a rank's share of a pass is cut. seq: tokens of each sequence on the rank; fused: chains are compiled."""

    batch: Array
    seq: Array
    t: Array
    c: Array
    between: Array
    fused: NDArray[np.bool_]
    rate: Array
    half: Array


def products_s(shape: TracedShape, layer: TracedLayer | None, cut: Cut, tables: Tables) -> tuple[Array, Array, Array]:
    """Seconds of matrix products: forward, towards the input, towards the weights; of a mean layer, or of one."""
    forward, dgrad, wgrad = (np.zeros_like(cut.batch) for _ in range(3))
    for one, share in _weighted(shape, layer):
        for each in one.matmuls:
            m, n, k, count = each.sizes(cut.batch, cut.seq, cut.t)
            times = gemm_s(tables, *np.broadcast_arrays([m, m, n], [n, k, k], [k, n, m]), count, cut.rate)
            forward = forward + share * times[0]
            dgrad = dgrad + share * times[1] * each.input_grad
            wgrad = wgrad + share * times[2] * each.weight_grad
    return forward, dgrad, wgrad


def attention_s(
    shape: TracedShape, layer: TracedLayer | None, cut: Cut, tables: Tables, gain: float
) -> tuple[Array, Array]:
    """Seconds of fused attention over whole sequences: forward, backward. gain: speed over the table's."""
    found = [np.zeros_like(cut.batch), np.zeros_like(cut.batch)]
    for one, share in _weighted(shape, layer):
        for each in one.attentions:
            flops = each.flops(cut.batch, cut.seq, cut.t, cut.c)
            keys = each.keys.at(cut.batch, cut.seq * cut.c)
            for place, times in enumerate((1.0, _ATTENTION_BACKWARD)):
                seconds = flash_s(tables, times * flops, keys, each.head_dim, bool(place), cut.half, masked=each.causal)
                found[place] = found[place] + share / gain * seconds
    return found[0], found[1]


def moved_bytes(shape: TracedShape, layer: TracedLayer | None, cut: Cut) -> tuple[Array, Array]:
    """Bytes that memory-bound kernels move: forward, backward."""
    found = [np.zeros_like(cut.batch), np.zeros_like(cut.batch)]
    for one, share in _weighted(shape, layer):
        pairs = ((one.moved_forward, one.fused_forward), (one.moved_backward, one.fused_backward))
        for place, (plain, fused) in enumerate(pairs):
            moved = np.where(cut.fused, _at(fused, cut), _at(plain, cut))
            found[place] = found[place] + share * moved
    return found[0], found[1]


def num_calls(shape: TracedShape, fused: NDArray[np.bool_]) -> Array:
    """Kernels of a mean layer's forward."""
    return np.where(
        fused,
        shape.mean(lambda layer: layer.fused_kernels),
        shape.mean(lambda layer: layer.kernels_forward),
    )


def tensor_traffic(shape: TracedShape, cut: Cut) -> Array:
    """What tensor parallelism sums in a mean layer's forward, over the two sums of a token's width of a decoder."""
    values = shape.mean(lambda layer: layer.reduced.at(cut.batch, cut.seq))
    return values / (2.0 * shape.hidden * cut.batch * cut.seq)


def end_s(shape: TracedShape, layer: TracedLayer, cut: Cut, tables: Tables) -> tuple[Array, Array]:
    """Seconds of forward and backward of what runs before or after the layers: products, and passes over memory."""
    products = sum(products_s(shape, layer, cut, tables))
    scores = sum(attention_s(shape, layer, cut, tables, 1.0))
    moved = sum(bytes_s(tables, each) for each in moved_bytes(shape, layer, cut))
    return products + scores, moved


def saved_bytes(shape: TracedShape, cut: Cut, policy: str) -> Array:
    """Bytes that a mean layer keeps of one pass under a policy of recompute."""
    name = {"none": "compiled"}.get(policy, policy)
    found = shape.mean(lambda layer: _at(dict(layer.saved)[policy], cut))
    return np.where(cut.fused, shape.mean(lambda layer: _at(dict(layer.saved)[name], cut)), found)


def end_saved_bytes(layer: TracedLayer, cut: Cut) -> Array:
    """Bytes that one pass keeps before or after the layers."""
    saved = dict(layer.saved)
    return _at(saved["none"], cut) if saved else np.zeros_like(cut.batch)


def layer_params(shape: TracedShape, t: Array) -> Array:
    """Parameters of a mean layer on one rank."""
    return shape.mean(lambda layer: layer.params_cut) / t + shape.mean(lambda layer: layer.params_whole)


def end_params(layer: TracedLayer, t: Array) -> Array:
    """Parameters before or after the layers on one rank, without those of the vocabulary."""
    return layer.params_cut / t + layer.params_whole


def model_flops(shape: TracedShape, seq_len: int, *, causal: bool) -> float:
    """FLOPs of forward and backward for one token; for one sample where nothing is a sequence."""
    return float(shape.traced.flops(1.0, float(seq_len), causal=causal)) / seq_len


def _weighted(shape: TracedShape, layer: TracedLayer | None) -> Iterable[tuple[TracedLayer, float]]:
    """One layer, or all of them with their shares of a mean one."""
    if layer is not None:
        return [(layer, 1.0)]
    return [(each, each.count / shape.traced.num_layers) for each in shape.traced.layers]


def _at(parts: Parts, cut: Cut) -> Array:
    return parts.at(cut.batch, cut.seq, cut.t, cut.between)
