"""Time and memory of a traced model for every distinct sharding. Other modules have formulas for model families.

Layer values are averages over the model's layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.config.shapes.traced_model import DividedBytes, TracedLayer
from weft.planner.cost.machine import Tables, bytes_s, flash_s, gemm_s
from weft.planner.space.shape import TracedShape

Array = NDArray[np.float64]

#: FLOPs of fused attention's backward divided by its forward: scores are recomputed.
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's share of a microbatch.

    Attributes:
        batch: sequences of the microbatch.
        seq: tokens of each sequence on the rank.
        t, c: tensor-parallel and context-parallel size.
        between: number of ranks over which activations between tensor-parallel regions are divided.
        fused: True if chains of kernels are compiled.
        q, kv: widths of queries and of keys.
        rate: FLOP/s of matmuls.
        half: FLOP/s of operations that stay in a half-precision format.
        core: FLOP/s of attention.
        width: bytes of an element relative to a half-precision format.
    """

    batch: Array
    seq: Array
    t: Array
    c: Array
    between: Array
    fused: NDArray[np.bool_]
    q: Array
    kv: Array
    rate: Array
    half: Array
    core: Array
    width: Array

    @property
    def tokens(self) -> Array:
        """Tokens of a microbatch on the rank."""
        return self.batch * self.seq


def products_s(
    shape: TracedShape, layer: TracedLayer | None, cut: RankShare, tables: Tables
) -> tuple[Array, Array, Array]:
    """Return the time (s) of a layer's matmuls (forward, input gradient, weight gradient).

    Args:
        layer: a layer, or None for an average layer.
    """
    forward, dgrad, wgrad = (np.zeros_like(cut.batch) for _ in range(3))
    for one, share in _weighted(shape, layer):
        for each in one.matmuls:
            m, n, k, count = each.sizes(cut.batch, cut.seq, cut.t)
            rows, columns, inner = np.broadcast_arrays([m, m, n], [n, k, k], [k, n, m])
            times = gemm_s(tables, rows, columns, inner, count, cut.rate, widths=(n, k))
            forward = forward + share * times[0]
            dgrad = dgrad + share * times[1] * each.input_grad
            wgrad = wgrad + share * times[2] * each.weight_grad
    return forward, dgrad, wgrad


def attention_s(
    shape: TracedShape, layer: TracedLayer | None, cut: RankShare, tables: Tables, gain: float,
    pieces: Sequence[tuple[int, float]] = (),
) -> tuple[Array, Array]:  # fmt: skip
    """Return the time (s) of fused attention (forward, backward).

    Args:
        layer: a layer, or None for an average layer.
        gain: speed relative to the table's rate.
        pieces: (tokens, share of all tokens) of the documents in a sequence, each of which causal attention treats as a
            separate sequence; empty for full sequences.
    """
    whole = cut.seq * cut.c
    found = [np.zeros_like(cut.batch), np.zeros_like(cut.batch)]
    for one, share in _weighted(shape, layer):
        for each in one.attentions:
            several = pieces if pieces and each.causal else ((whole, 1.0),)
            for back in (0, 1):  # one launch takes all documents
                found[back] = found[back] - share / gain * (len(several) - 1) * tables.launch_s
            for length, part in several:
                # Number of sequences with the length of this document that contain its share of the tokens.
                batch = cut.batch * part * whole / length
                flops = each.flops(batch, length / cut.c, cut.t, cut.c)
                keys = each.keys.at(batch, length)
                for back, times in enumerate((1.0, _ATTENTION_BACKWARD)):
                    took = flash_s(tables, times * flops, keys, bool(back), cut.core, masked=each.causal)
                    found[back] = found[back] + share / gain * took
    return found[0], found[1]


