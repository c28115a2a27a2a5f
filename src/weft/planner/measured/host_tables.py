"""The constants of a host: those of a device, and the laws of its primitives."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from weft.planner.cost.machine import Tables

if TYPE_CHECKING:  # estimates of devices need no laws, nor the time to load them
    from weft.planner.measured.laws import Laws


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTables(Tables):
    """The constants of a CPU host whose ranks share its cores. laws: of its primitives, of which estimates are made."""

    laws: Laws

    @classmethod
    def with_laws(cls, tables: Tables, laws: Laws) -> HostTables:
        """Return the constants of a host, with its laws."""
        return cls(**{each.name: getattr(tables, each.name) for each in fields(tables)}, laws=laws)
