"""How much travels, or is computed, at a time: gradients in buckets, logits in chunks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Bytes of fp32 masters whose gradients and parameters travel together under ZeRO 0 to 2 on CPUs: large enough to
#: amortise a collective's latency, small enough that several are under way at once.
_BUCKET_BYTES = 16 * 2**20
#: On GPUs, whose links reach half their rate at some MiB for each rank, and whose hosts launch each collective.
_GPU_BUCKET_BYTES = 128 * 2**20
#: Buckets whose gradients are on their way at once.
BUCKETS_UNDER_WAY = 3


#: Logits, in the format of the sum, that the loss of a head holds at a time: on a CPU, and at most on a GPU.
_LOSS_CHUNK, _MOST_LOSS_CHUNK = 2**26, 2**30
#: A GPU gives logits this share of its memory at most.
_LOSS_SHARE = 64


def bucket_bytes(device: str) -> int:
    """Return the bytes of fp32 masters in a bucket.

    device: "cpu" or "cuda", where the first of a backward is smaller.
    """
    return _GPU_BUCKET_BYTES if device == "cuda" else _BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class LossChunk:
    """How many tokens the loss of a head takes at a time: num_bytes of logits, in the format of the sum."""

    num_bytes: int = _LOSS_CHUNK

    @classmethod
    def of_device(cls, device_bytes: int = 0) -> LossChunk:
        """Choose by the memory of a GPU in bytes; 0 for a CPU, which wants logits in its caches.

        A GPU wants large products: each chunk reads and writes the gradient of the weight. A power of two, so that what
        vendors and drivers say is one size.
        """
        if not device_bytes:
            return cls(_LOSS_CHUNK)
        share = 1 << (device_bytes // _LOSS_SHARE).bit_length() - 1
        return cls(min(_MOST_LOSS_CHUNK, max(_LOSS_CHUNK, share)))

    def rows(self, tokens: Any, vocab: Any, sum_bytes: Any) -> Any:
        """Return the number of tokens at a time: in equal chunks, as few as there can be; the last may be smaller.

        Args:
            tokens: of one microbatch on a rank. Arrays give an array.
            vocab: entries on a rank.
            sum_bytes: of one logit in the format of the sum.
        """
        most = self.num_bytes // (vocab * sum_bytes)
        most = most + (most < 1)
        num_chunks = -(-tokens // most)
        num_chunks = num_chunks + (num_chunks < 1)
        return -(-tokens // num_chunks)
