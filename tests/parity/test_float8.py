"""precision=fp8: every plan rounds to float8 as one process does.

Here float64 replaces bf16, so the only roundings are those to float8. If a plan had other scales, or scales over other
elements, results would differ by percents and not by 1e-10.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch.nn import functional as F

from tests.choice import todays
from tests.parity.adapter_cases import AdapterCase
from tests.parity.cases import LLAMA, HuggingFaceCase
from tests.parity.moe_cases import MOE, MoECase
from weft.errors import ModelError, PlanError, WeftWarning
from weft.parallel.layers.deferred_gradients import linear
from weft.parallel.layers.float8 import choose_float8
from weft.parallel.layers.float8_products import Float8
from weft.parallel.state import precision
from weft.verify.parity import Case, DecoderCase, ParityResult, train_case
from weft.verify.rank_pool import RankPool

WIDE = dataclasses.replace(LLAMA, dim=32, ffn_dim=48)


@dataclasses.dataclass(frozen=True)
class SomeBF16Case(DecoderCase):
    """A decoder with some layers in bf16."""

    bf16_layers: tuple[str, ...] = ("first:1", "*.down")


@dataclasses.dataclass(frozen=True)
class TensorwiseCase(DecoderCase):
    """A decoder with one scale for all tokens."""

    fp8_recipe: str = "tensorwise"


CASES: dict[str, Case] = {
    "llama": DecoderCase(WIDE, num_steps=2),
    "gpt2": HuggingFaceCase(WIDE, num_steps=2, kind="gpt2"),
    "experts": MoECase(dataclasses.replace(MOE, dim=32, ffn_dim=48, expert_ffn_dim=16), num_steps=2),
    "adapter": AdapterCase(DecoderCase(WIDE), kind="dora"),
    "keeping": SomeBF16Case(WIDE, num_steps=2),
}
TENSORWISE = TensorwiseCase(WIDE, num_steps=2)
TWO_RANKS = {
    "llama": (
        "dp_shard=2 zero=1 accumulation=2",
        "dp_shard=2 zero=3 recompute=full",
        "tp=2",
        "tp=2 sp=on recompute=selective",
        "cp=2 cp_mode=ring",
        "pp=2 microbatches=2",
        "pp=2 microbatches=4 schedule=zb_h1",
        "tp=2 offload=activations",
    ),
    "gpt2": ("tp=2", "pp=2 microbatches=4 schedule=zb_h1"),
    "experts": ("tp=2", "tp=2 ep=2", "dp_shard=2 ep=2 zero=1"),
    "adapter": ("tp=2 sp=on", "dp_shard=2 zero=3"),
    "keeping": ("tp=2", "pp=2 microbatches=2"),
}
COMPILED = {"llama": ("tp=2 compile=on",), "gpt2": ("dp_replicate=2 compile=on",)}
FOUR_RANKS = {
    "llama": ("dp_shard=2 tp=2 sp=on zero=3", "pp=2 tp=2 microbatches=4 schedule=zb_h1", "cp=2 tp=2 sp=on"),
    "gpt2": ("dp_replicate=2 tp=2 zero=0",),
    "experts": ("dp_shard=2 tp=2 ep=4 zero=1",),
    "adapter": ("dp_replicate=2 tp=2",),
    "keeping": ("dp_shard=2 tp=2 zero=3",),
}


def train_all(name: str, plans: tuple[str, ...]) -> dict[str, ParityResult]:
    """Train a case under its plans, with float64 instead of bf16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(precision._COMPUTE, "fp8", torch.float64)
        case = CASES.get(name, TENSORWISE)
        return {plan: train_case(f"{plan} precision=fp8".strip(), case) for plan in plans}


def check_rounding(pool: RankPool, name: str, plans: tuple[str, ...]) -> None:
    reference = train_all(name, ("",))[""]
    for answer in pool.run(train_all, name, plans):
        for plan, result in answer.items():
            assert result.largest_difference(reference) < 1e-10, plan
    exact = train_case("precision=fp64", CASES[name])
    assert reference.largest_difference(exact) > 1e-3, f"{name} was not rounded"


@pytest.mark.filterwarnings("ignore::weft.errors.WeftWarning")
@pytest.mark.parametrize("name", todays(CASES, parts=2))
def test_plans_round_to_float8_as_one_process(name, ranks2):
    check_rounding(ranks2, name, TWO_RANKS[name])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::weft.errors.WeftWarning")
@pytest.mark.parametrize("name", CASES)
def test_four_rank_and_compiled_plans_round_to_float8_as_one_process(name, ranks2, ranks4):
    check_rounding(ranks4, name, FOUR_RANKS[name])
    check_rounding(ranks2, name, COMPILED.get(name, ()))


