"""Weights that follow a step: the same bits as weights that are waited for, whoever reads them first."""

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
from weft.config.decoder_shape import DecoderSpec
from weft.config.plan import Plan
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
    """A step of a small decoder, or of a model of one's own, in buckets of a few parameters."""
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


def under_way(step: TrainStep) -> int:
    """Buckets whose weights are not there yet."""
    return sum(bucket.arriving is not None for bucket in data_parallel(step.model).reducer.buckets)


def trained(plan_text: str, follow: bool, model: nn.Module | None = None) -> tuple[list[str], dict, list[int]]:
    """What steps said, the weights that the next forward would see, and what was under way after each step."""
    step = stepper(plan_text, follow, copy.deepcopy(model))
    said, waiting = [], []
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
        waiting.append(under_way(step))
        said.append(f"{metrics.loss} {metrics.grad_norm} {metrics.skipped}")
    step.wait_for_weights()
    return said, {name: param.detach().clone() for name, param in step.model.named_parameters()}, waiting


def both(plan_text: str, model: nn.Module | None = None) -> list[int]:
    """Train both ways; compares the bits, and returns what was under way after steps."""
    late, usual = trained(plan_text, True, model), trained(plan_text, False, model)
    assert late[0] == usual[0]
    assert all(torch.equal(late[1][name], param) for name, param in usual[1].items())
    assert usual[2] == [0, 0, 0, 0]
    return late[2]


def all_plans() -> list[list[int]]:
    return [both(text) for text in PLANS]


def test_weights_that_follow_are_the_same_to_the_bit(ranks2):
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
    "ema": lambda step: averaged(step),
    "an own loop": lambda step: looped(step),
    "written": lambda step: written(step),
}  # fmt: skip


def loaded(step: TrainStep) -> object:
    step.model.load_state_dict(build_decoder(SPEC, seed=5).state_dict())
    found = {name: param.detach().clone() for name, param in step.model.named_parameters()}
    return {**found, "loss": torch.tensor(step(own_batch(step, 6)).loss)}


def averaged(step: TrainStep) -> object:
    ema = Ema(step.model, 0.5)
    ema.update()
    step(own_batch(step, 7))
    ema.update()
    with ema.swapped():
        return mean_loss(step.model, [own_batch(step, 99)], step.mesh, token_cross_entropy, model_forward)


def looped(step: TrainStep) -> object:
    batch = own_batch(step, 97)
    loss_sum, count = token_cross_entropy(model_forward(step.model, batch), batch)
    (loss_sum / count).backward()
    step.optimizer.step()
    assert under_way(step) == 0
    return dict(step.model.named_parameters())


def written(step: TrainStep) -> object:
    params = list(step.model.parameters())  # asking for them waits
    with torch.no_grad():
        params[0].mul_(0.5)
    step(own_batch(step, 5))
    return dict(data_parallel(step.model).weights())


def read_by(name: str, follow: bool) -> dict[str, torch.Tensor] | object:
    step = stepper("dp_shard=2 zero=1 precision=fp32", follow)
    for seed in range(2):
        step(own_batch(step, seed))
    assert (under_way(step) > 4) == follow
    found = READERS[name](step)
    if name not in ("a call", "evaluation", "ema", "written", "load"):
        assert under_way(step) == 0, name
    return {key: tensor.detach().clone() for key, tensor in found.items()} if isinstance(found, dict) else found


def all_readers(names: tuple[str, ...]) -> None:
    for name in names:
        late, usual = read_by(name, True), read_by(name, False)
        if isinstance(usual, dict):
            assert late.keys() == usual.keys(), name
            assert all(torch.equal(late[key], usual[key]) for key in usual), name
        else:
            assert torch.equal(torch.as_tensor(late), torch.as_tensor(usual)), name


#: Tried one by one, and not in the gate: most of them take further steps.
LONG = ("load", "copy", "arrive", "evaluation", "a call", "ema", "an own loop", "written")


def test_whoever_reads_weights_waits_for_them(ranks2):
    ranks2.run(all_readers, tuple(name for name in READERS if name not in LONG))


@pytest.mark.full
@pytest.mark.parametrize("name", LONG)
def test_whoever_else_reads_weights_waits_for_them(name, ranks2):
    ranks2.run(all_readers, (name,))


class Peeks(nn.Module):
    """Uses a block's weight without calling it, and a layer's before calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.end = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.end.weight)
        x = self.blocks[0](x)
        x = nn.functional.linear(x, self.blocks[1][0].weight)
        return self.end(self.blocks[2](x))


class Breaks(nn.Module):
    """Fails once in the middle."""

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


def own_models() -> list[int]:
    found = both("dp_shard=2 zero=1 precision=fp32", seeded(Peeks))
    ends = []
    for follow in (True, False):
        step = stepper("dp_shard=2 zero=1 precision=fp32", follow, seeded(Breaks))
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step.mesh.rank))
        step(x)
        assert (under_way(step) > 2) == follow
        sent = pickle.loads(pickle.dumps(step.model))
        assert type(sent) is Breaks
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


def test_models_that_read_what_they_do_not_call_and_steps_that_break_off(ranks2):
    assert all(min(found) > 2 for found in ranks2.run(own_models))


def copied() -> None:
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
def test_a_copy_is_a_model_like_any_other(ranks2):
    ranks2.run(copied)


def test_one_rank_has_nothing_to_wait_for():
    step = stepper("precision=fp32", True)
    assert not any(isinstance(module, AwaitsWeights) for module in step.model.modules())
    step(batch_of(0, 2))
    assert under_way(step) == 0


def compiled() -> tuple[list[int], int, dict[str, int]]:
    module = importlib.import_module("weft.parallel.parallelize")
    plain = functools.partial(module.compile_blocks, backend="eager")
    with patch.object(module, "compile_blocks", plain), counted_graphs() as found:
        waiting = both("dp_shard=2 zero=1 precision=fp32 compile=on")
    return waiting, found.graphs, found.breaks


@pytest.mark.full
def test_compiled_blocks_wait_outside_of_their_one_graph(ranks2):
    for waiting, graphs, breaks in ranks2.run(compiled):
        assert min(waiting) > 4
        assert (graphs, breaks) == (2, {})  # one for each of the two trainings


@pytest.mark.full
def test_pipelines_and_replicas_too(ranks4):
    plans = (
        "pp=2 dp_shard=2 zero=1 microbatches=2 precision=fp32",
        "pp=2 dp_shard=2 zero=2 microbatches=2 precision=bf16",
        "dp_replicate=2 dp_shard=2 zero=2 precision=bf16",
        "tp=2 dp_shard=2 zero=1 precision=fp32",
    )
    ranks4.run(functools.partial(_each, plans))


def _each(plans: tuple[str, ...]) -> None:
    for text in plans:
        assert both(text)[1] > 2, text
