"""graphs=on changes no bit: replayed passes and steps equal eager ones."""

from __future__ import annotations

import functools
import math
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.dropout_cases import PlainModel
from tests.parity.graph_cases import STEPS, TOKENS, VOCAB, batch_of, forward, loss_of, pair, sgd, train
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import ModelError, PlanError, WeftWarning
from weft.memory.graph_recorder import send_numbers
from weft.models.registry import build_decoder
from weft.parallel.dropout.by_position import drops_of
from weft.parallel.dropout.drop_state import FixedDraws
from weft.parallel.parallelize import parallelize
from weft.parallel.zero_flat import step as recorded
from weft.parallel.zero_flat.step import RecordedPasses
from weft.train.step.graphed_passes import MOST_SHAPES, WARM_UPS, _PassMemory
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.oracles import OpRecorder

#: Plan -> number of pass recordings: one for a single microbatch, else one each for first, middle and last ones.
PLANS = {
    "precision=fp64": 1,
    "precision=fp64 accumulation=2": 2,
    "precision=fp64 accumulation=4 recompute=full": 3,
    "precision=bf16 accumulation=2": 2,
    "precision=fp32 recompute=selective": 1,
    "precision=fp16": 1,
    "precision=fp8 recompute=attention": 1,
}
OVER_RANKS = (
    "dp_shard=2 zero=1 precision=fp64 accumulation=2",
    "dp_shard=2 zero=2 precision=fp64 accumulation=3",
    "dp_replicate=2 precision=bf16",
)


IN_GATE = ("precision=fp64 accumulation=2", "precision=bf16 accumulation=2", "precision=fp16")


@pytest.mark.parametrize(
    "plan", [plan if plan in IN_GATE else pytest.param(plan, marks=pytest.mark.full) for plan in PLANS]
)
def test_replayed_steps_equal_eager_steps(plan):
    """Compare losses, weights, gradients and states, with dropout, clipping, changing rates and token counts."""
    same, found = pair(plan)
    assert same
    assert found.recordings == PLANS[plan] + 1  # plus the optimizer step
    assert found.passes > STEPS - WARM_UPS - 1
    assert found.replays > found.passes - PLANS[plan]


@pytest.mark.full
def test_replayed_momentum_sgd_follows_the_learning_rate():
    same, found = pair("precision=fp64 accumulation=2", optimizer=sgd)
    assert same
    assert found.recordings == 3


def over_ranks(plan: str) -> tuple[bool, int]:
    same, found = pair(plan)
    return same, found.recordings


@pytest.mark.parametrize(
    "plan", [OVER_RANKS[0], *(pytest.param(one, marks=pytest.mark.full) for one in OVER_RANKS[1:])]
)
def test_gradients_of_replays_are_reduced_over_ranks(plan, ranks2):
    assert ranks2.run(over_ranks, plan) == [(True, 1 + min(3, Plan.parse(plan).accumulation))] * 2


@pytest.mark.parametrize("plan", ["precision=fp16", "precision=bf16 accumulation=2"])
def test_skipped_steps_equal_eager_ones(plan):
    same, found = pair(plan, spoil=lambda index: math.inf if index in (4, 5) else 1.0)
    assert same
    assert sum(loss == math.inf for loss, _, _ in found.step_metrics) == 2
    if "fp16" in plan:
        assert found.step_metrics[-1][2] == found.step_metrics[0][2] / 4  # loss scale


def fill_step_once(name):
    plain = recorded._RecordedStep.fill

    def fill(self, rules, decision):
        kept = self._dials.clone(), self._factor.clone()
        plain(self, rules, decision)
        if bool(kept[0].any()):
            self._dials.copy_(kept[0]) if name == "rate and number" else self._factor.copy_(kept[1])

    return recorded._RecordedStep, "fill", fill


def fill_draws_once(name):
    def fill(self, key, samples):
        if name == "samples" or self._sent is None:
            send_numbers(self._drops.keys_of(key, self._calls), self.keys)
        if name == "key" or self._sent is None:
            send_numbers(list(samples.numbers), self.samples)
        self._sent = key

    return FixedDraws, "fill", fill


def fill_inputs_once(name):
    plain = _PassMemory.fill

    def fill(self, given):
        scale, ids = self.scale.clone(), self.batch.batch["ids"].clone()
        is_first = not bool(self.scale)
        plain(self, given)
        if not is_first:
            self.scale.copy_(scale) if name == "scale" else self.batch.batch["ids"].copy_(ids)

    return _PassMemory, "fill", fill


