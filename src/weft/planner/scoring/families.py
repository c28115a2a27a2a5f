"""Kinds of runs that a score is told apart by: what a planner may know of one kind and not of another."""

from __future__ import annotations

from weft.planner.foresight import WELL_KNOWN, Circumstances, circumstances_of
from weft.planner.scoring.rows import PublishedRun

#: The kinds, as they are printed.
FAMILIES = ("dense", "experts", "fp8", "long", "newer device")
_LONG = 16_384


def circumstances(run: PublishedRun) -> Circumstances:
    """Return what a run is of, as far as errors depend on it."""
    return circumstances_of(run.job, run.cluster, run.precision, run.pp, run.num_devices)


def families(run: PublishedRun) -> frozenset[str]:
    """Return the kinds that a run belongs to: a model is dense or has experts, and may be more besides."""
    one = circumstances(run)
    found = {"experts" if one.experts else "dense"}
    found |= {"fp8"} if one.narrow else set()
    found |= {"long"} if one.seq_len >= _LONG else set()
    found |= {"newer device"} if one.generation not in {*WELL_KNOWN, "volta"} else set()
    return frozenset(found)
