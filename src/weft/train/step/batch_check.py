"""Check in the first step for results that depend on how the plan divides a batch: interacting samples, noise, buffers.

A few samples run together and in two halves, each time with other seeds and without gradients. Outputs and losses must
agree. If they do not, the same samples run again to distinguish noise from interacting samples, and to find the first
module with a difference. Batch norms are left out: `norm_group` makes them right, and without it they have a warning
already. A pipeline is not checked: no rank has the full model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.data.batches import map_tensors
from weft.errors import ModelError, WeftWarning
from weft.parallel.context.context import sequence_in_use, shard_sequence
from weft.parallel.dropout.by_position import drops_of
from weft.parallel.expert import ExpertBalance
from weft.parallel.local_means import frequency_refusal
from weft.parallel.random.streams import SampleNumbers
from weft.private_torch import tree_leaves
from weft.train.microbatches import samples_in, split_rows
from weft.train.step.pure_forward import seed_all, traceless

#: Samples that run together; half of them run alone.
_SAMPLES = 4
#: Maximum bytes of buffers in a checked model: the check copies them.
_MOST_BUFFERS = 2**30
#: Relative mean differences that count as rounding, by the plan's precision. Half dtypes and TF32 use _COARSE.
_ROUNDING = {"fp64": 1e-9, "fp32": 1e-4}
_COARSE = 5e-2

_DRAWING = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.normal, torch.bernoulli, torch.multinomial, torch.poisson, torch.dropout, torch.feature_dropout,
    torch.alpha_dropout, torch.rrelu, Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_,
    Tensor.random_, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_, Tensor.multinomial, Tensor.bernoulli,
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
}  # fmt: skip
_DROPPING = {
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d,
    F.alpha_dropout, F.feature_alpha_dropout,
}  # fmt: skip


@dataclass(slots=True)
class Probed:
    """Settings of a check.

    Attributes:
        model: in training.
        forward: forward(model, batch) -> output.
        loss_fn: (output, batch) -> (sum, number); None: the loss is left out.
        inside: returns the context for a forward of some samples.
        limit: relative difference that counts as rounding.
        parts: number of parts that the plan divides a batch into.
        forwards: forwards in one step on one rank.
        counters: attributes that every forward changes, by name: module, attribute and value. Each run starts from it.
    """

    model: nn.Module
    forward: Callable[[nn.Module, Any], Any]
    loss_fn: Callable[[Any, Any], Any] | None
    inside: Callable[[SampleNumbers], AbstractContextManager[Any]] = lambda _: nullcontext()
    limit: float = _ROUNDING["fp64"]
    parts: int = 2
    forwards: int = 2
    counters: dict[str, tuple[nn.Module, str, float]] = field(default_factory=dict)


@dataclass(slots=True)
class Ran:
    """One small forward: tensors of the output, the loss, and inputs and outputs of modules, if recorded.

    buffers: those that it changed. counters: names of attributes with numbers that it changed.
    """

    samples: int
    outputs: list[Tensor] = field(default_factory=list)
    loss: float | None = None
    number: float | None = None
    drawn: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    counters: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Small:
    """Some samples of a microbatch, and their numbers in the global batch."""

    batch: Any
    samples: SampleNumbers


def check_first_batch(
    model: nn.Module,
    forward: Callable[[nn.Module, Any], Any],
    loss_fn: Any,
    mesh: Mesh,
    experts: ExpertBalance,
    batch: Any,
    samples: SampleNumbers,
) -> None:
    """Warn once, on one rank, if results depend on how the plan divides a batch. A collective.

    Args:
        model: in training, not under a pipeline.
        forward: forward(model, batch) -> output.
        loss_fn: (output, batch) -> (sum, number); None: the loss is not checked.
        mesh: the ranks.
        experts: the balance of the model's experts.
        batch: the first microbatch.
        samples: its samples.

    Raises:
        ModelError: for an embedding whose gradients are divided by frequencies in the microbatch.
    """
    drops, forwards = drops_of(model), mesh.plan.microbatches_per_step

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
    probed = Probed(model, forward, loss_fn, inside, limit_of(mesh), parts, forwards)
    check_batch(probed, shard_sequence(model, batch), samples, mesh)


def limit_of(mesh: Mesh) -> float:
    """Return the relative difference that counts as rounding under the mesh's plan."""
    precise = mesh.device.type != "cuda" or mesh.plan.precision == "fp64"
    return _ROUNDING.get(mesh.plan.precision, _COARSE) if precise else _COARSE


