"""Settings of private training, and the errors of settings that promise nothing or cannot be reached (no torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from weft.config.privacy.section import BudgetSection
from weft.errors import PlanError


@dataclass(frozen=True, slots=True)
class Privacy:
    """Differential privacy of the training records: DP-SGD (Abadi et al. 2016, arXiv 1607.00133) with Poisson draws.

    Attributes:
        records: number of training records. Each is in a step with probability `batch` / `records`.
        batch: expected number of samples of a step, by which gradient sums are divided.
        steps: number of steps that the budget is for.
        delta: probability with which the bound by epsilon may fail. Less than 1 / `records`.
        epsilon: privacy budget. The run pauses before a step that would exceed it. None for no budget, if `noise` is
            set.
        clip: largest norm of a sample's gradient.
        noise: standard deviation of the noise divided by `clip`; None for the least that `epsilon` allows.
        unit: "sample": the bound is for one record. Or the name of a column: it is for all records with one value in
            it, whose mean gradient is clipped; `records` and `batch` are numbers of values then.
        unit_records: most records of a unit in a step; 0 for all. More are drawn at random.
        accountant: "prv" (Opacus) or "pld" (dp-accounting).
        key: file with the secret key of draws and noise, which the first rank creates with mode 0600, or "test:N" for a
            fixed key, which protects nothing.
        passes: 1 or 2 passes of a microbatch, or 0 for one if the plan allows it and the largest draw fits into memory.
        canaries: number of records whose presence a coin decides, for an audit. About half of them are never drawn.
    """

    records: int
    batch: int
    steps: int
    delta: float
    epsilon: float | None = None
    clip: float = 1.0
    noise: float | None = None
    unit: str = "sample"
    accountant: str = "prv"
    key: str = "privacy.key"
    passes: int = 0
    canaries: int = 0
    unit_records: int = 0

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise PlanError(problem)

    @property
    def rate(self) -> float:
        """Probability with which a record is in a step."""
        return self.batch / self.records

    @property
    def is_test(self) -> bool:
        """True if the key is public, so that nothing is protected."""
        return self.key.startswith("test:")

    def resolved(self) -> Privacy:
        """Return the settings with the noise that `epsilon` needs.

        Raises:
            PlanError: if no noise reaches `epsilon`.
            MissingExtra: if the accountant's library is not installed.
        """
        if self.noise is not None:
            return self
        from weft.privacy.accounting import noise_for

        assert self.epsilon is not None
        return replace(self, noise=noise_for(self.epsilon, self.delta, self.rate, self.steps, self.accountant))


def privacy_of(section: BudgetSection, records: int, batch: int, steps: int, key: str, **more: Any) -> Privacy:
    """Return the settings of a section [privacy].

    Args:
        records, batch, steps: as in `Privacy`.
        key: key file if the section names none.
        more: other settings of `Privacy`.

    Raises:
        PlanError: if they are impossible, such as delta >= 1 / records.
    """
    return Privacy(
        records, batch, steps, section.delta, section.epsilon or None, section.clip, section.noise or None,
        accountant=section.accountant, key=section.key or key, **more,
    )  # fmt: skip


def _problems(privacy: Privacy) -> list[str]:
    found: list[str] = []
    for name in ("records", "batch", "steps"):
        if (value := getattr(privacy, name)) < 1:
            found.append(f"privacy.{name}={value}: it is a number from 1 on. Use {name}=1000.")
    if found:
        return found
    if privacy.batch > privacy.records:
        found.append(
            f"privacy.batch={privacy.batch}: a step draws at most the {privacy.records} records. Use a batch of at "
            f"most {privacy.records}."
        )
    if not 0 < privacy.delta < 1 / privacy.records:
        found.append(
            f"privacy.delta={privacy.delta:g}: with {privacy.records} records, a delta from 1/{privacy.records} on "
            f"allows to publish a whole record. Use delta={0.1 / privacy.records:.1g}."
        )
    if privacy.epsilon is None and privacy.noise is None:
        found.append("privacy.epsilon: neither epsilon nor noise is set. Set epsilon=8, or noise=1.0.")
    for name in ("epsilon", "noise", "clip"):
        value = getattr(privacy, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            found.append(f"privacy.{name}={value:g}: it is a positive number. Use {name}=1.0.")
    return [*found, *_other_problems(privacy)]


def _other_problems(privacy: Privacy) -> list[str]:
    found: list[str] = []
    if privacy.unit_records < 0 or (privacy.unit == "sample" and privacy.unit_records):
        found.append(
            f"privacy.unit_records={privacy.unit_records}: it limits the records of a unit that has several. Use "
            "unit_records=0, or a column as unit."
        )
    if privacy.unit != "sample" and privacy.canaries:
        found.append(f"privacy.canaries={privacy.canaries}: canaries are single samples. Use unit=sample, or none.")
    for name, known, rule in _CHOICES:
        if (value := getattr(privacy, name)) not in known:
            found.append(f"privacy.{name}={value}: it is {rule}. Use {name}={known[0]}.")
    return found


_CHOICES = (("accountant", ("prv", "pld"), "prv or pld"), ("passes", (0, 1, 2), "1, 2, or 0 to choose"))
