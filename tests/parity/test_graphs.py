"""graphs=on changes no bit: recorded passes and steps, replayed without a line of the model's code, beside eager ones."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from tests.parity.graph_cases import STEPS, TOKENS, VOCAB, adamw, batch_of, forward, loss_of, pair, sgd, train
from weft.errors import ModelError, PlanError, WeftWarning
from weft.mesh import build_mesh
from weft.parallel import parallelize
from weft.parallel.dropout import FixedDraws
from weft.parallel.zero.flat import recorded
from weft.spec.plan import Plan
from weft.testing import OpRecorder
from weft.train import TrainStep
from weft.train.microbatch.passes import graphed_passes
from tests.parity.dropout_cases import PlainModel

#: Recordings of passes by their places in a step: the only one; the first, those between, the last.
PLANS = {
    "precision=fp64": 1,
    "precision=fp64 accumulation=2": 2,
    "precision=fp64 accumulation=3 recompute=full": 3,
    "precision=bf16 accumulation=2": 2,
    "precision=fp32 recompute=selective": 1,
    "precision=fp16": 1,
    "precision=fp8 recompute=attention": 1,
}


@pytest.mark.parametrize("plan", PLANS)
def test_replayed_steps_are_eager_ones(plan):
    """Dropout, clipping, a rate that changes, other numbers of tokens: losses, weights, gradients and states, bit by bit."""
    same, found = pair(plan)
    assert same
    microbatches = Plan.parse(plan).microbatches_per_step
    assert found.recordings == PLANS[plan] + 1  # and the optimizer's step
    assert found.passes == (STEPS - 2) * microbatches - max(0, microbatches - 2 - 2) * 0 or found.passes > STEPS
    assert found.replays > STEPS


def test_momentum_and_its_rate_are_read_anew():
    same, found = pair("precision=fp64 accumulation=2", optimizer=sgd)
    assert same
    assert found.recordings == 3
