"""A process that decodes pictures into a ring of memory that it shares with a rank.

It reads a description of the pictures from its standard input, then one job after another: (slot, epoch, index). For
each it answers (slot, status, length of a text) and the text of an error. It ends where its input does.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import sys
from typing import Any, BinaryIO

import numpy as np

from weft.data.media.pictures import Pictures, parse_source
from weft.data.media.pixels import Look
from weft.errors import DataError

#: slot, epoch, index; slot, status, length of the text that follows.
JOB, ANSWER = struct.Struct("<qqq"), struct.Struct("<qqq")
DONE, FAULTY, BROKEN = range(3)


def described(source: str, look: Look, seed: int) -> bytes:
    """Return what a worker is told first.

    Args:
        source: of the pictures, as text.
        look: how they are seen.
        seed: of what is drawn.
    """
    fields = [look.side, look.crops, look.mirrors, look.colour, look.noise]
    text = json.dumps({"source": source, "look": fields, "seed": seed}).encode()
    return len(text).to_bytes(8, "little") + text


def main(ring_fd: int, num_slots: int) -> None:
    """Serve jobs until the input ends.

    Args:
        ring_fd: file of the shared memory.
        num_slots: of the ring.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank hears of it, and ends this process
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    jobs = sys.stdin.buffer
    told = json.loads(jobs.read(int.from_bytes(jobs.read(8), "little")))
    pictures = Pictures(parse_source(told["source"]), Look(*told["look"]), told["seed"])
    side = pictures.look.side
    with mmap.mmap(ring_fd, num_slots * 3 * side * side) as memory:
        ring = np.frombuffer(memory, np.uint8).reshape(num_slots, 3, side, side)
        _serve(pictures, ring, jobs, answers)
        del ring


def _serve(pictures: Pictures, ring: Any, jobs: BinaryIO, answers: Any) -> None:
    while len(job := jobs.read(JOB.size)) == JOB.size:
        slot, epoch, index = JOB.unpack(job)
        status, text = DONE, b""
        try:
            ring[slot] = pictures.pixels(epoch, index)
        except DataError as error:
            status, text = FAULTY, str(error).encode()
        except Exception as error:  # a decoder may raise anything, and the rank says of which picture
            status, text = BROKEN, f"{type(error).__name__}: {error}".encode()
        try:
            answers.write(ANSWER.pack(slot, status, len(text)) + text)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
