"""`load_state_dict` on a module whose parameters are rounded: masters take the weights as they were before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


class FollowLoads:
    """Hooks around `load_state_dict` of a whole module. take: gives the masters the loaded tensors, by name.

    The module keeps the hooks, and those of a copy of the module take nothing.
    """

    def __init__(self, take: Callable[[Mapping[str, Any]], None] | None = None):
        self._take = take
        self._loaded: Mapping[str, Any] = {}

    def before(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Keep what is about to be loaded."""
        del module, rest
        self._loaded = {name.removeprefix(prefix): tensor for name, tensor in state.items()}

    def after(self, module: nn.Module, incompatible: Any) -> None:
        """Give it to the masters."""
        del module, incompatible
        loaded, self._loaded = self._loaded, {}
        if self._take is not None:
            self._take(loaded)

    def __reduce__(self) -> tuple[type[FollowLoads], tuple[()]]:
        return FollowLoads, ()
