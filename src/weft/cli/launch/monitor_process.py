"""Monitor process of a run: alerts and sinks run here, so that they never delay training.

Run as `python -m weft.cli.launch.monitor_process RUN_DIR`. The config arrives over standard input, which stays open
until the command ends. Secrets arrive through the environment.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from weft import env
from weft.config.run_config import RunConfig
from weft.monitor.alerts import Companion
from weft.train.folder import new_files_like, restrict_new_files

#: Seconds for sending the remaining data when the command ends, and seconds that the command waits for it.
_GRACE_S, _WAIT_S = 10.0, 15.0
_LOOK_S = 0.5


@contextmanager
def monitor_process(folder: Path, config: RunConfig, say: Callable[[str], None]) -> Generator[None]:
    """Run the monitor process during a block, if the config has alerts or sinks.

    Args:
        folder, config: the run's folder, which the caller locks, and its config.
        say: called with a line for the user.
    """
    if not Companion.is_needed(config):
        yield
        return
    logs = folder / "logs"
    with new_files_like(folder):
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "beside.log").touch()
    with open(logs / "beside.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.cli.launch.monitor_process", str(folder)],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=env.child_env(),
        )  # fmt: skip
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(config.model_dump(mode="json", by_alias=True)).encode() + b"\n")
        process.stdin.flush()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode:
            say(f"not all metrics and alerts were sent ({logs / 'beside.log'}); to send them: weft runs send {folder}")


def main() -> None:
    """Follow a run until the standard input is closed. The exit code is 1 if data remains unsent, else 0."""
    folder, line = Path(sys.argv[1]), sys.stdin.buffer
    config = RunConfig.model_validate_json(line.readline(), strict=False)
    restrict_new_files(folder)
    companion = Companion(folder, config)
    companion.start()
    while not select.select([line], [], [], _LOOK_S)[0]:
        companion.look()
    sys.exit(1 if companion.finish(_GRACE_S) else 0)


if __name__ == "__main__":
    main()
