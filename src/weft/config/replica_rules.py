"""Rules of configs whose replicas are separate worlds (`launch.replicas_apart`)."""

from __future__ import annotations

from weft.config.config_rule import ConfigRule
from weft.config.plan import Plan
from weft.config.plan_text import is_auto
from weft.config.run_config import RunConfig
from weft.config.wire_formats import wire_spec
from weft.errors import PlanError

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


def _plan(config: RunConfig) -> tuple[Plan, str | None] | None:
    """Return the plan and its open axis, or None if the planner chooses it or it cannot be read."""
    try:
        return None if is_auto(config.plan) else Plan.read_open(config.plan)
    except PlanError:
        return None


def _meets_never_rarely(config: RunConfig) -> bool:
    """Return True if the plan certainly has no local SGD."""
    found = _plan(config)
    if not config.launch.replicas_apart or found is None:
        return False
    plan, open_axis = found
    return plan.sync == "step" or (plan.dp_replicate == 1 and open_axis != "dp_replicate")


def _has_residual(plan: Plan) -> bool:
    return plan.compress != "none" and wire_spec(plan.compress).state_bytes > 0


def _is_no_replica(config: RunConfig) -> bool:
    found, replica = _plan(config), config.launch.replica
    return found is not None and replica is not None and found[1] is None and replica >= found[0].dp_replicate


APART_RULES: tuple[ConfigRule, ...] = (
    ConfigRule(
        name="separate-replicas-need-sync",
        keys=("launch.replicas_apart", "plan"),
        reason="Only replicas that synchronize every H steps can be separate, so the plan needs sync=diloco:H.",
        predicate=_meets_never_rarely,
        message=lambda config: (
            f"true: the plan {config.plan!r} has no replicas that synchronize every H steps. Use e.g. dp_replicate=2 "
            "sync=diloco:50 in the plan, or leave launch.replicas_apart out."
        ),
    ),
    ConfigRule(
        name="separate-replicas-without-fragments",
        keys=("launch.replicas_apart", "plan"),
        reason="Separate replicas synchronize the full model together, so they cannot stream fragments.",
        predicate=lambda config: (
            config.launch.replicas_apart and (found := _plan(config)) is not None and found[0].sync_fragments > 0
        ),
        message=lambda config: (
            f"true: the plan {config.plan!r} streams fragments, and separate replicas synchronize the full model "
            "together. Leave the number of fragments out of sync, or leave launch.replicas_apart out."
        ),
    ),
    ConfigRule(
        name="separate-replicas-without-feedback",
        keys=("launch.replicas_apart", "plan"),
        reason="A replica that misses a synchronization would add its error feedback to weights that have changed.",
        predicate=lambda config: (
            config.launch.replicas_apart and (found := _plan(config)) is not None and _has_residual(found[0])
        ),
        message=lambda config: (
            f"true: the plan {config.plan!r} adds its compression error to the next synchronization, which a separate "
            "replica may miss. Use compress=int8, which has no error feedback, or leave launch.replicas_apart out."
        ),
    ),
    ConfigRule(
        name="separate-replicas-need-a-plan",
        keys=("launch.replicas_apart", "plan"),
        reason="The planner never chooses sync, so it cannot plan separate replicas.",
        predicate=lambda config: config.launch.replicas_apart and is_auto(config.plan),
        message=lambda _: (
            "true: the planner cannot plan separate replicas. Write the plan, such as "
            'plan="dp_replicate=2 dp_shard=4 zero=1 sync=diloco:50".'
        ),
    ),
    ConfigRule(
        name="separate-replicas-keep-all-ranks",
        keys=("launch.min_ranks", "launch.replicas_apart"),
        reason="A separate replica has all ranks of its plan; if it is lost, the others continue without it.",
        predicate=lambda config: config.launch.replicas_apart and config.launch.min_ranks is not None,
        message=lambda config: (
            f"{config.launch.min_ranks}: under launch.replicas_apart=true a replica has all ranks of its plan or is "
            "lost, and the others continue without it. Leave launch.min_ranks out."
        ),
    ),
    ConfigRule(
        name="replica-needs-separate-replicas",
        keys=("launch.replica", "launch.meet_at", "launch.replicas_apart"),
        reason="Only separate replicas are started one by one, and have a rendezvous address.",
        predicate=lambda config: (
            not config.launch.replicas_apart
            and (config.launch.replica is not None or config.launch.meet_at is not None)
        ),
        message=lambda config: (
            f"{'none' if config.launch.replica is None else config.launch.replica}: launch.replica and launch.meet_at "
            "are for separate replicas. Add launch.replicas_apart=true, or leave them out."
        ),
    ),
    ConfigRule(
        name="replica-needs-an-address",
        keys=("launch.replica", "launch.meet_at", "launch.replicas_apart"),
        reason="A replica that is started alone needs the rendezvous address and its number.",
        predicate=lambda config: (
            config.launch.replicas_apart and (config.launch.replica is None) != (config.launch.meet_at is None)
        ),
        message=lambda config: (
            f"none: launch.meet_at={config.launch.meet_at} is set without the number of this machine's replica. Add "
            "launch.replica=0 on the machine of that address, launch.replica=1 on the next."
            if config.launch.replica is None
            else f"{config.launch.replica}: it needs the rendezvous address. Add launch.meet_at=HOST:PORT, with the "
            "address of the machine that starts replica 0."
        ),
    ),
    ConfigRule(
        name="rendezvous-needs-a-key",
        keys=("launch.meet_at", "launch.meeting_key"),
        reason="Anyone who can reach the rendezvous address could otherwise change the model.",
        predicate=lambda config: (
            config.launch.meet_at is not None
            and config.launch.meeting_key is None
            and config.launch.meet_at.rpartition(":")[0] not in _LOOPBACK
        ),
        message=lambda config: (
            f"{config.launch.meet_at}: other machines can reach this address, so replicas must authenticate. Put the "
            "same secret into WEFT_MEETING_KEY on all machines, and add launch.meeting_key=env:WEFT_MEETING_KEY."
        ),
    ),
    ConfigRule(
        name="replica-is-in-the-plan",
        keys=("launch.replica", "plan"),
        reason="Replicas are counted from 0 to dp_replicate - 1.",
        predicate=_is_no_replica,
        message=lambda config: (
            f"{config.launch.replica}: the plan {config.plan!r} has replicas 0 to {_num_replicas(config) - 1}. Use one "
            "of these."
        ),
    ),
    ConfigRule(
        name="replica-plan-is-closed",
        keys=("launch.replica", "plan"),
        reason="Machines that each start one replica need the same plan, so it must not depend on their devices.",
        predicate=lambda config: (
            config.launch.replica is not None and (found := _plan(config)) is not None and found[1] is not None
        ),
        message=lambda config: (
            f"{config.launch.replica}: the plan {config.plan!r} has an axis '*', and this machine has only one "
            "replica. Write the number of ranks instead of '*'."
        ),
    ),
)


def _num_replicas(config: RunConfig) -> int:
    found = _plan(config)
    return 1 if found is None else found[0].dp_replicate
