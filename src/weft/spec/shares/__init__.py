"""Who gets what: layers to stages, samples to microbatches, chunks of a sequence to ranks, gradients to buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "BUCKETS_UNDER_WAY",
    "CP_MODES",
    "CP_WAYS",
    "LossChunk",
    "batch_unit",
    "bucket_bytes",
    "choose_cp_mode",
    "chunks_of",
    "divide_by_rank",
    "divide_layers",
    "even_passes",
    "microbatch_samples",
    "num_chunks",
    "samples_per_microbatch",
    "share_out",
    "ulysses_fits",
]

if TYPE_CHECKING:
    from weft.spec.shares.chunk_sizes import BUCKETS_UNDER_WAY, LossChunk, bucket_bytes
    from weft.spec.shares.division import (
        batch_unit,
        divide_by_rank,
        divide_layers,
        even_passes,
        microbatch_samples,
        samples_per_microbatch,
        share_out,
    )
    from weft.spec.shares.sequence_chunks import CP_MODES, CP_WAYS, choose_cp_mode, chunks_of, num_chunks, ulysses_fits

__getattr__ = loads(
    __name__,
    {
        "BUCKETS_UNDER_WAY": ".chunk_sizes",
        "CP_MODES": ".sequence_chunks",
        "CP_WAYS": ".sequence_chunks",
        "LossChunk": ".chunk_sizes",
        "batch_unit": ".division",
        "bucket_bytes": ".chunk_sizes",
        "choose_cp_mode": ".sequence_chunks",
        "chunks_of": ".sequence_chunks",
        "divide_by_rank": ".division",
        "divide_layers": ".division",
        "even_passes": ".division",
        "microbatch_samples": ".division",
        "share_out": ".division",
        "num_chunks": ".sequence_chunks",
        "samples_per_microbatch": ".division",
        "ulysses_fits": ".sequence_chunks",
    },
)
