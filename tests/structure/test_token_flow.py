"""Operations that mix tokens in sequence-parallel regions are found by tracing, not by module name."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from weft.config.fields.layout import Layout
from weft.errors import LayoutError
from weft.models.inspect.blocks import repeated_blocks
from weft.models.inspect.dry_run import example_of
from weft.models.inspect.token_flow import find_regions
from weft.models.inspect.token_trace import TokenDivision

LAYOUT = Layout.parse("blocks.*.up=colwise blocks.*.down=rowwise")
DIM = 8


class Block(nn.Module):
    def __init__(self, outside, inside):
        super().__init__()
        self.norm, self.side = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM)
        self.outside, self.inside = outside, inside

    def forward(self, x):
        return x + self.down(self.inside(self.up(self.outside(self, self.norm(x)))))


class Net(nn.Module):
    def __init__(self, outside, inside=F.gelu):
        super().__init__()
        self.embed = nn.Embedding(11, DIM)
        self.blocks = nn.ModuleList(Block(outside, inside) for _ in range(6))
        self.head = nn.Linear(DIM, 3)

    def forward(self, ids):
        x = self.embed(ids).cumsum(1)  # all ranks have all tokens outside the blocks
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def check(net):
    styles = {path: style for path, _ in net.named_modules() if (style := LAYOUT.style(path)) is not None}
    return find_regions(net, [list(repeated_blocks(net))], TokenDivision(styles, (), DIM))


TOKEN_MIXING = {
    "cumsum": lambda block, x: x.cumsum(1),
    "mean": lambda block, x: x - x.mean(1, keepdim=True),
    "max": lambda block, x: x - x.max(-2, keepdim=True)[0],
    "pad": lambda block, x: F.pad(x, (0, 0, 1, -1)),
    "roll": lambda block, x: x.roll(1, 1),
    "flip": lambda block, x: x.flip(1),
    "getitem": lambda block, x: x * x[:, :1],
    "cat": lambda block, x: torch.cat((x, x), 1).unflatten(1, (2, 8)).sum(1),
    "softmax": lambda block, x: x.softmax(1),
    "layer_norm": lambda block, x: F.layer_norm(x, x.shape[1:]),
    "linear": lambda block, x: F.linear(x.transpose(1, 2), torch.empty(8, 8)).transpose(1, 2),
    "conv1d": lambda block, x: F.conv1d(x.mT, torch.empty(DIM, 1, 3), groups=DIM, padding=1).mT,
    "matmul": lambda block, x: torch.matmul(block.side(x) @ x.transpose(1, 2), x),
    "index_select": lambda block, x: x.index_select(1, torch.arange(8)),
    "scaled_dot_product_attention": lambda block, x: F.scaled_dot_product_attention(x, x, x),
}


def loop(block, x):
    out = []
    for number in range(x.shape[1]):
        out.append(number)
    return x * len(out)


def uses_the_class_range(block, x):
    values = range(3)
    assert isinstance(values, range)
    assert not isinstance(x, list | range)
    assert type(values) == range  # noqa: E721
    assert {range: 1}[type(values)] == 1
    assert issubclass(type(values), range)
    match values:
        case range():
            return x * len(values)
    raise AssertionError


TOKEN_WISE = {
    "class range": uses_the_class_range,
    "nothing": lambda block, x: x,
    "separate layer": lambda block, x: torch.sigmoid(block.side(x)) * x,
    "features": lambda block, x: x.softmax(-1) + x.mean(-1, keepdim=True) + x.cumsum(-1) + F.pad(x, (1, -1)),
    "heads": lambda block, x: F.rms_norm(x.view(*x.shape[:2], 2, 4), (4,)).transpose(1, 2).transpose(1, 2).flatten(2),
    "flat tokens": lambda block, x: block.side(x.view(-1, DIM)).view(x.shape),
    "parts of features": lambda block, x: torch.cat(x.chunk(2, -1), -1),
    "convolution of one": lambda block, x: F.conv1d(x.mT, torch.empty(DIM, DIM, 1)).mT,
}


@pytest.mark.parametrize("name", TOKEN_MIXING)
def test_token_mixing_operations_are_found(name):
    with pytest.raises(LayoutError) as caught:
        check(Net(TOKEN_MIXING[name]))
    assert str(caught.value) == (
        f"sp=on: blocks.0 (Block) calls `{name}` outside sharded layers, which mixes tokens or is not known to "
        "keep them separate, and tokens are sharded there. Use sp=off."
    )


def test_loop_over_the_number_of_tokens_is_found():
    with pytest.raises(LayoutError, match=r"blocks\.0 \(Block\) loops over the number of tokens"):
        check(Net(loop))
    assert "range" not in globals()


def test_loop_in_a_function_of_another_file_is_found(tmp_path, monkeypatch):
    (tmp_path / "own_helpers.py").write_text(
        "def doubled(x):\n    for _ in range(x.shape[1]):\n        x = 2 * x\n    return x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    helpers = importlib.import_module("own_helpers")
    with pytest.raises(LayoutError, match=r"blocks\.0 \(Block\) loops over the number of tokens"):
        check(Net(lambda block, x: helpers.doubled(x)))
    assert "range" not in vars(helpers)
    del sys.modules["own_helpers"]


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_token_wise_operations_are_accepted(name):
    check(Net(TOKEN_WISE[name]))


def test_mixing_between_sharded_layers_is_accepted():
    check(Net(TOKEN_WISE["nothing"], inside=lambda x: x.cumsum(1)))


def test_other_block_classes_are_checked():
    net = Net(TOKEN_WISE["nothing"])
    net.blocks[5] = Block(TOKEN_MIXING["roll"], F.gelu)
    net.blocks[5].side = nn.Identity()
    with pytest.raises(LayoutError, match=r"blocks\.5 \(Block\) calls `roll`"):
        check(net)


def test_model_that_reads_values_is_traced_with_values():
    with pytest.raises(LayoutError, match=r"blocks\.0 \(Block\) calls `sum`"):
        check(Net(lambda block, x: x * x.sum().item()))


def test_untraceable_model_is_rejected():
    net = Net(TOKEN_WISE["nothing"])
    net.head.weight = None
    with pytest.raises(LayoutError, match=r"Net cannot be traced: .*, so Weft cannot check that its blocks keep"):
        check(net)


def test_unsharded_attention_next_to_sharded_layers_is_found():
    """The sharded layers next to it hide this attention from the check by name."""
    net = nn.Module()
    net.embed = nn.Embedding(11, DIM)
    net.blocks = nn.ModuleList(nn.TransformerEncoderLayer(DIM, 2, 16, 0.0, batch_first=True) for _ in range(2))
    net.forward = lambda ids: net.blocks[1](net.blocks[0](net.embed(ids)))
    layout = Layout.parse("blocks.*.linear1=colwise blocks.*.linear2=rowwise")
    styles = {path: style for path, _ in net.named_modules() if (style := layout.style(path)) is not None}
    with pytest.raises(
        LayoutError, match=r"blocks\.0\.self_attn \(MultiheadAttention\) calls `multi_head_attention_forward`"
    ):
        find_regions(net, [list(repeated_blocks(net))], TokenDivision(styles, (), DIM))
    assert example_of(net, batch=1)[0].shape == (1, 8)
