"""TrainStep compared with torch's own loop, and its handling of non-finite numbers."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from unittest.mock import patch

import pytest
import torch
from torch import nn

import tests.comm.block8  # noqa: F401  registers a wire
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import ModelError
from weft.models.registry import build_decoder
from weft.optim.muon import Muon
from weft.optim.rounded_adamw import RoundedAdamW
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.batches.microbatches import split_batch
from weft.train.step.train_step import TrainStep
from weft.train.step.update import LateMetrics
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def class_loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1])


def batch_of(size: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator, dtype=dtype), torch.randint(4, (size,), generator=generator)


def make_step(plan_text: str, model: nn.Module, loss_fn=class_loss, lr: float = 0.05, **options) -> TrainStep:
    mesh = build_mesh(Plan.parse(plan_text))
    parallelize(model, mesh)
    return TrainStep(model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True), loss_fn, mesh, **options)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_step_matches_torch_loop_with_mean_loss_and_clipping(accumulation):
    plain = mlp().double()
    step = make_step(f"precision=fp64 accumulation={accumulation}", mlp(), max_grad_norm=0.2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for seed in range(4):
        batch = batch_of(8, seed)
        metrics = step(batch)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(batch[0]), batch[1])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        optimizer.step()
        assert metrics.loss == pytest.approx(loss.item(), rel=1e-12)
        assert metrics.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        assert metrics.num_tokens == 8
    for ours, theirs in zip(step.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


# tanh hides an infinite input from the loss but not from the gradient.
@pytest.mark.parametrize(("bad", "named"), [(math.nan, "loss is nan"), (math.inf, "gradient norm is nan")])
def test_nonfinite_step_changes_no_weights_or_states(bad, named):
    step = make_step("dp_replicate=1", mlp())
    step(batch_of(8, 0, torch.float32))
    before = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict()))
    x, y = batch_of(8, 1, torch.float32)
    x[3, 2] = bad
    metrics = step((x, y))
    assert metrics.skipped == named
    torch.testing.assert_close((step.model.state_dict(), step.optimizer.state_dict()), before, rtol=0, atol=0)
    # The next good step is unaffected.
    assert step(batch_of(8, 2, torch.float32)).skipped is None
    assert all(torch.isfinite(p).all() for p in step.model.parameters())


def test_nonfinite_gradient_is_reported():
    class SquareRoot(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return (self.weight * x).abs().sqrt()  # finite at zero, with an infinite gradient

    step = make_step("dp_replicate=1", SquareRoot(), lambda out, batch: (out.sum(), out.numel()))
    metrics = step(torch.ones(2, 3))
    assert metrics.skipped == f"gradient norm is {metrics.grad_norm}"
    assert not math.isfinite(metrics.grad_norm)
    assert torch.equal(step.model.weight, torch.zeros(3))


def test_batch_without_trained_tokens_changes_nothing():
    step = make_step("dp_replicate=1", mlp(), lambda out, batch: (out.sum() * 0, 0))
    before = copy.deepcopy(step.model.state_dict())
    metrics = step(batch_of(4, 0, torch.float32))
    assert metrics.skipped == "no trained token in the global batch"
    assert (metrics.loss, metrics.num_tokens) == (0.0, 0)
    torch.testing.assert_close(step.model.state_dict(), before, rtol=0, atol=0)


def test_fp16_finds_its_loss_scale_and_then_trains():
    model = mlp()
    # Gradients of such a large loss overflow fp16 at the initial scale and fit after some halvings.
    step = make_step("precision=fp16", model, lambda out, batch: (out.float().pow(2).sum() * 300, len(batch[1])))
    seen = [step(batch_of(8, seed, torch.float32)) for seed in range(16)]
    skipped = [metrics.skipped is not None for metrics in seen]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == sorted(skipped, reverse=True)  # overflows come first
    assert seen[-1].loss_scale == 2.0**16 / 2 ** sum(skipped)
    assert step.loss_scale.num_skipped == sum(skipped)
    assert seen[-1].loss < seen[0].loss


def test_bf16_computes_in_bf16_with_fp32_masters_gradients_and_states():
    step = make_step("precision=bf16", mlp())
    assert step(batch_of(8, 0, torch.float32)).loss_scale is None
    assert {p.dtype for p in step.model.parameters()} == {torch.bfloat16}
    masters = [p for group in step.optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    assert {grad.dtype for grad in step.local_gradients()} == {torch.float32}
    moments = [value for state in step.optimizer.state.values() for key, value in state.items() if key != "step"]
    assert {value.dtype for value in moments} == {torch.float32}
    for param, master in zip(step.model.parameters(), masters, strict=True):
        assert torch.equal(param, master.bfloat16())
        assert not torch.equal(param.float(), master)


def test_gradients_set_to_none_are_restored():
    step = make_step("precision=fp64", mlp())
    other = make_step("precision=fp64", mlp())
    for seed in range(3):
        step.optimizer.zero_grad(set_to_none=True)
        assert step(batch_of(8, seed)).loss == other(batch_of(8, seed)).loss


class Noise(nn.Module):
    """Add noise from torch's generator."""

    def forward(self, x):
        return x + torch.rand_like(x)


