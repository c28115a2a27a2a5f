"""Weights gathered asynchronously after a step are bitwise equal to weights gathered in the step, for every reader."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import pickle
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.zero_flat.model import FlatModel
from weft.parallel.zero_flat.prefetch import AwaitsWeights
from weft.train.script.script_export import Ema
from weft.train.step.evaluation import mean_loss
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.oracles import counted_graphs

PLANS = (
    "dp_shard=2 zero=1 precision=fp32",
    "dp_shard=2 zero=2 accumulation=2 precision=bf16",
    "dp_shard=2 zero=1 precision=fp16 recompute=full",
)
SPEC = DecoderSpec(vocab_size=32, dim=16, num_layers=3, num_heads=2, num_kv_heads=2, ffn_dim=32, max_seq_len=8)


def batch_of(seed: int, samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(32, (samples, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "positions": torch.arange(8).expand(samples, 8)}


def own_batch(step: TrainStep, number: int) -> dict[str, torch.Tensor]:
    return batch_of(10 * number + step.mesh.rank, 2)


def stepper(plan_text: str, follow: bool, model: nn.Module | None = None, **options) -> TrainStep:
    """Return a train step of a small decoder, or of `model`, in small buckets."""
    mesh = build_mesh(Plan.parse(plan_text))
    decoder = build_decoder(SPEC, seed=0)
    chosen, usual = model or decoder, {"forward": model_forward} if model is None else {}
    loss = token_cross_entropy if model is None else square
    size = 2048 if model is None else 256
    with patch.object(FlatModel, "usual_bucket_bytes", staticmethod(lambda device: size)):
        parallelize(chosen, mesh, seed=0)
    optimizer = torch.optim.AdamW(chosen.parameters(), lr=0.02, fused=True)
    return TrainStep(chosen, optimizer, loss, mesh, max_grad_norm=0.5, weights_follow=follow, **usual, **options)


def square(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(batch)


def num_pending(step: TrainStep) -> int:
    """Return the number of buckets with a pending gather."""
    return sum(bucket.arriving is not None for bucket in data_parallel(step.model).reducer.buckets)


def trained(plan_text: str, follow: bool, model: nn.Module | None = None) -> tuple[list[str], dict, list[int]]:
    """Return the steps' metrics, the weights for the next forward, and the pending buckets after each step."""
    step = stepper(plan_text, follow, copy.deepcopy(model))
    metrics_text, pending = [], []
    for seed in range(4):
        if model is not None:
            batch = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * seed + step.mesh.rank))
        else:
            batch = own_batch(step, seed)
        overflow = contextlib.nullcontext()
        if seed == 2 and step.loss_scale.enabled:
            overflow = patch.object(step._update, "_next_scale", torch.tensor(2.0**120))
        with overflow:
            metrics = step(batch)
        pending.append(num_pending(step))
        metrics_text.append(f"{metrics.loss} {metrics.grad_norm} {metrics.skipped}")
    step.wait_for_weights()
    return metrics_text, {name: param.detach().clone() for name, param in step.model.named_parameters()}, pending


def compare_with_and_without(plan_text: str, model: nn.Module | None = None) -> list[int]:
    """Train with and without prefetch and compare bits. Return the pending buckets after each step."""
    late, usual = trained(plan_text, True, model), trained(plan_text, False, model)
    assert late[0] == usual[0]
    assert all(torch.equal(late[1][name], param) for name, param in usual[1].items())
    assert usual[2] == [0, 0, 0, 0]
    return late[2]


def all_plans() -> list[list[int]]:
    return [compare_with_and_without(text) for text in PLANS]


def test_prefetched_weights_are_bitwise_equal(ranks2):
    for found in ranks2.run(all_plans):
        assert all(min(counts[:2]) > 4 for counts in found), found


READERS: dict[str, Callable[[TrainStep], object]] = {
    "weights": lambda step: dict(data_parallel(step.model).weights()),
    "held": lambda step: data_parallel(step.model).local_weights(),
    "stretches": lambda step: {one.name: one.flat for one in data_parallel(step.model).model_slices()},
    "state_dict": lambda step: step.model.state_dict(),
    "parameters": lambda step: dict(step.model.named_parameters()),
    "of a block": lambda step: dict(step.model.blocks[1].named_parameters()),
    "load": lambda step: loaded(step),
    "copy": lambda step: dict(copy.deepcopy(step.model).named_parameters()),
    "arrive": lambda step: step.wait_for_weights() or dict(step.model.named_parameters()),
    "evaluation": lambda step: mean_loss(
        step.model, [own_batch(step, 99)], step.mesh, token_cross_entropy, model_forward
    ),
    "a call": lambda step: step.model(batch_of(98, 2)["input_ids"]).detach(),
    "ema": lambda step: with_ema(step),
    "an own loop": lambda step: in_user_loop(step),
    "written": lambda step: modified(step),
}  # fmt: skip


def loaded(step: TrainStep) -> object:
    step.model.load_state_dict(build_decoder(SPEC, seed=5).state_dict())
    found = {name: param.detach().clone() for name, param in step.model.named_parameters()}
    return {**found, "loss": torch.tensor(step(own_batch(step, 6)).loss)}


def with_ema(step: TrainStep) -> object:
    ema = Ema(step.model, 0.5)
    ema.update()
    step(own_batch(step, 7))
    ema.update()
    with ema.swapped():
        return mean_loss(step.model, [own_batch(step, 99)], step.mesh, token_cross_entropy, model_forward)


def in_user_loop(step: TrainStep) -> object:
    batch = own_batch(step, 97)
    loss_sum, count = token_cross_entropy(model_forward(step.model, batch), batch)
    (loss_sum / count).backward()
    step.optimizer.step()
    assert num_pending(step) == 0
    return dict(step.model.named_parameters())


