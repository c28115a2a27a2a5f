"""Processes of ranks: forks of a server that has loaded torch once, or programs of their own."""

from __future__ import annotations

from weft.cli.launcher.starting.choice import rank_starter
from weft.cli.launcher.starting.prepared_run import Preparation
from weft.cli.launcher.starting.programs import Programs, Started, Starter

__all__ = ["Preparation", "Programs", "Started", "Starter", "rank_starter"]
