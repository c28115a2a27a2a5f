"""Measuring this machine: primitives of a training step, on as many ranks as share it, into a profile."""

from weft.calibrate.links import calibrate_links
from weft.calibrate.run import calibrate

__all__ = ["calibrate", "calibrate_links"]
