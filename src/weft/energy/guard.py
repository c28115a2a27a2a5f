"""Process that restores limits when its parent ends, also after kill -9 of the parent: `python -m weft.energy.guard`.

It waits for the end of its standard input, which the parent holds open. The first limits are in a file, which is
written before the first change. If the guard is killed too, the next `weft energy` command restores from that file.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft import env
from weft.energy.limits import NoRights, read_state, restore
from weft.errors import LaunchError
from weft.files import KILLED_S, try_lock

#: Time (s) for the guard to start, and for which it tries to restore.
_START_S, _RESTORE_S = 30.0, 60.0
_READY = b"ready\n"


def state_file() -> Path:
    """Return the file with the first limits of this machine while they are changed."""
    return env.cache_dir() / f"energy_limits-{os.uname().nodename}.json"


def boot_id() -> str:
    """Return an identifier of the machine's last boot, which resets all limits; "" if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class Guarded:
    """Context in which limits may be changed. At its end, and if this process is killed, the first ones are restored.

    Args:
        state: the first limits, as `DeviceLimit.state`.
        sysfs: the folder /sys, or another one in tests.
        nvml: replaces pynvml in tests.

    Raises:
        LaunchError: if another command changes limits, an earlier change cannot be restored, or the guard does not
            start.
    """

    def __init__(self, state: Mapping[str, Any], sysfs: Path, nvml: Any = None):
        self._state, self._sysfs, self._nvml, self._file = state, sysfs, nvml, state_file()
        self._guard: subprocess.Popen[bytes] | None = None
        self._lock = -1

    def __enter__(self) -> Guarded:
        self._lock = take_lock()
        try:
            restore_earlier(self._sysfs, self._nvml)
            # A complete file exists before the first change, and only this user may change it.
            draft = self._file.with_suffix(f".{os.getpid()}")
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "w") as file:
                json.dump({**self._state, "boot": boot_id()}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self._file)
            self._start()
        except BaseException:
            self._file.unlink(missing_ok=True)
            os.close(self._lock)
            raise
        return self

    def _start(self) -> None:
        # A separate session, so that Ctrl-C and a closed terminal do not reach the guard.
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "weft.energy.guard", str(self._file), str(self._sysfs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        ready, _, _ = select.select([self._guard.stdout], [], [], _START_S)
        if not ready or self._guard.stdout.readline() != _READY:
            self._guard.kill()
            self._guard.wait()
            raise LaunchError("the process that restores limits after a kill does not start; nothing was changed.")

    def check(self) -> None:
        """Raise LaunchError if the guard has ended, so that a kill of this process would leave limits changed."""
        if self._guard is None or self._guard.poll() is not None:
            raise LaunchError("the process that restores limits after a kill has ended; all limits are restored.")

    def __exit__(self, *_: object) -> None:
        error: Exception | None = None
        try:
            restore(self._state, self._sysfs, self._nvml)
            self._file.unlink(missing_ok=True)
        except (OSError, NoRights) as failed:
            error = failed  # the guard tries again, and removes the file if it succeeds
        if self._guard is not None:
            for pipe in (self._guard.stdin, self._guard.stdout):
                if pipe is not None:
                    pipe.close()
            self._guard.wait()
        os.close(self._lock)
        if error is not None and self._file.exists():
            raise LaunchError(f"limits could not be restored: {error}. Run: sudo weft energy restore.") from error


def take_lock() -> int:
    """Take the lock of this machine's limits and return its descriptor. Raise LaunchError if another has it."""
    path = state_file().with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock(handle, wait_s=KILLED_S):
        os.close(handle)
        raise LaunchError("another `weft energy` command changes the limits of this machine. Wait for its end.")
    return handle


def restore_earlier(sysfs: Path, nvml: Any = None) -> bool:
    """Restore the limits of a tuning that was killed together with its guard. Return True if there was one.

    Raises:
        LaunchError: if they cannot be restored.
    """
    file = state_file()
    try:
        state = read_state(file)
        if state is None:
            return False
        if state.get("boot") == boot_id():
            restore(state, sysfs, nvml)
    except ValueError as error:
        raise LaunchError(
            f"{file}: this file of an earlier tuning is damaged ({error}). Check the limits here, and delete it."
        ) from error
    except (OSError, NoRights) as error:
        raise LaunchError(
            f"{file}: limits that an earlier tuning changed cannot be restored ({error}). An administrator must run: "
            "sudo weft energy restore."
        ) from error
    file.unlink(missing_ok=True)
    return True


def main(file: Path, sysfs: Path) -> int:
    """Wait for the end of standard input, and restore if the file still exists. Return the exit code."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    sys.stdout.buffer.write(_READY)
    sys.stdout.flush()
    while os.read(0, 4096):
        pass
    end = time.monotonic() + _RESTORE_S
    while True:
        try:
            state = read_state(file)
            if state is not None:
                restore(state, sysfs)
                file.unlink(missing_ok=True)
            return 0
        except (OSError, NoRights, ValueError) as error:
            if time.monotonic() > end:
                with contextlib.suppress(OSError):
                    print(f"weft: limits could not be restored: {error}", file=sys.stderr)
                return 1
            time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
