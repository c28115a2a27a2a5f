"""TRL's trainers under plans equal the same trainers on one device. TRL is not one of Weft's dependencies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")

from tests.hf import trl_cases
from weft.verify.rank_pool import RankError

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]  # warnings of TRL itself

GRPO = {"num_generations": 2, "max_completion_length": 6, "gradient_accumulation_steps": 2, "loss_type": "dapo"}
CASES = [
    ("sft", "dp_shard=2 zero=1", {}),
    ("sft", "dp_shard=2 zero=3", {"packing": True, "max_length": 16}),
    ("sft", "tp=2", {}),
    ("sft", "cp=2", {}),
    ("sft", "pp=2", {"gradient_accumulation_steps": 2}),
    ("sft-lora", "dp_shard=2 zero=3", {}),
    ("sft-lora", "tp=2", {}),
    ("dpo", "dp_shard=2 zero=2", {}),
    ("dpo", "dp_shard=2 zero=3", {"precompute_ref_log_probs": True}),
    ("dpo-stored", "dp_shard=2 zero=1", {"precompute_ref_log_probs": True}),
    ("dpo", "tp=2", {}),
    ("dpo-stored", "tp=2", {"precompute_ref_log_probs": True}),
    ("dpo-lora", "dp_shard=2 zero=3", {}),
    ("reward", "dp_shard=2 zero=1", {}),
    ("reward", "tp=2", {}),
    ("grpo", "dp_replicate=2", GRPO),
    ("grpo", "dp_shard=2 zero=2", {**GRPO, "beta": 0.1}),
]
#: Means over tokens of ranks, and times.
UNEQUAL = ("epoch", "learning_rate", "total_flos")


@pytest.mark.parametrize(("kind", "plan", "options"), CASES)
def test_trl_equals_one_device(ranks2, tmp_path, kind, plan, options):
    trl_cases.save_folder(tmp_path / "model")
    data_ranks = 2 if "dp_" in plan else 1
    arguments: Any = (kind, tmp_path / "model")
    logs, weights = trl_cases.run(*arguments, tmp_path / "one", 2 * data_ranks, None, **options)
    found, own = ranks2.run(trl_cases.run_on_rank, *arguments, tmp_path / "ranks", 2, plan, **options)[0]
    assert [one["loss"] for one in found] == pytest.approx([one["loss"] for one in logs], abs=3e-6)
    assert [float(one["grad_norm"]) for one in found] == pytest.approx(
        [float(one["grad_norm"]) for one in logs], rel=1e-4, abs=1e-6
    )
    assert max(float(one["grad_norm"]) for one in logs) > 1e-3
    for name in ("mean_token_accuracy", "num_tokens", "rewards/margins", "reward", "logps/chosen"):
        if name in found[0]:
            assert [one[name] for one in found] == pytest.approx([one[name] for one in logs], rel=1e-4, abs=1e-5)
    assert weights.keys() == own.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(own[name], weight, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("kind", "plan", "text"),
    [
        ("dpo", "pp=2", "pp=2: DPOTrainer computes its loss by calls of the model"),
        ("dpo", "cp=2", "cp=2: DPOTrainer computes its loss by calls of the model"),
        ("grpo", "tp=2", "num_generations=2: under plan=tp=2"),
        ("grpo", "dp_shard=2 zero=3", "num_generations=2: under plan=dp_shard=2"),
    ],
)
def test_refusals(ranks2, tmp_path, kind, plan, text):
    trl_cases.save_folder(tmp_path / "model")
    options = GRPO if kind == "grpo" else {"gradient_accumulation_steps": 2}
    with pytest.raises(RankError) as caught:
        ranks2.run(trl_cases.run_on_rank, kind, tmp_path / "model", tmp_path / "ranks", 2, plan, **options)
    assert text in caught.value.said
    assert "\n" not in caught.value.said
