"""One stage of a pipeline: the model's forward from where the stage begins to where the next one does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from weft.data.batch import map_tensors
from weft.errors import ModelError
from weft.parallel.pipeline.absent import Absent, Exit, Flow, Left, StageEntry, put
from weft.structure import Chain, blocks

#: (model, batch) -> output.
ForwardFn = Callable[[nn.Module, Any], Any]


class Stage:
    """A part of the chain: blocks `first` up to, without, `stop`.

    index: of the stage, from the embedding. takes_gradient: whether something before it is trained, so that it sends
    a gradient back. trains: whether something in it or before it is trained, so that it has a backward.
    """

    def __init__(
        self, model: nn.Module, chain: Chain, index: int, first: int, stop: int, *, takes_gradient: bool, trains: bool
    ):
        self.index = index
        self.first, self.stop = first, stop
        self.takes_gradient, self.trains = takes_gradient, trains
        self._model = model
        self._chain = chain
        self._flow = Flow()
        self._has_looked = False
        self._swaps: list[tuple[blocks.Site, nn.Module]] = []

    @property
    def is_first(self) -> bool:
        """Whether it reads the microbatch itself."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss follows it."""
        return self.stop == len(self._chain.blocks)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of its blocks, in order."""
        return tuple(site.path for site in self._chain.blocks[self.first : self.stop])

    def sites(self) -> tuple[blocks.Site, ...]:
        """The places of its modules."""
        before = self._chain.before if self.is_first else ()
        after = self._chain.after if self.is_last else ()
        return (*before, *self._chain.blocks[self.first : self.stop], *after)

    def forward(self, forward: ForwardFn, batch: Any, incoming: torch.Tensor | None) -> Any:
        """What the next stage takes; of the last stage the model's output. incoming: None for the first stage."""
        # The graph tells what went into the output; an evaluation before the first step makes one for this once.
        looks, with_gradient = not self._has_looked and not torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._flow.begin(incoming, is_marked=looks)
        try:
            with torch.set_grad_enabled(with_gradient or looks):
                output = self._run(forward, batch)
            if looks:
                self._has_looked = True
                self._refuse_other_paths(output)
                output = output if with_gradient else map_tensors(torch.Tensor.detach, output)
            return output
        finally:
            self._flow.end()

    def _run(self, forward: ForwardFn, batch: Any) -> Any:
        try:
            with self._alone():
                return forward(self._model, batch)
        except Left as left:
            return left.output

    def _refuse_other_paths(self, output: Any) -> None:
        """ModelError where something reaches the output past the blocks, which a stage does not receive."""
        if self._flow.reaches(output):
            raise ModelError(
                f"pp: {type(self._model).__name__} carries values from block to block outside of them, such as a "
                f"residual that is added around a block, and a stage receives only what the block before gave. "
                f"Put that into the blocks, or use pp=1."
            )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While inside, everything but this stage's modules is stood in for."""
        swaps = self._swaps = self._swaps or self._stand_ins()
        was = [site.module for site, _ in swaps]
        for site, stand_in in swaps:
            put(site, stand_in)
        try:
            yield
        finally:
            for (site, _), module in zip(swaps, was, strict=True):
                put(site, module)

    def _stand_ins(self) -> list[tuple[blocks.Site, nn.Module]]:
        own, blocks = set(map(id, self.sites())), self._chain.blocks
        entry = None if self.is_first else blocks[self.first]
        leaving = None if self.is_last else blocks[self.stop]
        found: list[tuple[blocks.Site, nn.Module]] = []
        for site in self._chain.sites:
            kind = StageEntry if site is entry else Exit if site is leaving else None if id(site) in own else Absent
            if kind is not None:
                real = site.module
                found.append((site, kind(real.stands_for if isinstance(real, Absent) else real, site.path, self._flow)))
        return found
