"""Cost of an activation budget: each layer of a rank uses one of several options between saving all and nothing.

The first option of a layer (`memory/trace.py`) saves all tensors that autograd saves. The next options save the outputs
of its heavy operations (matmuls and attention), then ever fewer of them: the outputs that save the least time per byte
are dropped first. The last option saves only the layer's input.

The runtime combines options over the layers for the least time (`memory/recompute.py`). For identical layers, this is a
straight line between two options on the lower convex hull.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.config.plan import RECOMPUTES
from weft.planner.cost.layer import LayerCosts, share_of
from weft.planner.cost.memory_terms import layer_bytes
from weft.planner.cost.row_dedupe import taken
from weft.planner.cost.traced import RankShare
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import TracedShape

Array = NDArray[np.float64]


class RecomputeOption(NamedTuple):
    """Bytes that an average layer saves for one microbatch, and the time (s) of its recomputation."""

    kept: Array
    seconds: Array


class Heavy(NamedTuple):
    """A matmul or attention of a layer.

    Attributes:
        kept: bytes of its output.
        share: its time divided by the time of all matmuls, or of attention.
        worth: time saved per byte, for comparisons. Tensor parallelism may divide an operation's computation but not
            its output, as in the matmul after attention. Its worth then decreases with the number of ranks.
    """

    kept: Array
    share: Array
    is_attention: bool
    worth: Array | float


def replay_s(job: Job, columns: Columns, costs: LayerCosts) -> dict[str, Array]:
    """Return the recomputation time (s) of one microbatch of a layer by policy, with one entry per plan.

    costs: costs of the layer, with one entry per plan.
    """
    summed = _summed_again(columns, costs)
    whole = costs.gemm_f + costs.attn_f + costs.memory_f + costs.cp_f + costs.ep_f
    again = 0.0 if job.stack.selective_kernels else summed + _experts_again(job, columns, costs)
    half = costs.gemm_f / 2 if job.stack.selective_half else 0.0
    return {
        "full": whole - costs.last_f + summed if job.stack.replay_stops else whole + costs.tp_f,
        "attention": costs.attn_f,
        "selective": costs.memory_f + half + again,
    }


def tiles_s(job: Job, columns: Columns, costs: LayerCosts) -> Array:
    """Return the time (s) in which backward recomputes the tiles of one microbatch of a layer's MLPs.

    A layer that is recomputed as a whole recomputes its MLP at most once more than without tiles, which is not counted.
    """
    if (columns.mlp_tiles == 1).all() or isinstance(job.shape, TracedShape):
        return np.zeros(len(columns))
    shape, work = job.shape, _work(job, columns)
    width = work.dense + shape.moe_share * shape.shared_ffn / columns.tp
    share = (3.0 if shape.gated else 2.0) * shape.hidden * width / work.total
    again = share * costs.gemm_f + np.where(columns.sp, costs.tp_f / 4, 0.0)  # tokens are gathered again
    is_full = (columns.recompute == RECOMPUTES.index("full")) * columns.recompute_share
    return np.where(columns.mlp_tiles > 1, again * (1 - is_full), 0.0)


def _experts_again(job: Job, columns: Columns, costs: LayerCosts) -> Array:
    """Return the time (s) that recomputation under the selective policy spends on experts.

    Tokens are sent to the experts again. In compiled blocks experts are opaque, so that their matmuls are recomputed
    too.
    """
    if not job.shape.moe_share or isinstance(job.shape, TracedShape):
        return np.zeros(len(columns))
    return costs.ep_f + np.where(columns.compile, _work(job, columns).of_experts * costs.gemm_f, 0.0)


def _summed_again(columns: Columns, costs: LayerCosts) -> Array:
    """Return the tensor-parallel communication time (s) of a recomputation that stops before a layer's last matmul.

    The reduction after that matmul is skipped: one of two all-reduces remains, or with sequence parallelism two
    all-gathers and one of two reduce-scatters. The input of a sharded matmul is gathered again even if the matmul's
    output was saved.
    """
    return costs.tp_f * np.where(columns.sp, 0.75, 0.5)


def budget_s(job: Job, columns: Columns, costs: LayerCosts) -> Array:
    """Return the recomputation time (s) of one microbatch of one layer under a budget; 0 for plans without a budget."""
    budgets = np.isfinite(columns.activation_budget)
    if not budgets.any():
        return np.zeros(len(columns))
    rows = np.flatnonzero(budgets)
    found = np.zeros(len(columns))
    found[rows] = _mixed_s(job, columns[rows], taken(costs, rows))
    return found


def _mixed_s(job: Job, columns: Columns, costs: LayerCosts) -> Array:
    options = menu(job, columns, costs)
    whole, budget = options[0].kept, columns.activation_budget
    # A budget requires a plan without a pipeline, so it covers one microbatch of all layers.
    allowed = np.where(budget < 1, budget * whole, budget / job.shape.layers)
    allowed = np.maximum(allowed, options[-1].kept)
    found = np.full(len(columns), np.inf)
    for one in options:
        found = np.where(one.kept <= allowed, np.minimum(found, one.seconds), found)
    for more, less in combinations(options, 2):
        share = (allowed - less.kept) / np.maximum(more.kept - less.kept, 1e-9)
        between = (less.kept <= allowed) & (allowed <= more.kept)
        line = less.seconds + share * (more.seconds - less.seconds)
        found = np.where(between, np.minimum(found, line), found)
    return found


def menu(job: Job, columns: Columns, costs: LayerCosts) -> list[RecomputeOption]:
    """Return the options of an average layer, from saving everything to saving only its input."""
    share = np.ones(len(columns))
    codes = {name: np.full(len(columns), RECOMPUTES.index(name), dtype=np.uint8) for name in ("none", "full")}
    policies = {name: columns.with_arrays(recompute=code, recompute_share=share) for name, code in codes.items()}
    bytes_of = {name: layer_bytes(job, one).kept for name, one in policies.items()}
    found = [RecomputeOption(bytes_of["none"], np.zeros(len(columns)))]
    beside = costs.memory_f + _summed_again(columns, costs) + _experts_again(job, columns, costs)
    if heavy := _heavy(job, columns):
        rows = len(columns)
        seconds = np.stack([each.share * (costs.attn_f if each.is_attention else costs.gemm_f) for each in heavy])
        worth, kept = (
            np.stack([np.broadcast_to(getattr(each, name), rows) for each in heavy]) for name in ("worth", "kept")
        )
        order = np.argsort(worth, axis=0, kind="stable")  # by increasing time saved per byte
        kept, seconds = (list(np.take_along_axis(each, order, axis=0)) for each in (kept, seconds))
        for dropped in range(len(heavy)):
            again = sum(seconds[:dropped], beside)
            found.append(RecomputeOption(bytes_of["full"] + sum(kept[dropped:]), again))
    return [*found, RecomputeOption(bytes_of["full"], replay_s(job, columns, costs)["full"])]


def _heavy(job: Job, columns: Columns) -> list[Heavy]:
    cut = share_of(job, columns)
    width = np.where(columns.in_fp32, 4.0, 2.0)
    if isinstance(job.shape, TracedShape):
        return _traced_heavy(job.shape, cut, width)
    shape, work, each = job.shape, _work(job, columns), width * cut.tokens
    q, kv = cut.q, cut.kv
    ups, h = 2.0 if shape.gated else 1.0, float(shape.hidden)
    # In compiled blocks experts are opaque. Otherwise the output of each expert is saved too, because backward of their
    # weighted sum needs it.
    unseen = columns.compile
    width_up = work.dense + np.where(unseen, 0.0, work.experts)
    given = np.where(unseen, 0.0, shape.moe_share * shape.top_k * h / cut.t)
    heavy = [
        Heavy(each * (q + 2 * kv), h * (q + 2 * kv) / work.total, False, h),
        Heavy(each * h, q * h / work.total, False, q),
        Heavy(each * ups * width_up, ups * h * width_up / work.total, False, h),
        Heavy(each * q, np.ones_like(cut.t), True, float(job.seq_len)),
    ]
    if shape.moe_share:
        share = np.where(unseen, 0.0, h * work.experts / work.total)
        heavy.append(Heavy(each * given, share, False, float(max(1, shape.expert_ffn))))
    return heavy


class _Work(NamedTuple):
    """Matmuls of an average layer on a rank.

    Attributes:
        dense, experts: widths of one up projection in dense layers and in experts.
        total: multiply-adds per token.
        of_experts: share of the multiply-adds in experts.
    """

    dense: Array
    experts: Array
    total: Array
    of_experts: Array


def _work(job: Job, columns: Columns) -> _Work:
    shape, t = job.shape, columns.tp.astype(np.float64)
    q, kv = shape.sharded_widths(t)
    ups, h = 2.0 if shape.gated else 1.0, float(shape.hidden)
    dense, experts = shape.ffn_widths(t)
    total = h * (2 * q + 2 * kv) + (ups + 1) * h * (dense + experts)
    return _Work(dense, experts, total, (ups + 1) * h * experts / total)


def _traced_heavy(shape: TracedShape, cut: RankShare, width: Array) -> list[Heavy]:
    layer = max(shape.traced.layers, key=lambda each: each.count)
    work = [each.flops(cut.batch, cut.seq, cut.t) for each in layer.matmuls]
    total = np.sum(work, axis=0) if work else np.ones_like(cut.batch)
    found: list[Heavy] = []
    for each, flops in zip(layer.matmuls[:-1], work, strict=False):
        m, n, k, count = each.sizes(cut.batch, cut.seq, cut.t)
        found.append(Heavy(width * m * n * count, flops / total, False, float(np.max(k))))
    for each in layer.attentions:
        values = each.queries.at(cut.batch, cut.seq) * each.heads * each.head_dim / (cut.t if each.cut else 1)
        keys = each.keys.at(cut.batch, cut.seq * cut.c)
        share = np.full_like(cut.batch, 1 / len(layer.attentions))
        found.append(Heavy(width * values, share, True, float(np.max(keys))))
    return found
