"""Rules for plans. One list is used for config errors, the planner's pruning, the table in the docs, and tests."""

from __future__ import annotations

from collections.abc import Iterable

from weft.config.fields.layout import common_divisors, nearest
from weft.config.partitioning import batch_unit, choose_cp_mode, even_passes, num_chunks, ulysses_fits
from weft.config.plan import AXES, Plan
from weft.config.rules.rule import Facts, Rule, Violation, alternatives, asks
from weft.config.rules.share_rules import SHARE_RULES, SHARES_NOT_BUILT
from weft.config.rules.technique_rules import GRAPH_RULES, PIPELINE_LASTING, PIPELINE_NOT_BUILT, WIRE_RULES
from weft.errors import PlanError, Problem
from weft.units import counted


def _ep_choices(plan: Plan, facts: Facts) -> list[int]:
    """Return the sizes that divide the number of experts, and the number of ranks if given."""
    if facts.open_axis in ("dp_shard", "cp", "tp"):
        return common_divisors(facts.model.num_experts)
    return common_divisors(facts.model.num_experts, plan.dp_shard * plan.cp * plan.tp)


#: Rules for single layers: experts, and sharded layers that split their matmuls into chunks.
LAYER_RULES: tuple[Rule, ...] = (
    Rule(
        name="ep-divides-ranks",
        field="ep",
        reason="Experts are sharded over dp_shard x cp x tp, so ep must divide that product.",
        predicate=lambda plan, facts: (
            facts.open_axis not in ("dp_shard", "cp", "tp") and (plan.dp_shard * plan.cp * plan.tp) % plan.ep != 0
        ),
        finding=lambda plan, facts: (
            f"experts are sharded over dp_shard x cp x tp = {plan.dp_shard * plan.cp * plan.tp} ranks, "
            f"and that is not a multiple of {plan.ep}"
        ),
        remedy=lambda plan, facts: alternatives(common_divisors(plan.dp_shard * plan.cp * plan.tp), "ep"),
        fix=lambda plan, facts: plan.replace(ep=nearest(common_divisors(plan.dp_shard * plan.cp * plan.tp), plan.ep)),
    ),
    Rule(
        name="ep-needs-experts",
        field="ep",
        reason="Expert parallelism divides the experts of a model, so the model must have some.",
        predicate=lambda plan, facts: plan.ep > 1 and facts.model.num_experts == 0,
        finding="the model has no experts to divide",
        remedy="Use ep=1, or a model with experts, such as model.num_experts=8",
        fix={"ep": 1},
    ),
    Rule(
        name="ep-divides-experts",
        field="ep",
        reason="Every rank of ep has the same number of experts, so ep must divide their number.",
        predicate=lambda plan, facts: facts.model.num_experts > 0 and facts.model.num_experts % plan.ep != 0,
        finding=lambda plan, facts: (
            f"the model has {facts.model.num_experts} experts, and {facts.model.num_experts} is not a multiple of "
            f"{plan.ep}"
        ),
        remedy=lambda plan, facts: alternatives(_ep_choices(plan, facts), "ep"),
        fix=lambda plan, facts: plan.replace(ep=nearest(_ep_choices(plan, facts), plan.ep)),
    ),
    Rule(
        name="chunks-need-sp",
        field="tp_chunks",
        reason="tp_chunks divides sequences that sp=on shards over tp, so it needs sp=on.",
        predicate=lambda plan, facts: plan.tp_chunks > 1 and (not plan.sp or not asks(plan, facts, "tp")),
        finding=lambda plan, facts: (
            f"it divides sequences that sp=on shards over tp, and {'tp is 1' if plan.sp else 'sp is off'}"
        ),
        remedy="Use tp_chunks=1, or sp=on with tp=2 or more",
        fix={"tp_chunks": 1},
    ),
    Rule(
        name="chunks-without-fp8",
        field="tp_chunks",
        reason="precision=fp8 has one scale per full product, so products cannot be computed in chunks.",
        predicate=lambda plan, facts: plan.tp_chunks > 1 and plan.precision == "fp8",
        finding="precision=fp8 has one scale per full product",
        remedy="Use tp_chunks=1, or precision=bf16",
        fix={"tp_chunks": 1},
    ),
    Rule(
        name="tiles-are-recomputed",
        field="mlp_tiles",
        reason="Backward recomputes tiles as a whole, and other policies and compile=on choose products to save.",
        predicate=lambda plan, facts: (
            plan.mlp_tiles > 1 and (plan.compile or plan.recompute_policy in ("selective", "budget", "by_rank"))
        ),
        finding=lambda plan, facts: (
            f"{'compile=on' if plan.compile else f'recompute={plan.recompute}'} chooses products of an MLP to save, "
            "and tiles save none"
        ),
        remedy=lambda plan, facts: (
            f"Use mlp_tiles=1, or {'compile=off' if plan.compile else 'recompute=full or attention'}"
        ),
        fix={"mlp_tiles": 1},
    ),
    Rule(
        name="tiles-without-fp8",
        field="mlp_tiles",
        reason="precision=fp8 has scales over all tokens of a product, so MLPs cannot be computed in tiles.",
        predicate=lambda plan, facts: plan.mlp_tiles > 1 and plan.precision == "fp8",
        finding="precision=fp8 has scales over all tokens",
        remedy="Use mlp_tiles=1, or precision=bf16",
        fix={"mlp_tiles": 1},
    ),
)


