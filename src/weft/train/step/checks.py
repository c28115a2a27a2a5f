"""Checks of steps: replicas have equal weights, ranks read different samples, and results do not depend on the plan."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.mesh import Mesh
from weft.comm.pending import LateCopy
from weft.data.batches import tensors_in
from weft.errors import CommError, WeftWarning
from weft.parallel.random.streams import SampleNumbers
from weft.parallel.state.gradients import DataParallel
from weft.parallel.state.stale_references import OriginalParameters
from weft.train.batches.microbatches import Microbatches
from weft.train.step.batch_check import check_first_batch
from weft.train.step.gradient_check import BackwardCode, GradientProbe, check_gradients, needs_check, refuse_hooks
from weft.train.step.passes import Accumulate, ModelState, Pipelined


class StepCheck(Protocol):
    """A check whose value is summed over all ranks in the step's all-reduce."""

    def value(self, batch: Any) -> torch.Tensor | None:
        """Return this rank's value on the device, 1-D float64, or None in a step without the check."""
        ...

    def check(self, sums: Sequence[float]) -> None:
        """Check the value, summed over all ranks. All ranks call it."""
        ...


#: Steps between two checks. A check reads all master weights once.
EVERY = 50
_MASK = 2**32 - 1


class ReplicaWatch:
    """Compares the master weights of ranks that must have equal weights, in every fiftieth step.

    Nothing corrects a difference between replicas, because each applies the same gradients to its own weights. A
    flipped bit in memory, or an optimizer that computes differently on one machine, persists and spreads through the
    gradients.
    """

    def __init__(self, engine: DataParallel, mesh: Mesh):
        self._engine, self._mesh = engine, mesh
        plan = mesh.plan
        alike = plan.dp_replicate == 1 and plan.zero == 0 and plan.ep == 1
        self._axis = mesh["dp_shard"] if alike else mesh["dp_replicate"]
        self._steps, self._checksum = 0, 0

    @property
    def is_needed(self) -> bool:
        """True if some ranks must have equal weights."""
        return self._axis.size > 1

    def value(self, batch: Any) -> torch.Tensor | None:
        """Return a value whose sum over all ranks is zero if weights are equal, or None in steps without a check."""
        del batch
        self._steps += 1
        if self._steps % EVERY:
            return None
        self._checksum = checksum(list(self._engine.local_weights().values()))
        times = 1 - self._axis.size if self._axis.rank == 0 else 1
        return torch.tensor([float(self._checksum * times)], dtype=torch.float64, device=self._mesh.device)

    def check(self, sums: Sequence[float]) -> None:
        """Check the sum of the values of all ranks. All ranks call it.

        Raises:
            CommError: on all ranks, if weights differ. The error names the ranks.
        """
        if sums[0] == 0.0:
            return
        device = self._mesh.device
        own = torch.tensor([self._checksum], dtype=torch.int64, device=device)
        found = all_gather(own, self._axis).tolist()
        (most, number), *_ = Counter(found).most_common()
        # 1: this rank differs from the majority. 2: ranks differ and there is no majority.
        said = int(self._checksum != most) if 2 * number > len(found) else 2
        all_said = all_gather(torch.tensor([said], device=device), self._mesh.world).tolist()
        ranks = [str(rank) for rank, one in zip(self._mesh.world.ranks, all_said, strict=True) if one]
        how = "differ, and should be equal" if 2 in all_said else "differ from the others"
        raise CommError(
            f"replicas over {self._axis.label}: the weights of rank {', '.join(ranks)} {how}, since {EVERY} steps at "
            "most. Resume from an earlier checkpoint, and check the memory, the device and the software of these ranks."
        )