#: Faults: the named input is copied to the recordings' memory only once, or gradients are not restored.
FAULTS = {
    "rate and number": fill_step_once,
    "factor": fill_step_once,
    "key": fill_draws_once,
    "samples": fill_draws_once,
    "batch": fill_inputs_once,
    "scale": fill_inputs_once,
    "gradients": lambda name: (RecordedPasses, "leave", lambda self, end: None),
}


@pytest.mark.parametrize(
    ("fault", "plan"),
    [
        ("rate and number", "precision=fp64"),
        pytest.param("factor", "precision=fp64", marks=pytest.mark.full),
        ("key", "precision=fp64"),
        pytest.param("samples", "precision=fp64 accumulation=4", marks=pytest.mark.full),
        pytest.param("batch", "precision=fp64", marks=pytest.mark.full),
        pytest.param("scale", "precision=fp16", marks=pytest.mark.full),
        pytest.param("gradients", "precision=fp64 accumulation=2", marks=pytest.mark.full),
    ],
)
def test_stale_recording_inputs_are_detected(fault, plan, monkeypatch):
    options = {"spoil": lambda index: math.inf if index == 4 else 1.0} if fault == "scale" else {}
    plain = train(plan, graphs=False, **options)
    monkeypatch.setattr(*FAULTS[fault](fault))
    assert not train(plan, graphs=True, **options).same_as(plain)


@pytest.mark.full
def test_each_of_a_few_shapes_is_recorded():
    with warnings.catch_warnings():
        warnings.simplefilter("error", WeftWarning)
        same, found = pair("precision=fp64", tokens_at=lambda index: TOKENS - index % 2, steps=12)
    assert same
    assert found.recordings == 4  # per shape: the pass, and the step, since gradients have other addresses
    assert found.passes == 12 - 2 * WARM_UPS


def test_many_shapes_run_eagerly_with_one_warning():
    with pytest.warns(
        WeftWarning, match=r"^graphs=on: batches have more than 8 shapes\. Those after the first"
    ) as caught:
        same, found = pair("precision=fp64", tokens_at=lambda index: 3 + index, steps=MOST_SHAPES + 4)
    assert same
    assert (found.recordings, found.passes) == (0, 0)
    assert sum("graphs=on" in str(one.message) for one in caught) == 1


@pytest.mark.full
def test_change_of_module_mode_is_recorded_again():
    def freeze(step, index):
        step.model.blocks[0].train(index < 5)
        step._state.train = lambda: None

    same, found = pair("precision=fp64", watch=freeze, steps=10)
    assert same
    assert found.recordings == 4  # per mode: the pass, and the step, since gradients have other addresses


class Channels(nn.Module):
    """Uses channel dropout, which follows positions."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, ids):
        return self.head(F.dropout1d(self.embed(ids), 0.3, self.training))


class Noisy(Channels):
    """Draws random numbers from torch's generator."""

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x * (torch.rand_like(x) < 0.7))


class NoisyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) * (torch.rand_like(x) < 0.7)


class NoisyBlocks(Channels):
    """Draws random numbers from torch's generator in blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def use_torch_generator(step, index):
    """Draw all noise from torch's generator, as a plan with graphs does."""
    drops_of(step.model).may_place_noise = False


@pytest.mark.full
@pytest.mark.parametrize("build", [Channels, Noisy])
def test_torch_generator_is_seeded_outside_the_recording(build):
    same, found = pair("precision=fp64", build=build, watch=use_torch_generator)
    assert same
    assert found.passes


def test_generator_noise_in_recomputed_blocks_is_rejected():
    with pytest.raises(ModelError, match=r"^graphs=on: the model draws from torch's generator.*Use recompute=none"):
        train("precision=fp64 recompute=full", graphs=True, build=NoisyBlocks)


def reads_a_value(logits, batch):
    loss_sum, number = loss_of(logits, batch)
    return loss_sum, int(number)


def test_loss_that_reads_a_device_value_is_rejected():
    with pytest.raises(ModelError, match=r"^graphs=on: forward and backward cannot be recorded as a CUDA graph \(.*"
                       r"the host reads a value\)\. Use graphs=off\.$"):  # fmt: skip
        train("precision=fp64", graphs=True, loss=reads_a_value)


