"""The first prompt of a run's data, for sample generations during training."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.data.store.prepared import PreparedData, PreparedSource
from weft.data.text.tokenizer import Tokenizer
from weft.data.text.turns import Turn
from weft.data.token_files import SplitReader
from weft.errors import DataError

_CHATS, _PREFERENCES = ("messages", "instruction"), ("preference", "feedback")
_MAX_TOKENS = 4096
#: Number of tokens of the text prompt that the model continues.
_FIRST_TOKENS = 12
_MARK = "\U0010fff4"


class FirstPrompt(NamedTuple):
    """Token ids of a prompt, and its text: the user's question, or the text to continue."""

    ids: list[int]
    words: str


def is_chat(data: PreparedData, tokenizer: Tokenizer) -> bool:
    """Return True if the documents of a run's first source are conversations and the tokenizer supports them.

    For preferences, this is so if the chat header of an answer occurs in the first document.
    """
    if not tokenizer.has_chat or not data.train:
        return False
    kind = data.train[0].kind
    if kind in _PREFERENCES:
        ids = _first_document(data)[0]
        header = tokenizer.encode_prompt([Turn("user", "?")])[-2:]
        return any((ids[at : at + len(header)] == header).all() for at in range(len(ids) - len(header) + 1))
    return kind in _CHATS


def first_prompt(data: PreparedData, tokenizer: Tokenizer) -> FirstPrompt:
    """Return the prompt of the first held-out document, or of the first document if none is held out.

    The prompt is the start of the document up to its first trained token. If there is no untrained start, it is the
    first 12 tokens, or half of a shorter document.

    Raises:
        DataError: if the stored tokens cannot be read.
    """
    ids, trained = _first_document(data)
    if trained is None or not trained.any() or trained[0]:
        taken = ids[: max(1, min(_FIRST_TOKENS, len(ids) // 2))].tolist()
        return FirstPrompt(taken, tokenizer.decode(taken))
    asked = ids[: int(np.flatnonzero(trained)[0])].tolist()
    if not is_chat(data, tokenizer):
        return FirstPrompt(asked, tokenizer.decode(asked))
    return FirstPrompt(asked, _question(tokenizer, asked))


def _first_document(data: PreparedData) -> tuple[np.ndarray, np.ndarray | None]:
    source: PreparedSource = next(one for one in (*data.eval, *data.train) if one.num_documents)
    try:
        reader = SplitReader(source.folder, source.counts)
        start, end = (int(one) for one in reader.offsets[:2])
        size = min(end - start, _MAX_TOKENS)
        return reader.tokens(start, size), reader.trained(start, size)
    except (OSError, ValueError) as error:
        raise DataError(f"{source.folder}: the stored tokens cannot be read ({error}).") from error


def _question(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of the last user turn of a prompt, or "" if the template's text around it is not found."""
    shown = tokenizer.decode(ids, specials=True)
    try:
        asked = tokenizer.decode(tokenizer.encode_prompt([Turn("user", _MARK)]), specials=True)
    except DataError:  # such as for a template that requires a system message
        return ""
    before, _, after = asked.partition(_MARK)
    names = [tokenizer.decode([token], specials=True) for token in set(ids) if tokenizer.is_special(token)]
    head, tail = before[max((before.rfind(name) for name in names), default=0) :], after.rstrip()
    end = shown.rfind(tail) if tail else len(shown)
    start = shown.rfind(head, 0, end) if head and end >= 0 else -1
    return shown[start + len(head) : end].strip() if start >= 0 else ""
