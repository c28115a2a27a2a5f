"""What a task may ask of its model outside of the loss: forwards without gradients, and sums over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from weft.spec.plan import Plan

#: Which weights compute: the model's, the model's without its adapter, or those of the second model.
Which = Literal["model", "base", "second"]


class Forwards(Protocol):
    """The model on all its ranks. All ranks call the same methods in the same order."""

    @property
    def plan(self) -> Plan:
        """Return what the model lies on its ranks by."""
        ...

    @property
    def device(self) -> torch.device:
        """Return where this rank computes."""
        ...

    @property
    def rank(self) -> int:
        """Return this rank's number among all of the run's world."""
        ...

    @property
    def size(self) -> int:
        """Return how many ranks the world has."""
        ...

    def wait(self) -> None:
        """Wait until all ranks have come here."""
        ...

    @property
    def is_counted(self) -> bool:
        """Whether this rank's losses count: of the ranks that share a sequence, on the first one alone."""
        ...

    @property
    def data_rank(self) -> int:
        """Return this rank's place among those that read different samples."""
        ...

    @property
    def data_size(self) -> int:
        """Return how many ranks read different samples."""
        ...

    def rows(self, batches: Sequence[Any], each: Callable[[Any, Any], Tensor], *, of: Which = "model") -> list[Tensor]:
        """Return each(output, batch) of some batches in evaluation mode, one number for each row of labels.

        Numbers of the parts of a sequence are added up. Where this rank has no output, as before the last stage of a
        pipeline, they are 0.

        Args:
            batches: as many on each rank.
            each: numbers of the rows, (R,), from this rank's part of the sequences.
            of: whose weights compute.
        """
        ...

    def second(self, call: Callable[[Any], Any]) -> Any:
        """Return call(second model) without gradients, for a batch that the step has cut for this rank already."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """Add up what `rows` gave on ranks with different samples; of the same shape and equal on all ranks."""
        ...

    def along_sequence(self, values: Tensor) -> Tensor:
        """Add up numbers of the parts of a sequence, with gradients."""
        ...

    def on_first(self, act: Callable[[], Any]) -> Any:
        """Return the JSON value that the first rank's `act` returns, on all ranks."""
        ...
