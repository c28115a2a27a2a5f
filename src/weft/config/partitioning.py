"""Partitioning: chunk sizes, layers to stages, samples to microbatches, sequences to ranks.

The runtime and the planner both use these functions.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, overload

from weft.config.fields.layout import common_divisors

#: Bytes of fp32 master weights per bucket under ZeRO 0 to 2 on CPUs: large enough to amortize a collective's latency,
#: small enough for several to be in flight.
_BUCKET_BYTES = 16 * 2**20
#: The same on GPUs, whose links need some MiB per rank to reach half their rate, and whose hosts launch each
#: collective.
_GPU_BUCKET_BYTES = 128 * 2**20
#: Number of buckets that are reduced concurrently.
BUCKETS_UNDER_WAY = 3


#: Number of logits, in the accumulation dtype, that a chunk of the head's loss may have: on a CPU, and at most on a
#: GPU.
_LOSS_CHUNK, _MOST_LOSS_CHUNK = 2**26, 2**30
#: Logits use at most 1 / this share of a GPU's memory.
_LOSS_SHARE = 64


def bucket_bytes(device: str) -> int:
    """Return the bytes of fp32 master weights in a bucket.

    device: type of the device, such as "cpu". On accelerators the first bucket of a backward is smaller.
    """
    return _BUCKET_BYTES if device in ("cpu", "meta") else _GPU_BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class LossChunk:
    """Size of the chunks in which a head computes its loss.

    num_bytes: bytes of logits per chunk, in the accumulation dtype.
    """

    num_bytes: int = _LOSS_CHUNK

    @classmethod
    def of_device(cls, device_bytes: int = 0) -> LossChunk:
        """Return the chunk size for a GPU with this much memory, or for a CPU (0), whose caches should hold the logits.

        A GPU needs large matmuls, because each chunk reads and writes the gradient of the weight. The result is a power
        of two, so that sizes reported by vendors and drivers give the same result.
        """
        if not device_bytes:
            return cls(_LOSS_CHUNK)
        share = 1 << (device_bytes // _LOSS_SHARE).bit_length() - 1
        return cls(min(_MOST_LOSS_CHUNK, max(_LOSS_CHUNK, share)))

    def rows(self, tokens: Any, vocab: Any, sum_bytes: Any) -> Any:
        """Return the number of tokens per chunk, for as few equal chunks as possible. The last one may be smaller.

        Args:
            tokens: tokens of one microbatch on a rank; arrays are accepted and give an array.
            vocab: vocabulary entries on a rank.
            sum_bytes: bytes of one logit in the accumulation dtype.
        """
        most = self.num_bytes // (vocab * sum_bytes)
        most = most + (most < 1)
        num_chunks = -(-tokens // most)
        num_chunks = num_chunks + (num_chunks < 1)
        return -(-tokens // num_chunks)


# Layers to stages, and samples to microbatches.


def batch_unit(data_ranks: int, num_microbatches: int) -> int:
    """Return the number of samples that must divide a global batch: one for each microbatch of each rank."""
    return data_ranks * num_microbatches


@overload
def samples_per_microbatch(global_batch: int, data_ranks: int, num_microbatches: int) -> int: ...
@overload
def samples_per_microbatch(global_batch: int, data_ranks: Any, num_microbatches: Any) -> Any: ...
def samples_per_microbatch(global_batch: int, data_ranks: Any, num_microbatches: Any) -> Any:
    """Return the number of samples in one microbatch of one rank, rounded down.

    Args:
        global_batch: samples of an optimizer step.
        data_ranks, num_microbatches: ranks with different samples, and microbatches per rank; arrays give an array.
    """
    return global_batch // batch_unit(data_ranks, num_microbatches)


def even_passes(global_batch: int, data_ranks: int) -> list[int]:
    """Return the numbers of microbatches that divide the samples of each rank evenly; may be empty."""
    return [] if global_batch % data_ranks else common_divisors(global_batch // data_ranks)


def share_out(count: int, num_parts: int) -> list[range]:
    """Divide 0 ... count - 1 into consecutive ranges. The first ranges may be longer by one. Ranges may be empty."""
    size, rest = divmod(count, num_parts)
    starts = [part * size + min(part, rest) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def microbatch_samples(
    global_batch: int, data_ranks: int, num_microbatches: int, rank: int, weights: Sequence[int] = ()
) -> list[range]:
    """Return the samples of each microbatch of a rank, as indices in the global batch.

    The batch is distributed in order: the first microbatch of every rank, then the second of every rank, and so on.
    Without weights, ranks differ by at most one sample. A rank's microbatches differ by at most one sample. The last
    ones may be empty.

    Args:
        global_batch: samples of an optimizer step.
        data_ranks, num_microbatches: ranks with different samples, and microbatches per rank.
        rank: index of the rank among the data ranks.
        weights: the plan's `shares`, one per data rank; () for equal parts.
    """
    if not weights:
        return share_out(global_batch, batch_unit(data_ranks, num_microbatches))[rank::data_ranks]
    return list(_unequal_samples(global_batch, tuple(weights), num_microbatches, rank))


@functools.lru_cache(maxsize=64)
def _unequal_samples(global_batch: int, weights: tuple[int, ...], num_microbatches: int, rank: int) -> list[range]:
    counts = largest_remainder(global_batch, weights)
    found: list[range] = []
    first = 0
    for index in range(num_microbatches):
        sizes = [count // num_microbatches + (index < count % num_microbatches) for count in counts]
        start = first + sum(sizes[:rank])
        found.append(range(start, start + sizes[rank]))
        first += sum(sizes)
    return found


def largest_remainder(count: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Divide `count` samples in proportion to the weights, in whole samples. The sum of the result is `count`.

    Every part is rounded down, and the parts with the largest remainders get one more. Among equal remainders, earlier
    parts do. Only integers are used, so every rank computes the same result.
    """
    total = sum(weights)
    parts = [divmod(count * weight, total) for weight in weights]
    sizes = [whole for whole, _ in parts]
    order = sorted(range(len(parts)), key=lambda index: (-parts[index][1], index))
    for index in order[: count - sum(sizes)]:
        sizes[index] += 1
    return tuple(sizes)


