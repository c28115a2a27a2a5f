"""Cross-entropy of tokens straight from hidden states, a few tokens at a time, with the vocabulary cut or whole.

Gradients are made in the forward, while the logits of a few tokens are there, so logits are made once and never kept:
what stays until backward is as large as the hidden states and the weight. With a cut vocabulary ranks exchange three
numbers for each token: the largest logit, the sum of exponentials, and the logit of the label.

Methods: Shoeybi et al. 2019, arXiv 1909.08053, section 3 (cut vocabulary); Hsu et al. 2024, arXiv 2410.10989, and
Wijmans et al. 2024, arXiv 2411.09009 (logits that are never kept).

B sequences, T tokens, S tokens of this rank, N = B T, C tokens at a time, D features, V entries of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from weft.comm import all_reduce
from weft.parallel.tensor.cut_linear import Line

#: Logits, in the format of the sum, that exist at a time.
CHUNK_BYTES = 2**26


def token_loss(
    x_BSD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_BT: torch.Tensor,
    line: Line,
    vocab: int,
    ignore: int,
) -> torch.Tensor:
    """Sum of the cross-entropies in nats over the tokens whose label is not `ignore`; 0-d, fp32 (fp64 for fp64).

    vocab: entries of the whole, of which this rank has those from rank * V on; entries from `vocab` on are padding.
    """
    return _TokenLoss.apply(x_BSD, weight_VD, bias_V, labels_BT, line, vocab, ignore, torch.is_grad_enabled())


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_BT: torch.Tensor,
        line: Line,
        vocab: int,
        ignore: int,
        wants_grad: bool,
    ) -> torch.Tensor:
        whole = line.start_gather(x_BSD).wait() if line.cuts_tokens else x_BSD
        needs = [wants_grad and need for need in ctx.needs_input_grad[:3]]
        chunks = _Chunks(weight_VD, bias_V, line, vocab, ignore, needs, whole)
        loss_sum = chunks.run(labels_BT.reshape(-1))
        grad_x = None
        if chunks.grad_x is not None:
            grad_x = line.start_sum(chunks.grad_x.view(whole.shape)).wait()
        ctx.save_for_backward(grad_x, chunks.grad_weight, chunks.grad_bias)
        ctx.formats = (x_BSD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In place: a weight's gradient is large. A second backward is refused by torch, since it sees the change.
        found = [
            None if saved is None else saved.mul_(grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.formats, strict=True)
        ]
        return (*found, None, None, None, None, None)


class _Chunks:
    """One pass over the tokens, a few at a time."""

    def __init__(
        self,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        line: Line,
        vocab: int,
        ignore: int,
        needs: list[bool],
        whole_BTD: torch.Tensor,
    ):
        self.weight, self.bias, self.axis, self.ignore = weight_VD, bias_V, line.axis, ignore
        self.hidden_ND = whole_BTD.flatten(0, -2)
        self.sums = torch.float64 if whole_BTD.dtype == torch.float64 else torch.float32
        self.first = self.axis.rank * weight_VD.shape[0]
        self.num_real = min(max(vocab - self.first, 0), weight_VD.shape[0])
        self.grad_x = torch.empty_like(self.hidden_ND) if needs[0] else None
        # Added up over the chunks in the format of sums: halves would lose what they add.
        self.grad_weight = torch.zeros_like(weight_VD, dtype=self.sums) if needs[1] else None
        self.grad_bias = torch.zeros_like(bias_V, dtype=self.sums) if needs[2] and bias_V is not None else None

    def run(self, labels_N: torch.Tensor) -> torch.Tensor:
        """The sum of the losses."""
        rows = max(1, CHUNK_BYTES // (self.weight.shape[0] * self.sums.itemsize))
        total = torch.zeros((), dtype=self.sums, device=labels_N.device)
        for start in range(0, labels_N.numel(), rows):
            part = slice(start, start + rows)
            total += self._chunk(part, labels_N[part])
        return total

    def _chunk(self, part: slice, labels_C: torch.Tensor) -> torch.Tensor:
        hidden_CD = self.hidden_ND[part]
        logits_CV = F.linear(hidden_CD, self.weight, self.bias).to(self.sums)
        if self.num_real < logits_CV.shape[1]:
            logits_CV[:, self.num_real :] = -torch.inf
        largest_C = all_reduce(logits_CV.amax(1), self.axis, op="max")
        logits_CV -= largest_C[:, None]
        local_C = labels_C - self.first
        trained_C = labels_C != self.ignore
        mine_C = trained_C & (local_C >= 0) & (local_C < self.num_real)
        place_C1 = local_C.where(mine_C, 0)[:, None]
        label_logit_C = logits_CV.gather(1, place_C1).squeeze(1).where(mine_C, 0.0)
        exponentials_CV = logits_CV.exp_()
        both_2C = all_reduce(torch.stack([exponentials_CV.sum(1), label_logit_C]), self.axis)
        losses_C = (both_2C[0].log() - both_2C[1]).where(trained_C, 0.0)
        if self.grad_x is not None or self.grad_weight is not None:
            exponentials_CV *= (trained_C / both_2C[0])[:, None]
            exponentials_CV.scatter_add_(1, place_C1, -mine_C.to(self.sums)[:, None])
            self._gradients(part, hidden_CD, exponentials_CV)
        return losses_C.sum()

    def _gradients(self, part: slice, hidden_CD: torch.Tensor, grad_CV: torch.Tensor) -> None:
        """From the gradient of the logits."""
        rounded_CV = grad_CV.to(hidden_CD.dtype)
        if self.grad_x is not None:
            torch.mm(rounded_CV, self.weight, out=self.grad_x[part])
        if self.grad_weight is not None:
            if self.grad_weight.dtype == rounded_CV.dtype:
                self.grad_weight.addmm_(rounded_CV.t(), hidden_CD)
            else:
                self.grad_weight += rounded_CV.t() @ hidden_CD
        if self.grad_bias is not None:
            self.grad_bias += grad_CV.sum(0)
