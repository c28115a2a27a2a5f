"""Which modules mix the tokens of a sequence: told by what they are, or by the names of their classes."""

from __future__ import annotations

from torch import nn

_ATTENTION = ("attention", "attn")
#: Beside attention: states that go from token to token, convolutions, and what reads several tokens at once.
_OTHERS = (
    "mamba", "ssm", "rnn", "lstm", "gru", "mixer", "shortconv", "deltanet", "recurrent", "rglru", "rwkv", "lightning",
    "fourier", "compressor",
)  # fmt: skip
#: Families carry such a word in the names of all their modules.
_NEVER = ("norm", "mlp", "embedding", "embeddings")


def mixes_beside_attention(module: nn.Module) -> bool:
    """Whether it has weights and mixes tokens by other ways than attention."""
    if isinstance(module, nn.Conv1d | nn.RNNBase):
        return True
    return _is_named(module, _OTHERS) and _has_weights(module)


def mixes_tokens(module: nn.Module) -> bool:
    """Whether it has weights and mixes tokens, by attention or otherwise."""
    convolves = isinstance(module, nn.Conv2d) or _is_named(module, ("conv1d",))
    return mixes_beside_attention(module) or ((convolves or _is_named(module, _ATTENTION)) and _has_weights(module))


def _is_named(module: nn.Module, words: tuple[str, ...]) -> bool:
    kind = type(module).__name__.lower()
    return any(word in kind for word in words) and not kind.endswith(_NEVER)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