# Rules that follow from one model, whose modules allow only some values of a field, and from one device.

#: Fields that a model may restrict, and the requirement to divide the model along them.
_NEEDS = {
    "tp": "Tensor parallelism divides heads and features of the layers, so tp must divide their numbers.",
    "cp": "Context parallelism needs a sequence, and attention that the runtime can replace.",
    "sp": "Sequence parallelism needs a sequence.",
    "ep": "Expert parallelism needs modules that are marked as experts.",
    "pp": "A pipeline divides one chain of blocks, so the model must have one.",
}


def _rule(field: str) -> Rule:
    def words(facts: Facts) -> list[object]:
        values = facts.limits[field].values
        return ["on" if value else "off" for value in values] if field == "sp" else list(values)

    def breaks(plan: Plan, facts: Facts) -> bool:
        limit = facts.limits.get(field)
        return limit is not None and facts.open_axis != field and getattr(plan, field) not in limit.values

    return Rule(
        name=f"model-allows-{field}",
        field=field,
        reason=_NEEDS[field],
        predicate=breaks,
        finding=lambda plan, facts: facts.limits[field].reason,
        remedy=lambda plan, facts: alternatives(words(facts), field),
        fix=lambda plan, facts: plan.replace(
            **{field: False if field == "sp" else nearest(facts.limits[field].values, getattr(plan, field))}
        ),
    )


LIMIT_RULES: tuple[Rule, ...] = tuple(_rule(field) for field in _NEEDS)


def _precision_choices(facts: Facts) -> list[str]:
    return ["fp32", *(name for name in ("fp16", "bf16") if facts.device.peak_flops(name) is not None)]


PRECISION_ON_DEVICE = Rule(
    name="precision-on-device",
    field="precision",
    reason="The device must support the precision of the plan.",
    predicate=lambda plan, facts: (
        plan.precision in ("bf16", "fp16", "fp8", "tf32") and facts.device.peak_flops(plan.precision) is None
    ),
    finding=lambda plan, facts: f"{facts.device.title} has no {plan.precision} arithmetic",
    remedy=lambda plan, facts: alternatives(_precision_choices(facts), "precision"),
    fix=lambda plan, facts: plan.replace(
        precision="fp32" if plan.precision == "tf32" else _precision_choices(facts)[-1]
    ),
)


# Rules for the order of the mesh axes.


def _in_use(plan: Plan, facts: Facts) -> list[str]:
    return [axis for axis in AXES if asks(plan, facts, axis)]


