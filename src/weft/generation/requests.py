"""Requests for text, the sampling of their tokens, and the results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from weft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of requests are sampled.

    Attributes:
        max_tokens: maximum number of new tokens of a request; fewer if the model's context ends before.
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: sample among the k most likely tokens; None: among all.
        top_p: sample among the most likely tokens whose probabilities add up to this; 1: among all.
        seed: with a request's key and a token's position, it determines the random number of the token.
        stop_ids: ids that end a text.

    Raises:
        ConfigError: if a value is out of range.
    """

    max_tokens: int = 200
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self):
        rules: tuple[tuple[str, float | int | None, bool, str], ...] = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1. Use e.g. 200"),
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or a positive number. Use e.g. 0.8"),
            ("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1. Use e.g. 50"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1. Use e.g. 0.95"),
        )
        for name, value, is_good, rule in rules:
            if not is_good:
                raise ConfigError(f"{name}={value}: it must be {rule}.")


@dataclass(frozen=True, slots=True)
class Request:
    """A text to continue.

    Attributes:
        key: identifies the request. Requests with one key and one prompt get the same text.
        prompt_ids: token ids, at least one.
    """

    key: int
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """The text of one request.

    Attributes:
        key: the request's key.
        ids: new token ids. The last one is the stop id if reason is "stop" and one was sampled.
        log_probs: log probability of each id, by a softmax of logits / temperature over all ids (temperature 0: of the
            logits), whatever top_k and top_p are.
        reason: "stop" (a stop id, or `ends`), "length", or "refused".
        error: why the request was refused, else "".
    """

    key: int
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    reason: Literal["stop", "length", "refused"]
    error: str = ""


def refusal(request: Request, vocab_size: int, max_positions: int) -> str:
    """Return why a model cannot continue a prompt, or ""."""
    ids = request.prompt_ids
    if not ids:
        return "the prompt has no tokens. Give at least one."
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        return f"prompt id {bad}: the model's vocabulary has {vocab_size} entries. Use ids from 0 to {vocab_size - 1}."
    if len(ids) >= max_positions:
        return f"the prompt has {len(ids)} tokens, and the model reads at most {max_positions}. Give a shorter prompt."
    return ""


def expect_one_each(requests: Iterable[Request]) -> None:
    """Raise ConfigError if two requests have the same key."""
    seen = set[int]()
    for request in requests:
        if request.key in seen:
            raise ConfigError(f"request {request.key}: another request has this key. Give each its own.")
        seen.add(request.key)
