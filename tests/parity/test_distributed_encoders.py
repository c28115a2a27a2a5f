"""Encoders whose inputs are distributed over ranks by cost match one process for any number of images per batch."""

from __future__ import annotations

import functools

import pytest

from tests.choice import todays
from tests.parity.encoder_cases import train, train_all

RTOL = 1e-10
#: (plan, style of the encoder; "": chosen automatically if the plan needs it).
TWO = [
    ("tp=2", "spread"),
    ("dp_shard=2 zero=3 accumulation=2", "spread:data"),
    ("dp_shard=2 zero=3 accumulation=3", ""),
]
MORE = [
    *TWO,
    ("dp_replicate=2 accumulation=2", "spread:data"),
    ("dp_shard=2 zero=1", "spread:data"),
    ("dp_shard=2 zero=2 accumulation=3", "spread:data"),
    ("dp_shard=2 zero=3 accumulation=3 recompute=full", "spread:data"),
    ("dp_shard=2 zero=3 accumulation=3", "spread"),
    ("tp=2 accumulation=3 recompute=full", "spread"),
    ("tp=2 sp=on", "spread"),
    ("tp=2 compile=on", "spread"),
    ("dp_shard=2 zero=3 accumulation=2 compile=on", "spread:data"),
    ("pp=2 microbatches=3", "spread"),
]
FOUR = [
    ("dp_shard=2 zero=3 tp=2 accumulation=2", "spread:data"),
    ("dp_shard=2 zero=3 tp=2 accumulation=3", "spread"),
    ("dp_replicate=2 dp_shard=2 zero=3 accumulation=2", "spread:data"),
    ("dp_replicate=2 tp=2 sp=on accumulation=2", "spread:data"),
    ("tp=4", "spread"),
    ("pp=2 tp=2 microbatches=3", "spread"),
    ("dp_shard=2 zero=2 pp=2 microbatches=2", "spread:data"),
    ("dp_shard=2 zero=3 pp=2 microbatches=2", "spread:data"),
]


@functools.cache
def one_process(name):
    return train("", name, "")


def differing(found):
    differences = {run: result.largest_difference(one_process(run[1])) for run, result in found.items()}
    return {run: difference for run, difference in differences.items() if not difference < RTOL}


def runs_of(plan, style, names):
    """Return the supported runs of a plan.

    Stages split one chain of blocks, of which Whisper's encoder is a part, and the user model has two. The user model
    needs inputs for its tower in every call.
    """
    excluded = {"whisper", "own"} if "pp=" in plan else set()
    excluded |= {"own"} if "sp=on" in plan or not style else set()
    return [(plan, name, style) for name in names if name not in excluded]


@pytest.mark.parametrize("plan, style", todays(TWO, parts=3))
def test_distributed_images_match_one_process_on_two_ranks(plan, style, ranks2):
    for found in ranks2.run(train_all, runs_of(plan, style, ("llava", "own"))):
        assert not differing(found)


@pytest.mark.full
@pytest.mark.parametrize("plan, style", MORE)
def test_distributed_encoders_match_one_process_on_two_ranks(plan, style, ranks2):
    runs = runs_of(plan, style, ("llava", "qwen2_vl", "own", "whisper"))
    # A model takes a minute to compile: all models in one call would exceed the pool's timeout.
    for part in [[run] for run in runs] if "compile=on" in plan else [runs]:
        for found in ranks2.run(train_all, part):
            assert not differing(found)


@pytest.mark.full
@pytest.mark.parametrize("plan, style", FOUR)
def test_distributed_encoders_match_one_process_on_four_ranks(plan, style, ranks4):
    for found in ranks4.run(train_all, runs_of(plan, style, ("llava", "qwen2_vl", "own", "whisper"))):
        assert not differing(found)
