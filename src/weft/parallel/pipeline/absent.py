"""What stands in the model for the modules of other stages, so that its own forward runs as it is written.

The model's forward is called for each stage. Modules of earlier stages give what was received, the stage's first
block takes it in place of its input, and where the next stage would begin, forward is left. So masks, positions and
keyword arguments are made by the model's own code, from the microbatch that every stage has.

Of an encoder and a decoder, the first stage runs what lies before both chains: its forward goes on past its part of
the encoder to the first block of the decoder, whose input then travels along until the decoder's blocks are reached.
From there on the encoder's output travels, in the place of the block's argument of that name, and its gradient comes
back along the same way. What blocks hand to each other beside the stream (T5's position bias) travels likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weft.errors import ModelError
from weft.parallel.layers import StandIn
from weft.parallel.pipeline.carried import ASIDE, STREAM, Carried
from weft.parallel.pipeline.probe import Probes
from weft.private_torch import tree_leaves, tree_map
from weft.structure import blocks

#: Chains of a model: what an encoder's modules are a part of, and all others.
ENCODER, MAIN = 0, 1
_NONE: Mapping[int, int] = {}


class Flow:
    """What enters a stage, while its forward runs. None: the stage is the first.

    cross: the slot of the encoder's output in the decoder's blocks; 0: there is none. probes: know what blocks give.
    mark: a zero in all that absent modules give, where it is asked whether the stage's output depends on that.
    """

    def __init__(self, cross: int = 0, probes: Probes | None = None) -> None:
        self.cross = cross
        self.probes = probes or Probes({})
        self.incoming: Carried | None = None
        self.mark: torch.Tensor | None = None
        self.kept: Carried | None = None  # of the encoder, by a first stage that goes on to the decoder
        self.made: tuple[Any, ...] = ()  # what the last block gave
        self.stood_in: tuple[Any, Any] = (None, None)  # for the encoder's output, and that itself
        self._given: dict[int, torch.Tensor] = {}
        self._is_marked = False

    def begin(self, incoming: Carried | None, chain: int, *, is_marked: bool) -> None:
        """A stage's forward begins. chain: of the stage's first block."""
        self.end()
        self.incoming, self._is_marked = incoming, is_marked
        if incoming is None:
            return
        self.give(chain, incoming.at(STREAM))
        if chain == ENCODER:
            self.give(MAIN, incoming.at(ASIDE))
        elif self.cross:
            self.give(ENCODER, incoming.at(self.cross))

    def end(self) -> None:
        """It is over."""
        self.incoming = self.mark = self.kept = None
        self.made, self.stood_in = (), (None, None)
        self._given.clear()

    def give(self, chain: int, tensor: torch.Tensor | None) -> None:
        """From here on the absent modules of a chain give this."""
        if tensor is None:
            return
        if self._is_marked and self.mark is None:
            self.mark = torch.zeros((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)
        self._given[chain] = tensor

    def enter(self, chain: int) -> None:
        """The first block of this stage in a chain runs: no absent module may, after it."""
        self._given.pop(chain, None)

    def given(self, chain: int) -> torch.Tensor | None:
        """What the absent modules of a chain give, without gradient."""
        tensor = self._given.get(chain)
        return tensor if tensor is None else tensor.detach() if self.mark is None else tensor.detach() + self.mark

    def with_encoder(self, output: Any) -> Any:
        """The model's output with the encoder's in place of what stood in for it."""
        stood_in, received = self.stood_in
        return output if received is None else tree_map(lambda leaf: received if leaf is stood_in else leaf, output)

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
    """Forward has come to the next stage, which takes this. Not an Exception: models may catch those."""

    def __init__(self, output: Carried):
        super().__init__()
        self.output = output


class _OfStage(StandIn):
    """Stands in the forward of a stage. flow: what enters that stage. chain: which the module is a part of."""

    def __init__(self, module: nn.Module, path: str, flow: Flow, chain: int = MAIN):
        super().__init__(module, path)
        self.__dict__["_flow"] = flow, chain

    @property
    def flow(self) -> Flow:
        """What enters the stage."""
        return self.__dict__["_flow"][0]

    @property
    def chain(self) -> int:
        """Which chain the module is a part of."""
        return self.__dict__["_flow"][1]


class Absent(_OfStage):
    """A module of an earlier stage gives what that stage sent, whatever it is asked. One of a later stage is an error.

    Only what the stage's first block takes counts, and that takes the received activation itself.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The received activation, without gradient, in the form that the module gives."""
        given = self.flow.given(self.chain)
        if given is None:
            raise ModelError(
                f"module {self.path!r}: this stage of the pipeline runs it, but another one holds it. Blocks must run "
                f"one after another, and modules beside them wholly before or after. Register those that run after "
                f"the blocks behind them, or use pp=1."
            )
        return self.flow.probes.as_given_by(self.stands_for, given, args, kwargs)


