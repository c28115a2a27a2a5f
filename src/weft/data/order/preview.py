"""Samples as people read them: text, with trained and masked tokens told apart and the end token visible."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from weft.data.order.stream import IGNORED, Sample
from weft.data.tokens import Tokenizer

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class TextSegment:
    """Neighbouring tokens of one kind. trained: the model learns to write them; special: end, turn and other marks.

    weight: of trained tokens in the loss; below 0 the model learns not to write them. begins: another document does.
    """

    text: str
    trained: bool
    special: bool
    weight: float = 1.0
    begins: bool = False


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
    weights = (labels != IGNORED).astype(np.float32) if sample.weights is None else sample.weights[:size]
    shown = [0.0, *weights[:-1].tolist()]
    documents = sample.document_ids[:size].tolist()
    # The last label is a token of its own: no input shows it.
    if labels[-1] != IGNORED:
        ids.append(int(labels[-1]))
        shown.append(float(weights[-1]))
        documents.append(documents[-1])
    num_trained = sum(weight != 0 for weight in shown)
    return SampleView(
        tuple(_segments(ids, shown, documents, tokenizer)), num_trained, len(ids) - num_trained,
        sample.labels.size - size, documents[-1] + 1,
    )  # fmt: skip


def view_answer(ids: Sequence[int], weights: Sequence[float], tokenizer: Tokenizer) -> SampleView:
    """Return what one answer of a preference looks like, with its prompt.

    Args:
        ids: tokens of both.
        weights: of each; 0 is the prompt, and below 0 an answer that is not wanted.
        tokenizer: that made the ids.
    """
    num_trained = sum(weight != 0 for weight in weights)
    segments = tuple(_segments(list(ids), list(weights), [0] * len(ids), tokenizer))
    return SampleView(segments, num_trained, len(ids) - num_trained, 0, 1)


def visible(text: str) -> str:
    """Show control characters as escapes, so that data cannot steer the terminal; newlines and tabs stay."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text.replace("\r\n", "\n"))


def marked(view: SampleView) -> str:
    """Return the sample without colours: masked text in [[double brackets]], other weights than 1 before {braces}."""
    parts = []
    for weight, group in groupby(view.segments, key=lambda segment: segment.weight):
        text = "".join(visible(segment.text) for segment in group)
        parts.append(f"[[{text}]]" if not weight else text if weight == 1.0 else f"{weight:g}{{{text}}}")
    return "".join(parts)


def _segments(
    ids: list[int], weights: list[float], documents: list[int], tokenizer: Tokenizer
) -> Iterator[TextSegment]:
    special = [tokenizer.is_special(token) for token in ids]
    groups = [
        (*key, [entry[0] for entry in group])
        for key, group in groupby(zip(ids, weights, special, documents, strict=True), key=lambda entry: entry[1:])
    ]
    previous = documents[0] if documents else 0
    for document, own in groupby(groups, key=lambda group: group[2]):
        parts = list(own)
        texts = tokenizer.decode_parts([part for *_, part in parts])
        for (weight, is_special, _, _), text in zip(parts, texts, strict=True):
            yield TextSegment(text, weight != 0, is_special, weight, document != previous)
            previous = document
