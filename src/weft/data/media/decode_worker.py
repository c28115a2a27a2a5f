"""Process that decodes images or audio into a ring buffer in memory shared with a rank.

It reads a description of the samples from its standard input, then one job after another: (slot, epoch, index). For
each job it writes (slot, status, length of a text) and a text: the shape of the decoded sample, or an error. It exits
at the end of its input.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import struct
import sys
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError
from weft.lazy import named_object

#: Formats of a job (slot, epoch, index) and of a response (slot, status, length of the text that follows).
JOB, ANSWER = struct.Struct("<qqq"), struct.Struct("<qqq")
DONE, FAULTY, BROKEN = range(3)
#: Sample classes by the "kind" of their description. They are given by name and imported on use, because their modules
#: import this one.
_KINDS = {
    "pictures": "weft.data.media.image_source:Pictures",
    "sounds": "weft.data.media.audio_source:Sounds",
    "mixed": "weft.data.media.mixed_items:MixedItems",
    "chat": "weft.data.media.chat_records:ChatItems",
}


class Decodable(Protocol):
    """Interface of samples that decode processes can decode."""

    source: Any
    smaller: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of a decoded sample."""
        ...

    def __len__(self) -> int: ...

    def learnt(self, index: int) -> Any:
        """Return the target of a sample."""
        ...

    def decoded(self, epoch: int, index: int) -> NDArray[Any]:
        """Return a decoded sample in an epoch, with at most the size `shape` in each dim."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that describe the samples to a worker."""
        ...


def slot_bytes(samples: Decodable) -> int:
    """Return the maximum size of a sample in bytes."""
    return math.prod(samples.shape) * samples.dtype.itemsize


def in_slot(ring: NDArray[np.uint8], slot: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a view of the ring for one sample.

    Args:
        ring: the ring buffer, uint8 (slots, bytes).
        slot: index of the slot.
        shape: shape of the sample.
        dtype: dtype of the sample.
    """
    return ring[slot, : math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def described(samples: Decodable) -> bytes:
    """Return the first message to a worker, which describes the samples."""
    text = json.dumps(samples.to_json()).encode()
    return len(text).to_bytes(8, "little") + text


def main(ring_fd: int, num_slots: int) -> None:
    """Serve jobs until the input ends.

    ring_fd: file descriptor of the shared memory. num_slots: number of slots of the ring.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank gets the signal too, and ends this process
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # send output of libraries to stderr, because stdout has the responses
    jobs = sys.stdin.buffer
    told = json.loads(jobs.read(int.from_bytes(jobs.read(8), "little")))
    samples: Decodable = named_object(_KINDS[told["kind"]]).of(told)
    size = slot_bytes(samples)
    with mmap.mmap(ring_fd, num_slots * size) as memory:
        ring = np.frombuffer(memory, np.uint8).reshape(num_slots, size)
        _serve(samples, ring, jobs, answers)
        del ring


def _serve(samples: Decodable, ring: Any, jobs: BinaryIO, answers: Any) -> None:
    while len(job := jobs.read(JOB.size)) == JOB.size:
        slot, epoch, index = JOB.unpack(job)
        try:
            made = samples.decoded(epoch, index)
            in_slot(ring, slot, made.shape, samples.dtype)[...] = made
            status, text = DONE, json.dumps(made.shape).encode()
        except DataError as error:
            status, text = FAULTY, str(error).encode("utf-8", "backslashreplace")
        except Exception as error:  # a decoder may raise anything, and the rank adds the sample's name
            status, text = BROKEN, f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")
        try:
            answers.write(ANSWER.pack(slot, status, len(text)) + text)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
