"""`run.generate`: texts of a model in training equal those of a plain copy, and training is not changed by them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import weft
from tests.choice import gate_runs
from tests.parity.cases import LLAMA, HuggingFaceCase
from tests.parity.moe_cases import MOE, MoECase
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ConfigError, ModelError
from weft.generation.batch import generate_batch
from weft.generation.requests import Completion, Request, Sampling
from weft.train.generating import limits_of
from weft.verify.parity import DecoderCase, local_microbatches
from weft.verify.verifier import Float64Throughout

PLANS = ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=3", "tp=2",
         "tp=2 sp=on", "pp=2 accumulation=2", "cp=2",
         "dp_replicate=2 sync=average:2"]  # fmt: skip
STEPS, EVERY = 20, 5
PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3]]
SETTINGS: dict[str, Any] = {"max_tokens": 5, "temperature": 1.2, "seed": 1}


def case_of(name: str) -> Any:
    if name == "hugging face":
        return HuggingFaceCase(LLAMA, num_steps=STEPS)
    return MoECase(MOE, num_steps=STEPS) if name == "experts" else DecoderCase(LLAMA, num_steps=STEPS)


def train(plan_text: str, name: str, every: int, fits: bool = True) -> tuple[dict[str, Any], list[list[Completion]]]:
    """Train, and generate after every so many steps. Return the weights, and the texts with those of a plain copy."""
    plan, case = Plan.parse(f"{plan_text} precision=fp64"), case_of(name)
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    model, texts = run.parallelize(case.model()), list[list[Completion]]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = run.train_step(model, optimizer, case.loss, forward=case.forward, max_grad_norm=0.5)
    for index in range(STEPS):
        step(local_microbatches(case.batch(index), plan, run.mesh.data.rank))
        if every and index % every == 0:
            was = {module.training for module in model.modules()}
            free = nullcontext() if fits else mock.patch("weft.train.generating.can_copy", return_value=False)
            with Float64Throughout(), free:
                texts.append(run.generate(model, PROMPTS, **SETTINGS))
            assert {module.training for module in model.modules()} == was
            whole = run.full_state_dict(model, everywhere=True)
            plain = case.model()
            plain.load_state_dict(whole)
            requests = [Request(key, tuple(prompt)) for key, prompt in enumerate(PROMPTS)]
            with Float64Throughout():
                texts.append(generate_batch(plain.eval(), requests, Sampling(**SETTINGS), limits_of(plain, 32)))
    return run.full_state_dict(model, everywhere=True), texts


def expect_unchanged(ranks2: Any, plan: str, name: str, fits: bool = True) -> None:
    without = ranks2.run(train, plan, name, 0)[0][0]
    for weights, texts in ranks2.run(train, plan, name, EVERY, fits):
        for key, tensor in without.items():
            assert torch.equal(weights[key], tensor), (plan, key)
        assert len(texts) == 2 * len(range(0, STEPS, EVERY))
        for mine, plain in zip(texts[::2], texts[1::2], strict=True):
            assert [one.ids for one in mine] == [one.ids for one in plain]
            for one, other in zip(mine, plain, strict=True):
                assert one.log_probs == pytest.approx(other.log_probs, abs=1e-10)


@pytest.mark.parametrize("plan", gate_runs(PLANS, 0, 3))
def test_training_is_not_changed_by_texts(plan, ranks2):
    expect_unchanged(ranks2, plan, "decoder")


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "name", "fits"),
    [(plan, "hugging face", True) for plan in PLANS]
    + [("dp_shard=2 zero=3", "hugging face", False), ("dp_shard=2 ep=2 zero=1", "experts", True)],
)
def test_other_models_and_sharded_weights(plan, name, fits, ranks2):
    expect_unchanged(ranks2, plan, name, fits)


def test_bad_settings_and_models():
    plan = Plan.parse("precision=fp64")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    model = run.parallelize(case_of("decoder").model())
    with pytest.raises(ConfigError, match="max_tokens=0"):
        run.generate(model, PROMPTS, max_tokens=0)
    assert run.generate(model, [[10**6]])[0].reason == "refused"
    with pytest.raises(ModelError, match="this run did not parallelize it"):
        run.generate(case_of("decoder").model(), PROMPTS)
    linear = run.parallelize(torch.nn.Linear(4, 4).double())
    with pytest.raises(ModelError, match="its config has no vocabulary"):
        run.generate(linear, PROMPTS)
