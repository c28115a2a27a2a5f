"""Parameters that somebody wrote to: masters follow, with `load_state_dict` as the weights were before rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weft.errors import ModelError
from weft.parallel.zero.flat.buckets import Slot
from weft.private_torch import version_of


def written(slots: Sequence[Slot]) -> Iterator[Slot]:
    """Yield those whose parameter was written to since its master was.

    Raises:
        ModelError: for a parameter that was moved, frozen or cast after `parallelize`.
    """
    for slot in slots:
        param = slot.param
        if param.data_ptr() != slot.address or not param.requires_grad:
            what = "moved to other memory or another format" if param.requires_grad else "frozen"
            raise ModelError(f"parameter {slot.name!r}: it was {what} after parallelize. Do that before parallelize.")
        if version_of(param) != slot.version:
            yield slot


def take_master(slot: Slot, whole: torch.Tensor) -> None:
    """Let this rank's part of the master follow a parameter that was written. whole: what it was written from."""
    slot.version = version_of(slot.param)
    bucket = slot.bucket
    assert bucket is not None
    piece = slot.piece(bucket.master, bucket.own)
    if bucket.is_mixed and piece is not None:
        if bucket.host is not None:
            bucket.host.arrive()
        with torch.no_grad():
            piece.copy_(slot.cut(whole.detach().to(device=piece.device, dtype=piece.dtype), bucket.own))


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
