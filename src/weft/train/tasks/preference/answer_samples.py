"""Stored preferences as samples: a pair of rows, or a row with a verdict, and batches of them.

R rows of a microbatch, T their length: the longest row's, rounded up. Rows of a pair are neighbours, the chosen first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from weft.data import PreparedSource
from weft.data.shards import SplitReader

#: Rows are as long as a multiple of this, so that few shapes come up.
_UNIT = 32
_IGNORED = -100


class StoredAnswers:
    """Documents of some sources, each one answer with the prompt before it."""

    def __init__(self, sources: Sequence[PreparedSource], seq_len: int):
        self._readers = [(SplitReader(source.folder, source.counts), source.counts.weight_table) for source in sources]
        self._ends = np.cumsum([source.num_documents for source in sources], dtype=np.int64)
        self._seq_len = seq_len
        self.pad_id = sources[0].pad_id if sources else 0

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a document up to its last trained token, and their weights, which are below 0 for unwanted answers."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        reader, table = self._readers[number]
        first = index - int(self._ends[number - 1]) if number else index
        start, end = (int(reader.offsets[first + more]) for more in (0, 1))
        ids, mask = reader.tokens(start, end - start), reader.trained(start, end - start)
        weights = np.ones(end - start, np.float32) if mask is None else table[mask]
        used = int(np.flatnonzero(weights)[-1]) + 1 if weights.any() else end - start
        return ids[:used].astype(np.int64), weights[:used]

    def row(self, ids: np.ndarray, trained: np.ndarray, leave_out: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of a row without its first tokens, at most the longest that is read.

        Args:
            ids: of a document.
            trained: bool, of the same.
            leave_out: so many of its first tokens.
        """
        ids, trained = ids[leave_out:], trained[leave_out:]
        labels = np.where(trained[1:], ids[1:], _IGNORED)
        return ids[:-1][: self._seq_len], labels[: self._seq_len]

    def too_long(self, ids: np.ndarray, weights: np.ndarray) -> tuple[int, int]:
        """How many tokens a document has too many, and how many of them its prompt can do without."""
        excess = max(0, ids.size - 1 - self._seq_len)
        prompt = int(np.flatnonzero(weights)[0]) if weights.any() else 0
        return excess, min(excess, max(0, prompt - 1))


class PairSamples:
    """Pairs by index: neighbours of the stored documents. reference: (N, 2), or None while nobody has computed it."""

    rows_each = 2

    def __init__(self, answers: StoredAnswers, reference: np.ndarray | None = None):
        self._answers, self.reference = answers, reference

    def __len__(self) -> int:
        return len(self._answers) // 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        both = [self._answers.tokens(2 * index + place) for place in (0, 1)]
        # The prompt of both begins at the same place.
        leave_out = max(self._answers.too_long(*one)[1] for one in both)
        leave_out = min(leave_out, *(max(0, int(np.argmax(weights != 0)) - 1) for _, weights in both))
        rows = [self._answers.row(ids, weights != 0, leave_out) for ids, weights in both]
        return {"rows": rows, **_known(self.reference, index)}


class VerdictSamples:
    """Answers by index, each with what is wanted of it, and a second row: its prompt with the answer to another one.

    The other is the next stored one's. From it kto estimates how far the model is from its reference.
    """

    rows_each = 2

    def __init__(self, answers: StoredAnswers, reference: np.ndarray | None = None):
        self._answers, self.reference = answers, reference

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids, weights = self._answers.tokens(index)
        other_ids, other_weights = self._answers.tokens(self._other(index, ids, weights))
        begins, other_begins = (int(np.argmax(one != 0)) for one in (weights, other_weights))
        mixed_ids = np.concatenate([ids[:begins], other_ids[other_begins:]])
        mixed = np.concatenate([weights[:begins], other_weights[other_begins:]])
        rows = [
            self._answers.row(one, trained != 0, self._answers.too_long(one, trained)[1])
            for one, trained in ((ids, weights), (mixed_ids, mixed))
        ]
        wanted = bool(weights.max(initial=0.0) > 0)
        return {"rows": rows[:1], "mixed": rows[1:], "wanted": wanted, **_known(self.reference, index)}

    def _other(self, index: int, ids: np.ndarray, weights: np.ndarray) -> int:
        """The next answer, or of a pair's answers the next pair's: one with another prompt, where there is any."""
        begins = int(np.argmax(weights != 0))
        for step in (1, 2):
            found = (index + step) % len(self)
            other_ids, other_weights = self._answers.tokens(found)
            if int(np.argmax(other_weights != 0)) != begins or not np.array_equal(other_ids[:begins], ids[:begins]):
                return found
        return (index + 1) % len(self)


class _Repeated(Sequence[Any]):
    """Samples read several times."""

    def __init__(self, samples: PairSamples | VerdictSamples, size: int):
        self._samples, self._size = samples, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return self._samples[index % len(self._samples)]


def whole_batches(samples: PairSamples | VerdictSamples, batch: int) -> Sequence[Any]:
    """Return a small set repeated until it fills whole batches, each sample as often as the others.

    Args:
        samples: at least one.
        batch: samples of a global batch.
    """
    return _Repeated(samples, math.lcm(len(samples), batch))


def _known(reference: np.ndarray | None, index: int) -> dict[str, Any]:
    return {} if reference is None else {"reference": reference[index]}


def collate_answers(samples: Sequence[dict[str, Any]], pad_id: int, longest: int) -> dict[str, Any]:
    """Make a batch: input_ids, labels and positions, int64 (R, T), and the answers' numbers of tokens, (R,).

    Of verdicts `wanted` is bool (R,), and `mixed` a batch of the second rows.

    Args:
        samples: of one kind.
        pad_id: fills up rows.
        longest: no row is longer.
    """
    batch = _rows([row for sample in samples for row in sample["rows"]], pad_id, longest)
    if "wanted" in samples[0]:
        batch["wanted"] = torch.tensor([sample["wanted"] for sample in samples])
        batch["mixed"] = _rows([row for sample in samples for row in sample["mixed"]], pad_id, longest)
    if "reference" in samples[0]:
        known = torch.from_numpy(np.stack([sample["reference"] for sample in samples]))  # (samples, 2)
        if "wanted" in samples[0]:
            batch["reference"], batch["mixed"]["reference"] = known[:, 0].contiguous(), known[:, 1].contiguous()
        else:
            batch["reference"] = known.reshape(-1)
    return batch


def _rows(rows: Sequence[tuple[np.ndarray, np.ndarray]], pad_id: int, longest: int) -> dict[str, Any]:
    length = max(1, *(ids.size for ids, _ in rows))
    length = max(length, min(longest, -(-length // _UNIT) * _UNIT))
    input_ids = np.full((len(rows), length), pad_id, np.int64)
    labels = np.full((len(rows), length), _IGNORED, np.int64)
    for number, (ids, wanted) in enumerate(rows):
        input_ids[number, : ids.size], labels[number, : ids.size] = ids, wanted
    tokens = (labels != _IGNORED).sum(1)
    positions = np.broadcast_to(np.arange(length), labels.shape).copy()
    arrays = {"input_ids": input_ids, "labels": labels, "positions": positions, "tokens": tokens}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
