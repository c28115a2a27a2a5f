"""Seconds of single kernels on one device: matrix products, attention, passes over memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.machine.tables import Tables

Array = NDArray[np.float64]

#: Tiles of the output that matmul kernels come in (rows, columns); narrow ones reuse less of what they load.
_TILES = ((128, 128), (128, 256), (256, 128), (64, 256), (64, 128), (64, 64))
_FULL_TILE = 128 * 256
#: Share of the rate of a matmul whose inner widths are no multiples of 8 values (16 bytes): the tensor units are not
#: reached then, or loaded in small pieces.
_MISALIGNED = 0.2
#: A tensor's inner width in values that is no multiple of this misses whole memory transactions (128 bytes of bf16).
_LINE, _UNLINED = 64, 0.92
#: How the rate of fused attention falls with heads narrower than 128, as a power.
_NARROW = 0.15
#: Ramp of fused attention over whole rectangles, over that under a causal mask (Shah et al. 2024, arXiv 2407.08608,
#: figures 5 and 6: with 512 tokens 0.84 and 0.66 of the rate with 16,384, forward and backward; masked 0.57).
_UNMASKED = 0.3


def gemm_s(tables: Tables, m: Any, n: Any, k: Any, batch: Any, peak: Any, k0: Any = None) -> Array:
    """Return the seconds of `batch` products of m x k by k x n matrices in 2-byte elements.

    The slower of arithmetic and memory, after the quantisation of the output into tiles and of the tiles into waves
    over
    the device's multiprocessors, and the ramp over the inner width k.

    Args:
        tables: constants of the device.
        m, n, k, batch: sizes; numbers or arrays.
        peak: dense FLOP/s of the precision.
        k0: inner width at which they reach half of the ramp; None: that of single products.
    """
    m, n, k, batch = (np.asarray(each, dtype=np.float64) for each in (m, n, k, batch))
    best = np.zeros(np.broadcast(m, n, k, batch).shape)
    for rows, columns in _TILES:
        tall, wide = np.ceil(m / rows), np.ceil(n / columns)
        tiles = tall * wide * batch
        filled = tiles / (np.ceil(tiles / tables.sms) * tables.sms)
        covered = (m / (tall * rows)) * (n / (wide * columns))
        np.maximum(best, filled * covered * (rows * columns / _FULL_TILE) ** tables.tile_power, out=best)
    # Outputs of less than one wave are split along k, which brings back about half of the device.
    small = m * n * batch < _FULL_TILE / 2 * tables.sms
    best = np.where(small, np.maximum(best, 0.5), best)
    rate = peak * tables.gemm_ceiling * tables.gemm_sustained * best * k / (k + (tables.gemm_k0 if k0 is None else k0))
    flops = 2.0 * m * n * k * batch
    moved = 2.0 * batch * (m * k + k * n + m * n)
    return np.maximum(flops / (rate * aligned(n, k)), bytes_s(tables, moved)) + tables.launch_s


def aligned(n: Any, k: Any) -> Array:
    """Share of a matmul's rate that its inner widths leave."""
    return _line_share(np.asarray(n)) * _line_share(np.asarray(k))


def _line_share(width: NDArray[Any]) -> Array:
    whole, eighth = width % _LINE == 0, width % 8 == 0
    return np.where(whole, 1.0, np.where(eighth, _UNLINED, _MISALIGNED))


def core_s(tables: Tables, flops: Any, moved: Any, head_dim: int, peak: Any) -> Array:
    """Return the seconds of the batched products of unfused attention.

    Args:
        tables: constants of the device.
        flops: in all.
        moved: bytes of scores.
        head_dim: width of a head.
        peak: dense FLOP/s of the precision.
    """
    rate = peak * tables.gemm_ceiling * tables.core_eff * (1.0 if head_dim % 8 == 0 else _MISALIGNED)
    return np.maximum(flops / rate, bytes_s(tables, moved)) + 2 * tables.launch_s


def bytes_s(tables: Tables, moved: Any) -> Array:
    """Return the seconds to stream `moved` bytes through the device's memory."""
    return np.asarray(moved, dtype=np.float64) / (tables.memory_rate * tables.memory_eff)


def flash_s(
    tables: Tables, flops: Any, seq_len: Any, head_dim: int, backward: bool, peak: Any, *, masked: bool = True
) -> Array:
    """Return the seconds of fused attention. Heads narrower than 128 leave the matrix units short of work.

    Args:
        tables: constants of the device.
        flops: really done, after the causal half or a window.
        seq_len: keys that a query sees at most.
        head_dim: width of a head.
        backward: in place of forward.
        peak: dense FLOP/s of the precision.
        masked: causally, so that tiles are cut.
    """
    share = tables.attn_bwd if backward else tables.attn_fwd
    ramp = np.asarray(seq_len) / (np.asarray(seq_len) + tables.attn_s0 * (1.0 if masked else _UNMASKED))
    narrow = min(1.0, head_dim / 128) ** _NARROW
    return np.asarray(flops) / (peak * tables.gemm_ceiling * share * ramp * narrow) + tables.launch_s
