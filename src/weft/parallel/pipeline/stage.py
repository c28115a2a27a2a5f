"""One pipeline stage: the model's forward from the start of the stage to the start of the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from weft.comm.mesh import Mesh
from weft.comm.rank_positions import ENDS
from weft.config import partitioning as shares
from weft.config.pipeline_schedule import stage_owner, stages_of
from weft.config.plan import Plan
from weft.data.batches import map_tensors
from weft.errors import ModelError, PlanError
from weft.models.inspect import blocks, layers
from weft.models.inspect.chain import Chain, find_chain
from weft.parallel.pipeline.boundary import Carried, Flow, Left, Relay, RemoteModule, put, without_tensors
from weft.parallel.pipeline.remote import local
from weft.parallel.pipeline.survey import StageRoute, ValueSurvey, without_towers
from weft.parallel.state.placement import Placement, merge_placements
from weft.parallel.state.precision import Precision

#: (model, batch) -> output.
ForwardFn = Callable[[nn.Module, Any], Any]


class Stage:
    """One stage of the pipeline.

    Attributes:
        takes_gradient: True if a parameter before the stage is trained, so that the stage sends a gradient back.
        trains: True if a parameter in the stage or before it is trained, so that it has a backward.
    """

    def __init__(
        self, model: nn.Module, chain: Chain, survey: ValueSurvey, index: int, *, takes_gradient: bool, trains: bool
    ):  # fmt: skip
        self.index = index
        self.takes_gradient, self.trains = takes_gradient, trains
        self._model, self._chain, self._survey = model, chain, survey
        self._flow = Flow(index, survey, _tied_to_earlier(chain, survey, index))
        self._relays: list[tuple[blocks.Site, Relay]] = []

    @property
    def is_first(self) -> bool:
        """True if no stage precedes this one."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == max(self._survey.stages)

    @property
    def known_shapes(self) -> ValueSurvey:
        """`ValueSurvey` of the full model, which all stages of a rank share."""
        return self._survey

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of the stage's blocks, in order."""
        own = {site.path for site in self.sites()}
        return tuple(site.path for site in self._chain.blocks if site.path in own)

    def sites(self) -> tuple[blocks.Site, ...]:
        pairs = zip(self._chain.sites, self._survey.stages, strict=True)
        return tuple(site for site, stage in pairs if stage == self.index)

    def survey(self, forward: ForwardFn, batch: Any) -> StageRoute:
        """Return the tensors that cross stages for a batch of this structure.

        Raises ModelError if the pipeline does not support the model's forward.
        """
        return self._survey.route(forward, batch, training=self._model.training)

    def forward(self, forward: ForwardFn, batch: Any, incoming: Carried | None) -> Any:
        """Return the tensors for the next stage, or the model's output on the last stage.

        incoming: received tensors, or None on the first stage. Raises ModelError if the stage needs a value that it
        does not have.
        """
        route = self.survey(forward, batch)
        output = None
        try:
            with self._relays_only(), contextlib.suppress(Left):
                self._flow.begin(route, incoming)
                output = forward(self._model, batch)
            return map_tensors(local, output) if self.is_last else self._flow.outgoing()
        finally:
            self._flow.end()

    @contextlib.contextmanager
    def _relays_only(self) -> Iterator[None]:
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
            real = module.stands_for if isinstance(module, RemoteModule) else module
            found.append((site, Relay(real, site.path, number, self._flow)))
        return found


# Division of a model into stages: number of blocks per stage, shared weights, and removal of other stages' tensors.


@dataclass(frozen=True, slots=True)
class Split:
    """This rank's stages, placements of weights that it shares, and the number of blocks of each pipeline stage."""

    stages: dict[int, Stage]
    placements: dict[str, Placement]
    counts: tuple[int, ...]


def split_model(model: nn.Module, mesh: Mesh) -> Split:
    """Remove all but this rank's stages from a model. The model may be on the meta device.

    Modules of other stages are replaced by placeholders without parameters, so that names equal the full model's.
    Raises ModelError if the model is not a chain of blocks or cannot be copied, or if some ranks share a weight and
    they are neither the first and the last nor all. Raises PlanError if the plan's split or the number of stages does
    not fit.
    """
    plan, rank = mesh.plan, mesh["pp"].rank
    chain = find_chain(model)
    chain_names = set(chain.everywhere)
    counts = stage_counts(chain, plan)
    stops = list(accumulate(counts))
    survey = ValueSurvey(model, chain, stops, Precision.of(plan))
    every = [_stage(model, chain, index, survey) for index in range(len(counts))]
    own = {index: every[index] for index in stages_of(plan.schedule, plan.pp, plan.virtual_stages, rank)}
    names = _names(model)
    everywhere = [all_names for all_names in names.values() if not chain_names.isdisjoint(all_names)]
    same = {name: all_names[0] for all_names in everywhere for name in all_names}
    shared = _shared({key: found for key, found in names.items() if found[0] not in same}, every, plan)
    kept = {id(site) for stage in own.values() for site in stage.sites()}
    here = {part for site in chain.sites if id(site) in kept for part in site.module.modules()}
    for site in chain.sites:
        if id(site) not in kept:
            put(site, RemoteModule(without_tensors(site.module, here), site.path))
    shared["pp",] |= same
    return Split(own, merge_placements(*(_placements(model, found, axis) for axis, found in shared.items())), counts)


