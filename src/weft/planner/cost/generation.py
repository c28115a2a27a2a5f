"""Time and memory of generating a batch of texts, for one plan: prompts first, then one token of each text at a time.

The model follows `weft/generation/`: data ranks divide the texts, tp ranks compute the same texts, and pp ranks work
one after the other on all texts of a data rank. Every rank keeps the parts outside the layers, and samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
_PREFILL_TOKENS = 8192
#: Columns for which a cache allocates memory beyond those in use: this many, or a quarter (`weft/models/kv_cache.py`).
_ROOM = 64
#: Bytes per logit that sampling moves (fp32 logits; softmax and cumulative sum in float64; log softmax), and bytes per
#: logit that exist at the same time, without the logits themselves.
_SAMPLING_BYTES, _SAMPLING_PEAK = 80.0, 32.0
#: How often attention reads or writes keys and values per token: a window is copied to drop its oldest column. Latent
#: vectors are expanded to keys and values, which are written, copied and read.
_WINDOW_PASSES, _LATENT_PASSES = 3.0, 4.0
#: Host time of a layer's forward relative to training. Fitted to two published runs of eager decoding, which took 1.1
#: to 1.2 ms a layer (docs/reference/inference_estimates.md).
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
        """Return the bytes of one text on a rank, over all layers of this kind. width: bytes of a value."""
        heads = math.ceil(self.heads / tp) if self.heads else 1
        return self.layers * (heads * self.width * columns * width + self.fixed * width + self.fixed_fp32 * 4.0)


def cache_kinds(shape: Shape) -> tuple[CacheKind, ...]:
    """Return what the layers of a decoder keep; () for a traced model, whose caches are unknown."""
    if isinstance(shape, TracedShape):
        return ()
    if shape.kv_rank:  # transformers keeps latent vectors, and expands them in each forward
        return (CacheKind(layers=shape.layers, width=shape.kv_rank + shape.rope_dim),)
    parts = (shape.layers - shape.windowed_layers, 0), (shape.windowed_layers, shape.window)
    heads, width = shape.kv_heads, 2 * shape.head_dim
    return tuple(
        CacheKind(layers=layers, heads=heads, width=width, window=window) for layers, window in parts if layers
    )


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


def cache_growth(prompt: int, new: int, *, joined: bool) -> list[int]:
    """Return the sizes in columns that a growing cache allocates one after the other.

    The last new token is never read, so it is not in the cache. joined: True if rows joined a batch, whose cache is
    copied at the first new token.
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
    group = min(rows, max(1, _PREFILL_TOKENS // texts.prompt))
    forwards = -(-rows // group)
    first = {name: forwards * each for name, each in rank.forward(group, texts.prompt, None).items()}
    joined = group * (forwards * (forwards + 1) / 2 - 1)  # joining copies the rows that are there
    first["joins"] = float(bytes_s(tables, 2 * joined / plan.pp * rank.row_bytes(texts.prompt)))
    if copied:
        size = shape.num_params * rank.width
        first["dp_exposed"] = float(rank.fabric.ring_s("all_gather", size, plan.world_size, 1)) / waves
    sizes = cache_growth(texts.prompt, texts.new, joined=forwards > 1)
    grown = sum(sizes[:-1]) + (texts.prompt if forwards > 1 else 0)
    token = rank.forward(rows, 1, rank.attention_s(texts, rows))
    moved = 2 * rows / plan.pp * rank.row_bytes(grown, growing=True) / max(1, texts.new - 1)
    token["joins"] = float(bytes_s(tables, moved))
    return GenerationEstimate(
        rows=rows,
        waves=waves,
        first={name: each * tables.slowdown for name, each in first.items() if each},
        token={name: each * tables.slowdown for name, each in token.items() if each},
        memory=rank.memory(texts, rows, group, sizes[-1]),
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank of a plan. width: bytes of a weight. layers, held: its number of layers and its parameters."""

    job: Job
    tables: Tables
    fabric: Fabric
    plan: Plan
    kinds: Sequence[CacheKind]
    width: float
    layers: float
    held: Shares

    @classmethod
    def of(cls, shape: Shape, kinds: Sequence[CacheKind], cluster: ClusterSpec, tables: Tables, plan: Plan) -> _Rank:
        width = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0}.get(plan.precision, 2.0)
        job = Job(shape=shape, seq_len=1, global_batch=1, stack=Stack(gather_bytes=width, weight_bytes=width))
        fabric = Fabric.of(tables, cluster.devices_per_node, cluster.rack_nodes, cluster.oversubscription)
        layers = float(-(-shape.layers // plan.pp))
        held = rank_shares(job, Columns.of([plan], job), np.array([layers]), True, True)
        return cls(job, tables, fabric, plan, kinds, width, layers, held)

    def columns(self, job: Job, rows: int) -> Columns:
        return Columns.of([self.plan], job).with_arrays(microbatch=np.array([rows]))

    def forward(self, rows: int, tokens: int, attention: float | None) -> dict[str, float]:
        """Return the time (s) by term of a forward of `tokens` tokens of each row, and of sampling one.

        attention: time (s) of attention over all layers, or None for attention among these tokens.
        """
        plan, shape, tables, ring = self.plan, self.job.shape, self.tables, self.fabric.ring_s
        job = replace(self.job, seq_len=tokens, shape=_touched(shape, plan, rows * tokens))
        columns = self.columns(job, rows)
        costs: Any = layer_costs(job, columns, tables, self.fabric)
        slow = tables.changed(memory_rate=tables.memory_rate * 2 / self.width)  # matmuls count values of 2 bytes
        products = costs if self.width == 2 else layer_costs(job, columns, slow, self.fabric)
        layers, stride = float(shape.layers), columns.stride("tp")
        vocab = padded_vocab(job, columns.tp.astype(np.float64)) / plan.tp
        head = gemm_s(slow, rows, vocab, shape.hidden, 1.0, share_of(job, columns, tables).rate)
        sampling = bytes_s(tables, rows * shape.vocab * _SAMPLING_BYTES)
        sent = rows * tokens * shape.hidden * self.width
        logits = ring("all_gather", rows * shape.vocab * self.width, plan.tp, stride)
        found: dict[str, Any] = {
            "gemm": layers * products.gemm_f + head,
            "attention": layers * costs.attn_f if attention is None else attention,
            "memory_bound": layers * costs.memory_f + costs.embed / 2 + sampling,
            "tp": layers * costs.tp_f + costs.embed_tp + logits,
            "ep": layers * costs.ep_f,
            "stages": plan.pp * ring("all_gather", sent, plan.pp, columns.stride("pp")),
        }
        device = np.zeros(1) + sum(found.values())
        found["host"] = np.maximum(0.0, _HOST * layers * costs.host_f - device)
        window = Window(forward=device / plan.pp, backward=np.zeros(1), layers=np.array([self.layers]))
        # Each stage gathers its own layers while the other stages wait for it.
        found["dp_exposed"] = plan.pp * gathered_s(self.job, columns, tables, self.fabric, self.held, window)
        shares = (plan.zero == 3 or plan.ep > 1) and plan.dp_size > 1
        agree = ring("all_reduce", 8.0, plan.dp_size, plan.tp) if shares else 0.0
        found["agree"] = agree + ring("all_gather", rows * 16.0, plan.tp * plan.pp, 1)
        return {name: float(np.asarray(value).reshape(-1)[0]) for name, value in found.items()}

    def row_bytes(self, columns: float, *, growing: bool = False) -> float:
        """Return the bytes of one text in all layers. growing: only of caches that grow in steps."""
        return sum(
            kind.row_bytes(min(columns, kind.window or columns), self.plan.tp, self.width)
            for kind in self.kinds
            if not growing or (kind.width and not kind.window)
        )

    def attention_s(self, texts: Texts, rows: int) -> float:
        """Return the average time (s) of attention for one token of each row: keys, values and states are read."""
        shape, plan, tables = self.job.shape, self.plan, self.tables
        ends = texts.prompt + np.arange(1, max(2, texts.new))
        total = shape.layers * tables.launch_s
        for kind in self.kinds:
            columns = float(np.minimum(ends, kind.window or ends).mean())
            moved = rows * kind.row_bytes(columns, plan.tp, self.width)
            if kind.heads or not kind.width:  # a state is read and written
                passes = _WINDOW_PASSES if kind.window else 1.0 if kind.width else 2.0
                total += float(bytes_s(tables, moved * passes))
                continue
            wide = math.ceil(shape.heads / plan.tp) * 2 * shape.head_dim
            turned = math.ceil(shape.heads / plan.tp) * shape.rope_dim
            expanded = rows * columns * (wide + turned) * self.width * kind.layers
            rate = share_of(self.job, self.columns(self.job, rows), tables).rate
            product = gemm_s(tables, rows * columns, wide, shape.kv_rank, 1.0, rate)
            total += float(bytes_s(tables, moved + _LATENT_PASSES * expanded)) + kind.layers * float(product[0])
        return total

    def memory(self, texts: Texts, rows: int, group: int, size: int) -> dict[str, float]:
        """Return the bytes by class.

        Args:
            texts, rows: the texts, and how many a data rank generates at once.
            group: prompts in one forward.
            size: columns that growing caches allocate at the end.
        """
        shape, plan, tables, width, held = self.job.shape, self.plan, self.tables, self.width, self.held
        columns = self.columns(self.job, rows)
        # A window keeps the memory of a whole prompt until the next token or join.
        start, end = texts.prompt if rows == group else 0, texts.prompt + texts.new - 1
        cache = sum(
            rows * kind.row_bytes(max(start, min(end, kind.window)) if kind.window else size, plan.tp, width)
            for kind in self.kinds
        )
        ffn = shape.ffn or shape.dense_layer_params / (3 * shape.hidden)  # of a traced model, by its parameters
        wide = max(ffn, shape.top_k * shape.expert_ffn + shape.shared_ffn, 4 * shape.heads * shape.head_dim / 3)
        activations = group * texts.prompt * (shape.hidden * (4 * width + 8) + 3 * wide / plan.tp * width)
        unit = (held.dense + held.experts) / max(1.0, self.layers)
        found = {
            "parameters": float(divided(columns, held, 3)[0]) * width,
            "cache": cache * (self.layers + 1) / shape.layers,  # a layer's cache is copied when it grows
            "activations": activations,
            "logits": rows * shape.vocab * (width + _SAMPLING_PEAK),
            "buffers": float(width * (unit + np.maximum(unit, held.ends))[0]) if plan.zero == 3 else 0.0,
            "communicators": float(axis_groups(self.job, columns, True)[0]) * tables.communicator_gib * 2**30,
            "context": tables.context_gib * 2**30,
        }
        found["reserve"] = (found["activations"] + found["logits"] + found["buffers"]) * (tables.reserve - 1)
        return found


def _touched(shape: Shape, plan: Plan, tokens: int) -> Shape:
    """Return the shape with only as many experts as some token uses on average, since others are not read."""
    if not shape.moe_layers or isinstance(shape, TracedShape):
        return shape
    routed = max(1.0, tokens * plan.ep / plan.tp) * shape.top_k
    used = shape.num_experts * (1.0 - (1.0 - 1.0 / shape.num_experts) ** routed)
    return replace(shape, num_experts=max(shape.top_k, plan.ep, round(used)))
