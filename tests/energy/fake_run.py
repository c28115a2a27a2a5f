"""A process that looks like a run on this machine: its steps and its energy follow the fake tree's CPU frequency.

python -m tests.energy.fake_run RUN SYSFS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from weft.files import replace_text
from weft.monitor.events import EventLog
from weft.train.folder import run_lock

MOST = 3_000_000  # kHz


def curve(kilohertz: float) -> tuple[float, float]:
    """Return (seconds of a step, watts) at a frequency: half of a step waits for memory."""
    share = kilohertz / MOST
    return 0.01 * (0.8 + 0.2 / share), 30.0 + 70.0 * share**3


def cpufreq(sysfs: Path, policies: int = 2) -> list[Path]:
    """Write a fake cpufreq tree and return its limits."""
    files = []
    for number in range(policies):
        folder = sysfs / "devices" / "system" / "cpu" / "cpufreq" / f"policy{number}"
        folder.mkdir(parents=True)
        (folder / "cpuinfo_min_freq").write_text("1000000\n")
        (folder / "scaling_max_freq").write_text(f"{MOST}\n")
        files.append(folder / "scaling_max_freq")
    return files


def main(run: Path, sysfs: Path) -> None:
    """Write steps until the process is killed."""
    limit = sysfs / "devices" / "system" / "cpu" / "cpufreq" / "policy0" / "scaling_max_freq"
    counter = sysfs / "class" / "powercap" / "intel-rapl:0" / "energy_uj"
    with run_lock(run), EventLog(run / "events.jsonl") as log:
        machine = {"host": os.uname().nodename}
        log.write({"event": "start", "step": 0, "world_size": 1, "device": "cpu", "machine": machine})
        log.write({"event": "energy", "step": 0, "num_hosts": 1, "energy_j": 0.0, "devices": []})
        microjoules, step, before = 0.0, 0, time.monotonic()
        while True:
            step_s, watts = curve(float(limit.read_text() or MOST))
            time.sleep(step_s)
            now = time.monotonic()
            microjoules, before = microjoules + 1e6 * watts * (now - before), now
            replace_text(counter, f"{int(microjoules)}\n")
            step += 1
            log.write({"event": "step", "step": step, "loss": 1.0, "seconds": {"total": step_s}})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
