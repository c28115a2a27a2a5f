"""Tokenizers, and text turned into tokens once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "DocumentStream",
    "FORMAT_VERSION",
    "SourceManifest",
    "QUARANTINE",
    "ReadLimits",
    "Report",
    "Tokenizer",
    "bounded",
    "find_tokenizer_file",
    "import_tokenizer",
    "piece_bytes",
    "save_bytes_tokenizer",
    "split_of",
    "tokenise_source",
    "too_many_broken",
    "train_bpe",
]

if TYPE_CHECKING:
    from weft.data.tokens.bpe import train_bpe
    from weft.data.tokens.limits import bounded
    from weft.data.tokens.tokenise import (
        FORMAT_VERSION,
        QUARANTINE,
        DocumentStream,
        ReadLimits,
        Report,
        SourceManifest,
        piece_bytes,
        split_of,
        tokenise_source,
        too_many_broken,
    )
    from weft.data.tokens.tokenizer import Tokenizer, find_tokenizer_file, import_tokenizer, save_bytes_tokenizer

__getattr__ = loads(
    __name__,
    {
        "DocumentStream": ".tokenise",
        "FORMAT_VERSION": ".tokenise",
        "SourceManifest": ".tokenise",
        "QUARANTINE": ".tokenise",
        "ReadLimits": ".tokenise",
        "Report": ".tokenise",
        "Tokenizer": ".tokenizer",
        "bounded": ".limits",
        "find_tokenizer_file": ".tokenizer",
        "import_tokenizer": ".tokenizer",
        "piece_bytes": ".tokenise",
        "save_bytes_tokenizer": ".tokenizer",
        "split_of": ".tokenise",
        "tokenise_source": ".tokenise",
        "too_many_broken": ".tokenise",
        "train_bpe": ".bpe",
    },
)
