"""What stands in the model for the modules of other stages, so that its own forward runs as it is written.

The model's forward is called for each stage. Modules of earlier stages give what was received, the stage's first
block takes it in place of its input, and where the next stage would begin, forward is left. So masks, positions and
keyword arguments are made by the model's own code, from the microbatch that every stage has.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from weft.errors import ModelError
from weft.parallel.layers import StandIn
from weft.private_torch import tree_leaves
from weft.structure import blocks


class Flow:
    """The activation that enters a stage, while its forward runs. None: the stage is the first.

    mark: a zero in all that absent modules give, where it is asked whether the stage's output depends on that.
    """

    def __init__(self) -> None:
        self.incoming: torch.Tensor | None = None
        self.has_entered = False
        self.mark: torch.Tensor | None = None

    def begin(self, incoming: torch.Tensor | None, *, is_marked: bool) -> None:
        """A stage's forward begins."""
        self.incoming, self.has_entered = incoming, incoming is None
        if is_marked and incoming is not None:
            self.mark = torch.zeros((), dtype=incoming.dtype, device=incoming.device, requires_grad=True)

    def end(self) -> None:
        """It is over."""
        self.incoming, self.has_entered, self.mark = None, False, None

    def reaches(self, output: Any) -> bool:
        """Whether what absent modules gave went into the output: it stands there for values of other stages."""
        mark = self.mark
        found = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn]
        seen: set[Any] = set(found)
        while mark is not None and found:
            node = found.pop()
            if getattr(node, "variable", None) is mark:
                return True
            for before, _ in node.next_functions:
                if before is not None and before not in seen:
                    seen.add(before)
                    found.append(before)
        return False


class Left(BaseException):
    """Forward has come to the next stage, whose input this is. Not an Exception: models may catch those."""

    def __init__(self, output: torch.Tensor):
        super().__init__()
        self.output = output


class _OfStage(StandIn):
    """Stands in the forward of a stage. flow: what enters that stage."""

    def __init__(self, module: nn.Module, path: str, flow: Flow):
        super().__init__(module, path)
        self.__dict__["_flow"] = flow

    @property
    def flow(self) -> Flow:
        """What enters the stage."""
        return self.__dict__["_flow"]


class Absent(_OfStage):
    """A module of an earlier stage gives what that stage sent, whatever it is asked. One of a later stage is an error.

    Only what the stage's first block takes counts, and that takes the received activation itself.
    """

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The received activation, without gradient."""
        del args, kwargs
        flow = self.flow
        if flow.incoming is None or flow.has_entered:
            raise ModelError(
                f"module {self.path!r}: this stage of the pipeline runs it, but another one holds it. Blocks must run "
                f"one after another, and modules beside them wholly before or after. Register those that run after "
                f"the blocks behind them, or use pp=1."
            )
        given = flow.incoming.detach()
        return given if flow.mark is None else given + flow.mark


class StageEntry(_OfStage):
    """The first block of a stage: takes what was received in place of its first input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block gives."""
        flow = self.flow
        assert flow.incoming is not None
        flow.has_entered = True
        if args:
            return self.stands_for(flow.incoming, *args[1:], **kwargs)
        return self.stands_for(**{**kwargs, _stream(self.path, kwargs): flow.incoming})


class Exit(_OfStage):
    """The first block of the next stage: forward is left with what it would take."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Leave."""
        raise Left(args[0] if args else kwargs[_stream(self.path, kwargs)])


def _stream(path: str, kwargs: dict[str, Any]) -> str:
    """Which keyword argument of a block is what the block before gave."""
    if "hidden_states" in kwargs:
        return "hidden_states"
    tensors = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    if len(tensors) != 1:
        raise ModelError(
            f"block {path!r}: called with {', '.join(kwargs) or 'nothing'}, so Weft cannot tell which argument is "
            "the output of the block before. Pass that first, or as hidden_states=."
        )
    return tensors[0]


def without_tensors(module: nn.Module) -> nn.Module:
    """Put the module's parameters and buffers on the meta device, in place, without touching the tensors themselves."""
    for part in module.modules():
        for name, param in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, name, nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, torch.empty_like(buffer, device="meta"))
    return module


def put(site: blocks.Site, module: nn.Module) -> None:
    """Place a module at a site of its model."""
    setattr(site.parent, site.key, module)
