"""plan = "auto": this machine in the planner's words, and the plan that it chooses for a run.

Every rank asks by itself, before there is a process group, and all get the same answer: the search has no chance in
it, and figures that differ in their last digits do not change a ranking.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.errors import PlanError, Problem
from weft.planner.measured import Profile, default_path, here, load_profile
from weft.planner.search import Candidate, PlannedModel, Question, answer
from weft.planner.tell import report
from weft.spec import ClusterSpec, DeviceSpec, RunConfig
from weft.spec.cluster import device_by_torch_name
from weft.spec.plan import Plan, auto_fields, is_auto
from weft.train.tasks import find_task
from weft.units import format_bytes, format_seconds

#: Operations that one core of a CPU does in a second: fp32, vectors of eight, multiply and add.
_CORE_FLOPS = 2.5e9 * 16
#: The file of a run folder that says what was expected of the chosen plan.
CHOSEN = "planned.json"


def settle_plan(config: RunConfig, world_size: int, local_size: int) -> tuple[RunConfig, Candidate | None]:
    """Return the config with a plan in the place of "auto", and what is expected of it; any other config as it is.

    A run that was begun keeps the plan that was chosen then, as long as it has the same ranks.

    Args:
        config: its plan may be "auto", with or without decided fields.
        world_size: ranks of the run.
        local_size: ranks of this machine.

    Raises:
        PlanError: where no plan fits this machine.
    """
    if not is_auto(config.plan):
        return config, None
    begun = _begun(Path(config.run.dir) / config.run.name, config.plan, world_size)
    if begun is not None:
        return config.model_copy(update={"plan": begun}), None
    on_cpu = config.launch.device == "cpu"
    machines = this_cluster(world_size, local_size, "cpu" if on_cpu else "auto")
    profile = _profile(machines) if world_size == local_size else None
    if profile is not None:
        machines = here.cluster_of(profile, f"{world_size}xhere")
    model = find_task(config).describe()
    if model.traced is not None or model.adapter is not None or model.frozen is not None:
        profile = None  # the laws of a measured host know whole decoders alone: its data sheet counts what they do not
    best = choose_plan(model, machines, auto_fields(config.plan), profile=profile)
    return config.model_copy(update={"plan": best.plan.format()}), best


def choose_plan(
    model: PlannedModel,
    machines: ClusterSpec,
    decided: dict[str, Any],
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    profile: Profile | None = None,
) -> Candidate:
    """Return the fastest plan that the runtime runs today.

    Args:
        model: in the planner's words.
        machines: where it will run.
        decided: fields of the plan with values that stay.
        seq_len: tokens of a sequence; None: the config's, else a usual one.
        global_batch: sequences of a step; None: the config's, else a usual one.
        profile: what was measured of the machine; None: nothing.

    Raises:
        PlanError: where no plan fits.
    """
    if machines.device.name in ("cpu", "here"):
        decided = {"compile": False, "offload": ()} | decided  # the host is the device, and compilers may be missing
    asked = Question.of(model, machines, seq_len=seq_len, global_batch=global_batch, fixed=decided)
    found = answer(replace(asked, profile=profile))
    if found.best is not None:
        return found.best
    rule = f"no plan fits {model.name} on {machines}"
    if found.nearest is not None:
        need, most = found.nearest.total_bytes, found.nearest.usable_bytes
        rule += f"; the smallest plan needs {format_bytes(need)} of {format_bytes(most)} on a rank"
    elif found.refused:
        rule += f"; {found.refused[0].message.rstrip('.')}"
    remedy = "Use more ranks or a smaller model; `weft plan` shows what would fit."
    raise PlanError([Problem("plan", f"plan=auto: {rule}. {remedy}")])


def _profile(machines: ClusterSpec) -> Profile | None:
    """What `weft calibrate` measured of this machine, where it did and the machine is still the same."""
    if not default_path().exists():
        return None
    profile = load_profile(default_path())
    kind = "cpu" if machines.device.name == "cpu" else "cuda"
    return profile if profile.machine.kind == kind and not here.stale(profile) else None


def chosen_line(best: Candidate) -> str:
    """Return what was chosen and what is expected of it, in one line."""
    return (
        f"plan=auto chose {best.plan or 'one rank'}: expected {format_seconds(best.step_s)} a step and "
        f"{format_bytes(best.total_bytes)} of {format_bytes(best.usable_bytes)} on each rank."
    )


def record_choice(folder: Path, asked: str, best: Candidate) -> None:
    """Write what was chosen and expected into the run's folder.

    Args:
        folder: of the run.
        asked: the plan as it was typed, such as "auto tp=2".
        best: the chosen plan with its estimate.
    """
    table = {"asked": asked, "world_size": best.plan.world_size, **report.candidate_table(best)}
    draft = folder / f".{CHOSEN}.{os.getpid()}"
    draft.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    os.replace(draft, folder / CHOSEN)


def _begun(folder: Path, asked: str, world_size: int) -> str | None:
    """The plan that was chosen when this run began, for the same words and ranks."""
    try:
        table = json.loads((folder / CHOSEN).read_text(encoding="utf-8"))
        if table["asked"] == asked and table["world_size"] == world_size:
            return Plan.parse(table["plan"] if table["plan"] != str(Plan()) else "").format()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def this_cluster(world_size: int, local_size: int, device: str = "auto") -> ClusterSpec:
    """Return the machines of this run.

    Args:
        world_size: ranks of the run.
        local_size: ranks on each machine.
        device: "cpu", or "auto" for GPUs where there are any.

    Raises:
        PlanError: for a GPU that is not in the device table, and for ranks that do not fill whole machines.
    """
    import torch

    if world_size % local_size:
        rule = f"{world_size} ranks do not fill machines of {local_size} ranks each"
        raise PlanError([Problem("plan", f"plan=auto: {rule}. Write the plan itself.")])
    if device == "cpu" or not torch.cuda.is_available():
        spec = _this_cpu(local_size)
    else:
        name = torch.cuda.get_device_name()
        found = device_by_torch_name(name)
        if found is None:
            remedy = "Describe it in a file for `weft plan`, or write the plan itself"
            raise PlanError([Problem("plan", f"plan=auto: the planner does not know the device {name!r}. {remedy}.")])
        spec = replace(found, memory_bytes=torch.cuda.get_device_properties(0).total_memory)
    return ClusterSpec(nodes=world_size // local_size, devices_per_node=local_size, device=spec)


def _this_cpu(num_ranks: int) -> DeviceSpec:
    """One rank's share of this machine's cores and memory."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // num_ranks)
    return DeviceSpec(
        name="cpu",
        title="CPU",
        peaks=(("fp32", _CORE_FLOPS * share),),
        memory_bytes=psutil.virtual_memory().available // num_ranks,
        memory_bytes_per_s=5e9 * share,
        scale_up_bytes_per_s=2e9,
        scale_up_domain=num_ranks,
        host_bytes_per_s=5e9,
        note="rough figures for any CPU",
    )
