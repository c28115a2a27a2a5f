"""Computes again, without gradients, what a step went wrong with, and finds out where: all ranks together.

Which microbatch it is follows from the losses of all of them; which of its samples, from the losses of ever smaller
parts of it; where in the model, from the outputs of all modules. Each rank computes as often as the others and in the
same order, so that no collective of a forward is called by one rank alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from weft.errors import CommError, ModelError
from weft.mesh import Mesh
from weft.parallel import data_parallel
from weft.parallel.randomness import SampleNumbers
from weft.spec import shares
from weft.train.engine import TraceKind
from weft.train.microbatch import Microbatches, StepPlaces, cut_rows, samples_in, samples_of
from weft.train.state import gather
from weft.train.step.evaluation import each_output
from weft.train.step.tracing.module_watch import (
    ModuleCall,
    ModuleWatch,
    size_of,
    spoilt_gradients,
    spoilt_parameters,
)
from weft.train.step.tracing.trace_event import LossPart, RankFinding, TracedSamples, judge, unusual, worst
from weft.train.step.whole_batch import WholeBatchLoss
from weft.train.task import Batches, Task

#: A microbatch is cut into so many parts, and so is the worst of them, until a part is one sample.
_PARTS = 16
#: Where samples cannot be told apart, so many microbatches are compared.
_WHOLE = 4
#: Samples that an event names.
_MOST_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What a rank keeps of a step until its numbers are known.

    number: from 1. batches: its microbatches as the task gave them. losses: by place, sum and number of those that
    this rank computes the loss of, on the device.
    """

    number: int
    batches: Sequence[Any]
    losses: dict[int, tuple[torch.Tensor, torch.Tensor | int]]


@dataclass
class _Round:
    """What was found of some parts of a microbatch. joined: of each part, by the ranks' samples, of all who compute it.

    runs: rows of each part of this rank's own.
    """

    runs: list[range]
    parts: list[LossPart]
    calls: list[list[ModuleCall]]
    error: str = ""
    joined: dict[int, list[LossPart]] = field(default_factory=dict)


