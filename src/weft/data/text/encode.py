r"""Encode documents to token ids: texts, answers after a prompt, and conversations, with a mask of trained tokens.

The ids are those of the full text: a document is never split into parts that its tokenizer would encode as separate
texts. The text of a conversation is rendered by the tokenizer's chat template. Without a template it has the ChatML
form, in which a turn is `<|im_start|>role\n` content `<|im_end|>\n`. An assistant's content and the <|im_end|> after it
are trained, with the weight of the turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from weft.data.text.chat_template import RefusedConversation
from weft.data.text.codec import MarkedText
from weft.data.text.documents import Document
from weft.data.text.tokenizer import Tokenizer
from weft.errors import DataError

#: Ids and weights of a document, or the reason why the chat template does not render it.
Encoded = tuple[np.ndarray, np.ndarray | None] | RefusedConversation


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> list[Encoded]:
    """Return (ids, weights) of documents, with the tokens that begin a document and without its end token.

    Weights are bool or float32, or None if all are 1. For a conversation that the chat template refuses, the result is
    its RefusedConversation.

    Raises:
        DataError: if messages call tools and there is no chat template, or if the template cannot be used at all.
    """
    kinds = [_kind(document) for document in documents]
    by_kind = {kind: [one for one, own in zip(documents, kinds, strict=True) if own == kind] for kind in set(kinds)}
    results: dict[str, Iterator[Encoded]] = {
        "ids": iter([(one.ids, one.trained) for one in by_kind.get("ids", ()) if one.ids is not None]),
        "text": _texts(by_kind.get("text", ()), tokenizer),
        "answer": _answers(by_kind.get("answer", ()), tokenizer),
        "turns": _conversations(by_kind.get("turns", ()), tokenizer),
    }
    return [next(results[kind]) for kind in kinds]


def _kind(document: Document) -> str:
    if document.ids is not None:
        return "ids"
    if document.turns is not None:
        return "turns"
    return "text" if document.prompt is None else "answer"


def _texts(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, None]]:
    for ids in tokenizer.encode_batch([document.text or "" for document in documents]):
        yield np.concatenate([tokenizer.begin_ids, ids]), None


def _answers(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for ids, trained in tokenizer.encode_answers([(one.prompt or "", one.text or "") for one in documents]):
        yield _begun(tokenizer, ids, trained)


def _conversations(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    marked = [_marked(document, tokenizer) for document in documents]
    encoded = iter(tokenizer.encode_marked([one for one in marked if isinstance(one, MarkedText)]))
    for one in marked:
        if isinstance(one, RefusedConversation):
            yield one
            continue
        ids, weights = next(encoded)
        # A chat template writes the begin tokens.
        yield (ids, weights) if tokenizer.template is not None else _begun(tokenizer, ids, weights)


def _marked(document: Document, tokenizer: Tokenizer) -> MarkedText | RefusedConversation:
    assert document.turns is not None
    calls = document.tools or any("tool_call" in turn.more for turn in document.turns)
    if calls and tokenizer.template is None:
        raise DataError(
            f"{document.source}: its messages call tools, which needs a chat template, and the tokenizer has none. "
            "Give model.path, or tokenizer.kind=file with tokenizer.template=true, of a model that calls tools."
        )
    try:
        return tokenizer.marked_turns(document.turns, document.tools)
    except RefusedConversation as refusal:
        return refusal
    except DataError as error:
        raise DataError(f"{document.source}: {error}") from error


def _begun(tokenizer: Tokenizer, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    begin = tokenizer.begin_ids
    return np.concatenate([begin, ids]), np.concatenate([np.zeros(len(begin), weights.dtype), weights])
