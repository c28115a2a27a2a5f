"""Records the root mean square of module outputs in forwards, and traces failed steps to samples and modules."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.config import partitioning as shares
from weft.data.batches import tensors_in
from weft.errors import CommError, ModelError
from weft.parallel.random.streams import SampleNumbers
from weft.parallel.state.gradients import data_parallel
from weft.train.batches.batching_by_cost import StepBorders
from weft.train.batches.data_share import Batches
from weft.train.batches.microbatches import Microbatches, samples_in, samples_of, split_rows
from weft.train.engine import TraceKind
from weft.train.losses import GlobalBatchLoss
from weft.train.states.state_io import gather
from weft.train.step.evaluation import each_output
from weft.train.step.trace_event import LossPart, RankFinding, TracedSamples, judge, unusual, worst
from weft.train.tasks.base import Task


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One module call in one forward. size, input_size: root mean square of output and input.

    They are nonfinite if a value is.
    """

    module: str
    size: float
    input_size: float

    @property
    def is_finite(self) -> bool:
        """True if the output was finite."""
        return math.isfinite(self.size)


@dataclass
class ModuleWatch:
    """Records the root mean square of the input and output of every submodule of a model, through forward hooks.

    The values stay on the device until `calls` reads them.
    """

    model: nn.Module
    _names: list[list[str]] = field(default_factory=list)
    _sizes: list[list[torch.Tensor]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the forwards inside this context. Compiled modules run eagerly."""
        hooks = [
            module.register_forward_hook(self._hook(own_name(name)))
            for name, module in self.model.named_modules()
            if module is not self.model
        ]
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def each(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches. Module outputs are recorded under the last yielded batch."""
        for batch in batches:
            self._names.append([])
            self._sizes.append([])
            yield batch

    def calls(self) -> list[list[ModuleCall]]:
        """Return the recorded calls of each batch, in the order in which modules returned. Waits for the device."""
        found = []
        for names, sizes in zip(self._names, self._sizes, strict=True):
            numbers: list[list[float]] = torch.stack(sizes).tolist() if sizes else []
            found.append([ModuleCall(name, *pair) for name, pair in zip(names, numbers, strict=True)])
        return found

    def _hook(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            del module
            size = size_of(output)
            if size is not None and self._names:
                given = size_of(args)
                self._names[-1].append(name)
                self._sizes[-1].append(torch.stack([size, torch.zeros_like(size) if given is None else given]))

        return look


def size_of(value: Any) -> torch.Tensor | None:
    """Compute the root mean square of all floating-point values, on their device, float64, or None without values.

    The result is not finite if a value is not.
    """
    squares, count = None, 0
    for tensor in map(local_part, tensors_in(value)):
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            # In float64 the squares of large values of other dtypes stay finite.
            norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
            squares = norm.square() + (0.0 if squares is None else squares)
            count += tensor.numel()
    return None if squares is None else (squares / count).sqrt()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor."""
    here: Any = getattr(tensor, "to_local", None)
    return tensor if here is None else here()


def own_name(name: str) -> str:
    """Return a module's name in the model's code, without the prefixes of compiled modules."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    found = [(name, size_of(tensor)) for name, tensor in tensors]
    known = [(own_name(name), size) for name, size in found if size is not None]
    if not known:
        return []
    sizes: list[float] = torch.stack([size for _, size in known]).tolist()
    return [name for (name, _), size in zip(known, sizes, strict=True) if not math.isfinite(size)]


# Recomputes a failed step without gradients to find the cause, on all ranks together.

#: A microbatch is divided into this many parts, then the worst part is divided again, until a part is one sample.
_PARTS = 16
#: If a microbatch cannot be divided by samples, this many microbatches are compared.
_WHOLE = 4
#: Maximum number of samples in an event.
_MOST_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A rank's data of a step, kept until the step's loss and gradient are checked.

    Attributes:
        number: index of the step, from 1.
        batches: its microbatches as the task built them.
        losses: by microbatch index, sum and count of the losses that this rank computes, on the device.
    """

    number: int
    batches: Sequence[Any]
    losses: dict[int, tuple[torch.Tensor, torch.Tensor | int]]


@dataclass
class _Round:
    """Results of one forward on each part of a microbatch.

    joined: for each data rank, the combined results of its ranks by part. runs: rows of each part on this rank.
    """

    runs: list[range]
    parts: list[LossPart]
    calls: list[list[ModuleCall]]
    error: str = ""
    joined: dict[int, list[LossPart]] = field(default_factory=dict)


class PartForwards:
    """Runs forward on parts of a step's batch, in evaluation mode and without gradients."""

    def __init__(self, model: nn.Module, mesh: Mesh, task: Task):
        self._model, self._mesh, self._task = model, mesh, task

    @property
    def compares(self) -> bool:
        """True if the loss compares samples of a global batch, so that a part of it has no loss."""
        return isinstance(self._task.loss, GlobalBatchLoss)

    def run(self, batches: list[Any], runs: list[range], *, counts: bool = True) -> _Round:
        """Run forward on each batch, in evaluation mode and without gradients.

        If it fails, the result contains the error, except for a CommError, which is raised.

        runs: rows of each batch in its microbatch. counts: False for placeholders.
        """
        task, watch = self._task, ModuleWatch(self._model)
        found: list[torch.Tensor] = []

        def add(output: Any, local: Any, _: bool) -> None:
            if self.compares:
                size = size_of(output)
                pair = [torch.zeros(()) if size is None else size * 0.0, torch.zeros(())]
            else:
                pair = [torch.as_tensor(one).detach() for one in task.loss(output, local)]
            found.append(torch.stack([one.to(self._mesh.device, torch.float64) for one in pair]))

        try:
            with watch.watching():
                each_output(self._model, watch.each(batches), self._mesh, task.loss, task.forward, add)
        except CommError:
            raise
        except Exception as error:  # tracing must not end the run
            text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
            return _Round(runs, [LossPart(0.0, 0.0)] * len(batches), [[] for _ in batches], text)
        calls = watch.calls()
        pairs: list[list[float]] = torch.stack(found).tolist() if found else [[0.0, 0.0]] * len(batches)
        parts = [
            LossPart(loss_sum if counts else 0.0, count if counts else 0.0, all(one.is_finite for one in seen))
            for (loss_sum, count), seen in zip(pairs, calls, strict=True)
        ]
        return _Round(runs, parts, calls)


class StepTracer:
    """Traces failed steps of one model.

    Args:
        model: result of `parallelize`.
        mesh: the ranks.
        task: defines forward and loss.
        batches: the training batches, which define the samples of each step.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, task: Task, batches: Batches):
        self._model, self._mesh, self._task = model, mesh, task
        self._forwards = PartForwards(model, mesh, task)
        self._places = StepBorders.of(batches, task.config.train.global_batch)
        #: The last two steps, because a step's result may be read during the next step.
        self._steps: deque[TracedStep] = deque(maxlen=2)

    def remember(self, step: TracedStep) -> None:
        """Keep the data of a step until its result is checked."""
        self._steps.append(step)

    def remembered(self, number: int) -> TracedStep | None:
        """Return the data of a step, or None if it is too old."""
        return next((one for one in self._steps if one.number == number), None)

    def trace(self, kind: TraceKind, step: TracedStep) -> dict[str, Any]:
        """Return the trace event of a step, equal on all ranks. All ranks must call it.

        If its gradient is not finite, the model must still have the gradients.

        Args:
            kind: kind of the failure, equal on all ranks.
        """
        numbers = samples_of(Microbatches(step.batches), len(step.batches), self._mesh.reader)
        given = self._task.before_step(step.batches)
        data, index = self._choose(step, given, numbers)
        losses, last, can_tell = self._narrow(given, numbers, index)
        place = worst(last.joined[self._mesh.data.rank]) if can_tell else 0
        finding = self._look(given[index], last, place)
        finding["weights"] = _not_finite(self._model.named_parameters())
        if kind == "gradient":
            bad = set(_not_finite(data_parallel(self._model).gradients()))
            finding["gradients"] = [name for name in map(own_name, dict(self._model.named_parameters())) if name in bad]
        shown = self._named(last, place) if can_tell else numbers[index].numbers
        finding["numbers"] = [numbers[index].numbers[row] for row in shown] if can_tell else list(shown)
        words = self._share(finding)
        first = next(word for word in words if word["data"] == data)
        named = first["numbers"][:_MOST_SAMPLES]
        findings = [RankFinding(**{key: one for key, one in word.items() if key != "numbers"}) for word in words]
        joined = last.joined[data]
        chosen = joined[worst(joined) if can_tell else 0]
        every = len(joined) > 1 and all(part.is_bad for part in joined)
        samples = TracedSamples(data, index, named, chosen.mean if chosen.count else math.nan, losses, every)
        before = self._places.first(step.number - 1)
        return {
            "event": "trace",
            "step": step.number,
            "kind": kind,
            **judge(kind, samples, findings),
            "samples": [before + one for one in named],
            "microbatch": index,
        }

    # --- search for the samples ---

    def _choose(self, step: TracedStep, given: Sequence[Any], numbers: Sequence[SampleNumbers]) -> tuple[int, int]:
        if self._forwards.compares:
            found = self._forwards.run(list(given), [range(0)] * len(given)).parts
        else:
            found = [LossPart(0.0, 0.0)] * len(given)
            for place, (loss_sum, count) in step.losses.items():
                found[place] = LossPart(float(loss_sum), float(count))
        firsts = [min(one.numbers, default=0) for one in numbers]
        said = self._share([self._mesh.data.rank, firsts, [asdict(part) for part in found]])
        first_of = {(data, place): first for data, each, _ in said for place, first in enumerate(each)}
        parts = _joined([(data, each) for data, _, each in said])
        order = sorted(first_of, key=lambda one: first_of[one])
        return order[worst([parts[data][place] for data, place in order])]

    def _narrow(
        self, given: Sequence[Any], numbers: Sequence[SampleNumbers], index: int
    ) -> tuple[list[float], _Round, bool]:
        """Run ever smaller parts of a microbatch. Return the first forwards' mean losses, the last results, and True.

        If a rank cannot split it, run it next to other microbatches instead, and return False as the third value.
        """
        batch, own = given[index], numbers[index]
        rows = range(max(1, len(own.numbers)))
        said = self._share([_can_split(batch, own), len(rows)])
        if not all(can for can, _ in said):
            others = [one for place, one in enumerate(given) if place != index]
            some = [batch, *others][:_WHOLE]
            last = self._join(self._forwards.run(some, [range(0)] * len(some)))
            return _means(last), last, False
        most, means, last = max(count for _, count in said), None, None
        while last is None or most > 1:
            if last is not None:
                rows = last.runs[worst(last.joined[self._mesh.data.rank])]
                most = -(-most // _PARTS)
            runs = [rows[one.start : one.stop] for one in shares.share_out(len(rows), min(_PARTS, len(rows)))]
            # Ranks with fewer rows repeat their last part.
            padded = [*runs, *[runs[-1]] * (min(_PARTS, most) - len(runs))]
            found = self._forwards.run(split_rows(batch, padded), padded, counts=not own.is_empty)
            last = self._join(_Round(runs, found.parts[: len(runs)], found.calls[: len(runs)], found.error))
            means = _means(last) if means is None else means
            if most <= _PARTS:
                break
        assert means is not None
        return means, last, True

    def _named(self, last: _Round, place: int) -> list[int]:
        joined = last.joined[self._mesh.data.rank]
        bad = [one for one, part in enumerate(joined) if part.is_bad]
        places = bad if 0 < len(bad) < len(joined) else [place]
        return [row for one in places for row in last.runs[one]]

    # --- computation ---

    def _look(self, batch: Any, last: _Round, place: int) -> dict[str, Any]:
        mesh, calls = self._mesh, last.calls[place]
        bad = next((order for order, call in enumerate(calls) if not call.is_finite), -1)
        sizes = [{call.module: call.size for call in seen} for seen in last.calls]
        others = [seen for one, seen in enumerate(sizes) if one != place]
        stage = mesh["pp"].rank
        return {
            "data": mesh.data.rank,
            "stage": stage,
            "place": mesh["tp"].rank + mesh.plan.tp * mesh["cp"].rank,
            "order": bad,
            "module": calls[bad].module if bad >= 0 else "",
            "got_finite": bad < 0 or math.isfinite(calls[bad].input_size),
            "input_finite": math.isfinite(
                float(_size(split_rows(batch, [last.runs[place]])[0] if last.runs[place] else batch))
            ),
            "unusual": unusual(sizes[place], others) if others else None,
            "sizes": None if others else sizes[place],
            "error": last.error,
        }

    # --- exchange among ranks ---

    def _join(self, own: _Round) -> _Round:
        said = self._share([self._mesh.data.rank, [asdict(part) for part in own.parts]])
        own.joined = _joined(said)
        return own

    def _share(self, word: Any) -> list[Any]:
        return [json.loads(one) for one in gather(self._mesh, json.dumps(word).encode())]


def _joined(said: Sequence[Sequence[Any]]) -> dict[int, list[LossPart]]:
    found: dict[int, list[list[LossPart]]] = {}
    for data, parts in said:
        found.setdefault(data, []).append([LossPart(**part) for part in parts])
    return {data: [LossPart.joined(same) for same in zip(*each, strict=True)] for data, each in found.items()}


def _means(found: _Round) -> list[float]:
    return [part.mean for parts in found.joined.values() for part in parts if part.count and not part.is_bad]


def _can_split(batch: Any, own: SampleNumbers) -> bool:
    """Return True if the rows of a microbatch are its samples."""
    if samples_in(batch) != max(1, len(own.numbers)):
        return False
    try:
        split_rows(batch, [range(1)])
    except ModelError:
        return False
    return True


def _size(batch: Any) -> torch.Tensor | float:
    size = size_of(batch)
    return 0.0 if size is None else size