class StepTracer:
    """Traces steps of one model.

    Args:
        model: what `parallelize` returned.
        mesh: of the ranks.
        task: gives forward and loss.
        batches: say which samples each step takes.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, task: Task, batches: Batches):
        self._model, self._mesh, self._task = model, mesh, task
        self._places = StepPlaces.of(batches, task.config.train.global_batch)

    def trace(self, kind: TraceKind, step: TracedStep) -> dict[str, Any]:
        """Return the event of a step, the same on all ranks. A collective.

        Where its gradient is not finite, the model must hold its gradients.

        Args:
            kind: what was wrong with its numbers, equal on all ranks.
            step: which one.
        """
        numbers = samples_of(Microbatches(step.batches), len(step.batches), self._mesh.reader)
        given = self._task.before_step(step.batches)
        data, index = self._choose(step, given, numbers)
        losses, last, can_tell = self._narrow(given, numbers, index)
        place = worst(last.joined[self._mesh.data.rank]) if can_tell else 0
        finding = self._look(given[index], last, place)
        finding["weights"] = spoilt_parameters(self._model)
        if kind == "gradient":
            finding["gradients"] = spoilt_gradients(self._model, data_parallel(self._model).gradients())
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

    # --- which samples ---

    def _choose(self, step: TracedStep, given: Sequence[Any], numbers: Sequence[SampleNumbers]) -> tuple[int, int]:
        """The data rank and the number of the microbatch that is the worst of the step."""
        if isinstance(self._task.loss, WholeBatchLoss):
            found = self._compute(list(given), [range(0)] * len(given)).parts
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
        """Mean losses of all parts of the first round; the last round; whether its parts are parts of a microbatch."""
        batch, own = given[index], numbers[index]
        rows = range(max(1, len(own.numbers)))
        said = self._share([_can_cut(batch, own), len(rows)])
        if not all(can for can, _ in said):
            others = [one for place, one in enumerate(given) if place != index]
            some = [batch, *others][:_WHOLE]
            last = self._join(self._compute(some, [range(0)] * len(some)))
            return _means(last), last, False
        most, means, last = max(count for _, count in said), None, None
        while last is None or most > 1:
            if last is not None:
                rows = last.runs[worst(last.joined[self._mesh.data.rank])]
                most = -(-most // _PARTS)
            runs = [rows[one.start : one.stop] for one in shares.share_out(len(rows), min(_PARTS, len(rows)))]
            # Ranks with fewer rows compute some of them again.
            padded = [*runs, *[runs[-1]] * (min(_PARTS, most) - len(runs))]
            found = self._compute(cut_rows(batch, padded), padded, counts=not own.is_empty)
            last = self._join(_Round(runs, found.parts[: len(runs)], found.calls[: len(runs)], found.error))
            means = _means(last) if means is None else means
            if most <= _PARTS:
                break
        assert means is not None
        return means, last, True

    def _named(self, last: _Round, place: int) -> list[int]:
        """The rows that are named: all that are not finite; where all are so, or none is, those of the worst part."""
        joined = last.joined[self._mesh.data.rank]
        bad = [one for one, part in enumerate(joined) if part.is_bad]
        places = bad if 0 < len(bad) < len(joined) else [place]
        return [row for one in places for row in last.runs[one]]

    # --- computing ---

    def _compute(self, batches: list[Any], runs: list[range], *, counts: bool = True) -> _Round:
        """Forward each batch, in evaluation mode and without gradients. counts: they are samples, and no stand-in."""
        task, watch = self._task, ModuleWatch(self._model)
        found: list[torch.Tensor] = []

        def add(output: Any, local: Any, _: bool) -> None:
            if isinstance(task.loss, WholeBatchLoss):
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
        except Exception as error:  # a step that went wrong is no reason to end the run
            return _Round(runs, [LossPart(0.0, 0.0)] * len(batches), [[] for _ in batches], _in_words(error))
        calls = watch.calls()
        pairs: list[list[float]] = torch.stack(found).tolist() if found else [[0.0, 0.0]] * len(batches)
        parts = [
            LossPart(loss_sum if counts else 0.0, count if counts else 0.0, all(one.is_finite for one in seen))
            for (loss_sum, count), seen in zip(pairs, calls, strict=True)
        ]
        return _Round(runs, parts, calls)

    def _look(self, batch: Any, last: _Round, place: int) -> dict[str, Any]:
        """What this rank says of a part."""
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
                float(_size(cut_rows(batch, [last.runs[place]])[0] if last.runs[place] else batch))
            ),
            "unusual": unusual(sizes[place], others) if others else None,
            "sizes": None if others else sizes[place],
            "error": last.error,
        }

    # --- together ---

    def _join(self, own: _Round) -> _Round:
        """Let the ranks that compute the same samples know what each found."""
        said = self._share([self._mesh.data.rank, [asdict(part) for part in own.parts]])
        own.joined = _joined(said)
        return own

    def _share(self, word: Any) -> list[Any]:
        return [json.loads(one) for one in gather(self._mesh, json.dumps(word).encode())]


def _joined(said: Sequence[Sequence[Any]]) -> dict[int, list[LossPart]]:
    """By data rank, what all ranks with its samples found of each part."""
    found: dict[int, list[list[LossPart]]] = {}
    for data, parts in said:
        found.setdefault(data, []).append([LossPart(**part) for part in parts])
    return {data: [LossPart.joined(same) for same in zip(*each, strict=True)] for data, each in found.items()}


def _means(found: _Round) -> list[float]:
    """The mean losses of all parts of all ranks."""
    return [part.mean for parts in found.joined.values() for part in parts if part.count and not part.is_bad]


def _can_cut(batch: Any, own: SampleNumbers) -> bool:
    """Whether the rows of a microbatch are its samples."""
    if samples_in(batch) != max(1, len(own.numbers)):
        return False
    try:
        cut_rows(batch, [range(1)])
    except ModelError:
        return False
    return True


def _size(batch: Any) -> torch.Tensor | float:
    size = size_of(batch)
    return 0.0 if size is None else size


def _in_words(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]