@pytest.mark.parametrize(("layer", "name"), [(Noise, "seeds"), (lambda: nn.Dropout(0.5), "dropout_key")])
def test_random_numbers_depend_only_on_the_step_seeds(layer, name):
    def loss(number):
        step = make_step("dp_replicate=1", nn.Sequential(mlp(), layer()))
        return step(batch_of(8, 0, torch.float32), **{name: [number] if name == "seeds" else number}).loss

    assert loss(7) == loss(7) != loss(8)


@pytest.mark.parametrize(
    "optimizer", ["adamw", "sgd", "plain", "muon", "bf16", "fp8", "fused adagrad", "amsgrad", "adagrad"]
)
@pytest.mark.parametrize(
    "plan", ["precision=fp32", "precision=bf16", "precision=fp16", "precision=fp64 accumulation=2"]
)
def test_device_decision_equals_host_decision(plan, optimizer):
    """Compare weights, states, step counts, scale and metrics bitwise; some steps are skipped."""

    def trained(reads_late):
        mesh = build_mesh(Plan.parse(plan))
        model = mlp()
        parallelize(model, mesh)
        made = {
            "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
            "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
            "plain": lambda params: torch.optim.AdamW(params, lr=0.05),
            "muon": lambda params: Muon(params, lr=0.05),
            "bf16": lambda params: RoundedAdamW(params, lr=0.05),
            "fp8": lambda params: RoundedAdamW(params, lr=0.05, states="fp8"),
            "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.05, amsgrad=True, fused=True),
            "fused adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, fused=True),
            "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
        }[optimizer](model.parameters())
        step = TrainStep(model, made, class_loss, mesh, max_grad_norm=0.2, reads_late=reads_late)
        found = []
        for seed in range(7):
            x, y = batch_of(8, seed, torch.float64 if "fp64" in plan else torch.float32)
            x[3, 2] = {3: math.nan, 4: math.inf}.get(seed, x[3, 2])
            found.append(step((x, y)))
        assert any(isinstance(one, LateMetrics) for one in found) == (reads_late and optimizer != "adagrad")
        scale = step.loss_scale.state()
        step.finalize()
        engine = data_parallel(model)
        states = {one.name: one.flat.clone() for one in engine.state_slices(made)}
        return [str(one)[str(one).index("(") :] for one in found], scale, dict(model.state_dict()), states

    late, usual = trained(True), trained(False)
    assert late[:2] == usual[:2]
    for one, other in zip(late[2:], usual[2:], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def trained_decoder(plan: str, reads_late: bool, **options) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return metrics of steps, two of them skipped, and the final weights and error-feedback residuals."""
    mesh = build_mesh(Plan.parse(plan))
    spec = DecoderSpec(vocab_size=32, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=32, max_seq_len=8,
                       **options)  # fmt: skip
    model = build_decoder(spec, seed=0)
    parallelize(model, mesh, seed=0)
    made = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    step = TrainStep(model, made, token_cross_entropy, mesh, forward=model_forward, reads_late=reads_late)
    found = []
    for seed in range(6):
        ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(seed))
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "positions": torch.arange(8).expand(2, 8)}
        spoiled = seed in (2, 3) and mesh.rank == 0
        with patch.object(step._loss, "loss_fn", infinite) if spoiled else contextlib.nullcontext():
            found.append(step(batch))
    assert any(isinstance(one, LateMetrics) for one in found) == reads_late
    message = [str(one)[str(one).index("(") :] for one in found]
    engine = data_parallel(model)
    return message, {**dict(engine.weights()), **engine.coders.states(), **dict(model.named_buffers())}


def infinite(output, batch):
    loss_sum, number = token_cross_entropy(output, batch)
    return loss_sum * math.inf, number


def compare_late_decision(plan: str, **options) -> tuple[int, set[str]]:
    late, usual = trained_decoder(plan, True, **options), trained_decoder(plan, False, **options)
    assert late[0] == usual[0]
    assert late[1].keys() == usual[1].keys()
    assert all(torch.equal(late[1][name], usual[1][name]) for name in late[1])
    return sum("skipped=None" not in one for one in late[0]), set(late[1])


@pytest.mark.parametrize("balance", ["aux_loss", "bias"])
def test_device_decides_with_scaled_balance_loss_of_experts(balance):
    skipped, _ = compare_late_decision("precision=fp16", num_experts=4, balance=balance, balance_rate=0.01)
    assert skipped >= 2


def test_device_decides_error_feedback_residuals(ranks2):
    for plan in ("dp_replicate=2 reduce=block8", "dp_shard=2 zero=3 reduce=block8"):
        for skipped, names in ranks2.run(compare_late_decision, plan):
            assert skipped >= 2
            assert any(name.endswith("residual") for name in names)


def test_late_metrics_equal_others_and_can_be_pickled():
    step = make_step("dp_replicate=1", mlp(), reads_late=True)
    step(batch_of(8, 0, torch.float32))
    late = step(batch_of(8, 1, torch.float32))
    other = make_step("dp_replicate=1", mlp())
    other(batch_of(8, 0, torch.float32))
    usual = other(batch_of(8, 1, torch.float32))
    assert isinstance(late, LateMetrics)
    assert pickle.loads(pickle.dumps(late)) == usual
    assert (late.loss, late.skipped, late.is_finite) == (usual.loss, None, True)
    with pytest.raises(AttributeError, match="'LateMetrics' object has no attribute 'los'"):
        _ = late.los


def ask_on_one_rank(plan_text: str) -> list[bool]:
    step = make_step(plan_text, mlp())
    found = []
    for index in range(3):
        if index == 1 and step.mesh.rank == 1:
            step.wants_stop = True
        found.append(step(batch_of(4, step.mesh.rank, torch.float32)).wants_stop)
    return found


def test_all_ranks_see_a_stop_request_at_the_same_step(ranks2):
    assert ranks2.run(ask_on_one_rank, "dp_replicate=2") == [[False, True, True]] * 2


def overflow_on_one_rank(plan_text: str) -> list[object]:
    step = make_step(plan_text, mlp())
    x, y = batch_of(4, 0, torch.float32)
    if step.mesh.rank == 1:
        x[0, 0] = math.inf
    metrics = step((x, y))
    return [metrics.skipped is not None, step.loss_scale.scale]


def test_overflow_on_one_rank_skips_the_step_on_all(ranks2):
    assert ranks2.run(overflow_on_one_rank, "dp_replicate=2 precision=fp16") == [[True, 2.0**15]] * 2


def test_batches_are_split_along_their_first_dim():
    x = torch.arange(8)
    assert [part.tolist() for part in split_batch(x, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    parts = split_batch({"a": x, "b": (x, x + 1)}, 4)
    assert parts[3]["b"][1].tolist() == [7, 8]


def test_batch_not_divisible_by_the_split_is_rejected():
    with pytest.raises(ModelError) as caught:
        split_batch(torch.zeros(6, 2), 4)
    assert str(caught.value) == (
        "accumulation=4: the batch has 6 samples on this rank, which is not a multiple of 4. "
        "Use a batch that is, or another accumulation."
    )
