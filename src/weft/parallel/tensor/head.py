"""Element-wise operations of a head's loss on its logits, in three variants.

On a CPU, exponentials overwrite the logits, which needs the least memory. On a GPU, torch's kernel normalizes
low-precision logits in one pass over them, and gradients overwrite the logits. If compiled, both passes read the logits
in the dtype of the matmul, and no wider tensor is written.

C tokens per chunk, V local entries of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Axis
from weft.config.partitioning import LossChunk
from weft.devices import access
from weft.parallel.tensor.linear import SharedLayer


class Labels(NamedTuple):
    """Index of each token's label in the local vocabulary entries (0 if not local), and a mask of the local labels."""

    place_C1: Tensor
    is_here_C: Tensor


class LogitPasses(NamedTuple):
    """Two functions that each read all logits once: for the loss, and for its gradient. Both may overwrite the logits.

    Attributes:
        sums: maps (logits_CV, labels, accumulation dtype) to (state for `gradient`, local log-sum-exp_C, label
            logit_C).
        gradient: maps (state from `sums`, log-sum-exp_C over the full vocabulary, logit_C, labels, dtype) to the
            gradient of the logits, (C, V).
    """

    sums: Callable[[Tensor, Labels, torch.dtype], tuple[Any, Tensor, Tensor]]
    gradient: Callable[[Any, Tensor, Tensor, Labels, torch.dtype], Tensor]


def passes_for(logits_CV: Tensor, sums: torch.dtype, is_compiled: bool) -> LogitPasses:
    """Choose the variant of both functions for these logits. sums: accumulation dtype."""
    if is_compiled:
        return _compiled()
    # If the logits already have the accumulation dtype, a normalized copy would double the memory.
    return _IN_PLACE if logits_CV.device.type == "cpu" or logits_CV.dtype == sums else _NORMALISED


def _logit_at(logits_CV: Tensor, labels: Labels, dtype: torch.dtype) -> Tensor:
    return logits_CV.gather(1, labels.place_C1).squeeze(1).to(dtype)


def _less_label(share_CV: Tensor, whole_C: Tensor, label_C: Tensor, labels: Labels) -> Tensor:
    """Overwrite the probability p of each local label in `share_CV` with p - 1.

    The difference is computed before rounding, because low-precision dtypes have few values near 1.
    """
    less_C = ((label_C - whole_C).exp_() - 1.0).to(share_CV.dtype)
    there_C = share_CV.gather(1, labels.place_C1).squeeze(1)
    return share_CV.scatter_(1, labels.place_C1, less_C.where(labels.is_here_C, there_C)[:, None])


