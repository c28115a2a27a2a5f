"""Operators that hold what a graph cannot: their numbers, and how long a forward keeps what backward needs."""

from __future__ import annotations

import copy
import gc
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.choice import gate_runs
from weft.memory.opaque import Handle, Opaque


class Branching(nn.Module):
    """Multiplies by a weight, and looks at a value on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.num_runs = 0

    def code(self, inputs, numbers):
        x, weight = inputs
        self.num_runs += 1
        return torch.tanh(x @ weight) * (numbers[0] + float(x.sum() > 0))


class Block(nn.Module):
    def __init__(self, opaque: Opaque | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.branching = Branching()
        self.handle = opaque.handle(Branching.code, self.branching) if opaque else Handle()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.linear(x))
        inputs = [hidden, self.branching.weight]
        if self.handle.is_open:
            return x + self.handle(hidden.shape, hidden.dtype, inputs, [2.0])
        return x + self.branching.code(inputs, [2.0])


def keep_all(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


WAYS = {
    "plain": lambda block, x: block(x),
    "checkpoint": lambda block, x: checkpoint(block.forward, x, use_reentrant=False),
    "selective": lambda block, x: checkpoint(
        block.forward, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep_all)
    ),
}


@pytest.fixture(name="blocks")
def _blocks():
    torch.manual_seed(0)
    opaque = Opaque(recomputes=True)
    torch._dynamo.reset()
    return opaque, nn.ModuleList(Block(opaque) for _ in range(3))


def gradients(blocks, way, x) -> list[Tensor]:
    hidden = x
    for block in blocks:
        hidden = way(block, hidden)
    hidden.square().sum().backward()
    found = [p.grad for p in blocks.parameters()]
    blocks.zero_grad()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", gate_runs(["eager", "aot_eager"], 1))
def test_a_graph_holds_it_and_gives_the_same_gradients(blocks, way, backend):
    opaque, compiled = blocks
    x = torch.randn(4, 8, dtype=torch.float64)
    plain = copy.deepcopy(compiled)  # whose handles are closed
    want = gradients(plain, WAYS["plain"], x)
    run = torch.compile(WAYS[way], backend=backend, fullgraph=True, dynamic=False)
    for _ in range(2):
        for found, one in zip(gradients(compiled, run, x), want, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-12, atol=1e-12)
    gc.collect()
    assert opaque.num_records == 0


@pytest.mark.parametrize(("way", "kept", "runs"), [("plain", 3, 1), ("checkpoint", 0, 2), ("selective", 3, 1)])
def test_a_recomputed_block_keeps_nothing_of_it(blocks, way, kept, runs):
    opaque, compiled = blocks
    run = torch.compile(WAYS[way], backend="aot_eager", fullgraph=True, dynamic=False)
    hidden = torch.randn(4, 8, dtype=torch.float64)
    for block in compiled:
        hidden = run(block, hidden)
    assert opaque.num_records == kept
    hidden.sum().backward()
    del hidden
    assert opaque.num_records == 0
    assert [block.branching.num_runs for block in compiled] == [runs] * 3


def test_two_forwards_wait_for_their_own_backward(blocks):
    opaque, compiled = blocks
    run = torch.compile(WAYS["plain"], backend="aot_eager", fullgraph=True, dynamic=False)
    first, second = (torch.randn(4, 8, dtype=torch.float64) for _ in range(2))
    want = [gradients(compiled, run, x) for x in (first, second)]
    losses = []
    for x in (first, second):
        hidden = x
        for block in compiled:
            hidden = run(block, hidden)
        losses.append(hidden.square().sum())
    assert opaque.num_records == 6
    for loss, one in zip(losses, want, strict=True):
        loss.backward()
        for found, expected in zip([p.grad for p in compiled.parameters()], one, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        compiled.zero_grad()


def test_without_gradients_nothing_is_kept(blocks):
    opaque, compiled = blocks
    with torch.no_grad():
        torch.compile(WAYS["plain"], backend="aot_eager", fullgraph=True)(compiled[0], torch.ones(4, 8).double())
    assert opaque.num_records == 0


def test_code_that_gives_another_shape_is_an_error():
    block = Block()
    opaque = Opaque()
    handle = opaque.handle(lambda owner, inputs, numbers: inputs[0].sum(), block)
    with pytest.raises(RuntimeError, match=r"gave \(\) of torch.float32, not \(2,\) of torch.float32"):
        handle([2], torch.float32, [torch.ones(2)])


@pytest.mark.full
def test_a_model_does_not_get_the_operators_of_one_that_is_gone():
    """Torch keeps something of a name space whose library is gone, and an address in memory comes back."""

    def space() -> str:
        opaque = Opaque()
        return str(opaque.forward)

    seen = []
    for _ in range(20):
        seen.append(space())
        gc.collect()
    assert len(set(seen)) == 20
