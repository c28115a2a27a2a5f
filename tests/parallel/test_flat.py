"""Data-parallel engine of ZeRO stages 0 to 2: state, communication and errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.loops import STAGES, fork, laid_out, mlp, plain_weights, rows, weights
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import CommError, ModelError
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.zero_flat.model import FlatModel
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep
from weft.verify.parity import several_buckets


def square(output: torch.Tensor, batch: object) -> tuple[torch.Tensor, int]:
    return output.square().sum(), output.shape[0]


def step_of(model: nn.Module, mesh, **options) -> TrainStep:
    return TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.01), square, mesh, **options)


def each_microbatch(plan: str, each: bool) -> tuple[dict, int, float]:
    ledger = Ledger()
    mesh = build_mesh(Plan.parse(plan), record=ledger.record)
    from weft.parallel.state.gradients import attach

    model = mlp()
    attach(model, FlatModel(model, mesh, each_microbatch=each, bucket_bytes=512))
    step = step_of(model, mesh)
    ledger.clear()
    for index in range(2):
        metrics = step(Microbatches(rows(10 * index + micro, mesh.rank) for micro in range(3)))
    return weights(model), ledger.entry("dp_shard", "reduce_scatter").num_bytes, metrics.grad_norm


def test_gradients_are_reduced_per_step_or_per_microbatch(ranks2):
    once = ranks2.run(each_microbatch, "dp_shard=2 zero=2 precision=fp64 accumulation=3", False)[0]
    each = ranks2.run(each_microbatch, "dp_shard=2 zero=2 precision=fp64 accumulation=3", True)[0]
    torch.testing.assert_close(each[0], once[0], rtol=1e-12, atol=1e-15)
    assert each[1] == 3 * once[1] > 0
    assert each[2] == pytest.approx(once[2], rel=1e-12)


class Repeats(nn.Module):
    """A layer under reentrant recomputation, called `times` times, so autograd delivers that many gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 4)
        self.times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(self.times):
            x = checkpoint(self.inner, x, use_reentrant=True).tanh()
        return self.outer(x)


def repeats() -> Repeats:
    torch.manual_seed(2)
    return Repeats().double()


def repeat(plan: str, times: list[list[int]]) -> tuple[list[str], dict]:
    """Train steps with `times[step][rank]` calls of the layer. Small buckets hold one parameter each."""
    model, mesh = laid_out(plan, repeats(), bucket_bytes=64)
    step, errors = step_of(model, mesh), []
    for index, counts in enumerate(times):
        model.times = counts[mesh.rank]
        try:
            step(rows(index, mesh.rank))
        except CommError as error:
            errors.append(str(error))
            step(rows(index, mesh.rank))
    return errors, weights(model)


