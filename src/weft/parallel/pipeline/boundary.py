"""Tensors that cross stage boundaries: arguments of a stage's first call, and other tensors that later stages read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.comm.mesh import Axis
from weft.comm.peer import Message, PeerLane, start_receive, start_send
from weft.config.pipeline_schedule import Key, Transfer
from weft.data.batches import map_tensors, parts_of, tensors_in
from weft.errors import CommError, ModelError
from weft.models.inspect import blocks
from weft.parallel.layers.index_check import StandIn
from weft.parallel.pipeline.inner_gradients import partial_gradients_refused
from weft.parallel.pipeline.remote import RemoteTensor, is_remote, local, refuse
from weft.parallel.pipeline.survey import (
    StageRoute,
    Value,
    ValueSurvey,
    device_of,
    full_masks,
    kind_of,
    remote_attribute,
    remote_outputs,
)
from weft.private_torch import version_of

#: Slot of the first argument: the hidden states that the previous block returned.
STREAM = 0
#: Slot of a placeholder tensor, if a stage needs nothing from earlier ones.
NOTHING = -1
#: Slots of values (tensors that are not arguments of the first call) are at most this.
_VALUES = -2
#: Byte alignment of tensors of several dtypes in one message.
_ALIGNED = 16


def slot_of(place: int, *, is_value: bool = False) -> int:
    """Return the slot of a tensor: the number that identifies it at a stage boundary.

    place: index among the received arguments of the stage's first call or, if `is_value`, among the other tensors.
    """
    return _VALUES - place if is_value else place


class Carried(NamedTuple):
    """Tensors that cross a boundary, by slot. `slot_of` returns the slot of a tensor."""

    slots: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def one(cls, tensor: torch.Tensor) -> Carried:
        """Return a `Carried` with the hidden states only."""
        return cls((STREAM,), (tensor,))

    def detach(self) -> Carried:
        """Return the same values without their autograd history."""
        return Carried(self.slots, tuple(tensor.detach() for tensor in self.tensors))


class SentForm(NamedTuple):
    """Slots, shapes and dtypes of the tensors at a boundary. Both ends store it, so one message carries all tensors."""

    slots: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, carried: Carried) -> SentForm:
        tensors = carried.tensors
        return cls(carried.slots, tuple(each.shape for each in tensors), tuple(each.dtype for each in tensors))

    def empty(self, device: torch.device) -> torch.Tensor:
        if len(self.slots) == 1:
            return torch.empty(self.shapes[0], dtype=self.dtypes[0], device=device)
        return torch.empty(sum(map(_padded, self._sizes())), dtype=torch.uint8, device=device)

    def pack(self, carried: Carried) -> torch.Tensor:
        """Return the message for tensors: the tensor itself if there is only one, else the bytes of all tensors."""
        if len(self.slots) == 1:
            return carried.tensors[0].detach().contiguous()
        message = self.empty(carried.tensors[0].device)
        for place, tensor in zip(self.unpack(message).tensors, carried.tensors, strict=True):
            place.copy_(tensor.detach())
        return message

    def unpack(self, message: torch.Tensor) -> Carried:
        """Return the tensors of a message, as views of it."""
        if len(self.slots) == 1:
            return Carried(self.slots, (message,))
        found: list[torch.Tensor] = []
        start = 0
        for size, shape, dtype in zip(self._sizes(), self.shapes, self.dtypes, strict=True):
            found.append(message[start : start + size].view(dtype).view(shape))
            start += _padded(size)
        return Carried(self.slots, tuple(found))

    def _sizes(self) -> list[int]:
        return [shape.numel() * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


# Placeholders for the model's modules, with which the model's own forward runs as a pipeline stage.


class Left(BaseException):
    """Ends a stage's forward after its last call. Not an Exception, because models may catch Exceptions."""


