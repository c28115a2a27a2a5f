"""Schedules whose stages go down the ranks and up again: stages r and 2p - 1 - r lie on rank r.

The first and the last stage meet on rank 0, so a tied embedding is one parameter there.

p ranks, m microbatches, two stages on each rank, r this rank; `down` and `up` are its stages.
"""

from __future__ import annotations

from weft.spec.schedule.action import Step
from weft.spec.schedule.writer import Writer


def zb_v(p: int, m: int, v: int, r: int) -> list[Step]:
    """ZB-V (Qi et al. 2023, arXiv 2401.10241, section 6). In flight: p on each rank.

    The pattern needs 2p - 1 microbatches; with fewer it is written for as many, and those that are not there left out.
    """
    down, up = r, 2 * p - 1 - r
    total = max(m, 2 * p - 1)
    writer = Writer(m)
    for _ in range(2 * (p - r) - 1):
        writer.forward(down)
    for _ in range(r):
        writer.forward(up)
        writer.forward(down)
    for _ in range(p - r):
        writer.forward(up)
        _split_backward(writer, up)
    while writer.num_forwards(up) < total:
        if writer.num_forwards(down) < total:
            writer.forward(down)
        _split_backward(writer, down)
        writer.forward(up)
        _split_backward(writer, up)
    # The rest of the backwards is a chain over the ranks: weight gradients wait until the chain has passed.
    for _ in range(r):
        writer.input_gradient(down)
        writer.input_gradient(up)
    for _ in range(p - r):
        writer.input_gradient(down)
        writer.weight_gradient(down)
    writer.weight_gradients(up)
    writer.weight_gradients()
    return writer.steps


def _split_backward(writer: Writer, stage: int) -> None:
    writer.input_gradient(stage)
    writer.weight_gradient(stage)


def dualpipe_v(p: int, m: int, v: int, r: int) -> list[Step]:
    """DualPipeV: forwards of one stage beside backwards of the other (DeepSeek-AI 2024, arXiv 2412.19437, folded in
    half); m is at least 2p. In flight: p + 1/2.
    """
    down, up = r, 2 * p - 1 - r
    writer = Writer(m)
    for _ in range(2 * (p - r - 1)):
        writer.forward(down)
    for _ in range(r + 1):
        writer.forward(down)
        writer.forward(up)
    for _ in range(p - r - 1):
        _split_backward(writer, up)
        writer.forward(up)
    for index in range(m - 2 * p + r + 1):
        if index == 0 and r == p - 1:
            # Beside each other the two would begin later than the first of them can.
            writer.forward(down)
            writer.backward(up)
        else:
            writer.pair(down, up)
        writer.pair(up, down)
    for _ in range(p - r - 1):
        writer.backward(up)
        writer.pair(up, down)
    _drain(writer, p, r, down, up)
    return writer.steps


def _drain(writer: Writer, p: int, r: int, down: int, up: int) -> None:
    """The last backwards: whole ones first; from the middle on the weight gradients wait, to fill the end."""
    for index in range(2 * (r + 1)):
        stage = (up, down)[index % 2]
        if index <= r:
            writer.backward(stage)
        else:
            writer.input_gradient(stage)
    for _ in range(p - r - 1):
        writer.weight_gradient()
        writer.input_gradient(down)
    writer.weight_gradients()
