"""Compositions of parallelism that gave wrong numbers without an error in NVIDIA/Megatron-LM#7452, under Weft.

docs/concepts/your_issue.md lists findings of that report with their tests. The ones without a test elsewhere are
here. Each compares with one process in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import families, row_of
from tests.parallel.loops import STAGES, laid_out, plain_weights, weights
from tests.parity.cases import LLAMA
from tests.parity.families import FamilyCase
from weft.comm.mesh import Mesh, build_mesh
from weft.config.plan import Plan
from weft.parallel.local_means import global_mean
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import IGNORE
from weft.verify.parity import DecoderCase, microbatches_of_case, train_case, train_cases

RTOL = 1e-10


@dataclass(frozen=True)
class SmoothedCase(DecoderCase):
    """A decoder with label smoothing, whose loss depends on the logits of the whole vocabulary."""

    smoothing: float = 0.1

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = batch["labels"].flatten()
        loss_sum = F.cross_entropy(
            output.flatten(0, 1), labels, ignore_index=IGNORE, reduction="sum", label_smoothing=self.smoothing
        )
        return loss_sum, (labels != IGNORE).sum()


@pytest.mark.parametrize(
    "plan",
    [
        "tp=2 sp=on",
        *(
            pytest.param(plan, marks=pytest.mark.full)
            for plan in ("tp=2", "cp=2", "dp_shard=2 zero=3 accumulation=2", "pp=2 microbatches=2")
        ),
    ],
)
def test_label_smoothing_covers_the_whole_vocabulary(plan, ranks2):
    """Finding 1: smoothing over each rank's shard of the vocabulary. Finding 2: gathered logits taken for a shard."""
    cases = {str(smoothing): SmoothedCase(LLAMA, num_steps=2, smoothing=smoothing) for smoothing in (0.1, 0.0)}
    want = train_cases("precision=fp64", cases)
    for found in ranks2.run(train_cases, f"{plan} precision=fp64", cases):
        for name, got in found.items():
            assert got.largest_difference(want[name]) < RTOL, name
    assert want["0.1"].largest_difference(want["0.0"]) > 1e-5


@pytest.mark.parametrize("plan", ["tp=2", pytest.param("tp=2 sp=on zero=1", marks=pytest.mark.full)])
def test_norm_includes_the_attention_sinks_of_all_ranks(plan, ranks2):
    """Finding 8: the norm for clipping left out the sinks of all ranks but the first."""
    pytest.importorskip("transformers")
    case = FamilyCase("gpt-oss")
    want = train_case("precision=fp64", case)
    squares = {name: float(grad.square().sum()) for name, grad in want.grads.items()}
    share = sum(square for name, square in squares.items() if name.endswith("sinks")) / sum(squares.values())
    assert share > 1e-6  # a norm without half of the sinks differs by more than the tolerance
    for got in ranks2.run(train_case, f"{plan} precision=fp64", case):
        assert got.grad_norms == pytest.approx(want.grad_norms, rel=RTOL)
        assert got.largest_difference(want) < RTOL


class TwoHeads(nn.Module):
    """A trunk with heads for the next token and the one after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.next, self.second = nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x).tanh()
        return self.next(hidden), self.second(hidden)


#: Labels of 4 samples. Rank 1 has the last two, and no label for the second head.
LABELS = {"next": torch.tensor([1, 2, 3, IGNORE]), "second": torch.tensor([2, 0, IGNORE, IGNORE])}


def train_two_heads(plan: str | None) -> dict[str, torch.Tensor]:
    """Train with the sum of two means, each over the labels of its head on all ranks. plan: None for plain PyTorch."""
    model: nn.Module = TwoHeads().double()
    mesh: Mesh | None = None
    if plan is not None:
        model, mesh = laid_out(plan, model)
    own = slice(2 * mesh.rank, 2 * mesh.rank + 2) if mesh else slice(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)[own]
        total: torch.Tensor | float = 0.0
        for weight, logits, labels in zip((1.0, 0.3), model(x), LABELS.values(), strict=True):
            loss_sum = F.cross_entropy(logits, labels[own], ignore_index=IGNORE, reduction="sum")
            count = (labels[own] != IGNORE).sum()
            total = total + weight * (global_mean(loss_sum, count, mesh) if mesh else loss_sum / count)
        assert isinstance(total, torch.Tensor)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model) if mesh else plain_weights(model)


@pytest.mark.parametrize("plan", STAGES)
def test_losses_of_two_heads_have_their_own_counts(plan, ranks2):
    """Finding 3: the loss of a second head was divided by the number of labels on its own rank."""
    want = train_two_heads(None)
    for got in ranks2.run(train_two_heads, f"{plan} precision=fp64"):
        torch.testing.assert_close(got, want, rtol=RTOL, atol=1e-13)


def train_by_turns(plans: tuple[str, ...], case: DecoderCase) -> list[list[float]]:
    """Train one model for each plan in the same processes, step by step. Return losses and norms of each model."""
    trained = []
    for text in plans:
        plan = Plan.parse(text)
        mesh = build_mesh(plan)
        model = parallelize(case.model(), mesh)
        step = TrainStep(model, case.optimizer_of(model), case.loss, mesh, forward=case.forward, max_grad_norm=0.5)
        trained.append((plan, mesh, step, []))
    for index in range(case.num_steps):
        for plan, mesh, step, numbers in trained:
            metrics = step(microbatches_of_case(case, index, plan, mesh.data.rank))
            numbers += [metrics.loss, metrics.grad_norm]
    return [numbers for *_, numbers in trained]


def assert_all_equal(runs: list[list[list[float]]], case: DecoderCase) -> None:
    (want,) = train_by_turns(("precision=fp64",), case)
    for models in runs:
        for numbers in models:
            assert numbers == pytest.approx(want, rel=RTOL)


def test_models_with_different_tensor_ranks_in_one_process(ranks2):
    """Findings 4, 6 and 7: a layer used the process-wide group instead of its own."""
    case = DecoderCase(LLAMA, num_steps=2)
    plans = ("tp=2 sp=on recompute=full precision=fp64", "dp_shard=2 zero=1 recompute=full precision=fp64")
    assert_all_equal(ranks2.run(train_by_turns, plans, case), case)


@pytest.mark.full
def test_models_with_two_layouts_of_four_ranks_in_one_process(ranks4):
    """The same on ranks whose tensor groups overlap: {0, 1}, {2, 3} and {0, 1, 2, 3}."""
    case = DecoderCase(LLAMA, num_steps=2)
    plans = ("dp_replicate=2 tp=2 sp=on recompute=full precision=fp64", "pp=2 microbatches=2 tp=2 precision=fp64")
    assert_all_equal(ranks4.run(train_by_turns, plans, case), case)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "technique"),
    [
        ("bart", "tp"),  # finding 6: cross-attention
        ("t5", "sp"),
        ("llava", "sp"),  # finding 7: image features among the tokens
        ("gpt_oss", "sp"),  # finding 8
        ("mixtral", "sp"),  # finding 10: experts
        ("qwen3_next", "tp"),  # finding 11: the norm after linear attention, without sequence parallelism
        ("qwen3_next", "sp"),
        ("qwen3_5_text", "tp"),
    ],
)
def test_reported_architectures_match_one_process(family, technique, ranks2):
    pytest.importorskip("transformers")
    assert row_of(family, families()[family][0], ranks2, [technique])["cells"] == {technique: "equal"}
