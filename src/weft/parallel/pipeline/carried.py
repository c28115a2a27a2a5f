"""What crosses from one stage to the next: arguments of its first call, and other values that later stages read."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: The slot of the first argument: of what the block before returned.
STREAM = 0
#: The slot of a tensor without meaning, if a stage needs nothing of the earlier ones.
NOTHING = -1
#: Slots of values are below this.
_VALUES = -2
#: Where tensors of several formats lie in one message: at multiples of so many bytes.
_ALIGNED = 16


def slot_of(place: int, *, is_value: bool = False) -> int:
    """Return the slot of an argument of the entered call, or of a value, by its place among these."""
    return _VALUES - place if is_value else place


class Carried(NamedTuple):
    """Tensors by slot (`slot_of`)."""

    slots: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def one(cls, tensor: torch.Tensor) -> Carried:
        """The stream alone."""
        return cls((STREAM,), (tensor,))

    def detach(self) -> Carried:
        """The same numbers without their history."""
        return Carried(self.slots, tuple(tensor.detach() for tensor in self.tensors))


class SentForm(NamedTuple):
    """Slots, shapes and formats of what crosses: what both ends know, so that one message carries all of it."""

    slots: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, carried: Carried) -> SentForm:
        """That of some tensors."""
        tensors = carried.tensors
        return cls(carried.slots, tuple(each.shape for each in tensors), tuple(each.dtype for each in tensors))

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return memory for a message of this form."""
        if len(self.slots) == 1:
            return torch.empty(self.shapes[0], dtype=self.dtypes[0], device=device)
        return torch.empty(sum(map(_padded, self._sizes())), dtype=torch.uint8, device=device)

    def pack(self, carried: Carried) -> torch.Tensor:
        """Return the message: the tensor itself where there is one, else the bytes of all."""
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
