"""Activation offload: each activation is copied once, parameters never, and modified tensors are rejected."""

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
    """Three products of one input, as in attention."""

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


def offload(model: nn.Module, host_memory: Host, share: float = 1.0, least_bytes: int = 0) -> Activations:
    return offload_activations(list(model.blocks.named_children()), share, host_memory, least_bytes)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [param.grad.clone() for param in model.parameters()]


def test_gradients_are_bitwise_equal_and_buffers_are_released():
    model, x = Stack(), torch.randn(16, 8)
    expected = gradients(model, x)
    host_memory = host()
    activations = offload(model, host_memory)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
        assert host_memory.pool.used_bytes == 0
    assert host_memory.link.bytes["down"] == host_memory.link.bytes["up"] == activations.sent_bytes
    # Steps after the first allocate nothing.
    assert host_memory.pool.held_bytes == host_memory.pool.peak_bytes


def test_each_activation_is_copied_once_and_parameters_never():
    """Expect five tensors of 512 bytes per block: its input, a.sigmoid(), b, tanh's output and c."""
    model, host_memory = Stack(1), host()
    activations = offload(model, host_memory)
    gradients(model, torch.randn(16, 8))
    assert activations.sent_bytes == 5 * 16 * 8 * 4


def test_share_selects_first_blocks_and_at_least_one():
    for share, count in ((0.1, 1), (0.5, 2), (0.67, 2), (1.0, 3)):
        model, host_memory = Stack(3), host()
        activations = offload(model, host_memory, share)
        gradients(model, torch.randn(16, 8))
        assert activations.sent_bytes == count * 5 * 512


def test_small_tensors_stay_on_the_device():
    model, host_memory = Stack(2), host()
    activations = offload(model, host_memory, least_bytes=513)
    gradients(model, torch.randn(16, 8))
    assert activations.sent_bytes == 0


def test_device_has_at_most_two_blocks_in_backward():
    """Expect none between forward and backward, and at most two blocks in backward."""
    model, host_memory = Stack(4), host()
    offload(model, host_memory)
    output = model(torch.randn(16, 8).requires_grad_())
    gc.collect()
    live_saved = [one for one in gc.get_objects() if type(one).__name__ == "_Saved"]
    assert len(live_saved) == 4 * 5
    assert all(one._tensor is None for one in live_saved)
    del live_saved
    most: list[int] = []

    def count(grad):
        alive = [one for one in gc.get_objects() if type(one).__name__ == "_Saved"]
        most.append(sum(one._tensor is not None for one in alive))

    for block in model.blocks:
        block.parts[0].weight.register_hook(count)
    output.sum().backward()
    assert 5 <= max(most) <= 10
    assert host_memory.pool.used_bytes == 0


@pytest.mark.parametrize(("num_blocks", "share", "room"), [(6, 0.5, 3), (8, 0.25, 6), (8, 0.75, 2), (4, 0.75, 2)])
def test_prefetch_in_backward_uses_only_freed_memory(num_blocks, share, room):
    """Check that prefetching earlier blocks in backward never needs more memory than the blocks kept in forward."""
    model, host_memory = Stack(num_blocks), host()
    x, count = torch.randn(16, 8), round(share * num_blocks)
    expected = gradients(model, x)
    offload(model, host_memory, share)
    on_device: dict[int, int] = {}

    def count_on_device(index: int) -> None:
        alive = [one for one in gc.get_objects() if type(one).__name__ == "_Saved"]
        on_device[index] = sum(not one.is_away for one in alive) // 5

    for index, block in enumerate(model.blocks):
        # The last weight of a block to get its gradient: the block's other tensors may be freed already.
        block.parts[0].weight.register_hook(lambda grad, index=index: count_on_device(index))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    staying = num_blocks - count
    for index in range(count, num_blocks):
        assert on_device[index] == min(count, room - (index - count + 1)), on_device
    for index in range(count):
        assert on_device[index] <= room, on_device
    assert on_device[count - 1] >= min(count, room) - 1
    assert room == max(2, staying)
    assert host_memory.pool.used_bytes == 0


