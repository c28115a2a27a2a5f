"""Sampling from a decoder, one token after another, with a key-value cache. V vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from weft.errors import ModelError
from weft.models.decoder import Decoder
from weft.models.kv_cache import Cache


@torch.no_grad()
def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    num_ids: int | None = None,
    use_cache: bool = True,
) -> list[int]:
    """Return the token ids that follow the prompt. A stop id ends the text and is not part of it.

    Args:
        model: on any device.
        prompt_ids: at least one id.
        max_tokens: maximum number of new tokens.
        temperature: 0 always takes the most likely token.
        top_k: sample among the k most likely tokens only; None: among all.
        seed: the same seed gives the same ids on any device, as far as the logits agree.
        stop_ids: ids that end the text.
        num_ids: sample only ids below this, for a vocabulary larger than the tokenizer's; None: sample all ids.
        use_cache: False recomputes the full text for each token.

    Raises:
        ModelError: if the prompt is empty or contains an id outside the vocabulary, if prompt and new tokens together
            may exceed the model's max_seq_len, or if `max_tokens`, `temperature` or `top_k` is out of range.
    """
    _check(model, prompt_ids, max_tokens, temperature, top_k)
    device = model.embed.weight.device
    dice = torch.Generator().manual_seed(seed)
    cache = Cache(model.spec.num_layers, len(prompt_ids) + max_tokens) if use_cache else None
    text, fresh = list(prompt_ids), list(prompt_ids)
    while len(text) < len(prompt_ids) + max_tokens:
        input_ids = torch.tensor([fresh if use_cache else text], device=device)
        logits_V = model(input_ids, cache=cache)[0, -1, :num_ids]
        chosen = _choose(logits_V.double().cpu(), temperature, top_k, dice)
        if chosen in stop_ids:
            break
        text.append(chosen)
        fresh = [chosen]
    return text[len(prompt_ids) :]


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, dice: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < logits_V.numel():
        values, ids = logits_V.topk(top_k)
    else:
        values, ids = logits_V, torch.arange(logits_V.numel())
    shares = ((values - values.max()) / temperature).softmax(-1).cumsum(-1)
    point = torch.rand((), generator=dice, dtype=torch.float64) * shares[-1]
    return int(ids[min(int(torch.searchsorted(shares, point, right=True)), ids.numel() - 1)])


def _check(model: Decoder, prompt_ids: Sequence[int], max_tokens: int, temperature: float, top_k: int | None) -> None:
    vocab_size, longest = model.spec.vocab_size, model.spec.max_seq_len
    if not prompt_ids:
        raise ModelError("prompt: it has no tokens, and the model needs one to start from. Give at least one.")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        bad = next(token for token in prompt_ids if not 0 <= token < vocab_size)
        raise ModelError(
            f"prompt id {bad}: the model's vocabulary has {vocab_size} entries. Use ids from 0 to {vocab_size - 1}."
        )
    if max_tokens < 0:
        raise ModelError(f"max_tokens={max_tokens}: it must be 0 or more. Use e.g. 100.")
    if len(prompt_ids) + max_tokens > longest:
        room = longest - len(prompt_ids)
        remedy = f"Use max_tokens={room} or less" if room > 0 else f"Use a prompt of fewer than {longest} tokens"
        raise ModelError(
            f"max_tokens={max_tokens}: with a prompt of {len(prompt_ids)} tokens this is longer than "
            f"max_seq_len={longest}. {remedy}."
        )
    if not 0 <= temperature < float("inf"):
        raise ModelError(f"temperature={temperature}: it must be finite and at least 0. Use e.g. 0.8.")
    if top_k is not None and top_k < 1:
        raise ModelError(f"top_k={top_k}: it must be at least 1. Use e.g. 50.")
