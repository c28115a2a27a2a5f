"""Private names of torch that models/ uses, each with its purpose. Checked against torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Flash attention kernels on CPU, for one document at a time. Unlike F.scaled_dot_product_attention they return the
#: log-sum-exp.
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class KeepsTies(nn.Module):
    """A module whose tied weights stay tied when it leaves the meta device.

    torch then replaces each module's parameters one by one, which unties them; `to` and `to_empty` have no hook.
    """

    def is_tied(self) -> bool:
        """Return True if the weights are tied now."""
        raise NotImplementedError

    def tie(self) -> None:
        """Tie the weights."""
        raise NotImplementedError

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        was_tied = self.is_tied()
        super()._apply(fn, recurse)
        if was_tied:
            self.tie()
        return self
