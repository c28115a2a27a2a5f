"""The seam for what computes: an engine holds the model of one rank, and trains, evaluates, saves and loads it.

The loop, the run folder, checkpoints and the display know an engine only by this protocol and never import torch.
The torch engine (weft/engines/torch_engine.py) is the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from weft.checkpoint import Checkpoint, SavedPiece, Together
from weft.mesh import Pulse
from weft.monitor.times import Meter, TimeBook
from weft.spec.plan import Plan
from weft.train.engine.measures import Measures
from weft.train.engine.results import Evaluation, LateResult, StepResult, TraceKind
from weft.train.task import Batches

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
    pulse: Pulse
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

    def save(self, *, aside: bool = False) -> Iterable[SavedPiece]:
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

    def talk(self) -> Together:
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
