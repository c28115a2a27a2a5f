"""Weft in the trainers of transformers and TRL: `weft.hf.Trainer(..., plan="zero=1 dp_shard=8")`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["Trainer", "use"]

if TYPE_CHECKING:
    from weft.hf.trainer import Trainer, use

__getattr__ = loads(__name__, {"Trainer": ".trainer", "use": ".trainer"})
