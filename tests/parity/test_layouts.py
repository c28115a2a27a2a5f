"""Every kind of model under every layout: 12 Hugging Face families, packed and padded batches, experts.

{every legal tp, sp, cp in each cp_mode, ep, pp with each schedule, zero, reshard, replicas} x {accumulation 1, 4},
on 2 and 4 ranks, in float64. Recompute and offload: tests/parity/test_matrix.py.
"""

from __future__ import annotations

from tests.parity.plans import broad_matrix, broad_subjects, differing


def test_models_match_plain_pytorch_under_a_layout(broad_cells, plain, request):
    num_ranks, cells = broad_cells
    found = differing(cells, broad_subjects(), plain, request.getfixturevalue(f"ranks{num_ranks}"))
    assert not found, "\n".join(found)


def test_each_model_is_tested_on_every_supported_axis():
    cells = broad_matrix(2, is_complete=False)
    for name, subject in broad_subjects().items():
        plans = [cell.plan for cell in cells if cell.subject == name]
        assert {plan.zero for plan in plans} == {0, 1, 2, 3}, name
        assert any(plan.tp == 2 for plan in plans), name
        assert any(plan.sp for plan in plans) == ("sp" not in subject.without), name
        assert any(plan.cp == 2 for plan in plans) == ("cp" not in subject.without), name
        assert subject.shape is not None
        assert any(plan.ep == 2 for plan in plans) == (subject.shape.num_experts > 0), name
