"""Attention over a sharded sequence matches attention over the full one in each cp_mode: output and gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.choice import todays
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.partitioning import sent_bytes
from weft.config.plan import Plan
from weft.parallel.context.kernels import BOTH_WAYS, AttentionWindow, Scoring
from weft.parallel.context.modes import SequenceOrder, View, attend_sharded

BATCH, WIDTH = 2, 8
MODES = ("gather", "ring", "ulysses")
#: Document boundaries of the two sequences of a batch: within chunks, at their ends, and across several chunks.
DOCUMENTS = {
    "none": None,
    "same": ((0, 5, 16, 48), (0, 5, 16, 48)),
    "unlike": ((0, 3, 4, 30, 48), (0, 48)),
    "short": (tuple(range(0, 49, 2)), (0, 1, 47, 48)),
}

#: Variants of attention: windows shorter and longer than a chunk, one- and two-sided, and soft caps.
PLAIN = Scoring(0.3)
SCORINGS = {
    "window": Scoring(0.3, AttentionWindow(3, 0)),
    "long window": Scoring(0.3, AttentionWindow(20, 0)),
    "itself": Scoring(0.3, AttentionWindow(0, 0)),
    "both ways": Scoring(0.3, BOTH_WAYS),
    "window both ways": Scoring(0.3, AttentionWindow(4, 4)),
    "softcap": Scoring(0.3, softcap=0.5),
    "window, softcap": Scoring(0.3, AttentionWindow(7, 0), softcap=0.5),
}


def inputs(heads: int, kv_heads: int, seq_len: int, dtype: torch.dtype, value_width: int = WIDTH) -> list[torch.Tensor]:
    """Return queries, keys, values and the gradient of the output."""
    torch.manual_seed(3)
    sizes = ((heads, WIDTH), (kv_heads, WIDTH), (kv_heads, value_width), (heads, value_width))
    shapes = [(BATCH, count, seq_len, width) for count, width in sizes]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def dense(q, k, v, borders, scoring):
    """Compute attention with a mask over all pairs."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return dense_scores(q, k, borders, scoring).softmax(-1) @ v


def dense_scores(q, k, borders, scoring):
    """Return the scores of all pairs, -inf for masked ones."""
    seq_len, window = q.shape[2], scoring.sight
    distance = torch.arange(seq_len)[:, None] - torch.arange(seq_len)
    before, after = (seq_len if reach is None else reach for reach in (window.before, window.after))
    mask = ((distance <= before) & (-distance <= after))[None].repeat(BATCH, 1, 1)
    for row, starts in enumerate(borders or ()):
        ids = torch.zeros(seq_len, dtype=torch.long)
        ids[list(starts[1:-1])] = 1
        ids = ids.cumsum(0)
        mask[row] &= ids[:, None] == ids[None]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.transpose(-1, -2) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    return scores.masked_fill(~mask[:, None], -torch.inf)


def reference(heads, kv_heads, seq_len, dtype, borders, scoring=PLAIN, value_width=WIDTH):
    *qkv, grad = (x.double() for x in inputs(heads, kv_heads, seq_len, dtype, value_width))
    qkv = [x.requires_grad_() for x in qkv]
    out = dense(*qkv, borders, scoring)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in qkv)]


