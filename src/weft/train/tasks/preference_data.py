"""Objectives of preference training, as losses of pairs and answers.

Notation: c and r are log p(chosen) and log p(rejected) given the prompt, summed over the answer. c' and r' are the same
under the reference. n is the number of tokens, s the logistic function, b is beta.

    dpo     -log s(b ((c - c') - (r - r')))                       Rafailov et al. 2023, arXiv 2305.18290, eq. 7
            smoothing e: (1 - e) of it, and e of it with the sign flipped       Mitchell 2023 (conservative DPO)
    ipo     ((c - c') / n_c - (r - r') / n_r - 1 / (2 b))^2       Azar et al. 2023, arXiv 2310.12036, eq. 17, on means
    kto     w (1 - s(b (c - c' - z)))        of a wanted answer   Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8
            u (1 - s(b (z - (r - r'))))      of an unwanted answer; z = max(0, mean over the global batch of
            log p - log p' of mismatched answers: each prompt with the answer to another prompt), without a gradient
    orpo    -c / n_c - b log s(odds(c / n_c) - odds(r / n_r)),    Hong et al. 2024, arXiv 2403.07691, eq. 6 and 7
            with odds(x) = x - log(1 - exp x)
    simpo   -log s(b (c / n_c - r / n_r) - margin)                Meng et al. 2024, arXiv 2405.14734, eq. 6

Each pair counts once, whatever its length, and the mean is over all pairs of the global batch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.checkpoint.load import list_checkpoints
from weft.data.order.loader import marked, view_answer
from weft.data.store.prepared import PreparedData, PreparedSource
from weft.data.token_files import SplitReader
from weft.errors import DataError
from weft.parallel.layers.index_check import check_labels
from weft.parallel.tensor.language_head import HeadLogProbs
from weft.train.folder import RunFolder, free_name
from weft.train.tasks.decoder_loss import IGNORE
from weft.train.tasks.description import Forwards
from weft.train.tasks.indexed import sample_in_order

#: Default beta of each objective, as in its paper or in common use.
DEFAULT_BETAS = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
#: Objectives that compare with a reference.
WITH_REFERENCE = ("dpo", "ipo", "kto")


@dataclass(frozen=True, slots=True)
class Weighing:
    """Parameters of an objective; see the module docstring. wanted, unwanted: w and u of kto."""

    beta: float = 0.1
    smoothing: float = 0.0
    margin: float = 1.0
    wanted: float = 1.0
    unwanted: float = 1.0


@dataclass(frozen=True, slots=True)
class Answers:
    """One answer of each pair: policy log-probability, reference log-probability and number of tokens, (P,) each."""

    policy: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def gain(self) -> Tensor:
        """Log-ratio of the policy's probability to the reference's probability."""
        return self.policy - self.reference

    @property
    def mean(self) -> Tensor:
        """Mean log-probability per token."""
        return self.policy / self.tokens


def _dpo(chosen: Answers, rejected: Answers, weighing: Weighing) -> Tensor:
    logits = weighing.beta * (chosen.gain - rejected.gain)
    return -(1 - weighing.smoothing) * F.logsigmoid(logits) - weighing.smoothing * F.logsigmoid(-logits)


def _ipo(chosen: Answers, rejected: Answers, weighing: Weighing) -> Tensor:
    return (chosen.gain / chosen.tokens - rejected.gain / rejected.tokens - 0.5 / weighing.beta).square()


def _orpo(chosen: Answers, rejected: Answers, weighing: Weighing) -> Tensor:
    ratio = _log_odds(chosen.mean) - _log_odds(rejected.mean)
    return -chosen.mean - weighing.beta * F.logsigmoid(ratio)


def _simpo(chosen: Answers, rejected: Answers, weighing: Weighing) -> Tensor:
    return -F.logsigmoid(weighing.beta * (chosen.mean - rejected.mean) - weighing.margin)


#: (chosen, rejected, parameters) -> loss of each pair, (P,).
PAIR_LOSSES: dict[str, Callable[[Answers, Answers, Weighing], Tensor]] = {
    "dpo": _dpo, "ipo": _ipo, "orpo": _orpo, "simpo": _simpo,
}  # fmt: skip


def kto_losses(answers: Answers, is_wanted: Tensor, z: Tensor, weighing: Weighing) -> Tensor:
    """Return the loss of each answer, (P,).

    Args:
        answers: one answer per prompt.
        is_wanted: bool, (P,).
        z: mean of the global batch, as in the module docstring, 0-d.
        weighing: beta, and the weights of wanted and other answers.
    """
    logits = weighing.beta * (answers.gain - z)
    wanted = weighing.wanted * (1 - torch.sigmoid(logits))
    return wanted.where(is_wanted, weighing.unwanted * (1 - torch.sigmoid(-logits)))


def _log_odds(log_p: Tensor) -> Tensor:
    """Return log(p / (1 - p)) from log p. log p is clamped to -eps, so that the result is finite."""
    largest = -torch.finfo(log_p.dtype).eps
    log_p = log_p.clamp(max=largest)
    return log_p - torch.log(-torch.expm1(log_p))


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective with its parameters. name: dpo, ipo, kto, orpo or simpo."""

    name: str
    weighing: Weighing

    @classmethod
    def of(cls, name: str, beta: float, *others: float) -> Objective:
        """Return an objective.

        beta: 0 for its paper's value. others: the remaining fields of `Weighing` in order.
        """
        return cls(name, Weighing(*map(float, (beta or DEFAULT_BETAS[name], *others))))

    @property
    def is_kto(self) -> bool:
        """True if a sample is an answer with a label, not a pair."""
        return self.name == "kto"

    @property
    def compares(self) -> bool:
        """True if the objective uses a reference model."""
        return self.name in WITH_REFERENCE

    def answers(self, policy: Tensor, batch: Mapping[str, Any]) -> list[Answers]:
        """Return [chosen answers, rejected answers], or for kto [answers].

        policy: log-probabilities of the batch's rows, (R,); in pairs, chosen and rejected rows alternate. batch: has
        `tokens`, and `reference` if the objective uses a reference.
        """
        reference = batch["reference"].to(policy) if self.compares else torch.zeros_like(policy)
        tokens = batch["tokens"].to(policy).clamp(min=1)
        if self.is_kto:
            return [Answers(policy, reference, tokens)]
        return [Answers(policy[place::2], reference[place::2], tokens[place::2]) for place in (0, 1)]

    def losses(self, answers: Sequence[Answers], batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of each pair, or for kto of each answer, (P,).

        batch: for kto, has `wanted` and `z`.
        """
        if self.is_kto:
            return kto_losses(answers[0], batch["wanted"], batch["z"].to(answers[0].policy), self.weighing)
        return PAIR_LOSSES[self.name](answers[0], answers[1], self.weighing)

    def sums(self, answers: Sequence[Answers], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the sums of the rewards of better and of worse answers, and the numbers of these answers.

        "right" is the number of correctly ordered pairs, or for kto of correctly classified answers.
        """
        rewards = [self.weighing.beta * (one.gain if self.compares else one.mean) for one in answers]
        if self.is_kto:
            (reward,), wanted = rewards, batch["wanted"]
            right = ((reward > self.weighing.beta * batch["z"].to(reward)) == wanted).sum()
            better, worse, num = reward.where(wanted, 0.0).sum(), reward.where(~wanted, 0.0).sum(), wanted.sum()
            return {"right": right, "better": better, "worse": worse, "num_better": num, "num_worse": (~wanted).sum()}
        better, worse = rewards
        number = (better == better).sum()
        return {"right": (better > worse).sum(), "better": better.sum(), "worse": worse.sum(),
                "num_better": number, "num_worse": number}  # fmt: skip


# Stored preferences as samples (a pair of rows, or a row with a label), and batches of them.

#: Row lengths are rounded up to a multiple of this, so that few different shapes occur.
_UNIT = 32
_IGNORED = -100


class StoredAnswers:
    """Tokenised documents, each of which is a prompt with an answer."""

    def __init__(self, sources: Sequence[PreparedSource], seq_len: int):
        self._readers = [(SplitReader(source.folder, source.counts), source.counts.weight_table) for source in sources]
        self._ends = np.cumsum([source.num_documents for source in sources], dtype=np.int64)
        self._seq_len = seq_len
        self.pad_id = sources[0].pad_id if sources else 0

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids of a document up to the last token of the answer, and their weights.

        Unwanted answers have negative weights.
        """
        number = int(np.searchsorted(self._ends, index, side="right"))
        reader, table = self._readers[number]
        first = index - int(self._ends[number - 1]) if number else index
        start, end = (int(reader.offsets[first + more]) for more in (0, 1))
        ids, mask = reader.tokens(start, end - start), reader.trained(start, end - start)
        weights = np.ones(end - start, np.float32) if mask is None else table[mask]
        used = int(np.flatnonzero(weights)[-1]) + 1 if weights.any() else end - start
        return ids[:used].astype(np.int64), weights[:used]

    def row(self, ids: np.ndarray, trained: np.ndarray, leave_out: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and shifted labels of a document without its first tokens, truncated to seq_len.

        Labels outside the answer are -100.

        Args:
            ids: token ids of a document.
            trained: True for tokens of the answer, bool of the same length.
            leave_out: number of first tokens to drop.
        """
        ids, trained = ids[leave_out:], trained[leave_out:]
        labels = np.where(trained[1:], ids[1:], _IGNORED)
        return ids[:-1][: self._seq_len], labels[: self._seq_len]

    def too_long(self, ids: np.ndarray, weights: np.ndarray) -> tuple[int, int]:
        """Return by how many tokens a document exceeds seq_len, and how many of them can be dropped from its prompt."""
        excess = max(0, ids.size - 1 - self._seq_len)
        prompt = int(np.flatnonzero(weights)[0]) if weights.any() else 0
        return excess, min(excess, max(0, prompt - 1))


class PairSamples:
    """Pairs of adjacent stored documents, by index.

    reference: the reference's log-probabilities, (N, 2), or None until they are computed.
    """

    rows_each = 2

    def __init__(self, answers: StoredAnswers, reference: np.ndarray | None = None):
        self._answers, self.reference = answers, reference

    def __len__(self) -> int:
        return len(self._answers) // 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        both = [self._answers.tokens(2 * index + place) for place in (0, 1)]
        # Drop the same prompt tokens from both rows.
        leave_out = max(self._answers.too_long(*one)[1] for one in both)
        leave_out = min(leave_out, *(max(0, int(np.argmax(weights != 0)) - 1) for _, weights in both))
        rows = [self._answers.row(ids, weights != 0, leave_out) for ids, weights in both]
        return {"rows": rows, **_known(self.reference, index)}


class VerdictSamples:
    """Answers by index, each with its label, and a second row with its prompt and an answer to another prompt.

    From the second rows, kto estimates how far the model is from its reference.
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
        """Return the index of the first of the next two answers with a different prompt, or else the next index."""
        begins = int(np.argmax(weights != 0))
        for step in (1, 2):
            found = (index + step) % len(self)
            other_ids, other_weights = self._answers.tokens(found)
            if int(np.argmax(other_weights != 0)) != begins or not np.array_equal(other_ids[:begins], ids[:begins]):
                return found
        return (index + 1) % len(self)


class _Repeated(Sequence[Any]):
    def __init__(self, samples: PairSamples | VerdictSamples, size: int):
        self._samples, self._size = samples, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return self._samples[index % len(self._samples)]


class Preferences:
    """Stored preferences of a config as samples and batches.

    Args:
        data: tokenised preferences.
        seq_len: maximum tokens of a row.
        is_kto: True for answers with labels.
    """

    def __init__(self, data: PreparedData, seq_len: int, *, is_kto: bool):
        kind = VerdictSamples if is_kto else PairSamples
        self.train, self.eval = (kind(StoredAnswers(one, seq_len)) for one in (data.train, data.eval))
        self._data, self._seq_len = data, seq_len
        #: Identifies the data for which a stored reference is valid.
        self.key = f"{data.digest}/{seq_len}/{is_kto}"

    def samples(self, split: str, batch: int) -> Sequence[Any] | PairSamples | VerdictSamples:
        """Return the samples of a split.

        An evaluation set with fewer than `batch` samples is repeated up to a multiple of `batch`.
        """
        if split == "train":
            return self.train
        if not 0 < len(self.eval) < batch:
            return self.eval
        return _Repeated(self.eval, math.lcm(len(self.eval), batch))

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Make a batch; see `collate_answers`."""
        return collate_answers(samples, self._data.train[0].pad_id, self._seq_len)

    def lines(self, seed: int, place: int) -> list[str]:
        """Return the text of the answers at a position in training order, with the prompt in double brackets."""
        where, sample = sample_in_order(self.train, seed, place)
        lines = [where]
        for ids, labels in sample["rows"]:
            weights = [0.0, *(labels >= 0).astype(float).tolist()]
            # Add the last label, a token that is not in the inputs.
            whole = [*ids.tolist(), *labels[-1:][labels[-1:] >= 0].tolist()]
            lines += marked(view_answer(whole, weights[: len(whole)], self._data.tokenizer)).split("\n")
        return lines


def _known(reference: np.ndarray | None, index: int) -> dict[str, Any]:
    return {} if reference is None else {"reference": reference[index]}


def collate_answers(samples: Sequence[dict[str, Any]], pad_id: int, longest: int) -> dict[str, Any]:
    """Make a batch of input_ids, labels and positions, int64 (R, T), and the number of tokens of each answer, (R,).

    For kto, `wanted` is bool (R,), and `mixed` is a batch of the second rows. If the samples have log-probabilities of
    the reference, `reference` is (R,), also in `mixed`.

    Args:
        samples: samples of one kind.
        pad_id: padding id of rows.
        longest: maximum length of a row.
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


# Log-probabilities of answers. The reference's values are computed once and stored in the run folder.

_FILE = "reference.safetensors"
#: Batches per call to a pipeline.
_AT_ONCE = 8


def row_log_probs(output: Any, batch: Any) -> torch.Tensor:
    """Return the log-probability of each row's labels, summed, (R,), fp64.

    Args:
        output: logits (R, T, V), or log-probabilities that the head computed instead.
        batch: has labels, (R, T), already shifted.
    """
    labels = batch["labels"]
    if isinstance(output, HeadLogProbs):
        return output.log_probs.sum(1, dtype=torch.float64)
    check_labels(labels, output.shape[-1], IGNORE)
    logits = output if output.dtype == torch.float64 else output.float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return -losses.view(labels.shape).sum(1, dtype=torch.float64)


def ready_reference(
    forwards: Forwards,
    folder: RunFolder,
    key: str,
    sets: Mapping[str, Any],
    collate: Callable[[list[Any]], Any],
    at_once: int,
) -> dict[str, np.ndarray]:
    """Return the reference's log-probabilities, fp64 (N, 2), of each set. All ranks call it.

    They are read from the run folder. If missing, they are computed with the current model without its adapter, and
    stored in the run folder.

    Args:
        forwards: runs the model before the first step.
        folder: run folder; the first rank reads and writes it.
        key: text that identifies the data.
        sets: samples by name.
        collate: makes a batch of samples.
        at_once: samples per batch.

    Raises:
        DataError: if a resumed run's file is missing or belongs to other data, because the model is no longer the
            reference.
    """
    path = folder.path / _FILE

    def state() -> str:
        if _key_of(path) == key:
            return "kept"
        return "lost" if list_checkpoints(folder.checkpoints) else "new"

    found = forwards.on_first(state)
    if found == "lost":
        raise DataError(
            f"{path}: the reference's log-probabilities of this run are not there, and the model has been trained "
            f"since. Bring the file back, or use {free_name(folder)} for a new run."
        )
    if found == "new":
        values = {name: _computed(forwards, samples, collate, at_once) for name, samples in sets.items()}
        forwards.on_first(lambda: _write(path, key, values))
        return values
    kept = forwards.on_first(lambda: {name: _read(path, name).tolist() for name in sets})
    return {name: np.array(rows, np.float64).reshape(-1, 2) for name, rows in kept.items()}


def _computed(forwards: Forwards, samples: Any, collate: Callable[[list[Any]], Any], at_once: int) -> np.ndarray:
    """Compute the log-probabilities of all samples with the model without its adapter, (N, 2).

    Samples are distributed round-robin over data-parallel ranks, and padded so that all ranks run the same number of
    batches.
    """
    total, size = len(samples), forwards.data_size
    if not total:
        return np.zeros((0, 2))
    values = torch.zeros(total, 2, dtype=torch.float64)
    per_rank = -(-total // size)
    starts = range(0, per_rank, at_once)
    for first in range(0, len(starts), _AT_ONCE):
        runs = [
            [number * size + forwards.data_rank for number in range(start, min(start + at_once, per_rank))]
            for start in starts[first : first + _AT_ONCE]
        ]
        made = [collate([samples[index if index < total else 0] for index in run]) for run in runs]
        mixed = [batch["mixed"] for batch in made if "mixed" in batch]
        rows = forwards.rows(made, row_log_probs, of="base")
        if mixed:
            both = zip(rows, forwards.rows(mixed, row_log_probs, of="base"), strict=True)
            rows = [torch.stack(pair, 1) for pair in both]
        for run, found in zip(runs, rows, strict=True):
            for index, pair in zip(run, found.reshape(-1, 2).cpu(), strict=True):
                if index < total:
                    values[index] = pair
    return forwards.total(values).cpu().numpy()


def _key_of(path: Path) -> str | None:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return (file.metadata() or {}).get("key")
    except Exception:  # missing or damaged: the library raises its own errors
        return None


def _read(path: Path, name: str) -> np.ndarray:
    from safetensors.numpy import load_file

    return load_file(path)[name]


def _write(path: Path, key: str, values: Mapping[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    draft = path.with_name(f".{path.name}.{os.getpid()}")
    save_file({name: np.ascontiguousarray(one) for name, one in values.items()}, draft, metadata={"key": key})
    os.replace(draft, path)
