"""state_dict and its relatives, where a rank holds only pieces: they refuse, and name what gives the whole.

Of a model that is cut or sharded torch's own ways give pieces, and take them without a word. They are left alone where
they are right.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from weft.errors import ModelError
from weft.parallel.placement.axes import AxisMap

_ATTRIBUTE = "_weft_pieces"


def guard_model(model: nn.Module, axes: AxisMap) -> None:
    """Let state_dict and load_state_dict of a model that is not whole on this rank refuse, and copies under zero=3."""
    words = _divided_model(axes)
    if not words:
        return
    guard = _Guard(f"model of type {_plain_type(model).__name__}: under {words} this rank has only a part of it")
    # Of each module: what a script saves is often the model inside of a wrapper.
    for module in model.modules():
        if next(module.parameters(), None) is not None or module is model:
            module.register_state_dict_pre_hook(guard.before_save)
            module.register_load_state_dict_pre_hook(guard.before_load)
            if axes.mesh.plan.zero == 3:
                # copy.deepcopy asks the instance: fully_shard's answer is an assertion of its own class.
                module.__dict__["__deepcopy__"] = functools.partial(_refuse_copy, _plain_type(model).__name__)
    setattr(model, _ATTRIBUTE, guard)


@contextlib.contextmanager
def pieces_allowed(model: nn.Module) -> Iterator[None]:
    """Let the model's state_dict give this rank's pieces while inside: for code that knows what they are."""
    guard = getattr(model, _ATTRIBUTE, None)
    if guard is None:
        yield
        return
    guard.is_open = True
    try:
        yield
    finally:
        guard.is_open = False


def guard_optimizer(optimizer: torch.optim.Optimizer, axes: AxisMap) -> None:
    """Let state_dict and load_state_dict of an adopted optimizer refuse where it works on pieces."""
    plan = axes.mesh.plan
    words = [_divided_model(axes)] if plan.zero in (0, 3) else [f"zero={plan.zero}", _divided_model(axes)]
    if plan.zero in (1, 2) and plan.dp_shard * plan.cp == 1:
        words = words[1:]
    said = " ".join(word for word in words if word)
    if not said:
        return
    start = f"optimizer {type(optimizer).__name__}: under {said} this rank has only a part of its states"
    optimizer.register_state_dict_pre_hook(functools.partial(_refuse_optimizer_save, start))
    optimizer.register_load_state_dict_pre_hook(functools.partial(_refuse_optimizer_load, start))


def _divided_model(axes: AxisMap) -> str:
    """Fields of the plan by which this rank has a part of the model only; "" where it has the whole."""
    plan = axes.mesh.plan
    cut = {axis for name, placement in axes.placements.items() if axes.is_divided(name) for axis in placement.cut}
    sizes = {"pp": plan.pp, "tp": plan.tp, "ep": plan.ep}
    words = [f"{axis}={size}" for axis, size in sizes.items() if axis in cut or (axis == "pp" and size > 1)]
    return " ".join([*words, "zero=3"] if plan.zero == 3 else words)


def _plain_type(model: nn.Module) -> type:
    """The model's class as its user wrote it."""
    return next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))


class _Guard:
    """Hooks of one model. An object, since copies and pickles of a module take its hooks along."""

    def __init__(self, start: str):
        self.is_open = False
        self._start = start

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        del module, prefix, keep_vars
        if not self.is_open:
            raise ModelError(
                f"{self._start}, so state_dict() would give pieces. Use run.save(folder, step=..., model=..., "
                "optimizer=...) to resume later, run.full_state_dict(model) for whole tensors, or "
                f"run.save_pretrained(model, folder) for Hugging Face files."
            )

    def before_load(self, module: nn.Module, *rest: Any) -> None:
        del module, rest
        if not self.is_open:
            raise ModelError(
                f"{self._start}, so load_state_dict() would take whole tensors for pieces. Load before "
                f"run.parallelize(model), or use run.load(folder, model=..., optimizer=...) for what run.save wrote."
            )


def _refuse_optimizer_save(start: str, optimizer: torch.optim.Optimizer) -> NoReturn:
    del optimizer
    raise ModelError(
        f"{start}, so state_dict() would give pieces. Use run.save(folder, step=..., model=..., optimizer=...)."
    )


def _refuse_optimizer_load(start: str, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> NoReturn:
    del optimizer, state
    raise ModelError(
        f"{start}, so load_state_dict() would take other states for them. Use run.load(folder, model=..., "
        f"optimizer=...) for what run.save wrote."
    )


def _refuse_copy(name: str, memo: dict[int, Any]) -> NoReturn:
    del memo
    raise ModelError(
        f"model of type {name}: under zero=3 its weights are shards, and it cannot be copied, as AveragedModel and "
        f"copy.deepcopy do. Use run.ema(model, decay=0.999) for averaged weights, or run.full_state_dict(model)."
    )
