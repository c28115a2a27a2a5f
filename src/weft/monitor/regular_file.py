"""Opening files that another program wrote, in a folder where anything may have their name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading if it is a regular one, or a link to one. A FIFO or a device is never opened or waited for.

    Raises:
        OSError: for anything else, and if the file is missing or may not be read.
    """
    # Opening a device may act on it, so that it is looked at before; another file may be there by the time it is open.
    _require_regular(os.stat(path))
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _require_regular(os.fstat(handle))
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def _require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
