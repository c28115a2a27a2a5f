"""What an estimate rests on: which share of a step's time comes from constants measured where, and how far to trust it.

Every term is laid to the one constant that decides most of it. The spreads are the relative errors that such constants
leave: about what is seen between estimates and published runs, and between two publications of one run.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.planner.cost.machine import Tables

#: The constant that decides most of a term.
DECIDED_BY = {
    "gemm": "gemm_ceiling",
    "recompute": "gemm_ceiling",
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
#: Where constants come from: what people read, and the relative error of a step that rests on such alone.
RUNGS = {
    "here": ("measurements of this machine", 0.05),
    "table": ("measurements of this device type", 0.08),
    "common": ("constants common to all devices", 0.12),
    "datasheet": ("the data sheet alone", 0.25),
}


def time_by_rung(terms: Mapping[str, float], tables: Tables) -> dict[str, float]:
    """Return the share of the step's time by where its constants come from; the shares add up to 1."""
    shares = dict.fromkeys(RUNGS, 0.0)
    for name, seconds in terms.items():
        constant = DECIDED_BY.get(name)
        rung = tables.rungs.get(constant, "datasheet") if constant else "datasheet"
        shares[rung if rung in RUNGS else "datasheet"] += seconds
    whole = sum(shares.values())
    return {rung: seconds / whole for rung, seconds in shares.items() if seconds > 0}


def spread(shares: Mapping[str, float]) -> float:
    """Relative error to be expected of the step time."""
    return sum(share * RUNGS[rung][1] for rung, share in shares.items())


def basis_words(shares: Mapping[str, float]) -> str:
    """'expected error of the step time 9%; its basis: 74% measurements of this device type, 26% ...'."""
    parts = ", ".join(f"{share:.0%} {RUNGS[rung][0]}" for rung, share in shares.items() if share >= 0.005)
    return f"expected error of the step time: {spread(shares):.0%}; basis: {parts}"
