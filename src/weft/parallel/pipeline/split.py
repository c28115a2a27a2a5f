"""Dividing a model into stages: which blocks, which weights that two stages share, and nothing of the others left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from weft.errors import ModelError, PlanError
from weft.mesh import ENDS, Mesh
from weft.parallel.pipeline.absent import Absent, put, without_tensors
from weft.parallel.pipeline.stage import Stage
from weft.parallel.pipeline.survey import ValueSurvey
from weft.parallel.placement import Placement, merge_placements
from weft.spec import shares
from weft.spec.plan import Plan
from weft.spec.schedule import stage_owner, stages_of
from weft.structure import Chain, blocks, find_chain, layers


@dataclass(frozen=True, slots=True)
class Split:
    """This rank's stages by index, ascending; placements of weights that it shares with another stage.

    counts: blocks of each stage of the pipeline.
    """

    stages: dict[int, Stage]
    placements: dict[str, Placement]
    counts: tuple[int, ...]


def split_model(model: nn.Module, mesh: Mesh) -> Split:
    """Keep only this rank's stages of a model, in place; on the meta device or real.

    Modules of other stages are replaced by stand-ins without parameters, so names stay those of the whole model.
    Raises ModelError where the model is no chain of blocks or shares weights between stages that are not the ends,
    PlanError where the plan's split does not fit it.
    """
    plan, rank = mesh.plan, mesh["pp"].rank
    chain = find_chain(model)
    chain_names = set(chain.everywhere)
    counts = stage_counts(chain, plan)
    stops = list(accumulate(counts))
    survey = ValueSurvey(model, chain, stops)
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
            put(site, Absent(without_tensors(site.module, here), site.path))
    return Split(own, merge_placements(_placements(model, shared, (ENDS,)), _placements(model, same, ("pp",))), counts)


def stage_counts(chain: Chain, plan: Plan) -> tuple[int, ...]:
    """Blocks of each stage: the plan's, or those that make stages alike in matrix elements. PlanError where neither."""
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
    """Elements of matrices that are multiplied: a forward takes two operations for each, and each token."""
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


def _shared(names: dict[int, list[str]], stages: list[Stage], plan: Plan) -> dict[str, str]:
    """Weights that the first and the last rank share: each of their names, and the name that checkpoints have.

    Raises:
        ModelError: for a weight that other ranks share.
    """
    ranks: dict[int, dict[int, str]] = {}
    for stage in stages:
        owner = stage_owner(plan.schedule, plan.pp, stage.index)
        for site in stage.sites():
            for param in site.module.parameters():
                if id(param) in names:
                    ranks.setdefault(id(param), {})[owner] = site.path
    found: dict[str, str] = {}
    for key, owners in ranks.items():
        if len(owners) == 1:
            continue
        if set(owners) != {0, plan.pp - 1}:
            raise ModelError(
                f"parameter {names[key][0]!r}: {' and '.join(owners.values())} share it, and lie on different ranks of "
                f"the pipeline. Only the first and the last rank may share a weight. Use pp=2, or a split that keeps "
                f"them together."
            )
        found |= dict.fromkeys(names[key], names[key][0])
    return found


def _names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its identity."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def _placements(model: nn.Module, shared: dict[str, str], partial: tuple[str, ...]) -> dict[str, Placement]:
    """Of the shared weights that are still here, under the names that they have here."""
    return {
        name: Placement(partial=partial, name=shared[name] if shared[name] != name else "")
        for name, _ in model.named_parameters()
        if name in shared
    }
