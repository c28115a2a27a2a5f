"""A layout that was found, with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.spec import Layout


@dataclass(frozen=True, slots=True)
class FoundLayout:
    """A layout, and for a person where it comes from; reasons by pattern."""

    layout: Layout
    source: str
    reasons: Mapping[str, str]
