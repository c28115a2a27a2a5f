"""Ranks are started once for the whole session: starting one costs seconds, running a case on it little."""

from __future__ import annotations

import pytest
import torch

from weft.testing import RankPool

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-plans", action="store_true", help="parity: every legal plan, not a choice with all pairs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run ranks go to one worker: two pools at once are slower than one after the other."""
    for item in items:
        module = getattr(item, "module", None)
        has_ranks = any(name.startswith("ranks") for name in getattr(item, "fixturenames", ()))
        if has_ranks or hasattr(module, "RankPool"):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def ranks2():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4():
    with RankPool(4) as pool:
        yield pool
