"""CUDA graph capture and replay of a microbatch's forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.data.batches import check_batch, map_tensors, mark_reused_buffer, parts_of, tensors_in
from weft.devices import access
from weft.errors import ModelError, PlanError, Problem, WeftWarning
from weft.memory.graph_recorder import CudaRecorder, Recorder, Recording, send_numbers
from weft.monitor.step_times import Meter
from weft.parallel.batch_norm.norm_groups import norm_groups_of
from weft.parallel.choose_engine import recorded_passes
from weft.parallel.dropout.by_position import drops_of
from weft.parallel.dropout.drop_state import Drops, FixedDraws
from weft.parallel.expert import balanced_routers
from weft.parallel.random.streams import SampleNumbers
from weft.parallel.state.gradients import DataParallel, data_parallel
from weft.parallel.zero_flat.step import PassEnd, RecordedPasses
from weft.train.batches.microbatches import ForwardFn
from weft.train.losses import CheckedLoss
from weft.train.step.passes import Accumulate, Work

# A batch in persistent memory, into which other batches of the same shapes are copied.

_PLAIN = (bool, int, float, str, bytes, type(None))


def shape_of(batch: Any) -> Hashable | None:
    """Return a key that is equal for batches that one recorded graph can process, or None if there is no such key.

    The key contains shapes, strides and dtypes of tensors, their positions in containers, and all other values.
    """
    if isinstance(batch, Tensor):
        holds_others = hasattr(type(batch), "__tensor_flatten__")
        if holds_others or batch.is_nested or batch.layout != torch.strided or batch.requires_grad:
            return None
        return tuple(batch.shape), batch.stride(), batch.dtype
    if isinstance(batch, _PLAIN):
        return type(batch), batch
    parts = parts_of(batch)
    if parts is None:
        return None
    inner = tuple(shape_of(part) for part in parts)
    keys = tuple(batch) if isinstance(batch, dict) else ()
    return None if None in inner else (type(batch), keys, inner)


class FixedBatch:
    """Static input buffers of CUDA graphs, for batches of the shapes of `like`.

    `fill` copies a new batch into them. Before that, it runs the checks of values that were registered for the buffers
    while the graph was recorded, such as checks of an index's range.
    """

    def __init__(self, like: Any):
        self.batch = map_tensors(_memory, like)
        self._tensors = list(tensors_in(self.batch))

    def fill(self, batch: Any) -> None:
        """Check a batch of the same shape, on the same device, and copy it into the buffers."""
        for mine, given in zip(self._tensors, tensors_in(batch), strict=True):
            check_batch(mine, given)
            mine.copy_(given)


def _memory(tensor: Tensor) -> Tensor:
    found = torch.empty_like(tensor)  # strides differ if elements overlap or have gaps
    mark_reused_buffer(found)
    return found


# Recorded forward and backward passes: one per batch shape and position in a step.

#: Eager passes before a recording.
WARM_UPS = 2
#: Maximum number of recorded shapes, and of recordings: a shape has one per position in a step.
MOST_SHAPES, MOST_RECORDINGS = 8, 32
#: Maximum number of different passes that are counted before they are recorded.
_MOST_SEEN = 64


@dataclass(frozen=True, slots=True)
class MicrobatchInputs:
    """Inputs of a pass (forward and backward of a microbatch).

    Attributes:
        batch: the microbatch, on the device.
        samples: indices of its samples.
        key: dropout key of the step.
        scale: factor of the loss.
    """

    batch: Any
    samples: SampleNumbers
    key: int
    scale: float | Tensor


class _PassMemory:
    """Persistent memory of a recording's inputs. like: example inputs. drops: the model's dropout."""

    def __init__(self, like: MicrobatchInputs, drops: Drops | None, device: torch.device):
        self.batch = FixedBatch(like.batch)
        self.draws = None if drops is None or not drops.sites else FixedDraws(drops, like.samples)
        self.scale = torch.zeros((), device=device)  # a power of two, which fp32 holds
        self._sent: float | None = None

    def fill(self, given: MicrobatchInputs) -> None:
        """Copy inputs into the memory."""
        self.batch.fill(given.batch)
        if self.draws is not None:
            self.draws.fill(given.key, given.samples)
        if isinstance(given.scale, Tensor):
            self.scale.copy_(given.scale)
            self._sent = None
        elif given.scale != self._sent:
            send_numbers(torch.tensor(given.scale), self.scale)
            self._sent = given.scale


@dataclass(frozen=True, slots=True)
class _Pass:
    """A recorded pass: its input memory, its recording, and the state of gradients after it."""

    memory: _PassMemory
    recording: Recording[Tensor]
    end: PassEnd


#: (batch, 0-d factor of the loss) -> loss sum and count, (2,) float64. Runs forward and backward.
Compute = Callable[[Any, Tensor], Tensor]


class GraphedPasses:
    """Runs the forward and backward of microbatches by graph replay, if possible.

    Args:
        speaks: if True, this rank logs passes that are not recorded.
    """

    def __init__(
        self, recorder: Recorder, model: nn.Module, engine: DataParallel, way: RecordedPasses, drops: Drops | None, *,
        device: torch.device, recomputes: bool, speaks: bool,
    ):  # fmt: skip
        self._recorder, self._model, self._engine, self._kernel_choice, self._drops = (
            recorder,
            model,
            engine,
            way,
            drops,
        )
        self._device, self._recomputes, self._speaks = device, recomputes, speaks
        self._seen: dict[Hashable, int] = {}
        self._shapes: set[Hashable] = set()
        self._passes: dict[Hashable, _Pass] = {}
        self._said: set[str] = set()
        #: Replays so far, including recordings.
        self.num_replays = 0

    def run(self, given: MicrobatchInputs, compute: Compute, *, last: bool) -> Tensor | None:
        """Run one microbatch and return loss sum and count, (2,) float64.

        Returns None if it cannot be replayed. The caller then runs it eagerly.

        Args:
            compute: runs forward and backward of a batch. It is recorded, and not called in a replay.
        """
        found = self._found(given, last)
        if found is None:
            return None
        known = self._passes.get(found)
        if known is None and not self._is_ready(found):
            return None
        with self._kernel_choice.holding(), self._engine.microbatch(last):
            if known is None:
                known = self._passes[found] = self._recorded(given, compute, last)
            else:
                known.memory.fill(given)
                known.recording.replay()
                self._kernel_choice.leave(known.end)
            self.num_replays += 1
            return known.recording.result.clone()

    def _found(self, given: MicrobatchInputs, last: bool) -> Hashable | None:
        if given.samples.is_empty:
            return None  # a placeholder at the end of an epoch
        shape = shape_of(given.batch)
        if shape is None:
            self._warn_once("batches have other values than tensors, numbers and text, so nothing is recorded")
            return None
        if self._drops is not None and given.samples.rows:
            self._warn_once(
                "the model drops by rows, and samples have different numbers of them, so nothing is recorded"
            )
            return None
        if shape not in self._shapes:
            if len(self._shapes) >= MOST_SHAPES:
                self._warn_once(f"batches have more than {MOST_SHAPES} shapes. Those after the first {MOST_SHAPES} are "
                          "launched kernel by kernel; pad batches to fewer shapes")  # fmt: skip
                return None
            self._shapes.add(shape)
        modes = tuple(module.training for module in self._model.modules())
        frozen = (one for one in self._model.parameters() if not one.requires_grad)
        beside = tuple(one.data_ptr() for one in (*frozen, *self._model.buffers()))
        return shape, len(given.samples.numbers), last, modes, beside, self._kernel_choice.found(last)

    def _is_ready(self, found: Hashable) -> bool:
        count = self._seen.pop(found, 0)
        if count >= WARM_UPS:
            if len(self._passes) < MOST_RECORDINGS:
                return True
            self._warn_once(f"weights or gradients moved to other memory, and {MOST_RECORDINGS} passes are recorded; "
                      "others are launched kernel by kernel")  # fmt: skip
        self._seen[found] = count + 1
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return False

    def _recorded(self, given: MicrobatchInputs, compute: Compute, last: bool) -> _Pass:
        drops, keeps = self._drops, self._kernel_choice.keeps(last)
        memory = _PassMemory(given, drops, self._device)
        memory.fill(given)
        with drops.stored(memory.draws) if drops is not None and memory.draws is not None else nullcontext():
            act = partial(compute, memory.batch.batch, memory.scale)
            recording = self._recorder.record(act, "forward and backward", apart=keeps)
        if recording.draws and self._recomputes:
            raise ModelError(
                "graphs=on: the model draws from torch's generator, and a recorded pass that recomputes would draw "
                "other numbers the second time. Use recompute=none, or graphs=off."
            )
        return _Pass(memory, recording, self._kernel_choice.left())

    def _warn_once(self, what: str) -> None:
        if self._speaks and what not in self._said:
            warnings.warn(f"graphs=on: {what}.", WeftWarning, stacklevel=2)
        self._said.add(what)


def graphed_passes(model: nn.Module, mesh: Mesh, recorder: Recorder | None, *, compares: bool) -> GraphedPasses:
    """Build the graph runner of a model under graphs=on, and enable recording of its optimizer's steps.

    Args:
        recorder: records graphs; None for CUDA graphs.
        compares: if True, the loss compares samples of several microbatches.

    Raises:
        PlanError: if nothing can be recorded.
    """
    engine = data_parallel(model)
    way, kind = recorded_passes(engine), access.kind_of(mesh.device)
    obstacles = (
        (way is None, f"zero={mesh.plan.zero} communicates within forward and backward"),
        (
            recorder is None and not kind.graphs,
            f"this run computes on {'a CPU' if kind.name == 'cpu' else kind.name}, which records no graphs",
        ),
        (compares, "the loss compares samples of several microbatches"),
        (norm_groups_of(model) is not None, "train.norm_group uses statistics over several microbatches"),
        (any(balanced_routers(model)), "the model has experts, and the host adds up what their routers count"),
    )
    why = next((words for holds, words in obstacles if holds), "")
    if why or way is None:
        raise PlanError([Problem("graphs", f"graphs=on: {why}. Use graphs=off.")])
    way.recorder, drops = recorder or CudaRecorder(mesh.device), drops_of(model)
    return GraphedPasses(
        way.recorder, model, engine, way, drops if drops is not None and drops.sites else None, device=mesh.device,
        recomputes=mesh.plan.recompute_policy != "none", speaks=mesh.rank == 0,
    )  # fmt: skip


class Graphed(Accumulate):
    """Runs one microbatch after another, each as one graph launch if its pass is recorded.

    graphs: the recorded passes.
    """

    def __init__(
        self, model: nn.Module, forward: ForwardFn | None, loss: CheckedLoss, meter: Meter, graphs: GraphedPasses
    ):
        super().__init__(model, forward, loss, meter)
        self.graphs = graphs

    def run_one(self, work: Work, index: int) -> None:
        """Replay or record a microbatch's pass, or run it eagerly."""

        def compute(batch: Any, scale: Tensor) -> Tensor:
            with work.inside(index):
                loss_sum, number = work.loss(self.with_labels(self.model, batch), batch, index)
                (loss_sum * scale).backward()
            return _counted(loss_sum.detach(), number)

        counted = None
        if work.may_replay:
            given = MicrobatchInputs(work.microbatches[index], work.samples[index], work.draws.key, work.scale)
            with self.meter.phase("forward and backward"):
                counted = self.graphs.run(given, compute, last=index == len(work.microbatches) - 1)
        if counted is None:
            super().run_one(work, index)
            return
        work.sums.add_(counted)
        work.losses[index] = counted[0], counted[1]


def _counted(loss_sum: Tensor, number: Tensor | float) -> Tensor:
    if not isinstance(number, Tensor):
        number = torch.full((), number, dtype=torch.float64, device=loss_sum.device)
    if number.device != loss_sum.device:
        raise ModelError(
            f"graphs=on: loss_fn returned the number of losses as a tensor on {number.device}, and a graph reads "
            f"{loss_sum.device} alone. Return it there, or a plain number, or use graphs=off."
        )
    return torch.stack([loss_sum.double(), number.double()])
