"""Placeholders of lookups: joined exchanges with the same numbers, whatever code uses the results first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import WeftError

ROWS, WIDTH, SAMPLES = 30, 4, 8


class Doubled(torch.autograd.Function):
    """Doubles its input in code that torch does not dispatch by the type of the argument."""

    @staticmethod
    def forward(ctx, x):
        assert x.shape == (SAMPLES, WIDTH)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Sum(nn.Module):
    """Combines rows of three tables. Subclasses use them in other ways. reads: names of the tables that it reads."""

    reads = "abc"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Embedding(ROWS, WIDTH) for _ in range(3))

    def forward(self, ids):
        return (self.a(ids) + self.b(ids) * self.c(ids)).sum(1)


class ByFunction(Sum):
    reads = "ab"

    def forward(self, ids):
        a = self.a(ids)
        return (Doubled.apply(a) + a + Doubled.apply(self.b(ids))).sum(1)


class ByScript(Sum):
    reads = "ab"

    def forward(self, ids):
        return _scripted(self.a(ids), self.b(ids)).sum(1)


class InPlace(Sum):
    def forward(self, ids):
        a, b, c = self.a(ids), self.b(ids), self.c(ids)
        a.mul_(b)
        c.unsqueeze_(0)
        assert c.shape == (1, len(ids), WIDTH)
        return (a + b + c[0]).sum(1)


class Unused(Sum):
    reads = "ac"

    def forward(self, ids):
        self.c(ids)
        return self.a(ids).sum(1)


class OneAfterAnother(Sum):
    reads = "ab"

    def forward(self, ids):
        return (self.a(ids).tanh() + self.b(ids)).sum(1)


class FirstUseByRank(Sum):
    """Rank 0 uses the first result before it calls the second table."""

    reads = "ab"

    def forward(self, ids):
        a = self.a(ids)
        if dist.is_initialized() and dist.get_rank() == 0:
            a.mean().item()
        return (a * self.b(ids)).sum(1)


class Many(nn.Module):
    """More lookups than one exchange joins, of one table."""

    reads = "a"

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(ROWS, WIDTH)

    def forward(self, ids):
        found = [self.a((ids + number) % ROWS) for number in range(150)]
        return torch.stack(found).tanh().sum((0, 2))


@torch.jit.script
def _scripted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b + a


def batch(step: int) -> torch.Tensor:
    return torch.randint(ROWS, (2 * SAMPLES,), generator=torch.Generator().manual_seed(step))


def loss_fn(output, batch):
    return output.square().sum(), len(output)


def trained(kind: type[nn.Module], layout: str, plan_text: str):
    """Return the weights after 3 steps and the number of exchanges of the last step."""
    torch.manual_seed(0)
    plan, ledger = Plan.parse(f"{plan_text} precision=fp64"), Ledger()
    run = weft.Run(plan, build_mesh(plan, record=ledger.record), ledger, seed=0)
    model = run.parallelize(kind().double(), layout=layout)
    rule = weft.TableOptimizer("lazy_adamw", lr=0.05)
    step = run.train_step(
        model, torch.optim.AdamW, loss_fn, forward=lambda model, batch: model(batch), tables=rule, check_batch=False
    )
    for number in range(3):
        ledger.clear()
        step(batch(number).view(plan.dp_size, -1)[run.mesh.rank])
    exchanges = sum(entry.calls for _, name, entry in ledger.rows() if name == "all_to_all")
    return run.full_state_dict(model, everywhere=True), exchanges


def plain(kind: type[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the weights of the same training with dense tables in one process."""
    torch.manual_seed(0)
    model, rule = kind().double(), weft.TableOptimizer("lazy_adamw", lr=0.05)
    states = {name: rule.states(getattr(model, name).weight.detach()) for name in kind.reads}
    for number in range(3):
        ids = batch(number)
        model.zero_grad()
        (sum(loss_fn(model(part), part)[0] for part in ids.view(2, -1)) / len(ids)).backward()
        rows = torch.arange(ROWS) if kind is Many else ids.unique()
        for name in kind.reads:
            weight = getattr(model, name).weight
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            rule.update(weight.detach(), states[name], rows, grad[rows], lr=0.05, step=number + 1)
    return {name: param.detach() for name, param in model.named_parameters()}


KINDS = [Sum, ByFunction, ByScript, InPlace, Unused, OneAfterAnother, FirstUseByRank, Many]


@pytest.mark.parametrize("layout", ["*=rows", "{a,c}=columns b=host"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_uses_have_the_numbers_of_one_process(kind, layout, ranks2):
    want = plain(kind)
    if kind is Many:
        layout = layout[:6] if layout == "*=rows" else "a=host"
    for weights, _ in ranks2.run(trained, kind, layout, "dp_replicate=2"):
        assert list(weights) == list(want)
        for name, tensor in want.items():
            assert float((weights[name] - tensor).abs().max()) <= 1e-10, name


class OtherOrder(Sum):
    def forward(self, ids):
        first, second = (self.a, self.b) if dist.get_rank() == 0 else (self.b, self.a)
        a, b = first(ids), second(ids)
        return (a * b).sum(1)


class OtherTables(Sum):
    def forward(self, ids):
        a = self.a(ids)
        return (a + self.b(ids) if dist.get_rank() == 0 else a).sum(1)


def refusal(kind: type[nn.Module]) -> str:
    with pytest.raises(WeftError) as caught:
        trained(kind, "*=rows", "dp_replicate=2")
    return str(caught.value)


def test_ranks_with_other_lookups_are_refused(ranks2):
    rule = "another rank looks up another table at this point of its forward. Call the same tables in the same order"
    for message, name in zip(ranks2.run(refusal, OtherOrder), "ab", strict=True):
        assert message.startswith(f"table '{name}.weight': {rule}")


def test_ranks_with_more_lookups_are_refused(ranks2):
    for message in ranks2.run(refusal, OtherTables):
        assert "the ranks do not call the same operation here" in message
        assert "Let every rank take the same path through the model" in message


def test_lookups_of_a_forward_are_joined(ranks2):
    # Counts, ids, rows and gradients.
    assert ranks2.run(trained, Sum, "*=rows", "dp_replicate=2")[0][1] == 4
    assert ranks2.run(trained, OneAfterAnother, "*=rows", "dp_replicate=2")[0][1] == 7
    assert ranks2.run(trained, Many, "*=rows", "dp_replicate=2")[0][1] == 3 * 3 + 1
