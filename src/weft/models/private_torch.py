"""Private names of torch in models/, each with what it is for. Read in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Attention's kernels with their log-sum-exp, of one document at a time. F.scaled_dot_product_attention keeps that to
#: itself.
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class KeepsTies(nn.Module):
    """A module whose tied weights stay tied when it leaves the meta device.

    torch then replaces each module's parameters one by one, which parts a pair; `to` and `to_empty` have no hook.
    """

    def is_tied(self) -> bool:
        """Whether there is a pair now."""
        raise NotImplementedError

    def tie(self) -> None:
        """Make one weight of the pair."""
        raise NotImplementedError

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        was_tied = self.is_tied()
        super()._apply(fn, recurse)
        if was_tied:
            self.tie()
        return self