def stage_counts(chain: Chain, plan: Plan) -> tuple[int, ...]:
    """Return the number of blocks per stage: the plan's split, or one that balances matmul weights.

    Raises PlanError if the plan's split or the number of stages does not fit.
    """
    num_stages, num_blocks = plan.pp * plan.virtual_stages, len(chain.blocks)
    if plan.split:
        if len(plan.split) != num_stages or sum(plan.split) != num_blocks:
            raise PlanError(
                f"split={'+'.join(map(str, plan.split))}: the model has {num_blocks} blocks, and pp={plan.pp} with "
                f"virtual_stages={plan.virtual_stages} makes {num_stages} stages. "
                f"Use {num_stages} numbers that add up to {num_blocks}, or leave split out."
            )
        return plan.split
    if num_blocks < num_stages:
        raise PlanError(
            f"pp={plan.pp}: with virtual_stages={plan.virtual_stages} there are {num_stages} stages, and the model "
            f"has {num_blocks} blocks. Use pp * virtual_stages of at most {num_blocks}."
        )
    costs = [_cost((site,)) for site in chain.blocks]
    return shares.divide_layers(costs, num_stages, before=_cost(chain.before), after=_cost(chain.after))


def _cost(sites: Sequence[blocks.Site]) -> float:
    """Return the number of elements of weight matrices, without embedding tables; at least 1e-9.

    The forward needs two FLOPs per element and token.
    """
    tables = {param for site in sites for param in layers.table_params(site.module)}
    params = {param for site in sites for param in site.module.parameters()}
    return float(sum(param.numel() for param in params - tables if param.ndim >= 2)) or 1e-9


def _stage(model: nn.Module, chain: Chain, index: int, survey: ValueSurvey) -> Stage:
    pairs = list(zip(chain.sites, survey.stages, strict=True))
    everywhere = any(model.get_parameter(name).requires_grad for name in chain.everywhere)
    return Stage(
        model, chain, survey, index,
        takes_gradient=bool(index) and (everywhere or _is_trained([site for site, stage in pairs if stage < index])),
        trains=everywhere or _is_trained([site for site, stage in pairs if stage <= index]),
    )  # fmt: skip


def _is_trained(sites: Sequence[blocks.Site]) -> bool:
    return any(param.requires_grad for site in sites for param in site.module.parameters())


def _shared(names: dict[int, list[str]], stages: list[Stage], plan: Plan) -> dict[tuple[str, ...], dict[str, str]]:
    """Return, for each axis over which ranks share weights, a dict of the weights' names to their names in checkpoints.

    Raises ModelError unless the ranks that share a weight are the first and the last, or all.
    """
    ranks: dict[int, dict[int, str]] = {}
    for stage in stages:
        owner = stage_owner(plan.schedule, plan.pp, stage.index)
        for site in stage.sites():
            for param in site.module.parameters():
                if id(param) in names:
                    ranks.setdefault(id(param), {})[owner] = site.path
    found: dict[tuple[str, ...], dict[str, str]] = {(ENDS,): {}, ("pp",): {}}
    for key, owners in ranks.items():
        if len(owners) == 1:
            continue
        if set(owners) != {0, plan.pp - 1} and len(owners) < plan.pp:
            raise ModelError(
                f"parameter {names[key][0]!r}: ranks {', '.join(map(str, sorted(owners)))} of pp={plan.pp} share it "
                f"({', '.join(owners.values())}). The first and the last rank may share a weight, or all ranks. Use "
                f"pp=2, or a split that keeps these blocks on one rank."
            )
        axis = (ENDS,) if set(owners) == {0, plan.pp - 1} else ("pp",)
        found[axis] |= dict.fromkeys(names[key], names[key][0])
    return found


def _tied_to_earlier(chain: Chain, survey: ValueSurvey, index: int) -> dict[str, list[str]]:
    """Return the parameters of a stage's modules that modules of earlier stages also have: {path: names}."""
    pairs = list(zip(chain.sites, survey.stages, strict=True))
    earlier = {param for site, stage in pairs if stage < index for param in site.module.parameters()}
    found = {
        site.path: [name for name, param in site.module.named_parameters() if param in earlier]
        for site, stage in pairs
        if stage == index
    }
    return {path: names for path, names in found.items() if names}


def _names(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def _placements(model: nn.Module, shared: dict[str, str], partial: tuple[str, ...]) -> dict[str, Placement]:
    """Return the placements of the shared weights that this stage has kept, by their names in the stage."""
    return {
        name: Placement(partial=partial, name=shared[name] if shared[name] != name else "")
        for name, _ in model.named_parameters()
        if name in shared
    }
