"""Host links for tests without a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.memory.host_link import Waitable


class LateCopy:
    """A copy that runs only when it is waited for: the latest time that a device may take."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None, count: Callable[[], None]):
        self._todo: tuple[torch.Tensor, torch.Tensor] | None = (source, target)
        self._after = after
        self._count = count
        target.view(-1)[:].fill_(float("nan")) if target.is_floating_point() and target.is_contiguous() else None

    def wait_start(self) -> None:
        if self._after is not None:
            self._after.wait()
        self._after = None

    def wait(self) -> None:
        self.wait_start()
        if self._todo is not None:
            source, target = self._todo
            self._todo = None
            with torch.no_grad():
                target.copy_(source)
            self._count()

    def wait_host(self) -> None:
        self.wait()


class LateLink:
    """Link whose copies overlap with other work, like a device's copy engines. See `LateCopy`."""

    overlaps = True

    def __init__(self):
        self.done = {"down": 0, "up": 0}
        self.bytes = {"down": 0, "up": 0}

    def down(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> LateCopy:
        return self._copy("down", source, target, after)

    def up(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> LateCopy:
        return self._copy("up", source, target, after)

    def _copy(self, direction: str, source: torch.Tensor, target: torch.Tensor, after: Waitable | None) -> LateCopy:
        def count() -> None:
            self.done[direction] += 1
            self.bytes[direction] += source.nbytes

        return LateCopy(source, target, after, count)
