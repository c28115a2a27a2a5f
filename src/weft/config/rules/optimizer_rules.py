"""Rules for the optimizer's settings."""

from __future__ import annotations

from weft.config.parsing import shown
from weft.config.plan import Plan
from weft.config.rules.config_rule import ConfigRule, plan_of
from weft.config.run_config import RunConfig
from weft.config.sections import OptimizerSection


def averages_problem(plan: Plan) -> str | None:
    """Return why averaged weights cannot replace the trained ones for evaluations under a plan, or None if they can."""
    if plan.gather != "none":
        return (
            f"gather={plan.gather} encodes the weights that ranks exchange, so evaluating averages would change the "
            "trained ones. Leave gather out, or use optimizer.name=adamw."
        )
    if plan.sync != "step":
        return (
            f"sync={plan.sync} averages the replicas' weights, and each replica would evaluate another average. Use "
            "sync=step, or optimizer.name=adamw."
        )
    return None


def _expected_plan(config: RunConfig) -> Plan:
    found = plan_of(config)
    assert found is not None, "the rule's predicate is false without a plan"
    return found[0]


OPTIMIZER_RULES: tuple[ConfigRule, ...] = (
    ConfigRule(
        name="options-are-of-a-class",
        keys=("optimizer.options", "optimizer.name"),
        reason="Only an optimizer set as package.module:Class has options; adamw, sgd and muon have named settings.",
        predicate=lambda config: bool(config.optimizer.options) and not config.optimizer.is_foreign,
        message=lambda config: (
            f"{shown(config.optimizer.options)}: only an optimizer set as package.module:Class has options, and "
            f"optimizer.name is {config.optimizer.name}. Set optimizer.betas, eps or momentum instead, or use a "
            "class."
        ),
    ),
    ConfigRule(
        name="optimizer-classes-have-options",
        keys=("optimizer.betas", "optimizer.eps", "optimizer.states", "optimizer.name"),
        reason="These settings are Weft's own optimizers', and a class has options of its own.",
        predicate=lambda config: (
            config.optimizer.is_foreign
            and any(
                getattr(config.optimizer, name) != OptimizerSection.model_fields[name].default
                for name in ("betas", "eps", "states")
            )
        ),
        message=lambda config: (
            f"{shown(config.optimizer.betas)}: optimizer.name={config.optimizer.name} does not read betas, eps and "
            "states. Set optimizer.options, such as {betas = [0.9, 0.99]}, or leave them out."
        ),
    ),
    ConfigRule(
        name="one-set-of-weights",
        keys=("optimizer.name",),
        reason="Evaluations and checkpoints use the trained weights, and schedule-free optimizers need other ones.",
        predicate=lambda config: config.optimizer.name.startswith(("schedulefree", "pytorch_optimizer:ScheduleFree")),
        message=lambda config: (
            f"{config.optimizer.name}: it evaluates an average of the weights that it trains, and Weft evaluates and "
            "saves the trained ones. Use optimizer.name=schedule_free, which is Weft's."
        ),
    ),
    ConfigRule(
        name="averages-are-of-one-set-of-weights",
        keys=("optimizer.name", "plan"),
        reason="Evaluations put the averages of schedule_free into the model and restore the trained weights exactly.",
        predicate=lambda config: (
            config.optimizer.name.endswith(":ScheduleFreeAdamW")
            and (found := plan_of(config)) is not None
            and averages_problem(found[0]) is not None
        ),
        message=lambda config: f"schedule_free: {averages_problem(_expected_plan(config))}",
    ),
    ConfigRule(
        name="averages-need-no-decay",
        keys=("schedule.kind", "optimizer.name"),
        reason="A schedule-free optimizer averages weights instead of lowering the rate.",
        predicate=lambda config: (
            config.optimizer.name.endswith(":ScheduleFreeAdamW") and config.schedule.kind != "constant"
        ),
        message=lambda config: (
            f"{config.schedule.kind}: optimizer.name=schedule_free averages the weights of a constant rate. Use "
            "schedule.kind=constant, with warmup if wanted."
        ),
    ),
    ConfigRule(
        name="momentum-is-of-sgd-and-muon",
        keys=("optimizer.momentum", "optimizer.name"),
        reason="Other optimizers have no such setting.",
        predicate=lambda config: config.optimizer.momentum is not None and config.optimizer.name not in ("sgd", "muon"),
        message=lambda config: (
            f"{config.optimizer.momentum}: optimizer.name={config.optimizer.name} does not read it. Leave it out, or "
            "use optimizer.name=sgd or muon."
        ),
    ),
    ConfigRule(
        name="nesterov-is-of-sgd",
        keys=("optimizer.nesterov", "optimizer.name", "optimizer.momentum"),
        reason="Nesterov momentum is a variant of SGD with momentum.",
        predicate=lambda config: (
            config.optimizer.nesterov and (config.optimizer.name != "sgd" or config.optimizer.momentum == 0)
        ),
        message=lambda config: (
            f"true: it is a variant of SGD with momentum, and here optimizer.name={config.optimizer.name}"
            f"{' with optimizer.momentum=0' if config.optimizer.name == 'sgd' else ''}. "
            f"Use false, or optimizer.name=sgd with momentum=0.9."
        ),
    ),
    ConfigRule(
        name="bf16-states-are-of-adamw",
        keys=("optimizer.states", "optimizer.name"),
        reason="Only AdamW's moments can be stored in bf16 or fp8.",
        predicate=lambda config: config.optimizer.states != "fp32" and config.optimizer.name != "adamw",
        message=lambda config: (
            f"{config.optimizer.states}: only AdamW's moments can be stored in bf16 or fp8, and optimizer.name is "
            f"{config.optimizer.name}. Use fp32, or optimizer.name=adamw."
        ),
    ),
)
