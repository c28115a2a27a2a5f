"""reduce=bf16: gradients are rounded for communication, and nowhere else.

Each summand g is rounded to bf16 (relative error at most u = 2**-8), and the sum once more. So the result is off by at
most ((1 + u)**2 - 1) * sum(abs(g)). The exponent doubles if sums are reduced again over other ranks (HSDP, tp).
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
#: Plans whose partial sums may cancel, so that the bound of the largest element applies to all elements.
SHARDED = (
    "dp_shard=2 tp=2 sp=on zero=1",
    "dp_shard=2 tp=2 sp=on zero=3",
    "dp_shard=2 cp=2 zero=2",
    "pp=2 dp_shard=2 zero=2 microbatches=2",
)


def summands(plan: Plan, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of the loss sum for each pass of each data rank, computed in this process."""
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
    """Return the largest allowed error of each gradient element."""
    times = 2 if "dp_replicate=2" in plan or plan in SHARDED else 1
    parts = summands(Plan.parse(plan), torch.float64)
    found = {}
    for name in parts[0]:
        bound = ((1 + U) ** (2 * times) - 1) * sum(part[name].abs() for part in parts) / num_tokens()
        found[name] = (bound.max().expand_as(bound) if plan in SHARDED else bound) + 1e-12 * bound.max()
    return found


@pytest.mark.parametrize("num_ranks, plans", [(2, (*TWO_RANKS, *ACCUMULATED)), (4, (*FOUR_RANKS, *SHARDED))])
def test_bf16_gradient_error_is_within_the_rounding_bound(num_ranks, plans, request):
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
def test_bits_equal_fp32_sums_of_rounded_summands(reduce, ranks2):
    """Check that fp32 is exact, and that bf16 rounds each summand and the sum to nearest, and nothing else."""
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


def test_bf16_reduce_halves_the_bytes(ranks2, ranks4):
    """Allow a few more bytes for a step's totals and the checks at the start."""
    for pool, plans in ((ranks2, TWO_RANKS), (ranks4, FOUR_RANKS[1:4])):
        texts = tuple(f"{plan} reduce={reduce}" for plan in plans for reduce in ("fp32", "bf16"))
        found = pool.run(train_all, texts, CASE)[0]
        for full, half in zip(texts[::2], texts[1::2], strict=True):
            rest = 2 * found[half].reduced_bytes - found[full].reduced_bytes
            assert 0 < rest < 500 < 0.05 * found[half].reduced_bytes, (full, rest)


def test_bf16_reduce_losses_are_close_to_fp32(ranks2):
    """Check that losses of five steps differ by less than one rounding."""
    case = DecoderCase(LLAMA)
    for stage in ("dp_shard=2 zero=1", "dp_shard=2 zero=3"):
        wide, narrow = (ranks2.run(train_case, f"{stage} precision=bf16 reduce={name}", case)[0].losses
                        for name in ("fp32", "bf16"))  # fmt: skip
        assert narrow == pytest.approx(wide, rel=U)
        assert narrow != wide