def checksum(tensors: list[torch.Tensor]) -> int:
    """Return a 32-bit checksum of the tensors that any flipped bit changes."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.numel():  # an empty tensor and no tensor have the same checksum
            total = total * 31 + int(flat.view(torch.int32).sum(dtype=torch.int64))
    return total & _MASK


# Checks of the first step.

#: Upper bound of fingerprints, so that sums of squares over 2**17 ranks are exact in float64.
_BOUND = 2**18
#: Number of sampled values per tensor.
_LOOKED_AT = 4096


class FirstStep:
    """Checks in a model's first step.

    They reject unsupported hooks and outdated parameters. They warn if results depend on how the plan divides a batch,
    or if ranks read the same samples.

    Args:
        checks_batch: run some small forwards, and if needed backwards, to find results that depend on the plan.
    """

    def __init__(self, passes: Accumulate, state: ModelState, mesh: Mesh, *, checks_batch: bool):
        self._model, self._passes, self._state, self._mesh = passes.model, passes, state, mesh
        self._checks_batch = checks_batch and mesh.world_size * mesh.plan.microbatches_per_step > 1
        self._checks_gradients = checks_batch
        #: False if a few samples may fail on only one pipeline stage, for which other stages would wait.
        self._runs_few = not isinstance(passes, Pipelined)
        self._code: BackwardCode | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the custom code that runs in backward, if gradients are checked, while the step runs in this context.

        Raises ModelError for parameter hooks that the plan does not support, and for operations on parameters that
        `parallelize` has replaced.
        """
        refuse_hooks(self._model, self._mesh)
        self._code = BackwardCode(self._model) if self._checks_gradients else None
        with OriginalParameters.refusing_old(self._model), self._code.recording() if self._code else nullcontext():
            yield

    def check_batch(self, batch: Any, samples: SampleNumbers) -> None:
        """Run a few samples of the first microbatch repeatedly; warn if results differ. All ranks must call it."""
        if not self._checks_batch:
            return
        passes, loss = self._passes, self._passes.loss
        loss_fn, experts = None if loss.compares else loss.loss_fn, self._state.experts
        ran = check_first_batch(
            self._model, passes.with_labels, loss_fn, self._mesh, experts, batch, samples, passes.forward
        )
        self._runs_few |= ran and not loss.compares
        self._checks_batch = False

    def check_gradients(
        self, compute_again: Callable[..., float], split: Callable[[], tuple[list[Any], list[SampleNumbers]]]
    ) -> None:
        """Warn if functions or hooks in the step's backward make gradients depend on the plan. All ranks must call it.

        Args:
            split: function that returns the microbatches of the step and their samples.
        """
        if self._code is None or not needs_check(self._mesh, self._code):
            return

        def compute(small: Microbatches, factor: float, seed: int) -> tuple[float, list[torch.Tensor]]:
            loss_sum = compute_again(small, None, 0, factor=factor, backward_seed=seed)
            return loss_sum, self._passes.engine.local_gradients()

        microbatches, samples = split()
        probe = GradientProbe(self._model, self._mesh, compute, not self._passes.loss.compares, self._runs_few)
        check_gradients(probe, self._code, microbatches[0], samples[0])

    def value(self, batch: Any) -> torch.Tensor | None:
        """Return the fingerprint of a plain batch, which the user may have forgotten to shard, else None.

        With one data rank it is None, too.
        """
        if self._mesh.data.size == 1 or isinstance(batch, Microbatches):
            return None
        return fingerprint(batch).to(self._mesh.device)

    def check(self, sums: Sequence[float]) -> None:
        """Warn if all ranks read the same samples."""
        if self._mesh.rank == 0:
            warn_if_identical(sums, self._mesh.world_size, self._mesh.data.size)


def fingerprint(batch: Any) -> torch.Tensor:
    """Return (1, f, f squared) of an integer fingerprint f of the batch, float64; zeros for a batch without tensors.

    The fingerprint depends on the first 4096 values of each tensor.

    `warn_if_identical` checks the sums over the ranks. The host does not wait for the device.
    """
    found: Any = None
    for tensor in tensors_in(batch):
        if tensor.layout is not torch.strided or tensor.is_meta:
            continue
        values = tensor.detach().reshape(-1)[:_LOOKED_AT].contiguous().view(torch.uint8).long()
        places = torch.arange(1, len(values) + 1, device=values.device)
        found = ((0 if found is None else found) * 31 + (values * places).sum()) % _BOUND
    if found is None:
        return torch.zeros(3, dtype=torch.float64)
    number = found.double()
    return torch.stack([torch.ones_like(number), number, number.square()])


