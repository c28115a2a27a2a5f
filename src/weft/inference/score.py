"""Log-likelihoods of tokens under a model that ranks share.

Rows of equal length are computed together and padded on the right, which changes nothing for a causal model. Spans with
the same first tokens share a row. Data ranks compute different batches.

B rows, T tokens of a row, R scored tokens of a batch, V entries of the vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.devices import access
from weft.errors import ModelError
from weft.inference.open_model import OpenedModel, open_model
from weft.models.inspect import layers
from weft.parallel.tensor.head import LossChunking
from weft.parallel.tensor.language_head import HeadLogProbs, expect_labels, find_head

#: Tokens of a batch with padding, on a CPU and on an accelerator.
CPU_TOKENS, BATCH_TOKENS = 1024, 16384
#: Largest logits of a batch in bytes, of a model that changes them after the head, so that they are not chunked.
_LOGITS_BYTES = 2**29
#: Largest differences of log-probabilities that rounding explains, by precision.
_ROUNDING = {"fp64": 1e-9, "fp32": 1e-3}


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Tokens to score: the last `num_scored` of `ids`, each given all ids before it."""

    ids: tuple[int, ...]
    num_scored: int


def windows_of(span: ScoredSpan, longest: int, stride: int) -> list[ScoredSpan]:
    """Divide a span into windows that a model with `longest` positions reads. Each token is scored once.

    The first window scores as many tokens as it can, and each further one `stride` tokens, which have the most context
    that fits.
    """
    found: list[ScoredSpan] = []
    at, end = len(span.ids) - span.num_scored, len(span.ids)
    step = max(stride, longest + 1 - at)
    while at < end:
        last = min(at + step, end)
        found.append(ScoredSpan(span.ids[max(0, last - 1 - longest) : last], last - at))
        at, step = last, stride
    return found


@dataclass(slots=True)
class _Row:
    """Input tokens, and spans in them: index of the span, position of its first label, and its labels."""

    ids: tuple[int, ...]
    scored: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list[tuple[int, int, tuple[int, ...]]])


def _rows_of(spans: Sequence[ScoredSpan]) -> list[_Row]:
    """Return rows of input tokens, longest first. A span whose inputs begin another one's shares its row."""
    rows: list[_Row] = []
    # Inputs that begin others are sorted directly before them.
    for index in sorted(range(len(spans)), key=lambda one: spans[one].ids[:-1], reverse=True):
        ids, labels = spans[index].ids[:-1], spans[index].ids[-spans[index].num_scored :]
        if not rows or rows[-1].ids[: len(ids)] != ids:
            rows.append(_Row(ids))
        rows[-1].scored.append((index, len(ids) - len(labels), labels))
    return sorted(rows, key=lambda row: -len(row.ids))


def _batches_of(rows: Sequence[_Row], most_tokens: int, most_scored: float) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    num_scored = 0
    for row in rows:
        more = sum(len(labels) for *_, labels in row.scored)
        if batch and ((len(batch) + 1) * len(batch[0].ids) > most_tokens or num_scored + more > most_scored):
            yield batch
            batch, num_scored = [], 0
        batch.append(row)
        num_scored += more
    if batch:
        yield batch


class _TakesScores:
    """Stands for a loss in `expect_labels`, which lets the head return scores."""

    takes_head_loss = "scores"