@pytest.mark.parametrize("plan", STAGES)
def test_layer_recomputed_twice_contributes_twice(plan, ranks2):
    reference = repeats()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for index, counts in enumerate([[2, 2], [1, 2], [2, 0]]):
        for rank in (0, 1):
            reference.times = counts[rank]
            (reference(rows(index, rank)).square().sum() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for errors, got in ranks2.run(repeat, plan + " precision=fp64", [[2, 2], [1, 2], [2, 0]]):
        assert errors == []
        torch.testing.assert_close(got, plain_weights(reference), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("plan", STAGES)
def test_late_gradient_raises_with_the_parameter_name(plan, ranks2):
    """Only one rank detects it, all ranks raise, and the next attempt succeeds."""
    results = ranks2.run(repeat, plan + " precision=fp64", [[1, 1], [1, 3]])
    fresh = ranks2.run(repeat, plan + " precision=fp64", [[3, 3], [1, 1], [1, 3]])
    for errors, _ in results:
        assert len(errors) == 1
        assert errors[0].startswith("parameter 'inner.")
        assert "on rank 1 autograd delivered" in errors[0]
    assert [errors for errors, _ in fresh] == [[], []]


def change_parameters(plan: str) -> list[str]:
    found = []
    for change in (
        lambda model: model.float(),
        lambda model: model[0].requires_grad_(False),
        lambda model: setattr(model[0].weight, "data", torch.zeros(16, 8, dtype=torch.float64)),
    ):
        model, mesh = laid_out(plan, mlp())
        step = step_of(model, mesh)
        change(model)
        with pytest.raises(ModelError) as caught:
            step(rows(0, mesh.rank))
        found.append(str(caught.value))
    frozen = mlp()
    frozen[0].requires_grad_(False)
    model, mesh = laid_out(plan, frozen)
    step = step_of(model, mesh)
    model[0].requires_grad_(True)
    with pytest.raises(ModelError) as caught:
        step(rows(0, mesh.rank))
    return [*found, str(caught.value)]


def test_moved_frozen_and_unfrozen_parameters_are_detected(ranks2):
    moved, frozen, replaced, unfrozen = ranks2.run(change_parameters, "dp_shard=2 zero=1 precision=fp64")[0]
    assert moved == replaced.replace("memory or another format", "memory or another format")
    assert moved.startswith("parameter '0.weight': it was moved to other memory or another format after")
    assert frozen.startswith("parameter '0.weight': it was frozen after")
    assert unfrozen.startswith("model: a frozen parameter was unfrozen after parallelize.")


def write_weights(plan: str) -> list[bool]:
    """Return whether masters equal weights that a user sets by load_state_dict (unrounded) or directly."""
    model, mesh = laid_out(plan, mlp(torch.float32))
    step = step_of(model, mesh)
    step(rows(0, mesh.rank, torch.float32))
    torch.manual_seed(5)
    other = mlp(torch.float32)
    for param in other.parameters():
        nn.init.normal_(param)
    model.load_state_dict(other.state_dict())
    loaded = all(torch.equal(weights(model)[name], param) for name, param in other.named_parameters())
    with torch.no_grad():
        model[0].bias.fill_(0.5)
    data_parallel(model).begin_step()
    filled = weights(model)["0.bias"]
    return [loaded, bool((filled == 0.5).all()), torch.equal(weights(model)["2.bias"], other[2].bias)]


@pytest.mark.parametrize("plan", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_set_by_the_user_replace_the_masters(plan, precision, ranks2):
    assert ranks2.run(write_weights, f"{plan} precision={precision}") == [[True, True, True]] * 2


def full_gradients_after(plan: str) -> list[bool]:
    model, mesh = laid_out(plan, mlp())
    step_of(model, mesh)([rows(index, mesh.rank) for index in range(mesh.plan.accumulation)])
    buckets = data_parallel(model).reducer.buckets
    return [bucket.grads is None for bucket in buckets]


def test_full_gradients_are_freed_unless_accumulated(ranks2):
    """A single microbatch's gradients are reduced from autograd's memory. Stage 1 first sums several microbatches."""
    for plan, none in (
        ("zero=2", True),
        ("zero=2 accumulation=2", True),
        ("zero=1", True),
        ("zero=1 accumulation=2", False),
    ):
        found = ranks2.run(full_gradients_after, f"dp_shard=2 precision=fp64 {plan}")[0]
        assert found == [none] * len(found), plan


def weights_of_first_rank(plan: str) -> tuple[dict, dict]:
    mesh = build_mesh(Plan.parse(plan))
    torch.manual_seed(10 + mesh.rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1).requires_grad_(False)).double()
    model[1].running_mean += mesh.rank
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parallelize(model, mesh)
    return before, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("plan", STAGES)
def test_all_ranks_start_with_rank_zero_weights_and_buffers(plan, ranks2):
    (first, got), (_, other) = ranks2.run(weights_of_first_rank, plan + " precision=fp64")
    assert got.keys() == first.keys()
    for name, tensor in first.items():
        assert torch.equal(got[name], tensor)
        assert torch.equal(other[name], tensor)


def batch_norm(plan: str) -> dict:
    torch.manual_seed(0)
    model, mesh = laid_out(plan, nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)))
    step = step_of(model, mesh)
    for index in range(2):
        images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(index + 7 * mesh.rank))
        step(images)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_batch_norm_statistics_are_rank_zero_fp32_values(precision, ranks2):
    first, second = ranks2.run(batch_norm, f"dp_shard=2 zero=1 precision={precision}")
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        if "running" in name:
            assert tensor.dtype == torch.float32
            assert tensor.abs().sum() > 0