class Flow:
    """State of one forward of a stage: its module calls, and the tensors that enter and leave.

    Args:
        stage: index of the stage.
        survey: survey of the full model.
        tied: by path of a module, the names of its parameters that modules of earlier stages also have.
    """

    def __init__(self, stage: int, survey: ValueSurvey, tied: Mapping[str, Sequence[str]]):
        self.stage, self.survey, self._tied = stage, survey, tied
        self.route: StageRoute | None = None
        self._calls = 0
        self._incoming: dict[Value, torch.Tensor] = {}
        self._entering: list[torch.Tensor] = []
        self._leaving: list[torch.Tensor] = []
        self._made: dict[Value, torch.Tensor] = {}
        self._given: dict[int, torch.Tensor] = {}  # tensors of this stage with which earlier stages computed, by id
        self._versions: list[tuple[torch.Tensor, int]] = []

    @property
    def is_active(self) -> bool:
        return self.route is not None

    def begin(self, route: StageRoute, incoming: Carried | None) -> None:
        """Begin a forward. `incoming` holds the received tensors, or is None on the first stage."""
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
        self.route = None
        self._calls = 0
        self._incoming, self._made = {}, {}
        self._entering, self._leaving, self._versions, self._given = [], [], [], {}

    def called(self, relay: Relay, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module if it is in this stage, else return remote tensors.

        Raises `Left` if the stage needs no later call. Raises ModelError if the order of calls changed, or if a module
        gets or returns a value of another stage that was not received.
        """
        route, stages = self.route, self.survey.stages
        assert route is not None
        inputs = list(tensors_in((args, kwargs) if kwargs else args))
        if any(isinstance(each, RemoteTensor) and each.received is not None for each in inputs):
            args, kwargs, inputs = map_tensors(local, args), map_tensors(local, kwargs), list(map(local, inputs))
        if relay.number not in route.calls and stages[relay.number] == self.stage:
            return relay.stands_for(*args, **kwargs)  # an encoder, or a module that this kind of batch does not use
        number = self._calls
        if number >= len(route.calls) or route.calls[number] != relay.number:
            raise ModelError(
                f"pp: forward calls {relay.path!r} after {self._path_of(number)!r} before. Every forward of a "
                "pipeline must call the same modules in the same order; use pp=1 otherwise."
            )
        self._calls += 1
        following = route.entry.get(self.stage + 1)
        if following is not None and following.call == number:
            self._leave(relay, following.leaves, inputs)
        if stages[relay.number] == self.stage:
            return self._own(relay, number, args, kwargs, inputs)
        return self._remote(relay, number, args, kwargs, inputs)

    def _path_of(self, call: int) -> str:
        calls = self.route.calls if self.route is not None else ()
        return self.survey.paths[calls[call]] if call < len(calls) else "nothing"

    def _own(
        self, relay: Relay, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> Any:  # fmt: skip
        """Run a module of this stage. inputs: the tensors in args and kwargs."""
        assert self.route is not None
        entry = self.route.entry.get(self.stage)
        probe = self.survey.probes[relay.number]
        wanted = any(value[0] == number for values in self.route.values.values() for value in values)
        returned = probe.returned(args, kwargs) if wanted else None
        if entry is not None and entry.call == number:
            args, kwargs = self._enter(relay, entry.leaves, args, kwargs, len(inputs))
            inputs = list(tensors_in((args, kwargs)))
        for tensor in inputs:
            if is_remote(tensor):
                raise _refused(tensor, f"{relay.path!r} is called with a value")
        received = [*self._entering, *self._incoming.values()]
        given = self._given
        tied = [attrgetter(name)(relay.stands_for) for name in self._tied.get(relay.path, ())]
        if not (torch.is_grad_enabled() or relay.stands_for.training):
            given, tied = {}, []
        has_earlier = bool(given or tied)
        with partial_gradients_refused(relay.path, inputs, given, received, tied) if has_earlier else nullcontext():
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
        self, relay: Relay, leaves: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        """Return the arguments with received tensors instead of remote ones. count: number of their tensors.

        A replaced remote tensor gets the received values, for later uses of it.
        """
        received = dict(zip(leaves, self._entering, strict=True))
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

    def _leave(self, relay: Relay, leaves: tuple[int, ...], tensors: list[torch.Tensor]) -> None:
        """Record the arguments of the next stage's first call. Raise `Left` if this stage has no later call."""
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

    def _remote(
        self, relay: Relay, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> Any:  # fmt: skip
        """Return remote tensors for a module of another stage. inputs: the tensors in args and kwargs."""
        assert self.route is not None
        following = self.route.entry.get(self.stage + 1)
        is_over = self.route.last[self.stage] < number and (following is None or following.call < number)
        if is_over and self.stage < max(self.survey.stages):
            raise Left
        if self.survey.stages[relay.number] < self.stage:
            for each in inputs:
                self._given |= {id(own): own for own in (each.used if isinstance(each, RemoteTensor) else (each,))}
        device = device_of(inputs)
        probe = self.survey.probes[relay.number]
        return remote_outputs(probe, args, kwargs, number, device, self._incoming)

    def outgoing(self) -> Carried:
        """Return the tensors for the next stage.

        Raises ModelError if forward ended before the next stage's first call, or if it modified a tensor that another
        stage receives.
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
                "pp: forward changes a tensor in place that another stage receives. Write x = x + y instead of x += "
                "y, or use pp=1."
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
        """Device of this stage, from its first tensor."""
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


class RemoteModule(StandIn):
    """Placeholder in the model for a module that only other ranks hold."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ModelError. While a stage runs, a `Relay` replaces this module in the model."""
        del args, kwargs
        raise ModelError(f"module {self.path!r}: it is on another stage of the pipeline. Call the full model.")


class Relay(StandIn):
    """Placeholder for a module of the model, while one stage runs. It calls the module if the module is in this stage.

    For modules of other stages, it returns remote tensors as outputs, and remote tensors or placeholders as attributes.
    """

    def __init__(self, module: nn.Module, path: str, number: int, flow: Flow):
        super().__init__(module, path)
        self.__dict__["_at"] = number, flow
        if self.is_own:  # so that iteration over the model finds its contents
            self.__dict__.update({name: module.__dict__[name] for name in ("_modules", "_parameters", "_buffers")})

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] - isinstance asks for it
        if "_at" not in self.__dict__ or not self.flow.is_active:
            return type(self)
        return kind_of(self) if self.is_own else type(self.flow.survey.probes[self.number].module)

    @property
    def number(self) -> int:
        return self.__dict__["_at"][0]

    @property
    def flow(self) -> Flow:
        return self.__dict__["_at"][1]

    @property
    def is_own(self) -> bool:
        """True if the module belongs to this stage."""
        return self.flow.survey.stages[self.number] == self.flow.stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module if it is in this stage, else return remote tensors for its outputs."""
        if not self.flow.is_active:  # torch's checkpoint runs a part of forward again
            return self.stands_for(*map_tensors(local, args), **map_tensors(local, kwargs))
        return self.flow.called(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if self.is_own:
            return getattr(self.stands_for, name)
        probe = self.flow.survey.probes[self.number]
        return remote_attribute(probe, probe.module, "", name)

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
            f"pp: forward takes {self.path!r} apart without calling it, and it is on one stage. Call the module, or "
            "use pp=1."
        )


def without_tensors(module: nn.Module, kept: Collection[nn.Module] = ()) -> nn.Module:
    """Replace a module's parameters and buffers by new ones on the meta device, except in submodules in `kept`."""
    for part in module.modules():
        if part in kept:
            continue
        for name, param in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, name, nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, torch.empty_like(buffer, device="meta"))
    return module


