"""Rules for configs that train with JAX (`launch.engine=jax`). `jax_engine/rules.py` has those for plans."""

from __future__ import annotations

from collections.abc import Callable

from weft.config.fields.plan_text import is_auto
from weft.config.rules.config_rule import ConfigRule
from weft.config.run_config import RunConfig


def _not_under_jax(name: str, key: str, predicate: Callable[[RunConfig], bool], why: str, remedy: str) -> ConfigRule:
    return ConfigRule(
        name=f"jax-{name}",
        keys=("launch.engine", key),
        reason=f"Under launch.engine=jax, {why}.",
        predicate=lambda config: config.launch.engine == "jax" and predicate(config),
        message=f"jax: {why}. {remedy}, or launch.engine=torch.",
    )


#: Settings that the JAX engine does not support.
JAX_RULES: tuple[ConfigRule, ...] = (
    _not_under_jax("needs-a-plan", "plan", lambda config: is_auto(config.plan), "the planner does not know its plans",
                   "Write the plan, such as plan='dp_shard=2 zero=2'"),
    _not_under_jax("trains-the-default-task", "task.name", lambda config: config.task.name is not None,
                   "only the default task is built", "Leave task.name out"),
    _not_under_jax("has-no-adapters", "adapter.rank", lambda config: config.adapter.rank > 0,
                   "adapters are not built", "Use adapter.rank=0"),
    _not_under_jax("has-one-process", "launch.restarts", lambda config: (
        config.launch.restarts > 0 or config.launch.replicas_apart or config.checkpoint.peer_every > 0),
        "one process trains and nothing restarts it", "Use launch.restarts=0 and checkpoint.peer_every=0"),
    _not_under_jax("has-two-optimizers", "optimizer.name", lambda config: (
        config.optimizer.name not in ("adamw", "sgd") or config.optimizer.states != "fp32"),
        "adamw and sgd with fp32 states are built", "Use optimizer.name=adamw"),
    _not_under_jax("has-even-batches", "data.batching", lambda config: config.data.batching == "cost",
                   "steps have one shape", "Leave data.batching out"),
    _not_under_jax("evaluates-itself", "launch.evaluate_on", lambda config: config.launch.evaluate_on == "cpu",
                   "evaluation in another process is not built", "Use launch.evaluate_on=ranks"),
    _not_under_jax("draws-no-noise", "train.neftune_alpha", lambda config: bool(config.train.neftune_alpha),
                   "no random numbers are drawn in a step", "Leave train.neftune_alpha out"),
)  # fmt: skip
