"""Generation of many texts in one batch: prompts join it as soon as rows are free, and texts leave when they end.

B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.generation.check import expect_rows
from weft.generation.forward import next_logits
from weft.generation.ranks import Alone, Together
from weft.generation.requests import Completion, Request, Sampling, expect_one_each, refusal
from weft.generation.row_cache import RowCache
from weft.generation.sampling import choose
from weft.models.decoder import Decoder

#: Tokens of prompts that are computed in one forward.
_PREFILL_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a model and of a batch.

    Attributes:
        vocab_size: ids from 0 are below this. Ids beyond are never sampled.
        max_positions: prompt and new tokens of a text together are at most this many.
        rows: number of texts in the batch.
    """

    vocab_size: int
    max_positions: int = 2**40
    rows: int = 32


@dataclass(slots=True)
class _Row:
    request: Request
    room: int
    ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    reason: Any = None

    @property
    def position(self) -> int:
        """Position of the next token."""
        return len(self.request.prompt_ids) + len(self.ids)


#: (new ids of a text) -> True if it ends here.
Ends = Callable[[Sequence[int]], bool]


@torch.no_grad()
def generate_batch(
    model: nn.Module,
    requests: Sequence[Request],
    sampling: Sampling,
    limits: Limits,
    *,
    together: Together | None = None,
    ends: Ends | None = None,
    check: bool = True,
) -> list[Completion]:
    """Continue prompts, and return one completion per request, in the order of the requests.

    The text of a request depends on the model, the sampling and the request alone, up to rounding: not on other
    requests, their order, or the plan. A request that the model cannot continue is refused alone (see `Completion`).
    Each prompt is computed without padding. Collective over the ranks of `together`.

    Args:
        model: a Decoder or a causal language model of transformers, on one device or sharded by `parallelize`. It must
            be in eval mode.
        requests: keys must differ. Ranks that compute one forward together pass the same requests.
        sampling: how tokens are sampled.
        limits: bounds of the model and the batch.
        together: ranks that share this model's weights; None: no other rank does.
        ends: called with a text's new ids after each token; True ends the text with reason "stop".
        check: compare the model's logits with and without a cache, once per model (`expect_rows`). A Decoder with one
            row is not compared.

    Raises:
        ConfigError: if two requests have the same key.
        ModelError: if the model has a cache that cannot be divided into rows, computes something else with it, or has
            routers with a capacity and more than one row; or if its logits are nan.
    """
    expect_one_each(requests)
    together = together or Alone()
    if check and not (limits.rows == 1 and isinstance(model, Decoder)):
        expect_rows(model, limits.vocab_size)
    batch = _Batch(model, sampling, limits, together, ends)
    done: dict[int, Completion] = {}
    waiting: list[_Row] = []
    for request in requests:
        if error := refusal(request, limits.vocab_size, limits.max_positions):
            done[request.key] = Completion(request.key, (), (), "refused", error)
        else:
            room = min(sampling.max_tokens, limits.max_positions - len(request.prompt_ids))
            waiting.append(_Row(request, room))
    # The longest first, so that rows that join later are padded instead of all others. Equal prompts are adjacent.
    waiting.sort(key=lambda row: (-len(row.request.prompt_ids), row.request.prompt_ids))
    while together.any_busy(bool(waiting or batch.rows)):
        for row in batch.advance(waiting):
            key = row.request.key
            done[key] = Completion(key, tuple(row.ids), tuple(row.log_probs), row.reason)
    return [done[request.key] for request in requests]


