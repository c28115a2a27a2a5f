"""Optimizers, learning rates, clipping and loss scaling. Names are loaded at first use: a schedule needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "AdamRule",
    "DecidedOptimizer",
    "Lane",
    "LossScale",
    "Muon",
    "SgdRule",
    "StepDecision",
    "build_optimizer",
    "check_optimizer",
    "clip_factor",
    "exact_moment",
    "freeze",
    "global_norm",
    "lr_factor",
    "options_of",
    "step_lane",
]

if TYPE_CHECKING:
    from weft.optim.build import build_optimizer, check_optimizer, freeze, options_of
    from weft.optim.byte_floats import exact_moment
    from weft.optim.clip import clip_factor, global_norm
    from weft.optim.decided import DecidedOptimizer
    from weft.optim.loss_scale import LossScale
    from weft.optim.lr_schedule import lr_factor
    from weft.optim.muon import Muon
    from weft.optim.one_pass import AdamRule, Lane, SgdRule, step_lane
    from weft.optim.step_decision import StepDecision

__getattr__ = loads(
    __name__,
    {
        "AdamRule": ".one_pass",
        "DecidedOptimizer": ".decided",
        "Lane": ".one_pass",
        "LossScale": ".loss_scale",
        "Muon": ".muon",
        "SgdRule": ".one_pass",
        "StepDecision": ".step_decision",
        "build_optimizer": ".build",
        "check_optimizer": ".build",
        "clip_factor": ".clip",
        "exact_moment": ".byte_floats",
        "freeze": ".build",
        "global_norm": ".clip",
        "lr_factor": ".lr_schedule",
        "options_of": ".build",
        "step_lane": ".one_pass",
    },
)
