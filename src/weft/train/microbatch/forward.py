"""How a model is called when nobody says: what of a batch are its inputs.

A batch is inputs and then targets. Tensors in a row (what torch's DataLoader makes of samples `(x, y)`): the model gets
as many as its forward must have, and at least the first. Names: it gets those that its forward knows, and never
`labels`, of which the loss is computed outside of the model, once for all ranks. Where that leaves a doubt, the user
says: `forward=`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from weft.errors import ModelError, nearest_name

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
#: The name of what only the loss function gets.
LABELS = "labels"


def call_model(model: nn.Module, batch: Any) -> Any:
    """Return the model's output: model(x) for x, (x, y) and [x, y]; by keyword, without labels, for a dict.

    Raises:
        ModelError: where the batch does not say what the inputs are.
    """
    if isinstance(batch, torch.Tensor):
        return model(*_first_inputs(model, (batch,)))
    if isinstance(batch, Mapping):
        return model(**_named_inputs(model, batch))
    if isinstance(batch, tuple | list) and batch:
        return model(*_first_inputs(model, batch))
    raise ModelError(
        f"batch of type {type(batch).__name__}: a batch is a tensor, or a tuple, list or dict of tensors. "
        f"Give forward=lambda model, batch: model(...) for anything else."
    )


def _first_inputs(model: nn.Module, batch: Sequence[Any]) -> Sequence[Any]:
    if len(batch) > 1 and all(isinstance(entry, Mapping | tuple | list) for entry in batch):
        raise ModelError(
            f"batch: a list of {len(batch)} {type(batch[0]).__name__}s, and a batch is a tensor, or a tuple, list or "
            "dict of tensors. Let the loader's collate_fn stack the samples, pass microbatches as "
            f"weft.Microbatches([...]), or give forward=lambda model, batch: model(...)."
        )
    params = _parameters(model)
    if params is None:
        return batch[:1]
    needed = [param for param in params if param.kind in _POSITIONAL and param.default is param.empty]
    takes_more = any(param.kind is param.VAR_POSITIONAL for param in params) or any(
        param.kind in _POSITIONAL and param.default is not param.empty for param in params
    )
    number = max(len(needed), 1)
    # One left over is the target. With more, and a forward that could take them, they may be either.
    if len(batch) < number or (takes_more and len(batch) > number + 1):
        _refuse_row(model, params, batch)
    inputs = batch[:number]
    if not needed or number > 1:
        for entry in inputs:
            if not isinstance(entry, torch.Tensor):
                _refuse_row(model, params, batch)
    return inputs


def _named_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    params = _parameters(model)
    given = {name: value for name, value in batch.items() if name != LABELS}
    if params is None:
        return given
    known = {param.name: param for param in params if param.kind in _NAMED}
    needed = {name for name, param in known.items() if param.default is param.empty}
    if LABELS in needed and LABELS in batch:
        given[LABELS] = batch[LABELS]
    missing = sorted(needed - given.keys())
    if any(param.kind is param.VAR_KEYWORD for param in params) and not missing:
        return given
    # What forward does not know is a target, but for names that were probably meant as one of its own.
    free = known.keys() - given.keys() - {LABELS}
    if missing or any(nearest_name(name, free) for name in given.keys() - known.keys()):
        names = ", ".join(name for name in known if name != LABELS or name in needed)
        _refuse(model, names, f"the batch has {', '.join(map(str, batch))}", _keywords(known, batch))
    return {name: value for name, value in given.items() if name in known}


def _parameters(model: nn.Module) -> list[inspect.Parameter] | None:
    """Of the model's forward; None where Python cannot tell."""
    try:
        return list(inspect.signature(getattr(model, "_orig_mod", model).forward).parameters.values())
    except (TypeError, ValueError):
        return None


def _refuse_row(model: nn.Module, params: list[inspect.Parameter], batch: Sequence[Any]) -> NoReturn:
    names = ", ".join(f"*{param.name}" if param.kind is param.VAR_POSITIONAL else param.name for param in params)
    inputs = ", ".join(f"batch[{index}]" for index in range(len(batch) - 1)) or "..."
    _refuse(
        model,
        names,
        "the batch is " + ("one tensor" if len(batch) == 1 else f"a {type(batch).__name__} of {len(batch)}"),
        inputs,
    )


def _refuse(model: nn.Module, names: str, found: str, inputs: str) -> NoReturn:
    raise ModelError(
        f"batch: {type(model).__name__}.forward takes ({names}), and {found}, so Weft cannot tell which are inputs. "
        f"Say so: train_step(..., forward=lambda model, batch: model({inputs}))."
    )


def _keywords(known: Iterable[str], batch: Mapping[str, Any]) -> str:
    """Arguments to paste: each name of the batch under the name that forward has for it, as far as one is near."""
    names = [str(name) for name in batch if name != LABELS]
    pairs = [(name if name in known else nearest_name(name, known), name) for name in names]
    return ", ".join(f'{ours}=batch["{name}"]' for ours, name in pairs if ours) or f'batch["{(names or [LABELS])[0]}"]'
