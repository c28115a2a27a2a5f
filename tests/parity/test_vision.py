"""Vision-language models on samples with different numbers of images match one process under every split."""

from __future__ import annotations

import json

import pytest
import torch

from tests.choice import gate_runs, todays
from tests.parity.vision_cases import losses_of_script, train_all
from weft.cli.app import run
from weft.verify import verifier as verify

RTOL = 1e-10
PLANS = [
    "dp_shard=2 zero=1",
    "dp_shard=2 zero=2 accumulation=2",
    "dp_shard=2 zero=3",
    "dp_shard=2 zero=3 accumulation=3 recompute=full",
    "tp=2 accumulation=2",
    "tp=2 sp=on",
    "cp=2 accumulation=2",
]


@pytest.fixture(scope="module")
def one_process():
    return train_all("")


@pytest.mark.parametrize("plan", todays(gate_runs(PLANS, 1, 3, 4, 6), parts=2))
def test_images_and_patches_are_split_with_their_samples(plan, one_process, ranks2):
    for found in ranks2.run(train_all, f"{plan} precision=fp64"):
        different = {name: result.largest_difference(one_process[name]) for name, result in found.items()}
        assert max(different.values()) < RTOL, different


def test_script_splits_its_loader_by_samples(ranks2):
    [reference] = losses_of_script(["accumulation=2"]).values()
    for found in ranks2.run(losses_of_script, ["dp_shard=2 zero=2", "dp_replicate=2 accumulation=2"]):
        for losses in found.values():
            torch.testing.assert_close(losses, reference, rtol=RTOL, atol=0.0)


@pytest.fixture
def shared_ranks(ranks2, monkeypatch):
    """Make `verify` use the existing pool of ranks."""

    class ExistingPool:
        def __init__(self, num_ranks, timeout_s):
            pass

        def __enter__(self):
            return ranks2

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(verify, "RankPool", ExistingPool)


@pytest.mark.parametrize("model", gate_runs(["llava", "qwen2_vl"], 1))
def test_verify_accepts_a_user_loader(model, shared_ranks, capsys):
    """Use batches of 3 samples, which do not divide evenly over two ranks or two microbatches."""
    arguments = ["--plan", "dp_shard=2 zero=3 accumulation=2", "--global-batch", "3", "--steps", "2", "--json"]
    assert run(["verify", "--model", f"tests.parity.vision_cases:{model}", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    assert report["max_rel_diff"] < RTOL


def test_verify_with_ranks_without_images_under_zero_3(shared_ranks, capsys):
    """Check that tower and projector also run on ranks whose microbatch has only text."""
    arguments = ["--plan", "dp_shard=2 zero=3", "--global-batch", "2", "--steps", "2", "--json"]
    assert run(["verify", "--model", "tests.parity.vision_cases:without_blanks", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["max_rel_diff"] < RTOL
