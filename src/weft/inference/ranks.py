"""Ranks for inference: a function of a mesh, called on each rank of a plan."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from weft import env
from weft.comm.collectives import barrier
from weft.comm.gpu_settings import pick_device
from weft.comm.mesh import Mesh, build_mesh, join_ranks, leave_ranks
from weft.config.plan import Plan
from weft.config.rules.plan_rules import CP_IN_INFERENCE, check_plan
from weft.devices import access
from weft.devices.kinds import noun
from weft.errors import CommError, ConfigError, PlanError, Problem
from weft.verify.rank_pool import RankError, RankPool

Result = TypeVar("Result")

#: Fields of training. They do not change the result of a forward.
_OF_TRAINING = ("accumulation", "reduce", "compress", "sync", "recompute", "mlp_tiles", "reshard", "graphs", "compile")
#: Fields that change the forward, and are not used here: a pass without gradients keeps no activations to shard, and
#: weights are gathered exactly.
_NOT_USED = ("sp", "tp_chunks", "gather")


def read_plan(text: str) -> Plan:
    """Read a plan. `*` takes the started ranks, or this machine's GPUs, that other axes leave.

    Raises:
        PlanError: for a bad plan.
    """
    place = env.rank_env()
    return Plan.parse(text, place.world_size if place is not None else max(1, access.count_devices()))


def inference_plan(plan: Plan, dtype: str | None = None) -> tuple[Plan, list[str]]:
    """Return the plan without settings of training, and lines for users about those left out.

    Args:
        plan: the user's plan.
        dtype: precision of weights and forward, such as "bf16"; None for the plan's.

    Raises:
        PlanError: for cp above 1, for an unknown dtype, and for a plan that breaks a rule.
    """
    if plan.cp > 1:
        raise PlanError([Problem.of("cp", plan.cp, CP_IN_INFERENCE)])
    default = Plan()
    wanted: dict[str, Any] = {name: getattr(default, name) for name in (*_OF_TRAINING, *_NOT_USED)}
    if plan.offload:
        wanted["offload"] = tuple(one for one in plan.offload if one.partition(":")[0] == "params")
    left_out = [name for name, value in wanted.items() if getattr(plan, name) != value]
    if dtype is not None:
        wanted["precision"] = dtype
    plan = plan.replace(**wanted)
    check_plan(plan)
    if not left_out:
        return plan, []
    verb = "it matters" if len(left_out) == 1 else "they matter"
    return plan, [f"plan: {', '.join(left_out)} left out, because {verb} only in training"]


def run_on_ranks(function: Callable[..., Result], plan: Plan, *args: Any, device: str = "auto") -> Result | None:
    """Call `function(mesh, *args)` on each rank of a plan, and return the result of rank 0.

    A plan of one rank runs in this process. A process that torchrun, srun or Weft's launcher started is one of the
    ranks: it joins the others, and gets None unless it is rank 0. Otherwise ranks are started on this machine.

    Args:
        function: importable by its module and name.
        plan: a plan without `*`.
        *args: picklable.
        device: a value of launch.device. auto: a GPU for each rank if there is any.

    Raises:
        PlanError: if the number of started ranks, or of GPUs, does not fit the plan, or the device is unknown.
        ConfigError: with the message of a rank's WeftError.
        CommError: if a rank failed with another error, or died.
    """
    place = env.rank_env()
    if place is not None:
        own = pick_device(device, place.local_rank)
        join_ranks(place, own)
        mesh = build_mesh(plan, own)
        result = function(mesh, *args)
        barrier(mesh.world)  # not after an error: the others may be in a collective
        leave_ranks()
        return result if mesh.rank == 0 else None
    if plan.world_size == 1:
        return function(build_mesh(plan, pick_device(device, 0)), *args)
    gpus = access.count_devices(device)
    if (gpus or device not in ("auto", "cpu")) and gpus < plan.world_size:
        raise PlanError(
            f"plan={plan}: {plan.world_size} ranks need {plan.world_size} {noun(device)}s, and torch sees {gpus} here. "
            "Use a plan for these, or start the ranks on more machines with torchrun or srun."
        )
    backend = access.group_backend(access.find_device(device, 0))
    with RankPool(plan.world_size, timeout_s=math.inf, backend=backend) as pool:
        try:
            return pool.run(_on_rank, function, plan.format(), device if gpus else "cpu", args)[0]
        except RankError as error:
            if error.refusal:
                raise ConfigError(error.refusal) from error
            if env.wants_traceback():
                print(error, file=sys.stderr)
            first, *_, last = str(error).splitlines()
            raise CommError(f"{first.partition(' failed in ')[0]} failed: {last}") from error


def _on_rank(function: Callable[..., Any], plan: str, device: str, args: tuple[Any, ...]) -> Any:
    """Call the function on a rank of a pool. Only rank 0's result is returned, which saves copies of the others."""
    rank = torch.distributed.get_rank()
    mesh: Mesh = build_mesh(Plan.parse(plan), pick_device(device, rank))
    if device == "cpu" and not env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, torch.multiprocessing.cpu_count() // mesh.world_size))
    result = function(mesh, *args)
    return result if rank == 0 else None
