"""gather=fp8: every zero=3 layout matches one process whose layers read weights in e4m3, scaled by row.

As in test_float8.py, float64 replaces bf16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.parity.adapter_cases import AdapterCase
from tests.parity.moe_cases import MOE, MoECase
from tests.parity.test_float8 import WIDE, SomeBF16Case
from tests.parity.test_gather import gathered_bytes
from weft.comm.wire.codes import RowCodes, RowSlice
from weft.config.fields.wire_formats import wire_spec
from weft.parallel.layers.float8_products import Float8
from weft.parallel.state import precision
from weft.verify.parity import Case, DecoderCase, ParityResult, train_case

CASES: dict[str, Case] = {
    "llama": DecoderCase(WIDE, num_steps=2),
    "experts": MoECase(dataclasses.replace(MOE, dim=32, ffn_dim=48, expert_ffn_dim=16), num_steps=2),
    "adapter": AdapterCase(DecoderCase(WIDE), kind="lora"),
    "keeping": SomeBF16Case(WIDE, num_steps=2),
}
TWO = {
    "llama": (
        "dp_shard=2",
        "dp_shard=2 accumulation=2 reshard=after_step",
        "dp_shard=2 recompute=full",
        "cp=2",
    ),
    "experts": ("dp_shard=2",),
    "adapter": ("dp_shard=2",),
    "keeping": ("dp_shard=2 recompute=selective",),
}
FOUR = ("dp_replicate=2 dp_shard=2", "dp_shard=2 tp=2 sp=on", "dp_shard=2 pp=2 microbatches=2 reshard=after_step")


def rounded(weight_OI: torch.Tensor) -> torch.Tensor:
    """Round a weight by row, as one process does."""
    scale = 2 ** torch.floor(torch.log2(448 / weight_OI.abs().amax(-1, keepdim=True).clamp(min=1e-12)))
    return (weight_OI * scale).to(torch.float8_e4m3fn).to(weight_OI.dtype) / scale


@contextmanager
def in_float64() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(precision._COMPUTE, "fp8", torch.float64)
        yield patch


def train_each(name: str, plans: tuple[str, ...]) -> list[ParityResult]:
    with in_float64():
        return [train_case(f"{plan} zero=3 gather=fp8 precision=fp8", CASES[name]) for plan in plans]


def train_reference(name: str) -> ParityResult:
    output, back = Float8.product, Float8.input_gradients
    with in_float64() as patch:
        patch.setattr(Float8, "product", lambda self, x, weight: output(self, x, rounded(weight)))
        patch.setattr(Float8, "input_gradients", lambda self, grads, all_: back(self, grads, [*map(rounded, all_)]))
        return train_case("precision=fp8", CASES[name])


@pytest.mark.filterwarnings("ignore::weft.errors.WeftWarning")
@pytest.mark.parametrize("name", CASES)
def test_layouts_match_one_process_with_rounded_weights(name, ranks2):
    expected = train_reference(name)
    for answers in ranks2.run(train_each, name, TWO[name]):
        for plan, found in zip(TWO[name], answers, strict=True):
            assert found.largest_difference(expected) < 1e-10, plan
    assert expected.largest_difference(train_case("precision=fp64", CASES[name])) > 1e-4, "nothing was rounded"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::weft.errors.WeftWarning")
def test_compiled_blocks_match_one_process_with_rounded_weights(ranks2):
    expected = train_reference("llama")
    for (found,) in ranks2.run(train_each, "llama", ("dp_shard=2 compile=on",)):
        assert found.largest_difference(expected) < 1e-10


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::weft.errors.WeftWarning")
def test_layouts_match_one_process_with_rounded_weights_on_four_ranks(ranks4):
    expected = train_reference("llama")
    for answers in ranks4.run(train_each, "llama", FOUR):
        for plan, found in zip(FOUR, answers, strict=True):
            assert found.largest_difference(expected) < 1e-10, plan


def test_gathered_weights_round_to_themselves():
    """Check that the layer's rounding does not change a gathered weight, so no number is rounded twice."""
    x = torch.randn(24, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[3], x[5] = 0.0, x[5] * 1e-30
    slices = [RowSlice.of((16, 80)), RowSlice(8, 80, True)]
    codec = RowCodes(wire_spec("fp8"), slices, x.dtype)
    found = torch.empty(1, x.numel(), dtype=x.dtype)
    codec.decode(codec.encode(x.flatten())[None], found)
    found = found.view_as(x)
    assert torch.equal(found[:16], rounded(x[:16]))
    assert torch.equal(rounded(found[:16]), found[:16])
    assert torch.equal(found[16:], x[16:])
    assert codec.num_bytes == 16 * 80 + 16 * 2 + 8 * 80 * 8


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_non_finite_value_affects_only_its_row(number):
    x = torch.ones(4, 16)
    x[1, 3] = number
    codec, found = RowCodes(wire_spec("fp8"), [RowSlice.of(x.shape)], x.dtype), torch.empty(1, 64)
    codec.decode(codec.encode(x.flatten())[None], found)
    assert not found.view(4, 16)[1].isfinite().any()
    assert torch.equal(found.view(4, 16)[[0, 2, 3]], x[[0, 2, 3]])


@pytest.mark.filterwarnings("ignore::weft.errors.WeftWarning")
def test_fp8_gathers_send_fewer_bytes(ranks2):
    """Embedding, head and norms are gathered in bf16. Rows are short, and each has a scale."""
    text, case = "dp_shard=2 zero=3 precision=fp8", CASES["llama"]
    plain, coded = (ranks2.run(gathered_bytes, one, case)[0] for one in (text, f"{text} gather=fp8"))
    assert 0.5 * plain < coded < 0.7 * plain
