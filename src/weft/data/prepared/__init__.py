"""Training data in its stored form: made once, digested, reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "FirstPrompt",
    "PreparedData",
    "PreparedSource",
    "RowTable",
    "RowWriter",
    "cache_folder",
    "content_digests",
    "check_trainable",
    "first_prompt",
    "is_chat",
    "prepare_data",
    "ready_table",
    "stop_ids",
    "verify_data",
]

if TYPE_CHECKING:
    from weft.data.prepared.prepare import cache_folder, prepare_data
    from weft.data.prepared.prepared_data import PreparedData, PreparedSource, verify_data
    from weft.data.prepared.prompt_of_data import FirstPrompt, first_prompt, is_chat
    from weft.data.prepared.row_table import RowTable, RowWriter, ready_table
    from weft.data.prepared.trainable import check_trainable, stop_ids
    from weft.data.prepared.wanted import content_digests

__getattr__ = loads(
    __name__,
    {
        "FirstPrompt": ".prompt_of_data",
        "PreparedData": ".prepared_data",
        "PreparedSource": ".prepared_data",
        "RowTable": ".row_table",
        "RowWriter": ".row_table",
        "cache_folder": ".prepare",
        "content_digests": ".wanted",
        "check_trainable": ".trainable",
        "first_prompt": ".prompt_of_data",
        "is_chat": ".prompt_of_data",
        "prepare_data": ".prepare",
        "ready_table": ".row_table",
        "stop_ids": ".trainable",
        "verify_data": ".prepared_data",
    },
)
