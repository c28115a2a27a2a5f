"""Which modules drop in training."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import nn

#: What modules call the share that they drop by functions.
_RATES = (
    "attention_dropout", "attn_dropout", "dropout", "attn_pdrop", "attention_probs_dropout_prob", "resid_dropout",
    "hidden_dropout",
)  # fmt: skip


def _is_dropout(module: nn.Module) -> TypeGuard[nn.Dropout]:
    return type(module).forward is nn.Dropout.forward


def drops_itself(module: nn.Module) -> bool:
    """Return whether a module is nn.Dropout, names a rate, or is attention with a dropout for it."""
    if _is_dropout(module):
        return module.p > 0
    kind = type(module).__name__.lower()
    for name in _RATES:
        value: Any = getattr(module, name, None)
        if isinstance(value, float) and value > 0:
            return True
        if isinstance(value, nn.Dropout) and value.p > 0 and ("attention" in kind or "attn" in kind):
            return True
    return False
