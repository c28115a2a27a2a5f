"""What crosses from stage to stage: activations forward, their gradients back, each with its shape known on both ends.

Both ends see the same microbatches. The first time a microbatch of some shapes comes, the sender says before the
activation what shape and format it has; from then on both know, and nothing but activations and gradients travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from weft.comm.peer import Message, PeerLane, start_receive, start_send
from weft.data.batch import parts_of
from weft.errors import CommError, ModelError
from weft.mesh import Axis
from weft.parallel.pipeline.carried import Carried, SentForm
from weft.spec.schedule.transfers import Key, Transfer

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
#: Numbers in what is said of an activation: how many tensors; of each its slot, format, number of dimensions, sizes.
_MAX_DIMS = 8
_MAX_PARTS = 32
_OF_PART = 3 + _MAX_DIMS
#: Sends that may be under way before the oldest is waited for: a sender seldom is so far ahead.
_MOST_SENDS = 64


class Boundary:
    """Sends and receives of one rank, over the axis of stages.

    Args:
        axis: the stages.
        device: of what travels.
        lanes: what goes over which group, see `comm.peer.join_lanes`.
    """

    def __init__(self, axis: Axis, device: torch.device, lanes: Mapping[PeerLane, Axis]):
        self._axis = axis
        self._lanes = lanes
        self._device = device
        self._kinds: dict[object, int] = {}
        self._forms: dict[tuple[int, int], SentForm] = {}  # by stage that is entered, and kind
        self._known: set[int] = set()
        self._arriving: dict[Key, tuple[SentForm, Message]] = {}
        self._sent: dict[Key, Message] = {}
        self._arrived_by: Mapping[Key, Sequence[Key]] = {}

    def kind_of(self, batch: Any) -> int:
        """A number for what the shapes between stages follow from: the shapes, formats and names of a microbatch."""
        return self._kinds.setdefault(_described(batch), len(self._kinds))

    def begin(self, arrived_by: Mapping[Key, Sequence[Key]] | None = None) -> None:
        """A step begins; what a broken one left is forgotten. arrived_by: what may be let go, see `spec.schedule`."""
        self._arrived_by = arrived_by or {}
        self._arriving.clear()
        self._sent.clear()

    def receive(self, transfer: Transfer, kind: int) -> None:
        """Begin to receive what `take` will give."""
        entered = _entered(transfer)
        form = self._forms.get((entered, kind))
        if form is None:
            form = self._forms[entered, kind] = self._be_told(transfer)
        message = start_receive(form.empty(self._device), *self._lane(transfer))
        self._arriving[transfer.content, transfer.stage, transfer.microbatch] = form, message

    def take(self, content: str, stage: int, microbatch: int) -> Carried:
        """Wait for what is on its way."""
        form, message = self._arriving.pop((content, stage, microbatch))
        tensor = message.wait()
        for key in self._arrived_by.get((content, stage, microbatch), ()):
            sent = self._sent.pop(key, None)
            if sent is not None:
                sent.wait()
        return form.unpack(tensor)

    def send(self, transfer: Transfer, carried: Carried, kind: int) -> None:
        """Begin to send. The tensors must not change before the step ends."""
        form = SentForm.of(carried)
        stage = _entered(transfer)
        known = self._forms.get((stage, kind))
        if known is None:
            self._forms[stage, kind] = form
            self._tell(transfer, form)
        elif known != form:
            raise ModelError(
                f"stage {stage}: {transfer.content} of microbatch {transfer.microbatch} has {_said(form)}, and "
                f"before it had {_said(known)} for a microbatch of the same "
                f"shapes. Shapes between stages must depend only on the shapes of the microbatch."
            )
        self._post(transfer, form.pack(carried))

    def end(self, kinds: Iterable[int] = ()) -> None:
        """Wait until everything was sent. kinds: of microbatches that have crossed all boundaries of this rank."""
        for message in self._sent.values():
            message.wait()
        self._sent.clear()
        self._known.update(kinds)

    def knows(self, kinds: Iterable[int]) -> bool:
        """Whether the shapes that follow from these microbatches are known at all boundaries of this rank."""
        return self._known.issuperset(kinds)

    def _lane(self, transfer: Transfer) -> tuple[Axis, int]:
        """The two ranks of a transfer as an axis, and the other one's place on it."""
        ends = self._axis.rank, transfer.peer
        lane = PeerLane(transfer.content, *(ends if transfer.way == "send" else reversed(ends)))
        return self._lanes[lane], int(ends[1] > ends[0])

    def _post(self, transfer: Transfer, tensor: torch.Tensor, content: str = "") -> None:
        if len(self._sent) >= _MOST_SENDS:
            self._sent.pop(next(iter(self._sent))).wait()
        key = (content or transfer.content, transfer.stage, transfer.microbatch)
        before = self._sent.pop(key, None)  # of an evaluation, whose batches all have one number
        if before is not None:
            before.wait()
        self._sent[key] = start_send(tensor, *self._lane(transfer))

    def _tell(self, transfer: Transfer, form: SentForm) -> None:
        numbers = [len(form.slots)]
        for slot, shape, dtype in zip(*form, strict=True):
            if len(shape) > _MAX_DIMS or dtype not in _DTYPES or len(form.slots) > _MAX_PARTS:
                raise ModelError(
                    f"stage {transfer.stage}: its input has {_said(form)}. Stages can send {_MAX_PARTS} tensors of at "
                    f"most {_MAX_DIMS} dimensions and a standard format."
                )
            numbers += [slot, _DTYPES.index(dtype), len(shape), *shape, *[0] * (_MAX_DIMS - len(shape))]
        numbers += [0] * (1 + _MAX_PARTS * _OF_PART - len(numbers))
        self._post(transfer, torch.tensor(numbers, device=self._device), "form")

    def _be_told(self, transfer: Transfer) -> SentForm:
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
                f"Ranks of a pipeline must be given the same microbatches."
            )
        return SentForm(tuple(slots), tuple(shapes), tuple(dtypes))


def _said(form: SentForm) -> str:
    shapes = " and ".join(str(tuple(shape)) for shape in form.shapes)
    return f"shape {shapes} and format {' and '.join(dict.fromkeys(map(str, form.dtypes)))}"


def _entered(transfer: Transfer) -> int:
    """The stage that the activation of this boundary enters; its gradient, which goes back, has the same form."""
    return transfer.stage if transfer.content == "activation" else transfer.stage + 1


def _described(batch: Any) -> object:
    """Shapes, formats and names in a batch: hashable, and equal where those are."""
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.dtype
    parts = parts_of(batch)
    if parts is None:
        return type(batch)
    return type(batch), tuple(batch) if isinstance(batch, Mapping) else (), *map(_described, parts)
