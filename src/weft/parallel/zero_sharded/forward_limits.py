"""What forward cannot do under zero=3: write to parameters, and compute gradients through units.

A unit's parameters are gathered for its call only. Values that forward writes to them are lost when they are freed. A
gradient that forward computes through a unit's output ends fully_shard's backward in the middle of forward, and frees
the weights that forward still needs. Both gave wrong results without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.errors import ModelError
from weft.parallel.private_torch import before_backward_of, gathered_parts
from weft.parallel.zero_sharded.hooks import Act, Order
from weft.private_torch import graph_task, named_modules, uncompiled, version_of

#: A parameter, and the number of writes and the address when forward began.
_Written = tuple[torch.Tensor, int, int]


class ForwardLimits:
    """Refuses gradients through units in every forward, and writes to parameters in the first forward in training.

    Under a pipeline, forward of a stage ends with an exception of the runtime, after which torch calls no hooks.
    Gradients in forward are not refused there.

    Until the first step, ranks also compare the ends of their forwards: the first step tries some samples, and a rank
    that calls more units than the others would wait for them. units: the units, by their names; the root last.
    """

    def __init__(self, units: Sequence[tuple[str, FSDPModule]], orders: Sequence[Order], *, is_stage: bool = False):
        _, root = units[-1]
        assert isinstance(root, nn.Module)
        self._root = root
        self._paths = {id(module): path for path, module in named_modules(root)}
        self._orders, self._is_inside = orders, False
        self._unwatched = {id(module) for _, module in units}
        self._before: dict[int, dict[str, _Written]] = {}
        for name, module in units:
            assert isinstance(module, nn.Module)
            if not is_stage:
                before_backward_of(module, self._refusing(name or type(root).__name__))
            module.register_forward_pre_hook(uncompiled(self._enter))
            module.register_forward_hook(uncompiled(self._leave), prepend=True, always_call=True)

    def begin_steps(self) -> None:
        self._orders = ()

    def _refusing(self, name: str) -> Callable[[], None]:
        def refuse() -> None:
            self.begin_steps()  # in a custom loop the first backward begins them
            if self._is_inside and graph_task() != -1:
                self._is_inside = False
                raise ModelError(
                    f"zero=3: forward computes a gradient through {name} (torch.autograd.grad or torch.func.grad), "
                    "whose weights exist only while it is called. Use zero=2."
                )

        return refuse

    def _enter(self, module: nn.Module, args: Any) -> None:
        del args
        if module is self._root:
            self._is_inside = True
        if id(module) in self._unwatched and self._root.training and graph_task() == -1:
            self._before[id(module)] = {name: _state(param) for name, param in self._params(module)}

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        if module is self._root:
            self._is_inside = False
            for order in self._orders if output is not None else ():
                order.check(Act.END)
        before = self._before.pop(id(module), None)
        if before is None or output is None:  # None: forward raised
            return
        now = dict(self._params(module))
        for name, (param, *was) in before.items():
            if now.get(name) is param and was != [*_state(param)[1:]]:
                raise ModelError(
                    f"parameter {name}: forward writes to it, and zero=3 has it only while a module is called, so the "
                    "values are lost. Write to parameters between steps, use a parametrization, or use zero=2."
                )
        self._unwatched.discard(id(module))

    def _params(self, module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
        if module is self._root:
            return self._root.named_parameters()
        assert isinstance(module, FSDPModule)
        parts = [(owner, name) for group in gathered_parts(module) for _, owner, name in group]
        return [(f"{self._paths.get(id(owner), '')}.{name}", getattr(owner, name)) for owner, name in parts]


def _state(param: torch.Tensor) -> _Written:
    local = param.to_local() if isinstance(param, DTensor) else param
    return param, version_of(param), local.data_ptr()