class _Batch:
    def __init__(self, model: nn.Module, sampling: Sampling, limits: Limits, together: Together, ends: Ends | None):
        self._model, self._sampling, self._limits = model, sampling, limits
        self._together, self._ends = together, ends
        self._device = next(param.device for param in model.parameters())
        self.rows: list[_Row] = []
        self._cache: RowCache | None = None
        self._joining: list[RowCache] = []  # caches of the last rows, which join together
        self._fills = False

    def advance(self, waiting: list[_Row]) -> list[_Row]:
        """Run one forward: of waiting prompts, of the batch's next tokens, or of nothing for other ranks.

        Returns the rows that ended, and removes prompts from `waiting`.
        """
        free = self._limits.rows - len(self.rows)
        # Joining copies the cache, so rows join once a quarter of them is free, until all are used.
        self._fills = bool(waiting) and free > 0 and (self._fills or not self.rows or 4 * free >= self._limits.rows)
        if self._fills:
            return self._begin(_first_group(waiting, free))
        if self.rows:
            return self._continue()
        self._forward(torch.zeros(1, 1, dtype=torch.long, device=self._device))
        return []

    def _begin(self, group: list[_Row]) -> list[_Row]:
        # Several completions of one prompt share its forward.
        prompts = list(dict.fromkeys(row.request.prompt_ids for row in group))
        index = [prompts.index(row.request.prompt_ids) for row in group]
        ids_BT = torch.tensor(prompts, device=self._device)
        cache = RowCache(self._model, alone=self._limits.rows == 1)
        logits_BV = self._forward(ids_BT, None, cache)
        cache.started(*ids_BT.shape)
        self._sample(group, logits_BV[index])
        if kept := [place for place, row in enumerate(group) if row.reason is None]:
            if len(kept) < len(group) or len(prompts) < len(group):
                cache.keep([index[place] for place in kept])
            self._joining.append(cache)
            self.rows += [group[place] for place in kept]
        return [row for row in group if row.reason is not None]

    def _continue(self) -> list[_Row]:
        if self._joining:
            first, *others = [self._cache, *self._joining] if self._cache is not None else self._joining
            if others:
                first.join(others)
            self._cache, self._joining = first, []
        cache = self._cache
        assert cache is not None
        ids_B1 = torch.tensor([[row.ids[-1]] for row in self.rows], device=self._device)
        positions_B1 = torch.tensor([[row.position - 1] for row in self.rows], device=self._device)
        logits_BV = self._forward(ids_B1, positions_B1, cache)
        cache.advanced()
        self._sample(self.rows, logits_BV)
        ended = [row for row in self.rows if row.reason is not None]
        if ended:
            kept = [index for index, row in enumerate(self.rows) if row.reason is None]
            self.rows = [self.rows[index] for index in kept]
            if self.rows:
                cache.keep(kept)
            else:
                self._cache = None
        return ended

    def _forward(self, ids_BT: Tensor, positions_B1: Tensor | None = None, cache: RowCache | None = None) -> Tensor:
        return next_logits(self._model, ids_BT, positions_B1, cache)[:, : self._limits.vocab_size]

    def _sample(self, rows: Sequence[_Row], logits_BV: Tensor) -> None:
        found = choose(logits_BV, self._sampling, [row.request.key for row in rows], [row.position for row in rows])
        ids, log_probs = self._together.agree(*found)
        if any(map(math.isnan, log_probs)):
            raise ModelError(
                f"generation with {type(self._model).__name__}: its logits are nan. Check the weights, or use another "
                "precision."
            )
        for row, token, log_prob in zip(rows, ids, log_probs, strict=True):
            row.ids.append(token)
            row.log_probs.append(log_prob)
            if token in self._sampling.stop_ids or (self._ends is not None and self._ends(row.ids)):
                row.reason = "stop"
            elif len(row.ids) >= row.room:
                row.reason = "length"


def _first_group(waiting: list[_Row], free: int) -> list[_Row]:
    """Take waiting rows with prompts of one length, which need no padding."""
    length = len(waiting[0].request.prompt_ids)
    most = min(free, max(1, _PREFILL_TOKENS // length))
    count = 0
    while count < min(most, len(waiting)) and len(waiting[count].request.prompt_ids) == length:
        count += 1
    group, waiting[:] = waiting[:count], waiting[count:]
    return group
