"""One stage of a pipeline: the model's forward from where the stage begins to where the next one does."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from weft.data.batch import map_tensors
from weft.errors import ModelError
from weft.parallel.pipeline.absent import ENCODER, MAIN, Absent, Exit, Flow, Left, Own, Passed, put
from weft.parallel.pipeline.carried import ASIDE, STREAM, Carried
from weft.parallel.pipeline.probe import Probes
from weft.structure import Chain, blocks

#: (model, batch) -> output.
ForwardFn = Callable[[nn.Module, Any], Any]


class Stage:
    """A part of the chain: blocks `first` up to, without, `stop`.

    index: of the stage, from the embedding. takes_gradient: whether something before it is trained, so that it sends
    a gradient back. trains: whether something in it or before it is trained, so that it has a backward. probes: of the
    model before any block was changed; None: it is that model.
    """

    def __init__(
        self, model: nn.Module, chain: Chain, index: int, first: int, stop: int, *, takes_gradient: bool, trains: bool,
        probes: Probes | None = None,
    ):  # fmt: skip
        self.index = index
        self.first, self.stop = first, stop
        self.takes_gradient, self.trains = takes_gradient, trains
        self._model = model
        self._chain = chain
        self._flow = Flow(chain.cross, probes or Probes.of(chain))
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
        between = self._chain.between if self.first < self._chain.joint <= self.stop else ()
        after = self._chain.after if self.is_last else ()
        return (*before, *self._chain.blocks[self.first : self.stop], *between, *after)

    def forward(self, forward: ForwardFn, batch: Any, incoming: Carried | None) -> Any:
        """What the next stage takes; of the last stage the model's output. incoming: None for the first stage."""
        # The graph tells what went into the output; an evaluation before the first step makes one for this once.
        looks, with_gradient = not self._has_looked and not torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._flow.begin(incoming, self._chain_of(self.first), is_marked=looks)
        try:
            with torch.set_grad_enabled(with_gradient or looks):
                output = self._run(forward, batch)
            if looks:
                self._has_looked = True
                self._refuse_other_paths(output)
                if not with_gradient:
                    output = output.detach() if isinstance(output, Carried) else map_tensors(_without_graph, output)
            return output
        finally:
            self._flow.end()

    def _run(self, forward: ForwardFn, batch: Any) -> Any:
        try:
            with self._alone():
                output = forward(self._model, batch)
        except Left as left:
            return left.output
        if not self.is_last:
            raise ModelError(
                f"stage {self.index}: forward of {type(self._model).__name__} ended without a call of block "
                f"{self._chain.blocks[self.stop].path!r}, which begins the next stage. Every block of the chain must "
                f"run in every forward; use pp=1 otherwise."
            )
        return self._flow.with_encoder(output)

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
        hook = None
        if self._chain.towers and not self.is_first:
            hook = self._model.register_forward_pre_hook(self._without_towers, with_kwargs=True)
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()
            for (site, _), module in zip(swaps, was, strict=True):
                put(site, module)

    def _without_towers(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a forward in which images and sounds have been written into the stream already."""
        towers, names = self._chain.towers, inspect.signature(model.forward).parameters
        placed = [None if name in towers else each for name, each in zip(names, args, strict=False)]
        return (*placed, *args[len(placed) :]), {
            name: None if name in towers else each for name, each in kwargs.items()
        }

    def _chain_of(self, block: int) -> int:
        return ENCODER if block < self._chain.joint else MAIN

    def _stand_ins(self) -> list[tuple[blocks.Site, nn.Module]]:
        own, flow = set(map(id, self.sites())), self._flow
        found = list(self._of_blocks())
        replaced = {id(site) for site, _ in found}
        for site in self._chain.sites:
            if id(site) not in own and id(site) not in replaced:
                chain = ENCODER if self._chain.is_encoder(site) else MAIN
                found.append((site, Absent(_real(site), site.path, flow, chain)))
        return found

    def _of_blocks(self) -> Iterator[tuple[blocks.Site, nn.Module]]:
        """Blocks where something enters, is noted or leaves."""
        every, joint, flow = self._chain.blocks, self._chain.joint, self._flow
        after_joint = bool(joint) and self.first >= joint  # the encoder's output was received
        crosses = {self._chain.cross: self._chain.cross} if after_joint else {}
        for place in range(self.first, self.stop):
            taken = crosses
            if place == self.first and not self.is_first:
                taken = None
            elif place == joint > 0 and not self.is_first:
                taken = {STREAM: ASIDE}
            if taken or taken is None or place == self.stop - 1:
                yield every[place], Own(_real(every[place]), every[place].path, flow, self._chain_of(place), taken)
        if self.is_last:
            return
        leaving, goes_on = every[self.stop], self.is_first and self.stop < joint
        kind = Passed if goes_on else Exit
        taken = {STREAM: ASIDE} if self.stop == joint > 0 and not self.is_first else crosses
        yield leaving, kind(_real(leaving), leaving.path, flow, self._chain_of(self.stop), taken)
        if goes_on:
            yield every[joint], Exit(_real(every[joint]), every[joint].path, flow)


def _real(site: blocks.Site) -> nn.Module:
    module = site.module
    return module.stands_for if isinstance(module, Absent) else module


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where it has no graph: a head's loss knows the labels of its batch by identity."""
    return tensor.detach() if tensor.requires_grad else tensor
