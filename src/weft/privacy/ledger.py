"""The account of a run's private steps, which its checkpoints contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import CheckpointError
from weft.privacy.accounting import Steps, epsilon_of
from weft.privacy.settings import Privacy


@dataclass(slots=True)
class PrivacyLedger:
    """Steps done so far, by their settings. Settings may change between runs; records, unit and delta may not.

    Attributes:
        steps: steps in order.
        is_test: True if a step used a test key.
    """

    privacy: Privacy
    steps: list[Steps] = field(default_factory=list[Steps])
    is_test: bool = False
    _last: int = -1

    @property
    def count(self) -> int:
        """Number of steps done."""
        return sum(one.count for one in self.steps)

    def add(self) -> None:
        """Count one step with the current settings."""
        assert self.privacy.noise is not None
        self.is_test = self.is_test or self.privacy.is_test
        last = self.steps[-1] if self.steps else None
        if last is not None and (last.noise, last.rate) == (self.privacy.noise, self.privacy.rate):
            self.steps[-1] = last._replace(count=last.count + 1)
        else:
            self.steps.append(Steps(self.privacy.noise, self.privacy.rate, 1))

    def epsilon(self, accountant: str | None = None, *, more: int = 0) -> float:
        """Return the epsilon spent so far, or after `more` further steps."""
        assert self.privacy.noise is not None
        after = [*self.steps, Steps(self.privacy.noise, self.privacy.rate, more)]
        return epsilon_of(after, self.privacy.delta, accountant or self.privacy.accountant)

    @property
    def affordable(self) -> int | None:
        """Number of further steps within the budget, up to `steps` in total; None without a budget."""
        budget = self.privacy.epsilon
        if budget is None:
            return None
        if self._last < 0:  # computed once, because each composition takes up to a second
            self._last = self.count + self._more_within(budget)
        return self._last - self.count

    @property
    def is_spent(self) -> bool:
        """True if one more step would exceed the budget."""
        return self.affordable == 0

    def _more_within(self, budget: float) -> int:
        """Return how many further steps stay within the budget, up to `steps` in total."""
        low, high = 0, max(0, self.privacy.steps - self.count)
        if self.epsilon(more=high) <= budget:
            return high if high else int(self.epsilon(more=1) <= budget)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(more=middle) <= budget else (low, middle)
        return low

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON values, without the key."""
        privacy = self.privacy
        return {
            "steps": [list(one) for one in self.steps], "records": privacy.records, "unit": privacy.unit,
            "delta": privacy.delta, "clip": privacy.clip, "epsilon": privacy.epsilon,
            "accountant": privacy.accountant, "is_test": self.is_test,
        }  # fmt: skip

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Continue the account of a checkpoint, so that its steps and further ones are composed.

        Raises:
            CheckpointError: if the checkpoint has no account, a damaged one, or one of other records.
        """
        if saved is None:
            raise CheckpointError(
                "privacy: the checkpoint's steps were not private, so no bound holds for its weights. Start a new run, "
                "or leave privacy out."
            )
        try:
            steps = Steps.of_json(saved["steps"])
            is_test, was = bool(saved["is_test"]), {name: saved[name] for name in ("records", "unit", "delta")}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"privacy: the checkpoint's account is damaged ({error!r}). Use another one."
            ) from error
        if any(not (one.noise > 0 and 0 < one.rate <= 1 and one.count > 0) for one in steps):
            raise CheckpointError("privacy: the checkpoint's account has impossible steps. Use another checkpoint.")
        for name, value in was.items():
            if value != getattr(self.privacy, name):
                raise CheckpointError(
                    f"privacy.{name}={getattr(self.privacy, name)}: the checkpoint's steps were accounted with "
                    f"{value}, and a bound holds for the same records, unit and delta. Use {name}={value}."
                )
        self.steps, self.is_test, self._last = steps, is_test, -1
