"""plan = "auto": a description of this machine for the planner, and the plan that the planner chooses for a run.

Also compares the planner's estimate with a run's measurements.

Every rank runs the search separately, before a process group exists. All ranks get the same plan: the search is
deterministic, and measurements that differ in their last digits do not change the ranking.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.config.cluster import ClusterSpec, device_by_torch_name, this_cpu
from weft.config.fields.plan_text import is_auto
from weft.config.plan import Plan, auto_fields
from weft.config.run_config import RunConfig
from weft.errors import PlanError, Problem, WeftError
from weft.files import replace_text
from weft.planner.estimator import estimate
from weft.planner.measured import profile_tables as here
from weft.planner.measured.corrections import RUN_FILE, measured_parts, parts_of
from weft.planner.measured.machine_profile import Profile, default_path, load_profile
from weft.planner.report import tables as report
from weft.planner.report.explanation import time_by_rung
from weft.planner.search.best_plans import answer
from weft.planner.search.candidate import Candidate
from weft.planner.search.model_source import PlannedModel
from weft.planner.search.question import Question
from weft.planner.space.columns import Columns
from weft.train.tasks.base import Task
from weft.train.tasks.registry import find_task
from weft.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from weft.comm.mesh import Mesh

#: File of a run folder with the chosen plan and its estimate.
CHOSEN = "planned.json"


def resolve_plan(config: RunConfig, world_size: int, local_size: int) -> tuple[RunConfig, Candidate | None]:
    """Replace "auto" in a config by a chosen plan, and return the config and the plan's estimate, if any.

    A resumed run keeps its chosen plan as long as the config's plan and the number of ranks do not change.

    Args:
        config: a config whose plan may be "auto", with or without fixed fields.
        world_size: ranks of the run.
        local_size: ranks of this machine.

    Raises:
        PlanError: if no plan fits this machine, or if the planner has no data of it.
    """
    if not is_auto(config.plan):
        return config, None
    begun = _begun(Path(config.run.dir) / config.run.name, config.plan, world_size)
    if begun is not None:
        return config.model_copy(update={"plan": begun}), None
    machines = this_cluster(world_size, local_size, config.launch.device)
    profile = _profile(machines) if world_size == local_size else None
    if profile is not None:
        machines = here.cluster_of(profile, f"{world_size}xhere")
    model = find_task(config).describe()
    if config.privacy.is_on:
        model = replace(model, config=config)  # its draws need memory
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
    """Return the plan with the lowest estimated step time that fits into memory and that Weft can run.

    Args:
        model: the planner's description of the model.
        machines: the cluster that will train it.
        decided: plan fields that the user has set.
        seq_len: tokens per sequence; None for the config's value or a default.
        global_batch: sequences per step; None for the config's value or a default.
        profile: measurements of the machine, or None.

    Raises:
        PlanError: if no plan fits.
    """
    if machines.device.name in ("cpu", "here"):
        decided = {"compile": False, "offload": ()} | decided  # the host is the device, and it may have no compiler
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
    """Return the `weft calibrate` profile of this machine, or None if it is missing or the machine has changed."""
    if not default_path().exists():
        return None
    profile = load_profile(default_path())
    kind = "cpu" if machines.device.name == "cpu" else "cuda"
    return profile if profile.machine.kind == kind and not here.stale(profile) else None


def chosen_line(best: Candidate) -> str:
    """Return one line with the chosen plan and its estimate."""
    return (
        f"plan=auto chose {best.plan or 'one rank'}: expected {format_seconds(best.step_s)} a step and "
        f"{format_bytes(best.total_bytes)} of {format_bytes(best.usable_bytes)} on each rank."
    )


def record_choice(folder: Path, asked: str, best: Candidate) -> None:
    """Write the chosen plan and its estimate into the run's folder.

    Args:
        folder: the run's folder.
        asked: the plan that the user typed, such as "auto tp=2".
        best: the chosen plan with its estimate.
    """
    table = {"asked": asked, "world_size": best.plan.world_size, **report.candidate_table(best)}
    replace_text(folder / CHOSEN, json.dumps(table, indent=2) + "\n")


def _begun(folder: Path, asked: str, world_size: int) -> str | None:
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
        device: a value of launch.device.

    Raises:
        PlanError: if a GPU is not in the device table, or the ranks do not fill whole machines.
    """
    from weft.devices import access

    if world_size % local_size:
        rule = f"{world_size} ranks do not fill machines of {local_size} ranks each"
        raise PlanError([Problem("plan", f"plan=auto: {rule}. Write the plan itself.")])
    here = access.find_device(device, 0)
    if not access.is_accelerator(here):
        spec = this_cpu(local_size)
    else:
        name = access.device_name(here)
        found = device_by_torch_name(name)
        if found is None:
            remedy = "Describe it in a file for `weft plan`, or write the plan itself"
            raise PlanError([Problem("plan", f"plan=auto: the planner has no data of the device {name!r}. {remedy}.")])
        spec = replace(found, memory_bytes=access.total_bytes(here))
    return ClusterSpec(nodes=world_size // local_size, devices_per_node=local_size, device=spec)


# Deviation of a run from its plan's estimate: the parts of a step that drifted, and by how much.

#: Relative deviation at which a drift begins, and below which it ends.
BEYOND, BACK = 0.15, 0.10


@dataclass(frozen=True, slots=True)
class Drift:
    """One deviation from the estimate.

    Attributes:
        what: "step", a part of a step such as "over dp", or "memory".
        ratio: measured divided by planned.
    """

    what: str
    ratio: float
    text: str


def drifts(
    planned: Mapping[str, float],
    measured: Mapping[str, float],
    memory: tuple[float, float] | None = None,
    before: frozenset[str] = frozenset(),
) -> list[Drift]:
    """Return the deviations of more than 15 % of the planned step or the planned memory.

    If the step deviates, the part that contributes most is named. If it does not, because parts offset each other, the
    deviating parts are named.

    Args:
        planned: seconds of one step by part.
        measured: measured seconds of one step by part.
        memory: bytes (planned, measured), if they are comparable.
        before: names of current drifts, which end only if the deviation falls below 10 %.
    """
    step, took = sum(planned.values()), sum(measured.values())
    found: list[Drift] = []
    if step <= 0 or took <= 0:
        return found
    off = {part: measured.get(part, 0.0) - planned.get(part, 0.0) for part in {**planned, **measured}}
    if abs(took / step - 1) > (BACK if "step" in before else BEYOND):
        longer = took > step
        culprit = max(off, key=lambda part: off[part] if longer else -off[part])
        found.append(
            Drift("step", took / step, f"a step {_versus_estimate(took, step)}: {_part(culprit, planned, measured)}")
        )
    for part, more in off.items():
        limit = BACK if part in before else BEYOND
        if not any(one.what == "step" for one in found) and abs(more) > limit * step:
            ratio = measured.get(part, 0.0) / planned[part] if planned.get(part) else float("inf")
            found.append(Drift(part, ratio, _part(part, planned, measured)))
    if (
        memory is not None
        and memory[0] > 0
        and abs(memory[1] / memory[0] - 1) > (BACK if "memory" in before else BEYOND)
    ):
        wanted, used = memory
        share = used / wanted - 1
        text = f"memory: {format_bytes(int(used))}, {abs(share):.0%} {'more' if share > 0 else 'less'} than planned"
        found.append(Drift("memory", used / wanted, f"{text} ({format_bytes(int(wanted))})"))
    return found


def _versus_estimate(took: float, planned: float) -> str:
    ratio, wanted = took / planned, format_seconds(planned)
    if ratio >= 3:
        return f"takes {format_seconds(took)}, {ratio:.1f} times what was planned ({wanted})"
    word = "more" if ratio > 1 else "less"
    return f"takes {format_seconds(took)}, {abs(ratio - 1):.0%} {word} than planned ({wanted})"


def _part(part: str, planned: Mapping[str, float], measured: Mapping[str, float]) -> str:
    wanted = planned.get(part, 0.0)
    told = f"planned {format_seconds(wanted)}" if wanted else "which the plan does not contain"
    return f"{part} takes {format_seconds(measured.get(part, 0.0))}, {told}"


# Report at the end of a run that compares the planner's estimate for this machine with the measurements.

#: Minimum share of a step for a part to be in the report.
_WORTH_TELLING = 0.01
_TOLD = "no estimate; run `weft calibrate` once (2 min)"


def expectation_lines(folder: Path, task: Task, mesh: Mesh, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write `measured.json`, and return a report that compares the planned with the measured step time and memory.

    Without measured times, write nothing and return []. Without an estimate, the report is one line with the reason.

    Args:
        folder: the run's folder.
        task: the run's task.
        mesh: mesh of the plan.
        ranks: for each rank, a dict with `typical` (seconds by part) and `memory` (bytes).
    """
    kinds = dict.fromkeys(kind for one in ranks for kind in one["typical"])
    parts = measured_parts({kind: sum(one["typical"].get(kind, 0.0) for one in ranks) / len(ranks) for kind in kinds})
    if not parts:
        return []
    measured = {"step_s": sum(parts.values()), "memory_bytes": max(one["memory"] for one in ranks), "parts": parts}
    expected, reason = expect(task, mesh.plan, str(mesh.device))
    table = {
        "plan": str(mesh.plan),
        "model": task.name(),
        "device": mesh.device.type,
        "steps": max(one["steps"] for one in ranks),
        "measured": measured,
        "expected": expected,
        "unknown": reason,
    }
    replace_text(folder / RUN_FILE, json.dumps(table, indent=1) + "\n")
    if expected is None:
        return [f"planned: {' '.join(reason.split())}"]
    return _lines(measured, expected, mesh.device.type)


def expect(task: Task, plan: Plan, device: str) -> tuple[dict[str, Any] | None, str]:
    """Return the planner's estimate of this run's plan and "", or None and the reason.

    Args:
        task: the run's task.
        plan: the run's plan.
        device: device of this rank, such as "cuda:0". All ranks are assumed to have the same device.
    """
    try:
        cluster, profile, basis = _machines(plan.world_size, device)
        if cluster is None:
            return None, basis
        asked = replace(Question.of(task.describe(), cluster), profile=profile)
        columns = Columns.of([plan], asked.job)
        found = estimate(asked.job, asked.cluster, columns, asked.tables)
    except WeftError as error:
        return None, f"not measured ({error})"
    except Exception as error:  # The run is saved, so planner errors must not fail it.
        traceback.print_exc()
        return None, f"not measured ({type(error).__name__}: {error}; the traceback is in the log of rank 0)"
    terms = {name: float(np.asarray(seconds)[0]) for name, seconds in found.terms.items()}
    return {
        "basis": basis,
        "step_s": float(found.step_s[0]),
        "memory_bytes": float(found.allocated_bytes[0]),
        "terms": terms,
        "factors": dict(asked.tables.learned),
        "time_by_rung": time_by_rung(terms, asked.tables, asked.cluster),
    }, ""


def _machines(size: int, device: str) -> tuple[ClusterSpec | None, Profile | None, str]:
    path, kind = default_path(), device.partition(":")[0]
    if path.exists():
        profile = here.local_profile(path)
        if profile.machine.kind == kind:
            return here.cluster_of(profile, f"{size}xhere"), profile, f"the profile of {profile.made}"
    if kind == "cpu":
        return None, None, _TOLD
    import torch  # imported here, because other engines may run on CPUs without torch

    from weft.devices import access

    name = access.device_name(torch.device(device))
    known = device_by_torch_name(name)
    if known is None:
        return None, None, f"{_TOLD}: {name!r} is not in the device table"
    local = min(size, access.count_devices(torch.device(device).type))
    if size % local:
        return None, None, f"no estimate: {size} ranks do not fill complete machines of {local}"
    return ClusterSpec(nodes=size // local, devices_per_node=local, device=known), None, f"tables of {known.name}"


def _lines(measured: Mapping[str, Any], expected: Mapping[str, Any], device: str) -> list[str]:
    step, planned = measured["step_s"], expected["step_s"]
    lines = [
        f"planned {format_seconds(planned)} a step from {expected['basis']}; measured {format_seconds(step)} "
        f"({step / planned - 1:+.0%})"
    ]
    theirs = parts_of(expected["terms"])
    for name in dict.fromkeys([*theirs, *measured["parts"]]):
        both = theirs.get(name, 0.0), measured["parts"].get(name, 0.0)
        if max(both) >= _WORTH_TELLING * step:
            lines.append(f"        {name}: {format_seconds(both[0])} planned, {format_seconds(both[1])} measured")
    what = "used by the process, libraries included" if device == "cpu" else "allocated"
    lines.append(
        f"        memory: {format_bytes(int(expected['memory_bytes']))} of tensors planned, "
        f"{format_bytes(measured['memory_bytes'])} {what}"
    )
    return lines
