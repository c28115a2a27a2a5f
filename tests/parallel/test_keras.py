"""Keras 3 models under plans: equal to a loop without Weft, or refused in one sentence."""

from __future__ import annotations

import pytest
import torch

from tests.parallel import keras_cases
from tests.parallel.keras_cases import needs_keras
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError, PlanError
from weft.parallel.parallelize import parallelize

pytestmark = needs_keras

EXACT = ("dense", "convolution", "attention", "recurrent", "frozen", "nested", "subclass")
CASES = {
    "dp_replicate=2": EXACT,
    "dp_shard=2 zero=1": EXACT,
    "dp_shard=2 zero=2": EXACT,
    "dp_shard=2 zero=3": EXACT,
    "tp=2": ("dense", "attention", "nested"),
}


def trained_all(plan: str, names: tuple[str, ...]):
    return {name: keras_cases.trained(plan, name) for name in names}


def check(plan: str, name: str, found, expected) -> None:
    what = f"{plan} {name}"
    assert found[0] == pytest.approx(expected[0], rel=1e-10), what
    assert found[1] == expected[1], what
    read = dict(zip(expected[2], found[2].values(), strict=True)) if found[2] else {}
    for path, value in read.items():
        torch.testing.assert_close(value, expected[2][path], rtol=1e-9, atol=1e-11, msg=f"{what} {path}")


@pytest.mark.parametrize("plan", CASES)
def test_plans_train_and_save_keras_models_like_one_process(plan, ranks2):
    found = ranks2.run(trained_all, plan, CASES[plan])[0]
    for name in CASES[plan]:
        check(plan, name, found[name], keras_cases.plain(name))


def test_one_process_trains_every_layer_like_keras():
    for name in (*EXACT, "batch_norm"):
        check("", name, keras_cases.trained("", name), keras_cases.plain(name))
