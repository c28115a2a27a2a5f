"""Replicas that are worlds of their own: launchers of those on this machine, and where all of them leave word."""

from __future__ import annotations

from weft.cli.launcher.apart.given import Given, given_replica
from weft.cli.launcher.apart.launchers import Replicas
from weft.cli.launcher.apart.place_here import meeting_place

__all__ = ["Given", "Replicas", "given_replica", "meeting_place"]
