"""compile=on on models of transformers: one graph for each kind of block at any depth, with PyTorch's own numbers."""

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

#: With sp, the cut of the sequence and the joining of it are graphs too.
ALONE = ["", "recompute=full", "recompute=selective"]
ON_TWO = ["tp=2", "tp=2 sp=on", "cp=2", "dp_shard=2 zero=3", "dp_shard=2 zero=3 recompute=full"]


def check(run, plan: str, name: str) -> None:
    """Same graphs at both depths, and at the larger one the numbers of one process that does not compile."""
    # Under selective, a block is not compiled in its first forward, which chooses what to keep.
    steps = 2 if "selective" in plan else 1
    shallow, deep = (DeepFamily(name, depth=depth, num_steps=steps) for depth in (SHALLOW, DEEP))
    graphs = [found.graphs for found in run(train_compiled, compiled_plan(plan), shallow)]
    want = train_plain(deep)
    for found in run(train_compiled, compiled_plan(plan), deep):
        assert found.result.largest_difference(want) < RTOL
        assert all(FIRST_RUN in reason for reason in found.breaks)
        assert [found.graphs] == graphs[:1]
        assert found.graphs == (3 if "sp=on" in plan else 1)


def here(function, *arguments):
    return [function(*arguments)]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=[] if (name, plan) == ("llama", "") else pytest.mark.full)
        for name in SETTINGS
        for plan in ALONE
    ],
)
def test_one_rank(name, plan):
    check(here, plan, name)


@pytest.mark.full
@pytest.mark.parametrize("plan", ON_TWO)
@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks(name, plan, ranks2):
    check(ranks2.run, plan, name)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 ep=2", "dp_shard=2 ep=2 recompute=full"])
def test_experts_over_ranks(plan, ranks2):
    check(ranks2.run, plan, "mixtral")


@pytest.mark.full
@pytest.mark.parametrize("plan", ["pp=2 microbatches=2", "pp=2 microbatches=2 schedule=interleaved virtual_stages=2"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "llava"])
def test_pipelines_of_two_chains(name, plan, ranks2):
    case = dataclasses.replace(CASES[name], num_steps=1)
    want = train_plain(case)
    for found in ranks2.run(train_compiled, compiled_plan(plan), case):
        assert found.result.largest_difference(want) < RTOL
        assert found.breaks == []
        # Blocks of encoder and decoder; T5's first of each makes the table of positions.
        assert 1 <= found.graphs <= 4


def test_text_is_generated_by_compiled_blocks():
    """In place of the cache that training leaves out, generation has one, and runs without compiled code."""
    plain, compiled = (DeepFamily("llama", depth=SHALLOW).model().eval() for _ in range(2))
    ids = torch.arange(2, 10)[None]
    with counted_graphs() as found:
        compile_blocks(compiled, "eager")
        text = compiled.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(text, plain.generate(ids, max_new_tokens=4, do_sample=False))
    assert found.graphs == 0
