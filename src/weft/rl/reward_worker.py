"""The process that calls one reward function: `python -m weft.rl.reward_worker FILE.py:FUNCTION`.

Each line of its standard input is a call, and each line of its output an answer, as JSON. It exits at the end of its
input, and is killed when its parent ends. Output of the function goes to stderr.
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
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.lazy import named_object

#: Option of prctl for the signal that the process gets when its parent ends.
_PARENT_DEATH_SIGNAL = 1


def accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names are parameters of a function, or all if it takes any."""
    params = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in params.values())
    return {name: value for name, value in values.items() if takes_all or name in params}


def checked(found: Any, number: int) -> dict[str, Any]:
    """Return {"values": a float or None each}, or {"error": text} if a result is not `number` values."""
    found = found.tolist() if callable(getattr(found, "tolist", None)) else found
    if isinstance(found, str) or not isinstance(found, Sequence):
        return {"error": f"it returned {type(found).__name__}, and a list of {number} numbers is needed"}
    if len(found) != number:
        return {"error": f"it returned {len(found)} values for {number} completions"}
    values = [one.item() if callable(getattr(one, "item", None)) else one for one in found]
    if odd := [one for one in values if one is not None and not isinstance(one, numbers.Real)]:
        return {"error": f"it returned a {type(odd[0]).__name__}, and a number is needed"}
    return {"values": [_finite(one) for one in values]}


def _finite(value: Any) -> float | None:
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:  # a huge int
        return None


def main(source: str) -> None:
    """Answer calls until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank gets the signal too, and ends this process
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    calls, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a function that reads its input gets nothing
    for line in calls:
        values = json.loads(line)
        try:
            function = named_object(source)
            answer = checked(function(**accepted(function, values)), len(values["completions"]))
        except Exception as error:  # user code may raise anything
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            answer = {"error": f"it raised {type(error).__name__} at {where} ({error})"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
