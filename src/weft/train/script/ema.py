"""An exponential moving average of the weights, under every plan: each rank averages the part that it trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from weft.errors import ModelError
from weft.parallel import data_parallel
from weft.parallel.local_tensors import StateSource, Stretch, flat_of
from weft.private_torch import foreach_lerp_


class Ema:
    """average = decay * average + (1 - decay) * weights, of all trained weights, in the master's format.

    The first update takes the weights as they are, as torch's AveragedModel does. It costs as much memory as the
    masters on this rank, on the same device.

    Raises:
        ModelError: for a decay that is not from 0 up to 1.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999):
        if not 0.0 <= decay < 1.0:
            raise ModelError(
                f"decay={decay}: the share of the average that an update keeps must be at least 0 and "
                "below 1. Use 0.999."
            )
        self.decay = decay
        self.num_updates = 0
        self._engine = data_parallel(model)
        self._is_swapped = False
        self._average = {name: weight.clone() for name, weight in self._engine.held_weights().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages after each optimizer step; no collective.

        Raises:
            ModelError: inside of `swapped`.
        """
        if self._is_swapped:
            raise ModelError("ema.update(): the averages are in the model now. Call it outside of ema.swapped().")
        weights = self._engine.held_weights()
        if self.num_updates == 0:
            self._average = {name: weight.clone() for name, weight in weights.items()}
        else:
            averages, live = self._paired(weights)
            if averages:
                foreach_lerp_(averages, live, 1.0 - self.decay)
        self.num_updates += 1

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the model the averages while inside, in place, and the averages the weights. All ranks call it.

        For evaluation and export; a step inside would train the averages. Under zero=1 and 2 it gathers the weights.

        Raises:
            ModelError: inside of another `swapped`.
        """
        if self._is_swapped:
            raise ModelError("ema.swapped(): the averages are in the model already. Leave the block around it first.")
        self._swap()
        self._is_swapped = True
        try:
            yield
        finally:
            self._is_swapped = False
            self._swap()

    def stretches(self) -> Iterator[Stretch]:
        """Yield what this rank holds of the averages, for checkpoints; no collective.

        Raises:
            ModelError: inside of `swapped`.
        """
        if self._is_swapped:
            raise ModelError("ema: the averages are in the model now. Save and load outside of ema.swapped().")
        averages, weights = self._paired(self._engine.held_weights())
        by_memory = {one.data_ptr(): average for average, one in zip(averages, weights, strict=True) if one.numel()}
        for one in self._engine.stretches():
            if one.flat.numel() and one.flat.data_ptr() in by_memory:
                yield replace(one, flat=flat_of(by_memory[one.flat.data_ptr()]))

    def restore(self, source: StateSource, num_updates: int) -> None:
        """Take the averages that any plan saved."""
        for one in self.stretches():
            one.fill(source)
        self.num_updates = num_updates

    @torch.no_grad()
    def _swap(self) -> None:
        averages, live = self._paired(self._engine.held_weights())
        for average, weight in zip(averages, live, strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)
        self._engine.publish()

    def _paired(self, weights: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Averages, and this rank's weights in the same order."""
        own = {name: average.shape for name, average in self._average.items()}
        if own != {name: weight.shape for name, weight in weights.items()}:
            if self.num_updates:
                raise ModelError(
                    "ema: an optimizer was made after the ema and divided the weights again. Make the "
                    "ema after the last optimizer."
                )
            self._average = {name: weight.clone() for name, weight in weights.items()}
        return [self._average[name] for name in weights], list(weights.values())
