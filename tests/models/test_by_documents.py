"""Document attention without masks: equal to masked attention, without tensors over token pairs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from weft.models import attention as documents
from weft.models.attention import document_attention, find_starts
from weft.models.registry import build_decoder
from weft.private_torch import TorchDispatchMode, tree_leaves

IDS_BT = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0, 1, 1]])


class LargestOutput(TorchDispatchMode):
    """Record the largest number of values that an operation returns."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def test_missing_starts_are_padded():
    assert find_starts(IDS_BT).tolist() == [[0, 3, 5, 6], [0, 7, 9, 9]]
    assert find_starts(torch.tensor([[0, 0, 1, 0]])) is None  # both ends are one document


@pytest.mark.parametrize("way", ["one by one", "by rows"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_output_and_gradients_match_masked_attention(way, heads, monkeypatch):
    monkeypatch.setattr(documents, "_ROWS", 4)
    torch.manual_seed(0)
    shapes = [(2, heads[0], 9, 8), (2, heads[1], 9, 8), (2, heads[1], 9, 8)]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    seen = (IDS_BT[:, :, None] == IDS_BT[:, None]) & torch.ones(9, 9, dtype=torch.bool).tril()
    wanted = F.scaled_dot_product_attention(*given, attn_mask=seen[:, None], enable_gqa=True)
    one = way == "one by one"
    found = document_attention(*given, find_starts(IDS_BT), IDS_BT) if one else documents._by_rows(*given, IDS_BT)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad(found, given, weights), torch.autograd.grad(wanted, given, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_operator_passes_opcheck():
    given = [torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for is_causal in (True, False):
        torch.library.opcheck(documents._one_by_one, (*given, find_starts(IDS_BT), is_causal))


def test_decoder_matches_masked_attention_without_tensors_over_token_pairs(make_spec):
    """Compare forward and backward in float64."""
    length = 1024
    model = build_decoder(make_spec(max_seq_len=length), dtype=torch.float64, seed=0)
    ids_BT = torch.arange(length)[None] // 300
    tokens = torch.arange(length)[None] % 7

    def gradients():
        model.zero_grad()
        model(tokens, document_ids_BT=ids_BT).square().sum().backward()
        return [param.grad.clone() for param in model.parameters()]

    with LargestOutput() as seen:
        found = gradients()
    assert seen.most < length * length / 2
    for block in model.blocks:
        block.attn.core.takes_mask = True
    with LargestOutput() as seen:
        wanted = gradients()
    assert seen.most >= length * length
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
