"""At the end of a run: what the planner expects of its plan on this machine, beside what was measured.

Expected from this machine's profile where there is one, else from the device's data sheet and tables where the device
is known. Of an unknown machine nothing is expected: there is no guess. What was found is kept as `measured.json` in the
run folder, from which `weft plan --learn` teaches a profile.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.errors import WeftError
from weft.planner import estimate
from weft.planner.measured import RUN_FILE, Profile, default_path, here, measured_parts, parts_of
from weft.planner.search import Question
from weft.planner.space import Columns
from weft.planner.tell import time_by_rung
from weft.spec import ClusterSpec
from weft.spec.cluster import device_by_torch_name
from weft.spec.plan import Plan
from weft.train.task import Task
from weft.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from weft.mesh import Mesh

#: Parts of the report, where their share of a step is at least this.
_WORTH_TELLING = 0.01
_TOLD = "no estimate; run `weft calibrate` once (2 min)"


def expectation_lines(folder: Path, task: Task, mesh: Mesh, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write `measured.json`; the report's lines. ranks: `typical` seconds by part and `memory` bytes of each rank."""
    parts = measured_parts(_mean([one["typical"] for one in ranks]))
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
    draft = folder / f".{RUN_FILE}.{os.getpid()}"
    draft.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, folder / RUN_FILE)
    if expected is None:
        return [f"planned: {' '.join(reason.split())}"]
    return _lines(measured, expected, mesh.device.type)


def expect(task: Task, plan: Plan, device: str) -> tuple[dict[str, Any] | None, str]:
    """Return the planner's estimate of this run's plan; or None, and why.

    Args:
        task: of the run.
        plan: of the run.
        device: of this rank, such as "cuda:0"; the others have the like.
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
    except Exception as error:  # The run is done and saved: whatever the planner stumbles over must not fail it.
        traceback.print_exc()
        return None, f"not measured ({type(error).__name__}: {error}; the traceback is in the log of rank 0)"
    terms = {name: float(np.asarray(seconds)[0]) for name, seconds in found.terms.items()}
    return {
        "basis": basis,
        "step_s": float(found.step_s[0]),
        "memory_bytes": float(found.allocated_bytes[0]),
        "terms": terms,
        "factors": dict(asked.tables.learned),
        "time_by_rung": time_by_rung(terms, asked.tables),
    }, ""


def _machines(size: int, device: str) -> tuple[ClusterSpec | None, Profile | None, str]:
    """The machines of this run, their profile, and in words what is known of them; no machines where nothing is."""
    path, kind = default_path(), device.partition(":")[0]
    if path.exists():
        profile = here.profile_here(path)
        if profile.machine.kind == kind:
            return here.cluster_of(profile, f"{size}xhere"), profile, f"the profile of {profile.made}"
    if kind != "cuda":
        return None, None, _TOLD
    import torch  # here: with another engine a run on CPUs needs none

    name = torch.cuda.get_device_name(device)
    known = device_by_torch_name(name)
    if known is None:
        return None, None, f"{_TOLD}: {name!r} is not in the device table"
    local = min(size, torch.cuda.device_count())
    if size % local:
        return None, None, f"no estimate: {size} ranks do not fill whole machines of {local}"
    return ClusterSpec(nodes=size // local, devices_per_node=local, device=known), None, f"tables of {known.name}"


def _mean(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    kinds = dict.fromkeys(kind for one in ranks for kind in one)
    return {kind: sum(one.get(kind, 0.0) for one in ranks) / len(ranks) for kind in kinds}


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
    what = "allocated" if device == "cuda" else "used by the whole process, libraries included"
    lines.append(
        f"        memory: {format_bytes(int(expected['memory_bytes']))} of tensors planned, "
        f"{format_bytes(measured['memory_bytes'])} {what}"
    )
    return lines
