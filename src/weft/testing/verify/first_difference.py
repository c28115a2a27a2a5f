"""The first module in which a plan's activations part from those of one process.

One process keeps what each module gives in its first forward (`OutputRecorder`); the ranks compare with it, as their
own modules run (`Watcher`). A rank compares the rows of its samples. An output that a plan cuts in other ways, or whose
rows were padded to another length, has another shape, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weft.private_torch import graph_task, tree_leaves
from weft.train import Microbatches

#: Of one module's call: which call of it, and which tensor of what it gives.
Key = tuple[str, int, int]


class OutputRecorder:
    """Keeps outputs by (module path, call, tensor), in the order in which modules finish."""

    def __init__(self) -> None:
        self.outputs: dict[Key, torch.Tensor] = {}

    def see(self, key: Key, output: torch.Tensor) -> None:
        self.outputs[key] = output.detach().clone()


class Watcher:
    """Compares outputs of microbatches with the rows of the recorded ones that are their samples'.

    own: the microbatches. every: the whole batch as one. Both know their samples.
    """

    def __init__(self, outputs: dict[Key, torch.Tensor], own: Microbatches, every: Microbatches, limit: float):
        self._outputs, self._limit = outputs, limit
        assert own.samples is not None and every.samples is not None  # noqa: PT018
        self._own, [self._every] = own.samples, every.samples
        self._order = {key: index for index, key in enumerate(outputs)}
        self._seen: dict[tuple[str, int], int] = {}
        self.num_compared = 0
        #: (place in the order, module path, relative difference) of the earliest module that parted.
        self.parted: tuple[int, str, float] | None = None

    def see(self, key: Key, output: torch.Tensor) -> None:
        path, call, place = key
        calls = 1 + max((known[1] for known in self._outputs if known[0] == path), default=0)
        micro, call = divmod(call, calls)
        whole = self._outputs.get((path, call, place))
        if whole is None or micro >= len(self._own) or not whole.ndim or not output.ndim:
            return
        rows = self._rows(micro, len(whole), len(output))
        expected = None if rows is None else whole[rows]
        if expected is None or expected.shape != output.shape or not output.is_floating_point():
            return
        self.num_compared += 1
        scale = max(float(whole.abs().max()), 1e-300)
        apart = float((output.detach().to(expected) - expected).abs().max()) / scale
        order = self._order[(path, call, place)]
        if not apart <= self._limit and (self.parted is None or order < self.parted[0]):
            self.parted = (order, path or "the model", apart)

    def _rows(self, micro: int, count_of_all: int, count: int) -> torch.Tensor | None:
        """Where the rows of a microbatch's output are among those of the whole batch; None where they are not."""
        own = self._own[micro]
        are_samples = count == len(own.numbers)
        if own.is_empty or are_samples != (count_of_all == len(self._every.numbers)):
            return None
        device = torch.device("cpu")
        places = {place: row for row, place in enumerate(self._every.places(count_of_all, device).tolist())}
        rows = [places.get(place) for place in own.places(count, device).tolist()]
        return None if None in rows else torch.tensor(rows)


@contextmanager
def watching(model: nn.Module, eyes: OutputRecorder | Watcher) -> Iterator[None]:
    """While inside, `eyes` see what every module of the model gives in forward; replays in backward are no calls."""
    counts: dict[str, int] = {}
    handles = []

    def hook_of(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.is_grad_enabled() or graph_task() != -1:
                return
            call = counts[path] = counts.get(path, -1) + 1
            for place, leaf in enumerate(tree_leaves(output)):
                if isinstance(leaf, torch.Tensor):
                    eyes.see((path, call, place), leaf)

        return hook

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_hook(hook_of(path)))
        yield
    finally:
        for handle in handles:
            handle.remove()