def warn_if_identical(sums: Sequence[float], num_ranks: int, num_readers: int) -> None:
    """Warn if all ranks' fingerprints are equal. Does nothing if a rank has no fingerprint.

    Args:
        sums: results of `fingerprint`, summed over all ranks.
        num_ranks: number of these ranks.
        num_readers: number of data-parallel ranks, for the message.
    """
    num_known, total, squares = map(int, sums)
    # Equality holds only if all fingerprints are equal. They are integers, so nothing is rounded.
    if num_known < num_ranks or num_ranks * squares != total**2:
        return
    warnings.warn(
        f"batch: all {num_readers} data-parallel ranks got the same samples at the first step, so together they do "
        "only the work of one. Shard the loader: loader = run.shard(loader).",
        WeftWarning,
        stacklevel=5,
    )


# Update ratio of a step: the norm of its update over the norm of the weights.

#: A rank with more elements samples about this many: all elements of small parameters, and short, evenly spaced runs of
#: large ones. The ratio is then a few tenths of a percent off, and sampling costs at most a thousandth of a step.
MOST_ELEMENTS = 1 << 16
#: Minimum number of sampled elements per parameter, and length of a run, which fills memory lines.
_LEAST, _RUN = 256, 64


class UpdateRatio:
    """Measures the norm of an update divided by the norm of the weights. All ranks measure the same steps."""

    def __init__(self, engine: DataParallel, device: torch.device):
        self._engine, self._device = engine, device
        self._weights: dict[object, torch.Tensor] = {}

    def around(self, update: Callable[[], None]) -> Callable[[], float | None]:
        """Call `update`, and return a function that returns its ratio, or None if all weights are zero.

        The function waits for the device if the values are not on the host yet.
        """
        places = self._sampled_views()
        before = [_read(views) for _, views in places]
        update()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for (weights, views), old in zip(places, before, strict=True):
            new = _read(views)
            moved = new - old
            found = torch.stack([torch.dot(weights * moved, moved), torch.dot(weights * new, new)])
            sums += found.to(sums.device, non_blocking=True)  # from host memory, if the host steps
        told = LateCopy(all_reduce(sums, self._engine.axes.world))
        return lambda: _ratio(*told.values)

    def _sampled_views(self) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Return (weights, views) for each device and dtype.

        views: the sampled elements of each parameter. weights: for each sampled element, the number of elements that it
        represents, divided by the number of ranks that hold it.
        """
        held = [(one, number) for one, number in self._engine.counted_weights() if one.is_floating_point()]
        most = max(_LEAST, MOST_ELEMENTS // max(1, len(held)))
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[float], list[int]]] = {}
        for one, number in held:
            seen = _some(one, most)
            views, weights, counts = groups.setdefault((one.device, one.dtype), ([], [], []))
            views.append(seen)
            weights.append(one.numel() / max(1, seen.numel()) / number)
            counts.append(seen.numel())
        return [
            (self._weights_on(device, weights, counts), views)
            for (device, _), (views, weights, counts) in groups.items()
        ]

    def _weights_on(self, device: torch.device, weights: list[float], counts: list[int]) -> torch.Tensor:
        """Repeat each weight `counts` times. Cached, because a copy from the host would wait for the device."""
        key = device, *weights, *counts
        if key not in self._weights:
            each = torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor(counts))
            self._weights[key] = each.to(device)
        return self._weights[key]


@torch.no_grad()
def _read(views: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([view.reshape(-1) for view in views]).double()


def _some(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return a view of at most about `most` elements."""
    number = tensor.numel()
    stride = _stride(number, most)
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if stride <= 1 or span != number:  # tensors with gaps in memory are read completely
        return tensor
    return tensor.as_strided((-(-(number // _RUN) // stride), _RUN), (stride * _RUN, 1))


def _stride(num_elements: int, most: int) -> int:
    """Return the stride between sampled runs: 1 to read all, else the smallest odd prime >= num_elements / most.

    A stride that divides the row length of a matrix would sample the same columns in every row.
    """
    stride = -(-num_elements // most)
    while stride > 1 and any(stride % divisor == 0 for divisor in (2, *range(3, math.isqrt(stride) + 1))):
        stride += 1
    return stride


def _ratio(moved: float, weights: float) -> float | None:
    return math.sqrt(moved / weights) if weights > 0 else None
