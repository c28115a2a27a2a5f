"""Documents to token ids: plain text, and conversations with a mask of what is trained.

Where the tokenizer has no chat template of its own, conversations have the ChatML form: a turn is
`<|im_start|>role\\n` content `<|im_end|>\\n`. Trained: an assistant's content and the
<|im_end|> after it, with the weight of the turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from weft.data.read import Document
from weft.data.tokens.chat_template import RefusedConversation
from weft.data.tokens.tokenizer import Tokenizer
from weft.errors import DataError

#: Longer texts are encoded in pieces, so that memory stays bounded and all cores have work.
_PIECE_CHARS = 2**16
_GROUP_CHARS = 2**20


#: Ids and weights of a document, or why the chat template does not render it.
Encoded = tuple[np.ndarray, np.ndarray | None] | RefusedConversation


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> list[Encoded]:
    """(ids, weights) of each document, without its end token; weights are bool or float32, None where every one is 1.

    A conversation that the chat template refuses has its RefusedConversation instead.

    Raises:
        DataError: if messages call tools and there is no chat template, or if the template cannot be used at all.
    """
    texts: list[str] = []
    spans: list[list[int]] = []
    for document in documents:
        span = []
        for text in _texts(document, tokenizer):
            pieces = split_text(text)
            texts.extend(pieces)
            span.append(len(pieces))
        spans.append(span)
    encoded = _encoded(texts, tokenizer)
    return [_assemble(document, [_join([next(encoded) for _ in range(n)]) for n in span], tokenizer)
            for document, span in zip(documents, spans, strict=True)]  # fmt: skip


def _encoded(texts: list[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Encode some texts at a time: the library's result takes a hundred bytes and more per token."""
    group: list[str] = []
    num_chars = 0
    for text in texts:
        group.append(text)
        num_chars += len(text)
        if num_chars >= _GROUP_CHARS:
            yield from tokenizer.encode_batch(group)
            group, num_chars = [], 0
    if group:
        yield from tokenizer.encode_batch(group)


def split_text(text: str) -> list[str]:
    """The text in pieces of bounded length that join to it, cut after a newline or before a space if there is one."""
    return list(cut_text(text, _PIECE_CHARS))


def cut_text(text: str, max_chars: int) -> Iterator[str]:
    """The same one after the other, for texts so long that a second copy matters."""
    start = 0
    while len(text) - start > max_chars:
        half, end = start + max_chars // 2, start + max_chars
        cut = text.rfind("\n", half, end) + 1 or max(text.rfind(" ", half, end), 0) or end
        yield text[start:cut]
        start = cut
    yield text[start:]


def _texts(document: Document, tokenizer: Tokenizer) -> list[str]:
    if document.turns is not None and tokenizer.template is not None:
        return []
    if document.turns is None:
        return [text for text in (document.prompt, document.text) if text is not None]
    if document.tools or any("tool_call" in turn.more for turn in document.turns):
        raise DataError(
            f"{document.place}: its messages call tools, which needs a chat template, and the tokenizer has none. "
            "Give model.path, or tokenizer.kind=file with tokenizer.template=true, of a model that calls tools."
        )
    return [part for turn in document.turns for part in (f"{turn.role}\n", turn.content, "\n")]


def _assemble(document: Document, parts: list[np.ndarray], tokenizer: Tokenizer) -> Encoded:
    if document.ids is not None:
        return document.ids, document.trained
    if document.prompt is not None:
        prompt, text = parts
        return np.concatenate(parts), np.repeat([False, True], [prompt.size, text.size])
    if document.turns is None:
        return parts[0], None
    if tokenizer.template is not None:
        try:
            return tokenizer.encode_turns(document.turns, document.tools)
        except RefusedConversation as refusal:
            return refusal
        except DataError as error:
            raise DataError(f"{document.place}: {error}") from error
    start = np.array([tokenizer.vocabulary.turn_start_id])
    end = np.array([tokenizer.vocabulary.turn_end_id])
    ids: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    for index, turn in enumerate(document.turns):
        header, content, newline = parts[3 * index : 3 * index + 3]
        ids += [start, header, content, end, newline]
        answer = np.full(content.size + 1, turn.weight if turn.role == "assistant" else 0.0, np.float32)
        trained += [np.zeros(1 + header.size, np.float32), answer, np.zeros(newline.size, np.float32)]
    return np.concatenate(ids), np.concatenate(trained)


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
