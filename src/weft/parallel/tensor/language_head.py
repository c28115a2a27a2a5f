"""Head of a language model: it returns logits, or computes the loss directly without storing all logits.

A head that gets the labels before the forward (`expect_labels`) returns a `HeadLoss` or `HeadLogProbs` instead of
logits, if the vocabulary is sharded or the logits would be large. It processes the logits in chunks of tokens, and with
a sharded vocabulary each rank computes only its own entries. Without labels it returns full logits, so any loss
function works under every plan.

N tokens, C tokens per chunk, D features, V entries of the vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.nn import functional as F

from weft.comm.autograd import gather_slice
from weft.comm.mesh import Axis
from weft.errors import ModelError
from weft.models.inspect import layers
from weft.models.inspect.blocks import replace_class
from weft.parallel.layers.index_check import check_labels
from weft.parallel.tensor.head import LossChunking, token_loss, trained_rows
from weft.parallel.tensor.head_log_probs import token_log_probs, token_scores
from weft.parallel.tensor.linear import TOKENS, SharedLayer
from weft.parallel.tensor.sharded_modules import Entry
from weft.private_torch import register_pytree_node

#: A head with an unsharded vocabulary computes the loss directly if the logits would exceed this size.
LARGE_LOGITS_BYTES = 2**28
#: The same for log-probabilities, if many tokens have no label.
SPARSE_LOGITS_BYTES = 2**23

_ATTRIBUTE = "_weft_head"


class _LogitsStandIn:
    """Placeholder for logits. It raises an error if the model changes the logits after the head."""

    __slots__ = ()

    def contiguous(self) -> Self:
        """Return this object. Models may call this on their logits, and it changes no values."""
        return self

    def float(self) -> Self:
        """Return this object. The head computes in float32 or wider."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(name)

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse("indexing")

    def __truediv__(self, other: Any) -> NoReturn:
        _refuse("division")

    def __mul__(self, other: Any) -> NoReturn:
        _refuse("multiplication")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(getattr(function, "__name__", str(function)))


@dataclass(slots=True)
class HeadLoss(_LogitsStandIn):
    """Output of a head instead of logits: the sum of the losses of tokens with a label, and the number of these tokens.

    If the batch has weights, `loss_sum` is the weighted sum, and `num_tokens` the sum of the weights.
    """

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor
    labels: torch.Tensor


@dataclass(slots=True)
class HeadLogProbs(_LogitsStandIn):
    """Output of a head for a loss on log-probabilities: log p(label) of each token, (B, T); 0 for ignored labels.

    For scores, `is_top` is a mask of the tokens whose label is the likeliest.
    """

    log_probs: torch.Tensor
    labels: torch.Tensor
    is_top: torch.Tensor | None = None


def _refuse(what: str) -> NoReturn:
    raise ModelError(
        f"loss: the model changes its logits after the head ({what}), so the head cannot compute the loss. Use your "
        "own loss_fn, which receives full logits."
    )


register_pytree_node(
    HeadLoss,
    lambda loss: ([loss.loss_sum, loss.num_tokens, loss.labels], None),
    lambda leaves, _: HeadLoss(*leaves),
    serialized_type_name="weft.HeadLoss",
)
register_pytree_node(
    HeadLogProbs,
    lambda found: ([found.log_probs, found.labels, found.is_top], None),
    lambda leaves, _: HeadLogProbs(*leaves),
    serialized_type_name="weft.HeadLogProbs",
)


