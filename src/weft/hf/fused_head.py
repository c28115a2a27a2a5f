"""Fused heads of TRL's trainers. They read the head's full weight, so under zero=3 and tp the head computes logits."""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import torch
from torch import nn


def replace_fused_head(model: nn.Module, *, restores: bool) -> None:
    """Make forwards that TRL fused with the head compute their log-probabilities from the head's logits.

    Args:
        restores: restore the model's own forward instead.
    """
    for module in model.modules():
        fused = getattr(vars(module).get("forward"), "__func__", None)
        if fused is None or fused.__code__.co_name != "_fused_forward":
            continue
        if restores:
            del module.forward
            continue
        known = {
            name: cell.cell_contents
            for name, cell in zip(fused.__code__.co_freevars, fused.__closure__ or (), strict=True)
        }
        module.forward = types.MethodType(_forward_of(module, known), module)


def _forward_of(module: nn.Module, variables: dict[str, Any]) -> Any:
    """Return a replacement for TRL's fused forward, given the values of its closure by name."""
    output_class: Any = importlib.import_module("trl.trainer.utils").FusedCausalLMOutput

    plain, temperature, fields = (variables[name] for name in ("original_forward", "temperature", "outputs"))

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return plain(*args, **kwargs)
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        num_items = kwargs.pop("num_items_in_batch", None)
        logits = plain(*args, **{**kwargs, "use_cache": False}).logits
        if shifted is None:
            logits, shifted = logits[:, :-1], labels[:, 1:]
        found = token_fields(logits, shifted, temperature, fields)
        mask = shifted != -100
        loss = -found["log_probs"].sum() / (mask.sum().clamp(min=1) if num_items is None else num_items)
        return output_class(loss=loss, label_mask=mask, **found)

    return forward


def token_fields(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, fields: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Return the fields of TRL's output for each token, (B, T); 0 if its label is -100.

    Args:
        logits: (B, T, V).
        labels: next tokens, (B, T).
        temperature: divisor of the logits.
        fields: names of fields in addition to log_probs.
    """
    logits, mask = (logits if logits.dtype == torch.float64 else logits.float()) / temperature, labels != -100
    log_p = logits.log_softmax(-1)
    found = {"log_probs": log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)}
    if "entropy" in fields:
        found["entropy"] = -(log_p.exp() * log_p).sum(-1)
    with torch.no_grad():
        if "log_sum_sq_probs" in fields:
            found["log_sum_sq_probs"] = (2 * log_p).logsumexp(-1)
        if "mean_logits" in fields:
            found["mean_logits"] = logits.mean(-1)
        if "is_top1" in fields:
            found["is_top1"] = logits.argmax(-1) == labels
    return {name: value.masked_fill(~mask, 0) for name, value in found.items()}
