"""Decode pictures and sound ahead of use, in processes beside the rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["Decodable", "DecodePool", "DecodedAhead", "Key", "usual_workers"]

if TYPE_CHECKING:
    from weft.data.media.decoding.decode_pool import DecodePool, Key
    from weft.data.media.decoding.decode_worker import Decodable
    from weft.data.media.decoding.decoded_ahead import DecodedAhead, usual_workers

__getattr__ = loads(
    __name__,
    {
        "Decodable": ".decode_worker",
        "DecodePool": ".decode_pool",
        "DecodedAhead": ".decoded_ahead",
        "Key": ".decode_pool",
        "usual_workers": ".decoded_ahead",
    },
)
