"""Construction of torch optimizers from a config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeGuard

import torch
from torch import nn

from weft.config.sections import OptimizerGroup, OptimizerSection
from weft.errors import ConfigError, Problem
from weft.lazy import named_object
from weft.optim.muon import Muon
from weft.optim.rounded_adamw import RoundedAdamW

#: Embeddings and head of a decoder: Muon leaves these matrices to AdamW.
_ENDS = frozenset({"embed", "pos_embed", "head"})


def build_optimizer(
    named_params: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection, seed: int = 0
) -> torch.optim.Optimizer:
    """Build AdamW, SGD, Muon or the class that `section` names, on the trainable parameters.

    Matrices have weight decay and vectors (norms, biases) do not, unless `section.groups` sets it by name. Each group
    stores its peak rate as `initial_lr`, like torch's schedulers. torch's fused kernels, which exist for CPU and CUDA,
    take one pass over memory per step. Its foreach kernels take several.

    Args:
        named_params: the model's parameters; frozen ones are skipped.
        section: the optimizer's settings.
        seed: seed for stochastic rounding of states.

    Raises:
        ConfigError: if a custom class cannot be imported, is not an optimizer, or does not accept its options.
    """
    groups = _groups(named_params, section)
    match section.name:
        case "sgd":
            momentum = 0.9 if section.momentum is None else section.momentum
            # torch rejects Nesterov without momentum. The config check has already raised an error in that case.
            return torch.optim.SGD(groups, lr=section.lr, momentum=momentum, nesterov=section.nesterov, fused=True)
        case "adamw" if section.states != "fp32":
            numbers: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
            return RoundedAdamW(groups, **numbers, seed=seed, states=section.states)
        case "adamw":
            return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
        case "muon":
            momentum = 0.95 if section.momentum is None else section.momentum
            return Muon(groups, lr=section.lr, momentum=momentum, betas=section.betas, eps=section.eps)
        case _:
            return _build_foreign(groups, section)


def freeze(model: nn.Module, section: OptimizerSection) -> None:
    """Set requires_grad=False on the parameters whose group has lr=0. Call it before the model is parallelized."""
    for name, param in model.named_parameters():
        own = _group_of(name, section)
        if own is not None and own.lr == 0:
            param.requires_grad_(False)


def check_optimizer(model: nn.Module, section: OptimizerSection) -> None:
    """Raise ConfigError if a group matches no parameter, all parameters are frozen, or `build_optimizer` would fail.

    `model` is the full model on any device. On the meta device nothing is allocated.
    """
    params = dict(model.named_parameters())
    chosen = {name: _group_of(name, section) for name in params}
    for index, group in enumerate(section.groups):
        if not any(own is group for own in chosen.values()):
            fits = any(fnmatchcase(name, group.match) for name in params)
            taken, unknown = "earlier groups take every parameter that it matches", "no parameter has such a name"
            why = taken if fits else unknown
            _refuse(f"groups.{index}.match", f"{group.match}: {why}. Names are such as {_some(params)}.")
    if all(own is not None and own.lr == 0 for own in chosen.values()):
        _refuse("groups", "every parameter has lr=0, so nothing is trained. Leave some out of the groups.")
    if section.is_foreign:
        build_optimizer(params.items(), section)


def refuse_groups_of(tables: Iterable[str], section: OptimizerSection) -> None:
    """Raise ConfigError if a group matches an embedding table, whose optimizer has its own settings.

    Args:
        tables: names of the weights of sharded tables.
        section: the optimizer's settings.
    """
    for name in tables:
        for index, group in enumerate(section.groups):
            if fnmatchcase(name, group.match):
                rule = f"it matches {name!r}, a table of the layout, whose optimizer is set in [tables]"
                _refuse(f"groups.{index}.match", f"{group.match}: {rule}. Match other parameters.")


def _groups(named_params: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> list[dict[str, Any]]:
    """Return parameter groups: one per combination of learning rate, weight decay and (for Muon) kind of update."""
    found: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, param in named_params:
        if not param.requires_grad:
            continue
        own = _group_of(name, section) or OptimizerGroup(match=name)
        decay = section.weight_decay if param.ndim >= 2 else 0.0
        key = (
            section.lr if own.lr is None else own.lr,
            decay if own.weight_decay is None else own.weight_decay,
            section.name == "muon" and param.ndim == 2 and _ENDS.isdisjoint(name.split(".")),
        )
        found.setdefault(key, []).append(param)
    if not found:  # a pipeline stage may have nothing to train
        found[section.lr, 0.0, False] = []
    turned = [{"matrices": key[2]} if section.name == "muon" else {} for key in found]
    return [
        {"params": params, "lr": lr, "initial_lr": lr, "weight_decay": decay, **more}
        for ((lr, decay, _), params), more in zip(found.items(), turned, strict=True)
    ]


def _group_of(name: str, section: OptimizerSection) -> OptimizerGroup | None:
    return next((group for group in section.groups if fnmatchcase(name, group.match)), None)


def _build_foreign(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    try:
        made = named_object(section.name)
    except Exception as error:  # user code may raise anything
        is_extra = section.name.startswith("pytorch_optimizer:")
        remedy = "Install weft[optim]" if is_extra else "Name a class importable from this folder"
        _refuse("name", f"{section.name}: it cannot be imported ({error}). {remedy}.")
    if not _is_optimizer(made):
        _refuse("name", f"{section.name}: it is not a subclass of torch.optim.Optimizer. Name one that is.")
    takes = options_of(made)
    if takes is not None and "weight_decay" not in takes:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    _check_options(section, takes)
    if callable(getattr(made, "train", None)) or callable(getattr(made, "eval", None)):
        _refuse(
            "name", f"{section.name}: it trains other weights than it evaluates, and Weft saves one set. Use adamw."
        )
    try:
        return made(groups, lr=section.lr, **section.options)
    except Exception as error:
        _refuse("options", f"{section.name} refuses them: {type(error).__name__}: {error}. Change or leave them out.")


def _is_optimizer(made: object) -> TypeGuard[Callable[..., torch.optim.Optimizer]]:
    """Return True for a subclass of Optimizer. Its constructor may take more arguments than torch.optim.Optimizer."""
    return isinstance(made, type) and issubclass(made, torch.optim.Optimizer)


def options_of(optimizer: Callable[..., torch.optim.Optimizer]) -> list[str] | None:
    """Return the argument names of an optimizer's class or factory except the first, or None if it takes any name."""
    try:
        params = inspect.signature(optimizer).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(param.kind is param.VAR_KEYWORD for param in params):
        return None
    return [param.name for param in params if param.kind is not param.VAR_POSITIONAL][1:]


def _check_options(section: OptimizerSection, takes: list[str] | None) -> None:
    if takes is not None and "lr" not in takes:
        _refuse(
            "name", (f"{section.name}: it has no lr argument, which the schedule sets. Wrap it in a class that does.")
        )
    own = [name for name in ("lr", "weight_decay") if name in section.options]
    if own:
        _refuse(f"options.{own[0]}", f"this is a setting of the section itself. Use optimizer.{own[0]}=.")
    unknown = [name for name in section.options if takes is not None and name not in takes]
    if takes is not None and unknown:
        known = ", ".join(name for name in takes if name not in ("lr", "weight_decay"))
        _refuse(f"options.{unknown[0]}", f"{section.name} has no such argument. It takes {known}.")


def _some(params: Mapping[str, nn.Parameter]) -> str:
    names = list(params)
    return ", ".join(names[:: max(1, len(names) // 4)][:4])


def _refuse(key: str, rule: str) -> NoReturn:
    sign = "=" if key.endswith(("match", "name")) else ": "
    raise ConfigError([Problem(f"optimizer.{key}", f"optimizer.{key}{sign}{rule}")])
