"""Activations travel once each, parameters never, and what autograd would refuse is refused."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from tests.memory.links import LateLink
from tests.memory.models import MODELS
from tests.memory.residency import TwoMemories
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.memory.activation_offload import Activations, offload_activations
from weft.memory.host_link import PlainLink
from weft.memory.offload import Host, HostPool
from weft.memory.recompute import apply_recompute
from weft.models.inspect.blocks import repeated_blocks


class Block(nn.Module):
    """Three products of one input, as attention makes them."""

    def __init__(self, width: int):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.register_buffer("mask", torch.rand(16, width))

    def forward(self, x):
        a, b, c = (part(x) for part in self.parts)
        return x + (a.sigmoid() * b * self.mask).tanh() * c


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 3, width: int = 8):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def host(limit: int = 1 << 20) -> Host:
    return Host(LateLink(), HostPool(limit))


def watched(model: nn.Module, where: Host, share: float = 1.0, least_bytes: int = 0) -> Activations:
    return offload_activations(list(model.blocks.named_children()), share, where, least_bytes)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [param.grad.clone() for param in model.parameters()]


def test_gradients_are_the_same_bits_and_all_buffers_come_back():
    model, x = Stack(), torch.randn(16, 8)
    expected = gradients(model, x)
    where = host()
    activations = watched(model, where)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
        assert where.pool.used_bytes == 0
    assert where.link.bytes["down"] == where.link.bytes["up"] == activations.sent_bytes
    # Steps after the first take nothing new.
    assert where.pool.held_bytes == where.pool.peak_bytes


def test_each_tensor_travels_once_and_parameters_and_buffers_do_not():
    """Of a block: its input, for three products; a.sigmoid(), b, tanh's output and c. Five of 512 bytes."""
    model, where = Stack(1), host()
    activations = watched(model, where)
    gradients(model, torch.randn(16, 8))
    assert activations.sent_bytes == 5 * 16 * 8 * 4


def test_a_share_of_the_blocks_the_first_ones_and_at_least_one():
    for share, count in ((0.1, 1), (0.5, 2), (0.67, 2), (1.0, 3)):
        model, where = Stack(3), host()
        activations = watched(model, where, share)
        gradients(model, torch.randn(16, 8))
        assert activations.sent_bytes == count * 5 * 512


def test_small_tensors_stay():
    model, where = Stack(2), host()
    activations = watched(model, where, least_bytes=513)
    gradients(model, torch.randn(16, 8))
    assert activations.sent_bytes == 0


def test_the_device_keeps_one_block_at_a_time():
    """Between forward and backward none; in backward, the block at work and the one before."""
    model, where = Stack(4), host()
    watched(model, where)
    output = model(torch.randn(16, 8).requires_grad_())
    gc.collect()
    held = [one for one in gc.get_objects() if type(one).__name__ == "_Saved"]
    assert len(held) == 4 * 5
    assert all(one._tensor is None for one in held)
    del held
    most: list[int] = []

    def count(grad):
        alive = [one for one in gc.get_objects() if type(one).__name__ == "_Saved"]
        most.append(sum(one._tensor is not None for one in alive))

    for block in model.blocks:
        block.parts[0].weight.register_hook(count)
    output.sum().backward()
    assert 5 <= max(most) <= 10
    assert where.pool.used_bytes == 0


@pytest.mark.parametrize(("num_blocks", "share", "room"), [(6, 0.5, 3), (8, 0.25, 6), (8, 0.75, 2), (4, 0.75, 2)])
def test_what_travelled_comes_back_in_the_room_of_blocks_whose_backward_is_over(num_blocks, share, room):
    """When a block's backward begins, blocks before it are on their way: together never more than stayed in forward."""
    model, where = Stack(num_blocks), host()
    x, count = torch.randn(16, 8), round(share * num_blocks)
    expected = gradients(model, x)
    watched(model, where, share)
    here: dict[int, int] = {}

    def look(index: int) -> None:
        alive = [one for one in gc.get_objects() if type(one).__name__ == "_Saved"]
        here[index] = sum(not one.is_away for one in alive) // 5

    for index, block in enumerate(model.blocks):
        # The last of a block's weights to get its gradient: others of the block may be gone already.
        block.parts[0].weight.register_hook(lambda grad, index=index: look(index))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    staying = num_blocks - count
    for index in range(count, num_blocks):
        assert here[index] == min(count, room - (index - count + 1)), here
    for index in range(count):
        assert here[index] <= room, here
    assert here[count - 1] >= min(count, room) - 1
    assert room == max(2, staying)
    assert where.pool.used_bytes == 0