def check_batch(probed: Probed, batch: Any, samples: SampleNumbers, mesh: Mesh) -> None:
    """Warn once, on one rank, if results depend on how the plan divides the batch. A collective.

    Args:
        probed: the model, its loss and its plan.
        batch: one microbatch.
        samples: its samples.
        mesh: the ranks.

    Raises:
        ModelError: for an embedding whose gradients are divided by frequencies in the microbatch.
    """
    small = _small_batches(batch, samples)
    buffers = sum(buffer.nbytes for buffer in probed.model.buffers())
    if not _agree(mesh, small is not None and buffers <= _MOST_BUFFERS, "min") or small is None:
        return
    with traceless(probed.model) as kept:
        before = _numbers(probed.model)
        runs = _runs(probed, small, kept, (1, 2, 3))
        findings = [] if runs is None else _suspected(probed, runs)
        probed.counters = _counters(before, runs)
        # Forward may communicate, so all ranks look closer, or none.
        looks, works = _agree(mesh, bool(findings), "max"), _agree(mesh, runs is not None, "min")
        if not looks or not works or runs is None:
            return
        causes = find_causes(probed, small, kept, runs)
    if mesh.rank == _first_rank(mesh, bool(causes)):
        for cause in causes:
            warnings.warn(cause, WeftWarning, stacklevel=6)


def causes_of(probed: Probed, batch: Any) -> list[str]:
    """Return sentences about results that depend on how a batch is divided. Runs on one process, without ranks.

    Args:
        probed: the model and its loss.
        batch: some samples, whose tensors have a row for each.
    """
    small = _small_batches(batch, SampleNumbers(range(samples_in(batch))))
    if small is None:
        return []
    with traceless(probed.model) as kept:
        before = _numbers(probed.model)
        runs = _runs(probed, small, kept, (1, 2, 3))
        probed.counters = _counters(before, runs)
        return [] if runs is None else find_causes(probed, small, kept, runs)


def _agree(mesh: Mesh, holds: bool, op: str) -> bool:
    """Return True if it holds on all ranks (min) or on any (max)."""
    if mesh.world_size == 1:
        return holds
    return bool(all_reduce(torch.tensor(float(holds), device=mesh.device), mesh.world, op))


def _first_rank(mesh: Mesh, holds: bool) -> int:
    """Return the first rank on which it holds, or a number above all ranks."""
    mine = torch.tensor(mesh.rank if holds else 2**40, dtype=torch.float64, device=mesh.device)
    return int(all_reduce(mine, mesh.world, "min"))


