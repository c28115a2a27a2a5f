"""Ranks are started once for the whole session: starting one costs seconds, running a case on it little."""

from __future__ import annotations

import pytest
import torch

from weft.testing import RankPool

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-plans", action="store_true", help="parity: every legal plan, not a choice with all pairs")


@pytest.fixture(scope="session")
def ranks2():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4():
    with RankPool(4) as pool:
        yield pool
