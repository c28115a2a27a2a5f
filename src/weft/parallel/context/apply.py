"""Context parallelism of one model on one rank: sharding its batches and computing its attention.

B sequences, T tokens of this rank, H query heads, K key-value heads, C head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from weft.comm.mesh import Axis
from weft.config.partitioning import choose_cp_mode, num_chunks, ulysses_fits
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.context.kernels import Scoring
from weft.parallel.context.modes import SequenceOrder, View, attend_sharded, find_borders, sequence_length, shard_batch


class Context:
    """State of context parallelism for one model on one rank.

    `in_use` is True while the model receives sharded sequences. Otherwise, as in generation, the model uses its
    original attention, and each rank computes full sequences. Of `plan`, only `cp_mode` and `tp` are used.

    `shards_samples` is False if `shard` returns full samples: then all ranks compute the same loss, and only the first
    rank's counts.
    """

    shards_samples = True

    def __init__(self, plan: Plan, axis: Axis, num_heads: int, num_kv_heads: int):
        self.axis = axis
        self.in_use = False
        self.num_calls = 0  # attention calls since the last check
        self.callers: set[nn.Module] = set()  # modules that called attention, until one forward is complete
        self.has_looked = False
        #: Default positions of a Hugging Face model, used if the caller passes none.
        self.positions: Callable[[Context, Tensor, Tensor | None, Tensor], Tensor] | None = None
        self._plan = plan
        self._heads = (num_heads, num_kv_heads)
        self._labels_checked = False
        self._views: dict[int, View] = {}
        self._divided: Any = WeakTensorKeyDictionary()  # document ids -> View: all layers get the same tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model is not parallelized

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Treat the model's inputs within this context as this rank's shards of sequences."""
        before, self.in_use = self.in_use, True
        try:
            yield
        finally:
            self.in_use = before

    def order(self, seq_len: int) -> SequenceOrder:
        """Return which tokens of a sequence this rank holds. seq_len: tokens of the full sequence.

        Raises ModelError if tokens or heads do not divide evenly.
        """
        cp, (heads, kv_heads) = self.axis.size, self._heads
        mode = choose_cp_mode(self._plan.cp_mode, cp, heads, kv_heads, seq_len, self._plan.tp)
        if mode == "ulysses" and not ulysses_fits(cp, heads, kv_heads, self._plan.tp):
            raise ModelError(
                f"cp_mode=ulysses: {heads} heads and {kv_heads} key-value heads cannot be divided over cp={cp} and "
                f"tp={self._plan.tp}. Use cp_mode=ring or cp_mode=gather."
            )
        if seq_len % num_chunks(mode, cp):
            raise ModelError(
                f"cp={cp}: cp_mode={mode} divides a sequence into {num_chunks(mode, cp)} equal chunks, and {seq_len} "
                f"tokens do not divide evenly. Pad the sequences to a multiple of {num_chunks(mode, cp)} tokens."
            )
        return SequenceOrder(mode, cp, self.axis.rank, seq_len)

    def shard(self, batch: Any) -> Any:
        """Return this rank's shard of a batch of full sequences. See `shard_batch`.

        Raises ModelError if no tensor of the batch is (batch, sequence), if the sequence does not divide evenly, or if
        labels are not shifted.
        """
        seq_len = sequence_length(batch)
        if seq_len is None:
            raise ModelError(
                f"cp={self.axis.size}: the batch has no tensor of shape (batch, sequence) to shard. Use cp=1 for "
                "this model."
            )
        self.check_labels(batch)
        return shard_batch(batch, self.order(seq_len))

    def token_positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's `num_tokens` tokens in the full sequence, (T,)."""
        return self.order(num_tokens * self.axis.size).positions(device)

    def attend(
        self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scoring: Scoring, ids_BT: Tensor | None,
        sink_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the attention over the full sequence, (B, H, T, C).

        Raises ModelError if there are more keys than queries, as with a cache.

        Args:
            k_BKTC: keys of the same tokens.
            v_BKTC: values of the same tokens.
            ids_BT: document ids. Tokens attend only to tokens with the same id, which must be contiguous. Pass the same
                tensor in all layers.
            sink_H: attention sink: one additional score per head, without a value.
        """
        self.num_calls += 1
        if q_BHTC.shape[2] != k_BKTC.shape[2]:
            raise ModelError(
                f"cp={self.axis.size}: {q_BHTC.shape[2]} queries of {k_BKTC.shape[2]} keys; a sharded sequence has "
                "no cache. Generate outside training steps, with full sequences."
            )
        view = self.divide(q_BHTC.shape[2] * self.axis.size, ids_BT)
        return context_attention(q_BHTC, k_BKTC, v_BKTC, scoring, view, sink_H)

    def divide(self, seq_len: int, ids_BT: Tensor | None) -> View:
        """Return the View of this rank's tokens, with the keys that they attend to. `ids_BT`: document ids, or None.

        The View is cached by tensor, so the layers reuse it. A new one for document ids is a collective over the axis,
        unless the host knows the ids. seq_len: tokens of the full sequence. Raises ModelError if documents are not
        contiguous.
        """
        if ids_BT is None:
            if seq_len not in self._views:
                self._views = {seq_len: View(self.axis, self.order(seq_len))}
            return self._views[seq_len]
        if ids_BT not in self._divided:
            order = self.order(seq_len)
            self._divided[ids_BT] = View(self.axis, order, find_borders(ids_BT, self.axis, order))
        return self._divided[ids_BT]

    def sees_full_sequence(self, path: str) -> bool:
        """Return True if the module at `path` gets all tokens of a sharded sequence. Here always False."""
        del path
        return False

    @property
    def counts_loss(self) -> bool:
        """True if this rank's loss is part of the sum over ranks."""
        return self.shards_samples or self.axis.rank == 0

    def check_labels(self, batch: Any) -> None:
        """Raise ModelError if the first batch's labels equal its input_ids: the loss cannot shift labels across ranks.

        Later batches are not checked.
        """
        if self._labels_checked:
            return
        self._labels_checked = True
        if not isinstance(batch, Mapping) or not {"labels", "input_ids"} <= batch.keys():
            return
        labels, inputs = batch["labels"], batch["input_ids"]
        if labels.shape == inputs.shape and bool((labels == inputs)[labels >= 0].all()) and bool((labels >= 0).any()):
            raise ModelError(
                f"labels: they equal input_ids, so the loss would have to shift them, and under cp={self.axis.size} "
                f"a token and the next may be on different ranks. Shift them in the data: labels[t] = input_ids[t + 1]."
            )


def context_attention(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scoring: Scoring, view: View, sink_H: Tensor | None = None
) -> Tensor:
    """Return attention over the full sequence for this rank's queries, (B, H, T, C), from `attend_sharded`.

    A TorchFunctionMode, such as recompute=attention uses, can intercept this function.
    """
    given = (q_BHTC, k_BKTC, v_BKTC)
    if has_torch_function(given):
        return handle_torch_function(context_attention, given, *given, scoring, view, sink_H)
    return attend_sharded(*given, scoring, view, sink_H)


#: Marker that `weft.memory` looks for.
context_attention.is_attention = True
