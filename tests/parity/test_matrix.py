"""Every legal plan matches plain PyTorch: losses and norms of 5 steps, then each gradient and weight.

{every legal layout} x {accumulation 1, 4} x {no, full, selective recompute} x {nothing, optimizer, params on the host}
x {decoder, Qwen2 and GPT-2 of Hugging Face, convolutional network}, on 2 and 4 ranks, in float64.
"""

from __future__ import annotations

import pytest

from tests.choice import gate_runs
from tests.parity.plans import Cell, differing, subjects, train_quietly
from weft.config.plan import Plan
from weft.verify.matrix import covering, row_of
from weft.verify.parity import train_plain


def test_plans_of_a_layout_match_plain_pytorch(matrix_cells, plain, request):
    num_ranks, cells = matrix_cells
    found = differing(cells, subjects(), plain, request.getfixturevalue(f"ranks{num_ranks}"))
    assert not found, "\n".join(found)


def test_comparison_detects_a_wrong_reference(plain, ranks2):
    """Check that a wrong reference is detected, and that the cell is named."""
    known = subjects()
    wrong = {**plain, known["cnn"].case: train_plain(type(known["cnn"].case)(max_grad_norm=0.0))}
    cells = [Cell(name, Plan.parse("dp_shard=2 zero=1 precision=fp64")) for name in ("cnn", "decoder")]
    wrong[known["decoder"].case] = plain[known["decoder"].case]
    found = differing(cells, known, wrong, ranks2)
    assert [line.split(":")[0] for line in found] == [
        f"cnn under dp_shard=2 zero=1 precision=fp64 on rank {rank}" for rank in (0, 1)
    ]


@pytest.mark.parametrize("name", subjects())
def test_one_rank_matches_plain_pytorch(name, plain):
    case = subjects()[name].case
    for plan in ("", "accumulation=4", "recompute=selective", "offload=optimizer+activations"):
        result = train_quietly(f"{plan} precision=fp64", {name: case})[name]
        assert result.largest_difference(plain[case]) < 1e-10, plan


#: For fp16 the gate tests zero=3, in tests/parity/test_zero3.py.
@pytest.mark.parametrize("precision, bound", gate_runs([("bf16", 2**-5), ("fp16", 2**-8)], 0))
def test_half_precision_is_close_to_one_process(precision, bound, ranks2):
    """Compare with a bound of a few roundings (8 bits in bf16, 11 in fp16), since sums have another order."""
    known = subjects()
    only = {"precision": (precision,), "recompute": ("none", "full", "selective"), "accumulation": (1, 2)}
    cells = [Cell(name, plan) for name in ("decoder", "cnn") for plan in known[name].plans(2, **only)]
    rows = [row_of(cell.plan, subject=cell.subject) for cell in cells]
    groups = [("zero", "recompute"), ("offload",), ("accumulation",), ("subject",)]
    one = train_quietly(f"precision={precision}", {name: known[name].case for name in ("decoder", "cnn")})
    for cell in (cells[index] for index in covering(rows, groups)):
        theirs = one[cell.subject]
        for answer in ranks2.run(train_quietly, cell.plan.format(), {cell.subject: known[cell.subject].case}):
            ours = answer[cell.subject]
            assert ours.losses == pytest.approx(theirs.losses, rel=bound), cell
            assert ours.grad_norms[0] == pytest.approx(theirs.grad_norms[0], rel=bound), cell
            for name, weight in theirs.weights.items():
                # Adam's first updates have magnitude lr where the gradient's sign is certain.
                assert float((ours.weights[name] - weight).abs().mean()) < 2e-3, (cell, name)
