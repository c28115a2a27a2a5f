"""Rules of private runs: values of a plan's fields under which private steps are tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.config.fields.plan_text import is_auto
from weft.config.plan import PLAN_FIELDS, Plan
from weft.config.privacy.section import PrivacySection
from weft.config.rules.config_rule import ConfigRule, plan_of, shards_tables
from weft.config.run_config import RunConfig
from weft.errors import Problem

#: The tested values of a plan's fields, and the reason for refusing others.
_TESTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "cp": ((1,), "the norm of a sample's gradient needs all its tokens on one rank"),
    "ep": ((1,), "the rows of a sample are on several ranks"),
    "precision": (("fp32", "fp64", "bf16"), "norms in fewer bits are not bounds"),
    "reduce": (("fp32",), "rounded sums may exceed the bound of their samples"),
    "compress": (("none",), "rounded sums may exceed the bound of their samples"),
    "gather": (("none",), "per-sample gradients of rounded weights are not tested"),
    "sync": (("step",), "local steps would each need noise of their own"),
    "recompute": (("none",), "the recorder does not see a forward that runs again in backward"),
    "mlp_tiles": ((1,), "the recorder does not see the tiles"),
    "tp_chunks": ((1,), "the rows of a sample are not adjacent in chunks"),
    "offload": (((),), "per-sample gradients of offloaded layers are not tested"),
    "compile": ((False,), "the recorder does not see the operations of a compiled block"),
    "graphs": ((False,), "the noise changes in each step"),
    "schedule": (("1f1b", "zb_h1"), "this schedule is not tested"),
}

#: Fields that are tested with any value. All fields that are neither here nor in _TESTED must have their default.
_ANY_VALUE = frozenset({"pp", "dp_replicate", "dp_shard", "tp", "sp", "zero", "microbatches", "accumulation"})

Predicate = Callable[[RunConfig], bool]
Message = Callable[[RunConfig], str]


def fixed_by_privacy() -> dict[str, Any]:
    """Return the fields of a plan that the planner must not choose, and a tested value of each."""
    fixed = {name: field.default for name, field in PLAN_FIELDS.items() if name not in _ANY_VALUE}
    return fixed | {name: tested[0] for name, (tested, _) in _TESTED.items()}


def private_plan_problems(plan: Plan) -> list[Problem]:
    """Return the fields of a plan under which private steps are not tested."""
    problems: list[Problem] = []
    for name, field in PLAN_FIELDS.items():
        value = getattr(plan, name)
        tested, reason = _TESTED.get(name, ((field.default,), "it is not tested"))
        if name not in _ANY_VALUE and value not in tested:
            texts = [f"{name}={field.kind.write(one)}" for one in (value, tested[0])]
            problems.append(Problem(name, f"{texts[0]}: with privacy, {reason}. Use {texts[1]}."))
    return problems


def _plan_problems(config: RunConfig) -> list[Problem]:
    if is_auto(config.plan) or (found := plan_of(config)) is None:
        return []
    plan, open_axis = found
    return private_plan_problems(plan if open_axis is None else plan.replace(**{open_axis: 2}))


def _when_on(name: str, keys: tuple[str, ...], reason: str, predicate: Predicate, message: Message) -> ConfigRule:
    return ConfigRule(
        name=f"privacy-{name}",
        keys=keys,
        reason=reason,
        predicate=lambda config: config.privacy.is_on and predicate(config),
        message=message,
    )


PRIVACY_RULES: tuple[ConfigRule, ...] = (
    _when_on("fits-the-plan", ("privacy.epsilon", "plan"),
             "Clipping by sample is tested for data, tensor and pipeline parallelism and ZeRO.",
             lambda config: bool(_plan_problems(config)),
             lambda config: f"{config.privacy.epsilon:g}: plan.{_plan_problems(config)[0].message}"),
    _when_on("needs-torch", ("privacy.epsilon", "launch.engine"), "The JAX engine has no private steps.",
             lambda config: config.launch.engine == "jax",
             lambda config: f"{config.privacy.epsilon:g}: the JAX engine has no "
             "private steps. Use launch.engine=torch."),
    _when_on("needs-delta", ("privacy.delta",), "A bound holds for a pair of epsilon and delta.",
             lambda config: not 0 < config.privacy.delta < 1,
             lambda config: f"{config.privacy.delta:g}: it is a probability below 1 / number of records. Use "
             "privacy.delta=1e-5."),
    _when_on("draws-by-record", ("privacy.epsilon", "data.batching"), "Each record is drawn independently.",
             lambda config: config.data.batching == "cost",
             lambda config: f"{config.privacy.epsilon:g}: records are drawn independently, not by cost. Leave "
             "data.batching out."),
    _when_on("keeps-shares", ("privacy.epsilon", "balance"), "Private steps are not tested with shares that change.",
             lambda config: config.balance == "apply",
             lambda config: f"{config.privacy.epsilon:g}: private steps are not tested with shares that change. Use "
             "balance=tell."),
    _when_on("has-no-tables", ("privacy.epsilon", "layout"), "Rows of sharded tables are updated apart.",
             shards_tables,
             lambda config: f"{config.privacy.epsilon:g}: the rows of sharded tables are not clipped by sample. Leave "
             "the tables out of layout."),
    ConfigRule(
        name="privacy-is-on",
        keys=("privacy.epsilon", *(f"privacy.{name}" for name in PrivacySection.model_fields if name != "epsilon")),
        reason="Without epsilon or noise, the settings of [privacy] would do nothing.",
        predicate=lambda config: not config.privacy.is_on and config.privacy != PrivacySection(),
        message=lambda config: (
            f"{config.privacy.epsilon:g}: settings of [privacy] are set, and neither epsilon nor noise is. Set "
            "privacy.epsilon=8, or leave them out."
        ),
    ),
)  # fmt: skip