def moved_bytes(shape: TracedShape, layer: TracedLayer | None, cut: RankShare) -> tuple[Array, Array]:
    """Return the bytes that memory-bound kernels of a layer move (forward, backward).

    Args:
        layer: a layer, or None for an average layer.
    """
    found = [np.zeros_like(cut.batch), np.zeros_like(cut.batch)]
    for one, share in _weighted(shape, layer):
        pairs = ((one.moved_forward, one.fused_forward), (one.moved_backward, one.fused_backward))
        for place, (plain, fused) in enumerate(pairs):
            moved = np.where(cut.fused, _at(fused, cut), _at(plain, cut))
            found[place] = found[place] + share * moved
    return found[0], found[1]


def num_calls(shape: TracedShape, fused: NDArray[np.bool_]) -> Array:
    """Return the number of kernels in the forward of an average layer, with one entry per plan.

    Args:
        fused: True for plans that compile chains of kernels.
    """
    together: float = shape.mean(lambda layer: layer.fused_kernels)
    alone: float = shape.mean(lambda layer: layer.kernels_forward)
    return np.where(fused, together, alone)


def tensor_traffic(shape: TracedShape, cut: RankShare) -> Array:
    """Return the tensor-parallel all-reduce volume of an average layer's forward.

    It is relative to the two all-reduces of a standard decoder layer.
    """
    values = shape.mean(lambda layer: layer.reduced.at(cut.batch, cut.seq))
    return values / (2.0 * shape.hidden * cut.batch * cut.seq)


def end_s(shape: TracedShape, layer: TracedLayer, cut: RankShare, tables: Tables) -> tuple[Array, Array]:
    """Return the time (s) of forward and backward in `layer`: the modules before or after the layers.

    The first value is for matmuls and attention, the second for other kernels.
    """
    none = np.zeros_like(cut.batch)
    products = sum(products_s(shape, layer, cut, tables), none)
    scores = sum(attention_s(shape, layer, cut, tables, 1.0), none)
    moved = sum((bytes_s(tables, each) for each in moved_bytes(shape, layer, cut)), none)
    return products + scores, moved


def saved_bytes(shape: TracedShape, cut: RankShare, policy: str) -> Array:
    """Return the bytes that an average layer saves for one microbatch under a recompute policy."""
    name = {"none": "compiled"}.get(policy, policy)
    alone: Array = shape.mean(lambda layer: _at(dict(layer.saved)[policy], cut))
    together: Array = shape.mean(lambda layer: _at(dict(layer.saved)[name], cut))
    return np.where(cut.fused, together, alone)


def end_saved_bytes(layer: TracedLayer, cut: RankShare) -> Array:
    """Return the bytes that the modules before or after the layers save for one microbatch."""
    saved = dict(layer.saved)
    return _at(saved["none"], cut) if saved else np.zeros_like(cut.batch)


def layer_params(shape: TracedShape, t: Array) -> Array:
    """Return the number of parameters of an average layer on one of `t` tensor-parallel ranks."""
    return shape.mean(lambda layer: layer.params_cut) / t + shape.mean(lambda layer: layer.params_whole)


def end_params(layer: TracedLayer, t: Array) -> Array:
    """Return the number of parameters in `layer` on one of `t` tensor-parallel ranks, without embedding and head.

    layer: the modules before or after the repeated layers.
    """
    return layer.params_cut / t + layer.params_whole


def model_flops(shape: TracedShape, seq_len: int, *, causal: bool) -> float:
    """Return the FLOPs of forward and backward for one token, or for one sample if the model has no sequences.

    Args:
        causal: if False, count the full T x T matrix of attention.
    """
    return float(shape.traced.flops(1.0, float(seq_len), causal=causal)) / seq_len


def _weighted(shape: TracedShape, layer: TracedLayer | None) -> Iterable[tuple[TracedLayer, float]]:
    if layer is not None:
        return [(layer, 1.0)]
    return [(each, each.count / shape.traced.num_layers) for each in shape.traced.layers]


def _at(parts: DividedBytes, cut: RankShare) -> Array:
    return parts.at(cut.batch, cut.seq, cut.t, cut.between)
