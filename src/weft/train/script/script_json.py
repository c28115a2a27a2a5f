"""Conversion of scheduler states and optimizer settings to JSON values, and back."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch

from weft.errors import CheckpointError

#: The tag of a table with keys that are not text, such as the milestones of MultiStepLR.
_TAG = "$pairs"
#: Entries of a parameter group to leave out: tensors, their names, and options that select an implementation.
_LEFT_OUT = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "maximize", "elementwise"}
)


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's `state_dict` as JSON values. Raise CheckpointError if JSON cannot hold it."""
    kind = type(scheduler).__name__
    if not hasattr(scheduler, "state_dict") or not hasattr(scheduler, "load_state_dict"):
        raise CheckpointError(f"scheduler={kind}: it has no state_dict. Give one of torch.optim.lr_scheduler.")
    return {key: _plain(value, f"scheduler {kind}", key) for key, value in scheduler.state_dict().items()}


def restore_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Restore a scheduler of the same kind from the result of `scheduler_state`."""
    scheduler.load_state_dict({key: _back(value) for key, value in state.items()})


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, such as learning rate and weight decay, that JSON can hold."""
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        found.append({})
        for key, value in group.items():
            try:
                if key not in _LEFT_OUT:
                    found[-1][key] = _plain(value, "optimizer", key)
            except CheckpointError:
                continue
    return found


def restore_settings(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Restore each group from `group_settings`. Raise CheckpointError if the number of groups differs."""
    if len(settings) != len(optimizer.param_groups):
        raise CheckpointError(
            f"optimizer: it has {len(optimizer.param_groups)} parameter groups, and {len(settings)} were saved. "
            f"Build it with the groups that it was saved with."
        )
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        for key, value in saved.items():
            now, value = group.get(key), _back(value)
            if isinstance(now, torch.Tensor):
                now.fill_(value)  # the learning rate of a compiled step is a tensor
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value


def _plain(value: Any, owner: str, key: str) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    if isinstance(value, dict) and all(type(name) is str for name in value):
        return {name: _plain(one, owner, f"{key}.{name}") for name, one in value.items()}
    if isinstance(value, dict):
        pairs = [[_plain(name, owner, key), _plain(one, owner, key)] for name, one in value.items()]
        return {_TAG: pairs, "counts": isinstance(value, Counter)}
    if isinstance(value, list | tuple | deque):
        return [_plain(one, owner, key) for one in value]
    raise CheckpointError(
        f"{owner}: its state has a {type(value).__name__} under {key!r}, which JSON cannot store. Leave scheduler= "
        "out, and pass its state as extra=."
    )


def _back(value: Any) -> Any:
    if isinstance(value, list):
        return [_back(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _TAG in value:
        pairs = {_back(name): _back(one) for name, one in value[_TAG]}
        return Counter(pairs) if value["counts"] else pairs
    return {name: _back(one) for name, one in value.items()}
