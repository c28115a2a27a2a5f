"""Squared norms and weighted sums of per-sample gradients, from the factors that backward computes.

The gradient of a linear layer's weight for one sample is the product of its output gradient and its input. Its squared
norm follows from the two Gram matrices, without the product ("ghost norm": Goodfellow 2015, arXiv 1510.01799; Li et al.
2022, arXiv 2110.05679). The product is computed instead if it is smaller than the factors.

B samples, T tokens of a sample, I inputs, O outputs, D features, R rows of experts, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.errors import ModelError

#: Elements of temporary tensors. Larger ones are computed for some samples at a time.
_AT_ONCE, _IN_CACHE = 2**24, 2**18


class Use(Protocol):
    """Gradient of one use of a parameter, as factors of the gradients of all samples."""

    def norms(self) -> Tensor:
        """Return the squared norm of each sample's gradient, (B,), at least in float32."""
        ...

    def weighted(self, weights_B: Tensor | None) -> Tensor:
        """Return the sum of the samples' gradients in the parameter's shape, multiplied by weights if there are any."""
        ...

    def per_sample(self) -> Tensor:
        """Return the gradient of each sample, (B, *shape)."""
        ...

    def joined(self, count: int) -> Use:
        """Return the use with `count` adjacent samples as one, whose gradient is the sum of theirs."""
        ...

    def without(self, left_out_B: Tensor) -> Use:
        """Return the use with zero gradients of some samples, whose values may not be finite. left_out_B: bool."""
        ...


