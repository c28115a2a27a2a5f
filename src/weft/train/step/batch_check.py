"""Check in the first step for results that depend on how the plan divides a batch: interacting samples, noise, state.

A few samples run together and in two halves, each time with different seeds and without gradients. Outputs and losses
must agree. If they do not, the same samples run again to distinguish noise from interacting samples, and to find the
first module with a difference. Under a pipeline each stage compares its outputs, and the last stage the loss. Batch
norms are ignored: `norm_group` makes their results independent of the plan, and without it there is a separate warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.devices import access
from weft.errors import WeftWarning
from weft.parallel.context.context import local_batch, sequence_in_use
from weft.parallel.dropout.by_position import drops_of
from weft.parallel.expert import ExpertBalance
from weft.parallel.pipeline.runtime import pipeline_of
from weft.parallel.random.streams import SampleNumbers
from weft.train.batches.microbatches import samples_in
from weft.train.step.pure_forward import ForwardState, traceless
from weft.train.step.small_forwards import Probed, Ran, Small, run_each, small_batches

#: Maximum bytes of buffers and tensors in attributes of a checked model, because the check copies them.
MAX_COPIED_BYTES = 2**30
#: Relative mean differences that count as rounding, by the plan's precision. Other precisions use _COARSE.
_ROUNDING = {"fp64": 1e-9, "fp32": 1e-4}
_COARSE = 5e-2
#: Kinds of causes, in the order in which they are reported.
_KINDS = ("hidden state", "noise", "interaction", "tensors", "attributes")


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason why results differ. is_located: False if this rank did not find the module that causes it."""

    kind: str
    sentence: str
    is_located: bool = True


def check_first_batch(
    model: nn.Module,
    forward: Callable[[nn.Module, Any], Any],
    loss_fn: Any,
    mesh: Mesh,
    experts: ExpertBalance,
    batch: Any,
    samples: SampleNumbers,
    stage_forward: Callable[[nn.Module, Any], Any] | None = None,
) -> bool:
    """Warn on one rank if results depend on how the plan divides a batch. All ranks must call it.

    Returns True if the model has run a few samples of the batch on all ranks; False if the check cannot run.

    Args:
        model: the model, in training mode.
        forward: forward(model, batch) -> output.
        loss_fn: (output, batch) -> (loss sum, count); None to skip the loss.
        mesh: the ranks.
        experts: the balance of the model's experts.
        batch: the first microbatch.
        samples: indices of its samples.
        stage_forward: `forward` of all pipeline stages except the last one.

    Raises:
        ModelError: for an embedding whose gradients are divided by frequencies in the microbatch, and for a model that
            the pipeline does not support.
    """
    drops, forwards, pipeline = drops_of(model), mesh.plan.microbatches_per_step, pipeline_of(model)

    @contextmanager
    def inside(some: SampleNumbers) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(experts.leaving_out())
            stack.enter_context(sequence_in_use(model))
            if drops is not None:
                stack.enter_context(drops.microbatch(0, some))
            if mesh.plan.compile:  # graphs of so few samples would be of no use later
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    parts = mesh.data.size * forwards
    probed = Probed(
        model, forward, loss_fn, inside, limit_of(mesh), parts, forwards, mesh, pipeline, stage_forward or forward
    )
    batch = local_batch(model, batch)
    with nullcontext() if pipeline is None else pipeline.probing(batch, probed.stage_forward or forward):
        return _check_batch(probed, batch, samples, mesh)


def limit_of(mesh: Mesh) -> float:
    """Return the relative difference that counts as rounding under the mesh's plan."""
    precise = not access.is_accelerator(mesh.device) or mesh.plan.precision == "fp64"
    return _ROUNDING.get(mesh.plan.precision, _COARSE) if precise else _COARSE