def put(site: blocks.Site, module: nn.Module) -> None:
    """Replace the module at a position in its model."""
    blocks.children(site.parent)[site.key] = module


# Transfers between stages: activations forward and their gradients back. Both ends store each shape.

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
#: Layout of a form message: number of tensors, then slot, dtype, number of dims and sizes of each.
_MAX_DIMS = 8
_MAX_PARTS = 32
_OF_PART = 3 + _MAX_DIMS
#: Maximum number of sends in flight. Beyond it, a send first waits for the oldest. Few schedules send so far ahead.
_MOST_SENDS = 64


class Boundary:
    """Sends and receives of one rank, over the pp axis. lanes: process group per direction (`peer.join_lanes`)."""

    def __init__(self, axis: Axis, device: torch.device, lanes: Mapping[PeerLane, Axis]):
        self._axis, self._lanes, self._device = axis, lanes, device
        self._kinds: dict[object, int] = {}
        self._forms: dict[tuple[int, int], SentForm] = {}  # by (entered stage, kind)
        self._known: set[int] = set()
        self._arriving: dict[Key, tuple[SentForm, Message]] = {}
        self._sent: dict[Key, Message] = {}
        self._arrived_by: Mapping[Key, Sequence[Key]] = {}

    def kind_of(self, batch: Any) -> int:
        """Return an index that is equal for microbatches with the same shapes at stage boundaries.

        These are microbatches with equal structure, shapes and dtypes, in which the same masks mask nothing.
        """
        return self._kinds.setdefault((_described(batch), full_masks(batch)), len(self._kinds))

    def begin(self, arrived_by: Mapping[Key, Sequence[Key]] | None = None) -> None:
        """Begin a step, and drop the state of a failed step.

        arrived_by: result of `weft.config.pipeline_schedule.arrived_by`, or None to wait for sends only in `end`.
        """
        self._arrived_by = arrived_by or {}
        self._arriving.clear()
        self._sent.clear()

    def receive(self, transfer: Transfer, kind: int) -> None:
        """Start the receive whose result `take` will return.

        If the shapes are not recorded yet, this first waits until the sender has sent them.
        """
        entered = _entered(transfer)
        form = self._forms.get((entered, kind))
        if form is None:
            form = self._forms[entered, kind] = self._receive_forms(transfer)
        message = start_receive(form.empty(self._device), *self._lane(transfer))
        self._arriving[transfer.content, transfer.stage, transfer.microbatch] = form, message

    def take(self, content: str, stage: int, microbatch: int) -> Carried:
        """Wait for a started receive and return its tensors.

        Also wait for the sends that must have arrived before this message was sent, so that their buffers are freed.
        """
        form, message = self._arriving.pop((content, stage, microbatch))
        tensor = message.wait()
        for key in self._arrived_by.get((content, stage, microbatch), ()):
            sent = self._sent.pop(key, None)
            if sent is not None:
                sent.wait()
        return form.unpack(tensor)

    def send(self, transfer: Transfer, carried: Carried, kind: int) -> None:
        """Start a send. The tensors must not change before the step ends. May wait for earlier sends.

        Raises ModelError if their shapes or dtypes differ from an earlier microbatch of the same kind.
        """
        stage = _entered(transfer)
        form = self.check(stage, carried)
        known = self._forms.get((stage, kind))
        if known is None:
            self._forms[stage, kind] = form
            self._send_form(transfer, form)
        elif known != form:
            raise ModelError(
                f"stage {stage}: {transfer.content} of microbatch {transfer.microbatch} has {_describe(form)}, and "
                f"before it had {_describe(known)} for a microbatch of the same "
                f"shapes. Shapes between stages must depend only on the shapes of the microbatch."
            )
        self._post(transfer, form.pack(carried))

    def end(self, kinds: Iterable[int] = ()) -> None:
        """Wait until all sends are complete.

        kinds: results of `kind_of` for microbatches whose shapes are now recorded at all boundaries.
        """
        for message in self._sent.values():
            message.wait()
        self._sent.clear()
        self._known.update(kinds)

    def knows(self, kinds: Iterable[int]) -> bool:
        """Return True if the shapes for these kinds of microbatches are recorded at all boundaries of this rank."""
        return self._known.issuperset(kinds)

    def _lane(self, transfer: Transfer) -> tuple[Axis, int]:
        """Return the two ranks of a transfer as an axis, and the peer's index on it."""
        ends = self._axis.rank, transfer.peer
        lane = PeerLane(transfer.content, *(ends if transfer.way == "send" else reversed(ends)))
        return self._lanes[lane], int(ends[1] > ends[0])

    def _post(self, transfer: Transfer, tensor: torch.Tensor, content: str = "") -> None:
        if len(self._sent) >= _MOST_SENDS:
            self._sent.pop(next(iter(self._sent))).wait()
        key = (content or transfer.content, transfer.stage, transfer.microbatch)
        before = self._sent.pop(key, None)  # from an evaluation, whose batches all have index 0
        if before is not None:
            before.wait()
        self._sent[key] = start_send(tensor, *self._lane(transfer))

    @contextmanager
    def unrecorded(self) -> Iterator[int]:
        """Yield the index of a temporary kind of microbatch. Its recorded shapes are dropped after the context."""
        kind = -1
        try:
            yield kind
        finally:
            self._forms = {key: form for key, form in self._forms.items() if key[1] != kind}

    @staticmethod
    def check(stage: int, carried: Carried) -> SentForm:
        """Return slots, shapes and dtypes of a stage's inputs.

        Raises ModelError if there are too many tensors, or one has too many dims or an unsupported dtype.
        """
        form = SentForm.of(carried)
        is_standard = all(len(shape) <= _MAX_DIMS for shape in form.shapes) and set(form.dtypes) <= set(_DTYPES)
        if not is_standard or len(form.slots) > _MAX_PARTS:
            raise ModelError(
                f"stage {stage}: its input has {_describe(form)}. Stages can send {_MAX_PARTS} tensors of at "
                f"most {_MAX_DIMS} dimensions and a standard format."
            )
        return form

    def _send_form(self, transfer: Transfer, form: SentForm) -> None:
        numbers = [len(form.slots)]
        for slot, shape, dtype in zip(*form, strict=True):
            numbers += [slot, _DTYPES.index(dtype), len(shape), *shape, *[0] * (_MAX_DIMS - len(shape))]
        numbers += [0] * (1 + _MAX_PARTS * _OF_PART - len(numbers))
        self._post(transfer, torch.tensor(numbers, device=self._device), "form")

    def _receive_forms(self, transfer: Transfer) -> SentForm:
        numbers = torch.empty(1 + _MAX_PARTS * _OF_PART, dtype=torch.int64, device=self._device)
        count, *told = start_receive(numbers, *self._lane(transfer)).wait().tolist()
        slots: list[int] = []
        shapes: list[torch.Size] = []
        dtypes: list[torch.dtype] = []
        for place in range(min(max(count, 0), _MAX_PARTS)):
            slot, dtype, num_dims, *sizes = told[place * _OF_PART : (place + 1) * _OF_PART]
            if not 0 <= dtype < len(_DTYPES) or not 0 <= num_dims <= _MAX_DIMS:
                break
            slots.append(slot)
            shapes.append(torch.Size(sizes[:num_dims]))
            dtypes.append(_DTYPES[dtype])
        if not slots or len(slots) != count:
            raise CommError(
                f"stage {transfer.stage}: rank {self._axis.ranks[transfer.peer]} sent something that is not a shape. "
                "Ranks of a pipeline must get the same microbatches."
            )
        return SentForm(tuple(slots), tuple(shapes), tuple(dtypes))


def _describe(form: SentForm) -> str:
    shapes = " and ".join(str(tuple(shape)) for shape in form.shapes)
    return f"shape {shapes} and format {' and '.join(dict.fromkeys(map(str, form.dtypes)))}"


def _entered(transfer: Transfer) -> int:
    """Return the later stage of a boundary. Activations enter it, and gradients leave it with the same form."""
    return transfer.stage if transfer.content == "activation" else transfer.stage + 1


def _described(batch: Any) -> object:
    """Return a hashable description of a batch's shapes, dtypes and names."""
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.dtype
    parts = parts_of(batch)
    if parts is None:
        return type(batch)
    return type(batch), tuple(batch) if isinstance(batch, Mapping) else (), *map(_described, parts)
