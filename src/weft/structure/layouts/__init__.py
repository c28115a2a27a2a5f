"""Layouts of models: found from what a model brings along or by tracing it, and whether one says enough."""

from weft.structure.layouts.covered import expect_parts_named
from weft.structure.layouts.find_layout import explain_layout, find_layout
from weft.structure.layouts.rms_norm import RmsForm, rms_form

__all__ = ["RmsForm", "expect_parts_named", "explain_layout", "find_layout", "rms_form"]
