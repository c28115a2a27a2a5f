"""The process that calls a function: `main`, with the descriptor of its lifeline and its cores as arguments.

Requests are lines of standard input: "load JOB" or "call ITEM", both with JSON. Answers are lines of JSON on the
original standard output. Output of the function goes to stderr. The process stays single-threaded, so that functions
may fork.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, did_you_mean
from weft.lazy import named_object

#: fcntl command that chooses the signal of O_ASYNC (Linux; Python has no name for it).
_F_SETSIG = 10
#: Bytes that a result may have as JSON.
MAX_RESULT_BYTES = 64 * 2**20
_MAX_TRACEBACK = 20_000
#: Bits of an integer whose decimal digits Python converts: 4,300 digits.
_MAX_INT_BITS = 14_000

Function = Callable[[Any], Any]


class _State:
    is_loading = False


def refuse_nested_pool() -> None:
    """Raise ConfigError if a module that a worker imports starts a pool itself."""
    if _State.is_loading:
        raise ConfigError(
            "weft.pool: workers import this script, which starts a pool again. "
            'Put the call under: if __name__ == "__main__":'
        )


def die_with(lifeline: int) -> None:
    """Kill this process group when the other end of a pipe closes, even if the function never releases the GIL."""
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        os.set_blocking(lifeline, False)
        with suppress(BlockingIOError):
            if os.read(lifeline, 1) == b"":  # closed before O_ASYNC was set
                os.killpg(0, signal.SIGKILL)
        return

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def load(job: dict[str, Any]) -> Function:
    """Import a job's function.

    Raises:
        ValueError: with a sentence, if the function does not exist or cannot be called with one item.
        Exception: any exception of the module's import.
    """
    with suppress(OSError):
        os.chdir(job["cwd"])  # a worker on another machine may lack the folder
    sys.path.extend(path for path in job["path"] if path not in sys.path)
    source = job["function"]
    home, _, name = source.rpartition(":")
    try:
        function = named_object(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (home == error.name or home.startswith(f"{error.name}.")):
            raise
        raise ValueError(f"there is no module {error.name!r}.{_similar_module(home)}") from None
    except FileNotFoundError:
        raise ValueError(f"there is no file {home!r}. Check the path") from None
    except AttributeError as error:
        if hasattr(sys.modules.get(home), name) or "has no" not in str(error) or not str(error).startswith(home):
            raise
        raise ValueError(f"{error}") from None
    if not callable(function):
        raise ValueError(f"it has the type {type(function).__name__}. Name a function of one argument")
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return function
    try:
        parameters.bind(None)
    except TypeError:
        raise ValueError(
            f"its parameters are ({', '.join(parameters.parameters)}), and it is called with one argument, the item. "
            f"Write {name}(item)"
        ) from None
    return function


def _similar_module(name: str) -> str:
    parts = name.split(".")
    folder = Path(*parts[:-1])
    with suppress(OSError):
        near = did_you_mean(parts[-1], {path.stem for path in folder.iterdir() if path.suffix in (".py", "")})
        if near:
            return near.replace("'", f"'{'.'.join(parts[:-1])}." if parts[:-1] else "'", 1)
    return " Run the command in the folder that has it, or write path/to/file.py:function"


def unfit_part(value: Any, where: str = "result") -> str:
    """Return a description of the first part of a value that cannot be written as JSON, or ""."""
    try:
        return _find_unfit(value, where)
    except RecursionError:
        return f"{where} is nested too deep or contains itself"


def _find_unfit(value: Any, where: str) -> str:
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        return f"{where} is an integer of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | str):
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{where} is {value}"
    if isinstance(value, list | tuple):
        return next(filter(None, (_find_unfit(one, f"{where}[{n}]") for n, one in enumerate(value))), "")
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            return f"{where} has the key {odd[0]!r:.40} of type {type(odd[0]).__name__}"
        return next(filter(None, (_find_unfit(one, f"{where}[{key!r:.40}]") for key, one in value.items())), "")
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{where} is a {name}"


def answer_to(function: Function, item: bytes) -> dict[str, Any]:
    """Call the function, and return {"result": value} or {"error": last line, "traceback": text}."""
    try:
        value = function(json.loads(item))
        unfit = unfit_part(value)
    except BaseException as error:  # sys.exit too: only a killed worker ends
        return _error(error)
    if unfit:
        return {"error": f"{unfit}, which JSON lacks. Return numbers, texts, lists and dicts with text keys."}
    return {"result": value}


def _error(error: BaseException) -> dict[str, Any]:
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # without this module's frame
    text = "".join(traceback.format_exception(type(error), error, frames))
    line = traceback.format_exception_only(type(error), error)[-1].strip()
    return {"error": line[:2000], "traceback": text[-_MAX_TRACEBACK:]}


def _write(descriptor: int, answer: dict[str, Any]) -> None:
    text = json.dumps(answer)
    if len(text) > MAX_RESULT_BYTES:
        size = f"{len(text) / 2**20:.0f} MiB"
        limit = f"{MAX_RESULT_BYTES // 2**20} MiB"
        text = json.dumps({"error": f"the result has {size}, and at most {limit} fit. Write a file; return its path."})
    data = memoryview(text.encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


def _loaded(job: bytes) -> tuple[Function | None, dict[str, Any]]:
    _State.is_loading = True
    try:
        return load(json.loads(job)), {"ready": True}
    except ConfigError as error:
        return None, {"unusable": str(error).rstrip(".")}
    except BaseException as error:
        return None, {"unusable": str(error)} if _is_own(error) else {**_error(error), "kind": "import"}
    finally:
        _State.is_loading = False


def _is_own(error: BaseException) -> bool:
    """Return True if `load` raised the error, and not the user's module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return isinstance(error, ValueError) and trace is not None and trace.tb_frame.f_code is load.__code__


def main() -> None:
    """Answer requests until the input ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]  (a TextIOWrapper)
    lifeline, cores = sys.argv[1:]
    del sys.argv[1:]
    die_with(int(lifeline))
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    own, function = os.getpid(), None
    for request in requests:
        kind, _, text = request.partition(b" ")
        if kind == b"load":
            function, answer = _loaded(text)
        else:
            assert function is not None
            if sys.stdout.closed:  # by an earlier call
                os.dup2(2, 1)
                sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            answer = answer_to(function, text)
        if os.getpid() != own:
            os._exit(0)  # a child that the function forked and let return
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # the function may have closed it
                stream.flush()
        try:
            _write(answers, answer)
        except (RecursionError, ValueError) as error:
            _write(answers, _error(error))
