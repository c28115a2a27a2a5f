"""What one device and its links do: constants, kernels, collectives."""

from __future__ import annotations

from weft.planner.cost.machine.collective_cost import Fabric
from weft.planner.cost.machine.kernels import bytes_s, core_s, flash_s, gemm_s
from weft.planner.cost.machine.tables import TIERS, Tables

__all__ = [
    "TIERS",
    "Fabric",
    "Tables",
    "bytes_s",
    "core_s",
    "flash_s",
    "gemm_s",
]