ORDER_RULES: tuple[Rule, ...] = (
    Rule(
        name="order-names-axes",
        field="order",
        reason="An order names exactly the axes that have more than one rank.",
        predicate=lambda plan, facts: bool(plan.order) and sorted(plan.order) != sorted(_in_use(plan, facts)),
        finding=lambda plan, facts: f"the axes in use are {', '.join(_in_use(plan, facts)) or 'none'}",
        remedy="Name each of them once, outermost first, or leave order out",
        fix={"order": ()},
    ),
    Rule(
        name="order-is-not-the-default",
        field="order",
        reason="Write the default order by leaving the field out.",
        predicate=lambda plan, facts: bool(plan.order) and list(plan.order) == _in_use(plan, facts),
        finding="this is the default order of these axes",
        remedy="Leave order out",
        fix={"order": ()},
    ),
    Rule(
        name="order-without-ep",
        field="order",
        reason="Experts are sharded over dp_shard x cp x tp in their usual order.",
        predicate=lambda plan, facts: bool(plan.order) and plan.ep > 1,
        finding=lambda plan, facts: f"ep={plan.ep} is a view over dp_shard, cp and tp in their usual order",
        remedy="Leave order out, or use ep=1",
        fix={"order": ()},
    ),
)


#: Legal plans that the runtime does not support yet. Delete a rule when the runtime supports the plan.
NOT_BUILT: tuple[Rule, ...] = (*PIPELINE_NOT_BUILT, *SHARES_NOT_BUILT)


def _with_offload(plan: Plan, name: str, other: str) -> Plan:
    """Return the plan with `other` offloaded instead of `name`, with the larger of the two fractions."""
    share = max(plan.offload_share(name), plan.offload_share(other))
    rest = tuple(part for part in plan.offload if part.partition(":")[0] not in (name, other))
    return plan.replace(offload=(*rest, f"{other}:{share:.6f}" if share < 1 else other))


def _product(plan: Plan) -> str:
    return " * ".join(f"{axis}={size}" for axis, size in plan.axis_sizes().items() if size > 1) or "dp_replicate=1"


def _batch_unit(plan: Plan) -> int:
    return batch_unit(plan.dp_size, plan.microbatches_per_step)


def _batch_choices(plan: Plan, facts: Facts) -> list[int]:
    below = facts.global_batch // _batch_unit(plan) * _batch_unit(plan)
    return [size for size in (below, below + _batch_unit(plan)) if size > 0]


def _smaller_accumulation(plan: Plan, facts: Facts) -> Plan | None:
    """Return the plan with the nearest number of microbatches that divides the global batch, or None."""
    passes = "microbatches" if plan.pp > 1 else "accumulation"
    legal = even_passes(facts.global_batch, plan.dp_size)
    return plan.replace(**{passes: nearest(legal, plan.microbatches_per_step)}) if legal else None


def _kv_heads_fit(facts: Facts, tp: int) -> bool:
    """Return True if each rank has complete key-value heads, or several ranks share one head."""
    return facts.model.num_kv_heads % tp == 0 or tp % facts.model.num_kv_heads == 0


def _heads_finding(plan: Plan, facts: Facts) -> str:
    heads, kv_heads = facts.model.num_heads, facts.model.num_kv_heads
    if heads % plan.tp:
        return f"the model has {heads} heads, and {heads} is not a multiple of {plan.tp}"
    return (
        f"the model has {kv_heads} key-value heads, and neither of {kv_heads} and {plan.tp} is a multiple of the other"
    )


def _tp_choices(facts: Facts) -> list[int]:
    legal = common_divisors(facts.model.num_heads, facts.model.ffn_dim)
    fits = [tp for tp in legal if _kv_heads_fit(facts, tp) and _shared_width(facts) % tp == 0]
    return [tp for tp in fits if facts.divides_ranks(tp)]


def _shared_width(facts: Facts) -> int:
    """Return the hidden width of the shared experts, which are sharded as one feed-forward layer."""
    model = facts.model
    return model.num_shared_experts * model.expert_width if model.num_experts else 0


