"""The audit: silent on right runs, loud with clipping off, and its bound by simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.privacy.accounting import Steps, epsilon_of
from weft.privacy.audit import SIGNIFICANCE, audit, choose_canaries, lower_bound, p_value
from weft.privacy.gradients import SampleGradients
from weft.privacy.settings import Privacy

RECORDS, DIM = 300, 3000


def test_bound_of_randomized_response():
    """Randomized response with probability e / (1 + e) has epsilon = 1, and the lower bound stays below 1."""
    random = np.random.default_rng(0)
    above = 0
    for _ in range(40):
        coins = random.random(400) < 0.5
        told = np.where(random.random(400) < np.e / (1 + np.e), coins, ~coins)
        above += audit(told + random.random(400) * 1e-3, coins, 1e-6).epsilon > 1.0
    assert above <= 40 * SIGNIFICANCE + 3


def test_bound_grows_with_right_guesses():
    bounds = [lower_bound(200, 200, right, 1e-6, 0.05) for right in (100, 120, 160, 190, 200)]
    assert bounds[0] == 0.0
    assert bounds == sorted(bounds)
    assert 3.5 < bounds[-1] < 5
    assert lower_bound(200, 200, 190, 1e-2, 0.05) < bounds[3]
    assert p_value(10, 10, 0, 1.0, 0.0) == 1.0


def test_canaries_are_a_function_of_the_key():
    first, other = choose_canaries(b"k" * 32, 1000, 200), choose_canaries(b"l" * 32, 1000, 200)
    assert len(set(first.records.tolist())) == 200
    assert 60 < first.is_in.sum() < 140
    assert first.records.tolist() != other.records.tolist()
    assert choose_canaries(b"k" * 32, 1000, 200).is_in.tolist() == first.is_in.tolist()


def audited(steps: int = 12) -> float:
    """Train a linear model on random labels, which it can only memorize. Return the lower bound of epsilon."""
    random = torch.Generator().manual_seed(0)
    data = list(
        zip(torch.randn(RECORDS, DIM, generator=random), torch.randint(0, 2, (RECORDS,), generator=random), strict=True)
    )
    torch.manual_seed(0)
    run = weft.Run(Plan(), build_mesh(Plan()), Ledger(), seed=0)
    linear = nn.Linear(DIM, 2)
    nn.init.zeros_(linear.weight)
    model = run.parallelize(linear)
    privacy = Privacy(RECORDS, 60, steps, 1e-4, noise=3.0, clip=0.05, key="test:2", canaries=200)

    def loss(output, batch):
        return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])

    step = run.train_step(model, torch.optim.SGD, loss, lr=0.02, privacy=privacy, check_batch=False)
    x, y = (torch.stack(column) for column in zip(*data, strict=True))
    before = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
    for batch in run.private_batches(data, step):
        step(batch)
    after = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
    canaries = step.privacy.canaries()
    scores = (before - after).double().numpy()[canaries.records]
    return audit(scores, canaries.is_in, privacy.delta).epsilon


def test_audit_is_silent_on_a_right_run_and_loud_without_clipping():
    stated = epsilon_of([Steps(3.0, 0.2, 12)], 1e-4)
    assert audited() < stated
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SampleGradients, "weights", lambda self, records: [torch.ones_like(n) for n in self.norms(records)]
        )
        without = audited()
    assert without > 2 * stated
