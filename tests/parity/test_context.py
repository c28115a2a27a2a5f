"""Context parallel with recompute equals one process: loss, norm, gradients and weights, in float64, in three ways.

Every layout, with documents, padding and few key-value heads: tests/parity/test_layouts.py.
"""

from __future__ import annotations

import pytest

from tests.parity.plans import Cell, differing, packed
from weft.spec.plan import Plan


@pytest.mark.parametrize("recompute", ["full", "selective", "60%"])
@pytest.mark.parametrize("mode", ["gather", "ring", "ulysses"])
def test_recompute(mode, recompute, plain, ranks2):
    known = {name: packed()[name] for name in ("packed", "multi-query")}
    plan = Plan.parse(f"cp=2 cp_mode={mode} recompute={recompute} precision=fp64")
    found = differing([Cell(name, plan) for name in known], known, plain, ranks2)
    assert not found, "\n".join(found)
