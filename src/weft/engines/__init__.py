"""What computes, behind `weft.train.engine.engine`. A run names its engine, so nothing below imports one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["TorchEngine"]

if TYPE_CHECKING:
    from weft.engines.torch_engine import TorchEngine

__getattr__ = loads(__name__, {"TorchEngine": ".torch_engine"})
