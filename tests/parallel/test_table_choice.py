"""Style auto chooses styles by rows, width and ids, equal on all ranks, and trains with the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from tests.parallel.table_cases import Script, TableCase, reference
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import LayoutError


class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Embedding(200_000, 16)
        self.few = nn.Embedding(4, 16)
        self.top = nn.Linear(16, 1)

    def forward(self, large: torch.Tensor, few: torch.Tensor) -> torch.Tensor:
        return self.top(self.large(large).sum(1) + self.few(few))


def styles(num_ranks: int, num_ids: int | None) -> dict[str, str]:
    plan = Plan.parse(f"dp_replicate={num_ranks}")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    few = torch.zeros(8, dtype=torch.int64)
    example = None if num_ids is None else (torch.zeros(8, num_ids + run.mesh.rank, dtype=torch.int64), few)
    model = run.parallelize(Ids(), layout="*=auto", example=example)
    return run.table_styles(model)


@pytest.mark.parametrize("num_ids", [None, 100])
def test_styles_and_reasons_are_equal_on_all_ranks(num_ids, ranks2):
    first, second = ranks2.run(styles, 2, num_ids)
    assert first == second
    assert first["large"].startswith(("rows: a rank reads", "columns: frequent ids are neighbors"))
    assert first["few"].startswith("replicate: all 4 rows are few; ")


def test_ids_of_the_example_count(ranks2):
    few, many = (ranks2.run(styles, 2, number)[0]["large"] for number in (1, 1000))
    assert few != many


def test_training_equals_plain_torch(ranks2):
    case = TableCase("{user,item,genre,seen,tags}=auto", "dp_replicate=2", steps=4)
    want, plain = reference(case)
    script_losses, weights = ranks2.run(_train, case)[0]
    assert [one for one, _ in script_losses] == pytest.approx([one for one, _ in want], rel=1e-10)
    for name, tensor in plain.items():
        assert float((weights[name] - tensor).abs().max()) <= 1e-10, name


def _train(case: TableCase):
    script = Script(case)
    return script.train(0, case.steps), script.weights()


def test_model_without_tables_is_refused():
    run = weft.Run(Plan(), build_mesh(Plan()), Ledger(), seed=0)
    with pytest.raises(LayoutError) as caught:
        run.parallelize(nn.Sequential(nn.Linear(3, 3)), layout="*=auto")
    assert str(caught.value) == "layout *=auto: its patterns match no table. Tables are none in this model."
