"""Bytes of activations: what a mean layer saves and needs while its backward runs, and what ends and logits take."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.context_cost import buffer_bytes
from weft.planner.cost.layer_cost import padded_vocab
from weft.planner.cost.layer_kernels import own_cut
from weft.planner.cost.memory.loss_memory import cut_loss_bytes, is_loss_cut
from weft.planner.cost.traced_cost import end_saved_bytes, saved_bytes
from weft.planner.space import PRECISIONS, Columns, Job, TracedShape
from weft.spec.plan import RECOMPUTES

Array = NDArray[np.float64]

#: Most bytes by logit of a loss that compares a student's logits with a teacher's (tasks/distill/divergence.py): a test
#: measures it.
TWO_LOGITS = 36.0
#: The columns that everything here reads.
OF_LAYER = (
    "tp",
    "cp",
    "cp_mode",
    "sp",
    "microbatch",
    "precision",
    "compile",
    "recompute",
    "recompute_share",
)


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of a mean layer and one pass on a rank.

    whole: all that it saves. kept: what recompute leaves of it. beside: buffers while its backward runs. passing: the
    gradients of its activations then, less the activations that they let go.
    """

    whole: Array
    kept: Array
    beside: Array
    passing: Array

    def rows(self, index: NDArray[Any] | slice) -> LayerBytes:
        """Return the bytes of plans, by the kind that each is of."""
        return LayerBytes(**{each.name: getattr(self, each.name)[index] for each in fields(self)})


def layer_bytes(job: Job, columns: Columns) -> LayerBytes:
    """Return the bytes of activations that a mean layer saves, without and with the plan's recompute."""
    shape, stack = job.shape, job.stack
    fp32 = columns.in_fp32
    width = np.where(fp32, 2.0, np.where(columns.precision == PRECISIONS.index("fp64"), 4.0, 1.0))
    if isinstance(shape, TracedShape):
        return _traced_bytes(job, shape, columns, width)
    t = columns.tp.astype(np.float64)
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    h = float(shape.hidden)
    q, kv = shape.cut_widths(t)
    between = np.where(columns.sp, t, 1.0)
    gathered = np.where(columns.sp & stack.regather_sp, t, 1.0)  # what the matmuls read, kept whole or as a slice
    # Eager steps of RMSNorm keep two values in fp32 beside a half-precision input, one beside one in fp32.
    norms = np.where(stack.fused_norm | shape.layer_norm | columns.compile, 0.0, np.where(fp32, 2.0, 6.0))
    if job.adapter is not None:  # what is normalised is kept for the gradient of the norm's weight alone
        norms = np.maximum(0.0, norms - np.where(fp32, 2.0, 4.0))
    masks = 2.0 if stack.dropout else 0.0
    outside = (2 * 2.0 + norms * 2 + masks) * h / between + _normed_bytes(job, columns, fp32, gathered)
    core = 2.0 * q + 4.0 * kv
    product = 2.0 * q + 4.0 * np.ceil(shape.heads / t) * (1.0 if stack.flash else 0.0)
    scores = _score_bytes(job, t)
    narrow = np.where(stack.fp8_inputs & columns.narrow, 1.0, 0.0)
    # Inputs of products in fp8: what q, k, v and the ups read is half as wide; attention keeps its own output beside.
    outside = outside - narrow * 2 * h / gathered
    core = core + narrow * q
    ffn, product_up = _ffn_bytes(job, columns, t, narrow)
    whole = outside + core + product + scores + ffn
    if stack.selective_half:
        routed = shape.moe_share * shape.top_k * 4.0 * h / t
        selective = 2.0 * h / between + core / 2 + product + 2.0 * h / between + product_up + routed
    else:  # all products but the last one, whose output is the layer's own; that of attention before ranks add it up
        selective = 2.0 * h / between + core + product + 2.0 * h + _selective_ffn_bytes(job, columns, t)
    left = {"none": whole, "full": 2.0 * h / between, "attention": whole - scores, "selective": selective}
    kept = np.choose(columns.recompute, [left[name] for name in RECOMPUTES])
    kept = columns.recompute_share * kept + (1 - columns.recompute_share) * whole
    beside = buffer_bytes(job, columns, tokens, q, kv) + _unpacking_bytes(job, t, width)
    # Of the residual stream and of the products that go up, which are the widest.
    passing = 2.0 * h + (2.0 if shape.gated else 1.0) * product_up
    whole, kept, passing = (tokens * each * width for each in (whole, kept, passing))
    return LayerBytes(whole=whole, kept=kept, beside=beside, passing=passing)


def _unpacking_bytes(job: Job, t: Array, width: Array) -> Array:
    """Bytes that unpacking the largest weight of a packed base takes."""
    return np.zeros_like(t) if job.adapter is None else job.adapter.unpacking_bytes(t, 2.0 * width)


def _traced_bytes(job: Job, shape: TracedShape, columns: Columns, width: Array) -> LayerBytes:
    cut = own_cut(job, columns)
    left = [saved_bytes(shape, cut, name) for name in RECOMPUTES]
    kept = np.choose(columns.recompute, left)
    whole = left[RECOMPUTES.index("none")]
    kept = columns.recompute_share * kept + (1 - columns.recompute_share) * whole
    q, kv = shape.cut_widths(cut.t)
    beside = buffer_bytes(job, columns, cut.batch * cut.seq, q, kv) + _unpacking_bytes(job, cut.t, width)
    # Of a traced model nobody knows them: as much as a layer keeps.
    return LayerBytes(whole=whole * width, kept=kept * width, beside=beside, passing=kept * width)


