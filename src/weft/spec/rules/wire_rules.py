"""Rules of what gradients and weights travel as, and of when replicas meet."""

from __future__ import annotations

from weft.spec.plan import Plan
from weft.spec.rules.rule import Facts, Rule, asks
from weft.spec.wires import wire_spec


def _keeps(plan: Plan) -> bool:
    return plan.compress != "none" and wire_spec(plan.compress).state_bytes > 0


def _keeps_few(plan: Plan) -> bool:
    return plan.compress != "none" and wire_spec(plan.compress).kept > 0


def _beside(plan: Plan) -> str:
    """What lets ranks owe parts that others owe too, or that no parameter is: an axis, or many replicas of int4."""
    sizes = {"tp": plan.tp, "pp": plan.pp, "ep": plan.ep}
    many = "" if plan.dp_replicate <= 2 or wire_spec(plan.compress).rank else "more than 2 replicas"
    return next((name for name, size in sizes.items() if size > 1), many)


def _has_data(plan: Plan, facts: Facts) -> bool:
    return asks(plan, facts, "dp_replicate") or asks(plan, facts, "dp_shard")


WIRE_RULES: tuple[Rule, ...] = (
    Rule(
        name="gather-needs-zero3",
        field="gather",
        reason="gather=int8 and fp8 are for weights that zero=3 gathers; other stages keep whole weights.",
        predicate=lambda plan, facts: plan.gather not in ("none", "diff4") and plan.zero != 3,
        finding=lambda plan, facts: f"zero={plan.zero} gathers no weights before it uses them",
        remedy=lambda plan, facts: "Leave gather out, or use zero=3",
        fix=lambda plan, facts: plan.replace(gather="none"),
    ),
    Rule(
        name="gather-float8-products",
        field="gather",
        reason="gather=fp8 sends weights as products in float8 round them; products in other formats do not.",
        predicate=lambda plan, facts: plan.gather == "fp8" and plan.precision != "fp8",
        finding=lambda plan, facts: f"precision={plan.precision} rounds no weights to float8",
        remedy=lambda plan, facts: "Use gather=int8, or precision=fp8",
        fix=lambda plan, facts: plan.replace(gather="int8"),
    ),
    Rule(
        name="gather-differences-zero",
        field="gather",
        reason="gather=diff4 sends differences to weights that ranks keep, as zero=1 and 2 do that send new ones.",
        predicate=lambda plan, facts: plan.gather == "diff4" and plan.zero not in (1, 2),
        finding=lambda plan, facts: (
            "zero=3 keeps no weights to which a difference could be sent"
            if plan.zero == 3
            else "zero=0 sends gradients and no weights"
        ),
        remedy=lambda plan, facts: f"{'Use gather=int8' if plan.zero == 3 else 'Leave gather out'}, or use zero=1",
        fix=lambda plan, facts: plan.replace(gather="int8" if plan.zero == 3 else "none"),
    ),
    Rule(
        name="gather-differences-alone",
        field="gather",
        reason="Differences of weights to masters on the host, or of replicas that meet rarely, are not built.",
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
        fix=lambda plan, facts: plan.replace(gather="none"),
    ),
    Rule(
        name="compress-needs-data",
        field="compress",
        reason="compress acts on gradients over dp_replicate, or over dp_shard where dp_replicate is 1.",
        predicate=lambda plan, facts: plan.compress != "none" and not _has_data(plan, facts),
        finding=lambda plan, facts: "dp_replicate and dp_shard are 1, so no gradient travels between data ranks",
        remedy=lambda plan, facts: "Leave compress out, or use dp_replicate=2 or more",
        fix=lambda plan, facts: plan.replace(compress="none"),
    ),
    Rule(
        name="compress-debts-zero",
        field="compress",
        reason="Under zero=3 a wire that owes what it rounds off is not built with tp, pp and ep; int4 for 2 replicas.",
        predicate=lambda plan, facts: (
            plan.compress != "none"
            and wire_spec(plan.compress).outer_only
            and plan.zero == 3
            and plan.sync == "step"
            and bool(_beside(plan))
            and asks(plan, facts, "dp_replicate")
        ),
        finding=lambda plan, facts: (
            f"what it rounds off is owed to the next step, which zero=3 with {_beside(plan)} does not keep"
        ),
        remedy=lambda plan, facts: "Use zero=2, or compress=int8, which owes nothing",
        fix=lambda plan, facts: plan.replace(compress="int8"),
    ),
    Rule(
        name="compress-state-over-shard",
        field="compress",
        reason=(
            "A wire that keeps what it rounds off keeps a whole gradient on every rank of dp_shard, which is what ZeRO "
            "2 and 3 give up."
        ),
        predicate=lambda plan, facts: _keeps(plan) and plan.zero >= 2 and not asks(plan, facts, "dp_replicate"),
        finding=lambda plan, facts: (
            f"it keeps what it rounds off, a whole gradient on every rank, which zero={plan.zero} has no room for"
        ),
        remedy=lambda plan, facts: "Use compress=int8, which keeps nothing, or dp_replicate=2 or more",
        fix=lambda plan, facts: plan.replace(compress="int8"),
    ),
    Rule(
        name="sync-needs-replicas",
        field="sync",
        reason="sync says when the replicas of dp_replicate meet, so it needs more than one of them.",
        predicate=lambda plan, facts: plan.sync != "step" and not asks(plan, facts, "dp_replicate"),
        finding=lambda plan, facts: "dp_replicate is 1, so there are no replicas to meet",
        remedy=lambda plan, facts: "Leave sync out, or use dp_replicate=2 or more",
        fix=lambda plan, facts: plan.replace(sync="step"),
    ),
    Rule(
        name="sync-compress",
        field="compress",
        reason="From meeting to meeting replicas owe what top leaves out; int4 and powersgd are not built there.",
        predicate=lambda plan, facts: plan.sync != "step" and _keeps(plan) and not _keeps_few(plan),
        finding=lambda plan, facts: f"it keeps what it rounds off for the next step, which sync={plan.sync} does not",
        remedy=lambda plan, facts: "Use compress=int8, which keeps nothing, top:0.02, or sync=step",
        fix=lambda plan, facts: plan.replace(compress="int8"),
    ),
    Rule(
        name="top-needs-sync",
        field="compress",
        reason="The largest values alone lose too much of a gradient in each step; changes over many steps bear it.",
        predicate=lambda plan, facts: plan.sync == "step" and _keeps_few(plan),
        finding=lambda plan, facts: "it sends few values, which is for the changes of weights between meetings",
        remedy=lambda plan, facts: "Use e.g. sync=diloco:50 with dp_replicate=2 or more, or compress=int8",
        fix=lambda plan, facts: plan.replace(compress="int8"),
    ),
    Rule(
        name="sync-loss-scale",
        field="precision",
        reason="Under fp16 each replica that trains by itself would have a loss scale of its own, which is not built.",
        predicate=lambda plan, facts: plan.sync != "step" and plan.precision == "fp16",
        finding=lambda plan, facts: f"its loss scale would differ between replicas under sync={plan.sync}",
        remedy=lambda plan, facts: "Use precision=bf16, or sync=step",
        fix=lambda plan, facts: plan.replace(precision="bf16"),
    ),
)
