"""Replicas that are worlds of their own: launchers of those on this machine, and where all of them leave word."""

from __future__ import annotations

from weft.cli.launcher.apart.place_here import meeting_place
from weft.cli.launcher.apart.replicas import Replicas

__all__ = ["Replicas", "meeting_place"]
