"""tp_chunks: matrix products by chunks of the sequence, overlapped with tp communication, match one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.choice import gate_runs
from tests.parity.adapter_cases import AdapterCase
from tests.parity.cases import LLAMA, cases
from tests.parity.compiled import compiled_plan, train_compiled
from tests.parity.compiled_families import DEEP, SHALLOW, DeepFamily
from tests.parity.test_tensor import DECODERS
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import CommError
from weft.parallel.tensor.linear import by_chunks, column_gradients, cuts, gather_multiply, multiply_scatter
from weft.parallel.tensor.sequence import ShardedTokens
from weft.verify.parity import DecoderCase, train_cases, train_plain

#: 3 chunks of 8 tokens are uneven. The number of chunks is limited to the number of tokens.
TWO = ["tp=2 sp=on tp_chunks=3 accumulation=2", "tp=2 sp=on tp_chunks=2 recompute=selective",
       "tp=2 sp=on tp_chunks=2 recompute=full", "tp=2 sp=on tp_chunks=1000"]  # fmt: skip
FOUR = ["tp=4 sp=on tp_chunks=2", "dp_shard=2 tp=2 zero=3 sp=on tp_chunks=3", "cp=2 tp=2 sp=on tp_chunks=2",
        "pp=2 tp=2 sp=on tp_chunks=2 microbatches=4 schedule=zb_h1"]  # fmt: skip
CHOSEN = {name: DECODERS[name] for name in ("decoder", "gpt2", "hf-qwen2", "hf-gpt2")}


def check(pool, plan, chosen):
    expected = train_cases("precision=fp64", chosen)
    for rank in pool.run(train_cases, f"{plan} precision=fp64", chosen):
        for name, result in rank.items():
            assert result.largest_difference(expected[name]) < 1e-10, f"{plan} {name}"


@pytest.mark.parametrize("plan", gate_runs(TWO, 2))
def test_tp_chunks_match_one_process_on_two_ranks(plan, ranks2):
    check(ranks2, plan, CHOSEN)


@pytest.mark.parametrize("plan", gate_runs(FOUR, 1))
def test_tp_chunks_match_one_process_on_four_ranks(plan, ranks4):
    check(ranks4, plan, {name: CHOSEN[name] for name in ("decoder", "gpt2")})


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", "tp=2 sp=on tp_chunks=3"),
        pytest.param("llama", "tp=2 sp=on tp_chunks=2 recompute=selective", marks=pytest.mark.full),
        pytest.param("llama", "tp=2 sp=on tp_chunks=2 recompute=full", marks=pytest.mark.full),
        pytest.param("gpt2", "tp=2 sp=on tp_chunks=3", marks=pytest.mark.full),
    ],
)
def test_compiled_blocks_with_tp_chunks_match(name, plan, ranks2):
    """Check for as many graphs as without chunks, at any depth."""
    depth, steps = (DEEP, 2) if "recompute" in plan else (SHALLOW, 1)
    case = DeepFamily(name, depth=depth, num_steps=steps)
    want = train_plain(case)
    for found in ranks2.run(train_compiled, compiled_plan(plan), case):
        assert found.result.largest_difference(want) < 1e-10
        assert found.graphs == 3
        assert "selective" in plan or not found.breaks


def check_chunked_products(_: int) -> None:
    """Compare chunked products of several sequences and their gradients with unchunked ones on this rank."""
    axis = build_mesh(Plan.parse("tp=2 sp=on tp_chunks=3"))["tp"]
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(2, 14, 6, generator=generator, dtype=torch.float64)
    weights = [torch.randn(size, 6, generator=generator, dtype=torch.float64) for size in (4, 5)]
    own = slice(7 * axis.rank, 7 * axis.rank + 7)
    products = gather_multiply(x_BTD[:, own], weights, axis, 3)
    for out, weight in zip(products, weights, strict=True):
        torch.testing.assert_close(out, x_BTD @ weight.t(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        multiply_scatter(x_BTD, weights[0], axis, 3), 2 * (x_BTD @ weights[0].t())[:, own], rtol=1e-12, atol=1e-12
    )
    grads = [torch.randn(2, 14, size, generator=generator, dtype=torch.float64) for size in (4, 5)]
    of_x, *of_weights = column_gradients(x_BTD[:, own], grads, weights, axis, of_x=True, of_weights=True)
    expected = 2 * (grads[0] @ weights[0] + grads[1] @ weights[1])[:, own]
    torch.testing.assert_close(of_x, expected, rtol=1e-12, atol=1e-12)
    for found, grad in zip(of_weights, grads, strict=True):
        torch.testing.assert_close(found, grad.flatten(0, 1).t() @ x_BTD.flatten(0, 1), rtol=1e-12, atol=1e-12)
    # All tokens once, in the order of the gathers.
    gathered = x_BTD.new_empty(28, 6)
    gather_multiply(x_BTD[:, own], weights, axis, 3, gathered)
    assert torch.equal(gathered, by_chunks(x_BTD, axis, 3))


def test_chunked_products_of_several_sequences_match_unchunked(ranks2):
    ranks2.run(check_chunked_products, 0)
    assert [one.stop - one.start for one in cuts(7, 3)] == [3, 3, 1]
    assert [one.stop - one.start for one in cuts(2, 5)] == [1, 1]


class Reading(nn.Module):
    """A feed-forward module that reads the input of its sharded layers."""

    def __init__(self, inner: nn.Module, how: str):
        super().__init__()
        self.gate, self.up, self.down, self.how = inner.gate, inner.up, inner.down, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "hidden":
            x = _Doubled.apply(x) / 2
        elif self.how == "shape":
            assert x.shape == (x.size(0), x.size(1), x.shape[-1])
            assert x.requires_grad
            assert isinstance(x, ShardedTokens)
        else:
            x = x + 0.5 * torch.tanh(x)
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, *grads):
        return 2 * grads[0]


class ReadingCase(DecoderCase):
    """A decoder whose feed-forward modules read their input."""

    how = "read"

    def model(self) -> nn.Module:
        model = super().model()
        for block in model.blocks:
            block.mlp = Reading(block.mlp, self.how)
        return model


class HiddenCase(ReadingCase):
    """A decoder whose feed-forward modules pass their input to a custom autograd function."""

    how = "hidden"


def test_module_may_read_the_input_of_its_chunked_layers(ranks2):
    check(ranks2, "tp=2 sp=on tp_chunks=2", {"read": ReadingCase(LLAMA, global_batch=16, num_steps=2)})


def test_custom_autograd_function_on_chunked_input_is_rejected(ranks2):
    case = {"hidden": HiddenCase(LLAMA, global_batch=16, num_steps=1)}
    with pytest.raises(CommError, match=r"passes its input to a custom autograd function.*Use tp_chunks=1"):
        ranks2.run(train_cases, "tp=2 sp=on tp_chunks=2 precision=fp64", case)


def test_adapter_with_tp_chunks_is_rejected(ranks2):
    adapted = {"adapter": AdapterCase(cases()["decoder"])}
    with pytest.raises(CommError, match=r"blocks\.0\.attn\.q has an adapter, and only a plain product.*tp_chunks=1"):
        ranks2.run(train_cases, "tp=2 sp=on tp_chunks=2 precision=fp64", adapted)
