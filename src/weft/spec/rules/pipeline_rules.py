"""Rules of pipelines: what a schedule can order, and what does not go with stages. `plan_rules.py` lists them."""

from __future__ import annotations

from weft.spec.plan import Plan
from weft.spec.rules.rule import Facts, Rule, asks
from weft.spec.schedule import FORMS


def _form_stages(plan: Plan) -> int | None:
    return FORMS[plan.schedule].virtual_stages


def _wrong_stages(plan: Plan, facts: Facts) -> bool:
    legal = _form_stages(plan)
    return asks(plan, facts, "pp") and (
        plan.virtual_stages < 2 if legal is None else legal > 1 and plan.virtual_stages != legal
    )


def _unit(plan: Plan) -> int:
    return plan.pp if FORMS[plan.schedule].in_groups else 1


def _least(plan: Plan) -> int:
    return max(1, FORMS[plan.schedule].least_per_rank * plan.pp)


def _nearest_microbatches(plan: Plan, facts: Facts) -> Plan:
    unit = _unit(plan)
    return plan.replace(microbatches=max(_least(plan), unit, round(plan.microbatches / unit) * unit))


def _group_choices(plan: Plan, facts: Facts) -> str:
    below = plan.microbatches // plan.pp * plan.pp
    return f"Use microbatches={f'{below} or ' if below else ''}{below + plan.pp}"


def _split_misfits(plan: Plan, facts: Facts) -> bool:
    if not plan.split:
        return False
    return len(plan.split) != plan.pp * plan.virtual_stages or sum(plan.split) != facts.model.num_layers


#: What the runtime cannot do yet under a pipeline.
PIPELINE_NOT_BUILT: tuple[Rule, ...] = (
    Rule(
        name="pp-recompute-budget-not-built",
        field="recompute",
        reason="A recompute budget does not yet account for the microbatches in flight of a pipeline.",
        predicate=lambda plan, facts: plan.recompute_policy == "budget" and asks(plan, facts, "pp"),
        finding=lambda plan, facts: "a memory budget is not supported under a pipeline yet",
        remedy=lambda plan, facts: (
            "Use recompute=full, selective, attention or none, or e.g. full:4 for four blocks of each rank"
        ),
        fix=lambda plan, facts: plan.replace(recompute="selective"),
    ),
    Rule(
        name="pp-offload-activations-not-built",
        field="offload",
        reason="Activation offload follows the order of one backward pass, not yet of the several of a pipeline.",
        predicate=lambda plan, facts: plan.offload_share("activations") > 0 and asks(plan, facts, "pp"),
        finding=lambda plan, facts: "activation offload is not supported under a pipeline yet",
        remedy=lambda plan, facts: "Leave activations out, or use recompute=full",
        fix=lambda plan, facts: plan.replace(
            offload=tuple(part for part in plan.offload if part.partition(":")[0] != "activations")
        ),
    ),
)

#: What cannot work, whatever is built.
PIPELINE_LASTING: tuple[Rule, ...] = (
    Rule(
        name="pp-keeps-gathered",
        field="reshard",
        reason="zero=3 with reshard=after_forward would gather parameters twice for each microbatch of a pipeline.",
        predicate=lambda plan, facts: (
            plan.zero == 3 and plan.reshard.startswith("after_forward") and asks(plan, facts, "pp")
        ),
        finding=lambda plan, facts: "zero=3 would gather parameters twice for each microbatch of the pipeline",
        remedy=lambda plan, facts: "Use reshard=after_step, which gathers them once in a step, or zero=2",
        fix=lambda plan, facts: plan.replace(reshard="after_step"),
    ),
    Rule(
        name="schedule-virtual-stages",
        field="schedule",
        reason="Interleaved schedules need two or more stages on each rank; V-shaped schedules need exactly two.",
        predicate=_wrong_stages,
        finding=lambda plan, facts: (
            f"it needs {_form_stages(plan) or '2 or more'} stages on each rank, and virtual_stages is "
            f"{plan.virtual_stages}"
        ),
        remedy=lambda plan, facts: "Use virtual_stages=2, or schedule=1f1b with virtual_stages=1",
        fix=lambda plan, facts: plan.replace(virtual_stages=2),
    ),
    Rule(
        name="microbatches-in-groups",
        field="microbatches",
        reason="An interleaved schedule sends microbatches through its stages in groups of pp.",
        predicate=lambda plan, facts: plan.pp > 1 and plan.microbatches % _unit(plan) != 0,
        finding=lambda plan, facts: f"schedule={plan.schedule} takes microbatches in groups of pp={plan.pp}",
        remedy=_group_choices,
        fix=_nearest_microbatches,
    ),
    Rule(
        name="microbatches-fill-dualpipe",
        field="microbatches",
        reason="DualPipeV pairs forwards with backwards of other microbatches, so it needs two for each rank of pp.",
        predicate=lambda plan, facts: plan.pp > 1 and plan.microbatches < _least(plan),
        finding=lambda plan, facts: f"schedule={plan.schedule} needs at least {_least(plan)} with pp={plan.pp}",
        remedy=lambda plan, facts: f"Use microbatches={_least(plan)} or more, or schedule=zb_v",
        fix=_nearest_microbatches,
    ),
    Rule(
        name="split-needs-pp",
        field="split",
        reason="A split gives the number of blocks of each stage, so it needs a pipeline.",
        predicate=lambda plan, facts: bool(plan.split) and not asks(plan, facts, "pp"),
        finding=lambda plan, facts: "it divides the blocks of a pipeline, and pp is 1",
        remedy=lambda plan, facts: "Leave split out, or use pp=2 or more",
        fix=lambda plan, facts: plan.replace(split=()),
    ),
    Rule(
        name="split-fits-model",
        field="split",
        reason="A split has one number for each stage, and the numbers add up to the model's layers.",
        predicate=lambda plan, facts: facts.open_axis != "pp" and _split_misfits(plan, facts),
        finding=lambda plan, facts: (
            f"there are {plan.pp * plan.virtual_stages} stages and {facts.model.num_layers} layers"
        ),
        remedy=lambda plan, facts: (
            f"Use {plan.pp * plan.virtual_stages} numbers that add up to {facts.model.num_layers}, or leave split out"
        ),
        fix=lambda plan, facts: plan.replace(split=()),
    ),
)
