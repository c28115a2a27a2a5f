"""Rules for pipelines, wire formats and CUDA graphs. `plan_rules.py` includes them in its lists."""

from __future__ import annotations

from collections.abc import Callable

from weft.config.fields.wire_formats import wire_spec
from weft.config.pipeline_schedule import FORMS
from weft.config.plan import PLAN_FIELDS, Plan
from weft.config.rules.rule import Facts, Rule, asks


def _wrong_stages(plan: Plan, facts: Facts) -> bool:
    legal = FORMS[plan.schedule].virtual_stages
    wrong = plan.virtual_stages < 2 if legal is None else legal > 1 and plan.virtual_stages != legal
    return wrong and asks(plan, facts, "pp")


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


#: Largest number of pipeline ranks for which a message has a list.
_MOST_LISTED = 64


def _lists(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return the lists with a value for each rank of pp, each with the text before it."""
    found = [("recompute=", plan.recompute.split("+"))] if "+" in plan.recompute else []
    pairs = [part.partition(":") for part in plan.offload if "/" in part]
    return [*found, *((f"offload={word}:", shares.split("/")) for word, _, shares in pairs)]


def _wrong_list(plan: Plan, facts: Facts, field: str) -> tuple[str, list[str]] | None:
    if facts.open_axis == "pp":
        return None
    wrong = (one for one in _lists(plan) if one[0].startswith(field) and (len(one[1]) != plan.pp or plan.pp == 1))
    return next(wrong, None)


def _list_found(field: str) -> Callable[[Plan, Facts], str]:
    def finding(plan: Plan, facts: Facts) -> str:
        found = _wrong_list(plan, facts, field)
        return f"it lists {len(found[1]) if found else 0} values, one for each rank of pp, and pp is {plan.pp}"

    return finding


def _list_remedy(field: str) -> Callable[[Plan, Facts], str]:
    def remedy(plan: Plan, facts: Facts) -> str:
        start, values = _wrong_list(plan, facts, field) or (field, ["none"])
        if plan.pp == 1:
            return f"Use pp={len(values)}, or {start}{values[0]}"
        mark = "/" if start.endswith(":") else "+"
        if plan.pp > _MOST_LISTED:
            return f"Use {start}{values[0]}"
        return f"Use {start}{mark.join([*values, *[values[-1]] * plan.pp][: plan.pp])}"

    return remedy


def _list_rule(field: str, words: str) -> Rule:
    return Rule(
        name=f"{field}-list-matches-pp",
        field=field,
        reason=f"A list of {words} has one for each rank of pp.",
        predicate=lambda plan, facts: _wrong_list(plan, facts, field) is not None,
        finding=_list_found(field),
        remedy=_list_remedy(field),
        fix={field: PLAN_FIELDS[field].default},
    )


#: Pipeline features that the runtime does not support yet.
PIPELINE_NOT_BUILT: tuple[Rule, ...] = (
    Rule(
        name="lists-without-compile",
        field="recompute",
        reason="Recompute and offload by rank of the pipeline are not tested yet with compiled blocks or CUDA graphs.",
        predicate=lambda plan, facts: plan.differs_by_stage and (plan.compile or plan.graphs),
        finding="policies and shares by rank of pp are not tested with compiled blocks or CUDA graphs",
        remedy="Use compile=off and graphs=off, or one value for all ranks",
        fix={"compile": False, "graphs": False},
    ),
    Rule(
        name="only-optimizer-by-rank",
        field="offload",
        reason="Only the optimizer may be offloaded yet by a list of shares, one for each rank of pp.",
        predicate=lambda plan, facts: any("/" in part for part in plan.offload if not part.startswith("optimizer")),
        finding="only optimizer has a share for each rank of pp",
        remedy="Use one share for all ranks",
        fix={"offload": ()},
    ),
    Rule(
        name="pp-recompute-budget-not-built",
        field="recompute",
        reason="A recompute budget does not yet account for the microbatches in flight of a pipeline.",
        predicate=lambda plan, facts: plan.recompute_policy == "budget" and asks(plan, facts, "pp"),
        finding="a memory budget is not supported under a pipeline yet",
        remedy="Use recompute=full, selective, attention or none, or e.g. full:4 for four blocks of each rank",
        fix={"recompute": "selective"},
    ),
    Rule(
        name="pp-offload-activations-not-built",
        field="offload",
        reason="Activation offload follows the order of one backward pass, not yet of the several of a pipeline.",
        predicate=lambda plan, facts: plan.offload_share("activations") > 0 and asks(plan, facts, "pp"),
        finding="activation offload is not supported under a pipeline yet",
        remedy="Leave activations out, or use recompute=full",
        fix=lambda plan, facts: plan.replace(
            offload=tuple(part for part in plan.offload if part.partition(":")[0] != "activations")
        ),
    ),
)

#: Combinations with a pipeline that can never work.
PIPELINE_LASTING: tuple[Rule, ...] = (
    _list_rule("recompute", "policies"),
    _list_rule("offload", "shares"),
    Rule(
        name="pp-keeps-gathered",
        field="reshard",
        reason="zero=3 with reshard=after_forward would gather parameters twice for each microbatch of a pipeline.",
        predicate=lambda plan, facts: (
            plan.zero == 3 and plan.reshard.startswith("after_forward") and asks(plan, facts, "pp")
        ),
        finding="zero=3 would gather parameters twice for each microbatch of the pipeline",
        remedy="Use reshard=after_step, which gathers them once in a step, or zero=2",
        fix={"reshard": "after_step"},
    ),
    Rule(
        name="schedule-virtual-stages",
        field="schedule",
        reason="Interleaved schedules need two or more stages on each rank; V-shaped schedules need exactly two.",
        predicate=_wrong_stages,
        finding=lambda plan, facts: (
            f"it needs {FORMS[plan.schedule].virtual_stages or '2 or more'} stages on each rank, and virtual_stages is "
            f"{plan.virtual_stages}"
        ),
        remedy="Use virtual_stages=2, or schedule=1f1b with virtual_stages=1",
        fix={"virtual_stages": 2},
    ),
    Rule(
        name="microbatches-in-groups",
        field="microbatches",
        reason="An interleaved schedule sends microbatches through its stages in groups of pp.",
        predicate=lambda plan, facts: plan.pp > 1 and plan.microbatches % _unit(plan) != 0,
        finding=lambda plan, facts: f"schedule={plan.schedule} runs microbatches in groups of pp={plan.pp}",
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
        reason="A split sets the number of blocks of each stage, so it needs a pipeline.",
        predicate=lambda plan, facts: bool(plan.split) and not asks(plan, facts, "pp"),
        finding="it divides the blocks of a pipeline, and pp is 1",
        remedy="Leave split out, or use pp=2 or more",
        fix={"split": ()},
    ),
    Rule(
        name="split-fits-model",
        field="split",
        reason="A split has one number for each stage, and the numbers add up to the model's layers.",
        predicate=lambda plan, facts: (
            facts.open_axis != "pp"
            and bool(plan.split)
            and (len(plan.split) != plan.pp * plan.virtual_stages or sum(plan.split) != facts.model.num_layers)
        ),
        finding=lambda plan, facts: (
            f"there are {plan.pp * plan.virtual_stages} stages and {facts.model.num_layers} layers"
        ),
        remedy=lambda plan, facts: (
            f"Use {plan.pp * plan.virtual_stages} numbers that add up to {facts.model.num_layers}, or leave split out"
        ),
        fix={"split": ()},
    ),
)


# Rules for the formats of gradients and weights, and for how often replicas synchronize.


def keeps_residual(plan: Plan) -> bool:
    """Return True if the plan's compression uses error feedback: it adds its error to a later reduction."""
    return plan.compress != "none" and wire_spec(plan.compress).state_bytes > 0


def _keeps_few(plan: Plan) -> bool:
    return plan.compress != "none" and wire_spec(plan.compress).kept > 0


def _incompatible_setting(plan: Plan) -> str:
    """Return the plan setting that is incompatible with error feedback: an axis, or many replicas."""
    sizes = {"tp": plan.tp, "pp": plan.pp, "ep": plan.ep}
    many = "" if plan.dp_replicate <= 2 or wire_spec(plan.compress).rank else "more than 2 replicas"
    return next((name for name, size in sizes.items() if size > 1), many)


WIRE_RULES: tuple[Rule, ...] = (
    Rule(
        name="gather-needs-zero3",
        field="gather",
        reason="gather=int8 and fp8 are for weights that zero=3 gathers; other stages do not shard weights.",
        predicate=lambda plan, facts: plan.gather not in ("none", "diff4") and plan.zero != 3,
        finding=lambda plan, facts: f"zero={plan.zero} gathers no weights before it uses them",
        remedy="Leave gather out, or use zero=3",
        fix={"gather": "none"},
    ),
    Rule(
        name="gather-float8-products",
        field="gather",
        reason="gather=fp8 sends weights as products in float8 round them; products in other formats do not.",
        predicate=lambda plan, facts: plan.gather == "fp8" and plan.precision != "fp8",
        finding=lambda plan, facts: f"precision={plan.precision} rounds no weights to float8",
        remedy="Use gather=int8, or precision=fp8",
        fix={"gather": "int8"},
    ),
    Rule(
        name="gather-differences-zero",
        field="gather",
        reason="gather=diff4 sends differences to the weights of the last step, which only zero=1 and 2 keep and send.",
        predicate=lambda plan, facts: plan.gather == "diff4" and plan.zero not in (1, 2),
        finding=lambda plan, facts: (
            "zero=3 keeps no unsharded weights to add a difference to"
            if plan.zero == 3
            else "zero=0 sends gradients and no weights"
        ),
        remedy=lambda plan, facts: f"{'Use gather=int8' if plan.zero == 3 else 'Leave gather out'}, or use zero=1",
        fix=lambda plan, facts: plan.replace(gather="int8" if plan.zero == 3 else "none"),
    ),
    Rule(
        name="gather-differences-alone",
        field="gather",
        reason="gather=diff4 is not built for masters on the host, or for sync other than step.",
        predicate=lambda plan, facts: (
            plan.gather == "diff4" and (plan.offload_share("optimizer") > 0 or plan.sync != "step")
        ),
        finding=lambda plan, facts: (
            f"differences under sync={plan.sync} are not built"
            if plan.sync != "step"
            else "differences to masters on the host are not built"
        ),
        remedy=lambda plan, facts: (
            "Leave gather out, or use sync=step" if plan.sync != "step" else "Leave gather or offload=optimizer out"
        ),
        fix={"gather": "none"},
    ),
    Rule(
        name="compress-needs-data",
        field="compress",
        reason="compress acts on gradients over dp_replicate, or over dp_shard if dp_replicate is 1.",
        predicate=lambda plan, facts: (
            plan.compress != "none" and not asks(plan, facts, "dp_replicate") and not asks(plan, facts, "dp_shard")
        ),
        finding="dp_replicate and dp_shard are 1, so no gradient is sent between data ranks",
        remedy="Leave compress out, or use dp_replicate=2 or more",
        fix={"compress": "none"},
    ),
    Rule(
        name="compress-feedback-zero",
        field="compress",
        reason=(
            "Under zero=3, error feedback is not built with tp, pp and ep, and is built for "
            "2 replicas unless the format is of low rank."
        ),
        predicate=lambda plan, facts: (
            plan.compress != "none"
            and wire_spec(plan.compress).outer_only
            and plan.zero == 3
            and plan.sync == "step"
            and bool(_incompatible_setting(plan))
            and asks(plan, facts, "dp_replicate")
        ),
        finding=lambda plan, facts: (
            "its rounding error is added to the next step, which is not built for zero=3 with "
            f"{_incompatible_setting(plan)}"
        ),
        remedy="Use zero=2, or compress=int8, which has no error feedback",
        fix={"compress": "int8"},
    ),
    Rule(
        name="compress-state-over-shard",
        field="compress",
        reason=(
            "Error feedback needs an unsharded gradient on every rank of dp_shard, which ZeRO 2 and 3 do not keep."
        ),
        predicate=lambda plan, facts: keeps_residual(plan) and plan.zero >= 2 and not asks(plan, facts, "dp_replicate"),
        finding=lambda plan, facts: (
            f"its error feedback needs an unsharded gradient on every rank, which zero={plan.zero} does not keep"
        ),
        remedy="Use compress=int8, which has no error feedback, or dp_replicate=2 or more",
        fix={"compress": "int8"},
    ),
    Rule(
        name="sync-needs-replicas",
        field="sync",
        reason="sync sets when the replicas of dp_replicate synchronize, so it needs more than one of them.",
        predicate=lambda plan, facts: plan.sync != "step" and not asks(plan, facts, "dp_replicate"),
        finding="dp_replicate is 1, so there are no replicas to synchronize",
        remedy="Leave sync out, or use dp_replicate=2 or more",
        fix={"sync": "step"},
    ),
    Rule(
        name="sync-compress",
        field="compress",
        reason="Under sync other than step, only formats that send a few values of each block have error feedback.",
        predicate=lambda plan, facts: plan.sync != "step" and keeps_residual(plan) and not _keeps_few(plan),
        finding=lambda plan, facts: f"its error feedback is not built for sync={plan.sync}",
        remedy="Use compress=int8, which has no error feedback, top:0.02, or sync=step",
        fix={"compress": "int8"},
    ),
    Rule(
        name="top-needs-sync",
        field="compress",
        reason="The largest values alone lose too much of each step's gradient, so top is for changes over many steps.",
        predicate=lambda plan, facts: plan.sync == "step" and _keeps_few(plan),
        finding="it sends few values, which is for changes of weights over many steps",
        remedy="Use e.g. sync=diloco:50 with dp_replicate=2 or more, or compress=int8",
        fix={"compress": "int8"},
    ),
    Rule(
        name="sync-loss-scale",
        field="precision",
        reason="Under fp16, separately trained replicas would have different loss scales, which is not built.",
        predicate=lambda plan, facts: plan.sync != "step" and plan.precision == "fp16",
        finding=lambda plan, facts: f"its loss scale would differ between replicas under sync={plan.sync}",
        remedy="Use precision=bf16, or sync=step",
        fix={"precision": "bf16"},
    ),
)


# Rules for plans that launch steps as CUDA graphs.


def _between(plan: Plan, facts: Facts) -> str:
    """Return the work of the host or other ranks between the kernels of one forward and backward, or "" if nothing."""
    if asks(plan, facts, "pp"):
        return "the host orders the passes of a pipeline"
    if plan.zero == 3:
        return "zero=3 gathers weights within forward and backward"
    inside = next((axis for axis in ("cp", "tp", "ep") if asks(plan, facts, axis)), None)
    if inside is not None:
        return f"{inside} communicates within forward and backward"
    if plan.offload:
        return f"offload={'+'.join(plan.offload)} makes the device and the host wait for each other"
    if plan.sync != "step":
        return f"sync={plan.sync} changes weights while a step computes"
    return ""


GRAPH_RULES: tuple[Rule, ...] = (
    Rule(
        name="graphs-on-device",
        field="graphs",
        reason="Only GPUs record graphs.",
        predicate=lambda plan, facts: plan.graphs and facts.device.is_cpu,
        finding=lambda plan, facts: f"{facts.device.title} is a CPU, which records no graphs",
        remedy="Use graphs=off, or a GPU",
        fix={"graphs": False},
    ),
    Rule(
        name="graphs-on-one-rank",
        field="graphs",
        reason="A graph contains kernels of one rank, without interruption by the host or other ranks.",
        predicate=lambda plan, facts: plan.graphs and bool(_between(plan, facts)),
        finding=lambda plan, facts: f"a graph contains kernels of one rank only, and {_between(plan, facts)}",
        remedy="Use graphs=off, or only data parallelism with zero=0, 1 or 2",
        fix={"graphs": False},
    ),
    Rule(
        name="graphs-without-experts",
        field="graphs",
        reason="The host adds up the routers' token counts, which a graph cannot contain.",
        predicate=lambda plan, facts: plan.graphs and facts.model.num_experts > 0,
        finding="the model has experts, and the host adds up their routers' token counts",
        remedy="Use graphs=off",
        fix={"graphs": False},
    ),
    Rule(
        name="graphs-compiled-recompute",
        field="graphs",
        reason="Generated code of recomputed blocks reads the generator's state, which a graph forbids.",
        predicate=lambda plan, facts: plan.graphs and plan.compile and plan.recompute_policy != "none",
        finding=lambda plan, facts: (
            f"with compile=on and recompute={plan.recompute}, generated code reads the state of torch's generator, "
            "which is impossible while a graph is recorded"
        ),
        remedy="Use recompute=none, compile=off, or graphs=off",
        fix={"graphs": False},
    ),
)
