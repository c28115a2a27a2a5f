"""Refusals of plans, models and losses for which clipping sample by sample is not tested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from weft.config.plan import Plan
from weft.config.rules.privacy_rules import private_plan_problems
from weft.errors import ModelError, PlanError
from weft.models.experts import Router
from weft.parallel.expert import ForeignRouter
from weft.parallel.state.placement import AxisMap

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_plan(plan: Plan) -> None:
    """Raise PlanError, with all fields of a plan under which private steps are not tested."""
    if problems := private_plan_problems(plan):
        raise PlanError(problems)


def check_model(model: nn.Module, axes: AxisMap, passes: int, plan: Plan) -> None:
    """Raise ModelError for a module, or a placement, whose samples cannot be clipped one by one."""
    for message in _model_problems(model, axes):
        raise ModelError(message)
    if passes == 1 and (plan.zero == 3 or plan.pp > 1):
        field = "zero=3" if plan.zero == 3 else f"pp={plan.pp}"
        raise PlanError(
            f"privacy.passes=1: {field} reduces gradients before the norms are known. Use passes=0, which takes two."
        )


def _model_problems(model: nn.Module, axes: AxisMap) -> Iterator[str]:
    for path, module in model.named_modules():
        where = f"privacy: {path or 'the model'} ({type(module).__name__})"
        if isinstance(module, _BATCH_NORMS):
            yield f"{where} mixes the samples of a batch. Use nn.GroupNorm or nn.LayerNorm."
        if isinstance(module, Router) and module.spec.balance != "none":
            yield (
                f"{where} balances experts over the tokens of all samples, outside the clipped gradients. Use "
                "model.balance=none."
            )
        if isinstance(module, Router) and module.spec.capacity_factor:
            yield f"{where} drops tokens by the load of other samples. Use model.capacity_factor=0."
        if isinstance(module, ForeignRouter):
            yield f"{where} has a balance loss over all samples. Use balance_rate=0."
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    for name in sorted(trained):
        placement = axes.placement(name)
        if placement.name or "ends" in (*placement.cut, *placement.partial):
            yield (
                f"privacy: {name} shares its weight with a layer of another pipeline stage, and the norm of their sum "
                "needs both on one rank. Use pp=1, or an untied head."
            )
        if placement.index is not None:
            yield (
                f"privacy: {name} has fewer heads than tp has ranks, so ranks hold the same rows. Use a tp of at most "
                "the number of key-value heads."
            )
        elif "ep" in placement.cut:
            yield (
                f"privacy: the experts of {name} are on several ranks, and so are the rows of a sample. Use tp=1 and "
                "ep=1."
            )
        elif set(placement.cut) - {"tp"} or set(placement.partial) - {"tp"}:
            where = "*".join(placement.cut or placement.partial)
            yield f"privacy: {name} is divided over {where}. Divide it over tp only."


def check_batch(batch: Any, num_rows: int) -> None:
    """Raise ModelError for a batch whose rows contain several documents."""
    if not isinstance(batch, Mapping):
        return
    counted = _before_padding(batch.get("labels"), num_rows)
    if any(_is_packed(name, batch[name], num_rows, counted) for name in _PACKED if name in batch):
        raise ModelError(
            "privacy: a row of the batch packs several documents, so clipping a row bounds none of them. Use one "
            "document in each row, padded or cut to the sequence length."
        )


#: Entries of a batch that show where documents begin: ids of documents, and positions that begin again at 0.
_PACKED = {"document_ids": False, "document_ids_BT": False, "position_ids": True, "positions": True}


def _before_padding(labels: Any, num_rows: int) -> torch.Tensor | None:
    """Return True for the tokens of each row up to its last label, or None for other labels than of tokens."""
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2 or len(labels) != num_rows:
        return None
    return (labels != -100).flip(1).cumsum(1).flip(1) > 0


def _is_packed(name: str, ids: Any, num_rows: int, counted: torch.Tensor | None) -> bool:
    """Return True if an entry of a batch shows that a row has several documents among its counted tokens."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != num_rows:
        return False
    begins = (ids[:, 1:] == 0) & (ids[:, :-1] > 1) if _PACKED[name] else ids[:, 1:] != ids[:, :-1]
    return bool((begins if counted is None or counted.shape != ids.shape else begins & counted[:, 1:]).any())
