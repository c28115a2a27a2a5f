"""The child process that reads pickles: `python -P -m weft.train.weights.foreign_reader KIND SOURCE OUT`.

Its environment has no secrets, and it has no network if the kernel allows that. Its memory and disk limits follow from
the size of the source. An audit hook ends it at the first attempt to start a program, to connect, or to write outside
OUT. Unpickling is limited to weights and plain values, so the hook is a second line of defense. The process ends with
its parent. Exit code 3 and a line of JSON on stdout mean that the files were rejected.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

REFUSED = 3
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
#: Option of prctl for the signal that the process gets when its parent ends.
_PARENT_DEATH_SIGNAL = 1
#: Memory limit in addition to the memory of torch and of the data.
_SPARE_BYTES = 2 * 2**30
_FORBIDDEN = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill", "os.remove", "os.rename",
    "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate", "os.putenv", "pty.spawn",
    "subprocess.Popen", "socket.", "ctypes.dlopen", "shutil.", "urllib.", "http.", "ftplib.", "smtplib.", "winreg.",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> int:
    """Give up rights, limit memory and the files that can be written, read the source, and write the output files.

    Return the exit code: 0, or 3 if files were rejected. The reason is printed as JSON.
    """
    kind, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    _give_up_rights()
    # Import torch before confinement begins, because that maps libraries.
    import torch  # noqa: F401

    from weft.train.weights.foreign_files import (
        NotTaken,
        Taken,
        most_bytes,
        read_dcp,
        read_pickled,
        read_zero,
        reason_of,
    )

    limit = most_bytes(sum(file.lstat().st_size for file in (*source.glob("*"), *source.glob("*/*")) if file.is_file()))
    _limit_memory(limit)
    _stand_wall(out.resolve())
    taken = Taken(out, limit)
    try:
        {"dcp": read_dcp, "zero": read_zero, "pickled": read_pickled}[kind](source, taken)
        taken.close()
    except NotTaken as error:
        return _refused(str(error))
    except Exception as error:  # a damaged or hostile file may raise anything
        return _refused(reason_of(error))
    return 0


def _refused(reason: str) -> int:
    print(json.dumps({"refused": reason}))
    return REFUSED


def _limit_memory(num_bytes: int) -> None:
    """Limit the size of written files and, on Linux, the address space."""
    most = num_bytes + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    with suppress(OSError, ValueError):
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        # Files are mapped, tensors are joined, and a file is written from memory.
        resource.setrlimit(resource.RLIMIT_AS, (in_use + most, in_use + most))


def _give_up_rights() -> None:
    """Disable core dumps, which would contain weights, and the network if the kernel allows it.

    On Linux, the process is killed when its parent ends.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.unshare(_NEW_USER | _NEW_NETWORK)
        library.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


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
