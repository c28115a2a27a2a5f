"""compile=on with transformers models: one graph per kind of block at any depth, and the results of plain PyTorch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.parity.chain_cases import CASES
from tests.parity.compiled import compiled_plan, train_compiled
from tests.parity.compiled_families import DEEP, SETTINGS, SHALLOW, DeepFamily
from tests.parity.test_compile import FIRST_RUN, RTOL
from weft.parallel.compile_blocks import compile_blocks
from weft.verify.oracles import counted_graphs
from weft.verify.parity import train_plain

SINGLE_RANK = ["", "recompute=full", "recompute=selective"]
ON_TWO = ["tp=2", "tp=2 sp=on", "cp=2", "dp_shard=2 zero=3", "dp_shard=2 zero=3 recompute=full"]


def check(run, plan: str, name: str) -> None:
    """Check for equal graph counts at both depths, and that the deep model matches one uncompiled process."""
    # Under selective, a block's first forward chooses the tensors to save and is not compiled.
    steps = 2 if "selective" in plan else 1
    shallow, deep = (DeepFamily(name, depth=depth, num_steps=steps) for depth in (SHALLOW, DEEP))
    graphs = [found.graphs for found in run(train_compiled, compiled_plan(plan), shallow)]
    want = train_plain(deep)
    for found in run(train_compiled, compiled_plan(plan), deep):
        assert found.result.largest_difference(want) < RTOL
        assert all(FIRST_RUN in reason for reason in found.breaks)
        assert [found.graphs] == graphs[:1]
        # With sp, sharding and gathering the sequence are graphs too.
        assert found.graphs == (3 if "sp=on" in plan else 1)


def run_in_process(function, *arguments):
    return [function(*arguments)]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=[] if (name, plan) == ("llama", "") else pytest.mark.full)
        for name in SETTINGS
        for plan in SINGLE_RANK
    ],
)
def test_compiled_families_match_plain_pytorch_on_one_rank(name, plan):
    check(run_in_process, plan, name)


@pytest.mark.full
@pytest.mark.parametrize("plan", ON_TWO)
@pytest.mark.parametrize("name", SETTINGS)
def test_compiled_families_match_plain_pytorch_on_two_ranks(name, plan, ranks2):
    check(ranks2.run, plan, name)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 ep=2", "dp_shard=2 ep=2 recompute=full"])
def test_compiled_expert_parallel_matches_plain_pytorch(plan, ranks2):
    check(ranks2.run, plan, "mixtral")


@pytest.mark.full
@pytest.mark.parametrize("plan", ["pp=2 microbatches=2", "pp=2 microbatches=2 schedule=interleaved virtual_stages=2"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "llava"])
def test_compiled_pipelines_of_two_chains_match_plain_pytorch(name, plan, ranks2):
    case = dataclasses.replace(CASES[name], num_steps=1)
    want = train_plain(case)
    for found in ranks2.run(train_compiled, compiled_plan(plan), case):
        assert found.result.largest_difference(want) < RTOL
        assert found.breaks == []
        # One per kind of block. In T5, the first block of each chain also computes the position biases.
        assert 1 <= found.graphs <= 4


def test_generation_with_compiled_blocks_matches_uncompiled():
    """Generation uses a cache, which training does not, and runs uncompiled."""
    plain, compiled = (DeepFamily("llama", depth=SHALLOW).model().eval() for _ in range(2))
    ids = torch.arange(2, 10)[None]
    with counted_graphs() as found:
        compile_blocks(compiled, "eager")
        text = compiled.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(text, plain.generate(ids, max_new_tokens=4, do_sample=False))
    assert found.graphs == 0