def end_bytes(job: Job, columns: Columns, embedding: bool, head: bool) -> Array:
    """Return the bytes that one pass keeps before and after the layers, where they are known.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        embedding: whether the rank holds the embedding.
        head: whether it holds the head.
    """
    found = np.zeros(len(columns))
    if isinstance(job.shape, TracedShape):
        cut, traced = own_cut(job, columns), job.shape.traced
        for there, layer in ((embedding, traced.before), (head, traced.after)):
            found = found + (end_saved_bytes(layer, cut) if there else 0.0)
    return found


def _score_bytes(job: Job, t: Array) -> Array:
    """Bytes per token of attention's scores where they are kept: softmax, and dropout's mask and product."""
    if job.stack.flash:
        return np.zeros_like(t)
    each = (2.0 if job.stack.fused_softmax else 8.0) + (3.0 if job.stack.dropout else 0.0)
    return each * np.ceil(job.shape.heads / t) * job.seq_len


def _normed_bytes(job: Job, columns: Columns, fp32: NDArray[np.bool_], gathered: Array) -> Array:
    """Bytes per token of what the two norms of a mean layer give, where it is kept for the products that read it.

    gathered: over how many ranks what such a product reads is divided.
    """
    shape, stack = job.shape, job.stack
    h, moe, compiled = float(shape.hidden), shape.moe_share, columns.compile & stack.lean_graphs
    if not moe or not stack.wide_router:
        return np.where(compiled, 0.0, 2 * 2.0 * h / gathered)
    # Experts read copies of their own; what chooses them reads one in fp32, which under fp32 is the tensor itself.
    # Shared ones, in a compiled block, keep what they gathered.
    router = np.where(fp32, 2.0 * h, 4.0 * h + 4.0 * shape.num_experts) / gathered
    read = np.where(fp32 | (shape.shared_ffn == 0), 0.0, 2.0 * h) / np.where(columns.compile, 1.0, gathered)
    return np.where(compiled, 0.0, 2.0 * h * (2 - moe) / gathered) + moe * (router + read)


def _ffn_bytes(job: Job, columns: Columns, t: Array, narrow: Array) -> tuple[Array, Array]:
    """Bytes per token of the feed-forward part of a mean layer: all, and one product that goes up."""
    shape, stack = job.shape, job.stack
    dense, experts = shape.ffn_widths(t)
    per = np.where(stack.fused_mlp | columns.compile, 6.0, 8.0) if shape.gated else np.full_like(t, 4.0)
    per = per - narrow  # what the down product reads
    lean = np.where(columns.compile & stack.lean_graphs, 4.0 if shape.gated else 2.0, per)
    apart = (8.0 if shape.gated else 4.0) - narrow if stack.opaque_experts and not stack.fused_mlp else per
    routed = shape.moe_share * shape.top_k * 4.0 * shape.hidden / t
    return lean * dense + apart * experts + routed, 2.0 * (dense + experts)


def _selective_ffn_bytes(job: Job, columns: Columns, t: Array) -> Array:
    """Bytes per token of what selective recompute keeps of it: products that go up, and what each expert gives."""
    shape = job.shape
    dense, experts = shape.ffn_widths(t)
    ups = 2.0 if shape.gated else 1.0
    given = shape.moe_share * 2.0 * shape.hidden * (shape.top_k + 1) / t  # by each expert, and all of them together
    seen = ups * 2.0 * experts + given
    return ups * 2.0 * dense + np.where(columns.compile & job.stack.opaque_experts, 0.0, seen)


def logits_bytes(job: Job, columns: Columns, device_bytes: int) -> Array:
    """Return the bytes of a pass's logits and of what is made beside them.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        device_bytes: memory of a GPU; 0 of a CPU.
    """
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    t = columns.tp.astype(np.float64)
    each = np.where(
        job.stack.fused_loss,
        6.0,
        np.where(columns.compile, np.minimum(10.0, job.stack.loss_bytes), job.stack.loss_bytes),
    )
    vocab, h = padded_vocab(job, t) / t, float(job.shape.hidden)
    if job.frozen is not None and job.frozen.whole_logits:
        return tokens * (vocab * t * TWO_LOGITS + 4.0 * h)
    found = tokens * vocab * each
    # Of a traced model nobody knows the loss: one of the user's own gets whole logits.
    if job.stack.cut_loss and not isinstance(job.shape, TracedShape):
        fp32 = columns.in_fp32
        width = np.where(fp32, 4.0, np.where(columns.precision == PRECISIONS.index("fp64"), 8.0, 2.0))
        frozen = job.adapter is not None or (job.trained is not None and not job.trained.head)
        cut = cut_loss_bytes(columns, tokens, vocab, h, width, device_bytes, frozen=frozen)
        found = np.where(is_loss_cut(columns, tokens, vocab), cut, found)
    return found + tokens * 4.0 * h
