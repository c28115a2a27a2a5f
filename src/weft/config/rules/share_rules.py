"""Rules for plans whose data-parallel ranks have unequal shares of the samples."""

from __future__ import annotations

import math

from weft.config.partitioning import largest_remainder, nearest_shares
from weft.config.plan import PLAN_FIELDS, Plan
from weft.config.rules.rule import Facts, Rule, asks

#: Plan fields that unequal shares support with any value: tests/parity/test_shares.py. `precision` has limits, and all
#: others have their default.
_SUPPORTED = frozenset({
    "pp", "dp_replicate", "dp_shard", "cp", "cp_mode", "tp", "sp", "ep", "order", "shares", "zero", "reshard",
    "schedule", "microbatches", "virtual_stages", "split", "accumulation", "recompute", "offload", "precision",
    "compile", "shard_shares",
})  # fmt: skip
#: Plan fields that `shard_shares` supports, as above.
_WITH_SHARDS = _SUPPORTED - {"cp", "cp_mode", "ep", "reshard", "compile"}
#: Largest value of `shard_shares`: parts are multiples of 16 elements times the share.
_LARGEST_SHARE = 64
_PRECISIONS = ("fp64", "fp32", "tf32", "bf16")
#: Most ranks for which legal shares are computed for an error message.
_MOST_WRITTEN = 100_000


def _write(shares: tuple[int, ...]) -> str:
    return PLAN_FIELDS["shares"].kind.write(shares)


