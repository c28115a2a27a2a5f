"""`weft version`."""

from __future__ import annotations

import weft


def version() -> None:
    """Print Weft's version."""
    print(weft.__version__)