def fastest_shares(count: int, speeds: Sequence[float], least: int = 1) -> tuple[int, ...]:
    """Return the shares of `count` samples that minimize the time of the slowest rank, in lowest terms.

    Every sample goes to the rank that would finish it first, which is optimal. Equal shares are returned as ().

    Args:
        count: samples of an optimizer step.
        speeds: samples per second of each data rank.
        least: samples that every rank must have, at least 1.

    Raises:
        ValueError: if there are too few samples, or a speed is not positive.
    """
    if count < least * len(speeds) or least < 1 or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(f"{count} samples cannot be divided over {len(speeds)} ranks with speeds {speeds}")
    sizes = [least] * len(speeds)
    heap = [((least + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(heap)
    for _ in range(count - least * len(speeds)):
        _, rank = heap[0]
        sizes[rank] += 1
        heapq.heapreplace(heap, ((sizes[rank] + 1) / speeds[rank], rank))
    common = math.gcd(*sizes)
    found = tuple(size // common for size in sizes)
    return () if len(set(found)) == 1 else found


def nearest_shares(count: int, weights: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """Return the shares nearest to `weights` that give every rank at least `least` of `count` samples, as counts.

    Raises:
        ValueError: if there are too few samples.
    """
    if count < least * len(weights):
        raise ValueError(f"{count} samples are fewer than {least} for each of {len(weights)} ranks")
    sizes = list(largest_remainder(count, weights))
    for rank, size in enumerate(sizes):
        for _ in range(least - size):
            sizes[max(range(len(sizes)), key=sizes.__getitem__)] -= 1
            sizes[rank] += 1
    return tuple(sizes)


class ShareTimeline:
    """The shares of each step. They change between steps, and the changes are recorded.

    Attributes:
        changes: (first step, shares) in order of steps, counted from 0; shares () are equal parts.
    """

    def __init__(self, shares: Sequence[int] = ()):
        self.changes: list[tuple[int, tuple[int, ...]]] = [(0, tuple(shares))]

    def at(self, step: int) -> tuple[int, ...]:
        """Return the shares of a step."""
        return next(shares for first, shares in reversed(self.changes) if first <= max(0, step))

    def change(self, step: int, shares: Sequence[int]) -> None:
        """Use other shares from a step on. Later changes are dropped."""
        self.changes = [one for one in self.changes if one[0] < step] + [(max(0, step), tuple(shares))]


def divide_layers(
    costs: Sequence[float], num_stages: int, *, before: float = 0.0, after: float = 0.0
) -> tuple[int, ...]:
    """Return the number of layers per stage (at least one) that minimizes the cost of the most expensive stage.

    Among equally good divisions, later stages get more layers, because they hold fewer activations. Then layers move to
    a cheaper neighboring stage while this balances the two.

    Args:
        costs: cost of each layer, in any unit.
        num_stages: number of stages of the full pipeline.
        before: additional cost of the first stage (the embedding).
        after: additional cost of the last stage (norm, head, loss).

    Raises:
        ValueError: if there are fewer layers than stages.
    """
    return _divided(tuple(costs), num_stages, before, after)


@functools.lru_cache(maxsize=256)
def _divided(costs: tuple[float, ...], num_stages: int, before: float, after: float) -> tuple[int, ...]:
    """Compute `divide_layers`, cached because a search repeats the same divisions."""
    num_layers = len(costs)
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers are fewer than {num_stages} stages")
    sums = [0.0, *accumulate(costs)]
    # least[n]: the smallest possible cost of the most expensive stage when the stages so far hold the first n layers.
    least = [0.0] + [float("inf")] * num_layers
    cuts: list[list[int]] = []
    for stage in range(num_stages):
        extra = (before if stage == 0 else 0.0) + (after if stage == num_stages - 1 else 0.0)
        following, cut = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(stage + 1, num_layers - (num_stages - stage - 1) + 1):
            for start in range(stage, end):
                if least[start] >= following[end]:
                    break  # more layers in earlier stages never lower the cost
                cost = max(least[start], sums[end] - sums[start] + extra)
                if cost < following[end] * (1 - 1e-12):
                    following[end], cut[end] = cost, start
        cuts.append(cut)
        least = following
    counts: list[int] = []
    end = num_layers
    for cut in reversed(cuts):
        counts.append(end - cut[end])
        end = cut[end]
    return _evened(tuple(reversed(counts)), costs, least[num_layers], before, after)


def _evened(
    counts: tuple[int, ...], costs: Sequence[float], limit: float, before: float, after: float
) -> tuple[int, ...]:
    """Move layers to a cheaper neighboring stage while that balances the two, without exceeding the limit."""
    ends = list(accumulate(counts))
    stages = len(counts)

    def cost(stage: int) -> float:
        start = ends[stage - 1] if stage else 0
        extra = (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)
        return sum(costs[start : ends[stage]]) + extra

    for _ in range(stages * len(costs)):
        moved = False
        for stage in range(stages - 1):
            left, right = cost(stage), cost(stage + 1)
            for step, giver in ((-1, left), (1, right)):
                layer = costs[ends[stage] - 1] if step < 0 else costs[min(ends[stage], len(costs) - 1)]
                size = ends[stage] - (ends[stage - 1] if stage else 0) if step < 0 else ends[stage + 1] - ends[stage]
                taker = right if step < 0 else left
                if size > 1 and taker + layer < giver and taker + layer <= limit * (1 + 1e-12):
                    ends[stage] += step
                    moved = True
                    break
        if not moved:
            break
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def divide_by_rank(
    num_layers: int, stages: Sequence[Sequence[int]], *, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """Return the number of identical layers per stage that minimizes the load of the busiest rank.

    A rank may hold several stages.

    The bound on the load is found by bisection, and ranks are filled up to it (the classic linear partition). Stages
    are counted from the embedding. Every stage holds at least one layer if there are enough.

    Args:
        num_layers: number of layers of the full model.
        stages: indices of the stages of each rank.
        first: additional load of the first stage, in units of a layer's time.
        last: additional load of the last stage, in units of a layer's time.
    """
    num_stages = sum(map(len, stages))
    owner = {stage: rank for rank, own in enumerate(stages) for stage in own}
    extra = [0.0] * len(stages)
    extra[owner[0]] += first
    extra[owner[num_stages - 1]] += last
    most = _layers_by_rank(num_layers, [len(own) for own in stages], extra)
    found = [0] * num_stages
    for rank, own in enumerate(stages):
        # Stages next to the embedding and the head give up layers first.
        order = sorted(own, key=lambda stage: (first if stage == 0 else 0) + (last if stage == num_stages - 1 else 0))
        for index in range(most[rank]):
            found[order[index % len(order)]] += 1
    return found


def _layers_by_rank(num_layers: int, num_stages: Sequence[int], extra: Sequence[float]) -> list[int]:
    """Return the number of layers per rank that minimizes the time of the slowest rank."""

    def room(bound: float) -> list[int]:
        return [max(count, math.floor(bound - more + 1e-9)) for count, more in zip(num_stages, extra, strict=True)]

    low, high = 0.0, num_layers + max(extra) + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(room(middle)) >= num_layers else (middle, high)
    found = room(high)
    surplus = sum(found) - num_layers
    while surplus > 0:  # late ranks hold the fewest activations, so the last of equals gives
        able = [rank for rank, count in enumerate(found) if count > num_stages[rank]]
        if not able:
            break
        rank = max(able, key=lambda rank: (found[rank] + extra[rank], rank))
        found[rank] -= 1
        surplus -= 1
    return found


# Context parallelism as arithmetic: the mode for a shape, and the chunks of a sequence on each rank.

#: Values in a plan; "auto" selects one of the others by the shape.
CP_MODES = ("auto", "gather", "ring", "ulysses")
#: The modes that a search tries. The first is never omitted.
CP_WAYS = ("ring", "gather", "ulysses")
#: From this many tokens per rank, the attention of one ring step takes longer than its message (at 8 query heads per
#: key-value head and a link with 1 byte per 2,500 FLOP), and the gathered keys of all ranks become large.
RING_TOKENS = 4096


def ulysses_fits(cp: int, num_heads: int, num_kv_heads: int, tp: int = 1) -> bool:
    """Return True if the heads of one tensor-parallel rank can be divided over cp ranks.

    The number of query heads must be divisible. Key-value heads are divided too, or repeated on several ranks if there
    are fewer heads than ranks.

    Args:
        cp, tp: ranks that share a sequence, and those that share the heads.
        num_heads, num_kv_heads: query and key-value heads of the full model.
    """
    heads, kv_heads = num_heads // tp, max(1, num_kv_heads // tp)
    return num_heads % (cp * tp) == 0 and heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)


def choose_cp_mode(mode: str, cp: int, num_heads: int, num_kv_heads: int, seq_len: int, tp: int = 1) -> str:
    """Return the context-parallel mode of a plan. "auto" selects a mode by the shape, and gather for cp=1.

    "auto" selects Ulysses if it sends no more than the others: each rank sends its queries, keys, values and outputs
    once, while gather and ring receive every other rank's keys and values. Otherwise it selects ring for at least
    RING_TOKENS tokens per rank, and gather, which has fewer calls, below that. Only Ulysses supports sequence lengths
    that are not a multiple of 2 * cp.

    Args:
        mode: the plan's `cp_mode`.
        cp: ranks that share a sequence.
        num_heads: query heads of the full model.
        num_kv_heads: key-value heads of the full model.
        seq_len: tokens of a full sequence.
        tp: ranks that share the heads.
    """
    if mode != "auto" or cp == 1:
        return "gather" if mode == "auto" else mode
    heads, kv_heads = num_heads // tp, max(1, num_kv_heads // tp)
    if ulysses_fits(cp, num_heads, num_kv_heads, tp):
        sent_kv_heads = max(kv_heads, cp)
        if seq_len % (2 * cp) or 2 * heads + 2 * sent_kv_heads <= cp * 2 * kv_heads:
            return "ulysses"
    return "ring" if seq_len >= RING_TOKENS * cp else "gather"


def num_chunks(mode: str, cp: int) -> int:
    """Return the number of equal chunks of a sequence. The sequence length must be a multiple of it."""
    return cp if mode == "ulysses" else 2 * cp


def chunks_of(mode: str, cp: int, rank: int) -> tuple[int, ...]:
    """Return the indices of the chunks that a rank of cp holds, in sequence order.

    Args:
        mode: "gather", "ring" or "ulysses".
        cp, rank: size of the cp axis, and this rank's index on it.
    """
    return (rank,) if mode == "ulysses" else (rank, 2 * cp - 1 - rank)


def sent_bytes(mode: str, *, cp: int, tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int,
               sum_itemsize: int, backward: bool) -> int:  # fmt: skip
    """Return the bytes that one layer's attention communicates on one rank, in forward or backward.

    tokens: tokens of one rank, batch * sequence / cp. sum_itemsize: bytes per value of summed key and value gradients.
    The larger side of each collective is counted: an all_gather's output, a reduce_scatter's input. Forward: ring sends
    (cp - 1) messages of keys and values, gather all ranks' keys and values, and ulysses queries, keys, values and
    outputs. Backward: the same again, plus the gradients of keys and values (ring, gather).
    """
    kv = 2 * tokens * num_kv_heads * head_dim
    if mode == "ulysses":
        sent_kv_heads = num_kv_heads if num_kv_heads % cp == 0 else cp
        return tokens * head_dim * (2 * num_heads + 2 * sent_kv_heads) * itemsize
    messages = cp if mode == "gather" else cp - 1
    return messages * kv * (itemsize + (sum_itemsize if backward else 0))
