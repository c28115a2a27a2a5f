"""The interface between the training loop and an engine, which computes the steps: `Engine`, its inputs and results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import Checkpoint
from weft.checkpoint.save import SavedSlice
from weft.comm.heartbeat import Heartbeat
from weft.config.partitioning import ShareTimeline
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.env import RankEnv
from weft.monitor.metrics import LocalReports, ReportChannel
from weft.monitor.step_times import Meter, TimeBook
from weft.train.batches.data_share import Batches
from weft.train.folder import RunFolder
from weft.train.tasks.base import Task

if TYPE_CHECKING:
    from weft.private_torch import Store

#: Which value of a step is wrong: loss or gradient not finite, or a loss far above its usual range.
TraceKind = Literal["loss", "gradient", "spike"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one step, equal on all ranks.

    Attributes:
        loss: mean over the `count` tokens or samples, before the update.
        grad_norm: gradient norm before clipping.
        skipped: reason why the weights were not updated, or None.
        update_ratio: norm of the update divided by the norm of the weights, if it was measured.
        share: fraction of the global batch that `count` covers.
        goes_to: number of steps done at which training continues if the other replicas were at another step, else None.
        is_over: True if the other replicas have ended.
    """

    loss: float
    grad_norm: float
    count: int
    loss_scale: float | None = None
    skipped: str | None = None
    wants_stop: bool = False
    update_ratio: float | None = None
    share: float = 1.0
    goes_to: int | None = None
    is_over: bool = False


