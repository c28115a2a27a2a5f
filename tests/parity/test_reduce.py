"""reduce=bf16: gradients travel rounded, and are rounded nowhere else.

What arrives of summands g: each is rounded to bf16 (relative error at most u = 2**-8) and their sum once more, so it is
off by at most ((1 + u)**2 - 1) * sum(abs(g)), and twice that often where sums travel on over other ranks (HSDP, tp).
"""

from __future__ import annotations

import pytest
import torch

from tests.parity.cases import LLAMA
from weft.config.plan import Plan
from weft.verify.parity import Case, DecoderCase, ParityResult, local_microbatches, train_case

U = 2.0**-8
CASE = DecoderCase(LLAMA, num_steps=1, max_grad_norm=0.0)

TWO_RANKS = (
    "dp_replicate=2",
    "dp_shard=2 zero=1",
    "dp_shard=2 zero=2",
    "dp_shard=2 zero=3",
)
ACCUMULATED = (
    "dp_shard=2 zero=1 accumulation=4",
    "dp_shard=2 zero=3 accumulation=4",
    "dp_shard=2 zero=3 reshard=after_step accumulation=4",
)
FOUR_RANKS = (
    "dp_replicate=4",
    "dp_replicate=2 dp_shard=2 zero=1 accumulation=2",
    "dp_replicate=2 dp_shard=2 zero=2",
    "dp_replicate=2 dp_shard=2 zero=3",
)
#: Their partial sums cancel, so a bound by element would have to know them: here it is that of the largest element.
CUT = (
    "dp_shard=2 tp=2 sp=on zero=1",
    "dp_shard=2 tp=2 sp=on zero=3",
    "dp_shard=2 cp=2 zero=2",
    "pp=2 dp_shard=2 zero=2 microbatches=2",
)


def summands(plan: Plan, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Gradients of the sum of losses, of each pass of each data rank, on this process."""
    found = []
    for rank in range(plan.dp_size):
        for batch in local_microbatches(CASE.batch(0), plan, rank):
            model = CASE.model().to(dtype)
            loss_sum, _ = CASE.loss(CASE.forward(model, batch), batch)
            loss_sum.backward()
            found.append({name: param.grad for name, param in model.named_parameters()})
    return found


def num_tokens() -> int:
    return int((CASE.batch(0)["labels"] >= 0).sum())


def train_all(plans: tuple[str, ...], case: Case) -> dict[str, ParityResult]:
    return {plan: train_case(plan, case) for plan in plans}


def bounds(plan: str) -> dict[str, torch.Tensor]:
    """How far each element of each gradient may be off."""
    times = 2 if "dp_replicate=2" in plan or plan in CUT else 1
    parts = summands(Plan.parse(plan), torch.float64)
    found = {}
    for name in parts[0]:
        bound = ((1 + U) ** (2 * times) - 1) * sum(part[name].abs() for part in parts) / num_tokens()
        found[name] = (bound.max().expand_as(bound) if plan in CUT else bound) + 1e-12 * bound.max()
    return found


@pytest.mark.parametrize("num_ranks, plans", [(2, (*TWO_RANKS, *ACCUMULATED)), (4, (*FOUR_RANKS, *CUT))])
def test_a_gradient_is_within_the_roundings_of_its_summands(num_ranks, plans, request):
    exact = train_case("precision=fp64", CASE).grads
    texts = tuple(f"{plan} precision=fp64 reduce=bf16" for plan in plans)
    answers = request.getfixturevalue(f"ranks{num_ranks}").run(train_all, texts, CASE)
    for plan, text in zip(plans, texts, strict=True):
        limits = bounds(plan)
        for name, grad in answers[0][text].grads.items():
            error = (grad - exact[name]).abs()
            assert (error <= limits[name]).all(), (name, plan)
            assert error.max() > 1e-6 * exact[name].abs().max(), f"{name} was not rounded under {plan}"
            assert all(torch.equal(other[text].grads[name], grad) for other in answers[1:])


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_the_bits_are_those_of_two_summands_added_in_fp32(reduce, ranks2):
    """fp32 is untouched by the choice; bf16 rounds each summand and the sum, to the nearest, and nothing else."""
    wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[reduce]
    texts = tuple(f"{plan} reduce={reduce}" for plan in TWO_RANKS)
    one, other = summands(Plan(dp_replicate=2), torch.float32)
    nominal = 2.0 ** (CASE.batch(0)["labels"].numel().bit_length() - 1)
    for answer in ranks2.run(train_all, texts, CASE):
        for text in texts:
            for name, grad in answer[text].grads.items():
                rounded = [(part[name] / nominal).to(wire).float() for part in (one, other)]
                total = (rounded[0] + rounded[1]).to(wire).float()
                assert torch.equal(grad, total * (nominal / num_tokens())), (name, text)


def test_half_the_bytes_travel(ranks2, ranks4):
    """All that travels besides are the totals of a step, and what ranks compare at the start: a few numbers."""
    for pool, plans in ((ranks2, TWO_RANKS), (ranks4, FOUR_RANKS[1:4])):
        texts = tuple(f"{plan} reduce={reduce}" for plan in plans for reduce in ("fp32", "bf16"))
        found = pool.run(train_all, texts, CASE)[0]
        for whole, half in zip(texts[::2], texts[1::2], strict=True):
            rest = 2 * found[half].reduced_bytes - found[whole].reduced_bytes
            assert 0 < rest < 500 < 0.05 * found[half].reduced_bytes, (whole, rest)


def test_training_goes_on_as_with_fp32(ranks2):
    """Five steps: losses differ by less than one rounding."""
    case = DecoderCase(LLAMA)
    for stage in ("dp_shard=2 zero=1", "dp_shard=2 zero=3"):
        wide, narrow = (ranks2.run(train_case, f"{stage} precision=bf16 reduce={name}", case)[0].losses
                        for name in ("fp32", "bf16"))  # fmt: skip
        assert narrow == pytest.approx(wide, rel=U)
        assert narrow != wide