def test_backward_does_not_prefetch_later_microbatches():
    """As in a pipeline, run two forwards before the first backward."""
    model, host_memory = Stack(4), host()
    offload(model, host_memory, 0.5)
    first = model(torch.randn(16, 8)).square().sum()
    saved = {id(one) for one in gc.get_objects() if type(one).__name__ == "_Saved"}
    second = model(torch.randn(16, 8)).square().sum()
    first.backward()
    later_saved = [one for one in gc.get_objects() if type(one).__name__ == "_Saved" and id(one) not in saved]
    assert later_saved
    assert all(one.is_away for one in later_saved)
    del later_saved
    second.backward()
    assert host_memory.pool.used_bytes == 0


def test_dropped_graph_releases_its_buffers():
    model, host_memory = Stack(), host()
    offload(model, host_memory)
    output = model(torch.randn(16, 8))
    assert host_memory.pool.used_bytes > 0
    del output
    assert host_memory.pool.used_bytes == 0


def test_backward_twice_through_one_graph_accumulates():
    model, x = Stack(2), torch.randn(16, 8)
    expected = gradients(model, x)
    offload(model, host())
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, 2 * grad)


def test_non_contiguous_and_expanded_views_are_offloaded():
    class SplitsFeatures(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(8, 16)
            self.scale = nn.Parameter(torch.randn(1, 8))

        def forward(self, x):
            with_offload, right = self.wide(x).chunk(2, -1)  # two non-contiguous views
            return with_offload * right * self.scale.exp().expand(16, 8) + x.t().contiguous().t()

    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList([SplitsFeatures()])
    model.forward = lambda x: model.blocks[0](x)
    x = torch.randn(16, 8)
    expected = gradients(model, x)
    activations = offload(model, host())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    assert activations.sent_bytes > 0


def test_nothing_is_offloaded_without_gradients():
    model, host_memory = Stack(), host()
    activations = offload(model, host_memory)
    with torch.no_grad():
        model(torch.randn(16, 8))
    assert activations.sent_bytes == 0


def test_exception_in_a_block_leaves_no_hooks():
    model, host_memory = Stack(2), host()
    activations = offload(model, host_memory)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(16, 7))
    before = activations.sent_bytes
    (torch.randn(16, 8, requires_grad=True) ** 2).sum().backward()
    assert activations.sent_bytes == before
    gradients(model, torch.randn(16, 8))
    assert host_memory.pool.used_bytes == 0


def test_modified_saved_tensor_is_rejected():
    class ModifiesSavedTensor(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            z = y.sigmoid() * y
            y.add_(1)
            return z

    model = nn.Module()
    model.blocks = nn.ModuleList([ModifiesSavedTensor()])
    offload(model, host())
    with pytest.raises(ModelError) as caught:
        model.blocks[0](torch.randn(16, 8))
    assert str(caught.value) == (
        "offload=activations: 0 changes in place a tensor that backward needs. "
        "Make that operation one that returns a new tensor, or leave activations out."
    )


def test_copied_model_does_not_offload():
    model, host_memory = Stack(2), host()
    activations = offload(model, host_memory)
    other = copy.deepcopy(model)
    gradients(other, torch.randn(16, 8))
    assert activations.sent_bytes == 0


def live_after_forward(setting: str, backend: str | None, offloads: bool) -> int:
    """Return the device bytes that one forward keeps for backward, without parameters."""
    torch._dynamo.reset()
    model, call = MODELS["llama"]()
    apply_recompute(model, Plan(recompute=setting))
    blocks = repeated_blocks(model)
    for block in blocks.values() if backend else ():
        block.compile(backend=backend)
    memories = TwoMemories()
    if offloads:
        offload_activations(list(blocks.items()), 1.0, Host(PlainLink(), memories.pool), least_bytes=0)
    call(model).sum().backward()  # the first call chooses policies and compiles
    with memories:
        output = call(model)
        gc.collect()
        live = memories.live_bytes(host=False) - sum(param.nbytes for param in model.parameters())
        output.sum().backward()
    return live


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.full)])
def test_tensors_saved_by_recompute_are_offloaded(backend):
    """Only tensors outside the blocks stay on the device, for every policy."""
    for setting in ("none", "selective", "full"):
        without_offload, with_offload = (live_after_forward(setting, backend, offloads) for offloads in (False, True))
        assert with_offload < 0.1 * live_after_forward("none", backend, False)
        assert with_offload < 0.75 * without_offload
