"""Sections of a config that say how a run is watched: figures, sinks, alerts and who hears of them."""

from __future__ import annotations

from weft.spec.config.section import Section
from weft.spec.config.setting_types import Duration


class MonitorSection(Section):
    """Figures of ranks and machines."""

    figures: bool = True
    """Whether each rank reports figures of itself and its machine (CPU, memory, GPU, disk, network, where a step's time
    went); events.jsonl gets them folded over the ranks."""
    every: Duration = "10s"
    """Time between two reports."""
