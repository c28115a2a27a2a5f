"""Federated training: clients train on their own records, and a server combines their updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["flower_app"]

if TYPE_CHECKING:
    from weft.federated.flower import flower_app

__getattr__ = loads(__name__, {"flower_app": ".flower"})
