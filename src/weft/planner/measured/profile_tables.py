"""Where a profile enters the planner: the constants of a machine that was measured."""

from __future__ import annotations

from dataclasses import replace

from weft.errors import ConfigError, Problem
from weft.planner.cost.machine import Tables
from weft.planner.measured.constants import constants_of
from weft.planner.measured.host_tables import HostTables
from weft.planner.measured.laws import Laws
from weft.planner.measured.lessons import factors
from weft.planner.measured.profile import Profile
from weft.spec import ClusterSpec

#: What decides terms of traffic: measured here only where as many ranks were at work.
_TRAFFIC = ("link_eff", "nic_eff", "overlap_compute")


def measured_tables(profile: Profile, cluster: ClusterSpec, tier: str) -> Tables:
    """Return the cost model's constants for a machine that was measured; for a host also the laws of its primitives.

    Args:
        profile: what was measured.
        cluster: what is asked about.
        tier: of the constants that were not measured.

    Raises:
        ConfigError: for several hosts, and for a profile of a host that lacks compute.
    """
    tables = Tables.of(cluster.device, tier)
    if profile.machine.kind == "cuda":
        constants = constants_of(profile, cluster.device, tables)
        return replace(Tables.of(cluster.device, tier, constants), learned=factors(profile))
    if cluster.nodes > 1:
        rule = f"the profile has measurements of one host only, not of the network between {cluster.nodes} hosts"
        raise ConfigError([Problem("cluster", f"nodes={cluster.nodes}: {rule}. Use one node.")])
    laws = Laws.of(profile)
    rungs = dict.fromkeys(tables.rungs, "here") | {"straggler": "common"}
    if cluster.num_devices > max(laws.counts):
        rungs |= dict.fromkeys(_TRAFFIC, "common")  # in proportion to the largest crowd that was measured
    return HostTables.with_laws(replace(tables, rungs=rungs, learned=factors(profile), usable=0.9), laws)
