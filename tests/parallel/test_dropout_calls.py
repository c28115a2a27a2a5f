"""Search of forward's code for dropout."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from weft.parallel.dropout.dropout_calls import calls_dropout


class _NotInstalled(types.ModuleType):
    """A module that is imported at its first use, like Keras' module for TensorFlow."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"{self.__name__} is not installed")


other = _NotInstalled("other")


class Lazy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return other.compute(x) if isinstance(x, str) else x


def test_code_that_refers_to_a_module_that_is_not_installed() -> None:
    assert not calls_dropout(Lazy(), {})
