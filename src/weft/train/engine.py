"""The seam for what computes: an engine holds the model of one rank, and trains, evaluates, saves and loads it.

The loop, the run folder, checkpoints and the display know an engine only by this protocol and never import torch.
The torch engine (weft/engines/torch_engine.py) is the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from weft.checkpoint import Checkpoint, SavedPiece, Together
from weft.env import RankEnv
from weft.monitor import Meter
from weft.monitor.time_book import TimeBook
from weft.pulse import Pulse
from weft.spec import RunConfig
from weft.spec.plan import Plan
from weft.train.run import RunFolder
from weft.train.task import Batches, Task

if TYPE_CHECKING:
    from torch.distributed import Store

#: Arrays of a checkpoint have names that begin with one of these and a slash.
GROUPS = ("model", "optimizer")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, equal on all ranks.

    loss: mean over the `count` that the task counts, before the update. grad_norm: before clipping. skipped: why the
    weights were left as they were, or None. wants_stop: some rank asked to stop.
    """

    loss: float
    grad_norm: float
    count: int
    loss_scale: float | None = None
    skipped: str | None = None
    wants_stop: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """loss: mean over the `count` that the task counts. metrics: the task's own by name; None: unknown."""

    loss: float
    count: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine is made for.

    place: this process among the ranks; None is a single rank. store: where the ranks have met already. tell: shows
    people a line, of a rank that waits for another one.
    """

    folder: RunFolder
    config: RunConfig
    task: Task
    plan: Plan
    place: RankEnv | None
    tell: Callable[[str], None]
    store: Store | None = None


class Engine(Protocol):
    """One rank's model and optimizer. Making one from a `Job` joins the ranks; `build` makes the model.

    All ranks call every method, and each finds the same answer unless it says otherwise.
    """

    rank: int
    plan: Plan
    #: Kind and number of the device, as torch writes it: "cpu", "cuda:0".
    device: str
    #: Where this rank stands, for those who wait for it.
    pulse: Pulse
    meter: Meter
    #: Set: the ranks stop together after the next step, whose result says so.
    wants_stop: bool

    def build(self) -> None:
        """Make model and optimizer. Raises a WeftError for what cannot be laid out so."""
        ...

    @property
    def batches(self) -> Batches:
        """This rank's training batches."""
        ...

    def step(self, batches: Sequence[Any], number: int, lr_factor: float) -> StepResult:
        """One optimizer step on this rank's microbatches.

        number: steps done before, from which all chance is derived. lr_factor: of each peak learning rate.
        """
        ...

    @property
    def evaluates(self) -> bool:
        """Whether the task has an evaluation set."""
        ...

    def evaluate(self) -> Evaluation:
        """Loss and metrics over the task's evaluation set."""
        ...

    def save(self, *, aside: bool = False) -> Iterable[SavedPiece]:
        """What this rank writes of weights and optimizer states, to be written before the next step.

        aside: as copies in host memory, which last until the next such call. CheckpointError where they do not fit.
        Paths are "model/<name>" and "optimizer/<name>"; pieces of all ranks together are all of it, each element once.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps beside the arrays: JSON values by name."""
        ...

    def load(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Take what `save` and `state` gave under any plan: this rank reads of the checkpoint what it holds.

        Returns lines that say what is left out, since it fits another plan only.
        """
        ...

    def on_first(self, act: Callable[[], Any]) -> Any:
        """The JSON value that the first rank's `act` returns, on all ranks. What it raises, all raise."""
        ...

    def gather(self, record: bytes) -> list[bytes]:
        """The bytes of every rank in their order, on the first rank; others may get none."""
        ...

    def talk(self) -> Together:
        """The ranks as a thread beside training asks them, which leaves the collectives of training alone."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Part from the other ranks. failed: after an error, when they may never come."""
        ...

    # --- what people are told ---

    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries that compute, by name."""
        ...

    def lines(self) -> Sequence[str]:
        """How the model is laid out and what that costs, for the opening of a run."""
        ...

    def checkpoint_bytes(self) -> int:
        """Bytes of all ranks' pieces that `save` will give, optimizer states included."""
        ...

    def peak_flops(self) -> float | None:
        """Peak FLOP/s of this rank's device at the plan's number format; None where it is not known."""
        ...

    def report(self, book: TimeBook, start_step: int) -> Sequence[str]:
        """Lines that say where the time went, for the end of a run."""
        ...


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from whole numbers, the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
