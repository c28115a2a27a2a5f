"""Ranks are started once for the whole session: starting one costs seconds, running a case on it little."""

from __future__ import annotations

import pytest
import torch

from weft.testing import RankPool

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-plans", action="store_true", help="parity: every legal plan, not a choice with all pairs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`: tests that run ranks go to one worker, since two pools at once are slower than one after
    the other; those of each other file stay together, so that what a file sets up is made once."""
    for item in items:
        module = getattr(item, "module", None)
        has_ranks = any(name.startswith("ranks") for name in getattr(item, "fixturenames", ()))
        group = "ranks" if has_ranks or hasattr(module, "RankPool") else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def ranks2():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4():
    with RankPool(4) as pool:
        yield pool