class _Block(_OfStage):
    """Stands for a block.

    taken: slots of its arguments that what was received replaces, and the slot of that; None: all that was received.
    """

    def __init__(
        self, module: nn.Module, path: str, flow: Flow, chain: int = MAIN, taken: Mapping[int, int] | None = _NONE
    ):
        super().__init__(module, path, flow, chain)
        self.__dict__["_taken"] = taken

    def received(self) -> dict[int, torch.Tensor]:
        """By slot of the block's arguments, what replaces them."""
        incoming, taken = self.flow.incoming, self.__dict__["_taken"]
        if incoming is None:
            return {}
        if taken is None:
            return {slot: tensor for slot, tensor in zip(*incoming, strict=True) if slot != ASIDE}
        found = {slot: incoming.at(source) for slot, source in taken.items()}
        return {slot: tensor for slot, tensor in found.items() if tensor is not None}

    def slots(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int | str]:
        """By slot, where the argument stands: a place in args, or a name in kwargs."""
        stream = "" if args else _stream(self.path, kwargs)
        names = self.flow.probes.parameters(self.path)
        named = {STREAM if name == stream else names[name]: name for name in kwargs if name == stream or name in names}
        return {**named, **{place: place for place in range(len(args))}}


class Own(_Block):
    """A block of the stage: takes what was received in place of its own arguments, and notes what it gave."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block gives."""
        flow = self.flow
        if received := self.received():
            if STREAM in received:
                flow.enter(self.chain)
            placed, named, slots = list(args), dict(kwargs), self.slots(args, kwargs)
            for slot, tensor in received.items():
                where = slots.get(slot)
                if slot == flow.cross != STREAM and where is not None:
                    flow.stood_in = named[where] if isinstance(where, str) else placed[where], tensor
                if isinstance(where, str):
                    named[where] = tensor
                elif where is not None:
                    placed[where] = tensor
                else:
                    named[flow.probes.name(self.path, slot)] = tensor
            args, kwargs = tuple(placed), named
        made = self.stands_for(*args, **kwargs)
        flow.made = tuple(made) if isinstance(made, tuple) else ()  # pyright: ignore[reportUnknownArgumentType] - the class is the model's own
        return made


class Exit(_Block):
    """The first block of the next stage: forward is left with what it would take."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Leave."""
        raise Left(self.arguments(args, kwargs))

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carried:
        """What of the arguments must travel: the stream, what the block before made, and the encoder's output."""
        flow = self.flow
        found: dict[int, torch.Tensor] = {}
        for slot, where in self.slots(args, kwargs).items():
            value = kwargs[where] if isinstance(where, str) else args[where]
            if isinstance(value, torch.Tensor) and (
                slot in (STREAM, flow.cross if self.chain == MAIN else STREAM) or any(value is one for one in flow.made)
            ):
                found[slot] = value
        found |= self.received()
        if flow.kept is not None:  # the first stage, which went on from its part of the encoder
            found = {**dict(zip(*flow.kept, strict=True)), ASIDE: found[STREAM]}
        elif self.chain == ENCODER and flow.incoming is not None and (aside := flow.incoming.at(ASIDE)) is not None:
            found[ASIDE] = aside
        return Carried(tuple(found), tuple(found.values()))


class Passed(Exit):
    """The encoder's block of the next stage, in the first one: that goes on to what the decoder's chain begins with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Note what would leave, and give something of its shape."""
        flow = self.flow
        kept = self.arguments(args, kwargs)
        flow.kept = kept
        flow.give(ENCODER, kept.at(STREAM))
        given = flow.given(ENCODER)
        assert given is not None
        return flow.probes.as_given_by(self.stands_for, given, args, kwargs)


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
