"""Batching by cost: how samples are divided, and equality with fixed batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.train.test_tuned_parity import optimizer_of
from tests.train.tuned_folders import CASES, save_model, settings, write_tables
from weft.checkpoint.load import load_checkpoint, newest_checkpoint
from weft.comm.mesh import build_mesh
from weft.config.files import load_config
from weft.config.partitioning import ShareTimeline
from weft.config.plan import Plan
from weft.errors import ConfigError, DataError, PlanError, WeftWarning
from weft.monitor.events import tail_events
from weft.parallel.parallelize import parallelize
from weft.parallel.zero.magnitudes import load_base
from weft.train.batches.batching_by_cost import CostBorders, Costs, TokenCosts, _Runs
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.folder import RunFolder
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank
from weft.train.states.model_state import capture_model
from weft.train.step.train_step import TrainStep
from weft.train.tasks.base import Task
from weft.train.tasks.registry import find_task
from weft.verify.verifier import Float64Throughout

BATCH = 12
#: The gate runs some of them; `full` runs all.
PLANS = [f"dp_shard={ranks} zero={zero} accumulation={passes}" for ranks, zero, passes in
         [(4, 3, 1), (4, 0, 3), (2, 3, 4), (2, 1, 2), (3, 3, 2), (3, 2, 4), (1, 0, 2), (1, 0, 4)]]  # fmt: skip
PLANS += ["dp_shard=2 zero=3 accumulation=2 shares=3+1", "dp_shard=3 zero=1 accumulation=1 shares=4+2+1"]


def lengths_like_text(number: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.clip(np.exp(rng.normal(3.6, 0.8, number)).astype(int), 4, 256)


def cost_of(lengths: np.ndarray) -> np.ndarray:
    return lengths * (1 + lengths / 500)


def cost_of_run(lengths: np.ndarray, run: tuple[int, ...]) -> float:
    return float(cost_of(lengths[list(run)].max(0).sum())) * len(run) if run else 0.0


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize(("columns", "pictures"), [(1, False), (2, False), (1, True)])
def test_each_sample_is_in_one_microbatch_within_the_cost_bound(num_ranks, columns, pictures):
    lengths, rng = np.stack([lengths_like_text(900)] * columns, axis=1), np.random.default_rng(1)
    beside = rng.integers(0, 4, 900) * 150.0 * pictures
    costs = Costs(lengths, cost_of, 3000.0, most_tokens=1500, room=6, beside=beside if pictures else None)
    for number in (1, 2, 7, 64):
        indices = rng.permutation(900)[:number]
        ranks = costs.divide(indices, num_ranks)
        assert sorted(one for rank in ranks for run in rank for one in run) == list(range(number))
        assert len(ranks) == num_ranks
        assert len({len(rank) for rank in ranks}) == 1
        for rank in ranks:
            empty = [not run for run in rank]
            assert empty == sorted(empty), "an empty microbatch precedes one with samples"
            for run in filter(None, rank):
                own = lengths[indices]
                besides = beside[indices][list(run)].sum()
                assert cost_of_run(own, run) + besides <= 3000 * 1.001
                assert own[list(run)].max(0).sum() * len(run) <= 1500


def test_rank_costs_are_balanced_with_little_padding():
    lengths, rng = lengths_like_text(4000), np.random.default_rng(2)
    costs = Costs(lengths, cost_of, 4 * float(cost_of(np.array(256))), most_tokens=4 * 256, room=16)
    for _ in range(5):
        indices = rng.permutation(4000)[:64]
        own = lengths[indices]
        ranks = [sum(cost_of_run(own, run) for run in rank) for rank in costs.divide(indices, 4)]
        assert np.mean(ranks) / max(ranks) > 0.9
        useful = cost_of(own).sum()
        assert useful / sum(ranks) > 0.8
        padded = sum(cost_of(own[first : first + 16].max()) * 16 for first in range(0, 64, 16))
        assert padded / sum(ranks) > 2, "fixed batches of 16 cost less than twice as much"


@pytest.mark.parametrize("shares", [(3, 1), (9, 9, 4, 2), (1, 2, 1)])
def test_costs_of_ranks_follow_their_shares(shares):
    lengths = lengths_like_text(900)
    costs, even = Costs(lengths, cost_of, 3000.0, most_tokens=1500), []
    for seed in range(20):
        indices = np.random.default_rng(seed).permutation(900)[:192]
        ranks = costs.divide(indices, len(shares), shares)
        assert sorted(one for rank in ranks for run in rank for one in run) == list(range(192))
        assert len({len(rank) for rank in ranks}) == 1
        assert all(cost_of_run(lengths[indices][:, None], run) <= 3000.0 * (1 + 1e-9) for rank in ranks for run in rank)
        own = [cost_of(lengths[indices][[one for run in rank for one in run]]).sum() for rank in ranks]
        even += [one / share * sum(shares) / sum(own) for one, share in zip(own, shares, strict=True)]
    assert min(even) > 0.95
    assert max(even) < 1.05


def test_sample_larger_than_a_microbatch_is_rejected():
    with pytest.raises(DataError, match=r"data.microbatch_cost=300: sample \d+ .* Use data.microbatch_cost=\d+"):
        Costs(lengths_like_text(900), cost_of, 300.0).check()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("by_cost")
    (found / "eval").mkdir()
    write_tables(found, 50)
    write_tables(found / "eval", 12)
    return found


def prepared(root: Path, case: str, *more: str) -> RunFolder:
    family = CASES[case][1]
    if not (root / family).exists():
        save_model(root / family, family, dropout=0.1)
    words = [*settings(case, root), f"train.global_batch={BATCH}", *more]
    if any(word.startswith("train.epochs") for word in more):
        words = [word for word in words if not word.startswith("train.steps")]
    return prepare_run(load_config(None, words).config, world_size=1)


def trained(
    plan_text: str, folder: Path, steps: int
) -> tuple[list[tuple[float, float, int]], dict[str, torch.Tensor], list[int]]:
    """Return losses, norms and counts of all steps, final weights, and the number of microbatches per step."""
    torch.set_num_threads(1)
    plan = Plan.parse(f"{plan_text} precision=fp64")
    with Float64Throughout():
        mesh = build_mesh(plan)
        config = RunFolder(folder).config()
        task = find_task(config)
        task.open(RunFolder(folder))
        by_cost = config.data.batching == "cost"
        model = task.initial_model(plan)
        weights = task.initial_weights(model)
        parallelize(model, mesh, filled_later=True)
        load_base(model, weights)
        step = TrainStep(model, optimizer_of(model), task.loss, mesh, forward=task.forward, max_grad_norm=1.0)
        timeline = ShareTimeline(plan.shares)
        batches = task.batches(
            Share(BATCH, plan.microbatches_per_step, mesh.data.rank, mesh.data.size, timeline=timeline)
        )
        found, numbers = [], []
        for index in range(steps):
            own = batches.batches(index)
            numbers.append(len(own))
            done = step(Microbatches(own, any_number=by_cost))
            found.append((done.loss, done.grad_norm, done.num_tokens))
        return found, {name: tensor.clone() for name, tensor in capture_model(model).items()}, numbers


def assert_equal(got, wanted) -> None:
    for one, other in zip(got[0], wanted[0], strict=True):
        assert one == pytest.approx(other, rel=1e-10, abs=1e-12)
    for name, tensor in got[1].items():
        torch.testing.assert_close(tensor, wanted[1][name], rtol=1e-10, atol=1e-10, msg=name)


def check(root: Path, case: str, plans, pools, steps: int = 20, costs: tuple[str, ...] = ("auto", "160")) -> None:
    fixed = prepared(root, case, "run.name=fixed-" + case).path
    wanted = trained("accumulation=1", fixed, steps)
    for cost in costs:
        name = f"cost-{cost}-{case}"
        by_cost = prepared(root, case, "data.batching=cost", f"data.microbatch_cost={cost}", f"run.name={name}").path
        for plan in plans:
            ranks = int(plan.split()[0].partition("=")[2])
            results = pools[ranks].run(trained, plan, by_cost, steps) if ranks > 1 else [trained(plan, by_cost, steps)]
            for result in results:
                assert_equal(result, wanted)
                assert result[2] == results[0][2]
            if cost == "160":
                assert len(set(results[0][2])) > 1 or ranks > 1, "all steps have the same number of microbatches"


def test_losses_and_weights_match_fixed_batches(root, ranks2):
    plans = ["dp_shard=2 zero=3 accumulation=3", "dp_shard=2 zero=2 accumulation=2 shares=3+1"]
    check(root, "classify", plans, {2: ranks2}, steps=4, costs=("160",))


@pytest.mark.full
def test_every_plan_and_task_matches_fixed_batches(root, ranks2, ranks4):
    from weft.verify.rank_pool import RankPool

    with RankPool(3) as ranks3:
        for case in ("classify", "tokens", "masked", "t5", "classify-decoder"):
            check(root, case, PLANS, {2: ranks2, 3: ranks3, 4: ranks4})


def test_steps_by_cost_are_equal_under_every_plan(root, ranks2):
    """Steps differ in their number of samples; some have a single sample beyond the bound."""
    most = "train.global_cost=90"
    one = prepared(root, "classify", "data.batching=cost", most, "run.name=steps-by-cost").path
    wanted = trained("accumulation=1", one, 6)
    two = prepared(root, "classify", "data.batching=cost", "data.microbatch_cost=160", most, "run.name=steps-cut").path
    for result in ranks2.run(trained, "dp_shard=2 zero=3 accumulation=2", two, 6):
        assert_equal(result, wanted)
    assert len({count for _, _, count in wanted[0]}) > 1


def test_run_by_cost_ends_with_its_epochs_and_resumes(root):
    """The checkpoint stores the data position: steps before and after a stop match an uninterrupted run."""
    words = ["data.batching=cost", "train.global_cost=90", "optimizer.lr=1e-3", "schedule.warmup_steps=0"]
    words += ["schedule.kind=constant", "eval.every=0"]
    whole = prepared(root, "classify", *words, "train.epochs=1.5", "run.name=cost-whole")
    task = find_task(whole.config())
    task.open(whole)
    steps, places = whole.config().train.steps, task.step_borders()
    assert places.first(steps) >= 1.5 * task.samples_per_epoch() > places.first(steps - 1)
    assert run_rank(whole).step == steps
    for some in (steps // 2, steps):
        assert run_rank(prepared(root, "classify", *words, f"train.steps={some}", "run.name=cost-cut")).step == some
    cut = RunFolder(whole.path.parent / "cost-cut")
    losses, others = ([e["loss"] for e in tail_events(one.events) if e["event"] == "step"] for one in (whole, cut))
    assert losses == pytest.approx(others, rel=1e-5)
    found = newest_checkpoint(cut.path / "checkpoints")
    assert found is not None
    assert load_checkpoint(found.path).state["data"]["next_sample"] == places.first(steps)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.floats(1, 60),
    st.integers(0, 12),
    st.integers(0, 40),
)
def test_steps_take_samples_up_to_their_cost(costs, most, step, place):
    def in_order(epoch):
        return np.roll(np.array(costs, float), epoch)

    needed = int((step + 2) * most) + place  # of samples that cost 1 or more
    endless = np.concatenate([in_order(epoch) for epoch in range(needed // len(costs) + 2)])
    firsts, used = [0], 0.0
    for number, cost in enumerate(endless):
        if number > firsts[-1] and used + cost > most * (1 + 1e-9):
            firsts.append(number)
            used = 0.0
        used += cost
    places = CostBorders(in_order, len(costs), most)
    assert [places.first(one) for one in range(step)] == firsts[:step]
    at = places.step_at(place)
    assert firsts[at] <= place < firsts[at + 1]
    assert places.steps(firsts[at]) == at


@pytest.mark.parametrize(
    ("case", "more", "sentence"),
    [
        ("embed", "data.batching=cost", "task.name=embed does not report the length"),
        ("classify", "data.microbatch_cost=300", "only data.batching=cost reads it"),
        ("classify", "train.global_cost=300", "train.global_cost=300: only data.batching=cost uses costs"),
    ],
)
def test_invalid_settings_are_rejected(case, more, sentence, root):
    with pytest.raises(ConfigError, match=sentence):
        prepared(root, case, more, "run.name=refused")


@given(
    st.lists(st.tuples(*[st.integers(0, 300)] * 2), min_size=1, max_size=60),
    st.floats(0, 9000),
    st.one_of(st.none(), st.integers(1, 3000)),
)
def test_runs_are_filled_up_to_the_bound(lengths, bound, most_tokens):
    """Each run takes samples until one more would exceed the bound."""
    longest_first = np.array(sorted(lengths, key=sum, reverse=True))

    def cost_of(tokens):
        return np.asarray(tokens, float) * (1 + np.asarray(tokens) / 1000)

    found, start = [], 0
    for stop in range(1, len(lengths) + 1):
        tokens, number = int(longest_first[start:stop].max(0).sum()), stop - start
        costs_much = cost_of(tokens) * number > bound * (1 + 1e-9) or tokens * number > (most_tokens or np.inf)
        if costs_much and number > 1:
            found.append(range(start, stop - 1))
            start = stop - 1
    found.append(range(start, len(lengths)))
    assert _Runs(longest_first, cost_of, most_tokens).split_at_cost(bound) == found


def test_pipeline_and_small_bound_are_rejected(root):
    words = [*settings("classify", root), "data.batching=cost", "plan=pp=2 microbatches=2", "run.name=refused"]
    with pytest.raises(PlanError, match=r"pp=2.*data.batching=cost"):
        prepare_run(load_config(None, words).config, world_size=2)
    with pytest.raises(DataError, match=r"data\.microbatch_cost=4: sample"):
        prepared(root, "classify", "data.batching=cost", "data.microbatch_cost=4", "run.name=refused")


def test_old_public_names_work_with_a_warning():
    with pytest.warns(WeftWarning, match=r"Old\.costs_beside is now extra_costs"):

        class Old(Task):
            def costs_beside(self):
                return np.ones(2)

    assert Old.extra_costs is Old.costs_beside
    calls = []
    with pytest.warns(WeftWarning, match=r"TrainStep\.arrive is now wait_for_weights"):
        TrainStep.arrive(SimpleNamespace(wait_for_weights=lambda: calls.append(1)))
    assert calls == [1]


@pytest.mark.parametrize("is_tied", [True, False])
def test_output_layer_has_a_cost_and_embeddings_have_none(is_tied):
    table, head = torch.nn.Embedding(50, 4), torch.nn.Linear(4, 50, bias=False)
    if is_tied:
        head.weight = table.weight
    model = torch.nn.Sequential(table, torch.nn.Linear(4, 4), head)
    assert TokenCosts.of(model, 1, 4) == TokenCosts(4 * 50 + 4 * 4 + 4, 8.0)