def test_out_of_range_ids_raise_during_replay():
    """A replay runs no embedding hook, so the host checks each batch before it is copied."""

    def spoil(step, index):
        if index == 5:
            plain = step.graphs.run

            def run(given, compute, *, last):
                given.batch["ids"][0, 0] = VOCAB + 3
                return plain(given, compute, last=last)

            step.graphs.run = run

    with pytest.raises(ModelError, match=rf"^id {VOCAB + 3}: embed \(Embedding\) has {VOCAB} entries"):
        train("precision=fp64", graphs=True, watch=spoil)


def test_traced_step_is_not_replayed():
    """A traced step runs the model's code, because tracing inspects the modules."""
    calls = []

    def add_hook(step, index):
        if index == 0:
            step.model.norm.register_forward_hook(lambda *_: calls.append(step.graphs.num_replays))
        if index == STEPS - 1:
            before = len(calls)
            step.compute_again(batch_of(3, 2) | {"factor": torch.ones(2)}, dropout_key=5)
            assert len(calls) == before + 1

    assert train("precision=fp64", graphs=True, watch=add_hook).passes == STEPS - WARM_UPS


@pytest.mark.full
def test_compiled_blocks_are_recorded(monkeypatch):
    """Use a backend that runs torch's operators, since the CPU recorder cannot record generated code."""
    blocks = sys.modules["weft.parallel.compile_blocks"]
    plain = functools.partial(blocks.compile_blocks, backend="aot_eager")
    monkeypatch.setattr(sys.modules["weft.parallel.parallelize"], "compile_blocks", plain)

    def build():
        model = PlainModel(VOCAB, 16, 2, 0.25)
        for block in model.blocks:
            block.attn.dropout = 0.0  # dropout in attention is an operator with Python code
        return model

    same, found = pair("precision=fp64 compile=on", build=build)
    torch._dynamo.reset()
    assert same
    assert found.recordings == 2


def step_of(plan, model, recorder=None, loss=loss_of):
    mesh = build_mesh(Plan.parse(plan))
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return TrainStep(model, optimizer, loss, mesh, forward=forward, recorder=recorder)


def test_graphs_are_rejected_on_a_cpu():
    with pytest.raises(PlanError, match=r"^graphs=on: this run computes on a CPU, which records no graphs\. Use "):
        step_of("graphs=on", PlainModel(VOCAB, 16, 2, 0.0))


def test_graphs_are_rejected_for_models_with_experts():
    spec = DecoderSpec(vocab_size=VOCAB, dim=16, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=16, max_seq_len=8,
                       num_experts=2)  # fmt: skip
    with pytest.raises(PlanError, match=r"^graphs=on: the model has experts"):
        step_of("graphs=on", build_decoder(spec, seed=0), OpRecorder())


def test_user_training_loop_with_graphs_is_rejected():
    model = parallelize(PlainModel(VOCAB, 16, 2, 0.0), build_mesh(Plan.parse("graphs=on")))
    with pytest.raises(
        PlanError, match=r"^graphs=on: a loop of your own launches kernels one by one\. Use run\.train_"
    ):
        model(batch_of(0, 2)["ids"]).sum().backward()


def test_packed_documents_share_a_recording():
    """Document starts are read from memory, so a replay uses its own batch's starts."""
    spec = DecoderSpec(vocab_size=VOCAB, dim=16, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=16, max_seq_len=16)

    def trained(graphs):
        mesh, recorder = build_mesh(Plan(graphs=graphs)), OpRecorder()
        model = parallelize(build_decoder(spec, seed=0), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward, reads_late=True,
                         recorder=recorder if graphs else None)  # fmt: skip
        losses = []
        for index in range(8):
            draw = torch.Generator().manual_seed(index)
            ids, boundary = torch.randint(VOCAB, (2, 9), generator=draw), 2 + index % 5
            positions = torch.cat([torch.arange(boundary), torch.arange(8 - boundary)]).expand(2, 8)
            starts = torch.tensor([[0, boundary]] * 2)
            batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "positions": positions,
                     "document_ids": (torch.arange(8) >= boundary).long().expand(2, 8), "document_starts": starts,
                     }  # fmt: skip
            losses.append(step(batch).loss)
        return losses, len(recorder.num_ops)

    losses, recordings = trained(True)
    assert losses == trained(False)[0]
    assert recordings == 2