def test_the_backward_of_a_microbatch_brings_nothing_of_those_behind_it():
    """As in a pipeline: two go forward before the first goes back."""
    model, where = Stack(4), host()
    watched(model, where, 0.5)
    first = model(torch.randn(16, 8)).square().sum()
    saved = {id(one) for one in gc.get_objects() if type(one).__name__ == "_Saved"}
    second = model(torch.randn(16, 8)).square().sum()
    first.backward()
    behind = [one for one in gc.get_objects() if type(one).__name__ == "_Saved" and id(one) not in saved]
    assert behind
    assert all(one.is_away for one in behind)
    del behind
    second.backward()
    assert where.pool.used_bytes == 0


def test_a_graph_that_is_dropped_gives_its_buffers_back():
    model, where = Stack(), host()
    watched(model, where)
    output = model(torch.randn(16, 8))
    assert where.pool.used_bytes > 0
    del output
    assert where.pool.used_bytes == 0


def test_backward_twice_through_one_graph():
    model, x = Stack(2), torch.randn(16, 8)
    expected = gradients(model, x)
    watched(model, host())
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, 2 * grad)


def test_views_with_holes_and_repeated_rows():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(8, 16)
            self.scale = nn.Parameter(torch.randn(1, 8))

        def forward(self, x):
            left, right = self.wide(x).chunk(2, -1)  # two views with holes
            return left * right * self.scale.exp().expand(16, 8) + x.t().contiguous().t()

    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList([Cut()])
    model.forward = lambda x: model.blocks[0](x)
    x = torch.randn(16, 8)
    expected = gradients(model, x)
    activations = watched(model, host())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    assert activations.sent_bytes > 0


def test_without_gradients_nothing_moves():
    model, where = Stack(), host()
    activations = watched(model, where)
    with torch.no_grad():
        model(torch.randn(16, 8))
    assert activations.sent_bytes == 0


def test_an_exception_in_a_block_leaves_no_hooks_behind():
    model, where = Stack(2), host()
    activations = watched(model, where)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(16, 7))
    before = activations.sent_bytes
    (torch.randn(16, 8, requires_grad=True) ** 2).sum().backward()
    assert activations.sent_bytes == before
    gradients(model, torch.randn(16, 8))
    assert where.pool.used_bytes == 0


def test_a_tensor_changed_in_place_after_it_was_kept_is_refused_as_autograd_refuses_it():
    class Spoils(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            z = y.sigmoid() * y
            y.add_(1)
            return z

    model = nn.Module()
    model.blocks = nn.ModuleList([Spoils()])
    watched(model, host())
    with pytest.raises(ModelError) as caught:
        model.blocks[0](torch.randn(16, 8))
    assert str(caught.value) == (
        "offload=activations: 0 changes in place a tensor that backward needs. "
        "Make that operation one that returns a new tensor, or leave activations out."
    )


def test_a_copy_of_the_model_is_a_plain_model():
    model, where = Stack(2), host()
    activations = watched(model, where)
    other = copy.deepcopy(model)
    gradients(other, torch.randn(16, 8))
    assert activations.sent_bytes == 0


def live_after_forward(setting: str, backend: str | None, offloads: bool) -> int:
    """Bytes that one forward leaves on the device for backward. Parameters are not counted."""
    torch._dynamo.reset()
    model, call = MODELS["llama"]()
    apply_recompute(model, Plan(recompute=setting))
    blocks = repeated_blocks(model)
    for block in blocks.values() if backend else ():
        block.compile(backend=backend)
    memories = TwoMemories()
    if offloads:
        offload_activations(list(blocks.items()), 1.0, Host(PlainLink(), memories.pool), least_bytes=0)
    call(model).sum().backward()  # policies are chosen, and graphs made, the first time
    with memories:
        output = call(model)
        gc.collect()
        live = memories.live_bytes(host=False) - sum(param.nbytes for param in model.parameters())
        output.sum().backward()
    return live


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.full)])
def test_what_recompute_keeps_leaves_the_device(backend):
    """What stays is what lies outside of the blocks, whatever the policy; compiled code saves some of it too."""
    for setting in ("none", "selective", "full"):
        kept, left = (live_after_forward(setting, backend, offloads) for offloads in (False, True))
        assert left < 0.1 * live_after_forward("none", backend, False)
        assert left < 0.75 * kept
