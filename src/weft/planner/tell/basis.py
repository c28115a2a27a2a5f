"""What an estimate rests on: which share of a step's time comes from constants measured where, and how far to trust it.

Every term is laid to the one constant that decides most of it. The bands are learnt from errors on published runs, each
predicted without its source (`planner/foresight`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.planner.cost.machine import Tables
from weft.planner.foresight import Band, Circumstances, circumstances_of, shipped, time_bands, unmeasured
from weft.planner.measured import HostTables
from weft.planner.search import Candidate
from weft.units import format_seconds

#: The constant that decides most of a term.
DECIDED_BY = {
    "gemm": "gemm_ceiling",
    "recompute": "gemm_ceiling",
    "frozen": "gemm_ceiling",
    "bubble": "gemm_ceiling",
    "attention": "attn_fwd",
    "memory_bound": "memory_eff",
    "host": "host_op_s",
    "tp": "link_eff",
    "cp": "link_eff",
    "ep": "link_eff",
    "pp_p2p": "nic_eff",
    "dp_exposed": "nic_eff",
    "contention": "overlap_compute",
    "optimizer": "adam_eff",
    "offload": "host_rate",
    "straggler": "straggler",
}
#: Where constants come from, as people read it.
RUNGS = {
    "here": "measurements of this machine",
    "table": "measurements of this device type",
    "common": "constants common to all devices",
    "datasheet": "the data sheet alone",
}
#: Share of cases of the band that is told.
TOLD = 0.8


def time_by_rung(terms: Mapping[str, float], tables: Tables) -> dict[str, float]:
    """Return the share of the step's time by where its constants come from; the shares add up to 1."""
    shares = dict.fromkeys(RUNGS, 0.0)
    for name, seconds in terms.items():
        constant = DECIDED_BY.get(name)
        rung = tables.rungs.get(constant, "datasheet") if constant else "datasheet"
        shares[rung if rung in RUNGS else "datasheet"] += seconds
    whole = sum(shares.values())
    return {rung: seconds / whole for rung, seconds in shares.items() if seconds > 0}


def band_of(one: Candidate, level: float = TOLD) -> Band | None:
    """Return the band of a candidate's step time, as factors; None where nothing like it was ever measured.

    Nor has it one where its host was measured: the error of that is another.

    Args:
        one: the candidate.
        level: share of cases that lie in it.
    """
    if one.question.cluster.device.memory_bytes == 0 or isinstance(one.question.tables, HostTables):
        return None
    where = circumstances(one)
    return None if unmeasured(where, one.question.cluster.device.name) else time_bands(where)[level]


def circumstances(one: Candidate) -> Circumstances:
    """Return what the error of a candidate depends on."""
    question, plan = one.question, one.plan
    found = circumstances_of(question.job, question.cluster, plan.precision, plan.pp, question.cluster.num_devices)
    return replace(found, graphs=plan.graphs)


def band_words(one: Candidate) -> list[str]:
    """Say how far to trust the step time: a band where there were runs to learn from, and what was never measured."""
    shares = time_by_rung(one.terms, one.question.tables)
    basis = ", ".join(f"{share:.0%} {RUNGS[rung]}" for rung, share in shares.items() if share >= 0.005)
    if one.question.cluster.device.memory_bytes == 0 or isinstance(one.question.tables, HostTables):
        return [f"trust   basis: {basis}"]
    band, where = band_of(one), circumstances(one)
    missing = unmeasured(where, one.question.cluster.device.name)
    lines = [f"trust   no band: {'; '.join(missing)} was ever measured", f"        basis: {basis}"]
    if band is not None:
        known = shipped()
        low, high = (format_seconds(one.step_s * factor) for factor in (band.low, band.high))
        lines = [
            f"trust   {low} to {high} a step in {band.level:.0%} of cases "
            f"({band.low - 1:+.0%} to {band.high - 1:+.0%}), by the errors on {known.runs} published runs of "
            f"{known.sources} sources, each predicted without its source",
            f"        basis: {basis}",
        ]
    if "here" not in shares:
        device = one.question.cluster.device.name.rstrip("*")
        others = "; published runs used other software" if where.generation else ""
        lines.append(f"        not yet measured: Weft's own speed on {device}{others} (weft calibrate)")
    return lines
