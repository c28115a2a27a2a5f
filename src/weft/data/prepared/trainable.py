"""Whether a run can learn what its data says, asked before the first step: answers, their ends, and what is cut off.

Only sources with a mask are looked at: of others every token is trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.data.prepared.prepared_data import PreparedData, PreparedSource
from weft.data.shards import SplitReader
from weft.data.tokens import Tokenizer
from weft.errors import DataError
from weft.spec.config import DataSection
from weft.units import counted

#: Of a larger source so many documents are looked at.
_MOST_DOCUMENTS = 200_000
#: Tokens that are looked at together.
_BLOCK_TOKENS = 2**22
_PREFERENCES = ("preference", "feedback")


@dataclass(slots=True)
class _Look:
    """What was found in the documents of a source. untrained: without a trained token. cut: of which a part is lost."""

    documents: int = 0
    untrained: int = 0
    cut: int = 0
    has_stop: bool = False


def check_trainable(data: PreparedData, section: DataSection, seq_len: int) -> PreparedData:
    """Return the data, with a line in its summary for each thing that is wrong where data.check=warn.

    Args:
        data: of the run.
        section: what is checked, and which shares are allowed.
        seq_len: tokens of a sequence.

    Raises:
        DataError: for the first thing that is wrong where data.check=refuse.
    """
    if section.check == "off":
        return data
    found = list(_problems(data, section, seq_len))
    if found and section.check == "refuse":
        raise DataError(f"{found[0]} Or set data.check=warn to train all the same.")
    return replace(data, summary=[*data.summary, *(f"warning: {one}" for one in found)])


def _problems(data: PreparedData, section: DataSection, seq_len: int) -> Iterator[str]:
    """One sentence for each thing that is wrong, and what to do."""
    masked = [(number, source) for number, source in enumerate(data.train) if source.counts.has_mask]
    if not masked:
        return
    tokenizer = data.tokenizer
    yield from _of_template(tokenizer, [source for _, source in masked])
    stops = stop_ids(tokenizer)
    looks = [(number, source, _look(source, stops, seq_len)) for number, source in masked]
    if len(masked) == len(data.train) and not any(look.has_stop for _, _, look in looks):
        names = ", ".join(tokenizer.decode([token], specials=True) for token in stops)
        yield (
            f"data.train: no answer ends with a trained stop token ({names}), so the model would never learn to stop. "
            "Use the model's own chat template, or end completions and masks with the stop token."
        )
    for number, source, look in looks:
        key, of = f"data.train.{number}.path={source.name}", f"{look.untrained} of {_documents(look)}"
        if look.untrained > section.max_untrained * look.documents:
            yield (
                f"{key}: {of} have no trained token, more than data.max_untrained={section.max_untrained:g} allows. "
                "Give them answers, leave them out, or set a larger data.max_untrained."
            )
        if look.cut > section.max_cut * look.documents:
            yield (
                f"{key}: train.seq_len={seq_len} cuts answers of {look.cut} of {_documents(look)}, more than "
                f"data.max_cut={section.max_cut:g} allows. Use a larger train.seq_len, or set a larger data.max_cut."
            )


def _documents(look: _Look) -> str:
    return counted(look.documents, "document")


def _of_template(tokenizer: Tokenizer, sources: Sequence[PreparedSource]) -> Iterator[str]:
    """Whether a chat template ends the assistant's turn with text that looks like a token and is none."""
    template = tokenizer.template
    if template is None or all(source.kind in ("completion", "ids") for source in sources):
        return
    try:
        after = template.after_answer()
    except DataError:
        return  # the template takes no such conversation; what it takes, the data has shown
    name = after.split()[0] if after.split() else ""
    if name.startswith(("<", "[")) and not template.begins_with_special(name):
        yield (
            f"tokenizer: its chat template ends the assistant's turn with {name!r}, which is no special token of the "
            "tokenizer, so generation cannot stop there. Add the token, or use the model's own template."
        )


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens at which generation stops: the ends of a document and of an assistant's turn."""
    found = {tokenizer.end_id, tokenizer.vocabulary.turn_end_id}
    if tokenizer.template is not None:
        with contextlib.suppress(DataError):  # the template takes no conversation of one question
            names = tokenizer.template.end_marks()
            special = filter(tokenizer.is_special, range(tokenizer.vocab_size))
            found |= {token for token in special if tokenizer.decode([token], specials=True) in names}
    return sorted(token for token in found if token >= 0)


def _look(source: PreparedSource, stops: Sequence[int], seq_len: int) -> _Look:
    reader, look = SplitReader(source.folder, source.counts), _Look()
    offsets = reader.offsets[: min(source.num_documents, _MOST_DOCUMENTS) + 1]
    first = 0
    while first < len(offsets) - 1:
        border = int(np.searchsorted(offsets, offsets[first] + _BLOCK_TOKENS, side="right")) - 1
        last = max(first + 1, border)
        start, size = int(offsets[first]), int(offsets[last] - offsets[first])
        mask = reader.trained(start, size)
        assert mask is not None
        trained = mask != 0
        _add(look, reader.tokens(start, size), trained, offsets[first : last + 1] - start, stops, seq_len, source)
        first = last
    return look


def _add(
    look: _Look,
    tokens: np.ndarray,
    trained: np.ndarray,
    offsets: np.ndarray,
    stops: Sequence[int],
    seq_len: int,
    source: PreparedSource,
) -> None:
    """Count the documents of a block. offsets: where they begin in it, and its end."""
    before = np.concatenate([[0], np.cumsum(trained)])
    each = before[offsets[1:]] - before[offsets[:-1]]
    look.documents += len(each)
    look.untrained += int((each == 0).sum())
    look.has_stop = look.has_stop or bool(np.isin(tokens[trained], stops).any())
    longer = np.flatnonzero(np.diff(offsets) - 1 > seq_len)
    if source.packing == "concat":
        return  # every document is cut somewhere, and goes on in the next sequence
    for place in longer[each[longer] > 0]:
        begin, end = int(offsets[place]), int(offsets[place + 1])
        where = np.flatnonzero(trained[begin:end])
        # Of preferences the prompt gives way; of other documents what is behind the first piece lacks its beginning.
        first = max(0, int(where[0]) - 1) if source.kind in _PREFERENCES else 0
        look.cut += int(where[-1]) - first > seq_len
