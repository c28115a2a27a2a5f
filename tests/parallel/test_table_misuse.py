"""Uses of sharded tables that would give wrong numbers silently: odd ids, weights read directly, odd placeholders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import WeftError

ROWS, WIDTH = 9, 4


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Net(nn.Module):
    def __init__(self, use: Callable[[Net, Tensor], Tensor]):
        super().__init__()
        self.table, self.top, self.use = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1), use

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.use(self, ids)).squeeze(1)


def sums(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def trained(use: Callable[[Net, Tensor], Tensor], plan_text: str = "", layout: str | None = "table=rows") -> Any:
    """Return the weights after two steps on ids of the rank, or the error."""
    torch.manual_seed(0)
    plan = Plan.parse(f"{plan_text} precision=fp64".strip())
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    model = run.parallelize(Net(use).double(), layout=layout)
    step = run.train_step(model, torch.optim.SGD, sums, lr=0.1, check_batch=False)
    try:
        for _ in range(2):
            step(torch.arange(6).view(-1, 3)[run.mesh.rank] + 1 if run.mesh.world_size > 1 else torch.arange(6) + 1)
    except WeftError as error:
        return str(error)
    return {name: tensor.clone() for name, tensor in run.full_state_dict(model, everywhere=True).items()}


def changed_in_place(net: Net, ids: Tensor) -> Tensor:
    found = net.table(ids)
    found.mul_(3)
    return Twice.apply(found)


def detached_scores(net: Net, ids: Tensor) -> Tensor:
    return net.table(ids) * net.table.weight.detach().norm()


def scores_without_gradients(net: Net, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return net.top.weight * net.table.weight.sum() + ids[:, None]


REFUSED = {
    "float": (
        lambda net, ids: net.table(ids + 0.5),
        "its ids are float32, and ids are int64 or int32. Convert them by",
    ),
    "bool": (lambda net, ids: net.table(ids > 2), "its ids are bool"),
    "in place": (changed_in_place, "the result of a lookup was changed in place, and then read by a custom autograd"),
    "transform": (
        lambda net, ids: torch.func.grad(lambda rows: (rows**3).sum())(net.table(ids)),
        "torch.func.grad, or a similar transform, uses the result of a lookup first",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_misuse_is_refused(kind):
    use, text = REFUSED[kind]
    assert text in trained(use)


@pytest.mark.parametrize("use", [detached_scores, scores_without_gradients])
def test_weight_read_without_gradients_is_refused(use, ranks2):
    for found in ranks2.run(trained, use, "dp_replicate=2"):
        assert "code outside its module computes with the weight, of which each rank holds a part" in found


def in_checkpoint(net: Net, ids: Tensor) -> Tensor:
    return checkpoint(lambda rows: torch.tanh(rows) * 2, net.table(ids), use_reentrant=False)


def test_checkpointed_part_uses_a_lookup_first(ranks2):
    want = trained(in_checkpoint, layout=None)
    for found in (trained(in_checkpoint), *ranks2.run(trained, in_checkpoint, "dp_replicate=2")):
        for name, tensor in want.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


def test_lookup_after_a_wrong_id():
    run = weft.Run(Plan(), build_mesh(Plan()), Ledger(), seed=0)
    model = run.parallelize(Net(lambda net, ids: net.table(ids)), layout="table=rows")
    with torch.no_grad():
        with pytest.raises(WeftError, match="id 9: table 'table' has 9 rows"):
            model(torch.tensor([9]))
        assert model(torch.tensor([8])).shape == (1,)


class Bags(nn.Module):
    """Two bags of one width, which are pooled together."""

    def __init__(self, offsets: list[int]):
        super().__init__()
        self.first, self.second = (nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(2))
        self.offsets = torch.tensor(offsets)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.first(ids, self.offsets) + self.second(ids, torch.tensor([0, 2, 4]))).sum(1)


def sum_of_bags(offsets: list[int]) -> Any:
    torch.manual_seed(0)
    plan = Plan.parse("precision=fp64")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    model = run.parallelize(Bags(offsets).double(), layout="{first,second}=rows")
    return run.train_step(model, torch.optim.SGD, sums, lr=0.1, check_batch=False)(torch.arange(5)).loss


@pytest.mark.parametrize("offsets", [[0, 3, 1], [0, 9, 4], [1, 2, 4], [0, 2, 6]])
def test_offsets_that_are_not_in_order_are_refused(offsets):
    """Pooled together, such a bag would have rows of another lookup."""
    sum_of_bags([0, 3, 5])
    with pytest.raises(
        WeftError, match="table 'first': its offsets do not rise from 0 to at most the number of ids, 5"
    ):
        sum_of_bags(offsets)


def test_offsets_are_whole_numbers():
    with pytest.raises(RuntimeError):
        sum_of_bags([0.0, 1.5, 4.0])  # type: ignore[list-item]
