"""One run's private steps: resolved settings, key, noise on gradients, and the ledger."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.comm.collectives import all_reduce, barrier
from weft.comm.mesh import Mesh
from weft.config.privacy.largest_draw import most_drawn
from weft.errors import CheckpointError, ConfigError, ModelError, PlanError, WeftWarning
from weft.parallel.state.flat_slices import PlacedPart
from weft.parallel.state.gradients import data_parallel
from weft.parallel.tables.model import table_weights
from weft.privacy.audit import Canaries, choose_canaries
from weft.privacy.draws import drawn, some_of
from weft.privacy.keys import create_key, read_key
from weft.privacy.ledger import PrivacyLedger
from weft.privacy.noise import add_noise
from weft.privacy.rules import check_model, check_plan
from weft.privacy.settings import Privacy


class BudgetSpent(PlanError):
    """Raised instead of a step that would exceed the privacy budget."""


class PrivateUpdate:
    """Noise and account of the private steps of one model.

    Args:
        privacy: the settings.
        mesh: the ranks. The first one creates the key.
        max_grad_norm: clipping of the full gradient, which must be off.

    Raises:
        PlanError: for a plan under which private steps are not tested, and if no noise reaches the budget.
        ConfigError: if the key cannot be read.
    """

    def __init__(self, privacy: Privacy, mesh: Mesh, *, max_grad_norm: float | None = None):
        if max_grad_norm:
            raise PlanError(
                f"max_grad_norm={max_grad_norm}: with privacy, the gradient of each sample is clipped to privacy.clip. "
                "Leave max_grad_norm out."
            )
        check_plan(mesh.plan)
        self.privacy = privacy.resolved()
        self.ledger = PrivacyLedger(self.privacy)
        self._key = _shared_key(privacy.key, mesh)
        self._places: dict[nn.Parameter, PlacedPart] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._is_checked = self._warned = False
        self._drawn: set[int] = set()

    @property
    def most_drawn(self) -> int:
        """Number of units that no step draws more of, except with probability 1e-6 in a run."""
        privacy = self.privacy
        return min(privacy.records, most_drawn(privacy.batch, privacy.rate, privacy.steps))

    def draw(self, step: int) -> np.ndarray:
        """Return the units of a step, int64, in ascending order. step: steps done before."""
        self._drawn.add(step)
        found = drawn(self._key, step, self.privacy.records, self.privacy.rate)
        if not self.privacy.canaries:
            return found
        return found[~np.isin(found, self.canaries().left_out)]

    def draw_records(self, step: int, units: Sequence[np.ndarray] | None) -> list[list[int]]:
        """Return the records of each drawn unit of a step. units: records by unit, or None if each is a unit."""
        found = self.draw(step).tolist()
        if units is None:
            return [[record] for record in found]
        most = self.privacy.unit_records
        return [some_of(self._key, step, unit, units[unit], most).tolist() for unit in found]

    def canaries(self) -> Canaries:
        """Return the records whose presence a coin decides."""
        return choose_canaries(self._key, self.privacy.records, self.privacy.canaries)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, loss_fn: Any) -> None:
        """Check a model and its loss, and find the positions of the optimizer's parameters. Call it before `adopt`.

        Raises:
            ModelError: if the model or the loss mixes samples.
        """
        if hasattr(loss_fn, "compare"):
            raise ModelError(
                f"privacy: {type(loss_fn).__name__} compares samples, so no sample has a loss of its own. Use a loss "
                "that is a sum over samples, such as cross-entropy."
            )
        if table_weights(model):
            raise ModelError(
                "privacy: rows of embedding tables on data ranks are not clipped by sample. Leave layout out."
            )
        check_model(model, data_parallel(model).axes, self.privacy.passes, mesh.plan)
        places = getattr(optimizer, "places", None)
        if not isinstance(places, dict):
            places = {}
            optimizer.places = places  # pyright: ignore[reportAttributeAccessIssue] - the engine fills it
        self._places, self._optimizer = places, optimizer

    @property
    def is_last(self) -> bool:
        """True if the budget allows exactly one more step."""
        return self.ledger.affordable == 1

    def begin_step(self) -> None:
        """Raise BudgetSpent if one more step would exceed the budget."""
        if self.ledger.is_spent:
            raise BudgetSpent(
                f"privacy.epsilon={self.privacy.epsilon:g}: it is spent after {self.ledger.count} steps. Use the "
                "weights of this step, or start a run with a larger epsilon."
            )
        if self.ledger.count not in self._drawn and not self._warned:
            self._warned = True
            warnings.warn(
                "privacy: this step's batch was not drawn by run.private_batches, and epsilon counts each step as a "
                "Poisson draw. Loop over run.private_batches(dataset, step).",
                WeftWarning,
                stacklevel=3,
            )
        self._drawn = {one for one in self._drawn if one > self.ledger.count}

    def add_noise(self, factor: float) -> None:
        """Add the step's noise to the sums of clipped gradients, and count the step.

        factor: factor of the sums.
        """
        self._check_places()
        noise = self.privacy.noise
        assert noise is not None
        add_noise(self._places.items(), self._key, self.ledger.count, noise * self.privacy.clip * factor)
        self.ledger.add()

    def _check_places(self) -> None:
        if self._is_checked:
            return
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.numel() and param.requires_grad and param not in self._places:
                    raise ModelError(
                        f"privacy: the optimizer has a parameter of shape {tuple(param.shape)} whose place in the "
                        "model is unknown, so it would get no noise. Build the optimizer in "
                        "run.train_step, from its class."
                    )
        self._is_checked = True


def restore_account(update: PrivateUpdate | None, saved: Any) -> None:
    """Continue a checkpoint's account.

    Raises:
        CheckpointError: if only one of run and checkpoint is private, or the account is of other records.
    """
    if update is not None:
        update.ledger.restore(saved)
    elif saved:
        raise CheckpointError(
            "privacy: the checkpoint's steps were private, and a further step without privacy would void their bound. "
            "Set privacy.epsilon, or start a new run from the exported weights."
        )


def _shared_key(key: str, mesh: Mesh) -> bytes:
    """Return the key, which the first rank creates. Raises ConfigError if ranks read different keys."""
    if mesh.rank == 0:
        create_key(key)
    if mesh.world_size > 1:
        barrier(mesh.world)
    found = read_key(key)
    digest = int.from_bytes(hashlib.blake2b(found, digest_size=4, person=b"weft compare").digest(), "little")
    if mesh.world_size > 1:
        bounds = torch.tensor([digest, -digest], dtype=torch.float64, device=mesh.device)
        high, low = all_reduce(bounds, mesh.world, op="max").tolist()
        if high != -low:
            raise ConfigError(f"privacy.key={key}: ranks read different keys. Name a file that all ranks read.")
    return found
