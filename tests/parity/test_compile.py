"""Deep models with compiled blocks: blocks share graphs, and results match uncompiled plain PyTorch.

Tracing is real. tests/memory/test_compile.py generates code, and tests/parity/test_compile_sharded.py traces backward.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.choice import gate_runs, todays
from tests.parity.compiled import (
    DroppingCase,
    compiled_cells,
    compiled_in_gate,
    compiled_plan,
    deep_subjects,
    train_compiled,
)
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.parallel.random.streams import keep_mask_at, key_of
from weft.verify.parity import train_case

RTOL = 1e-10
#: Graphs of a decoder's loss in addition to its blocks': the passes over logits for the sum and for the gradient.
HEAD_GRAPHS = 2
#: Function of a block's first forward under recompute=selective, which chooses the tensors to save.
FIRST_RUN = "_first_run"


@pytest.fixture(scope="module")
def references():
    return {
        name: train_case("precision=fp64", one.case) if name != "decoder" else None
        for name, one in deep_subjects().items()
    }


@pytest.mark.parametrize(
    "cell",
    todays(gate_runs([(cell,) for cell in compiled_cells(2)], *compiled_in_gate(compiled_cells(2))), parts=2),
    ids=lambda cell: f"{cell.subject} {cell.plan}",
)
def test_blocks_of_one_class_share_graphs(cell, plain, references, ranks2):
    subject = deep_subjects()[cell.subject]
    want = references[cell.subject] or plain[subject.case]
    kinds = 2 if cell.subject == "experts" else 1
    for found in ranks2.run(train_compiled, cell.plan.format(), subject.case):
        assert found.result.largest_difference(want) < RTOL
        assert all(FIRST_RUN in reason for reason in found.breaks)
        # With sp, sharding the sequence adds a graph.
        head = HEAD_GRAPHS if cell.subject == "decoder" else 0
        assert 1 <= found.graphs <= 2 * kinds + cell.plan.sp + head


def test_blocks_with_experts_share_graphs_on_one_rank(references):
    case = deep_subjects()["experts"].case
    found = train_compiled(compiled_plan("recompute=selective"), case)
    assert found.result.largest_difference(references["experts"]) < RTOL
    assert 1 <= found.graphs <= 2 * 2  # dense blocks and blocks with experts


@pytest.mark.parametrize(
    "plan", ["dp_shard=2 zero=2", pytest.param("tp=2 sp=on recompute=full", marks=pytest.mark.full)]
)
def test_doubling_the_depth_adds_no_graph(plan, ranks2):
    counts = [
        ranks2.run(train_compiled, compiled_plan(plan), DroppingCase("plain", num_steps=1, depth=depth))[0].graphs
        for depth in (12, 24)
    ]
    assert counts[0] == counts[1] <= 3  # with sp, two of them shard and gather the sequence


@pytest.mark.parametrize(
    "plan", gate_runs(["tp=2 sp=on", "dp_shard=2 recompute=full", "dp_shard=2 recompute=attention"], 0)
)
def test_dropout_inside_attention_is_compiled(plan, ranks2):
    case = DroppingCase("plain", num_steps=2, attention=0.25)
    want = train_case("precision=fp64", case)
    for found in ranks2.run(train_compiled, compiled_plan(plan), case):
        assert found.result.largest_difference(want) < RTOL
        assert all(FIRST_RUN in reason for reason in found.breaks)
        assert 1 <= found.graphs <= 3


def test_generated_code_gives_the_eager_dropout_mask():
    """Use positions as on the second rank of tp, which has the later half of the tokens, so they are offset indices."""

    def dropped(x, key, first):
        positions = [torch.arange(4) + first, torch.arange(16).narrow(0, 8, 8), torch.arange(6)]
        return torch.where(keep_mask_at(key, positions, 0.25), x, 0.0)

    x, key, first = torch.ones(4, 8, 6), torch.tensor(key_of(3, "blocks.0", 1)), torch.tensor(3)
    torch._dynamo.reset()
    found = torch.compile(dropped, dynamic=False)(x, key, first)
    assert torch.equal(found, dropped(x, key, first))
    assert 0.5 < found.mean() < 0.95


def compile_warnings(model, plan):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, build_mesh(Plan.parse(plan)))
    return [str(each.message) for each in caught if str(each.message).startswith("compile=on")]


def test_recomputed_blocks_that_stay_uncompiled_are_reported(ranks2):
    (message, *_), _ = ranks2.run(
        compile_warnings_of_experts, "dp_shard=2 ep=2 zero=3 recompute=full compile=on precision=fp64"
    )
    assert message == (
        "compile=on: blocks with experts under zero=3 run uncompiled if they are recomputed. Use recompute=none to "
        "have them compiled in parts, or leave compile out."
    )
    subjects = deep_subjects()
    for model in (subjects["dropout"].case.model(), subjects["experts"].case.model()):
        assert compile_warnings(model, "recompute=full compile=on precision=fp64") == []


def compile_warnings_of_experts(plan):
    return compile_warnings(deep_subjects()["experts"].case.model(), plan)


def test_chosen_plans_cover_every_axis():
    plans = [cell.plan for cell in compiled_cells(2)]
    assert all(isinstance(plan, Plan) and plan.compile for plan in plans)
    for field in ("tp", "cp", "ep", "pp", "sp"):
        assert any(getattr(plan, field) > 1 or getattr(plan, field) is True for plan in plans), field
    assert {plan.recompute for plan in plans} >= {"none", "full", "selective"}
