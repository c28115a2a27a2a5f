"""A lock on an open file that the operating system frees when its last holder dies."""

from __future__ import annotations

import errno
import fcntl

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file against other processes; False where one of them holds it. shared: others may share it.

    A file system without locks is used without one. Raises OSError for any other failure.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
