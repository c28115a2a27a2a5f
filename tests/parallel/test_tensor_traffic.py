"""What tensor parallelism sends and keeps: bytes equal to the formulas, gathered inputs not kept, dropout masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.parallel.tensor_cases import LLAMA, build, differences
from weft.comm import Ledger
from weft.mesh import build_mesh
from weft.models import build_decoder
from weft.parallel.head import HeadLoss, expect_labels
from weft.parallel.head_loss import token_loss
from weft.parallel.tensor import cut_tensors, fuse_whole_head
from weft.spec.plan import Plan
from weft.train.loss import model_forward, token_cross_entropy

ROWS, TOKENS, LAYERS = 2, 32, 3
SPEC = replace(LLAMA, num_layers=LAYERS, vocab_size=64, tied=False, max_seq_len=TOKENS)


def batch():
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % SPEC.vocab_size
    return {"input_ids": ids, "labels": ids.roll(1), "positions": torch.arange(TOKENS).repeat(ROWS, 1)}


def one_step(plan_text):
    """Bytes and calls of one forward and backward by operation, and what forward kept for backward by size."""
    ledger = Ledger()
    mesh = build_mesh(Plan.parse(plan_text), record=ledger.record)
    model = build_decoder(SPEC, dtype=torch.float64, seed=1)
    cut_tensors(model, mesh)
    ledger.clear()
    data = batch()
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept, held = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with expect_labels(model, token_cross_entropy, data):
            output = model_forward(model, data)
        loss, _ = token_cross_entropy(output, data)
    assert isinstance(output, HeadLoss)
    loss.backward()
    sent = {name: (entry.calls, entry.num_bytes) for axis, name, entry in ledger.rows() if axis == "tp"}
    return sent, sum(kept.values()), ledger.table()


def test_bytes_are_those_of_the_formulas(ranks2):
    """Per layer: tp 2 + 2 all_reduce of the hidden states; sp 2 + 4 all_gather and 2 + 2 reduce_scatter."""
    hidden = ROWS * TOKENS * SPEC.dim * 8
    numbers = ROWS * TOKENS * 8
    plain, whole_kept, table = ranks2.run(one_step, "tp=2")[0]
    # The embedding's sum and the head's input gradient; the head: the largest logit, then sum and label's logit.
    assert plain == {"all_reduce": (4 * LAYERS + 2 + 2, (4 * LAYERS + 2) * hidden + 3 * numbers)}
    assert table.splitlines()[1].split()[:2] == ["tp", "all_reduce"]
    tokens, kept, _ = ranks2.run(one_step, "tp=2 sp=on")[0]
    # The embedding scatters and its backward gathers; the head gathers once and scatters once, without a second gather.
    assert tokens["all_gather"] == (6 * LAYERS + 2, (6 * LAYERS + 2) * hidden)
    assert tokens["reduce_scatter"] == (4 * LAYERS + 2, (4 * LAYERS + 2) * hidden)
    assert tokens["all_reduce"] == (2, 3 * numbers)
    # Norms' inputs and outputs and the residual stream halve; nothing of full length is kept for a gathered input.
    assert kept < 0.75 * whole_kept


def dropped(plan_text, name):
    return differences(plan_text, name, resid_pdrop=0.3, embd_pdrop=0.2)


def test_dropout_of_residuals_is_that_of_one_process(ranks2):
    for plan in ("tp=2", "tp=2 sp=on"):
        for found in ranks2.run(dropped, plan, "gpt2"):
            assert max(found.values()) < 1e-10, plan


def attention_masks(plan_text):
    """The random numbers that each rank drew inside attention, and the ones that it goes on with."""
    mesh = build_mesh(Plan.parse(plan_text))
    model = build("gpt2", attn_pdrop=0.5)
    cut_tensors(model, mesh)
    drawn = []
    attention = model.transformer.h[0].attn
    attention.c_attn.register_forward_hook(lambda *_: drawn.append(float(torch.rand(()))))
    attention.c_proj.register_forward_hook(lambda *_: drawn.append(float(torch.rand(()))))
    torch.manual_seed(3)
    model(torch.zeros(1, 8, dtype=torch.int64))
    return drawn


@pytest.mark.parametrize("sp", ["", " sp=on"])
def test_dropout_differs_where_ranks_have_other_heads(ranks2, sp):
    first, second = ranks2.run(attention_masks, f"tp=2{sp}")
    assert first[0] != second[0]
    assert first[1] == second[1]


def test_the_head_gives_the_same_loss_in_any_number_of_pieces(monkeypatch):
    """Chunks, a bias, a whole vocabulary, untrained tokens; and the loss without gradients."""
    torch.manual_seed(0)
    head = nn.Linear(8, 11).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, 2, -100, 4, 10], [-100, -100, 0, 3, 3]])
    expected = nn.functional.cross_entropy(head(x).flatten(0, 1), labels.flatten(), reduction="sum")
    wanted = torch.autograd.grad(expected, [x, head.weight, head.bias])
    model = nn.Sequential(head)
    model.get_output_embeddings = lambda: head
    fuse_whole_head(model)
    line = head._weft_head.line
    for chunk_bytes in (1, 3 * 11 * 8, 2**20):
        monkeypatch.setattr("weft.parallel.head_loss.CHUNK_BYTES", chunk_bytes)
        loss = token_loss(x, head.weight, head.bias, labels, line, 11, -100)
        found = torch.autograd.grad(2 * loss, [x, head.weight, head.bias])
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, 2 * theirs, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(token_loss(x, head.weight, head.bias, labels, line, 11, -100), expected)


def test_a_large_head_gives_the_loss_without_tp(monkeypatch):
    model = build_decoder(SPEC, dtype=torch.float64, seed=1)
    fuse_whole_head(model)
    data = batch()

    def loss():
        with expect_labels(model, token_cross_entropy, data):
            output = model_forward(model, data)
        return output, token_cross_entropy(output, data)

    logits, (small, count) = loss()
    assert not isinstance(logits, HeadLoss)
    monkeypatch.setattr("weft.parallel.head.LARGE_LOGITS_BYTES", 0)
    output, (large, other_count) = loss()
    assert isinstance(output, HeadLoss)
    torch.testing.assert_close(large, small, rtol=1e-12, atol=0)
    assert count == other_count
    with pytest.raises(Exception, match="the model changes its logits after the head"):
        output / 2