def _check_batch(probed: Probed, batch: Any, samples: SampleNumbers, mesh: Mesh) -> bool:
    small = small_batches(batch, samples)
    is_small = ForwardState.copied_bytes(probed.model) <= MAX_COPIED_BYTES
    if not agree(mesh, small is not None and is_small, "min") or small is None:
        return False
    with traceless(probed.model) as state:
        runs = _first_runs(probed, small, state)
        if runs is None:
            return False
        findings = _suspected(probed, runs)
        # Forward may communicate, so either all ranks look for causes, or none.
        looks = agree(mesh, bool(findings), "max"), agree(mesh, bool({*findings} - {"state"}), "max")
        if not looks[0]:
            return True
        causes = {cause.kind: cause for cause in find_causes(probed, small, state, runs, compares=looks[1])}
    # Of the ranks that found a cause, one that located its module warns.
    order = [2.0 * mesh.world_size] * len(_KINDS)
    for place, kind in enumerate(_KINDS):
        if kind in causes:
            order[place] = mesh.rank + (0 if causes[kind].is_located else mesh.world_size)
    own = torch.tensor(order, dtype=torch.float64, device=mesh.device)
    first = all_reduce(own.clone(), mesh.world, "min") if mesh.world_size > 1 else own
    for kind, mine, least in zip(_KINDS, own.tolist(), first.tolist(), strict=True):
        if kind in causes and mine == least:
            warnings.warn(causes[kind].sentence, WeftWarning, stacklevel=6)
    return True


def causes_of(probed: Probed, batch: Any) -> list[str]:
    """Return a sentence for each reason why results depend on how the batch is divided. Runs in one process.

    Returns [] if there is no such reason, or if the check cannot run.

    Args:
        probed: the model and its loss.
        batch: some samples, as tensors with one row per sample.
    """
    small = small_batches(batch, SampleNumbers(range(samples_in(batch))))
    if small is None:
        return []
    with traceless(probed.model) as state:
        runs = _first_runs(probed, small, state)
        if runs is None:
            return []
        compares = bool({*_suspected(probed, runs)} - {"state"})
        return [cause.sentence for cause in find_causes(probed, small, state, runs, compares=compares)]


def _first_runs(probed: Probed, small: list[Small], state: ForwardState) -> list[Ran] | None:
    """Run the samples together and in halves. If that fails, set `probed.has_gradients` and run them with gradients.

    Returns None if that fails too. All ranks must call it.
    """
    runs = run_each(probed, small, state, (1, 2, 3))
    if runs is None:
        probed.has_gradients = True
        runs = run_each(probed, small, state, (1, 2, 3))
    return runs


def agree(mesh: Mesh, holds: bool, op: str) -> bool:
    """Return True if a condition holds on all ranks or on any. All ranks must call it.

    Args:
        mesh: the ranks.
        holds: True if it holds on this rank.
        op: "min" for all ranks, "max" for any.
    """
    if mesh.world_size == 1:
        return holds
    return bool(all_reduce(torch.tensor(float(holds), device=mesh.device), mesh.world, op))


def _suspected(probed: Probed, runs: list[Ran]) -> list[str]:
    """Return the parts of the result (outputs, loss, number, state) that depend on how the batch is divided."""
    every, *halves = runs
    found = ["outputs"] * _outputs_differ(every, halves, probed.limit)
    if _loss_differs(every, halves, probed.limit):
        found.append("loss")
    is_sum = every.number is None or abs(every.number - sum(one.number or 0.0 for one in halves)) <= 1e-6
    if not is_sum and (found or every.number == 1):  # otherwise a constant: the size of the microbatches
        found.append("number")
    return found + ["state"] * bool(every.tensors or every.attributes)


def _outputs_differ(every: Ran, halves: Sequence[Ran], limit: float) -> bool:
    """Return True if some rows differ from the same rows in their half. Only outputs with one row per sample count."""
    for half, ran in enumerate(halves):
        for output, alone in zip(every.outputs, ran.outputs, strict=False):
            if (among := _rows_of(output, alone, ran.samples, half)) is not None and _differ(among, alone, limit):
                return True
    return False


def _rows_of(every: Tensor, alone: Tensor, rows: int, half: int) -> Tensor | None:
    """Return the rows of a tensor that belong to one half of the samples; None if its rows are not samples.

    Args:
        every: rows for all samples.
        alone: rows for the half.
        rows: samples of a half.
        half: 0 or 1.
    """
    if not every.ndim or not alone.ndim or every.shape[1:] != alone.shape[1:] or not len(alone) or len(alone) % rows:
        return None
    if len(every) != 2 * len(alone):
        return None
    return every[half * len(alone) : (half + 1) * len(alone)]


def _loss_differs(every: Ran, halves: Sequence[Ran], limit: float) -> bool:
    losses = [one.loss for one in halves]
    if every.loss is None or None in losses:
        return False
    scale = max(abs(every.loss), *(abs(one) for one in losses if one is not None), 1e-30)
    return not abs(every.loss - sum(one for one in losses if one is not None)) <= 10 * limit * scale


