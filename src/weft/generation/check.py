"""A check that a model computes the same with a cache of rows as without a cache."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.generation.forward import next_logits
from weft.generation.row_cache import RowCache

#: Largest difference of logits, in units of their standard deviation over the vocabulary. Rounding of bf16 reaches some
#: hundredths. A wrong position, mask or state gives tenths or more.
_LARGEST = {torch.bfloat16: 0.2, torch.float16: 0.05}
_LARGEST_FP32 = 0.01
#: Lengths of the two prompts.
_LENGTHS = (3, 6)

_checked = weakref.WeakSet[nn.Module]()


@torch.no_grad()
def expect_rows(model: nn.Module, vocab_size: int) -> None:
    """Compare logits of two texts in one batch with the logits of each text alone, once per model.

    Collective over the ranks that share the model's weights.

    Raises:
        ModelError: if they differ, or the model fails with a cache.
    """
    if model in _checked:
        return
    param = next(param for param in model.parameters())
    texts = [_ids(length + 2, vocab_size, param.device) for length in _LENGTHS]
    alone = [[next_logits(model, text[None, :end])[0] for end in (-2, -1, len(text))] for text in texts]
    try:
        joined = _joined(model, texts)
    except ModelError:
        raise
    except Exception as error:  # other people's models may raise anything
        raise ModelError(
            f"generation with {type(model).__name__}: it fails with a cache ({type(error).__name__}: {error}). "
            "Generate with transformers."
        ) from error
    difference = max(
        float((found - wanted).abs().max() / wanted.std().clamp(min=1e-30))
        for found, wanted in zip(joined, (torch.stack(each).float() for each in alone), strict=True)
    )
    # Sharded weights may be stored in fp32 for a forward in bf16, and a head may return fp32 from bf16 weights.
    dtypes = (param.dtype, alone[0][0].dtype)
    if not difference <= max(_LARGEST.get(dtype, _LARGEST_FP32) for dtype in dtypes):
        raise ModelError(
            f"generation with {type(model).__name__}: with a cache of two texts its logits differ from those of each "
            f"text alone by {difference:.2g} standard deviations. Generate one prompt at a time with transformers."
        )
    _checked.add(model)


def _ids(number: int, vocab_size: int, device: torch.device) -> Tensor:
    return (torch.arange(1, number + 1, device=device) * 7919) % vocab_size


def _joined(model: nn.Module, texts: list[Tensor]) -> list[Tensor]:
    """Return the logits after each prompt, and after each of two more tokens of both texts: (3, V) per text."""
    cache, first = None, []
    for text, length in zip(texts, _LENGTHS, strict=True):
        fresh = RowCache(model)
        first.append(next_logits(model, text[None, :length], cache=fresh)[0].float())
        fresh.started(1, length)
        if cache is None:
            cache = fresh
        else:
            cache.join([fresh])
    rows: list[Any] = [[each] for each in first]
    for step in range(2):
        assert cache is not None
        ends = [length + step for length in _LENGTHS]
        ids = torch.stack([text[end, None] for text, end in zip(texts, ends, strict=True)])
        positions = torch.tensor(ends, device=ids.device)[:, None]
        for row, logits in zip(rows, next_logits(model, ids, positions, cache), strict=True):
            row.append(logits.float())
        cache.advanced()
    return [torch.stack(row) for row in rows]