class Head:
    """State of a model's head in addition to its weight.

    Attributes:
        line: ranks over which the vocabulary is sharded, and whether sp shards the head's input tokens.
        vocab: number of entries without padding.
        entry: `Entry` of a sharded head.
        scales: True if the model changes logits after the head, so that the head cannot compute the loss.
        way: chunk size, or None for the default of a CPU.
    """

    def __init__(self, line: SharedLayer, vocab: int, entry: Entry | None, scales: bool, way: LossChunking | None):
        self.line, self.vocab, self.entry, self.scales, self.way = line, vocab, entry, scales, way
        self.labels: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None
        self.of_tokens = False  # the loss asks for each token's log-probability
        self.of_scores = False  # the caller asks for log-probabilities without gradients, whatever the size
        self.ignore = -100

    def gives_loss(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return True if the head computes the loss of x.

        This is so if labels match these tokens, the model does not change logits after the head, and the vocabulary is
        sharded, the logits are large, or a loss on log-probabilities has many tokens without a label.
        """
        labels = self.labels
        if labels is None or self.scales or x.dim() != labels.dim() + 1:
            return False
        shape = list(x.shape[:-1])
        if self.line.cuts_tokens:
            shape[TOKENS] *= self.line.axis.size
        if tuple(shape) != tuple(labels.shape):
            return False
        size_bytes = labels.numel() * weight.shape[0] * 4
        if self.of_scores or self.line.axis.size > 1 or size_bytes > LARGE_LOGITS_BYTES:
            return True
        return (
            self.of_tokens
            and size_bytes > SPARSE_LOGITS_BYTES
            and trained_rows(labels.flatten(), self.ignore) is not None
        )


class LossHead(nn.Module):
    """A linear layer that returns logits, or the loss of its input tokens."""

    def forward(self, x: torch.Tensor) -> Any:
        """Return a HeadLoss or HeadLogProbs if `Head.gives_loss` is True, else the logits of the full vocabulary.

        Raises ModelError for a label outside the vocabulary.
        """
        head: Head = getattr(self, _ATTRIBUTE)
        weight, bias = layers.weight_of(self), layers.bias_of(self)
        if head.gives_loss(x, weight):
            labels = head.labels
            assert labels is not None
            check_labels(labels, head.vocab, head.ignore)
            if head.of_scores:
                scores = token_scores(x, weight, bias, labels, head.line, head.vocab, head.ignore, head.way)
                return HeadLogProbs(scores[0], labels, scores[1])
            if head.of_tokens:
                found = token_log_probs(x, weight, bias, labels, head.line, head.vocab, head.ignore, head.way)
                return HeadLogProbs(found, labels)
            weights = head.weights
            loss_sum = token_loss(x, weight, bias, labels, head.line, head.vocab, head.ignore, head.way, weights)
            trained = labels != head.ignore
            count = trained.sum() if weights is None else weights.where(trained, 0.0).sum(dtype=torch.float64)
            return HeadLoss(loss_sum, count, labels)
        if head.entry is None:
            return F.linear(x, weight, bias)
        logits = head.entry.product(self, head.entry.enter(x) if head.line.cuts_tokens else x)
        return gather_slice(logits, head.line.axis, -1)[..., : head.vocab]


def make_head(
    module: nn.Module, line: SharedLayer, vocab: int, entry: Entry | None, scales: bool, way: LossChunking | None = None
) -> None:
    """Make a linear layer compute the loss when `Head.gives_loss` is True. The arguments are attributes of `Head`."""
    replace_class(module, LossHead, head=Head(line, vocab, entry, scales, way))


def fuse_head(module: nn.Module, scales: bool, way: LossChunking | None = None) -> None:
    """Make an output layer with an unsharded vocabulary compute the loss if it has labels and logits would be large.

    The arguments are attributes of `Head`.
    """
    uncut = SharedLayer(Axis("tp", 1, 0, (0,)))
    make_head(module, uncut, layers.weight_of(module).shape[0], None, scales, way)


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the first module that `make_head` was called on, or None."""
    return next((module for module in model.modules() if isinstance(module, LossHead)), None)


@contextmanager
def expect_labels(model: nn.Module, loss_fn: Any, batch: Any) -> Iterator[None]:
    """Set the batch's labels on the head of `model` in the context, if `loss_fn` accepts the head's result.

    Otherwise the head returns logits.

    Args:
        model: model, with or without a head that can compute the loss.
        loss_fn: accepts the head's loss if its attribute `takes_head_loss` is true. With the value "tokens" it receives
            the log-probability of each token, and with "scores" also whether it is the likeliest, without gradients.
        batch: mapping with "labels", and "weights" if not all labels have weight 1.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    takes = getattr(loss_fn, "takes_head_loss", False)
    module = find_head(model) if takes and labels is not None else None
    if module is None:
        yield
        return
    head: Head = getattr(module, _ATTRIBUTE)
    head.labels, head.weights = labels, batch.get("weights")
    head.of_tokens, head.of_scores = takes == "tokens", takes == "scores"
    try:
        yield
    finally:
        head.labels, head.weights, head.of_tokens, head.of_scores = None, None, False, False