class Scorer:
    """Scores spans with a model. All ranks of the mesh call each method with the same arguments.

    Args:
        opened: the model.
        batch_tokens: tokens of a batch with padding, on one data rank; None for a usual number.

    Raises:
        ModelError: if the model's logits depend on later tokens, or on the other rows of a batch.
    """

    def __init__(self, opened: OpenedModel, batch_tokens: int | None = None):
        self._model, self._mesh = opened.model, opened.mesh
        if factor := getattr(opened.config, "capacity_factor", 0):
            raise ModelError(
                f"model.capacity_factor={factor}: its routers drop tokens depending on the length of the batch, so a "
                "token's probability depends on later tokens. Score a model without a capacity."
            )
        self._head = find_head(self._model) or layers.find_lm_head(self._model)
        takes = inspect.signature(self._model.forward).parameters
        self._options: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
        self._head_scores = True
        self._prove_causal(min(opened.num_ids, 64))
        self._most_tokens = batch_tokens or (BATCH_TOKENS if access.is_accelerator(self._mesh.device) else CPU_TOKENS)
        self._most_scored = math.inf if self._head_scores else max(1, _LOGITS_BYTES // (4 * opened.num_ids))

    @torch.no_grad()
    def score(self, spans: Sequence[ScoredSpan]) -> Tensor:
        """Return the log-likelihood of each span in nats, and 1.0 if each of its tokens is the likeliest, (N, 2).

        The result is on the CPU, in float64, and equal on all ranks.
        """
        data, device = self._mesh.data, self._mesh.device
        batches = list(_batches_of(_rows_of(spans), self._most_tokens, self._most_scored))
        own = batches[data.rank :: data.size]
        # Ranks that share weights gather them together, so all of them run the same number of batches.
        idle = [_Row((0,), [(len(spans), 0, (0,))])]
        totals = torch.zeros(len(spans) + 1, 2, dtype=torch.float64, device=device)  # the last row is the idle one
        for index in range(-(-len(batches) // data.size)):
            batch = own[index] if index < len(own) else idle
            owners, log_probs_R, is_top_R = self._batch(batch)
            totals[:, 0].index_add_(0, owners, log_probs_R.double())
            totals[:, 1].index_add_(0, owners, (~is_top_R).double())
        found = all_reduce(totals[:-1].contiguous(), data).cpu()
        found[:, 1] = (found[:, 1] == 0).double()
        return found

    def in_windows(self, spans: Sequence[ScoredSpan], longest: int, stride: int) -> list[tuple[float, bool]]:
        """Return log-likelihoods as `score`, of spans that may be longer than the model reads (`windows_of`)."""
        windows = [windows_of(span, longest, stride) for span in spans]
        parts = iter(self.score([one for several in windows for one in several]).tolist())
        found = [[next(parts) for _ in several] for several in windows]
        return [(sum(value for value, _ in one), all(is_top for _, is_top in one)) for one in found]

    def _batch(self, batch: Sequence[_Row]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the span, the log-probability and whether it is the likeliest, of each scored token of a batch."""
        width, device = len(batch[0].ids), self._mesh.device
        ids_BT = torch.zeros(len(batch), width, dtype=torch.int64)
        owners: list[int] = []
        places: list[int] = []
        labels: list[int] = []
        for number, row in enumerate(batch):
            ids_BT[number, : len(row.ids)] = torch.tensor(row.ids)
            for owner, first, wanted in row.scored:
                owners += [owner] * len(wanted)
                places += range(number * width + first, number * width + first + len(wanted))
                labels += wanted
        there = [torch.tensor(one, device=device) for one in (places, labels)]
        return torch.tensor(owners, device=device), *self._log_probs(ids_BT.to(device), *there)

    def _log_probs(self, ids_BT: Tensor, places_R: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(label) after some tokens, and if it is the largest.

        The head gets only these tokens. places_R: their indices in the flattened rows.
        """
        is_chosen = False

        def choose(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            nonlocal is_chosen
            del module
            if not args or args[0].shape[:-1] != ids_BT.shape:
                return None
            is_chosen = True
            return (args[0].flatten(0, 1)[places_R][None], *args[1:])

        hook = self._head.register_forward_pre_hook(choose) if self._head is not None else None
        try:
            batch = {"labels": labels_R[None]}
            with expect_labels(self._model, _TakesScores, batch) if self._head_scores else nullcontext():
                output = self._model(ids_BT, **self._options)
        finally:
            if hook is not None:
                hook.remove()
        found: Any = getattr(output, "logits", output)
        if isinstance(found, HeadLogProbs):
            assert found.is_top is not None
            return found.log_probs[0], found.is_top[0]
        logits_RV = found.flatten(0, 1) if is_chosen else found.flatten(0, 1)[places_R]
        if logits_RV.shape[0] != len(labels_R):
            raise ModelError(
                f"model of type {type(self._model).__name__}: its logits have the shape {tuple(found.shape)}, not one "
                "row for each token. Give a causal language model."
            )
        return _of_logits(logits_RV, labels_R)

    @torch.no_grad()
    def _prove_causal(self, num_ids: int) -> None:
        """Refuse a model whose logits depend on later tokens. Also find out if its head can compute scores."""
        ids_BT = torch.arange(8, device=self._mesh.device)[None] % num_ids
        changed_BT = ids_BT.clone()
        changed_BT[0, -1] = (changed_BT[0, -1] + 1) % num_ids
        places_R, labels_R = torch.arange(7, device=self._mesh.device), ids_BT[0, 1:] * 0
        try:
            before_R = self._log_probs(ids_BT, places_R, labels_R)[0]
        except ModelError:
            self._head_scores = False  # the model changes its logits after the head
            before_R = self._log_probs(ids_BT, places_R, labels_R)[0]
        after_R = self._log_probs(changed_BT, places_R, labels_R)[0]
        limit = _ROUNDING.get(self._mesh.plan.precision, 5e-2)
        if not torch.allclose(before_R, after_R, rtol=limit, atol=limit, equal_nan=True):
            raise ModelError(
                f"model of type {type(self._model).__name__}: its logits depend on later tokens, so they give no "
                "log-likelihoods. Give a causal language model."
            )


def _of_logits(logits_RV: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels' log-probabilities and whether they are the largest, in chunks of fp32 (fp64 for fp64)."""
    sums = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    rows = max(1, LossChunking().chunk.rows(len(labels_R), logits_RV.shape[1], sums.itemsize))
    log_probs: list[Tensor] = []
    is_top: list[Tensor] = []
    for start in range(0, len(labels_R), rows):
        wide_CV = logits_RV[start : start + rows].to(sums)
        label_C = wide_CV.gather(1, labels_R[start : start + rows, None]).squeeze(1)
        is_top.append(label_C >= wide_CV.amax(1))
        log_probs.append(label_C - wide_CV.logsumexp(1))
    return torch.cat(log_probs), torch.cat(is_top)


def score_on_ranks(
    mesh: Mesh,
    source: str,
    step: int | None,
    spans: Sequence[ScoredSpan],
    longest: int,
    stride: int,
    batch_tokens: int | None,
) -> list[tuple[float, bool]]:
    """Open a model on this rank and score spans in windows: a function for `run_on_ranks`."""
    return Scorer(open_model(source, mesh.plan, mesh, step), batch_tokens).in_windows(spans, longest, stride)
