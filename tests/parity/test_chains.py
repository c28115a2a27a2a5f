"""Pipelines of encoder-decoder and vision-language models match one process."""

from __future__ import annotations

import dataclasses

import pytest

from tests.parity.chain_cases import CASES, ChainCase
from weft.verify.parity import train_cases, train_plain

FOUR = [
    "pp=4 microbatches=4",  # splits both chains, with their boundary inside a stage
    "pp=4 microbatches=4 split=1+2+1+4",  # a stage begins at the boundary of the chains
    "pp=4 microbatches=4 schedule=zb_h1 split=1+1+3+3",  # a stage in the middle of the encoder
    "pp=2 dp_shard=2 zero=2 microbatches=4",
    "pp=2 dp_shard=2 zero=3 reshard=after_step microbatches=2",
    "pp=2 tp=2 microbatches=2",
    "pp=2 dp_replicate=2 microbatches=2 recompute=full",
]
TWO = [
    "pp=2 microbatches=4",
    "pp=2 microbatches=4 split=3+5 accumulation=2",
    "pp=2 microbatches=4 split=1+7 recompute=selective",
    "pp=2 microbatches=4 schedule=interleaved virtual_stages=2",
    "pp=2 microbatches=4 schedule=interleaved virtual_stages=4",
    "pp=2 microbatches=4 schedule=zb_v virtual_stages=2",
    "pp=2 microbatches=4 schedule=zb_interleaved virtual_stages=2",
    "pp=2 microbatches=4 schedule=gpipe",
]


@pytest.fixture(scope="module")
def plain():
    return {name: train_plain(case) for name, case in CASES.items()}


def check(ranks, plan: str, cases: dict[str, ChainCase], plain) -> None:
    for results in ranks.run(train_cases, f"{plan} precision=fp64", cases):
        found = {name: result.largest_difference(plain[name]) for name, result in results.items()}
        assert max(found.values()) < 1e-10, found


def test_two_stages_split_in_the_decoder_match_one_process(ranks2):
    cases = {name: CASES[name] for name in ("t5", "llava-frozen", "bart-reads-encoder")}
    check(ranks2, "pp=2 microbatches=2 split=4+4", cases, {name: train_plain(case) for name, case in cases.items()})


def test_two_stages_split_in_the_encoder_match_one_process(ranks2):
    cases = {name: CASES[name] for name in ("whisper", "t5-frozen")}
    check(ranks2, "pp=2 microbatches=2 split=2+6", cases, {name: train_plain(case) for name, case in cases.items()})


@pytest.mark.full
@pytest.mark.parametrize("plan", ["pp=2 microbatches=2 split=4+4", "pp=2 microbatches=4 split=2+6 recompute=full"])
def test_dropout_in_two_chains_matches_one_process(plan, ranks2):
    cases = {kind: ChainCase(kind, dropout=0.2) for kind in ("t5", "bart", "whisper")}
    one = train_cases("precision=fp64", cases)
    for name, case in cases.items():
        assert one[name].losses != train_plain(dataclasses.replace(case, dropout=0.0)).losses
    check(ranks2, plan, cases, one)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["pp=2 microbatches=2 split=4+4", "pp=2 microbatches=2 split=2+6"])
def test_bf16_stays_close_to_one_process(plan, ranks2):
    """Compare with a tolerance of a few bf16 roundings, since sums have another order."""
    cases = {kind: ChainCase(kind) for kind in ("t5", "bart", "whisper")}
    one = train_cases("precision=bf16", cases)
    for results in ranks2.run(train_cases, f"{plan} precision=bf16", cases):
        for name, result in results.items():
            assert result.losses == pytest.approx(one[name].losses, rel=2**-5)
            assert result.grad_norms[0] == pytest.approx(one[name].grad_norms[0], rel=2**-5)


@pytest.mark.full
@pytest.mark.parametrize("plan", TWO)
def test_two_chains_match_one_process_under_every_schedule(plan, ranks2, plain):
    check(ranks2, plan, CASES, plain)


@pytest.mark.full
@pytest.mark.parametrize("plan", FOUR)
def test_two_chains_match_one_process_on_four_ranks(plan, ranks4, plain):
    check(ranks4, plan, CASES, plain)
