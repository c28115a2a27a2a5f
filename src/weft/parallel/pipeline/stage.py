"""One stage of a pipeline: the model's forward from where the stage begins to where the next one does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from weft.data.batch import map_tensors
from weft.parallel.pipeline.absent import Absent, Flow, Left, Relay, put
from weft.parallel.pipeline.carried import Carried
from weft.parallel.pipeline.remote import local
from weft.parallel.pipeline.survey import StageRoute, ValueSurvey, without_towers
from weft.structure import Chain, blocks

#: (model, batch) -> output.
ForwardFn = Callable[[nn.Module, Any], Any]


class Stage:
    """A part of the chain.

    index: of the stage, from the embedding. takes_gradient: whether something before it is trained, so that it sends
    a gradient back. trains: whether something in it or before it is trained, so that it has a backward.

    Args:
        model: whole, or this rank's part of it.
        chain: of the whole model.
        survey: of the whole model.
        index: of the stage.
        takes_gradient: see above.
        trains: see above.
    """

    def __init__(
        self, model: nn.Module, chain: Chain, survey: ValueSurvey, index: int, *, takes_gradient: bool, trains: bool
    ):  # fmt: skip
        self.index = index
        self.takes_gradient, self.trains = takes_gradient, trains
        self._model = model
        self._chain = chain
        self._survey = survey
        self._flow = Flow(index, survey)
        self._relays: list[tuple[blocks.Site, Relay]] = []

    @property
    def is_first(self) -> bool:
        """Whether it reads the microbatch itself."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss follows it."""
        return self.index == max(self._survey.stages)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of its blocks, in order."""
        own = {site.path for site in self.sites()}
        return tuple(site.path for site in self._chain.blocks if site.path in own)

    def sites(self) -> tuple[blocks.Site, ...]:
        """The places of its modules."""
        pairs = zip(self._chain.sites, self._survey.stages, strict=True)
        return tuple(site for site, stage in pairs if stage == self.index)

    def survey(self, forward: ForwardFn, batch: Any) -> StageRoute:
        """Return what crosses between stages for a batch of this structure. The same on all ranks.

        Raises:
            ModelError: if a stage would need a value that it cannot receive.
        """
        return self._survey.route(forward, batch, training=self._model.training)

    def forward(self, forward: ForwardFn, batch: Any, incoming: Carried | None) -> Any:
        """Return what the next stage receives; on the last stage the model's output.

        Args:
            forward: calls the model.
            batch: of one microbatch.
            incoming: what was received; None on the first stage.

        Raises:
            ModelError: if the stage would need a value that it does not have.
        """
        route = self.survey(forward, batch)
        output = None
        try:
            with self._alone(), contextlib.suppress(Left):
                self._flow.begin(route, incoming)
                output = forward(self._model, batch)
            return map_tensors(local, output) if self.is_last else self._flow.outgoing()
        finally:
            self._flow.end()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While inside, all modules of the chain are stood in for."""
        relays = self._relays = self._relays or self._new_relays()
        was = [site.module for site, _ in relays]
        for site, relay in relays:
            put(site, relay)
        hook = None
        if self._chain.towers and not self.is_first:
            hook = self._model.register_forward_pre_hook(self._without_towers, with_kwargs=True)
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()
            for (site, _), module in zip(relays, was, strict=True):
                put(site, module)

    def _without_towers(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return without_towers(model, self._chain.towers, args, kwargs)

    def _new_relays(self) -> list[tuple[blocks.Site, Relay]]:
        found: list[tuple[blocks.Site, Relay]] = []
        for number, site in enumerate(self._chain.sites):
            module = site.module
            real = module.stands_for if isinstance(module, Absent) else module
            found.append((site, Relay(real, site.path, number, self._flow)))
        return found