def test_copied_model_is_a_plain_model():
    model, mesh = laid_out("precision=bf16", mlp(torch.float32))
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(nn.Sequential(*copy.deepcopy(model))))):
        with pytest.raises(ModelError, match="is not parallelized, or is a copy"):
            data_parallel(plain)
    parallelize(copy.deepcopy(model), mesh)


def sparse_rows(plan: str) -> dict:
    torch.manual_seed(4)
    model, mesh = laid_out(plan, nn.Sequential(nn.Embedding(12, 3, sparse=True), nn.Linear(3, 2)).double())
    step = step_of(model, mesh)
    for index in range(2):
        step(Microbatches([torch.tensor([index, 1, 2]) + 5 * mesh.rank, torch.tensor([3, 3, 3])]))
    return weights(model)


def test_sparse_embedding_gradients_are_reduced(ranks2):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(12, 3), nn.Linear(3, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index in range(2):
        optimizer.zero_grad()
        batches = [torch.tensor([index, 1, 2]) + 5 * rank for rank in (0, 1)] + [torch.tensor([3, 3, 3])] * 2
        (sum(model(batch).square().sum() for batch in batches) / 12).backward()
        optimizer.step()
    for got in ranks2.run(sparse_rows, "dp_shard=2 zero=2 precision=fp64 accumulation=2"):
        torch.testing.assert_close(got, plain_weights(model), rtol=1e-10, atol=1e-13)


def overlap(plan: str) -> list[int]:
    """Return the number of buckets being reduced at the end of the last backward, per step."""
    model, mesh = laid_out(plan, fork(), bucket_bytes=64)
    engine, found = data_parallel(model), []
    for _ in range(2):
        engine.begin_step()
        with engine.microbatch(last=False):
            model(rows(0, mesh.rank), left=True).sum().backward()
            assert engine.reducer._pass.next == 0
        with engine.microbatch(last=True):
            (model(rows(1, mesh.rank), left=True) + model(rows(1, mesh.rank), left=False)).sum().backward()
            found.append(engine.reducer._pass.next)
        engine.finish()
    return found


@pytest.mark.parametrize("plan", STAGES)
def test_buckets_are_reduced_only_during_the_last_backward(plan, ranks2):
    for found in ranks2.run(overlap, plan + " precision=fp64"):
        assert found == [6, 6]


class PlainDescent(torch.optim.Optimizer):
    """An optimizer that Weft has no rule for."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad


def clipped(plan_text: str) -> dict[str, torch.Tensor]:
    """Train one clipped step of a per-parameter optimizer, with several buckets."""
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(6))).double()
    with several_buckets(model):
        parallelize(model, mesh)
    assert len(data_parallel(model).reducer.buckets) > 2
    rows = torch.randn(8, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    step = TrainStep(
        model,
        PlainDescent(model.parameters()),
        lambda out, batch: (out.square().sum(), out.numel()),
        mesh,
        max_grad_norm=1e-3,
    )
    step(rows.view(mesh.data.size, -1, 24)[mesh.data.rank])
    return {name: weight.clone() for name, weight in data_parallel(model).weights()}


def test_all_buckets_are_clipped_for_a_custom_optimizer(ranks2):
    reference = clipped("precision=fp64")
    for plan in ("dp_replicate=2", "dp_shard=2 zero=2"):
        for found in ranks2.run(clipped, f"{plan} precision=fp64"):
            torch.testing.assert_close(found, reference, rtol=0, atol=1e-12)