def _differ(one: Tensor, other: Tensor, limit: float) -> bool:
    """Return True if the mean difference of two tensors exceeds rounding. The mean tolerates ties of a router."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool((one != other).double().mean() > 0.5) and limit < _COARSE
    left, right = (torch.nan_to_num(value.double()) for value in (one, other))
    return bool((left - right).abs().mean() > limit * left.abs().mean().clamp(min=1e-30))


def _results_differ(one: Ran, other: Ran, limit: float) -> bool:
    """Return True if two runs of the same samples have different outputs or losses."""
    if any(_differ(left, right, limit) for left, right in zip(one.outputs, other.outputs, strict=False)):
        return True
    both = one.loss, other.loss
    return None not in both and both[0] != both[1] and not (both[0] != both[0] and both[1] != both[1])


def _located(one: Ran, other: Ran, limit: float) -> str:
    """Return the module whose results differ in two runs of the same samples, "loss_fn", or "" if none is found."""
    if any(_differ(left, right, limit) for left, right in zip(one.outputs, other.outputs, strict=False)):
        return _culprit(one, other, limit)
    return "loss_fn"


def find_causes(
    probed: Probed, small: list[Small], state: ForwardState, runs: list[Ran], *, compares: bool
) -> list[Cause]:
    """Run the same samples again, and return the causes of differences. All ranks must call it.

    Args:
        probed: the model and its loss.
        small: the samples together, and both halves.
        state: the model's state.
        runs: results of the small batches.
        compares: True if results depend on the division on some rank; False if forward only changes state.
    """
    found = _causes_of_results(probed, small, state, runs) if compares else []
    halves = run_each(probed, small[1:], state, (1, 1))
    once, twice = (run_each(probed, small[1:2], state, (1,), advanced=advanced) for advanced in (False, True))
    if halves is not None:
        found += _moved_tensors(probed, halves, state)
        if once and twice and _results_differ(once[0], twice[0], probed.limit):
            found += _moved_attributes(probed, [*once, *twice], halves)
    return found


def _causes_of_results(probed: Probed, small: list[Small], state: ForwardState, runs: list[Ran]) -> list[Cause]:
    """Return the causes of different results. All ranks must call it."""
    first = [small[1]] * 3
    again = run_each(probed, first, state, (1, 2, 1), records=True)
    still_first = run_each(probed, first[:2], state, (1, 2), still=True)
    alike = run_each(probed, small, state, (1, 1, 1), records=True)
    still = run_each(probed, small, state, (1, 2, 3), records=True, still=True)
    if again is None or not _results_differ(again[0], again[1], probed.limit):
        return _interactions(probed, runs, alike or runs)
    if _results_differ(again[0], again[2], probed.limit):
        return [_hidden(probed, again)]
    found = [_noise(probed, again)]
    if still and still_first and not _results_differ(still_first[0], still_first[1], probed.limit):
        found += _interactions(probed, still, still)  # noise of unknown functions would hide interacting samples
    return found


def _hidden(probed: Probed, runs: list[Ran]) -> Cause:
    """Return the cause if results change from run to run with the same state and seeds."""
    where = _located(runs[0], runs[2], probed.limit)
    return Cause(
        "hidden state",
        f"state: {where or 'the model'} returns other values each time for the same samples and seeds, so it keeps "
        f"state outside its attributes (a global, a closure, an object of its own), and results depend on how the "
        f"plan divides a batch into {probed.parts} parts. Keep such state in buffers and change it between steps, or "
        f"use {_one_part(probed)}.",
        bool(where),
    )


def _noise(probed: Probed, runs: list[Ran]) -> Cause:
    """Return the cause if results change with the seed."""
    where = _located(runs[0], runs[1], probed.limit)
    by = f" ({', '.join(dict.fromkeys(runs[0].drawn))})" if runs[0].drawn else ""
    divided = f"how the plan divides a batch into {probed.parts} parts" if probed.parts > 1 else "the plan"
    return Cause(
        "noise",
        f"random numbers: {where or 'the model'} draws them from a generator{by}, so they depend on {divided}. Use "
        "weft.randn_like, weft.rand_like, weft.randint_like, weft.bernoulli or nn.Dropout, whose numbers follow the "
        "samples.",
        bool(where),
    )


def _interactions(probed: Probed, runs: list[Ran], recorded: list[Ran]) -> list[Cause]:
    """Return the cause if outputs or a loss depend on which samples are in the batch.

    Args:
        probed: the model and its plan.
        runs: results of the samples together, and of both halves.
        recorded: the same runs, with inputs and outputs of modules.
    """
    if probed.parts == 1:
        return []
    suspected = _suspected(probed, runs)
    if "outputs" in suspected:
        every, *halves = recorded
        culprits = [_culprit(every, ran, probed.limit, half) for half, ran in enumerate(halves)]
        where = next(filter(None, culprits), "")
        sentence = (
            f"batch: what {where or 'the model'} computes for a sample depends on the other samples of its "
            f"microbatch, and the plan divides a batch into {probed.parts} parts, so results differ from one device. "
            "Compute each sample separately, use nn.BatchNorm2d with norm_group or GroupNorm for statistics, or a "
            "plan with one part."
        )
        return [Cause("interaction", sentence, bool(where))]
    if "number" in suspected:
        sentence = (
            f"loss_fn: the number of losses that it returns is {runs[0].number:g} for {runs[0].samples} samples and "
            f"{runs[1].number:g} for {runs[1].samples}, so it counts no samples or tokens (a mean and 1?), and "
            "results depend on the plan. Return the sum of the losses and their number."
        )
        return [Cause("interaction", sentence)]
    if "loss" in suspected:
        sentence = (
            "loss_fn: the loss of some samples is not the sum of the losses of their halves (a mean, a term over the "
            f"batch, or one that is added once a microbatch?), and the plan divides a batch into {probed.parts} parts. "
            "Return a sum over samples and their number; use weft.group_loss for a loss that compares samples."
        )
        return [Cause("interaction", sentence)]
    return []


def _moved_tensors(probed: Probed, runs: list[Ran], state: ForwardState) -> list[Cause]:
    """Return the cause if forward changes tensors of the model and the plan affects the values. runs: both halves."""
    moved = [runs[0].tensors, runs[1].tensors]
    by_data = [
        name for name, value in moved[0].items() if not torch.equal(value, moved[1].get(name, state.values_of(name)))
    ]
    names = by_data or list(moved[0])
    what = "weights" if names and all(map(state.is_param, names)) else "buffers"
    return _moved(probed, "tensors", what, names, bool(by_data))


def _moved_attributes(probed: Probed, advanced: list[Ran], runs: list[Ran]) -> list[Cause]:
    """Return the cause if attributes change in every forward and affect the result.

    Args:
        probed: the model and its plan.
        advanced: two runs of the same samples, the second with the attributes that the first one left.
        runs: both halves of the samples.
    """
    names = [name for name in advanced[1].attributes if name in advanced[0].attributes]
    pairs = {name: [run.attributes.get(name) for run in runs] for name in names}
    by_data = [
        name
        for name, (one, other) in pairs.items()
        if isinstance(one, Tensor) and not (isinstance(other, Tensor) and torch.equal(one, other))
    ]
    return _moved(probed, "attributes", "attributes", by_data or names, bool(by_data))


def _moved(probed: Probed, kind: str, what: str, names: list[str], by_data: bool) -> list[Cause]:
    """Return the cause if forward changes state to values that depend on the plan."""
    if not names or (probed.parts if by_data else probed.forwards) == 1:
        return []
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if by_data:
        sentence = (
            f"{what}: forward changes {shown} by the samples of one microbatch on one rank, and the plan divides a "
            f"batch into {probed.parts} parts, so the values depend on the plan. Change them between steps, from "
            "numbers of all ranks, or use a plan with one part."
        )
    else:
        sentence = (
            f"{what}: each forward changes {shown}, and a step of this plan has {probed.forwards} forwards, so the "
            f"values depend on the plan. Use {_one_part(probed)}, or change them between steps."
        )
    return [Cause(kind, sentence)]


def _one_part(probed: Probed) -> str:
    """Return the plan setting under which a step has a single forward."""
    return "accumulation=1" if probed.pipeline is None else "microbatches=1"


def _culprit(every: Ran, alone: Ran, limit: float, half: int = 0) -> str:
    """Return the innermost module that gets the same inputs but returns different outputs in two runs, or "".

    Args:
        every: run of all samples, or of the same samples as `alone`.
        alone: run of one half of the samples.
        limit: relative difference that counts as rounding.
        half: 0 or 1.
    """

    def differ(left: list[Tensor], right: list[Tensor]) -> bool:
        for one, other in zip(left, right, strict=False):
            same = one if one.shape == other.shape else _rows_of(one, other, alone.samples, half)
            if same is not None and _differ(same, other, limit):
                return True
        return False

    for (path, taken, given), (other_path, other_taken, other_given) in zip(every.calls, alone.calls, strict=False):
        if path == other_path and differ(given, other_given) and not differ(taken, other_taken):
            return path
    return ""