def attend_on_ranks(mode, heads, kv_heads, seq_len, dtype, borders, scoring=PLAIN, value_width=WIDTH):
    """Return this rank's output and gradients, the bytes sent in forward and backward, and the saved bytes."""
    ledger = Ledger()
    size = torch.distributed.get_world_size()
    axis = build_mesh(Plan(cp=size), record=ledger.record)["cp"]
    order = SequenceOrder(mode, size, axis.rank, seq_len)
    *qkv, grad = (
        order.shard(x.transpose(1, 2)).transpose(1, 2) for x in inputs(heads, kv_heads, seq_len, dtype, value_width)
    )
    qkv = [x.clone().requires_grad_() for x in qkv]
    saved: dict[int, int] = {}

    def keep(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attend_sharded(*qkv, scoring, View(axis, order, borders))
    counts = [sum(entry.num_bytes for _, _, entry in ledger.rows())]
    out.backward(grad)
    counts.append(sum(entry.num_bytes for _, _, entry in ledger.rows()) - counts[0])
    return [out.detach(), *(x.grad for x in qkv)], counts, sum(saved.values())


def joined(results, mode, seq_len):
    order = SequenceOrder(mode, len(results), 0, seq_len)
    columns = zip(*(tensors for tensors, _, _ in results), strict=True)
    return [order.join([x.transpose(1, 2) for x in column]).transpose(1, 2) for column in columns]


@pytest.mark.parametrize(
    ("ranks", "heads", "mode", "documents"),
    todays(itertools.product([2, 4], [(4, 4), (8, 2), (4, 1)], MODES, DOCUMENTS), parts=4),
)
def test_sharded_attention_matches_full_attention(ranks, heads, mode, documents, request):
    borders = DOCUMENTS[documents]
    case = (*heads, 48, torch.float64, borders)
    results = request.getfixturevalue(f"ranks{ranks}").run(attend_on_ranks, mode, *case)
    for ours, theirs in zip(joined(results, mode, 48), reference(*case), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "mode", "documents"), todays(itertools.product(SCORINGS, MODES, ["none", "unlike"]), parts=4)
)
def test_windows_bidirectional_and_soft_caps_match(kind, mode, documents, ranks4):
    case = (8, 2, 48, torch.float64, DOCUMENTS[documents], SCORINGS[kind])
    for ours, theirs in zip(joined(ranks4.run(attend_on_ranks, mode, *case), mode, 48), reference(*case), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("value_width", [5, 12])
@pytest.mark.parametrize("mode", MODES)
def test_values_of_another_width_match(mode, value_width, ranks2):
    """Use another value width, as in multi-head latent attention."""
    case = (4, 2, 48, torch.float64, DOCUMENTS["unlike"], PLAIN, value_width)
    for ours, theirs in zip(joined(ranks2.run(attend_on_ranks, mode, *case), mode, 48), reference(*case), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("mode", MODES)
def test_other_dtypes_are_close(mode, dtype, limit, ranks4):
    case = (8, 2, 64, dtype, None)
    results = ranks4.run(attend_on_ranks, mode, *case)
    for ours, theirs in zip(joined(results, mode, 64), reference(*case), strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - theirs).abs().max() / theirs.abs().max()) < limit


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_sent_bytes_match_the_formula(mode, heads, dtype, ranks4):
    [(_, counts, _), *_] = ranks4.run(attend_on_ranks, mode, *heads, 48, dtype, None)
    sums = 8 if dtype == torch.float64 else 4
    shape = {"cp": 4, "tokens": BATCH * 12, "num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": WIDTH}
    for counted, backward in zip(counts, (False, True), strict=True):
        assert counted == sent_bytes(mode, **shape, itemsize=dtype.itemsize, sum_itemsize=sums, backward=backward)


@pytest.mark.parametrize("documents", ["none", "same"])
@pytest.mark.parametrize("mode", MODES)
def test_saved_bytes_decrease_with_the_number_of_ranks(mode, documents, ranks2, ranks4):
    case = (mode, 4, 4, 48, torch.float64, DOCUMENTS[documents])
    two = max(saved for _, _, saved in ranks2.run(attend_on_ranks, *case))
    four = max(saved for _, _, saved in ranks4.run(attend_on_ranks, *case))
    token = (4 * 4 * WIDTH + 4) * 8  # queries, keys, values, output and log-sum-exp of all heads
    assert (two, four) == (BATCH * 24 * token, BATCH * 12 * token)


def sinks_on_ranks(mode, scoring, borders):
    """Return this rank's output, the gradients of queries, keys and values, and the summed gradient of the sinks."""
    size = torch.distributed.get_world_size()
    axis = build_mesh(Plan(cp=size))["cp"]
    order = SequenceOrder(mode, size, axis.rank, 48)
    *qkv, grad = (order.shard(x.transpose(1, 2)).transpose(1, 2) for x in inputs(8, 4, 48, torch.float64))
    qkv = [x.clone().requires_grad_() for x in qkv]
    sink_H = torch.linspace(-1, 2, 8, dtype=torch.float64).requires_grad_()
    out = attend_sharded(*qkv, scoring, View(axis, order, borders), sink_H)
    out.backward(grad)
    torch.distributed.all_reduce(sink_H.grad)
    return [out.detach(), *(x.grad for x in qkv)], sink_H.grad, None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("scoring", "documents"), [("causal", "none"), ("window", "unlike"), ("softcap", "same")])
def test_attention_sinks_match_full_attention(mode, scoring, documents, ranks4):
    asked, borders = SCORINGS.get(scoring, PLAIN), DOCUMENTS[documents]
    results = ranks4.run(sinks_on_ranks, mode, asked, borders)
    *qkv, grad = inputs(8, 4, 48, torch.float64)
    qkv = [x.requires_grad_() for x in qkv]
    sink_H = torch.linspace(-1, 2, 8, dtype=torch.float64).requires_grad_()
    # A sink is one more key, with the sink as its score and a value of zero.
    without_sink = dense_scores(qkv[0], qkv[1], borders, asked)
    scores = torch.cat((without_sink, sink_H[None, :, None, None].expand(BATCH, -1, 48, 1)), -1)
    out = scores.softmax(-1)[..., :-1] @ qkv[2].repeat_interleave(2, 1)
    out.backward(grad)
    for found, expected in zip(joined(results, mode, 48), [out.detach(), *(x.grad for x in qkv)], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(results[0][1], sink_H.grad, rtol=1e-10, atol=1e-12)