@dataclass(slots=True)
class Product:
    """Use of a weight (O, I), or (I, O) if `is_transposed`, in a linear layer."""

    x_BTI: Tensor
    grad_BTO: Tensor
    is_transposed: bool = False

    @property
    def is_small(self) -> bool:
        """True if the samples' gradients take at most twice the memory of the factors."""
        (_, num_tokens, num_in), num_out = self.x_BTI.shape, self.grad_BTO.shape[-1]
        return num_in * num_out <= 2 * num_tokens * (num_in + num_out)

    def norms(self) -> Tensor:
        (num_samples, num_tokens, num_in), num_out = self.x_BTI.shape, self.grad_BTO.shape[-1]
        x, grad = wide(self.x_BTI), wide(self.grad_BTO)
        if num_tokens == 1:
            return squares(x) * squares(grad)
        is_ghost = num_tokens * (num_in + num_out) <= num_in * num_out
        each = num_tokens * num_tokens if is_ghost else num_in * num_out
        # On a CPU, temporary tensors stay in its caches.
        step = max(1, (_IN_CACHE if x.device.type == "cpu" else _AT_ONCE) // each)
        found: list[Tensor] = []
        for first in range(0, num_samples, step):
            some_x, some_grad = x[first : first + step], grad[first : first + step]
            if is_ghost:
                gram = torch.bmm(some_x, some_x.mT)
                found.append(gram.mul_(torch.bmm(some_grad, some_grad.mT)).sum((1, 2)))
            else:
                found.append(squares(torch.bmm(some_grad.mT, some_x)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def weighted(self, weights_B: Tensor | None) -> Tensor:
        grad_NO = _times(self.grad_BTO, weights_B).flatten(0, 1)
        x_NI = self.x_BTI.flatten(0, 1)
        return x_NI.t() @ grad_NO if self.is_transposed else grad_NO.t() @ x_NI

    def without(self, left_out_B: Tensor) -> Product:
        gone = left_out_B[:, None, None]
        return Product(self.x_BTI.masked_fill(gone, 0), self.grad_BTO.masked_fill(gone, 0), self.is_transposed)

    def per_sample(self) -> Tensor:
        x, grad = wide(self.x_BTI), wide(self.grad_BTO)
        return torch.bmm(x.mT, grad) if self.is_transposed else torch.bmm(grad.mT, x)

    def joined(self, count: int) -> Product:
        x, grad = (_longer(one, count) for one in (self.x_BTI, self.grad_BTO))
        return Product(x, grad, self.is_transposed)


@dataclass(slots=True)
class EmbeddingRows:
    """Use of a table (`num_rows`, D) in an embedding. Gradients of padding tokens are zero."""

    ids_BT: Tensor
    grad_BTD: Tensor
    num_rows: int

    def norms(self) -> Tensor:
        ids, grad = self.ids_BT, wide(self.grad_BTD)
        step = max(1, _AT_ONCE // ids.shape[1] ** 2)
        found: list[Tensor] = []
        for first in range(0, len(ids), step):
            some = ids[first : first + step]
            same = some[:, :, None] == some[:, None, :]
            gram = torch.bmm(grad[first : first + step], grad[first : first + step].mT)
            found.append(gram.mul_(same).sum((1, 2)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def weighted(self, weights_B: Tensor | None) -> Tensor:
        grad = _times(self.grad_BTD, weights_B).flatten(0, 1)
        return grad.new_zeros(self.num_rows, grad.shape[-1]).index_add_(0, self.ids_BT.flatten(), grad)

    def without(self, left_out_B: Tensor) -> EmbeddingRows:
        return EmbeddingRows(self.ids_BT, self.grad_BTD.masked_fill(left_out_B[:, None, None], 0), self.num_rows)

    def per_sample(self) -> Tensor:
        count, grad = len(self.ids_BT), wide(self.grad_BTD)
        rows = self.ids_BT + torch.arange(count, device=grad.device)[:, None] * self.num_rows
        found = grad.new_zeros(count * self.num_rows, grad.shape[-1])
        return found.index_add_(0, rows.flatten(), grad.flatten(0, 1)).view(count, self.num_rows, -1)

    def joined(self, count: int) -> EmbeddingRows:
        return EmbeddingRows(_longer(self.ids_BT, count), _longer(self.grad_BTD, count), self.num_rows)


@dataclass(slots=True)
class Direct:
    """Gradients of all samples, (B, *shape)."""

    grad_B: Tensor

    def norms(self) -> Tensor:
        return squares(wide(self.grad_B))

    def weighted(self, weights_B: Tensor | None) -> Tensor:
        if weights_B is None:
            return self.grad_B.sum(0)
        flat = self.grad_B.flatten(1)
        return (weights_B.to(flat.dtype) @ flat).view(self.grad_B.shape[1:])

    def without(self, left_out_B: Tensor) -> Direct:
        return Direct(self.grad_B.masked_fill(left_out_B.view(-1, *[1] * (self.grad_B.dim() - 1)), 0))

    def per_sample(self) -> Tensor:
        return wide(self.grad_B)

    def joined(self, count: int) -> Direct:
        return Direct(self.grad_B.unflatten(0, (-1, count)).sum(1))


@dataclass(slots=True)
class ExpertRows:
    """Use of stacked weights (E, O, I) for rows sorted by expert, in which an expert's rows are sorted by sample.

    sample_R: sample of each row. ends: cumulative row counts by expert.
    """

    x_RI: Tensor
    grad_RO: Tensor
    sample_R: Tensor
    ends: Sequence[int]
    num_samples: int

    def norms(self) -> Tensor:
        device, count = self.x_RI.device, len(self.x_RI)
        total = wide(self.x_RI[:0]).new_zeros(self.num_samples)
        if not count:
            return total
        counts = torch.diff(torch.tensor([0, *self.ends], device=device))
        expert_R = torch.arange(len(self.ends), device=device).repeat_interleave(counts, output_size=count)
        # Rows of one expert and one sample are adjacent. Each such run becomes a padded matrix.
        key_R = expert_R * self.num_samples + self.sample_R
        keys, run_R, lengths = torch.unique_consecutive(key_R, return_inverse=True, return_counts=True)
        starts = lengths.cumsum(0) - lengths
        place_R = torch.arange(count, device=device) - starts[run_R]
        padded = (len(keys), int(lengths.max()))
        x = wide(self.x_RI).new_zeros(*padded, self.x_RI.shape[1])
        grad = wide(self.grad_RO).new_zeros(*padded, self.grad_RO.shape[1])
        x[run_R, place_R], grad[run_R, place_R] = wide(self.x_RI), wide(self.grad_RO)
        return total.index_add_(0, keys % self.num_samples, Product(x, grad).norms())

    def weighted(self, weights_B: Tensor | None) -> Tensor:
        grad = _times(self.grad_RO, None if weights_B is None else weights_B[self.sample_R])
        found = grad.new_empty(len(self.ends), grad.shape[1], self.x_RI.shape[1])
        start = 0
        for expert, end in enumerate(self.ends):
            torch.mm(grad[start:end].t(), self.x_RI[start:end], out=found[expert])
            start = end
        return found

    def without(self, left_out_B: Tensor) -> ExpertRows:
        gone = left_out_B[self.sample_R][:, None]
        return replace(self, x_RI=self.x_RI.masked_fill(gone, 0), grad_RO=self.grad_RO.masked_fill(gone, 0))

    def per_sample(self) -> Tensor:
        hot = torch.nn.functional.one_hot(self.sample_R, self.num_samples).to(self.grad_RO.dtype)
        return torch.stack([self._of_sample(hot[:, index]) for index in range(self.num_samples)])

    def joined(self, count: int) -> ExpertRows:
        return ExpertRows(self.x_RI, self.grad_RO, self.sample_R // count, self.ends, self.num_samples // count)

    def _of_sample(self, is_of_R: Tensor) -> Tensor:
        some = ExpertRows(self.x_RI, self.grad_RO * is_of_R[:, None], torch.zeros_like(self.sample_R), self.ends, 1)
        return wide(some.weighted(None))


def kept_bytes(uses: Iterable[Any]) -> int:
    """Return the bytes of the tensors of some uses. Each storage counts once."""
    storages: dict[int, int] = {}
    waiting: list[Any] = list(uses)
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif is_dataclass(one):
            waiting += [getattr(one, field.name) for field in fields(one)]
    return sum(storages.values())


def squared_norms(uses: Sequence[Use]) -> Tensor:
    """Return the squared norm of each sample's gradient of one parameter, which is the sum of the uses' gradients."""
    if len(uses) == 1:
        return uses[0].norms()
    products = [use for use in uses if isinstance(use, Product)]
    lookups = [use for use in uses if isinstance(use, EmbeddingRows)]
    if len(products) + len(lookups) == len(uses) and not any(one.is_transposed for one in products):
        total: Tensor | None = None
        if products:
            linear = _joined(products)
            total = linear.norms()
            for lookup in lookups:
                total = total + 2 * _cross(linear, lookup)
        if lookups:
            ids, grads = [one.ids_BT for one in lookups], [one.grad_BTD for one in lookups]
            own = EmbeddingRows(torch.cat(ids, 1), torch.cat(grads, 1), lookups[0].num_rows).norms()
            total = own if total is None else total + own
        assert total is not None
        return total
    return squares(summed(uses))


def summed(uses: Sequence[Use]) -> Tensor:
    """Return the gradient of each sample, (B, *shape), which is the sum of the uses' gradients."""
    total = uses[0].per_sample()
    for use in uses[1:]:
        total = total + use.per_sample()
    return total


def _joined(products: Sequence[Product]) -> Product:
    if len(products) == 1:
        return products[0]
    return Product(torch.cat([one.x_BTI for one in products], 1), torch.cat([one.grad_BTO for one in products], 1))


def _cross(product: Product, lookup: EmbeddingRows) -> Tensor:
    """Return the inner product of the two gradients of each sample: sum over tokens t of the head and s of the table.

    The head's gradient has row `id(s)` sum_t grad[t, id(s)] x[t], and the table's gradient of token s is added to it.
    """
    x, grad = wide(product.x_BTI), wide(product.grad_BTO)
    ids = lookup.ids_BT[:, None, :].expand(-1, x.shape[1], -1)
    return (torch.gather(grad, 2, ids) * torch.bmm(x, wide(lookup.grad_BTD).mT)).sum((1, 2))


def clip_weights(norms_B: Tensor, clip: float) -> Tensor:
    """Return the factor of each sample's gradient: clip / norm, at most 1, and 0 if the norm is not finite.

    norms_B: squared norms, float64.
    """
    norm = norms_B.clamp_min(0).sqrt()
    return torch.where(torch.isfinite(norm), (clip / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0), 0.0)


def _longer(rows_BT: Tensor, count: int) -> Tensor:
    """Return the tokens of `count` adjacent samples as one sample: (B / count, count * T, ...)."""
    return rows_BT.reshape(len(rows_BT) // count, count * rows_BT.shape[1], *rows_BT.shape[2:])


def _times(grad: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply the rows of a gradient by their weights, if there are any."""
    return grad if weights is None else grad * weights.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1))


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if it has 16 bits, else unchanged."""
    return tensor.float() if tensor.itemsize < 4 else tensor


def squares(tensor_B: Tensor) -> Tensor:
    """Return the sum of squares of each sample's elements, (B,)."""
    # Unlike vecdot, it allocates no temporary tensor.
    return torch.linalg.vector_norm(tensor_B.flatten(1), dim=1).square()


def rows_of_samples(x: Tensor, num_samples: int, where: str) -> Tensor:
    """Return (B, T, D) for activations (B, ..., D), or (B * T, D) with the rows of a sample adjacent.

    Raises:
        ModelError: if the rows cannot be divided by samples.
    """
    if x.dim() > 1 and x.shape[0] == num_samples and x.numel():
        return x.reshape(num_samples, -1, x.shape[-1])
    if x.dim() == 2 and num_samples and x.numel() and x.shape[0] % num_samples == 0:
        return x.reshape(num_samples, -1, x.shape[-1])
    raise ModelError(
        f"privacy: {where} reads a tensor of shape {tuple(x.shape)} in a microbatch of {num_samples} samples, so its "
        f"rows are not samples. Put samples first: ({num_samples}, ..., features)."
    )
