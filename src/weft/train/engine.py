"""The interface between the training loop and what computes: `Engine`, its inputs and its results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import Checkpoint
from weft.checkpoint.save import SavedSlice
from weft.comm.heartbeat import Heartbeat
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.env import RankEnv
from weft.monitor.metrics import LocalReports, ReportChannel
from weft.monitor.step_times import Meter, TimeBook
from weft.train.data_share import Batches
from weft.train.folder import RunFolder
from weft.train.tasks.base import Task

if TYPE_CHECKING:
    from weft.private_torch import Store

#: The value of a step that is wrong: not finite, or far above its usual range.
TraceKind = Literal["loss", "gradient", "spike"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one step, equal on all ranks.

    Attributes:
        loss: mean before the update over the `count` units that the task counts.
        grad_norm: gradient norm before clipping.
        skipped: reason why the weights were not updated, or None.
        update_ratio: norm of the update divided by the norm of the weights, if it was measured.
        share: fraction of the global batch that `count` covers.
        goes_to: steps done from which training continues, if other replicas had reached another step.
        is_over: the other replicas have ended.
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
        loss: mean over the `count` units that the task counts.
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
        traffic: bytes that this rank sent since it started, by series. The monitoring thread calls it.
        memory: device memory in bytes by series, read once between two steps.
        gpu: UUID of the rank's GPU; None on other devices.
    """

    board: ReportChannel = field(default_factory=LocalReports)
    traffic: Callable[[], Mapping[str, float]] = dict
    memory: Callable[[], Mapping[str, float]] = dict
    gpu: str | None = None


# Inputs of an engine, and its seeds.


@dataclass(frozen=True, slots=True)
class ReplicaWorld:
    """One of several replicas with separate worlds.

    Attributes:
        meet_at: HOST:PORT of the rendezvous server.
    """

    replica: int
    meet_at: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class EngineJob:
    """Inputs of an engine.

    Attributes:
        place: rank of this process; None for a single rank.
        tell: shows a line to users when a rank waits for another one.
        store: store at which the ranks have already met.
        on_hang: receives the event of a hang on ranks that may write events.
        world: replica of these ranks, if each replica is a separate world.
        store_key: hex digits of the secret that signs the ranks' messages in the store. If empty, the ranks agree on
            one after joining.
    """

    folder: RunFolder
    config: RunConfig
    task: Task
    plan: Plan
    place: RankEnv | None
    tell: Callable[[str], None]
    store: Store | None = None
    on_hang: Callable[[Mapping[str, object]], None] = lambda event: None
    world: ReplicaWorld | None = None
    store_key: str = field(default="", repr=False)


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed derived from integers, the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# The engine interface: an engine holds the model of one rank, and trains, evaluates, saves and loads it.

#: First components of the array names in a checkpoint.
GROUPS = ("model", "optimizer")


class EngineState(Protocol):
    """Model and optimizer of an engine, for checkpoints. All ranks call every method."""

    def slices(self, *, aside: bool = False) -> Iterable[SavedSlice]:
        """Return this rank's slices of weights and optimizer states, to be written before the next step.

        Paths are "model/<name>" and "optimizer/<name>". The slices of all ranks together hold each element once.

        Args:
            aside: return copies in host memory, valid until the next such call.

        Raises:
            CheckpointError: if the copies do not fit.
        """
        ...

    def values(self) -> Mapping[str, Any]:
        """Return the part of a checkpoint that is not arrays, as JSON values by name."""
        ...

    def load(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Load a checkpoint that was saved under any plan. This rank reads only the elements that it stores.

        Returns lines about parts that are left out because they fit only another plan.
        """
        ...


class EngineReports(Protocol):
    """Reports of an engine for users and for the monitoring thread."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the engine's libraries by name."""
        ...

    def opening(self) -> Sequence[str]:
        """Return the layout of the model and its costs, for the opening of a run."""
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
    """Replicas of other worlds, which train the same model."""

    @property
    def over(self) -> Mapping[str, Any] | None:
        """The end of other worlds that finished without this one: `where` (path), `step` and `token`; else None."""
        ...

    def rejoin(self, step: int) -> int | None:
        """Join the others if they wait, before the first step.

        Returns the step to continue from, or None if a stop was requested meanwhile.
        """
        ...

    def end(self) -> None:
        """Send the others the message that this replica has saved its last step."""
        ...


class Engine(Protocol):
    """Model and optimizer of one rank. Constructing one from an `EngineJob` joins the ranks; `build` makes the model.

    All ranks call every method and get the same result unless documented otherwise.
    """

    rank: int
    plan: Plan
    #: Kind and number of the device, as torch writes it: "cpu", "cuda:0".
    device: str
    #: All ranks, over the collectives of training.
    ranks: RankGroup
    #: Reports the current activity of this rank to ranks that wait for it.
    pulse: Heartbeat
    meter: Meter
    #: If set, all ranks stop after the next step. Its result has `wants_stop`.
    wants_stop: bool
    #: If set, all ranks read the requests of rank 0 after the next step.
    asks: bool

    def build(self) -> None:
        """Make model and optimizer. The attributes below exist afterwards.

        Raises:
            WeftError: if the plan cannot be applied to the model.
        """
        ...

    @property
    def state(self) -> EngineState:
        """Model and optimizer for checkpoints."""
        ...

    @property
    def reports(self) -> EngineReports:
        """Reports for users."""
        ...

    @property
    def replicas(self) -> OtherReplicas | None:
        """The other replicas, if each is a separate world."""
        ...

    @property
    def batches(self) -> Batches:
        """The training batches of this rank."""
        ...

    def step(self, batches: Sequence[Any], number: int, lr_factor: float) -> StepResult | LateResult:
        """Take one optimizer step on this rank's microbatches.

        A `LateResult` must be read after the next call of `step`, or before any other call of the engine.

        Args:
            batches: the microbatches in order.
            number: steps done before. All random seeds derive from it.
            lr_factor: factor on each peak learning rate.
        """
        ...

    def trace(self, kind: TraceKind, number: int) -> Mapping[str, object] | None:
        """Return an event with the module, rank and samples at which a step went wrong, or None if they are unknown.

        Args:
            kind: the value that is wrong.
            number: number of the step from 1: the last one, or the one before it if results are late.
        """
        ...

    @property
    def evaluates(self) -> bool:
        """True if the task has an evaluation set."""
        ...

    def evaluate(self) -> Evaluation:
        """Compute loss and metrics over the task's evaluation set."""
        ...

    def background_ranks(self) -> RankGroup:
        """Return a rank group for background threads, which does not use the collectives of training."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Leave the other ranks. With `failed`, do not wait for them after an error."""
        ...
