"""Calls to the tokenizers library with limits on time and memory, since its components come from untrusted files.

A regular expression may backtrack without end, and a chain of replacements may turn one letter into gigabytes. Each
call runs in a thread. A call past its limits cannot be stopped: it runs until the error ends the process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import DataError

#: CPU seconds of a call: a fixed part, and a part per character. Ordinary tokenizers take a microsecond per character.
_BASE_S, _CHAR_S = 10.0, 3e-5
#: Memory growth of the process during a call: a fixed part, and a part per character.
_BASE_BYTES, _CHAR_BYTES = 2**29, 2**11
_POLL_S = 0.05
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096

_stderr_lock = threading.Lock()

_T = TypeVar("_T")


def bounded(call: Callable[[], _T], num_chars: int) -> _T:
    """Run a call to the tokenizers library in a thread with limits, and return its result.

    call: a function that releases the GIL while it works. num_chars: length of its input, which determines the limits.

    Raises:
        DataError: if the call exceeds its limits, or the library fails.
    """
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)

    with _without_panic_reports():
        _watch(threading.Thread(target=run, name="weft-tokenizer", daemon=True), num_chars)
    if failed:
        raise _translated(failed[0]) from failed[0]
    return found[0]


def _watch(worker: threading.Thread, num_chars: int) -> None:
    """Run a thread to its end, or raise DataError when it exceeds its limits."""
    limit_s, limit_bytes = _BASE_S + _CHAR_S * num_chars, _BASE_BYTES + _CHAR_BYTES * num_chars
    start_s, start_bytes = time.process_time(), _resident_bytes()
    worker.start()
    while True:
        worker.join(_POLL_S)
        if not worker.is_alive():
            return
        if time.process_time() - start_s > limit_s:
            raise _unusable(f"it took more than {limit_s:.0f} s for {num_chars} characters")
        if _resident_bytes() - start_bytes > limit_bytes:
            raise _unusable(f"it took more than {limit_bytes / 2**30:.1f} GiB of memory for {num_chars} characters")


@contextlib.contextmanager
def _without_panic_reports() -> Iterator[None]:
    """Capture stderr in the `with` block, and write it afterwards unless it is a panic report of the library.

    Captures nothing while another thread does, or if the process has no stderr.
    """
    if not _stderr_lock.acquire(blocking=False):
        yield
        return
    try:
        with tempfile.TemporaryFile() as held, contextlib.ExitStack() as back:
            try:
                original = os.dup(2)
            except OSError:  # the process has no stderr
                yield
                return
            back.callback(os.close, original)
            os.dup2(held.fileno(), 2)
            try:
                yield
            finally:
                os.dup2(original, 2)
                held.seek(0)
                written = held.read()
                if written and b"panicked at" not in written:
                    os.write(original, written)
    finally:
        _stderr_lock.release()


def _translated(error: BaseException) -> BaseException:
    """Return the error to raise for an error of the library.

    The library raises bare exceptions, and its panics are not subclasses of `Exception`. A TypeError is its error for a
    text that UTF-8 cannot store.
    """
    if isinstance(error, TypeError) and "Input" in str(error):
        return DataError("text: it has half of a surrogate pair, which UTF-8 cannot store. Remove it.")
    if type(error) is not Exception and type(error).__name__ != "PanicException":
        return error
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    return _unusable(f"the tokenizers library failed ({first})")


def _unusable(what: str) -> DataError:
    return DataError(
        f"tokenizer: {what}. Check the normalizer and regular expressions in its tokenizer.json, or use another one."
    )


def _resident_bytes() -> int:
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0
