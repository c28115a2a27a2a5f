"""What stands in the model for its modules, so that the model's own forward runs as a stage of a pipeline.

The model's forward is called for each stage. Modules of other stages return remote tensors (`remote`). At the first
call of this stage that needs earlier ones, its arguments get the numbers that were received. After the last call of
this stage, forward is left. So masks, positions and keyword arguments are made by the model's own code, from the
microbatch that every stage has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from weft.data.batch import map_tensors, tensors_in
from weft.errors import ModelError
from weft.parallel.layers import StandIn
from weft.parallel.pipeline.carried import NOTHING, Carried, slot_of
from weft.parallel.pipeline.remote import RemoteTensor, is_remote, local, refuse
from weft.parallel.pipeline.survey import (
    StageRoute,
    Value,
    ValueSurvey,
    kind_of,
    remote_attribute,
    remote_outputs,
)  # fmt: skip
from weft.private_torch import version_of
from weft.structure import blocks


class Left(BaseException):
    """Ends forward after the last call of a stage. Not an Exception: models may catch those."""


class Flow:
    """The calls of one forward of a stage, and what enters and leaves it.

    Args:
        stage: number of the stage.
        survey: of the model.
    """

    def __init__(self, stage: int, survey: ValueSurvey):
        self.stage, self.survey = stage, survey
        self.route: StageRoute | None = None
        self._calls = 0
        self._incoming: dict[Value, torch.Tensor] = {}
        self._entering: list[torch.Tensor] = []
        self._leaving: list[torch.Tensor] = []
        self._made: dict[Value, torch.Tensor] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []

    @property
    def is_active(self) -> bool:
        """Whether a forward is running."""
        return self.route is not None

    def begin(self, route: StageRoute, incoming: Carried | None) -> None:
        """Begin a forward. incoming: what was received; None on the first stage."""
        self.end()
        self.route = route
        if incoming is None:
            return
        tensors = list(incoming.tensors)
        entry = route.entry.get(self.stage)
        count = len(entry.leaves) if entry is not None else 0
        self._entering = tensors[:count]
        self._incoming = dict(zip(route.values[self.stage], tensors[count:], strict=False))

    def end(self) -> None:
        """End it."""
        self.route = None
        self._calls = 0
        self._incoming, self._made = {}, {}
        self._entering, self._leaving, self._versions = [], [], []

    def called(self, relay: Relay, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module, or return its outputs as remote tensors. Leaves forward after the last call of the stage."""
        route, stages = self.route, self.survey.stages
        assert route is not None
        args, kwargs = map_tensors(local, args), map_tensors(local, kwargs)
        if relay.number not in route.calls and stages[relay.number] == self.stage:
            return relay.stands_for(*args, **kwargs)  # a tower, or a module that this kind of batch does not use
        number = self._calls
        if number >= len(route.calls) or route.calls[number] != relay.number:
            raise ModelError(
                f"pp: forward calls {relay.path!r} where it called "
                f"{self._path_of(number)!r} before. Every forward of a pipeline must call the same modules in the same "
                f"order; use pp=1 otherwise."
            )
        self._calls += 1
        following = route.entry.get(self.stage + 1)
        if following is not None and following.call == number:
            self._leave(relay, following.leaves, args, kwargs)
        if stages[relay.number] == self.stage:
            made = self._own(relay, number, args, kwargs)
        else:
            made = self._remote(relay, number, args, kwargs)
        return made

    def _path_of(self, call: int) -> str:
        calls = self.route.calls if self.route is not None else ()
        return self.survey.paths[calls[call]] if call < len(calls) else "nothing"

    def _own(self, relay: Relay, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.route is not None
        entry = self.route.entry.get(self.stage)
        probe = self.survey.probes[relay.number]
        wanted = any(value[0] == number for values in self.route.values.values() for value in values)
        returned = probe.returned(args, kwargs) if wanted else None
        if entry is not None and entry.call == number:
            args, kwargs = self._enter(relay, entry.leaves, args, kwargs)
        for tensor in tensors_in((args, kwargs)):
            if is_remote(tensor):
                raise _refused(tensor, f"{relay.path!r} is called with a value")
        made = relay.stands_for(*args, **kwargs)
        for tensor in tensors_in(made):
            if is_remote(tensor):
                raise _refused(tensor, f"{relay.path!r} returns a value")
        if probe.guesses:
            probe.check(args, kwargs, made)
        if returned is not None:
            names = [key for key, _ in returned.set_tensors]
            found = [getattr(relay.stands_for.get_submodule(path), name) for path, name in names]
            outputs = [*tensors_in(made), *tensors_in(found)]
            self._made |= {(number, leaf): tensor for leaf, tensor in enumerate(outputs)}
            self._versions += [(each, version_of(each)) for each in outputs]
        return made

    def _enter(
        self, relay: Relay, leaves: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        """Put what was received in place of arguments, and give these their numbers for later uses."""
        received = dict(zip(leaves, self._entering, strict=True))
        count = len(list(tensors_in((args, kwargs))))
        if any(leaf >= count for leaf in leaves):
            raise _other_arguments(relay)
        numbers = iter(range(count))

        def replaced(tensor: torch.Tensor) -> torch.Tensor:
            found = received.get(next(numbers))
            if found is not None and isinstance(tensor, RemoteTensor):
                tensor.receive(found)
            return local(tensor) if found is None else found

        args = map_tensors(replaced, args)
        return args, map_tensors(replaced, kwargs)

    def _leave(self, relay: Relay, leaves: tuple[int, ...], args: Any, kwargs: Any) -> None:
        """Note what the next stage is called with, and leave if nothing follows here."""
        tensors = list(tensors_in((args, kwargs)))
        if any(leaf >= len(tensors) for leaf in leaves):
            raise _other_arguments(relay)
        self._leaving = [tensors[leaf] for leaf in leaves]
        for tensor in self._leaving:
            if is_remote(tensor):
                raise _refused(tensor, f"{relay.path!r} is called with a value")
        self._versions += [(each, version_of(each)) for each in self._leaving]
        assert self.route is not None
        if self.route.last[self.stage] < self._calls:
            raise Left

    def _remote(self, relay: Relay, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.route is not None
        following = self.route.entry.get(self.stage + 1)
        is_over = self.route.last[self.stage] < number and (following is None or following.call < number)
        if is_over and self.stage < max(self.survey.stages):
            raise Left
        device = next((each.device for each in tensors_in((args, kwargs))), torch.device("cpu"))
        probe = self.survey.probes[relay.number]
        return remote_outputs(probe, args, kwargs, number, device, self._incoming)

    def outgoing(self) -> Carried:
        """Return what the next stage receives.

        Raises:
            ModelError: if forward was over too early, or changed a tensor in place after it was used.
        """
        assert self.route is not None
        following = self.route.entry.get(self.stage + 1)
        if following is not None and len(self._leaving) != len(following.leaves):
            raise ModelError(
                f"stage {self.stage}: forward ended without a call of {self._path_of(following.call)!r}, which begins "
                f"the next stage. Every block of the chain must run in every forward; use pp=1 otherwise."
            )
        if any(version_of(tensor) != version for tensor, version in self._versions):
            raise ModelError(
                "pp: forward changes a tensor in place that another stage receives. Write x = x + y in place of "
                "x += y, or use pp=1."
            )
        values = {**self._incoming, **self._made}
        found: list[tuple[int, torch.Tensor]] = [(slot_of(leaf), each) for leaf, each in enumerate(self._leaving)]
        for place, value in enumerate(self.route.values[self.stage + 1]):
            found.append((slot_of(place, is_value=True), values[value]))
        if not found:
            found = [(NOTHING, torch.zeros(1, device=self.device))]
        return Carried(tuple(slot for slot, _ in found), tuple(tensor for _, tensor in found))

    @property
    def device(self) -> torch.device:
        """Where this stage computes, by its last known tensor."""
        known = [*self._made.values(), *self._incoming.values(), *self._entering]
        return known[0].device if known else torch.device("cpu")


def _other_arguments(relay: Relay) -> ModelError:
    return ModelError(
        f"pp: {relay.path!r} is called with other arguments than before. Every forward of a pipeline must call its "
        f"blocks in the same way; use pp=1 otherwise."
    )


def _refused(tensor: torch.Tensor, use: str) -> ModelError:
    assert isinstance(tensor, RemoteTensor)
    return refuse(tensor, use)


class Absent(StandIn):
    """Stands in the model for a module that is on other ranks only."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a stage puts a `Relay` here while it runs."""
        del args, kwargs
        raise ModelError(f"module {self.path!r}: another stage of the pipeline holds it. Call the full model.")


class Relay(StandIn):
    """Stands for a module of the chain while a stage runs."""

    def __init__(self, module: nn.Module, path: str, number: int, flow: Flow):
        super().__init__(module, path)
        self.__dict__["_at"] = number, flow
        if self.is_own:  # who walks the model finds what is in it
            self.__dict__.update({name: module.__dict__[name] for name in ("_modules", "_parameters", "_buffers")})

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] - isinstance asks for it
        if "_at" not in self.__dict__ or not self.flow.is_active:
            return type(self)
        return kind_of(self) if self.is_own else type(self.flow.survey.probes[self.number].module)

    @property
    def number(self) -> int:
        """Its number in the chain."""
        return self.__dict__["_at"][0]

    @property
    def flow(self) -> Flow:
        """Of its stage."""
        return self.__dict__["_at"][1]

    @property
    def is_own(self) -> bool:
        """Whether its module is of this stage."""
        return self.flow.survey.stages[self.number] == self.flow.stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, or return remote tensors."""
        if not self.flow.is_active:  # torch's checkpoint runs a part of forward again
            return self.stands_for(*map_tensors(local, args), **map_tensors(local, kwargs))
        return self.flow.called(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if self.is_own:
            return getattr(self.stands_for, name)
        return remote_attribute(self.flow.survey.probes[self.number], "", name)

    def __iter__(self) -> Iterator[Any]:
        raise self._not_called()

    def __getitem__(self, key: Any) -> Any:
        raise self._not_called()

    def __len__(self) -> int:
        raise self._not_called()

    def __bool__(self) -> bool:
        return True

    def _not_called(self) -> ModelError:
        return ModelError(
            f"pp: forward takes {self.path!r} apart without calling it, and a stage holds all of it. Call the module, "
            f"or use pp=1."
        )


def without_tensors(module: nn.Module, kept: Collection[nn.Module] = ()) -> nn.Module:
    """Put the module's parameters and buffers on the meta device, in place, without touching the tensors themselves.

    Args:
        module: of another stage.
        kept: modules that are a part of this stage too.
    """
    for part in module.modules():
        if part in kept:
            continue
        for name, param in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, name, nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, torch.empty_like(buffer, device="meta"))
    return module


def put(site: blocks.Site, module: nn.Module) -> None:
    """Place a module at a site of its model."""
    blocks.children(site.parent)[site.key] = module
