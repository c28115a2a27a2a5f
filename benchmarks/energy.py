"""What metering energy costs: time of its thread and its hook, as a share of training.

    python benchmarks/energy.py                       steps of 10 ms to 1 s, two CPU packages and 8 GPUs
    python benchmarks/energy.py --gpus 0 --nvml-us 0  CPU packages alone
    python benchmarks/energy.py --real GPU-UUID       this machine's counters and GPU

The counters of packages are files of a fake /sys. A GPU's counter takes --nvml-us of busy waiting per reading, since
a call of the driver takes about that long. A run of --minutes of training is simulated: its hook gets one step record
for each step and writes real events, and the meter's thread reads once a second. The cost is the time that both take,
added up, as if the thread never ran during a wait of training; evaluations and saves come every 50 steps. With fake
counters it is CPU time, without the time in which other programs had the core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from weft.config.run_config import RunConfig
from weft.energy.host_meter import host_meter
from weft.energy.meters import load_nvml
from weft.monitor.events import EventLog, StepRecord
from weft.train.loop.energy_hook import EnergyHook, EnergyReports


class SlowNvml:
    """Energy counters of GPUs that draw 500 W, each read in a given time."""

    NVMLError = OSError

    def __init__(self, call_s: float, clock: Any):
        self._call_s, self._clock = call_s, clock

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        end = time.perf_counter() + self._call_s
        while time.perf_counter() < end:
            pass
        return int(self._clock() * 500_000)


def packages(sysfs: Path, count: int) -> None:
    """Write a fake /sys with `count` RAPL packages."""
    for number in range(count):
        folder = sysfs / "class" / "powercap" / f"intel-rapl:{number}"
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"package-{number}\n")
        (folder / "max_energy_range_uj").write_text("262143328850\n")
        (folder / "energy_uj").write_text("1000\n")


def cost(step_s: float, arguments: argparse.Namespace) -> tuple[float, int, float]:
    """Return (seconds of hook and thread over seconds of training, number of readings, seconds of one reading)."""
    now = 0.0
    with tempfile.TemporaryDirectory() as folder:
        sysfs = Path(folder) / "sys"
        packages(sysfs, arguments.packages)
        nvml = load_nvml() if arguments.real else SlowNvml(arguments.nvml_us / 1e6, lambda: now)
        gpus = [arguments.real] if arguments.real else [f"GPU-{one}" for one in range(arguments.gpus)]
        meter = host_meter(gpus, sysfs=Path("/sys") if arguments.real else sysfs, nvml=nvml, clock=lambda: now)
        events = Path(folder) / "events.jsonl"
        num_steps = int(arguments.minutes * 60 / step_s)
        config = RunConfig.model_validate({"train": {"steps": num_steps}})
        spent, thread_at, reading = 0.0, 0.0, list[float]()
        timer = time.perf_counter if arguments.real else time.thread_time
        with EventLog(events) as log:
            hook = EnergyHook(
                meter, EnergyReports(meter, None), config, Path(folder), before_j=0.0, num_hosts=1, write=log.write,
                warn=lambda step, text: print(step, text), clock=lambda: now,
            )  # fmt: skip
            hook.on_start(0)
            for step in range(1, num_steps + 1):
                now += step_s
                record = StepRecord(step=step, loss=1.0, lr=1e-3, grad_norm=1.0, count=4096, count_per_s=1.0)
                begin = timer()
                hook.on_step(record)
                if step % 50 == 0:
                    hook.on_evaluation(step, SimpleNamespace())  # type: ignore[arg-type]
                spent += timer() - begin
                if now - thread_at >= 1:
                    thread_at, begin = now, timer()
                    meter.read()
                    reading.append(timer() - begin)
        found = sum(b'"energy"' in line for line in events.read_bytes().splitlines())
    return (spent + sum(reading)) / now, found, statistics.median(reading)


def main() -> None:
    """Print the cost for several step times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--packages", type=int, default=2)
    parser.add_argument("--nvml-us", type=float, default=30.0, help="time of one NVML call, in microseconds")
    parser.add_argument("--minutes", type=float, default=10.0, help="simulated training time")
    parser.add_argument("--real", metavar="GPU-UUID", help="read this machine's counters and this GPU")
    arguments = parser.parse_args()
    print(f"{'step':>8}{'share of the step':>20}{'readings':>10}{'one reading':>14}")
    for step_s in (0.01, 0.1, 0.3, 1.0):
        share, readings, read_s = cost(step_s, arguments)
        print(f"{1e3 * step_s:>6.0f}ms{share:>19.4%}{readings:>10}{1e6 * read_s:>11.0f} us")


if __name__ == "__main__":
    main()