def _small_batches(batch: Any, samples: SampleNumbers) -> list[Small] | None:
    """Return some samples together, and both halves; None if the rows of the batch are not its samples.

    Of too few samples, variants with shifted contents are added: batch statistics need two samples in a half.
    """
    count = len(samples.numbers)
    if not count or samples.rows or samples_in(batch) != count:
        return None
    numbers: Sequence[int] = samples.numbers[:_SAMPLES]
    try:
        # A microbatch of one sample runs with two only, because they need less memory than its backward.
        every = _SAMPLES if count > 1 else 2
        if count < every:
            batch, numbers = _longer(batch, count), range(numbers[0], numbers[0] + every)
        runs = [range(every), range(every // 2), range(every // 2, every)]
        batches = split_rows(batch, runs)
    except ModelError:
        return None
    return [Small(part, SampleNumbers(numbers[run.start : run.stop])) for part, run in zip(batches, runs, strict=True)]


def _longer(batch: Any, count: int) -> Any:
    """Return the samples, and variants of them after them."""

    def longer(one: Tensor) -> Tensor:
        if not one.ndim or len(one) != count:
            return one
        return torch.cat([one, one.flip(-1)])

    return map_tensors(longer, batch)


def _runs(
    probed: Probed, small: list[Small], kept: dict[str, tuple[Tensor, Tensor]], seeds: Sequence[int], **how: bool
) -> list[Ran] | None:
    """Run each small batch; None if the model cannot run so few samples, or cannot run without gradients."""
    try:
        return [_run(probed, one, kept, seed, **how) for one, seed in zip(small, seeds, strict=True)]
    except ModelError:
        raise
    except Exception:
        return None  # too few samples for the model; the step reports failures of the full batch


def _run(
    probed: Probed,
    small: Small,
    kept: dict[str, tuple[Tensor, Tensor]],
    seed: int,
    *,
    still: bool = False,
    records: bool = False,
) -> Ran:
    """Run one small batch from the saved state. still: random functions return constants."""
    for buffer, values in kept.values():
        buffer.copy_(values)
    for module, name, value in probed.counters.values():
        setattr(module, name, value)
    before = _numbers(probed.model)
    seed_all(seed)
    ran, draws = Ran(len(small.samples.numbers)), _Draws(still)
    handles = _record(probed.model, ran) if records else []
    try:
        with probed.inside(small.samples), draws:
            output = probed.forward(probed.model, small.batch)
            ran.outputs = [one.detach().clone() for one in tree_leaves(output) if isinstance(one, Tensor)]
            if probed.loss_fn is not None:
                returned = probed.loss_fn(output, small.batch)
                if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], Tensor):
                    ran.loss, ran.number = float(returned[0]), float(returned[1])
    finally:
        for handle in handles:
            handle.remove()
    ran.drawn = draws.names
    ran.counters = {
        name for name, now in _numbers(probed.model).items() if name in before and now[2] != before[name][2]
    }
    now = dict(probed.model.named_buffers())
    for name, (buffer, values) in kept.items():
        moved = now.get(name, buffer)
        if moved.shape == values.shape and not torch.equal(moved, values):
            ran.buffers[name] = moved.clone()
    return ran


def _suspected(probed: Probed, runs: list[Ran]) -> list[str]:
    """Return the parts of the result (outputs, loss, number, buffers) that depend on the division."""
    every, *halves = runs
    found = ["outputs"] * _outputs_differ(every, halves, probed.limit)
    if _loss_differs(every, halves, probed.limit):
        found.append("loss")
    is_sum = every.number is None or abs(every.number - sum(one.number or 0.0 for one in halves)) <= 1e-6
    if not is_sum and (found or every.number == 1):  # otherwise a constant: the size of the microbatches
        found.append("number")
    return found + ["buffers"] * bool(every.buffers) + ["counters"] * bool(every.counters)


def _numbers(model: nn.Module) -> dict[str, tuple[nn.Module, str, float]]:
    """Return attributes of modules with numbers: module, attribute and value by name."""
    return {
        f"{path}.{name}".lstrip("."): (module, name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float) and not name.startswith("_weft")
    }


def _counters(
    before: dict[str, tuple[nn.Module, str, float]], runs: list[Ran] | None
) -> dict[str, tuple[nn.Module, str, float]]:
    """Return the numbers that every run changed: others are computed once and kept."""
    changed = set[str]() if runs is None else set[str].intersection(*(ran.counters for ran in runs))
    return {name: found for name, found in before.items() if name in changed}


def _influential(
    probed: Probed, small: Any, kept: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, tuple[nn.Module, str, float]]:
    """Return `counters` if the result differs after one forward has changed them, else none: a count of calls."""
    before = probed.counters
    first = _runs(probed, [small], kept, (1,))
    probed.counters = {name: (module, key, getattr(module, key)) for name, (module, key, _) in before.items()}
    second = _runs(probed, [small], kept, (1,))
    if first is None or second is None:
        return before
    (one,), (other,) = first, second
    is_same = all(
        not _differ(left, right, probed.limit) for left, right in zip(one.outputs, other.outputs, strict=False)
    )
    is_same = is_same and (one.loss is None or other.loss is None or _equal(one.loss, other.loss))
    return {} if is_same else before


