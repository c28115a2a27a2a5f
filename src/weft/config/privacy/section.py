"""Sections [privacy]: of a run's config, and of the file of a federated run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.config.sections import Count, NonNegative, PositiveFloat, Section


class BudgetSection(Section):
    """Differential privacy: noise, and the budget that it is accounted against. Off unless `epsilon` or `noise` is set.

    In the file of a federated run the records are clients, and the steps are rounds.
    """

    epsilon: NonNegative = 0.0
    """Privacy budget of the run's steps. The run stops before a step that would exceed it. 0: no budget."""
    delta: NonNegative = 0.0
    """Probability with which the bound by epsilon may fail; less than 1 / number of records."""
    clip: PositiveFloat = 1.0
    """Largest norm of a sample's gradient. It replaces optimizer.max_grad_norm."""
    noise: NonNegative = 0.0
    """Standard deviation of the noise divided by `clip`; 0: the least that epsilon allows."""
    accountant: Literal["prv", "pld"] = "prv"
    """prv: Opacus; pld: dp-accounting."""
    key: str = ""
    """File with the secret key of draws and noise, which is created with mode 0600; "": privacy.key in the run folder.
    "test:N" is a known key, which protects nothing."""

    @property
    def is_on(self) -> bool:
        """True if the run is private."""
        return self.epsilon > 0 or self.noise > 0


class PrivacySection(BudgetSection):
    """Differential privacy of the training records: docs/how-to/privacy.md. Off unless `epsilon` or `noise` is set."""

    unit: Annotated[str, Field(min_length=1)] = "sample"
    """Unit of protection, of which train.global_batch is the expected number in a step. sample: a record; document: all
    sequences of a document of token files; or a column of the task's samples, such as user: all records with one value
    in it."""
    unit_records: Count = 0
    """Most records of a unit in a step, chosen at random; 0: all. Limits the memory of units with many records."""
    passes: Literal[0, 1, 2] = 0
    """Passes of a microbatch; 0: one if the plan allows it and the factors of the largest draw fit into half of the
    free memory, else two, which take less."""
    canaries: Count = 0
    """Records whose presence a coin decides, for `weft privacy audit`: about half of them are never drawn."""
