"""Samples as people read them: text, with trained and masked tokens told apart and the end token visible."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from weft.data.order.stream import IGNORED, Sample
from weft.data.tokens import Tokenizer

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class TextSegment:
    """Neighbouring tokens of one kind. trained: the model learns to write them; special: end, turn and other marks."""

    text: str
    trained: bool
    special: bool


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample for display. num_trained + num_masked tokens are shown; num_padding are not."""

    segments: tuple[TextSegment, ...]
    num_trained: int
    num_masked: int
    num_padding: int
    num_documents: int


def view_sample(sample: Sample, tokenizer: Tokenizer) -> SampleView:
    """Return what a sample looks like: its text in trained and masked segments, and their counts.

    A token counts as trained where it is the label of the token before it.
    """
    size = sample.num_inputs
    labels = sample.labels[:size]
    ids = sample.input_ids[:size].tolist()
    trained = [False, *(labels[:-1] != IGNORED).tolist()]
    # The last label is a token of its own: no input shows it.
    if labels[-1] != IGNORED:
        ids.append(int(labels[-1]))
        trained.append(True)
    num_trained = sum(trained)
    num_documents = int(sample.document_ids[size - 1]) + 1
    return SampleView(
        tuple(_segments(ids, trained, tokenizer)), num_trained, len(ids) - num_trained,
        sample.labels.size - size, num_documents,
    )  # fmt: skip


def visible(text: str) -> str:
    """Show control characters as escapes, so that data cannot steer the terminal; newlines and tabs stay."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text.replace("\r\n", "\n"))


def marked(view: SampleView) -> str:
    """Return the sample without colours: masked text stands in [[double brackets]]."""
    parts = []
    for trained, group in groupby(view.segments, key=lambda segment: segment.trained):
        text = "".join(visible(segment.text) for segment in group)
        parts.append(text if trained else f"[[{text}]]")
    return "".join(parts)


def _segments(ids: list[int], trained: list[bool], tokenizer: Tokenizer) -> Iterator[TextSegment]:
    special = [tokenizer.is_special(token) for token in ids]
    for (is_trained, is_special), group in groupby(
        zip(ids, trained, special, strict=True), key=lambda entry: (entry[1], entry[2])
    ):
        text = tokenizer.decode([token for token, _, _ in group], specials=True)
        yield TextSegment(text, is_trained, is_special)
