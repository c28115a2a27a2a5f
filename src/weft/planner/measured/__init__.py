"""A machine that was measured: its profile, laws of its primitives, and what runs teach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "BETWEEN",
    "HostTables",
    "Laws",
    "Machine",
    "Measurement",
    "Profile",
    "RUN_FILE",
    "TINY",
    "default_path",
    "here",
    "learn",
    "lesson_words",
    "load_profile",
    "measured_parts",
    "measured_tables",
    "parts_of",
]

if TYPE_CHECKING:
    from weft.planner.measured import here
    from weft.planner.measured.host_tables import HostTables
    from weft.planner.measured.laws import BETWEEN, TINY, Laws
    from weft.planner.measured.lessons import RUN_FILE, learn, lesson_words, measured_parts, parts_of
    from weft.planner.measured.profile import Machine, Measurement, Profile, default_path, load_profile
    from weft.planner.measured.profile_tables import measured_tables

__getattr__ = loads(
    __name__,
    {
        "BETWEEN": ".laws",
        "HostTables": ".host_tables",
        "Laws": ".laws",
        "Machine": ".profile",
        "Measurement": ".profile",
        "Profile": ".profile",
        "RUN_FILE": ".lessons",
        "TINY": ".laws",
        "default_path": ".profile",
        "learn": ".lessons",
        "lesson_words": ".lessons",
        "load_profile": ".profile",
        "measured_parts": ".lessons",
        "measured_tables": ".profile_tables",
        "parts_of": ".lessons",
    },
)
