"""Which of a model's legal plans are tried, and in what order, when some of them the model itself refuses.

Rules know shapes, not modules: only laying a model out shows that it has no layers for tensor parallelism or that its
tokens meet outside of attention. Each technique is tried first in the plan that asks for least besides; what is refused
there takes all plans that ask for at least as much out of the choice, so that the choice covers what can run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.spec.plan import PLAN_FIELDS, Plan
from weft.testing.matrix import covering, row_of, sample

#: What is tried by itself before anything else.
_PROBED = frozenset(name for name, field in PLAN_FIELDS.items() if field.probed)


def techniques_of(plan: Plan) -> frozenset[str]:
    """What a plan asks of a model, as words: "tp", "cp_mode=ring", "zero=3", "recompute=full"."""
    asked = {name: field for name, field in PLAN_FIELDS.items() if field.asks and getattr(plan, name) != field.default}
    return frozenset(name if field.asks == "use" else f"{name}={getattr(plan, name)}" for name, field in asked.items())


def covering_plans(plans: Sequence[Plan]) -> list[Plan]:
    """Choose few of the plans, in which each layout and all pairs of settings occur."""
    return [plans[index] for index in covering([row_of(plan) for plan in plans])]


@dataclass
class Sweep:
    """Plans to try, one after the other; `refuse` says that the model cannot be laid out as the last one asks.

    every: all legal plans. choose: which of the allowed ones are worth trying. limit: so many that are not refused,
    drawn by `seed`. refused: what was refused, each with the reason that was given.
    """

    every: Sequence[Plan]
    choose: Callable[[Sequence[Plan]], list[Plan]] = covering_plans
    limit: int | None = None
    seed: int = 0
    refused: dict[frozenset[str], str] = field(default_factory=dict)
    num_refused: int = 0

    def refuse(self, plan: Plan, reason: str) -> None:
        """Leave out all plans that ask for at least what this one asks for."""
        self.num_refused += 1
        if asked := techniques_of(plan):
            self.refused.setdefault(asked, reason)

    def is_refused(self, plan: Plan) -> bool:
        """Return whether the plan asks for all of something that was refused."""
        asked = techniques_of(plan)
        return any(other <= asked for other in self.refused)

    def reasons(self) -> dict[str, str]:
        """Return why plans were refused, by what they ask for: only what asks for no more than another one."""
        least = [asked for asked in self.refused if not any(other < asked for other in self.refused)]
        return {" ".join(sorted(asked)): self.refused[asked] for asked in least}

    def allowed(self) -> list[Plan]:
        """Return the legal plans that ask for nothing that was refused."""
        return [plan for plan in self.every if not self.is_refused(plan)]

    def plans(self) -> Iterator[Plan]:
        """Yield each technique by itself, then the chosen plans; say what was refused before asking for the next."""
        done: dict[Plan, None] = {}
        for plan in self._probes():
            done[plan] = None
            yield plan
        left = self.limit
        while rest := self._rest(done):
            for plan in rest:
                if left == 0:
                    return
                if not self.is_refused(plan):
                    done[plan] = None
                    yield plan
                    left = left if left is None or self.is_refused(plan) else left - 1

    def part(self, number: int, count: int) -> Iterator[Plan]:
        """Yield each technique by itself, then every `count`-th of the plans that are chosen after that.

        A model refuses the same in every part, so all parts together are the whole choice.
        """
        done = set[Plan]()
        for plan in self._probes():
            done.add(plan)
            yield plan
        chosen = [plan for plan in self.choose(self.allowed()) if plan not in done]
        chosen = chosen if self.limit is None else sample(chosen, self.limit, self.seed)
        for plan in chosen[number - 1 :: count]:
            if not self.is_refused(plan):
                yield plan

    def _rest(self, done: Mapping[Plan, None]) -> list[Plan]:
        rest = [plan for plan in self.choose(self.allowed()) if plan not in done]
        if self.limit is not None:
            random.Random(self.seed).shuffle(rest)
        return rest

    def _probes(self) -> Iterator[Plan]:
        """For each technique, the plan that asks for least besides."""
        asked = {plan: techniques_of(plan) for plan in self.every}
        seen: set[str] = set()
        for plan in sorted(self.every, key=lambda plan: len(asked[plan])):
            new = {word for word in asked[plan] if word.partition("=")[0] in _PROBED and word != "zero=1"} - seen
            if new and not self.is_refused(plan):
                seen |= new
                yield plan
