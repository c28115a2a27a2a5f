"""The child process that reads pickles: `python -P -m weft.train.foreign.confined KIND SOURCE OUT`.

It has no secrets in its environment, no network where the kernel lets it give that up, and a hook that ends it at the
first attempt to start a program, to connect, or to write outside of OUT. What is unpickled is limited to weights and
plain values before that: the hook is the second wall. Exit code 3 and a line of JSON on stdout: the files were refused.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

REFUSED = 3
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_FORBIDDEN = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill", "os.remove", "os.rename",
    "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate", "os.putenv", "pty.spawn",
    "subprocess.Popen", "socket.", "ctypes.dlopen", "shutil.", "urllib.", "http.", "ftplib.", "smtplib.", "winreg.",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> int:
    """Read, write, and say what was found."""
    kind, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    _give_up_rights()
    # Before the wall stands: loading torch maps libraries.
    import torch  # noqa: F401

    from weft.train.foreign.dcp_files import read_dcp
    from weft.train.foreign.pickled_files import read_pickled
    from weft.train.foreign.taken import NotTaken, Taken
    from weft.train.foreign.zero_files import read_zero

    _stand_wall(out.resolve())
    taken = Taken(out)
    try:
        {"dcp": read_dcp, "zero": read_zero, "pickled": read_pickled}[kind](source, taken)
        taken.close()
    except NotTaken as error:
        print(json.dumps({"refused": str(error)}))
        return REFUSED
    return 0


def _give_up_rights() -> None:
    """No core dumps with somebody's weights in them, and no network where the kernel allows it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NETWORK)


def _stand_wall(out: Path) -> None:
    inside = f"{out}{os.sep}"

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_FORBIDDEN):
            raise PermissionError(f"reading the checkpoint triggered {event}, which is blocked")
        if event in ("open", "os.mkdir") and _is_write(event, arguments):
            path = arguments[0]
            name = os.path.realpath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
            if not name.startswith(inside):
                raise PermissionError(f"reading the checkpoint tried to write {name}")

    sys.addaudithook(watch)


def _is_write(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "os.mkdir":
        return True
    mode, flags = arguments[1], arguments[2]
    wanted = isinstance(mode, str) and any(letter in mode for letter in "wax+")
    return not isinstance(arguments[0], int) and (wanted or bool(isinstance(flags, int) and flags & _WRITES))


if __name__ == "__main__":
    sys.exit(main())
