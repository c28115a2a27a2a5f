"""Memory of private steps: passes chosen by it, and the planner's largest draw and factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.privacy.private_cases import LIMIT, PrivateCase, difference, plain, records, script
from weft.config.plan import Plan
from weft.config.privacy.largest_draw import most_drawn
from weft.devices import host_memory
from weft.errors import PlanError
from weft.planner.cost.private_draws import factor_bytes, in_largest_draw
from weft.planner.search.question import Question
from weft.planner.space.columns import Columns
from weft.privacy.factors import Direct, Product, kept_bytes


@pytest.mark.parametrize("free, passes", [(2**30, 1), (2**10, 2)])
def test_passes_follow_free_memory(monkeypatch, free, passes):
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: free)
    case = PrivateCase("net", "accumulation=2")
    run, model, step = script(case)
    assert step._passes.passes == 0
    for batch in run.private_batches(records(), step):
        step(batch)
    assert step._passes.passes == passes
    assert difference(run.full_state_dict(model), plain(case)) <= LIMIT


def test_each_storage_counts_once():
    x, grad = torch.zeros(2, 3, 5), torch.zeros(2, 3, 7)
    uses = [Product(x, grad), Product(x.transpose(1, 2), grad[:, :, :2]), Direct(torch.zeros(2, 4))]
    assert kept_bytes(uses) == 4 * (2 * 3 * 5 + 2 * 3 * 7 + 2 * 4)


CONFIG = """
[model]
name = "tiny"
[train]
global_batch = 64
steps = 2000
seq_len = 256
[privacy]
epsilon = 8.0
delta = 1e-6
"""


def asked(folder, more: str = "", fixed: str = "") -> Question:
    path = folder / "run.toml"
    path.write_text(CONFIG + more)
    return Question.of(str(path), "8xh100", fixed=fixed)


def test_planner_counts_the_largest_draw(tmp_path):
    question = asked(tmp_path)
    job, plans = question.job, [Plan.parse(text) for text in ("dp_replicate=8", "dp_shard=8 zero=3", "accumulation=2")]
    assert job.private.most == most_drawn(64, 0.0, 2000)
    assert "64 sequences of 256 tokens a step, memory for up to 124" in question.work
    columns = in_largest_draw(job, Columns.of(plans, job))
    assert columns.microbatch.tolist() == [16, 16, 62]
    one, sharded, alone = factor_bytes(job, columns)
    assert sharded == 0.0
    assert alone == pytest.approx(one * 62 / 16)
    assert (factor_bytes(asked(tmp_path, "passes = 2\n").job, columns) == 0).all()
    by_user = asked(tmp_path, 'unit = "user"\nunit_records = 4\n')
    assert by_user.job.private.most == 4 * job.private.most
    # The draws exceed the expected batch, and stay below the bound.
    drawn = np.random.default_rng(0).poisson(64, 2000)
    assert 64 < drawn.max() < job.private.most


def test_planner_refuses_plans_of_no_private_run(tmp_path):
    with pytest.raises(PlanError, match="recompute=full: with privacy, the recorder does not see a forward that runs"):
        asked(tmp_path, fixed="recompute=full")