def _outputs_differ(every: Ran, halves: Sequence[Ran], limit: float) -> bool:
    """Return True if some rows differ from the same rows in their half, among outputs that have rows for samples."""
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


def _equal(one: float, other: float) -> bool:
    """Return True if two losses are equal, or both None."""
    return one == other or (one != one and other != other)


def _differ(one: Tensor, other: Tensor, limit: float) -> bool:
    """Return True if two tensors differ by more than rounding, in the mean: a router may break a tie differently."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool((one != other).double().mean() > 0.5) and limit < _COARSE
    left, right = (torch.nan_to_num(value.double()) for value in (one, other))
    return bool((left - right).abs().mean() > limit * left.abs().mean().clamp(min=1e-30))


def find_causes(
    probed: Probed, small: list[Small], kept: dict[str, tuple[Tensor, Tensor]], runs: list[Ran]
) -> list[str]:
    """Return a sentence for each cause, from more runs of the same samples. A collective.

    Args:
        probed: the model and its loss.
        small: the samples together, and both halves.
        kept: buffers and their values.
        runs: results of the small batches.
    """
    first = [small[1]] * 2
    if probed.counters:
        probed.counters = _influential(probed, small[1], kept)
    if probed.counters:  # the first runs began with different numbers
        runs = _runs(probed, small, kept, (1, 2, 3)) or runs
    again, same = (_runs(probed, first, kept, (1, 2), records=True, still=still) for still in (False, True))
    alike = _runs(probed, small, kept, (1, 1, 1), records=True)
    still = _runs(probed, small, kept, (1, 2, 3), records=True, still=True)
    moved = _runs(probed, small[1:], kept, (1, 1))
    noisy = "" if again is None else _noise(probed, again)
    found = [noisy] if noisy else []
    if not noisy:
        found += _interactions(probed, runs, alike or runs)
    elif still and same and not _noise(probed, same):  # noise of unknown functions hides interacting samples
        found += _interactions(probed, still, still)
    buffers = "" if moved is None else _moved_buffers(probed, moved, kept)
    return found + ([buffers] if buffers else [])


def _noise(probed: Probed, runs: list[Ran]) -> str:
    """Return a sentence if the same samples have other results with another seed, else ""."""
    one, other = runs
    if any(_differ(left, right, probed.limit) for left, right in zip(one.outputs, other.outputs, strict=False)):
        where = _culprit(one, other, probed.limit) or "the model"
    elif one.loss is not None and other.loss is not None and not _equal(one.loss, other.loss):
        where = "loss_fn"
    else:
        return ""
    by = f" ({', '.join(dict.fromkeys(one.drawn))})" if one.drawn else ""
    return (
        f"random numbers: {where} draws them from a generator{by}, so they depend on how the plan divides a batch into "
        f"{probed.parts} parts. Use weft.randn_like, weft.rand_like, weft.randint_like, weft.bernoulli or nn.Dropout, "
        "whose numbers follow the samples."
    )


def _interactions(probed: Probed, runs: list[Ran], recorded: list[Ran]) -> list[str]:
    """Return a sentence for outputs or a loss that depend on which samples are together.

    Args:
        probed: the model and its plan.
        runs: results of the samples together, and of both halves.
        recorded: the same with inputs and outputs of modules.
    """
    if probed.parts == 1:
        return []
    found, suspected = list[str](), _suspected(probed, runs)
    if "outputs" in suspected:
        every, *halves = recorded
        culprits = [_culprit(every, ran, probed.limit, half) for half, ran in enumerate(halves)]
        where = next(filter(None, culprits), "")
        found.append(
            f"batch: what {where or 'the model'} computes for a sample depends on the other samples of its microbatch, "
            f"and the plan divides a batch into {probed.parts} parts, so results are not those of one device. Compute "
            "each sample by itself, use nn.BatchNorm2d with norm_group or GroupNorm for statistics, or a plan with one "
            "part."
        )
    elif "number" in suspected:
        found.append(
            f"loss_fn: the number of losses that it returns is {runs[0].number:g} for {runs[0].samples} samples and "
            f"{runs[1].number:g} for {runs[1].samples}, so it counts no samples or tokens (a mean and 1?), and "
            "results depend on the plan. Return the sum of the losses and their number."
        )
    elif "loss" in suspected:
        found.append(
            "loss_fn: the loss of some samples is not the sum of the losses of their halves (a mean, a term over the "
            f"batch, or one that is added once a microbatch?), and the plan divides a batch into {probed.parts} parts. "
            "Return a sum over samples and their number; use weft.group_loss for a loss that compares samples."
        )
    return found


def _moved_buffers(probed: Probed, runs: list[Ran], kept: dict[str, tuple[Tensor, Tensor]]) -> str:
    """Return a sentence if forward changes buffers and the result depends on the plan, else "". runs: both halves."""
    moved = [name for name in runs[0].buffers if probed.parts > 1]
    if not moved and not (probed.counters and probed.forwards > 1):
        return ""
    by_data = [
        name for name in moved if not torch.equal(runs[0].buffers[name], runs[1].buffers.get(name, kept[name][1]))
    ]
    names = by_data or [*moved, *probed.counters]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if by_data:
        return (
            f"buffers: forward changes {shown} by the samples of one microbatch on one rank, and the plan divides a "
            f"batch into {probed.parts} parts, so the values depend on the plan. Change them between steps, from "
            "numbers of all ranks, or use a plan with one part."
        )
    if probed.forwards == 1:
        return ""
    what = "buffers" if moved else "attributes"
    return (
        f"{what}: each forward changes {shown}, and a step of this plan has {probed.forwards} forwards, so the values "
        "depend on the plan. Use accumulation=1, or change them between steps."
    )


def _record(model: nn.Module, ran: Ran) -> list[Any]:
    """Record inputs and outputs of every module, in the order in which calls end."""

    def hook_of(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            taken = [one.detach().clone() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            given = [one.detach().clone() for one in tree_leaves(output) if isinstance(one, Tensor)]
            ran.calls.append((path, taken, given))

        return hook

    return [
        module.register_forward_hook(hook_of(path), with_kwargs=True) for path, module in model.named_modules() if path
    ]


def _culprit(every: Ran, alone: Ran, limit: float, half: int = 0) -> str:
    """Return the innermost module with the same inputs for its samples and other outputs, or "".

    Args:
        every: with all samples, or with the same as `alone`.
        alone: with one half of the samples.
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