def _in_lowest_terms(counts: tuple[int, ...]) -> tuple[int, ...]:
    common = math.gcd(*counts)
    return tuple(count // common for count in counts)


def _unsupported(plan: Plan, supported: frozenset[str] = _SUPPORTED) -> tuple[str, str] | None:
    """Return the first field that unequal shares do not support, and its value to use instead; None without one."""
    if plan.precision not in _PRECISIONS:
        return "precision", "bf16"
    for name, field in PLAN_FIELDS.items():
        if name not in supported and getattr(plan, name) != field.default:
            return name, field.kind.write(field.default)
    return None


def unsupported_with_shares(plan: Plan) -> str:
    """Return a clause and a remedy about the first field that unequal shares do not support; "" without one."""
    if (found := _unsupported(plan)) is None:
        return ""
    name, instead = found
    value = PLAN_FIELDS[name].kind.write(getattr(plan, name))
    return f"unequal shares are not built with {name}={value} yet. Use {name}={instead}"


def _written(plan: Plan) -> tuple[str, str]:
    """Return the first setting that `shard_shares` do not support, and the one to use instead."""
    name, instead = _unsupported(plan, _WITH_SHARDS) or ("", "")
    return f"{name}={PLAN_FIELDS[name].kind.write(getattr(plan, name))}", f"{name}={instead}"


def _finding(plan: Plan, facts: Facts) -> str:
    return unsupported_with_shares(plan).partition(". ")[0]


def _remedy(plan: Plan, facts: Facts) -> str:
    return f"{unsupported_with_shares(plan).partition('. ')[2]}, or leave shares out"


def _has_data_axis(plan: Plan, facts: Facts) -> bool:
    return asks(plan, facts, "dp_replicate") or asks(plan, facts, "dp_shard")


def _expanded(plan: Plan) -> tuple[int, ...]:
    """Return a share for each data rank. Shares of replicas are repeated for the ranks of a replica."""
    shares, size = plan.shares, min(plan.dp_size, _MOST_WRITTEN)
    if size % len(shares) == 0 and len(shares) == plan.dp_replicate:
        return tuple(share for share in shares for _ in range(size // len(shares)))
    return (*shares[:size], *[shares[-1]] * (size - len(shares)))


def _mismatch(plan: Plan, facts: Facts) -> bool:
    if not plan.shares or plan.measures_shares or facts.open_axis in ("dp_replicate", "dp_shard"):
        return False
    return _has_data_axis(plan, facts) and len(plan.shares) != plan.dp_size


def _counts(plan: Plan, facts: Facts) -> tuple[int, ...]:
    return (
        (facts.global_batch // plan.dp_size,) if plan.measures_shares
        else largest_remainder(facts.global_batch, plan.shares)
    )  # fmt: skip


def _leaves_none(plan: Plan, facts: Facts) -> bool:
    if not plan.shares or facts.open_axis in ("dp_replicate", "dp_shard") or _mismatch(plan, facts):
        return False
    return _has_data_axis(plan, facts) and min(_counts(plan, facts)) < plan.microbatches_per_step


def _starved(plan: Plan, facts: Facts) -> str:
    counts, passes = _counts(plan, facts), plan.microbatches_per_step
    rank = min(range(len(counts)), key=counts.__getitem__)
    needs = "one" if passes == 1 else f"{passes}, one in each microbatch"
    return f"of {facts.global_batch} samples data rank {rank} gets {counts[rank]}, and each rank needs at least {needs}"


def _fed(plan: Plan, facts: Facts) -> tuple[int, ...] | None:
    if facts.global_batch < plan.dp_size * plan.microbatches_per_step or plan.measures_shares:
        return None
    return _in_lowest_terms(nearest_shares(facts.global_batch, plan.shares, plan.microbatches_per_step))


def _enough(plan: Plan, facts: Facts) -> int:
    """Return the smallest global batch under which these shares leave no microbatch empty, or a multiple of it."""
    if plan.measures_shares:
        return plan.dp_size * plan.microbatches_per_step
    return math.ceil(sum(plan.shares) * plan.microbatches_per_step / min(plan.shares))


def _feeding(plan: Plan, facts: Facts) -> str:
    batch, fed = f"train.global_batch={_enough(plan, facts)}", _fed(plan, facts)
    return f"Use {batch}" if fed is None else f"Use shares={_write(fed)}, or {batch}"


def _fed_plan(plan: Plan, facts: Facts) -> Plan | None:
    fed = _fed(plan, facts)
    return None if fed is None else plan.replace(shares=fed)


def _sharding(plan: Plan, facts: Facts) -> bool:
    """Return True if `shard_shares` divide the states of zero=1 or 2, over a fixed number of ranks above 1."""
    return bool(plan.shard_shares) and plan.zero in (1, 2) and plan.dp_shard > 1 and facts.open_axis != "dp_shard"


def _shard_list(plan: Plan) -> tuple[int, ...]:
    shares, size = plan.shard_shares, min(plan.dp_shard, _MOST_WRITTEN)
    return (*shares[:size], *[shares[-1]] * (size - len(shares)))


def _scaled(shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return the nearest shares with small enough numbers."""
    most = max(shares)
    return _in_lowest_terms(tuple(max(1, round(share * _LARGEST_SHARE / most)) for share in shares))


#: Rules for the plan's fields `shares` and `shard_shares`.
SHARE_RULES: tuple[Rule, ...] = (
    Rule(
        name="shard-shares-need-zero",
        field="shard_shares",
        reason="shard_shares divide the optimizer states of zero=1 and 2; zero=0 divides none, and fully_shard of "
        "zero=3 only in equal parts.",
        predicate=lambda plan, facts: bool(plan.shard_shares) and plan.zero not in (1, 2),
        finding=lambda plan, facts: (
            f"zero={plan.zero} {'divides parameters in equal parts' if plan.zero else 'divides no states'}"
        ),
        remedy="Use zero=1 or 2, or leave shard_shares out",
        fix={"shard_shares": ()},
    ),
    Rule(
        name="shard-shares-match-ranks",
        field="shard_shares",
        reason="Every rank of dp_shard has one share of the states.",
        predicate=lambda plan, facts: _sharding(plan, facts) and len(plan.shard_shares) != plan.dp_shard,
        finding=lambda plan, facts: (
            f"each of the {plan.dp_shard} ranks of dp_shard has one share, and {len(plan.shard_shares)} "
            f"{'is' if len(plan.shard_shares) == 1 else 'are'} given"
        ),
        remedy=lambda plan, facts: (
            f"Use shard_shares={_write(_shard_list(plan))}"
            if plan.dp_shard <= _MOST_WRITTEN
            else "Leave shard_shares out"
        ),
        fix=lambda plan, facts: plan.replace(shard_shares=_shard_list(plan) if plan.dp_shard <= _MOST_WRITTEN else ()),
    ),
    Rule(
        name="shard-shares-are-small",
        field="shard_shares",
        reason=f"A share is at most {_LARGEST_SHARE}, because parts are padded to multiples of their shares.",
        predicate=lambda plan, facts: bool(plan.shard_shares) and max(plan.shard_shares) > _LARGEST_SHARE,
        finding=f"a share is at most {_LARGEST_SHARE}",
        remedy=lambda plan, facts: f"Use shard_shares={_write(_scaled(plan.shard_shares))}",
        fix=lambda plan, facts: plan.replace(shard_shares=_scaled(plan.shard_shares)),
    ),
    Rule(
        name="shares-need-data-ranks",
        field="shares",
        reason="Shares divide samples over dp_replicate and dp_shard, so one of them must be above 1.",
        predicate=lambda plan, facts: bool(plan.shares) and not _has_data_axis(plan, facts),
        finding="they divide samples over dp_replicate and dp_shard, and both are 1",
        remedy=lambda plan, facts: (
            "Leave shares out" if plan.measures_shares else f"Leave shares out, or use dp_replicate={len(plan.shares)}"
        ),
        fix={"shares": ()},
    ),
    Rule(
        name="shares-match-ranks",
        field="shares",
        reason="Every data-parallel rank (dp_replicate x dp_shard) has one share.",
        predicate=_mismatch,
        finding=lambda plan, facts: (
            f"each of the {plan.dp_size} data-parallel ranks has one share, and {len(plan.shares)} "
            f"{'is' if len(plan.shares) == 1 else 'are'} given"
        ),
        remedy=lambda plan, facts: (
            f"Use shares={_write(_expanded(plan))}" if plan.dp_size <= _MOST_WRITTEN else "Leave shares out"
        ),
        fix=lambda plan, facts: plan.replace(shares=_expanded(plan) if plan.dp_size <= _MOST_WRITTEN else ()),
    ),
    Rule(
        name="shares-leave-no-rank-without-samples",
        field="shares",
        reason="Every data-parallel rank has at least one sample in every microbatch.",
        predicate=_leaves_none,
        finding=_starved,
        remedy=_feeding,
        fix=_fed_plan,
    ),
)

#: Combinations with shares that are not shown to be equal to one process.
SHARES_NOT_BUILT: tuple[Rule, ...] = (
    Rule(
        name="shard-shares-not-built",
        field="shard_shares",
        reason="shard_shares are built with dp_replicate, tp, sp, pp, shares, accumulation, recompute and offload, in "
        "fp64, fp32, tf32 and bf16, and not yet with others.",
        predicate=lambda plan, facts: bool(plan.shard_shares) and _unsupported(plan, _WITH_SHARDS) is not None,
        finding=lambda plan, facts: f"it is not built with {_written(plan)[0]} yet",
        remedy=lambda plan, facts: f"Use {_written(plan)[1]}, or leave shard_shares out",
        fix={"shard_shares": ()},
    ),
    Rule(
        name="shares-not-built",
        field="shares",
        reason="Unequal shares are built with ZeRO, tensor, sequence, context, pipeline and expert parallelism, "
        "accumulation, recompute, offload and compile, in fp64, fp32, tf32 and bf16, and not yet with others.",
        predicate=lambda plan, facts: bool(plan.shares) and _unsupported(plan) is not None,
        finding=_finding,
        remedy=_remedy,
        fix={"shares": ()},
    ),
)
