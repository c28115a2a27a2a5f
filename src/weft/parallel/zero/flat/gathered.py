"""Whole tensors by name, from what the ranks of buckets hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weft.comm import all_gather
from weft.parallel.zero.flat.buckets import Bucket
from weft.parallel.zero.flat.reducer import Reducer, shard_of


def whole_weights(buckets: Sequence[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield unrounded weights, this rank's parts of cut parameters. A collective over the shard axes."""
    for bucket in buckets:
        flat = bucket.weights
        if bucket.is_mixed:
            shard = bucket.master
            flat = shard if bucket.num_shards == 1 else all_gather(shard.to(flat.device), bucket.over.shard)
        yield from ((slot.name, slot.of(flat)) for slot in bucket.slots)


def whole_gradients(reducer: Reducer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the sums, multiplied by what they are yet to be multiplied by. A collective over the shard axes."""
    for bucket in reducer.buckets:
        flat = shard_of(bucket) if bucket.num_shards == 1 else all_gather(shard_of(bucket), bucket.over.shard)
        flat = flat if reducer.factor == 1.0 else flat * reducer.factor
        yield from ((slot.name, slot.of(flat)) for slot in bucket.slots)


def gradient_tensors(buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    """Return the tensors that this rank's gradients lie in."""
    kept = [tensor for bucket in buckets for tensor in (bucket.grads, bucket.shard)]
    loose = [grad for bucket in buckets for _, grad in bucket.loose or ()]
    return [*(tensor for tensor in kept if tensor is not None), *loose]