def _sequence_unit(plan: Plan) -> int:
    return plan.cp * plan.tp


def _cp_chunks(plan: Plan, facts: Facts, cp: int) -> int:
    """Return the number of chunks of a sequence for cp ranks; "auto" is resolved for this shape."""
    if cp == 1:
        return 1
    mode = plan.cp_mode
    if mode == "auto":
        mode = choose_cp_mode(mode, cp, facts.model.num_heads, facts.model.num_kv_heads, facts.seq_len, plan.tp)
    return num_chunks(mode, cp)


def _cp_choices(plan: Plan, facts: Facts) -> list[int]:
    legal = [cp for cp in common_divisors(facts.seq_len) if facts.seq_len % _cp_chunks(plan, facts, cp) == 0]
    return [cp for cp in legal if facts.divides_ranks(cp)]


def _replicas_as_shards(plan: Plan, facts: Facts) -> Plan | None:
    """Return the plan with dp_shard instead of dp_replicate, or None if it has no replicas or names that axis."""
    if plan.dp_replicate == 1 or facts.open_axis is not None or plan.order or plan.sync != "step":
        return None
    return plan.replace(dp_replicate=1, dp_shard=plan.dp_replicate)


def _shards_instead(plan: Plan, facts: Facts) -> str:
    found = _replicas_as_shards(plan, facts)
    if found is None:
        return "Use zero=0, dp_shard=2 or more, or offload=params with zero=3"
    return f"Use {found}, or zero=0"


