"""Ranks are started once for the whole session: starting one costs seconds, running a case on it little."""

from __future__ import annotations

import pytest
import torch

from weft.testing import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks2():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4():
    with RankPool(4) as pool:
        yield pool