def modified(step: TrainStep) -> object:
    params = list(step.model.parameters())  # reading parameters waits
    with torch.no_grad():
        params[0].mul_(0.5)
    step(own_batch(step, 5))
    return dict(data_parallel(step.model).weights())


def state_after_reader(name: str, follow: bool) -> dict[str, torch.Tensor] | object:
    step = stepper("dp_shard=2 zero=1 precision=fp32", follow)
    for seed in range(2):
        step(own_batch(step, seed))
    assert (num_pending(step) > 4) == follow
    found = READERS[name](step)
    if name not in ("a call", "evaluation", "ema", "written", "load"):
        assert num_pending(step) == 0, name
    return {key: tensor.detach().clone() for key, tensor in found.items()} if isinstance(found, dict) else found


def compare_readers(names: tuple[str, ...]) -> None:
    for name in names:
        late, usual = state_after_reader(name, True), state_after_reader(name, False)
        if isinstance(usual, dict):
            assert late.keys() == usual.keys(), name
            assert all(torch.equal(late[key], usual[key]) for key in usual), name
        else:
            assert torch.equal(torch.as_tensor(late), torch.as_tensor(usual)), name


#: Readers tested one by one outside the gate: most of them take more steps.
LONG = ("load", "copy", "arrive", "evaluation", "a call", "ema", "an own loop", "written")


def test_readers_wait_for_prefetched_weights(ranks2):
    ranks2.run(compare_readers, tuple(name for name in READERS if name not in LONG))


@pytest.mark.full
@pytest.mark.parametrize("name", LONG)
def test_slow_readers_wait_for_prefetched_weights(name, ranks2):
    ranks2.run(compare_readers, (name,))


class ReadsWeights(nn.Module):
    """Uses a block's weight without calling the block, and a layer's weight before calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.end = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.end.weight)
        x = self.blocks[0](x)
        x = nn.functional.linear(x, self.blocks[1][0].weight)
        return self.end(self.blocks[2](x))


class FailsInForward(nn.Module):
    """Fails in the middle of forward if `fails` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if self.fails:
            raise ValueError("in the middle")
        return self.blocks[2](self.blocks[1](x))


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def train_custom_models() -> list[int]:
    found = compare_with_and_without("dp_shard=2 zero=1 precision=fp32", seeded(ReadsWeights))
    ends = []
    for follow in (True, False):
        step = stepper("dp_shard=2 zero=1 precision=fp32", follow, seeded(FailsInForward))
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step.mesh.rank))
        step(x)
        assert (num_pending(step) > 2) == follow
        sent = pickle.loads(pickle.dumps(step.model))
        assert type(sent) is FailsInForward
        assert all(
            torch.equal(one, other) for one, other in zip(sent.parameters(), step.model.parameters(), strict=True)
        )
        step.model.fails = True
        with pytest.raises(ValueError, match="in the middle"):
            step(x)
        step.model.fails = False
        ends.append((step(x).loss, step(x).loss))
        all_reduce(torch.zeros(1), step.mesh.world)
    assert ends[0] == ends[1]
    return found


def test_weight_reads_without_calls_and_failed_steps(ranks2):
    assert all(min(found) > 2 for found in ranks2.run(train_custom_models))


def train_copy() -> None:
    step = stepper("dp_shard=2 zero=1 precision=fp32", True)
    step(own_batch(step, 0))
    plain = copy.deepcopy(step.model)
    assert not any(isinstance(module, AwaitsWeights) for module in plain.modules())
    assert any(isinstance(module, AwaitsWeights) for module in step.model.modules())
    again = stepper("dp_shard=2 zero=2 recompute=full precision=fp32", True, plain, forward=model_forward)
    with patch.object(again._loss, "loss_fn", token_cross_entropy):
        again(own_batch(step, 0))
    one, two = (dict(data_parallel(each.model).weights()) for each in (step, again))
    assert one.keys() == two.keys()
    step(own_batch(step, 3))


@pytest.mark.full
def test_copied_model_can_be_parallelized_again(ranks2):
    ranks2.run(train_copy)


def test_single_rank_does_not_prefetch():
    step = stepper("precision=fp32", True)
    assert not any(isinstance(module, AwaitsWeights) for module in step.model.modules())
    step(batch_of(0, 2))
    assert num_pending(step) == 0


def compiled() -> tuple[list[int], int, dict[str, int]]:
    module = importlib.import_module("weft.parallel.parallelize")
    plain = functools.partial(module.compile_blocks, backend="eager")
    with patch.object(module, "compile_blocks", plain), counted_graphs() as found:
        pending = compare_with_and_without("dp_shard=2 zero=1 precision=fp32 compile=on")
    return pending, found.graphs, found.breaks


@pytest.mark.full
def test_compiled_blocks_wait_outside_their_graph(ranks2):
    for pending, graphs, breaks in ranks2.run(compiled):
        assert min(pending) > 4
        assert (graphs, breaks) == (2, {})  # one per training


@pytest.mark.full
def test_prefetch_with_pipelines_and_replicas_is_bitwise_equal(ranks4):
    plans = (
        "pp=2 dp_shard=2 zero=1 microbatches=2 precision=fp32",
        "pp=2 dp_shard=2 zero=2 microbatches=2 precision=bf16",
        "dp_replicate=2 dp_shard=2 zero=2 precision=bf16",
        "tp=2 dp_shard=2 zero=1 precision=fp32",
    )
    ranks4.run(functools.partial(_each, plans))


def _each(plans: tuple[str, ...]) -> None:
    for text in plans:
        assert compare_with_and_without(text)[1] > 2, text
