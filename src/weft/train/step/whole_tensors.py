"""Models whose own code needs whole tensors: what the first step says where it fails on a rank's part of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from torch import nn

from weft.errors import ModelError, WeftError
from weft.mesh import Mesh
from weft.spec.plan import Plan
from weft.structure import layers
from weft.train.step.oom import is_out_of_memory

_P = ParamSpec("_P")
_R = TypeVar("_R")


class CheckedStep(Protocol):
    """What a training step must show: its model, its plan, and whether a step has ended before."""

    model: nn.Module
    mesh: Mesh
    has_trained: bool


_S = TypeVar("_S", bound=CheckedStep)


def names_the_module(call: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """For a step's call: raise ModelError, with the module and a plan to use, where the first step fails in the model.

    Only under plans that give a module's forward a part of its tensors; the model's own error is the cause.
    """

    @functools.wraps(call)
    def checked(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self.has_trained:
            return call(self, *args, **kwargs)
        try:
            result = call(self, *args, **kwargs)
        except WeftError:
            raise
        except Exception as error:
            text = None if is_out_of_memory(error) else explain_failure(error, self.model, self.mesh.plan)
            if text is None:
                raise
            raise ModelError(text) from error
        self.has_trained = True
        return result

    return checked


def explain_failure(error: Exception, model: nn.Module, plan: Plan) -> str | None:
    """Which module failed, on which part of its tensors, and what to use; None where no part or no module is seen."""
    if isinstance(model, layers.KnownModel):
        return None  # Weft's own decoders take every plan: their failure is a defect, and not the user's to avoid
    parts, path = _parts(plan), _failed_module(error, model)
    if not parts or path is None:
        return None
    fields, kinds, remedies = zip(*parts, strict=True)
    name = f"{path} ({type(model.get_submodule(path)).__name__.removeprefix('FSDP')})" if path else type(model).__name__
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return (
        f"{' '.join(fields)}: {name} fails on a rank's part of {' and '.join(kinds)} ({type(error).__name__}: "
        f"{first}). If one process can train this model, use {' or '.join(remedies)}."
    )


def _parts(plan: Plan) -> list[tuple[str, str, str]]:
    """For each field that divides what a module computes with: the field, what it divides, and the remedy."""
    found = [
        (plan.sp, "sp=on", "the tokens between layers", "sp=off"),
        (plan.tp > 1, f"tp={plan.tp}", "the features, heads or vocabulary", "tp=1"),
        (plan.cp > 1, f"cp={plan.cp}", "each sequence", "cp=1"),
        (plan.pp > 1, f"pp={plan.pp}", "the blocks", "pp=1"),
        (plan.zero == 3, "zero=3", "the weights, which are whole only while their own module is called", "zero=2"),
    ]
    return [(name, divided, remedy) for is_on, name, divided, remedy in found if is_on]


def _failed_module(error: Exception, model: nn.Module) -> str | None:
    """The path of the innermost module of the model whose method raised; None where none did."""
    paths = {id(module): path for path, module in model.named_modules()}
    found, trace = None, error.__traceback__
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found
