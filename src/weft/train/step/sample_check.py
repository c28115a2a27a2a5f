"""Check that a private step computes each sample independently of the other samples in its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.data.batches import map_tensors
from weft.devices import access
from weft.errors import ModelError, WeftError
from weft.parallel.dropout.by_position import drops_of
from weft.parallel.random.streams import SampleNumbers
from weft.train.batches.microbatches import samples_in, split_rows
from weft.train.step.passes import Work

#: Samples that are compared.
MOST = 4
#: Relative difference of squared norms and of losses that rounding explains.
_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2}


class SampleResults(NamedTuple):
    """Losses of samples, their squared gradient norms, (B,) each, and the buffers that the forward changed, by name."""

    losses: Tensor
    norms: Tensor
    buffers: dict[str, Tensor]


def largest_microbatch(work: Work) -> int:
    """Return the index of this rank's microbatch with the most samples."""
    return max(range(len(work.microbatches)), key=lambda index: samples_in(work.microbatches[index]))


def check_samples(
    model: nn.Module, work: Work, index: int, precision: str, compute: Callable[[Work], tuple[Tensor, Tensor]]
) -> None:
    """Compare the first samples of a microbatch together, in both orders, with each of them alone.

    All ranks call it, and run equally many forwards. In training mode, dropout and noise are functions of the samples'
    numbers. A model that draws other random numbers is compared in evaluation mode.

    Args:
        index: the microbatch.
        precision: the plan's precision.
        compute: returns losses and squared gradient norms, (B,) each, of work with one microbatch.

    Raises:
        ModelError: if losses or norms differ, or if forward stores values of samples in a buffer.
    """
    batch, rows = work.microbatches[index], min(MOST, samples_in(work.microbatches[index]))
    drops = drops_of(model)

    def run(some: range, reverses: bool = False) -> SampleResults:
        [few] = split_rows(batch, [some])
        numbers = _numbers_of(work.samples[index], some)
        if reverses:
            few = map_tensors(lambda one: one.flip(0) if one.ndim else one, few)
            numbers = replace(numbers, numbers=numbers.numbers[::-1], rows=[each[::-1] for each in numbers.rows])

        @contextmanager
        def inside(_: int) -> Iterator[None]:
            if drops is None:
                yield
            else:
                with drops.microbatch(work.draws.key, numbers):
                    yield

        with _unchanged(model) as changed:
            losses, norms = compute(replace(work, microbatches=[few], samples=[numbers], inside=inside))
        return SampleResults(losses.detach().double(), norms, changed)

    found = _beside_and_alone(run, rows)
    if found is None:
        with _evaluating(model):
            found = _beside_and_alone(run, rows)
    if found is not None:
        _compare_all(*found, _TOLERANCE[precision])


def _beside_and_alone(run: Callable[..., SampleResults], rows: int) -> tuple[SampleResults, list[SampleResults]] | None:
    """Return the results of all rows, and of each alone, or None if forward drew from torch's generators.

    It runs `MOST + 2` forwards, as on other ranks, which may have more rows.
    """
    before = access.rng_states()
    beside = run(range(rows))
    draws = not all(map(torch.equal, before, access.rng_states()))
    back = run(range(rows), reverses=True)
    alone = [run(range(one, one + 1)) if draws else _alone(run, one) for one in range(rows)]
    for _ in range(MOST - rows):
        run(range(1))
    if draws:
        return None
    losses, norms = torch.cat([beside.losses, back.losses.flip(0)]), torch.cat([beside.norms, back.norms.flip(0)])
    return SampleResults(losses, norms, beside.buffers), alone


def _compare_all(beside: SampleResults, alone: list[SampleResults], tolerance: float) -> None:
    for one, found in enumerate(alone * 2):
        _compare("loss", float(beside.losses[one]), float(found.losses[0]), tolerance)
        _compare("norm", float(beside.norms[one]), float(found.norms[0]), tolerance)
    for name in beside.buffers:
        values = [found.buffers.get(name) for found in alone]
        if len(alone) > 1 and any(one is None or not torch.equal(one, beside.buffers[name]) for one in values):
            raise ModelError(
                f"privacy: forward writes values of samples to the buffer {name}, which checkpoints contain without "
                "noise. Use a layer without running statistics."
            )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _numbers_of(samples: SampleNumbers, some: range) -> SampleNumbers:
    if samples.records:  # rows are records of units, which have no numbers of their own
        return SampleNumbers(some)
    rows = [each[some.start : some.stop] for each in samples.rows]
    return replace(samples, numbers=list(samples.numbers)[some.start : some.stop], rows=rows)


def _alone(run: Callable[[range], SampleResults], sample: int) -> SampleResults:
    try:
        return run(range(sample, sample + 1))
    except WeftError:
        raise
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"privacy: forward fails for one sample without others, so it may mix samples: {error}. Use layers that "
            "treat samples separately."
        ) from error


def _compare(what: str, beside: float, alone: float, tolerance: float) -> None:
    if abs(beside - alone) <= tolerance * max(abs(alone), 1e-12) or not (math.isfinite(beside) or math.isfinite(alone)):
        return
    if what == "norm":
        beside, alone, what = beside**0.5, alone**0.5, "gradient"
        shown = f"norm {beside:.6g} beside another sample, and {alone:.6g} alone"
    else:
        shown = f"the value {beside:.6g} beside another sample, and {alone:.6g} alone"
    raise ModelError(
        f"privacy: the {what} of a sample has {shown}, so the model mixes samples or its rows are not samples. Put "
        "samples first, and use layers that treat them separately."
    )


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Restore the model's buffers at the end. Fill the result with the buffers that changed, by name."""
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    changed: dict[str, Tensor] = {}
    yield changed
    with torch.no_grad():
        for name, after in model.named_buffers():
            held, value = before.get(name, (after, after))
            if torch.equal(after, value):
                continue
            changed[name] = after.detach().clone()
            owner: Any = model.get_submodule(name.rpartition(".")[0])
            held.copy_(value)
            setattr(owner, name.rpartition(".")[2], held)
