"""Errors of a script that uses Weft: print a short message on one rank, instead of a traceback on each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from weft import env
from weft.comm.first_rank import run_once
from weft.errors import WeftError

#: Folder of the package.
_INSIDE = Path(__file__).parents[2]


def report_user_errors() -> None:
    """Set an exception hook that prints Weft's errors without a traceback and exits with their exit code.

    A hook that the script or a debugger installed is kept, and so is Python's own hook under WEFT_TRACEBACK=1. Call
    this function again after the ranks have joined, because torch.distributed then wraps the current hook.
    """
    hook: Any = sys.excepthook
    if not env.wants_traceback() and not isinstance(hook, _Hook) and _is_default(hook):
        sys.excepthook = _Hook(hook)


def _is_default(hook: Any) -> bool:
    """Return True for Python's or Weft's hook, or torch.distributed's wrapper of one of these."""
    if hook is sys.__excepthook__ or isinstance(hook, _Hook):
        return True
    if not getattr(hook, "__module__", "").startswith("torch.distributed"):
        return False
    inside = (cell.cell_contents for cell in hook.__closure__ or ())
    return all(_is_default(one) for one in inside if callable(one))


class _Hook:
    """Prints Weft's errors and exits. Passes other errors, and all errors under a debugger, to the previous hook."""

    def __init__(self, before: Callable[..., Any]):
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_watched = sys.gettrace() is not None or sys.flags.interactive or hasattr(sys, "ps1")
        if not isinstance(error, WeftError) or is_watched:
            self._before(kind, error, trace)
            return
        text = str(error)
        lines = f"weft: error: {text}\n  ({kind.__name__}{_line_of(trace)}; WEFT_TRACEBACK=1 prints the traceback)"
        run_once(text, lambda: print(lines, file=sys.stderr, flush=True))
        # Set the exit code of the process, after atexit functions have run.
        raise SystemExit(error.exit_code)


def _line_of(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's code for the message, or "" if the trace has no such line."""
    found = ""
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if "site-packages" not in path.parts and _INSIDE not in path.parents and path.exists():
            found = f" at {path}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
