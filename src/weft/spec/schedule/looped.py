"""Schedules whose stages go around the ranks: stage s lies on rank s % p.

All five are one shape: some forwards to warm up, then forward and backward in turn, then the backwards that are left.
They differ in how long they warm up, and in how long a rank holds back the gradients of weights.

p ranks, m microbatches, v stages on each rank, r this rank.
"""

from __future__ import annotations

from weft.spec.schedule.action import Step
from weft.spec.schedule.writer import Writer


def gpipe(p: int, m: int, v: int, r: int) -> list[Step]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965). In flight: m."""
    return _looped(p, m, 1, r, warmup=m)


def one_f_one_b(p: int, m: int, v: int, r: int) -> list[Step]:
    """A backward as soon as there is one (Narayanan et al. 2019, arXiv 1806.03377). In flight: min(m, p - r)."""
    return _looped(p, m, 1, r, warmup=p - r - 1)


def interleaved(p: int, m: int, v: int, r: int) -> list[Step]:
    """1F1B with several stages on each rank (Narayanan et al. 2021, arXiv 2104.04473); m is a multiple of p.

    In flight, of v chunks to a microbatch: 2(p - r - 1) + (v - 1)p + 1.
    """
    return _looped(p, m, v, r, warmup=2 * (p - r - 1) + (v - 1) * p)


def zb_h1(p: int, m: int, v: int, r: int) -> list[Step]:
    """1F1B in which a rank holds back r weight gradients (ZB-H1, Qi et al. 2023, arXiv 2401.10241). In flight: p."""
    return _looped(p, m, 1, r, warmup=p - r - 1, held=r)


def zb_interleaved(p: int, m: int, v: int, r: int) -> list[Step]:
    """ZB-H1 with several stages on each rank; m is a multiple of p. In flight: p."""
    return _looped(p, m, v, r, warmup=(v - 1) * p + p - r - 1, held=r)


def _looped(p: int, m: int, v: int, r: int, *, warmup: int, held: int | None = None) -> list[Step]:
    """held: weight gradients that are held back, or None for whole backwards."""
    forwards = [chunk * p + r for chunk in _chunks(p, m, v)]
    backwards = [(v - 1 - chunk) * p + r for chunk in _chunks(p, m, v)]
    warmup = min(warmup, len(forwards))
    writer = Writer(m)
    for stage in forwards[:warmup]:
        writer.forward(stage)
    for index, stage in enumerate(backwards):
        if warmup + index < len(forwards):
            writer.forward(forwards[warmup + index])
        if held is None:
            writer.backward(stage)
        else:
            writer.input_gradient(stage)
            writer.weight_gradients(but=held)
    writer.weight_gradients()
    return writer.steps


def _chunks(p: int, m: int, v: int) -> list[int]:
    """The rank's chunks in the order of its forwards: p microbatches through each chunk in turn, then the next p."""
    if v == 1:
        return [0] * m
    return [chunk for _ in range(m // p) for chunk in range(v) for _ in range(p)]