#: Combinations that can never work.
LASTING: tuple[Rule, ...] = (
    *LIMIT_RULES,
    Rule(
        name="world-size",
        field="world_size",
        reason="The product of the mesh axes is the number of ranks, so exactly that many must be started.",
        predicate=lambda plan, facts: facts.open_axis is None and plan.world_size != facts.world_size,
        finding=lambda plan, facts: (
            f"the plan needs {plan.world_size} ranks ({_product(plan)}), but {facts.world_size} were started"
        ),
        remedy=lambda plan, facts: f"Start {plan.world_size} ranks, or put dp_replicate=* in the plan",
        fix=lambda plan, facts: (
            plan.replace(dp_replicate=facts.world_size * plan.dp_replicate // plan.world_size)
            if facts.world_size % (plan.world_size // plan.dp_replicate) == 0
            else None
        ),
    ),
    Rule(
        name="global-batch",
        field="train.global_batch",
        reason="Without shares, every rank reads the same number of sequences in every microbatch of a step.",
        predicate=lambda plan, facts: not plan.shares and facts.global_batch % _batch_unit(plan) != 0,
        finding=lambda plan, facts: (
            f"{counted(plan.dp_size, 'data-parallel rank')} x "
            f"{counted(plan.microbatches_per_step, 'microbatch', 'microbatches')} need a multiple of "
            f"{_batch_unit(plan)} sequences"
        ),
        remedy=lambda plan, facts: alternatives(_batch_choices(plan, facts), "train.global_batch"),
        fix=_smaller_accumulation,
    ),
    Rule(
        name="zero-needs-shard",
        field="zero",
        reason="ZeRO shards states over the ranks of dp_shard and cp, so it needs more than one of them; zero=3 with "
        "offload=params also loads parameters block by block on a single rank.",
        predicate=lambda plan, facts: (
            plan.zero > 0
            and not asks(plan, facts, "dp_shard")
            and not asks(plan, facts, "cp")
            and not (plan.zero == 3 and plan.offload_share("params") > 0)
        ),
        finding="ZeRO shards over dp_shard and cp, and both are 1",
        remedy=_shards_instead,
        fix=lambda plan, facts: _replicas_as_shards(plan, facts) or plan.replace(zero=0),
    ),
    Rule(
        name="shard-needs-zero",
        field="dp_shard",
        reason="With zero=0 only experts are sharded; without experts these ranks are replicas: dp_replicate.",
        predicate=lambda plan, facts: plan.zero == 0 and plan.ep == 1 and asks(plan, facts, "dp_shard"),
        finding="zero=0 shards nothing, so these ranks would be replicas",
        remedy=lambda plan, facts: f"Use zero=1, 2 or 3, or dp_replicate={plan.dp_size} for replicas",
        fix={"zero": 1},
    ),
    Rule(
        name="second-shards-divide",
        field="reshard",
        reason="reshard=after_forward:N needs two or more groups of N neighboring ranks of dp_shard, and cp=1.",
        predicate=lambda plan, facts: (
            plan.second_shards > 0
            and plan.zero == 3
            and facts.open_axis != "dp_shard"
            and (plan.cp > 1 or plan.dp_shard % plan.second_shards > 0 or plan.dp_shard == plan.second_shards)
        ),
        finding=lambda plan, facts: (
            "secondary shards with cp are not built"
            if plan.cp > 1
            else f"dp_shard={plan.dp_shard} is not 2 or more groups of {plan.second_shards} ranks"
        ),
        remedy="Use reshard=after_forward, or a divisor of dp_shard below it",
        fix={"reshard": "after_forward"},
    ),
    Rule(
        name="reshard-needs-zero-3",
        field="reshard",
        reason="Only zero=3 gathers parameters, so only zero=3 can free them again.",
        predicate=lambda plan, facts: plan.reshard != "after_forward" and plan.zero != 3,
        finding=lambda plan, facts: f"zero={plan.zero} does not shard parameters",
        remedy="Leave reshard out, or use zero=3",
        fix={"reshard": "after_forward"},
    ),
    Rule(
        name="offload-params-needs-zero-3",
        field="offload",
        reason="Below zero=3 every pass needs all parameters on the device, so all would be copied from the host each "
        "time.",
        predicate=lambda plan, facts: plan.offload_share("params") > 0 and plan.zero != 3,
        finding=lambda plan, facts: (
            f"zero={plan.zero} needs all parameters on the device in every pass; zero=3 loads them block by block"
        ),
        remedy="Use zero=3, or offload=optimizer",
        fix=lambda plan, facts: _with_offload(plan, "params", "optimizer"),
    ),
    Rule(
        name="tp-heads",
        field="tp",
        reason=(
            "Tensor parallelism does not split heads, so tp must divide their number; key-value heads are "
            "divided too, or each is repeated on the same number of ranks."
        ),
        predicate=lambda plan, facts: facts.model.num_heads % plan.tp != 0 or not _kv_heads_fit(facts, plan.tp),
        finding=_heads_finding,
        remedy=lambda plan, facts: alternatives(_tp_choices(facts), "tp"),
        fix=lambda plan, facts: plan.replace(tp=nearest(_tp_choices(facts), plan.tp)),
    ),
    Rule(
        name="tp-ffn",
        field="tp",
        reason="Tensor parallelism splits the feed-forward layer, so tp must divide its width.",
        predicate=lambda plan, facts: facts.model.ffn_dim % plan.tp != 0,
        finding=lambda plan, facts: (
            f"the model's ffn_dim is {facts.model.ffn_dim}, and that is not a multiple of {plan.tp}"
        ),
        remedy=lambda plan, facts: alternatives(_tp_choices(facts), "tp"),
        fix=lambda plan, facts: plan.replace(tp=nearest(_tp_choices(facts), plan.tp)),
    ),
    Rule(
        name="tp-shared-experts",
        field="tp",
        reason="Tensor parallelism splits the shared experts, so tp must divide their width.",
        predicate=lambda plan, facts: _shared_width(facts) % plan.tp != 0,
        finding=lambda plan, facts: (
            f"the model's shared experts are {_shared_width(facts)} wide, and that is not a multiple of {plan.tp}"
        ),
        remedy=lambda plan, facts: alternatives(_tp_choices(facts), "tp"),
        fix=lambda plan, facts: plan.replace(tp=nearest(_tp_choices(facts), plan.tp)),
    ),
    Rule(
        name="sp-needs-tp",
        field="sp",
        reason="Sequence parallelism works between tensor-parallel regions, so it needs tp.",
        predicate=lambda plan, facts: plan.sp and not asks(plan, facts, "tp"),
        finding="sequence parallelism needs tp of at least 2, and tp is 1",
        remedy="Use sp=off, or tp=2 or more",
        fix={"sp": False},
    ),
    Rule(
        name="sp-divides-sequence",
        field="train.seq_len",
        reason="Under sequence parallelism, each rank of tp has the same number of tokens of every sequence.",
        predicate=lambda plan, facts: plan.sp and facts.seq_len % _sequence_unit(plan) != 0,
        finding=lambda plan, facts: (
            f"with sp=on, {plan.cp} x {plan.tp} ranks share the {facts.seq_len} tokens of a sequence evenly, and "
            f"{facts.seq_len} is not a multiple of {_sequence_unit(plan)}"
        ),
        remedy=lambda plan, facts: (
            f"Use train.seq_len={max(1, facts.seq_len // _sequence_unit(plan)) * _sequence_unit(plan)}, or sp=off"
        ),
        fix={"sp": False},
    ),
    Rule(
        name="pp-layers",
        field="pp",
        reason="Every stage of a pipeline has at least one layer.",
        predicate=lambda plan, facts: plan.pp > 1 and plan.pp * plan.virtual_stages > facts.model.num_layers,
        finding=lambda plan, facts: (
            f"{plan.pp} x {plan.virtual_stages} stages are more than the model's {facts.model.num_layers} layers"
        ),
        remedy=lambda plan, facts: f"Use pp * virtual_stages of at most {facts.model.num_layers}",
        fix=lambda plan, facts: plan.replace(
            pp=min(plan.pp, facts.model.num_layers), virtual_stages=1, schedule="1f1b", split=()
        ),
    ),
    Rule(
        name="microbatches-need-pp",
        field="microbatches",
        reason="microbatches counts the microbatches of a pipeline; without a pipeline, accumulation counts them.",
        predicate=lambda plan, facts: plan.microbatches > 1 and not asks(plan, facts, "pp"),
        finding="it applies to a pipeline, and pp is 1",
        remedy=lambda plan, facts: f"Use accumulation={plan.accumulation * plan.microbatches}",
        fix=lambda plan, facts: plan.replace(microbatches=1, accumulation=plan.accumulation * plan.microbatches),
    ),
    Rule(
        name="accumulation-without-pp",
        field="accumulation",
        reason="Under a pipeline, microbatches counts the microbatches of a step, so accumulation stays 1.",
        predicate=lambda plan, facts: plan.accumulation > 1 and asks(plan, facts, "pp"),
        finding="under a pipeline, microbatches is used instead",
        remedy=lambda plan, facts: f"Use microbatches={plan.accumulation * plan.microbatches}",
        fix=lambda plan, facts: plan.replace(microbatches=plan.accumulation * plan.microbatches, accumulation=1),
    ),
    Rule(
        name="schedule-needs-pp",
        field="schedule",
        reason="A schedule orders the passes of a pipeline, so it needs pp.",
        predicate=lambda plan, facts: plan.schedule != "1f1b" and not asks(plan, facts, "pp"),
        finding="it applies to a pipeline, and pp is 1",
        remedy="Leave schedule out, or use pp=2 or more",
        fix={"schedule": "1f1b"},
    ),
    Rule(
        name="virtual-stages-need-interleaving",
        field="virtual_stages",
        reason="Several stages on one rank need a pipeline and a schedule that interleaves them.",
        predicate=lambda plan, facts: (
            plan.virtual_stages > 1 and (not asks(plan, facts, "pp") or plan.schedule in ("gpipe", "1f1b", "zb_h1"))
        ),
        finding=lambda plan, facts: f"pp={plan.pp} with schedule={plan.schedule} has one stage on each rank",
        remedy="Use virtual_stages=1, or pp=2 or more with schedule=interleaved",
        fix={"virtual_stages": 1},
    ),
    *SHARE_RULES,
    *ORDER_RULES,
    *WIRE_RULES,
    *PIPELINE_LASTING,
    *LAYER_RULES,
    *GRAPH_RULES,
    Rule(
        name="cp-divides-sequence",
        field="cp",
        reason=(
            "Context parallelism divides every sequence into equal chunks: cp for cp_mode=ulysses, 2 * cp for the "
            "others, with one chunk from the front and one from the back per rank."
        ),
        predicate=lambda plan, facts: plan.cp > 1 and facts.seq_len % _cp_chunks(plan, facts, plan.cp) != 0,
        finding=lambda plan, facts: (
            f"a sequence has {facts.seq_len} tokens, and that is not a multiple of its "
            f"{_cp_chunks(plan, facts, plan.cp)} chunks"
        ),
        remedy=lambda plan, facts: alternatives(_cp_choices(plan, facts), "cp"),
        fix=lambda plan, facts: plan.replace(cp=nearest(_cp_choices(plan, facts), plan.cp)),
    ),
    Rule(
        name="ulysses-heads",
        field="cp_mode",
        reason=(
            "Ulysses does not split heads: cp must divide the heads of a rank of tp, and divide or be a multiple of "
            "its key-value heads."
        ),
        predicate=lambda plan, facts: (
            plan.cp > 1
            and plan.cp_mode == "ulysses"
            and not ulysses_fits(plan.cp, facts.model.num_heads, facts.model.num_kv_heads, plan.tp)
        ),
        finding=lambda plan, facts: (
            f"{facts.model.num_heads} heads and {facts.model.num_kv_heads} key-value heads cannot be divided evenly "
            f"over cp={plan.cp}{f' and tp={plan.tp}' if plan.tp > 1 else ''}"
        ),
        remedy="Use cp_mode=ring or cp_mode=gather, which support any number of heads",
        fix={"cp_mode": "auto"},
    ),
    Rule(
        name="cp-mode-needs-cp",
        field="cp_mode",
        reason="cp_mode applies to context parallelism, so it needs more than one rank on cp.",
        predicate=lambda plan, facts: plan.cp_mode != "auto" and not asks(plan, facts, "cp"),
        finding="it applies to context parallelism, and cp is 1",
        remedy="Leave cp_mode out, or use cp=2 or more",
        fix={"cp_mode": "auto"},
    ),
    Rule(
        name="seq-len-fits-model",
        field="train.seq_len",
        reason="A sequence must not be longer than the model's max_seq_len.",
        predicate=lambda plan, facts: facts.seq_len > facts.model.max_seq_len,
        finding=lambda plan, facts: f"the model reads at most {facts.model.max_seq_len} tokens (model.max_seq_len)",
        remedy=lambda plan, facts: f"Use train.seq_len={facts.model.max_seq_len} or less",
    ),
    PRECISION_ON_DEVICE,
)


RULES: tuple[Rule, ...] = (*NOT_BUILT, *LASTING)
#: Why inference refuses cp above 1.
CP_IN_INFERENCE = "inference does not divide a text over ranks yet. Use cp=1, and tp, pp or zero=3."


def check(plan: Plan, facts: Facts | None = None, rules: Iterable[Rule] | None = None) -> list[Violation]:
    """Return the rules that the plan breaks, at most one per field: the first in the list.

    Args:
        plan, rules: the plan, and the rules; None: all of RULES.
        facts: context for the rules; a rule that needs an unknown fact is skipped.
    """
    found: dict[str, Violation] = {}
    for rule in RULES if rules is None else rules:
        violation = rule.check(plan, facts or Facts()) if rule.field not in found else None
        if violation is not None:
            found[rule.field] = violation
    return list(found.values())


def check_plan(plan: Plan, facts: Facts | None = None) -> None:
    """Raise PlanError with every rule that the plan breaks.

    Raises:
        PlanError: if rules are broken; the problems are keyed by the plan's fields.
    """
    violations = check(plan, facts)
    if violations:
        raise PlanError(Problem(violation.field, violation.message) for violation in violations)
