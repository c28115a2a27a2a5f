"""Plans that one SPMD program of JAX can express, and clusters that it can be compiled for. All others are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from weft.config.cluster import ClusterSpec
from weft.config.plan import PLAN_FIELDS, Plan
from weft.config.tpu_slices import ARRANGEMENTS, slice_name
from weft.errors import ConfigError, PlanError, Problem

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
    ("shard_shares", lambda plan: bool(plan.shard_shares), "its shards are equal parts", "no shard_shares"),
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
            write = PLAN_FIELDS[field.name].kind.write
            text = f"{field.name}={write(value)}: engine=jax does not have it. Use {field.name}={write(field.default)}."
            found.append(Problem(f"plan.{field.name}", text))
    return found


#: Fields that have one allowed value under the JAX engine, for a search: all with rules, except these.
SEARCHED = {name: PLAN_FIELDS[name].default for name, *_ in _RULES if name not in ("ep", "precision", "recompute")}


def topology(cluster: ClusterSpec) -> str:
    """Return libtpu's name of a cluster, such as "v5p:2x2x2".

    Raises:
        ConfigError: if the cluster is not one TPU slice with an arrangement in the table.
    """
    name = cluster.device.name
    if not name.startswith("tpu-"):
        slices = "v5p-16, v5e-16 or v6e-16"
        raise ConfigError(f"cluster={cluster}: --compile compiles for TPU slices. Use a slice such as {slices}.")
    known = {
        device: {chips: f"{device.removeprefix('tpu-')}:{shape}" for chips, shape in shapes.items()}
        for device, shapes in ARRANGEMENTS.items()
    }
    found = known.get(name, {}).get(cluster.devices_per_node)
    if cluster.nodes > 1 or found is None:
        listed = ", ".join(slice_name(device, chips) for device, each in known.items() for chips in each)
        raise ConfigError(f"cluster={cluster}: --compile compiles for one slice of a known arrangement. Use {listed}.")
    return found


def check(plan: Plan) -> None:
    """Raise PlanError if the JAX engine cannot use the plan; the message lists all reasons."""
    if found := problems(plan):
        raise PlanError(found)
