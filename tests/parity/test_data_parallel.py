"""Data parallelism with accumulation matches one device in float64: loss, norm, gradients and weights."""

from __future__ import annotations

import pytest

from tests.choice import product
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.verify.parity import DecoderCase, train_decoder

RTOL = 1e-10

LLAMA = DecoderSpec(
    vocab_size=61, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=32, tied=True
)
GPT2 = DecoderSpec(
    family="gpt2", vocab_size=61, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=64, max_seq_len=32
)

#: Tokens are masked unevenly over ranks. The last sample, and so some microbatch, has no trained token.
CASES = {
    "llama": DecoderCase(LLAMA),
    "llama-documents": DecoderCase(LLAMA, documents=True),
    "gpt2": DecoderCase(GPT2),
    "gpt2-sgd-unclipped": DecoderCase(GPT2, optimizer="sgd", max_grad_norm=0.0),
    "unmasked": DecoderCase(LLAMA, masked=0.0),
}
PLANS = [
    f"dp_replicate={ranks} accumulation={accumulation} precision=fp64"
    for ranks in (1, 2, 4)
    for accumulation in (1, 2, 4)
    if ranks * accumulation <= 8
]


@pytest.fixture(scope="module")
def references():
    return {name: train_decoder("precision=fp64", case) for name, case in CASES.items()}


@pytest.mark.parametrize(*product("plan, case_name", PLANS, list(CASES)))
def test_data_parallel_plan_matches_one_process(plan, case_name, references, request):
    case, reference = CASES[case_name], references[case_name]
    num_ranks = int(plan.split()[0].split("=")[1])
    if num_ranks == 1:
        results = [train_decoder(plan, case)]
    else:
        results = request.getfixturevalue(f"ranks{num_ranks}").run(train_decoder, plan, case)
    for result in results:
        assert result.largest_difference(reference) < RTOL


def test_comparison_detects_a_wrong_normalizer(references):
    """Check that the comparison can fail. A mean of per-microbatch means is a common mistake."""
    case = CASES["llama"]
    other = train_decoder("precision=fp64", DecoderCase(case.spec, masked=0.0))
    assert references["llama"].largest_difference(other) > 1e-3


def test_gradients_are_reduced_once_with_any_accumulation(ranks2):
    once = ranks2.run(train_decoder, "dp_replicate=2 precision=fp64", CASES["llama"])[0].reduced_bytes
    four = ranks2.run(train_decoder, "dp_replicate=2 accumulation=4 precision=fp64", CASES["llama"])[0].reduced_bytes
    assert once == four > 0
