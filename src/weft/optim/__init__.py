"""Optimizers, learning rates, clipping and loss scaling."""

from weft.optim.build import build_optimizer, check_optimizer, freeze, options_of
from weft.optim.clip import clip_factor, global_norm
from weft.optim.loss_scale import LossScale
from weft.optim.muon import Muon
from weft.optim.schedule import lr_factor

__all__ = [
    "LossScale",
    "Muon",
    "build_optimizer",
    "check_optimizer",
    "clip_factor",
    "freeze",
    "global_norm",
    "lr_factor",
    "options_of",
]
