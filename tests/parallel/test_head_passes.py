"""The three implementations of a head loss's passes over its logits agree."""

from __future__ import annotations

import pytest
import torch

from weft.parallel.tensor import head as head_passes
from weft.parallel.tensor.head import Labels

FORMS = {
    "in place": lambda: head_passes._IN_PLACE,
    "normalised": lambda: head_passes._NORMALISED,
    "compiled": lambda: head_passes.LogitPasses(
        lambda logits, labels, dtype: (logits, *head_passes._narrow_sums(logits, labels.place_C1, dtype)),
        lambda kept, total_lse, label, labels, dtype: head_passes._narrow_gradient(kept, total_lse, *labels, dtype),
    ),
}


def run(form, logits_CV, labels_C, parts, dtype):
    """Return loss and gradient with the vocabulary in `parts` shards, as on tp ranks."""
    passes, size = FORMS[form](), logits_CV.shape[1] // parts
    kept, lse, at, where = [], [], [], []
    for number in range(parts):
        local = labels_C - number * size
        is_local = (local >= 0) & (local < size)
        where.append(Labels(local.where(is_local, 0)[:, None], is_local))
        part = logits_CV[:, number * size : (number + 1) * size].clone()
        found = passes.sums(part, where[-1], torch.float64 if dtype == torch.float64 else torch.float32)
        for many, one in zip((kept, lse, at), found, strict=True):
            many.append(one)
    total_lse = lse[0] if parts == 1 else torch.stack(lse).logsumexp(0)
    label = sum(one.where(labels.is_here_C, 0.0) for one, labels in zip(at, where, strict=True))
    grads = [passes.gradient(kept[n], total_lse, at[n], where[n], dtype) for n in range(parts)]
    return (total_lse - label).sum(), torch.cat(grads, 1)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, dtype) for form in ("in place", "compiled") for dtype in (torch.float64, torch.float32)),
        *(
            (form, torch.bfloat16) for form in FORMS
        ),  # logits are normalized only if their dtype is narrower than the sums'
    ],
)
def test_loss_and_gradient_match_full_logits(form, parts, dtype):
    torch.manual_seed(0)
    logits, labels = (4 * torch.randn(7, 12)).to(dtype), torch.randint(0, 8, (7,))
    logits[0, labels[0]] = 9.0  # nearly certain
    logits[:, 8:] = torch.finfo(dtype).min  # padding, the last rank's full shard
    wide = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, labels, reduction="sum")
    expected.backward()
    loss, grad = run(form, logits, labels, parts, dtype)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=close, atol=0)
    rounding = close if dtype != torch.bfloat16 else 2**-8
    torch.testing.assert_close(grad.double(), wide.grad, rtol=rounding, atol=close)


def test_generated_code_matches_eager_passes():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 12), torch.tensor([1, 0, 11, 4, 4])
    labels_of = Labels(labels[:, None], torch.ones(5, dtype=torch.bool))
    found = []
    for passes in (
        head_passes.passes_for(logits, torch.float32, False),
        head_passes.passes_for(logits, torch.float32, True),
    ):
        kept, lse, at = passes.sums(logits.clone(), labels_of, torch.float32)
        found.append((lse, passes.gradient(kept, lse, at, labels_of, torch.float32)))
    torch.testing.assert_close(found[1], found[0])
