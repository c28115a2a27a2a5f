"""Communication and memory of tensor parallelism: bytes match the formulas, and gathered inputs are not saved."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.parallel.tensor_cases import LLAMA
from tools.live_memory import LiveTensors
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.partitioning import LossChunk
from weft.config.plan import Plan
from weft.models.registry import build_decoder
from weft.parallel.tensor.apply import fuse_replicated_head, shard_tensors
from weft.parallel.tensor.head import LossChunking, token_loss
from weft.parallel.tensor.language_head import HeadLoss, expect_labels
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy

ROWS, TOKENS, LAYERS = 2, 32, 3
SPEC = replace(LLAMA, num_layers=LAYERS, vocab_size=64, tied=False, max_seq_len=TOKENS)


def batch():
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % SPEC.vocab_size
    return {"input_ids": ids, "labels": ids.roll(1), "positions": torch.arange(TOKENS).repeat(ROWS, 1)}


def one_step(plan_text):
    """Return calls and bytes per operation of one forward and backward, the saved bytes, and the ledger's table."""
    ledger = Ledger()
    mesh = build_mesh(Plan.parse(plan_text), record=ledger.record)
    model = build_decoder(SPEC, dtype=torch.float64, seed=1)
    shard_tensors(model, mesh)
    ledger.clear()
    data = batch()
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved, references = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            saved[storage.data_ptr()] = storage.nbytes()
            references.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with expect_labels(model, token_cross_entropy, data):
            output = model_forward(model, data)
        loss, _ = token_cross_entropy(output, data)
    assert isinstance(output, HeadLoss)
    loss.backward()
    sent = {name: (entry.calls, entry.num_bytes) for axis, name, entry in ledger.rows() if axis == "tp"}
    return sent, sum(saved.values()), ledger.table()


def test_tensor_parallel_bytes_match_the_formulas(ranks2):
    """Per layer: tp has 2 + 2 all_reduce of the hidden states, sp has 2 + 4 all_gather and 2 + 2 reduce_scatter."""
    hidden = ROWS * TOKENS * SPEC.dim * 8
    numbers = ROWS * TOKENS * 8
    plain, saved_without_sp, table = ranks2.run(one_step, "tp=2")[0]
    # Plus the embedding's sum, the head's input gradient, and the head's maximum, sum and label logits.
    assert plain == {"all_reduce": (4 * LAYERS + 2 + 2, (4 * LAYERS + 2) * hidden + 3 * numbers)}
    assert table.splitlines()[1].split()[:2] == ["tp", "all_reduce"]
    tokens, saved, _ = ranks2.run(one_step, "tp=2 sp=on")[0]
    # The embedding scatters and its backward gathers. The head gathers once and scatters once.
    assert tokens["all_gather"] == (6 * LAYERS + 2, (6 * LAYERS + 2) * hidden)
    assert tokens["reduce_scatter"] == (4 * LAYERS + 2, (4 * LAYERS + 2) * hidden)
    assert tokens["all_reduce"] == (2, 3 * numbers)
    # Norms and the residual stream save half, and gathered inputs are not saved.
    assert saved < 0.75 * saved_without_sp


def peak_of_a_step(fused: bool) -> int:
    """Return the peak bytes of forward and backward of 64 tokens with a vocabulary of 128 thousand, without tp."""
    model = build_decoder(replace(LLAMA, vocab_size=128256, num_layers=1, tied=False), seed=0)
    fuse_replicated_head(model)
    ids = torch.arange(64)[None] * 2000
    loss_fn = (
        token_cross_entropy if fused else functools.partial(token_cross_entropy)
    )  # hides the loss's support for fused heads
    batch = {"input_ids": ids, "labels": ids}
    with LiveTensors(model.parameters()) as live, expect_labels(model, loss_fn, batch):
        loss_fn(model(ids % 97), batch)[0].backward()
    return live.peak


def test_fused_head_avoids_the_logits_peak_without_tp(monkeypatch):
    monkeypatch.setattr("weft.parallel.tensor.language_head.LARGE_LOGITS_BYTES", 2**20)
    monkeypatch.setattr("weft.parallel.tensor.head.LossChunking", functools.partial(LossChunking, LossChunk(2**21)))
    logits_bytes, weight_bytes = 64 * 128256 * 4, 128256 * LLAMA.dim * 4
    assert peak_of_a_step(fused=False) > 2 * logits_bytes
    # Gradients of embedding and head, plus a few chunks.
    assert peak_of_a_step(fused=True) < 2 * weight_bytes + 5 * 2**21 < logits_bytes


def test_head_loss_is_equal_for_any_chunk_size():
    """Use chunks, a bias, an unsharded vocabulary and masked tokens, with and without gradients."""
    torch.manual_seed(0)
    head = nn.Linear(8, 11).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, 2, -100, 4, 10], [-100, -100, 0, 3, 3]])
    expected = nn.functional.cross_entropy(head(x).flatten(0, 1), labels.flatten(), reduction="sum")
    expected_grads = torch.autograd.grad(expected, [x, head.weight, head.bias])
    model = nn.Sequential(head)
    model.get_output_embeddings = lambda: head
    fuse_replicated_head(model)
    layer = head._weft_head.line
    for chunk_bytes in (1, 3 * 11 * 8, 2**20):
        chunking = LossChunking(LossChunk(chunk_bytes))
        loss = token_loss(x, head.weight, head.bias, labels, layer, 11, -100, chunking)
        found = torch.autograd.grad(2 * loss, [x, head.weight, head.bias])
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        for ours, theirs in zip(found, expected_grads, strict=True):
            torch.testing.assert_close(ours, 2 * theirs, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(
                token_loss(x, head.weight, head.bias, labels, layer, 11, -100, chunking), expected
            )


def test_large_head_is_fused_without_tp(monkeypatch):
    model = build_decoder(SPEC, dtype=torch.float64, seed=1)
    fuse_replicated_head(model)
    data = batch()

    def loss():
        with expect_labels(model, token_cross_entropy, data):
            output = model_forward(model, data)
        return output, token_cross_entropy(output, data)

    logits, (small, count) = loss()
    assert not isinstance(logits, HeadLoss)
    monkeypatch.setattr("weft.parallel.tensor.language_head.LARGE_LOGITS_BYTES", 0)
    output, (large, other_count) = loss()
    assert isinstance(output, HeadLoss)
    torch.testing.assert_close(large, small, rtol=1e-12, atol=0)
    assert count == other_count
    assert output.float() is output
    with pytest.raises(Exception, match="the model changes its logits after the head"):
        output / 2
