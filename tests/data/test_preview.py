from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.stored import Stored
from weft.data.order.loader import marked, view_sample, visible
from weft.data.order.stream import SampleStream
from weft.data.text.tokenizer import Tokenizer, save_bytes_tokenizer
from weft.data.token_files import SplitWriter


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return save_bytes_tokenizer(tmp_path / "t")


def stream(tmp_path: Path, tokenizer: Tokenizer, documents: list[tuple[str, str]], **options: object) -> SampleStream:
    """documents: (text, mask) with one letter of mask per byte, "x" for trained."""
    writer = SplitWriter(tmp_path / "train", vocab_size=tokenizer.vocab_size, with_mask=True)
    for text, mask in documents:
        ids = [*tokenizer.encode(text), tokenizer.end_id]
        writer.append(np.array(ids), np.array([letter == "x" for letter in mask]))
        writer.end_document()
    stored = Stored("s", tmp_path / "train", writer.close(), pad_id=tokenizer.pad_id)
    settings = {"seq_len": 16, "packing": "fit", "borders": True, **options}
    return SampleStream([stored], seed=0, shuffle=False, **settings)  # type: ignore[arg-type]


def test_trained_and_masked_text_are_marked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = stream(tmp_path, tokenizer, [("ask:answer", "----xxxxxxx"), ("xy", "xxx")])
    view = view_sample(made.sample(0), tokenizer)
    assert marked(view) == "[[ask:]]answer<|endoftext|>[[x]]y<|endoftext|>"
    assert (view.num_trained, view.num_masked, view.num_padding, view.num_documents) == (9, 5, 2, 2)
    assert [segment.text for segment in view.segments if segment.special] == ["<|endoftext|>"] * 2


def test_label_after_the_last_input_is_shown(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = stream(tmp_path, tokenizer, [("a" * 16, "x" * 17)])
    view = view_sample(made.sample(0), tokenizer)
    assert marked(view) == "[[a]]" + "a" * 15 + "<|endoftext|>"
    assert (view.num_trained, view.num_masked, view.num_padding) == (16, 1, 0)


def test_data_cannot_send_terminal_escapes() -> None:
    assert visible("a\x1b[31mb\r\nc\rd\te\x9b\u202e") == "a\\x1b[31mb\nc\\x0dd\te\\x9b\\x202e"
