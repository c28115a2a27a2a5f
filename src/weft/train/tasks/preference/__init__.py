"""Preference training: DPO, IPO, KTO, ORPO and SimPO as a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["PreferTask", "PretrainedPreferTask"]

if TYPE_CHECKING:
    from weft.train.tasks.preference.prefer_task import PreferTask, PretrainedPreferTask

__getattr__ = loads(__name__, {"PreferTask": ".prefer_task", "PretrainedPreferTask": ".prefer_task"})