def _sums_inplace(logits_CV: Tensor, labels: Labels, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    label_C = _logit_at(logits_CV, labels, dtype)
    wide_CV = logits_CV.to(dtype)
    largest_C = wide_CV.amax(1)
    wide_CV -= largest_C[:, None]
    return (wide_CV.exp_(), largest_C), wide_CV.sum(1).log_() + largest_C, label_C


def _gradient_inplace(kept: Any, whole_C: Tensor, label_C: Tensor, labels: Labels, dtype: torch.dtype) -> Tensor:
    wide_CV, largest_C = kept
    wide_CV *= (largest_C - whole_C).exp_()[:, None]
    return _less_label(wide_CV.to(dtype), whole_C, label_C, labels)


_IN_PLACE = LogitPasses(_sums_inplace, _gradient_inplace)


def _sums_normalised(logits_CV: Tensor, labels: Labels, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    label_C = _logit_at(logits_CV, labels, dtype)
    normal_CV = torch.log_softmax(logits_CV, 1, dtype)
    lse_C = label_C - normal_CV.gather(1, labels.place_C1).squeeze(1)
    return (normal_CV, lse_C, logits_CV), lse_C, label_C


def _gradient_normalised(kept: Any, whole_C: Tensor, label_C: Tensor, labels: Labels, dtype: torch.dtype) -> Tensor:
    normal_CV, lse_C, logits_CV = kept
    if whole_C is not lse_C:  # sharded vocabulary
        normal_CV += (lse_C - whole_C)[:, None]
    return _less_label(torch.exp(normal_CV, out=logits_CV), whole_C, label_C, labels)


_NORMALISED = LogitPasses(_sums_normalised, _gradient_normalised)


def _narrow_sums(logits_CV: Tensor, place_C1: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    label_C = logits_CV.gather(1, place_C1).squeeze(1).to(dtype)
    return logits_CV.to(dtype).logsumexp(1), label_C


def _narrow_gradient(
    logits_CV: Tensor, whole_C: Tensor, place_C1: Tensor, is_here_C: Tensor, dtype: torch.dtype
) -> Tensor:
    share_CV = (logits_CV.to(whole_C.dtype) - whole_C[:, None]).exp()
    entries_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    is_label_CV = (entries_V == place_C1) & is_here_C[:, None]
    return (share_CV - is_label_CV.to(share_CV.dtype)).to(dtype)


@cache
def _compiled() -> LogitPasses:
    """Compile both functions for any number of tokens. Compilation happens at the first call."""
    sums, gradient = torch.compile(_narrow_sums, dynamic=True), torch.compile(_narrow_gradient, dynamic=True)
    return LogitPasses(
        lambda logits_CV, labels, dtype: (logits_CV, *sums(logits_CV, labels.place_C1, dtype)),
        lambda kept, whole_C, label_C, labels, dtype: gradient(kept, whole_C, labels.place_C1, labels.is_here_C, dtype),
    )


# Token cross-entropy computed directly from hidden states in chunks of tokens, with a sharded or full vocabulary.


@dataclass(frozen=True, slots=True)
class LossChunking:
    """Chunk size of a head's loss. It must be equal on all tp ranks, because they communicate after each chunk.

    chunk: size of a chunk of logits. compiled: True to compile the element-wise operations.
    """

    chunk: LossChunk = field(default_factory=LossChunk)
    compiled: bool = False

    @classmethod
    def agreed(cls, axis: Axis, device: torch.device, compiled: bool) -> LossChunking:
        """Return the chunking for heads on `device`.

        On an accelerator this is a collective over the axis, and the smallest device determines the size.
        """
        if access.mixes_with_cpus(device):
            return cls(LossChunk(), compiled)
        chunk = LossChunk.of_device(access.total_bytes(device))
        if axis.size > 1:
            smallest = all_reduce(torch.tensor(chunk.num_bytes, device=device), axis, op="min")
            chunk = LossChunk(int(smallest))
        return cls(chunk, compiled)


def token_loss(
    x_BSD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_BT: torch.Tensor,
    line: SharedLayer,
    vocab: int,
    ignore: int,
    way: LossChunking | None = None,
    weights_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the cross-entropies in nats of the tokens whose label is not `ignore`; 0-d, fp32 (fp64 for fp64).

    If gradients are enabled, forward computes them too, and backward multiplies them by the gradient of the sum.

    Args:
        x_BSD: input of the head; this rank's tokens if sp shards them.
        bias_V: this rank's part of the bias, or None.
        labels_BT: labels of all tokens, int64.
        vocab: size of the full vocabulary. This rank has V entries from rank * V on; entries from `vocab` on are
            padding.
        way: chunk size, or None for the default of a CPU.
        weights_BT: weights of all tokens' losses in the sum, or None for weights of 1.
    """
    way = LossChunking() if way is None else way
    wants_grad = torch.is_grad_enabled()
    return _TokenLoss.apply(x_BSD, weight_VD, bias_V, labels_BT, line, vocab, ignore, way, wants_grad, weights_BT)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_BT: torch.Tensor,
        line: SharedLayer,
        vocab: int,
        ignore: int,
        way: LossChunking,
        wants_grad: bool,
        weights_BT: torch.Tensor | None,
    ) -> torch.Tensor:
        whole = line.start_gather(x_BSD).wait() if line.cuts_tokens else x_BSD
        needs = [wants_grad and need for need in ctx.needs_input_grad[:3]]
        chunks = TokenChunks(weight_VD, bias_V, line, vocab, ignore, way, needs, whole, labels_BT)
        loss_sum = chunks.sum(None if weights_BT is None else weights_BT.reshape(-1))
        grad_x = chunks.grad_of_all()
        if grad_x is not None:
            grad_x = line.start_sum(grad_x).wait()
        ctx.save_for_backward(grad_x, chunks.grad_weight, chunks.grad_bias)
        ctx.formats = (x_BSD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.formats, strict=True)
        return (*(None if saved is None else _scaled(saved, grad, dtype) for saved, dtype in pairs), *[None] * 7)


def trained_rows(labels_N: torch.Tensor, ignore: int) -> torch.Tensor | None:
    """Return the indices of labeled tokens if skipping the others saves work, or None to process all tokens.

    In chat data most tokens have no label. The result is always None on a GPU, because the host would wait for it.
    All tp ranks have the same labels, so they make the same choice.
    """
    if not access.mixes_with_cpus(labels_N.device):
        return None
    [kept_N] = (labels_N != ignore).nonzero(as_tuple=True)
    return kept_N if kept_N.numel() <= 0.9 * labels_N.numel() else None


def _scaled(saved: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply a saved gradient by the gradient of the loss, with a single rounding. May overwrite `saved`."""
    if saved.dtype == dtype:
        # In place, because a weight's gradient is large. torch detects this and raises an error in a second backward.
        return saved.mul_(grad)
    return torch.mul(saved, grad, out=torch.empty_like(saved, dtype=dtype))


class TokenChunks:
    """Computation of a head's loss in chunks of tokens. It skips tokens without a label if that saves work."""

    def __init__(
        self,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        line: SharedLayer,
        vocab: int,
        ignore: int,
        way: LossChunking,
        needs: list[bool],
        whole_BTD: torch.Tensor,
        labels_BT: torch.Tensor,
    ):
        self.weight, self.bias, self.axis, self.ignore, self.way = weight_VD, bias_V, line.axis, ignore, way
        self.shape, self.labels_N = whole_BTD.shape, labels_BT.reshape(-1)
        self.hidden_ND, self.kept_N = whole_BTD.flatten(0, -2), trained_rows(self.labels_N, ignore)
        if self.kept_N is not None:
            self.hidden_ND, self.labels_N = self.hidden_ND[self.kept_N], self.labels_N[self.kept_N]
        self.sums = torch.float64 if whole_BTD.dtype == torch.float64 else torch.float32
        self.first = self.axis.rank * weight_VD.shape[0]
        self.num_real = min(max(vocab - self.first, 0), weight_VD.shape[0])
        self.grad_x = torch.empty_like(self.hidden_ND) if needs[0] else None
        # Chunks are added in the accumulation dtype, because half precision would lose small terms. The first chunk is
        # stored.
        self.is_first = self.labels_N.numel() > 0
        made = torch.empty_like if self.is_first else torch.zeros_like
        self.grad_weight = made(weight_VD, dtype=self.sums) if needs[1] else None
        self.grad_bias = torch.zeros_like(bias_V, dtype=self.sums) if needs[2] and bias_V is not None else None
        #: For each chunk, a mask of the tokens whose label has the largest logit; None: not computed.
        self.is_top: list[torch.Tensor] | None = None

    def losses(self, weights_N: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Yield the losses of the processed tokens, one tensor per chunk, and accumulate the requested gradients.

        weights_N: weights of the processed tokens in the gradients, or None for weights of 1.
        """
        labels_N = self.labels_N
        rows = max(1, self.way.chunk.rows(labels_N.numel(), self.weight.shape[0], self.sums.itemsize))
        for start in range(0, labels_N.numel(), rows):
            part = slice(start, start + rows)
            yield self._chunk(part, labels_N[part], None if weights_N is None else weights_N[part])

    def sum(self, weights_N: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted sum of the losses. weights_N: weights of all tokens."""
        weights_N = None if weights_N is None else self.of_pass(weights_N.to(self.sums))
        total, done = torch.zeros((), dtype=self.sums, device=self.labels_N.device), 0
        for losses_C in self.losses(weights_N):
            here = slice(done, done + losses_C.numel())
            total += losses_C.sum() if weights_N is None else losses_C @ weights_N[here]
            done += losses_C.numel()
        return total

    def of_pass(self, values_N: torch.Tensor) -> torch.Tensor:
        """Select the values of the processed tokens from values of all tokens."""
        return values_N if self.kept_N is None else values_N[self.kept_N]

    def of_all(self, values_N: torch.Tensor) -> torch.Tensor:
        """Scatter values of the processed tokens to all tokens, with zeros for skipped tokens."""
        if self.kept_N is None:
            return values_N
        num_tokens = math.prod(self.shape[:-1])
        return values_N.new_zeros(num_tokens, *values_N.shape[1:]).index_copy_(0, self.kept_N, values_N)

    def grad_of_all(self) -> torch.Tensor | None:
        """Return the gradient of the hidden states, (B, T, D), after all chunks, or None if it was not requested."""
        return None if self.grad_x is None else self.of_all(self.grad_x).view(self.shape)

    def _chunk(self, part: slice, labels_C: torch.Tensor, weights_C: torch.Tensor | None) -> torch.Tensor:
        hidden_CD = self.hidden_ND[part]
        logits_CV = F.linear(hidden_CD, self.weight, self.bias)
        if self.num_real < logits_CV.shape[1]:
            # Not -inf, because on a rank that has only padding the sum of exponentials would be 0.
            logits_CV[:, self.num_real :] = torch.finfo(logits_CV.dtype).min
        local_C = labels_C - self.first
        trained_C = labels_C != self.ignore
        mine_C = trained_C & (local_C >= 0) & (local_C < self.num_real)
        labels = Labels(local_C.where(mine_C, 0)[:, None], mine_C)
        top_C = logits_CV.amax(1).to(self.sums) if self.is_top is not None else None
        passes = passes_for(logits_CV, self.sums, self.way.compiled)
        kept, lse_C, here_C = passes.sums(logits_CV, labels, self.sums)
        del logits_CV  # `kept` may reference them
        whole_C, label_C = self._over_ranks(lse_C, here_C, mine_C)
        if self.is_top is not None and top_C is not None:
            self.is_top.append(label_C >= (top_C if self.axis.size == 1 else all_reduce(top_C, self.axis, op="max")))
        if self.grad_x is not None or self.grad_weight is not None:
            grad_CV = passes.gradient(kept, whole_C, here_C, labels, hidden_CD.dtype)
            del kept
            self._gradients(part, hidden_CD, grad_CV, trained_C, weights_C)
        return (whole_C - label_C).where(trained_C, 0.0)

    def _over_ranks(
        self, lse_C: torch.Tensor, label_logit_C: torch.Tensor, mine_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-sum-exp and the label's logit over the full vocabulary."""
        if self.axis.size == 1:
            return lse_C, label_logit_C
        largest_C = all_reduce(lse_C.clone(), self.axis, op="max")
        both_2C = torch.stack([(lse_C - largest_C).exp_(), label_logit_C.where(mine_C, 0.0)])
        both_2C = all_reduce(both_2C, self.axis)
        return both_2C[0].log() + largest_C, both_2C[1]

    def _gradients(
        self,
        part: slice,
        hidden_CD: torch.Tensor,
        grad_CV: torch.Tensor,
        trained_C: torch.Tensor,
        weights_C: torch.Tensor | None,
    ) -> None:
        """Accumulate the weight's, bias's and hidden states' gradients from the logits' gradient.

        `grad_CV` may be overwritten. Tokens without a label are masked here, because it is cheaper to mask rows of
        hidden states than rows of logits.
        """
        trained_C1 = trained_C[:, None]
        if weights_C is not None:
            grad_CV *= weights_C[:, None].to(grad_CV.dtype)
        if self.grad_x is not None:
            grad_CD = torch.mm(grad_CV, self.weight, out=self.grad_x[part])
            grad_CD.masked_fill_(~trained_C1, 0.0)
        if self.grad_weight is not None:
            store = put_product if self.is_first else add_product
            store(self.grad_weight, grad_CV.t(), hidden_CD.where(trained_C1, 0.0))
            self.is_first = False
        if self.grad_bias is not None:
            self.grad_bias += trained_C.to(self.sums) @ grad_CV.to(self.sums)


def put_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute total = left @ right in place. If `total` is wider, a GPU accumulates in its dtype without rounding."""
    if total.dtype == left.dtype:
        torch.mm(left, right, out=total)
    elif access.has_cuda_kernels(total.device):
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    else:
        total.copy_(left @ right)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute total += left @ right in place. If `total` is wider, a GPU accumulates in its dtype without rounding."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif access.has_cuda_kernels(total.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
