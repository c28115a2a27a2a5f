"""The share of a source that is kept aside for evaluation, where the one that was asked for takes nothing.

A document is kept aside by a draw from its content, so that equal documents go to the same side. Of few documents a
small share may take none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.data.prepared.wanted import WantedSource
from weft.data.read import ALL_DRAWS
from weft.data.tokens import split_of

#: Fewer documents are all needed for training.
_FEWEST = 10
#: More of them cannot be without one that is kept aside, unless the share is tiny or they are all alike.
_LOOK_AT_DOCUMENTS = 4096
_LOOK_AT_CHARS = 16 * 2**20


@dataclass(slots=True)
class _Look:
    """What the first documents of a source are. draws: draw -> documents; is_all: whether that was the whole source."""

    num_kept: int = 0
    num_trained: int = 0
    draws: Counter[int] = field(default_factory=Counter)
    is_all: bool = True

    @property
    def num_documents(self) -> int:
        return self.num_kept + self.num_trained


def settle_holdout(wanted: Sequence[WantedSource]) -> tuple[list[WantedSource], list[str]]:
    """The sources with the share that is kept aside, and what to tell of it.

    The share stays as it was asked for where it takes a part of the documents. Where it takes none of ten or more, it
    becomes as many with the smallest draws as were asked for, at least one; where documents are fewer or all alike,
    nothing.
    """
    looks = [_look(source) for source in wanted]
    has_kept = any(look.num_kept and look.num_trained for look in looks)
    settled, notes = [], []
    for source, look in zip(wanted, looks, strict=True):
        share, note = (source.limits.holdout, "") if has_kept else _share(source, look)
        if look.is_all and look.num_kept and not look.num_trained and source.limits.holdout < 0.5:
            share = 0.0  # one small source among others, whose only document drew a low number
        settled.append(replace(source, limits=replace(source.limits, holdout=share)))
        notes += [f"evaluation: {note}"] if note else []
    return settled, notes


def _look(source: WantedSource) -> _Look:
    look, num_chars = _Look(), 0
    for document in source.documents():
        num_chars += len(document.text or "") + sum(len(turn.content) for turn in document.turns or ())
        num_chars += document.ids.size if document.ids is not None else 0
        if document.part and source.files.format != "text":
            continue  # more of a very long record; pieces of a text file are drawn one by one
        if split_of(document, source.limits.holdout) == "eval":
            look.num_kept += 1
        else:
            look.num_trained += 1
        look.draws[document.draw] += 1
        is_enough = look.num_kept and look.num_trained
        if is_enough or look.num_documents >= _LOOK_AT_DOCUMENTS or num_chars > _LOOK_AT_CHARS:
            look.is_all = False
            break
    return look


def _share(source: WantedSource, look: _Look) -> tuple[float, str]:
    asked, number = source.limits.holdout, look.num_documents
    if not look.is_all or number == 0 or (look.num_kept and asked >= 0.5):
        return asked, ""
    path, highest, kept = source.files.path, 0, 0
    for highest in sorted(look.draws):
        kept += look.draws[highest]
        if kept >= asked * number:
            break
    if number > 1 and len(look.draws) == 1:
        return 0.0, f"none; the {source.counted(number)} of {path} are all the same, so none can be held out as a test"
    if number < _FEWEST:
        return 0.0, f"none; {path} is {source.counted(number)}, too few to hold one out (data.eval=FILE gives others)"
    if kept > max(number // 4, 2 * asked * number):
        return 0.0, f"none; {kept} of the {source.counted(number)} of {path} are the same (data.eval=FILE gives others)"
    are = "one is" if kept == 1 else f"{kept} are"
    return (highest + 1) / ALL_DRAWS, (
        f"data.holdout={asked:g} takes none of the {source.counted(number)} of {path}, so {are} kept aside"
    )
