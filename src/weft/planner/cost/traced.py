"""Work and memory of a traced model, for every distinct way to cut its layers: what formulas say of known families.

A layer is the mean over the model's layers, as everywhere in the estimate. Letters as in `layer_cost`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.config.traced_model import DividedBytes, TracedLayer
from weft.planner.cost.machine import Tables, bytes_s, flash_s, gemm_s
from weft.planner.space.shape import TracedShape

Array = NDArray[np.float64]

#: Times the FLOPs of fused attention's forward that its backward does: scores are made again.
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class PassShare:
    """How a rank's share of a pass is cut. seq: tokens of each sequence on the rank; fused: chains are compiled."""

    batch: Array
    seq: Array
    t: Array
    c: Array
    between: Array
    fused: NDArray[np.bool_]
    rate: Array
    half: Array


def products_s(
    shape: TracedShape, layer: TracedLayer | None, cut: PassShare, tables: Tables
) -> tuple[Array, Array, Array]:
    """Seconds of matrix products: forward, towards the input, towards the weights; of a mean layer, or of one."""
    forward, dgrad, wgrad = (np.zeros_like(cut.batch) for _ in range(3))
    for one, share in _weighted(shape, layer):
        for each in one.matmuls:
            m, n, k, count = each.sizes(cut.batch, cut.seq, cut.t)
            rows, columns, inner = np.broadcast_arrays([m, m, n], [n, k, k], [k, n, m])
            times = gemm_s(tables, rows, columns, inner, count, cut.rate)
            forward = forward + share * times[0]
            dgrad = dgrad + share * times[1] * each.input_grad
            wgrad = wgrad + share * times[2] * each.weight_grad
    return forward, dgrad, wgrad


def attention_s(
    shape: TracedShape, layer: TracedLayer | None, cut: PassShare, tables: Tables, gain: float,
    pieces: Sequence[tuple[int, float]] = (),
) -> tuple[Array, Array]:  # fmt: skip
    """Seconds of fused attention: forward, backward.

    gain: speed over the table's. pieces: (tokens, share of all tokens) of the documents in a sequence, each of which
    causal attention takes as a sequence of its own; none: whole sequences.
    """
    whole = cut.seq * cut.c
    found = [np.zeros_like(cut.batch), np.zeros_like(cut.batch)]
    for one, share in _weighted(shape, layer):
        for each in one.attentions:
            several = pieces if pieces and each.causal else ((whole, 1.0),)
            for back in (0, 1):  # one launch takes all documents
                found[back] = found[back] - share / gain * (len(several) - 1) * tables.launch_s
            for length, part in several:
                # As many sequences of a document's length as hold its share of the tokens.
                batch = cut.batch * part * whole / length
                flops = each.flops(batch, length / cut.c, cut.t, cut.c)
                keys = each.keys.at(batch, length)
                for back, times in enumerate((1.0, _ATTENTION_BACKWARD)):
                    took = flash_s(tables, times * flops, keys, each.head_dim, bool(back), cut.half, masked=each.causal)
                    found[back] = found[back] + share / gain * took
    return found[0], found[1]


def moved_bytes(shape: TracedShape, layer: TracedLayer | None, cut: PassShare) -> tuple[Array, Array]:
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
    together: float = shape.mean(lambda layer: layer.fused_kernels)
    alone: float = shape.mean(lambda layer: layer.kernels_forward)
    return np.where(fused, together, alone)


def tensor_traffic(shape: TracedShape, cut: PassShare) -> Array:
    """What tensor parallelism sums in a mean layer's forward, over the two sums of a token's width of a decoder."""
    values = shape.mean(lambda layer: layer.reduced.at(cut.batch, cut.seq))
    return values / (2.0 * shape.hidden * cut.batch * cut.seq)


def end_s(shape: TracedShape, layer: TracedLayer, cut: PassShare, tables: Tables) -> tuple[Array, Array]:
    """Seconds of forward and backward of what runs before or after the layers: products, and passes over memory."""
    none = np.zeros_like(cut.batch)
    products = sum(products_s(shape, layer, cut, tables), none)
    scores = sum(attention_s(shape, layer, cut, tables, 1.0), none)
    moved = sum((bytes_s(tables, each) for each in moved_bytes(shape, layer, cut)), none)
    return products + scores, moved


def saved_bytes(shape: TracedShape, cut: PassShare, policy: str) -> Array:
    """Bytes that a mean layer keeps of one pass under a policy of recompute."""
    name = {"none": "compiled"}.get(policy, policy)
    alone: Array = shape.mean(lambda layer: _at(dict(layer.saved)[policy], cut))
    together: Array = shape.mean(lambda layer: _at(dict(layer.saved)[name], cut))
    return np.where(cut.fused, together, alone)


def end_saved_bytes(layer: TracedLayer, cut: PassShare) -> Array:
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
    """Return the FLOPs of forward and backward for one token; for one sample where nothing is a sequence.

    Args:
        shape: of a traced model.
        seq_len: tokens of a sequence.
        causal: False counts attention's whole square.
    """
    return float(shape.traced.flops(1.0, float(seq_len), causal=causal)) / seq_len


def _weighted(shape: TracedShape, layer: TracedLayer | None) -> Iterable[tuple[TracedLayer, float]]:
    """One layer, or all of them with their shares of a mean one."""
    if layer is not None:
        return [(layer, 1.0)]
    return [(each, each.count / shape.traced.num_layers) for each in shape.traced.layers]


def _at(parts: DividedBytes, cut: PassShare) -> Array:
    return parts.at(cut.batch, cut.seq, cut.t, cut.between)
