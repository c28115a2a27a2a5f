"""Rank pool: results in order, the failing rank named, and usable after a failure."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from weft.errors import CommError, ModelError
from weft.verify.rank_pool import RankError, RankPool


def who() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError("this rank was asked to fail")
    return "fine"


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    time.sleep(30)


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(30)


def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_ranks_get_the_current_environment(monkeypatch):
    for word in ("warp", "weft"):
        monkeypatch.setenv("WEFT_TEST_WORD", word)
        with RankPool(1) as pool:
            assert pool.run(variable, "WEFT_TEST_WORD") == [word]


def test_results_are_in_rank_order_from_persistent_processes(ranks2):
    first, second = ranks2.run(who), ranks2.run(who)
    assert [row[:2] for row in first] == [(0, 2), (1, 2)]
    assert first == second
    assert len({row[2] for row in first} | {os.getpid()}) == 3


def test_failure_names_its_rank_and_pool_stays_usable(ranks2):
    with pytest.raises(
        CommError, match=r"rank 1 of 2 failed in fail_on:(.|\n)*ValueError: this rank was asked to fail"
    ):
        ranks2.run(fail_on, 1)
    assert ranks2.run(fail_on, 9) == ["fine", "fine"]


@pytest.mark.full
def test_dead_and_late_ranks_are_distinguished():
    late = pytest.raises(CommError, match=r"rank 0 of 2 failed in sleep_on:\nno answer within 3 s")
    with RankPool(2, timeout_s=3) as pool, late:
        pool.run(sleep_on, 0)
    start = time.monotonic()
    with (
        RankPool(2, timeout_s=60) as pool,
        pytest.raises(CommError, match=r"rank 1 of 2 .*\n.*ended without an answer"),
    ):
        pool.run(die_on, 1)
    # Rank 0 is not waited for until its own timeout.
    assert time.monotonic() - start < 45


def refuse_on(rank):
    """Raise a refusal on one rank while the other waits in the step."""
    if dist.get_rank() == rank:
        raise ModelError("lm_head: not here. Use pp=1.")
    time.sleep(60)


def test_refusal_of_one_rank_is_raised_while_others_wait():
    start = time.monotonic()
    with RankPool(2, timeout_s=60) as pool:
        with pytest.raises(RankError, match="ModelError: lm_head: not here") as caught:
            pool.run(refuse_on, 1)
        assert caught.value.refusal == "lm_head: not here. Use pp=1."
        assert pool.run(fail_on, 9) == ["fine", "fine"]
    assert time.monotonic() - start < 45