def test_rowwise_products_equal_products_of_rounded_factors():
    """Compare with the recipe in ten lines: power-of-two scales per token, per output feature, and per full weight."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 32, dtype=torch.float64), torch.randn(48, 32, dtype=torch.float64)
    x[0, 0] = 0.0
    x.requires_grad_(), weight.requires_grad_()
    grad = torch.randn(3, 5, 48, dtype=torch.float64) * 1e-4

    def rounded(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        scale = 2 ** torch.floor(torch.log2(448 / largest.clamp(min=1e-12)))
        return (values * scale).float().to(torch.float8_e4m3fn).double() / scale

    out = linear(x, weight, None, None, form=Float8())
    out.backward(grad)
    rows = rounded(x.detach(), x.detach().abs().amax(-1, keepdim=True))
    features = rounded(weight.detach(), weight.detach().abs().amax(-1, keepdim=True))
    full = rounded(weight.detach(), weight.detach().abs().max())
    back = rounded(grad, grad.abs().amax(-1, keepdim=True))
    assert torch.allclose(out, F.linear(rows, features), rtol=1e-13, atol=1e-13)
    assert torch.allclose(x.grad, back @ full, rtol=1e-13, atol=1e-16)
    assert torch.equal(weight.grad, grad.flatten(0, 1).t() @ x.detach().flatten(0, 1))


#: Plan of one process -> plans under which ranks have the same microbatches.
AS_ONE = {
    "": ("tp=2", "tp=2 sp=on"),
    "accumulation=2": ("dp_shard=2 zero=3", "dp_replicate=2 zero=1", "pp=2 microbatches=2", "tp=2 accumulation=2"),
}


@pytest.mark.filterwarnings("ignore::weft.errors.WeftWarning")
def test_tensorwise_scale_covers_one_microbatch(ranks2):
    reference = train_all("tensorwise", tuple(AS_ONE))
    for one, plans in AS_ONE.items():
        for answer in ranks2.run(train_all, "tensorwise", plans):
            for plan, result in answer.items():
                assert result.largest_difference(reference[one]) < 1e-10, plan
    by_rows = train_all("llama", ("",))[""]
    assert reference[""].largest_difference(by_rows) > 1e-4, "the recipe changed nothing"
    assert reference[""].largest_difference(train_case("precision=fp64", CASES["llama"])) > 1e-3


def test_tensorwise_products_equal_products_of_rounded_factors():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 32, dtype=torch.float64), torch.randn(48, 32, dtype=torch.float64)
    x.requires_grad_(), weight.requires_grad_()
    grad = torch.randn(3, 5, 48, dtype=torch.float64) * 1e-4

    def rounded(values: torch.Tensor, form: torch.dtype, largest: float) -> torch.Tensor:
        scale = 2 ** torch.floor(torch.log2(largest / values.abs().max()))
        return (values * scale).float().to(form).double() / scale

    out = linear(x, weight, None, None, form=Float8(recipe="tensorwise"))
    out.backward(grad)
    full = rounded(weight.detach(), torch.float8_e4m3fn, 448)
    assert torch.allclose(out, F.linear(rounded(x.detach(), torch.float8_e4m3fn, 448), full), rtol=1e-13, atol=1e-13)
    assert torch.allclose(x.grad, rounded(grad, torch.float8_e5m2, 57344) @ full, rtol=1e-13, atol=1e-16)
    assert torch.equal(weight.grad, grad.flatten(0, 1).t() @ x.detach().flatten(0, 1))
    nothing = Float8(recipe="tensorwise").product(torch.empty(0, 32), torch.ones(48, 32))
    assert nothing.shape == (0, 48)


def test_unknown_recipe_is_rejected():
    with pytest.raises(ModelError) as caught:
        choose_float8(DecoderCase(WIDE).model(), torch.device("cpu"), recipe="rowise", speaks=False)
    assert str(caught.value) == "fp8_recipe='rowise': it is rowwise or tensorwise. Use fp8_recipe='rowwise'."


def test_non_finite_input_gives_non_finite_product():
    x, weight = torch.ones(2, 16), torch.ones(16, 16)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    assert not Float8().product(x, weight).isfinite().any()
    assert not Float8(recipe="tensorwise").product(x, weight).isfinite().any()


def test_layers_of_unsupported_shape_are_reported():
    spec = dataclasses.replace(WIDE, ffn_dim=40)
    with pytest.warns(WeftWarning) as caught_warnings:
        train_case("precision=fp8", DecoderCase(spec, num_steps=1))
    texts = [str(one.message) for one in caught_warnings]
    assert any(
        "6 of 14 linear layers in blocks stay in bf16, the first is blocks.0.mlp.gate (40, 32)" in text
        for text in texts
    ), texts
    assert any("this cpu has no products of float8" in text for text in texts)


def chosen(*keep: str) -> set[str]:
    model = DecoderCase(WIDE).model()
    choose_float8(model, torch.device("cpu"), keep, speaks=False)
    return {name for name, module in model.named_modules() if isinstance(getattr(module, "_weft_float8", None), Float8)}


def test_layers_named_in_bf16_layers_stay_in_bf16():
    every = chosen()
    first = {name for name in every if name.startswith("blocks.0.")}
    assert len(first) == 7 < len(every)
    assert chosen("first:1") == every - first
    assert chosen("last:1") == every - {name for name in every if name.startswith(f"blocks.{WIDE.num_layers - 1}.")}
    assert chosen("*.down", "*.attn.q") == {name for name in every if not name.endswith((".down", ".q"))}


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (["*.dwon"], "bf16_layers='*.dwon': no linear layer in blocks has this name. Use first:N"),
        (["first:0"], "bf16_layers='first:0': no linear layer"),
        (["first:1", "last:99"], "all 14 linear layers that could multiply in float8 stay in bf16"),
    ],
)
def test_bf16_layers_without_effect_or_remainder_are_rejected(keep, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        chosen(*keep)


def few_heads() -> str:
    with pytest.raises(PlanError) as caught:
        train_case(
            "tp=2 precision=fp8", DecoderCase(dataclasses.replace(WIDE, num_kv_heads=1, num_heads=2), num_steps=1)
        )
    return str(caught.value)


def test_partial_output_gradients_are_rejected(ranks2):
    message = ranks2.run(few_heads)[0]
    assert message.startswith("precision=fp8: under tp each rank has a part of the gradient of blocks.0.attn.k")
    assert "Use tp=1" in message
