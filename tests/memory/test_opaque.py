"""Opaque operators for code that a graph cannot contain: results, and lifetime of the tensors for backward."""

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
    """Multiplies by a weight and branches on a value."""

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


def save_all(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


MODES = {
    "plain": lambda block, x: block(x),
    "checkpoint": lambda block, x: checkpoint(block.forward, x, use_reentrant=False),
    "selective": lambda block, x: checkpoint(
        block.forward, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_all)
    ),
}


@pytest.fixture(name="blocks")
def _blocks():
    torch.manual_seed(0)
    opaque = Opaque(recomputes=True)
    torch._dynamo.reset()
    return opaque, nn.ModuleList(Block(opaque) for _ in range(3))


def gradients(blocks, mode, x) -> list[Tensor]:
    hidden = x
    for block in blocks:
        hidden = mode(block, hidden)
    hidden.square().sum().backward()
    found = [p.grad for p in blocks.parameters()]
    blocks.zero_grad()
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", gate_runs(["eager", "aot_eager"], 1))
def test_opaque_operator_in_a_graph_gives_equal_gradients(blocks, mode, backend):
    opaque, compiled = blocks
    x = torch.randn(4, 8, dtype=torch.float64)
    plain = copy.deepcopy(compiled)  # copied handles are closed
    want = gradients(plain, MODES["plain"], x)
    run = torch.compile(MODES[mode], backend=backend, fullgraph=True, dynamic=False)
    for _ in range(2):
        for found, one in zip(gradients(compiled, run, x), want, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-12, atol=1e-12)
    gc.collect()
    assert opaque.num_records == 0


@pytest.mark.parametrize(("mode", "num_saved", "runs"), [("plain", 3, 1), ("checkpoint", 0, 2), ("selective", 3, 1)])
def test_recomputed_block_saves_no_records(blocks, mode, num_saved, runs):
    opaque, compiled = blocks
    run = torch.compile(MODES[mode], backend="aot_eager", fullgraph=True, dynamic=False)
    hidden = torch.randn(4, 8, dtype=torch.float64)
    for block in compiled:
        hidden = run(block, hidden)
    assert opaque.num_records == num_saved
    hidden.sum().backward()
    del hidden
    assert opaque.num_records == 0
    assert [block.branching.num_runs for block in compiled] == [runs] * 3


def test_two_forwards_keep_separate_records(blocks):
    opaque, compiled = blocks
    run = torch.compile(MODES["plain"], backend="aot_eager", fullgraph=True, dynamic=False)
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


def test_no_records_without_gradients(blocks):
    opaque, compiled = blocks
    with torch.no_grad():
        torch.compile(MODES["plain"], backend="aot_eager", fullgraph=True)(compiled[0], torch.ones(4, 8).double())
    assert opaque.num_records == 0


def test_wrong_output_shape_raises():
    block = Block()
    opaque = Opaque()
    handle = opaque.handle(lambda owner, inputs, numbers: inputs[0].sum(), block)
    with pytest.raises(RuntimeError, match=r"gave \(\) of torch.float32, not \(2,\) of torch.float32"):
        handle([2], torch.float32, [torch.ones(2)])


@pytest.mark.full
def test_operator_names_are_never_reused():
    """Check that names are unique: torch keeps state of a freed library's namespace, and addresses are reused."""

    def space() -> str:
        opaque = Opaque()
        return str(opaque.forward)

    names = []
    for _ in range(20):
        names.append(space())
        gc.collect()
    assert len(set(names)) == 20
