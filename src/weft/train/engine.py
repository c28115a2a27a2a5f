"""What an engine gives of a step and of an evaluation."""

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
from weft.train.folder import RunFolder
from weft.train.tasks.base import Task
from weft.train.tasks.data_share import Batches

if TYPE_CHECKING:
    from weft.private_torch import Store

#: Which of a step's numbers is not as it should be: not finite, or far above what is usual.
TraceKind = Literal["loss", "gradient", "spike"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, equal on all ranks.

    loss: mean over the `count` that the task counts, before the update. grad_norm: before clipping. skipped: why the
    weights were left as they were, or None. wants_stop: some rank asked to stop. update_ratio: norm of the update over
    the norm of the weights, where it was measured. share: of the global batch that is counted here. goes_to: steps done
    from which training goes on, where replicas that this one met were elsewhere. is_over: other replicas have ended.
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

    The loop reads it when the next step is launched, so that the device always has work. All ranks read it there.

    Args:
        read: waits for the numbers.
    """

    def __init__(self, read: Callable[[], StepResult]):
        self.read = read


@dataclass(frozen=True, slots=True)
class Evaluation:
    """loss: mean over the `count` that the task counts. metrics: the task's own by name; None: unknown."""

    loss: float
    count: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)


# What an engine lets the thread of figures read, and where that thread reports.


def _nothing() -> Mapping[str, float]:
    return {}


@dataclass(frozen=True, slots=True)
class Measures:
    """Figures of one rank that its engine alone knows.

    board: where the ranks leave their reports. traffic: bytes that this rank sent since it started, by series; read by
    another thread than training's. memory: bytes of its device by series, asked once, between two steps. gpu: the
    UUID of its GPU, None on other devices.
    """

    board: ReportChannel = field(default_factory=LocalReports)
    traffic: Callable[[], Mapping[str, float]] = _nothing
    memory: Callable[[], Mapping[str, float]] = _nothing
    gpu: str | None = None


# What an engine is made for, and the seeds that it draws from.


@dataclass(frozen=True, slots=True)
class ReplicaWorld:
    """One replica of several, each a world of its own.

    replica: which one. meet_at: HOST:PORT where they leave word. key: that the place there must have.
    """

    replica: int
    meet_at: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class EngineJob:
    """What an engine is made for.

    place: this process among the ranks; None is a single rank. store: where the ranks have met already. tell: shows
    people a line, of a rank that waits for another one. on_hang: takes an event of it, where this rank may write one.
    world: which replica of the plan's these ranks are, where each is a world of its own. store_key: hex digits of the
    secret that signs the ranks' messages in their store; "": they agree on one when they have joined.
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
    """Return a 63-bit seed from whole numbers, the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# The seam for what computes: an engine holds the model of one rank, and trains, evaluates, saves and loads it.

#: Arrays of a checkpoint have names that begin with one of these and a slash.
GROUPS = ("model", "optimizer")


class Engine(Protocol):
    """One rank's model and optimizer. Making one from an `EngineJob` joins the ranks; `build` makes the model.

    All ranks call every method, and each finds the same answer unless it says otherwise.
    """

    rank: int
    plan: Plan
    #: Kind and number of the device, as torch writes it: "cpu", "cuda:0".
    device: str
    #: Where this rank stands, for those who wait for it.
    pulse: Heartbeat
    meter: Meter
    #: Set: the ranks stop together after the next step, whose result says so.
    wants_stop: bool
    #: Set: all ranks look together, after the next step, what the first one is asked for.
    asks: bool

    def build(self) -> None:
        """Make model and optimizer.

        Raises:
            WeftError: for what cannot be laid out so.
        """
        ...

    def rejoin(self, step: int) -> int | None:
        """Meet, before the first step, ranks of other worlds that are waited for, where there are any.

        Returns the step to go on from; None where this rank was asked to stop meanwhile.

        Args:
            step: steps done.
        """
        ...

    @property
    def over(self) -> Mapping[str, Any] | None:
        """Where other worlds have ended without this one: `where` their model is, its `step` and `token`."""
        ...

    def end(self) -> None:
        """Tell other worlds, where there are any, that this one has come to its last step, which is saved."""
        ...

    @property
    def batches(self) -> Batches:
        """The training batches of this rank."""
        ...

    def step(self, batches: Sequence[Any], number: int, lr_factor: float) -> StepResult | LateResult:
        """Take one optimizer step on this rank's microbatches.

        A `LateResult` is read after the next step was called, or before anything else is asked of the engine.

        Args:
            batches: the microbatches, in their order.
            number: steps done before, from which all chance is derived.
            lr_factor: of each peak learning rate.
        """
        ...

    def trace(self, kind: TraceKind, number: int) -> Mapping[str, object] | None:
        """Return an event that says where a step went wrong: module, rank and samples; None where nothing is known.

        Args:
            kind: which of its numbers is not as it should be.
            number: of the step, from 1: the last one, or where results are late the one before it.
        """
        ...

    @property
    def evaluates(self) -> bool:
        """Whether the task has an evaluation set."""
        ...

    def evaluate(self) -> Evaluation:
        """Compute loss and metrics over the task's evaluation set."""
        ...

    def save(self, *, aside: bool = False) -> Iterable[SavedSlice]:
        """Return what this rank writes of weights and optimizer states, to be written before the next step.

        aside: as copies in host memory, which last until the next such call.
        Paths are "model/<name>" and "optimizer/<name>"; pieces of all ranks together are all of it, each element once.

        Raises:
            CheckpointError: where copies do not fit.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps beside the arrays: JSON values by name."""
        ...

    def load(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Take what `save` and `state` gave under any plan: this rank reads of the checkpoint what it holds.

        Returns lines that say what is left out, since it fits another plan only.
        """
        ...

    def on_first(self, act: Callable[[], Any]) -> Any:
        """Return the JSON value that the first rank's `act` returns, on all ranks. What it raises, all raise."""
        ...

    def gather(self, record: bytes) -> list[bytes]:
        """Return the bytes of every rank in their order, on the first rank; others may get none."""
        ...

    def store_channel(self) -> RankGroup:
        """Return the ranks as a thread beside training asks them, which leaves the collectives of training alone."""
        ...

    def measures(self) -> Measures:
        """Return what a thread beside training may read of this rank, and where it reports."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Leave the other ranks. failed: after an error, when they may never come."""
        ...

    # --- what people are told ---

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that compute, by name."""
        ...

    def lines(self) -> Sequence[str]:
        """Return how the model is laid out and what that costs, for the opening of a run."""
        ...

    def checkpoint_bytes(self) -> int:
        """Return the bytes of all ranks' pieces that `save` will give, optimizer states included."""
        ...

    def peak_flops(self) -> float | None:
        """Return the peak FLOP/s of this rank's device at the plan's number format; None where it is not known."""
        ...

    def report(self, book: TimeBook, start_step: int) -> Sequence[str]:
        """Return the lines that say where the time went, for the end of a run."""
        ...
