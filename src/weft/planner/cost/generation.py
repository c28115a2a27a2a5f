"""Time and memory of generating a batch of texts, for one plan: prompts first, then one token of each text at a time.

The model follows `weft/generation/`: data ranks divide the texts, tp ranks compute the same texts, and pp ranks work one
after the other on all texts of a data rank. Every rank keeps the parts outside the layers and samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weft.config.cluster import ClusterSpec
from weft.config.plan import Plan
from weft.planner.cost.layer import layer_costs, padded_vocab, share_of
from weft.planner.cost.machine import Fabric, Tables, bytes_s, gemm_s
from weft.planner.cost.memory_terms import axis_groups
from weft.planner.cost.shares import Shares, divided, rank_shares
from weft.planner.cost.traffic import Window, gathered_s
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape, Stack, TracedShape

#: Tokens of prompts in one forward, as in `weft/generation/batch.py`.
PREFILL_TOKENS = 8192
#: Columns for which a cache allocates memory beyond those in use: this many, or a quarter (`weft/models/kv_cache.py`).
_ROOM = 64
#: Bytes per logit that sampling reads and writes (fp32 logits; softmax and cumulative sum in float64; log softmax), and
#: bytes per logit that exist at the same time, without the logits themselves.
_SAMPLING_BYTES, _SAMPLING_PEAK = 80.0, 32.0
#: How often attention reads or writes keys and values per token: a window is copied to drop its oldest column. Latent
#: vectors are expanded to keys and values, which are written, copied and read.
_WINDOW_PASSES, _LATENT_PASSES = 3.0, 4.0
#: Host time of a layer's forward relative to training. Fitted to two published runs of eager decoding, which took 1.1 to
#: 1.2 ms a layer (docs/reference/inference_estimates.md).
_HOST = 3.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """What some layers of a model keep for each text.

    Attributes:
        layers: number of layers of this kind.
        heads: key-value heads, which tp divides; 0 for one vector that every tp rank keeps.
        width: values per token of one head (key and value together), or of the one vector.
        window: columns that are kept at most (0: all).
        fixed: values of a state of fixed size in the format of the weights.
        fixed_fp32: values of such a state that are always fp32.
    """

    layers: int
    heads: int = 0
    width: int = 0
    window: int = 0
    fixed: int = 0
    fixed_fp32: int = 0

    def row_bytes(self, columns: float, tp: int, width: float) -> float:
        """Return the bytes of one text on a rank, over all layers of this kind.

        Args:
            columns: columns of the cache.
            tp: tensor-parallel ranks.
            width: bytes of a value.
        """
        heads = math.ceil(self.heads / tp) if self.heads else 1
        return self.layers * (heads * self.width * columns * width + self.fixed * width + self.fixed_fp32 * 4.0)


def cache_kinds(shape: Shape) -> tuple[CacheKind, ...]:
    """Return what the layers of a decoder keep. A traced model's layers are unknown: () is returned."""
    if isinstance(shape, TracedShape):
        return ()
    if shape.kv_rank:  # transformers keeps latent vectors, and expands them in each forward
        return (CacheKind(layers=shape.layers, width=shape.kv_rank + shape.rope_dim),)
    full, both = shape.layers - shape.windowed_layers, 2 * shape.head_dim
    kinds = (
        CacheKind(layers=full, heads=shape.kv_heads, width=both),
        CacheKind(layers=shape.windowed_layers, heads=shape.kv_heads, width=both, window=shape.window),
    )
    return tuple(kind for kind in kinds if kind.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Texts that are generated together.

    Attributes:
        prompt: tokens of each prompt.
        new: new tokens of each text.
        batch: number of texts over all ranks.
        most_rows: a data rank generates at most this many at once, and the others afterwards.
    """

    prompt: int
    new: int
    batch: int
    most_rows: int = 10**9

    def rows(self, data_ranks: int) -> tuple[int, int]:
        """Return how many texts a data rank generates at once, and how often."""
        own = -(-self.batch // data_ranks)
        waves = -(-own // self.most_rows)
        return -(-own // waves), waves

    def groups(self, rows: int) -> tuple[int, int]:
        """Return the number of prompts in one forward, and the number of such forwards."""
        group = min(rows, max(1, PREFILL_TOKENS // self.prompt))
        return group, -(-rows // group)


def cache_growth(prompt: int, new: int, *, joined: bool) -> list[int]:
    """Return the sizes in columns that a growing cache allocates one after the other.

    Args:
        prompt: tokens of the prompt.
        new: new tokens. The last one is never read, so it is not in the cache.
        joined: True if rows joined a batch, whose cache is then copied at the first new token.
    """
    end = prompt + joined
    sizes = [end + max(_ROOM, end // 4)]
    while sizes[-1] < prompt + new - 1:
        end = sizes[-1] + 1
        sizes.append(end + max(_ROOM, end // 4))
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEstimate:
    """Prediction for one plan. Times are in seconds, memory is in bytes of the rank that uses the most.

    Attributes:
        rows, waves: texts that a data rank generates at once, and how often.
        first: time by term until all texts of a wave have their first token.
        token: time by term of one further token of each text.
        memory: bytes by class.
    """

    rows: int
    waves: int
    first: Mapping[str, float]
    token: Mapping[str, float]
    memory: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of a plan: what all estimates of it need.

    width: bytes of a weight. layers: layers of the rank. held: its parameters.
    """

    job: Job
    cluster: ClusterSpec
    tables: Tables
    fabric: Fabric
    plan: Plan
    kinds: Sequence[CacheKind]
    width: float
    layers: float = 0.0
    held: Shares = field(default_factory=lambda: Shares(np.zeros(1), np.zeros(1), np.zeros(1)))

    @classmethod
    def of(cls, shape: Shape, kinds: Sequence[CacheKind], cluster: ClusterSpec, tables: Tables, plan: Plan) -> _Rank:
        width = 8.0 if plan.precision == "fp64" else 4.0 if plan.precision in ("fp32", "tf32") else 2.0
        job = Job(shape=shape, seq_len=1, global_batch=1, stack=Stack(gather_bytes=width, weight_bytes=width))
        fabric = Fabric.of(tables, cluster.devices_per_node, cluster.rack_nodes, cluster.oversubscription)
        layers = float(-(-shape.layers // plan.pp))
        held = rank_shares(job, Columns.of([plan], job), np.array([layers]), True, True)
        return cls(job, cluster, tables, fabric, plan, kinds, width, layers, held)

    def columns(self, job: Job, rows: int) -> Columns:
        return Columns.of([self.plan], job).with_arrays(microbatch=np.array([rows]))

    def forward(self, rows: int, tokens: int, attention: float | None) -> dict[str, float]:
        """Return the time (s) by term of a forward of `tokens` tokens of each row, and of sampling one.

        attention: time (s) of attention over all layers, or None for attention among these tokens.
        """
        plan, shape, tables = self.plan, self.job.shape, self.tables
        job = replace(self.job, seq_len=tokens, shape=_touched(shape, plan, rows * tokens))
        columns = self.columns(job, rows)
        costs: Any = layer_costs(job, columns, tables, self.fabric)
        slow = tables.changed(memory_rate=tables.memory_rate * 2 / self.width)  # matmuls count values of 2 bytes
        products = costs if self.width == 2 else layer_costs(job, columns, slow, self.fabric)
        layers, stride = float(shape.layers), columns.stride("tp")
        vocab = padded_vocab(job, columns.tp.astype(np.float64)) / plan.tp
        head = gemm_s(slow, rows, vocab, shape.hidden, 1.0, share_of(job, columns, tables).rate)
        logits = self.fabric.ring_s("all_gather", rows * shape.vocab * self.width, plan.tp, stride)
        sent = rows * tokens * shape.hidden * self.width
        found: dict[str, Any] = {
            "gemm": layers * products.gemm_f + head,
            "attention": layers * costs.attn_f if attention is None else attention,
            "memory_bound": layers * costs.memory_f
            + costs.embed / 2
            + bytes_s(tables, rows * shape.vocab * _SAMPLING_BYTES),
            "tp": layers * costs.tp_f + costs.embed_tp + logits,
            "ep": layers * costs.ep_f,
            "stages": plan.pp * self.fabric.ring_s("all_gather", sent, plan.pp, columns.stride("pp")),
        }
        device = sum(found.values())
        found["host"] = np.maximum(0.0, _HOST * layers * costs.host_f - device)
        window = Window(forward=device / plan.pp, backward=np.zeros(1), layers=np.array([self.layers]))
        # Each stage gathers its own layers while the other stages wait for it.
        found["dp_exposed"] = plan.pp * gathered_s(self.job, columns, tables, self.fabric, self.held, window)
        shares = (plan.zero == 3 or plan.ep > 1) and plan.dp_size > 1
        agree = self.fabric.ring_s("all_reduce", 8.0, plan.dp_size, plan.tp) if shares else 0.0
        found["agree"] = agree + self.fabric.ring_s("all_gather", rows * 16.0, plan.tp * plan.pp, 1)
        return {name: float(np.asarray(value).reshape(-1)[0]) for name, value in found.items()}


def _touched(shape: Shape, plan: Plan, tokens: int) -> Shape:
    """Return the shape with only as many experts as some token uses on average, since others are not read."""
    if not shape.moe_layers or isinstance(shape, TracedShape):
        return shape
    routed = max(1.0, tokens * plan.ep / plan.tp) * shape.top_k
    used = shape.num_experts * (1.0 - (1.0 - 1.0 / shape.num_experts) ** routed)
    return replace(shape, num_experts=max(shape.top_k, plan.ep, round(used)))


def estimate_generation(
    shape: Shape, kinds: Sequence[CacheKind], cluster: ClusterSpec, tables: Tables, plan: Plan, texts: Texts, *,
    copied: bool = False,
) -> GenerationEstimate:  # fmt: skip
    """Predict time and memory of generating texts under a plan.

    Args:
        shape: the model.
        kinds: what its layers keep (`cache_kinds`).
        cluster: the machines.
        tables: constants of the cost model.
        plan: fields that matter only in training have their defaults.
        texts: the texts.
        copied: True if each rank first gathers a whole copy of sharded weights.
    """
    rank = _Rank.of(shape, kinds, cluster, tables, plan)
    rows, waves = texts.rows(plan.dp_size)
    group, num_groups = texts.groups(rows)
    first = {name: num_groups * each for name, each in rank.forward(group, texts.prompt, None).items()}
    joined = group * (num_groups * (num_groups + 1) / 2 - 1)  # joining copies the rows that are there
    first["joins"] = float(bytes_s(tables, 2 * joined / plan.pp * _row_bytes(rank, texts.prompt)))
    if copied:
        size = shape.num_params * rank.width
        first["dp_exposed"] = float(rank.fabric.ring_s("all_gather", size, plan.world_size, 1)) / waves
    sizes = cache_growth(texts.prompt, texts.new, joined=num_groups > 1)
    steps = max(1, texts.new - 1)
    grown = sum(sizes[:-1]) + (texts.prompt if num_groups > 1 else 0)
    token = rank.forward(rows, 1, _attention_s(rank, texts, rows))
    token["joins"] = float(bytes_s(tables, 2 * rows / plan.pp * _row_bytes(rank, grown, growing=True) / steps))
    return GenerationEstimate(
        rows=rows,
        waves=waves,
        first={name: each * tables.slowdown for name, each in first.items() if each},
        token={name: each * tables.slowdown for name, each in token.items() if each},
        memory=_memory(rank, texts, rows, group, num_groups, sizes[-1]),
    )


def _row_bytes(rank: _Rank, columns: float, *, growing: bool = False) -> float:
    """Return the bytes of one row, over all layers. growing: only of caches that grow in steps."""
    return sum(
        kind.row_bytes(min(columns, kind.window or columns), rank.plan.tp, rank.width)
        for kind in rank.kinds
        if not growing or (kind.width and not kind.window)
    )


def _attention_s(rank: _Rank, texts: Texts, rows: int) -> float:
    """Return the average time (s) of attention for one token of each row: keys, values and states are read once."""
    shape, plan, tables = rank.job.shape, rank.plan, rank.tables
    ends = texts.prompt + np.arange(1, max(2, texts.new))
    total = 0.0
    for kind in rank.kinds:
        columns = float(np.minimum(ends, kind.window or ends).mean())
        moved = rows * kind.row_bytes(columns, plan.tp, rank.width)
        if kind.heads or not kind.width:  # a state is read and written
            total += float(bytes_s(tables, moved * (_WINDOW_PASSES if kind.window else 1.0 if kind.width else 2.0)))
            continue
        wide = math.ceil(shape.heads / plan.tp) * (2 * shape.head_dim + shape.rope_dim)
        expanded = rows * columns * wide * rank.width * kind.layers
        total += float(bytes_s(tables, moved + _LATENT_PASSES * expanded))
        rate = share_of(rank.job, rank.columns(rank.job, rows), tables).rate
        total += kind.layers * float(gemm_s(tables, rows * columns, wide - shape.rope_dim, shape.kv_rank, 1.0, rate)[0])
    return total + shape.layers * tables.launch_s


def _memory(rank: _Rank, texts: Texts, rows: int, group: int, num_groups: int, size: int) -> dict[str, float]:
    """Return the bytes by class. `size`: columns that growing caches allocate at the end."""
    shape, plan, tables, width = rank.job.shape, rank.plan, rank.tables, rank.width
    columns, tp = rank.columns(rank.job, rows), plan.tp
    own = rank.layers / shape.layers  # of the caches of all layers
    # A window keeps the memory of a whole prompt until the next token or join.
    start = texts.prompt if num_groups == 1 else 0
    end = texts.prompt + texts.new - 1
    cache = sum(
        rows * kind.row_bytes(max(start, min(end, kind.window)) if kind.window else size, tp, width)
        for kind in rank.kinds
    )
    cache = cache * own + cache / shape.layers  # a layer's cache is copied when it grows
    wide = max(shape.ffn, shape.top_k * shape.expert_ffn + shape.shared_ffn, 4 * shape.heads * shape.head_dim / 3)
    tokens = group * texts.prompt
    activations = tokens * (4 * shape.hidden * width + 3 * wide / tp * width + 8 * shape.hidden)
    logits = rows * shape.vocab * (width + _SAMPLING_PEAK)
    unit = (rank.held.dense + rank.held.experts) / max(1.0, rank.layers)
    gathered = float(width * (unit + np.maximum(unit, rank.held.ends))[0]) if plan.zero == 3 else 0.0
    found = {
        "parameters": float(divided(columns, rank.held, 3)[0]) * width,
        "cache": cache,
        "activations": activations,
        "logits": logits,
        "buffers": gathered,
        "communicators": float(axis_groups(rank.job, columns, True)[0]) * tables.communicator_gib * 2**30,
        "context": tables.context_gib * 2**30,
    }
    found["reserve"] = (found["activations"] + found["logits"] + found["buffers"]) * (tables.reserve - 1)
    return found