class _Draws(TorchFunctionMode):
    """Records functions that draw random numbers, and refuses gradients by frequency. still: draws are constants."""

    def __init__(self, still: bool):
        super().__init__()
        self.names: list[str] = []
        self._still = still

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, F.embedding_bag):
            place = 5 if func is F.embedding else 6
            if kwargs.get("scale_grad_by_freq", args[place] if len(args) > place else False):
                raise ModelError(frequency_refusal(f"F.{func.__name__}"))
        if func not in _DRAWING or not self._drops(func, args, kwargs):
            return func(*args, **kwargs)
        self.names.append(f"torch.{func.__name__}" if not func.__name__.endswith("_") else f"Tensor.{func.__name__}")
        if not self._still:
            return func(*args, **kwargs)
        return _constant(func, args, kwargs)

    @staticmethod
    def _drops(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return True if a call of a dropout function drops something. Other functions always draw."""
        if func not in _DROPPING:
            return True
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else func is not F.dropout))
        return bool(training) and float(kwargs.get("p", args[1] if len(args) > 1 else 0.5)) > 0


def _constant(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of a random function with a constant instead of random values."""
    if func in _DROPPING:
        return args[0] if args else kwargs["input"]
    drawn = func(*args, **kwargs)
    if func is torch.randperm:
        return torch.arange(len(drawn), dtype=drawn.dtype, device=drawn.device)
    if func in (torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_):
        return drawn.fill_(1.0)
    return drawn.fill_(0.5) if drawn.is_floating_point() else drawn.zero_()