class LateResult:
    """A result whose numbers are still on the device.

    The loop reads it after launching the next step, so that the device is never idle. All ranks read it at that point.
    """

    def __init__(self, read: Callable[[], StepResult]):
        self.read = read


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        loss: mean over the `count` tokens or samples.
        metrics: the task's metrics by name; None if a value is unknown.
    """

    loss: float
    count: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)


# Measurements of an engine for the monitoring thread, and the channel for its reports.


@dataclass(frozen=True, slots=True)
class Measures:
    """Measurements of one rank that only its engine can provide.

    Attributes:
        board: channel for the ranks' reports.
        traffic: function that returns the bytes of this rank's tensors in collectives so far, by metric name. The
            monitoring thread calls it.
        memory: function that returns the device memory in bytes by metric name. Called once, between two steps.
        gpu: UUID of the rank's GPU; None on other devices.
    """

    board: ReportChannel = field(default_factory=LocalReports)
    traffic: Callable[[], Mapping[str, float]] = dict
    memory: Callable[[], Mapping[str, float]] = dict
    gpu: str | None = None


# Inputs of an engine, and its seeds.


@dataclass(frozen=True, slots=True)
class ReplicaWorld:
    """One of several replicas that each have a separate process group (world).

    Attributes:
        replica: index of this replica.
        meet_at: HOST:PORT of the rendezvous server.
        key: shared key that the rendezvous server must have.
    """

    replica: int
    meet_at: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class EngineJob:
    """Inputs of an engine.

    Attributes:
        place: rank environment of this process; None for a single process.
        tell: prints a line for users when a rank waits for another one.
        store: rendezvous store that the ranks have already joined.
        record: writes an event, on ranks that have an event log.
        world: this replica, if each replica is a separate process group.
        store_key: hex digits of the secret that signs the ranks' messages in the store. If empty, the ranks agree on
            one after joining.
        timeline: shares of the data-parallel ranks by step.
    """

    folder: RunFolder
    config: RunConfig
    task: Task
    plan: Plan
    place: RankEnv | None
    tell: Callable[[str], None]
    store: Store | None = None
    record: Callable[[Mapping[str, object]], None] = lambda event: None
    world: ReplicaWorld | None = None
    store_key: str = field(default="", repr=False)
    timeline: ShareTimeline = field(default_factory=ShareTimeline)


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed derived from integers, the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# The engine interface: an engine holds one rank's part of the model, and trains, evaluates, saves and loads it.

#: First components of the array names in a checkpoint.
GROUPS = ("model", "optimizer")


class EngineState(Protocol):
    """Interface that saves and loads an engine's model and optimizer. All ranks call every method."""

    @property
    def buffers(self) -> Collection[str]:
        """Names of the model's buffers on this rank. They may contain infinities."""
        ...

    def slices(self, *, aside: bool = False) -> Iterable[SavedSlice]:
        """Return this rank's slices of weights and optimizer states, to be written before the next step.

        Paths are "group/name": the groups in `GROUPS`, and others with the engine's own state. All ranks' slices
        together contain each element once.

        Args:
            aside: return copies in host memory, which are valid until the next call with `aside`.

        Raises:
            CheckpointError: if the copies do not fit into host memory.
        """
        ...

    def values(self) -> Mapping[str, Any]:
        """Return the JSON values of a checkpoint by name (everything except arrays)."""
        ...

    def load(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Load a checkpoint that was saved under any plan. This rank reads only the elements that it stores.

        Returns messages about parts that are skipped because only another plan can use them.
        """
        ...


class EngineReports(Protocol):
    """Reports of an engine for users and for the monitoring thread."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the engine's libraries by name."""
        ...

    def opening(self) -> Sequence[str]:
        """Return lines about the model's layout and cost, to print at the start of a run."""
        ...

    def checkpoint_bytes(self) -> int:
        """Return the size of a checkpoint of all ranks in bytes, including optimizer states."""
        ...

    def peak_flops(self) -> float | None:
        """Return the peak FLOP/s of this rank's device in the plan's number format, or None if unknown."""
        ...

    def times(self, book: TimeBook, start_step: int) -> Sequence[str]:
        """Return the time report for the end of a run. All ranks call it."""
        ...

    def measures(self) -> Measures:
        """Return the measurements of this rank for the monitoring thread, and the channel for its reports."""
        ...


class OtherReplicas(Protocol):
    """The other replicas that train the same model, in separate process groups."""

    @property
    def over(self) -> Mapping[str, Any] | None:
        """Result of replicas that finished without this one: `where` (checkpoint path), `step`, `token`; else None."""
        ...

    def rejoin(self, step: int) -> int | None:
        """Join the other replicas before the first step, if they wait.

        Returns the step to continue from, or None if a stop was requested while waiting.
        """
        ...

    def end(self) -> None:
        """Notify the other replicas that this one has saved its last step."""
        ...


class Engine(Protocol):
    """Model and optimizer of one rank. The constructor joins the ranks; `build` makes the model.

    All ranks call every method and get the same result unless documented otherwise.
    """

    rank: int
    plan: Plan
    #: Kind and number of the device, as torch writes it: "cpu", "cuda:0".
    device: str
    #: Group of all ranks, with the collectives of training.
    ranks: RankGroup
    #: Reports the current activity of this rank to ranks that wait for it.
    pulse: Heartbeat
    meter: Meter
    #: If set on any rank, all ranks stop after the next step, whose result has `wants_stop`.
    wants_stop: bool
    #: If set on any rank, all ranks read rank 0's pending user requests after the next step.
    asks: bool

    def build(self) -> None:
        """Build the model and the optimizer. The attributes below exist afterwards.

        Raises:
            WeftError: if the plan cannot be applied to the model.
        """
        ...

    @property
    def state(self) -> EngineState:
        """Interface to save and load model and optimizer."""
        ...

    @property
    def reports(self) -> EngineReports:
        """Reports for users and for monitoring."""
        ...

    @property
    def replicas(self) -> OtherReplicas | None:
        """The other replicas, if each replica is a separate process group, else None."""
        ...

    @property
    def batches(self) -> Batches:
        """The training batches of this rank."""
        ...

    @property
    def prefetches(self) -> bool:
        """True if `step` uses the batches of the step after it."""
        ...

    def step(
        self, batches: Sequence[Any], number: int, lr_factor: float, following: Sequence[Any] | None = None
    ) -> StepResult | LateResult:
        """Take one optimizer step on this rank's microbatches.

        A `LateResult` must be read after the next call to `step`, or before any other call to the engine.

        Args:
            batches: the microbatches in order.
            number: steps done before this one. All random seeds derive from it.
            lr_factor: factor of each group's peak learning rate.
            following: microbatches of the next step, or None if they are unknown. They change no result.
        """
        ...

    def trace(self, kind: TraceKind, number: int) -> Mapping[str, object] | None:
        """Return an event with the module, rank and samples at which a step went wrong, or None if they are unknown.

        Args:
            kind: the value that is wrong.
            number: index of the step, from 1: the last step, or the step before it if results are late.
        """
        ...

    @property
    def evaluates(self) -> bool:
        """True if the task has an evaluation set."""
        ...

    def evaluate(self) -> Evaluation:
        """Compute loss and metrics over the task's evaluation set."""
        ...

    def sample(self, step: int) -> str:
        """Return the task's sample output of the current weights on the first rank. All ranks call it."""
        ...

    def background_ranks(self) -> RankGroup:
        """Return a group of all ranks for background threads. It does not use the collectives of training."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Wait for all ranks, release this rank's resources, and leave the process group.

        With `failed`, only release the resources: after an error, other ranks may be in a collective.
        """
        ...
