"""zero=3 matches one process under every layout, accumulation and reshard policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.choice import gate_runs, product
from tests.parity.cases import cases
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.verify.parity import DecoderCase, train_case, train_cases

RTOL = 1e-10
LAYOUTS = {2: ["dp_shard=2"], 4: ["dp_shard=4", "dp_replicate=2 dp_shard=2"]}
PASSES = [
    (1, "after_forward"),
    (1, "after_backward"),
    (4, "after_forward"),
    (4, "after_backward"),
    (4, "after_step"),
]
UNTIED = DecoderSpec(vocab_size=61, dim=16, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=32)


@dataclass(frozen=True)
class OddCase:
    """Unusual features of real models: blocks called twice, an unused block, frozen blocks, two inputs, a scalar."""

    num_steps: int = 4
    max_grad_norm: float = 0.5
    optimizer: str = "adamw"

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return OddNet().double()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adafactor":  # reads full rows and columns
            return torch.optim.Adafactor(model.parameters(), lr=0.01)
        if self.optimizer == "adagrad":  # has states from the start
            return torch.optim.Adagrad(model.parameters(), lr=0.01)
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(19, (16, 3), generator=generator)
        return {"ids": ids, "labels": torch.randint(5, (16,), generator=generator)}

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["ids"])

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(output, batch["labels"], reduction="sum"), len(output)


class OddBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 5)
        self.down = nn.Linear(5, width)
        self.spare = nn.Linear(width, 3)  # never called
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        self.mean.fill_(0.1)
        return {"x": x + self.down(self.up(x).tanh()) + shift + self.mean}


class OddNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 7)
        self.blocks = nn.ModuleList(OddBlock(7) for _ in range(4))
        self.unused = nn.ModuleList(OddBlock(7) for _ in range(2))
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_(False)
        self.bias = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(7, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).sum(1)
        for block in [*self.blocks, self.blocks[0], self.blocks[3]]:
            x = block(x, shift=self.bias)["x"]
        return self.head(x) * self.scale


def chosen() -> dict[str, object]:
    return {"untied": DecoderCase(UNTIED, global_batch=16), "odd": OddCase()}  # the matrix covers common models


@pytest.fixture(scope="module")
def references():
    return train_cases("precision=fp64", chosen())


#: tests/parity/test_matrix.py covers each of them with other models.
@pytest.mark.parametrize("accumulation, reshard", gate_runs(PASSES, 0, 3, 4))
@pytest.mark.parametrize("layout", gate_runs(LAYOUTS[2] + LAYOUTS[4], 0))
def test_zero_3_matches_one_process(layout, accumulation, reshard, references, request):
    ranks = request.getfixturevalue("ranks2" if layout in LAYOUTS[2] else "ranks4")
    plan = f"{layout} zero=3 accumulation={accumulation} reshard={reshard} precision=fp64"
    for results in ranks.run(train_cases, plan, chosen()):
        for name, result in results.items():
            assert result.largest_difference(references[name]) < RTOL, name


@pytest.mark.parametrize("optimizer", ["adafactor", "adagrad"])
def test_optimizers_with_full_shapes_or_initial_states(optimizer, ranks2):
    case = OddCase(optimizer=optimizer)
    reference = train_case("precision=fp64", case)
    for result in ranks2.run(train_case, "dp_shard=2 zero=3 precision=fp64", case):
        assert result.largest_difference(reference) < RTOL


def test_comparison_detects_a_wrong_reference(references):
    other = train_case("precision=fp64", replace(OddCase(), max_grad_norm=0.0))
    assert references["odd"].largest_difference(other) > 1e-4


@pytest.mark.parametrize(*product("precision, reshard", ["bf16", "fp16"], ["after_forward", "after_step"]))
def test_half_precision_is_close_to_one_process(precision, reshard, ranks2):
    """Compare with a bound of a few roundings: ranks split the batch, so sums in matrix products have another order."""
    kinds = cases()
    plan = f"precision={precision} accumulation=2"
    one = train_cases(plan, kinds)
    bound = {"bf16": 2**-5, "fp16": 2**-8}[precision]
    for name, result in ranks2.run(train_cases, f"{plan} dp_shard=2 zero=3 reshard={reshard}", kinds)[1].items():
        assert result.losses == pytest.approx(one[name].losses, rel=bound), name
        assert result.grad_norms[0] == pytest.approx(one[name].grad_norms[0], rel=bound), name
        for key, weight in one[name].weights.items():
            assert float((result.weights[key] - weight).abs().mean()) < 2e-3, (name, key)


def test_zero_3_masters_are_close_to_zero_1(ranks2):
    """Every stage has the same precision policy, so roundings are the same and results nearly so."""
    runs = [ranks2.run(train_cases, f"dp_shard=2 zero={zero} precision=bf16", cases())[0] for zero in (1, 3)]
    for name, theirs in runs[0].items():
        ours = runs[1][name]
        assert ours.losses[:2] == pytest.approx(theirs.losses[:2], rel=2e-3), name
        assert ours.grad_norms[0] == pytest.approx(theirs.grad_norms[0], rel=2e-3), name
        for key, weight in theirs.weights.items():
            assert ours.weights[key].dtype == weight.dtype == torch.float32


def test_after_step_reduces_gradients_once_per_step(ranks2):
    """Compare reshard=after_step with after_forward, which reduces after each microbatch to save memory."""
    case = replace(chosen()["untied"], num_steps=2)

    def bytes_of(accumulation: int, reshard: str) -> int:
        plan = f"dp_shard=2 zero=3 accumulation={accumulation} reshard={reshard} precision=fp64"
        return ranks2.run(train_case, plan, case)[0].reduced_bytes

    once = bytes_of(1, "after_step")
    assert once > 0
    assert bytes_of(4, "after_step") == once
    assert bytes_of(4, "after_forward") > 3 * once
