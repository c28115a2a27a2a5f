"""Skip tests that need a simulated GPU if g++ is missing, with the reason."""

from __future__ import annotations

import pytest

from tools.gpu_sim.stub_library import why_not


def pytest_collection_modifyitems(items):
    reason = why_not()
    for item in items:
        if item.get_closest_marker("paper") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))
