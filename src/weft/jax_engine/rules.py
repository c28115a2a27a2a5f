"""Plans that one SPMD program of JAX can express. Everything else is refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from weft.config.plan import Plan
from weft.errors import PlanError, Problem

#: Field, predicate of a plan that breaks the rule, the rule, and the remedy.
_Rule = tuple[str, Callable[[Plan], bool], str, str]
_RULES: tuple[_Rule, ...] = (
    ("pp", lambda plan: plan.pp > 1, "one SPMD program has no pipeline stages", "pp=1, with tp or zero=3"),
    ("cp", lambda plan: plan.cp > 1, "context parallelism is not built for it", "cp=1, with tp and sp=on"),
    ("precision", lambda plan: plan.precision not in ("fp64", "fp32", "bf16"), "it computes in fp64, fp32 or bf16",
     "precision=bf16"),
    ("offload", lambda plan: bool(plan.offload), "its states stay on the device", "zero=3, or a smaller model"),
    ("reduce", lambda plan: plan.reduce != "fp32", "XLA's collectives have no wire formats", "reduce=fp32"),
    ("compress", lambda plan: plan.compress != "none", "XLA's collectives have no wire formats", "compress=none"),
    ("gather", lambda plan: plan.gather != "none", "XLA's collectives have no wire formats", "gather=none"),
    ("sync", lambda plan: plan.sync != "step", "all replicas are one program", "sync=step"),
    ("recompute", lambda plan: plan.recompute_policy not in ("none", "full", "selective"),
     "it recomputes blocks fully, or all but their products", "recompute=full or recompute=selective"),
    ("reshard", lambda plan: plan.reshard != "after_forward", "XLA schedules when gathered weights are freed",
     "reshard=after_forward"),
    ("order", lambda plan: bool(plan.order), "its mesh has the default order of axes", "no order"),
    ("tp_chunks", lambda plan: plan.tp_chunks > 1, "XLA overlaps communication itself", "tp_chunks=1"),
    ("mlp_tiles", lambda plan: plan.mlp_tiles > 1, "XLA tiles and fuses itself", "mlp_tiles=1"),
    ("compile", lambda plan: plan.compile, "XLA compiles every step", "no compile"),
    ("graphs", lambda plan: plan.graphs, "XLA compiles every step", "no graphs"),
    ("ep", lambda plan: plan.dp_shard % plan.ep != 0, "its expert ranks are ranks of dp_shard",
     "an ep that divides dp_shard"),
)  # fmt: skip


#: Fields that the engine uses, and fields of pipelines and context parallelism, which need pp or cp above 1.
_USED = frozenset({
    "dp_replicate", "dp_shard", "tp", "ep", "zero", "sp", "accumulation",
    "cp_mode", "schedule", "microbatches", "virtual_stages", "split",
})  # fmt: skip


def problems(plan: Plan) -> list[Problem]:
    """Return a sentence for each field of the plan that the JAX engine cannot use."""
    found = []
    for field, breaks, rule, remedy in _RULES:
        if breaks(plan):
            value = getattr(plan, field)
            shown = "+".join(value) if isinstance(value, tuple) else "on" if value is True else value
            found.append(Problem(f"plan.{field}", f"{field}={shown}: under engine=jax, {rule}. Use {remedy}."))
    ruled = {field for field, *_ in _RULES}
    for field in fields(Plan):
        value = getattr(plan, field.name)
        if field.name not in ruled | _USED and value != field.default:
            text = f"{field.name}={value}: engine=jax does not have it. Use {field.name}={field.default}."
            found.append(Problem(f"plan.{field.name}", text))
    return found


def check(plan: Plan) -> None:
    """Raise PlanError if the JAX engine cannot use the plan; the message lists all reasons."""
    if found := problems(plan):
        raise PlanError(found)
