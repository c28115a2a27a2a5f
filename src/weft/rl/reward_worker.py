"""The process that calls one reward function: `python -m weft.rl.reward_worker FILE.py:FUNCTION`.

It reads calls from its standard input, and writes answers, each as 8 bytes of length and JSON. It exits at the end of
its input, and is killed when its parent ends. Output of the function goes to stderr.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import math
import numbers
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from weft.lazy import named_object

#: Option of prctl for the signal that the process gets when its parent ends.
_PARENT_DEATH_SIGNAL = 1


def write_message(stream: BinaryIO, value: Any) -> None:
    """Write a JSON value with its length."""
    text = json.dumps(value).encode()
    stream.write(len(text).to_bytes(8, "little") + text)
    stream.flush()


def accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names are parameters of a function, or all if it takes any."""
    params = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in params):
        return dict(values)
    names = {one.name for one in params}
    return {name: value for name, value in values.items() if name in names}


def checked(found: Any, number: int) -> dict[str, Any]:
    """Return {"values": a float or None each}, or {"error": text} if a result is not `number` values."""
    found = found.tolist() if callable(getattr(found, "tolist", None)) else found
    if isinstance(found, str) or not isinstance(found, Sequence):
        return {"error": f"it returned {type(found).__name__}, and a list of {number} numbers is needed"}
    if len(found) != number:
        return {"error": f"it returned {len(found)} values for {number} completions"}
    values: list[float | None] = []
    for one in found:
        one = one.item() if callable(getattr(one, "item", None)) else one
        if one is not None and not isinstance(one, numbers.Real):
            return {"error": f"it returned a {type(one).__name__}, and a number is needed"}
        values.append(None if one is None or not math.isfinite(one) else float(one))
    return {"values": values}


def main(source: str) -> None:
    """Answer calls until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank gets the signal too, and ends this process
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    answers, calls = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)
    function: Callable[..., Any] | None = None
    while len(head := calls.read(8)) == 8:
        values = json.loads(calls.read(int.from_bytes(head, "little")))
        try:
            function = function or named_object(source)
            answer = checked(function(**accepted(function, values)), len(values["completions"]))
        except Exception as error:  # user code may raise anything
            frame = error.__traceback__
            while frame is not None and frame.tb_next is not None:
                frame = frame.tb_next
            where = f" at {Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}" if frame else ""
            answer = {"error": f"it raised {type(error).__name__}{where} ({error})"}
        write_message(answers, answer)


if __name__ == "__main__":
    main(sys.argv[1])
