"""Rules for configs whose ranks have, or may get, unequal shares of the samples."""

from __future__ import annotations

from collections.abc import Callable

from weft.config.fields.plan_text import is_auto
from weft.config.rules.config_rule import ConfigRule, plan_of, shards_tables
from weft.config.rules.share_rules import unsupported_with_shares
from weft.config.run_config import RunConfig

#: Tasks other than the default one whose batches follow shares.
_TASKS = ("masked_lm", "classify_text", "classify_tokens", "seq2seq")


def uses_shares(config: RunConfig) -> bool:
    """Return True if the ranks of a run have, or may get, unequal shares."""
    if config.balance == "apply":
        return True
    found = plan_of(config)
    return bool(found[0].shares) if found is not None else " shares=" in config.plan


def _setting(config: RunConfig) -> str:
    return "balance=apply" if config.balance == "apply" else "shares"


def _not_with_shares(
    name: str, key: str, predicate: Callable[[RunConfig], bool], value: Callable[[RunConfig], object], remedy: str
) -> ConfigRule:
    return ConfigRule(
        name=f"shares-{name}",
        keys=(key, "plan", "balance"),
        reason=f"Unequal shares, by plan or balance=apply, are not built with this setting. {remedy}.",
        predicate=lambda config: uses_shares(config) and predicate(config),
        message=lambda config: (
            f"{value(config)}: unequal shares of ranks are not built with it yet. {remedy}, or leave "
            f"{_setting(config)} out."
        ),
    )


def _shards_unequally(config: RunConfig) -> bool:
    """Return True if the plan has `shard_shares`, which plan=auto never chooses."""
    found = plan_of(config)
    return bool(found[0].shard_shares) if found is not None else " shard_shares=" in config.plan


def _unfit_plan(config: RunConfig) -> str:
    found = plan_of(config)
    return "" if found is None else unsupported_with_shares(found[0])


#: Rules for configs with shares or shard_shares in the plan, or with balance=apply.
SHARE_CONFIG_RULES: tuple[ConfigRule, ...] = (
    ConfigRule(
        name="shard-shares-divide-matrices",
        keys=("optimizer.name", "plan"),
        reason="shard_shares divide parameters by elements, and Muon needs full matrices.",
        predicate=lambda config: config.optimizer.name == "muon" and _shards_unequally(config),
        message="muon: it needs full matrices, and shard_shares divide them. Use optimizer.name=adamw or sgd, or leave "
        "shard_shares out.",
    ),
    ConfigRule(
        name="balance-needs-a-plan",
        keys=("balance", "plan"),
        reason="balance=apply changes shares, which the planner's plans do not support in general.",
        predicate=lambda config: config.balance == "apply" and is_auto(config.plan),
        message="apply: the planner may choose a plan without shares. Write the plan, such as plan='dp_replicate=*'.",
    ),
    ConfigRule(
        name="balance-fits-the-plan",
        keys=("balance", "plan"),
        reason="balance=apply changes shares, so the plan must be one that supports them.",
        predicate=lambda config: config.balance == "apply" and bool(_unfit_plan(config)),
        message=lambda config: f"apply: {_unfit_plan(config)}, or balance=tell.",
    ),
    _not_with_shares("have-known-tasks", "task.name",
                     lambda config: config.task.name is not None and config.task.name not in _TASKS,
                     lambda config: config.task.name, f"Use {', '.join(_TASKS)} or the default task"),
    _not_with_shares("have-no-norm-groups", "train.norm_group", lambda config: config.train.norm_group > 0,
                     lambda config: config.train.norm_group, "Use train.norm_group=0"),
    _not_with_shares("need-torch", "launch.engine", lambda config: config.launch.engine == "jax",
                     lambda config: config.launch.engine, "Use launch.engine=torch"),
    # Shares of the plan are refused with tables by the tables' own rule.
    _not_with_shares("have-no-tables", "layout", lambda config: config.balance == "apply" and shards_tables(config),
                     lambda config: config.layout, "Leave rows, columns and one out of layout"),
)  # fmt: skip
