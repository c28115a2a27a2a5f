"""Processor, memory, disks and limits."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from weft import env
from weft.cli.doctor.line import CheckLine, Status
from weft.cli.launcher import usable_cores
from weft.units import format_bytes

#: CPU features that decide how fast matrices are multiplied.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "bf16", "sve")
_WRITE_BYTES = 32 * 2**20
_GIB = 2**30


def system() -> Iterator[CheckLine]:
    """Operating system, and whether this is a container."""
    libc = " ".join(platform.libc_ver()).strip()
    container = ", in a container" if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() else ""
    yield CheckLine(
        "machine", "system", f"{platform.system()} {platform.release()} {platform.machine()} {libc}{container}"
    )


def processor() -> Iterator[CheckLine]:
    """Model, cores and the features that matter."""
    model, flags = _cpu()
    physical = psutil.cpu_count(logical=False)
    cores = f"{usable_cores()} usable of {psutil.cpu_count()} logical, {physical or '?'} physical"
    yield CheckLine("machine", "cpu", f"{model or platform.processor() or 'unknown'}; {cores}")
    yield CheckLine(
        "machine", "cpu flags", " ".join(flag for flag in _FLAGS if flag in flags) or "none of the relevant ones"
    )


def memory() -> Iterator[CheckLine]:
    """RAM, the container's limit, and shared memory."""
    ram = psutil.virtual_memory()
    limit = _cgroup_limit()
    text = f"{format_bytes(ram.available)} free of {format_bytes(ram.total)}"
    if limit is not None and limit < ram.total:
        text += f"; the container may use {format_bytes(limit)}"
    low = ram.available < 2 * _GIB
    remedy = "Close other programs, or train a smaller model." if low else ""
    yield CheckLine("machine", "memory", text, "warn" if low else "ok", remedy)
    if Path("/dev/shm").is_dir():
        shm = psutil.disk_usage("/dev/shm")
        small = shm.free < 256 * 2**20
        remedy = "Start the container with --shm-size=8g (or --ipc=host)." if small else ""
        text = f"{format_bytes(shm.free)} free of {format_bytes(shm.total)}"
        yield CheckLine("machine", "/dev/shm", text, "warn" if small else "ok", remedy)


def disks() -> Iterator[CheckLine]:
    """Free space and write speed where runs and tokenised data go."""
    for name, folder in (("disk for runs", Path.cwd()), ("disk for data", env.cache_dir())):
        yield _disk(name, folder)


def limits() -> Iterator[CheckLine]:
    """Limits of this process that training runs into."""
    if sys.platform == "win32":
        return
    import resource

    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    low = 0 <= open_files < 1024
    remedy = "Run: ulimit -n 65536" if low else ""
    parts = [f"open files {_limit(open_files)}"]
    for name, label in (("RLIMIT_MEMLOCK", "locked memory"), ("RLIMIT_NPROC", "processes"), ("RLIMIT_CORE", "core")):
        if hasattr(resource, name):
            parts.append(f"{label} {_limit(resource.getrlimit(getattr(resource, name))[0])}")
    yield CheckLine("machine", "limits", ", ".join(parts), "warn" if low else "ok", remedy)


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


def _cpu() -> tuple[str, set[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return "", set()
    facts = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    return facts.get("model name", ""), set((facts.get("flags") or facts.get("Features", "")).split())


def _cgroup_limit() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(file).read_text())
        except (OSError, ValueError):
            continue
    return None


def _disk(name: str, folder: Path) -> CheckLine:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        speed = _write_speed(existing)
    except OSError as error:
        remedy = "Set run.dir (runs) or WEFT_HOME (data) to a folder that you can write to."
        return CheckLine("machine", name, f"{shown(folder)} cannot be written to ({error.strerror})", "fail", remedy)
    free = psutil.disk_usage(str(existing)).free
    status: Status = "warn" if free < 5 * _GIB else "ok"
    remedy = "Free some space, or set run.dir or WEFT_HOME to another disk." if status == "warn" else ""
    text = f"{format_bytes(free)} free, writes {format_bytes(speed)}/s ({shown(folder)})"
    return CheckLine("machine", name, text, status, remedy)


def _write_speed(folder: Path) -> float:
    """Bytes per second to the disk itself, measured with one file that is removed again."""
    block = os.urandom(2**20)
    path = folder / f".weft-doctor-{os.getpid()}"
    begin = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(_WRITE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return _WRITE_BYTES / (time.perf_counter() - begin)
    finally:
        path.unlink(missing_ok=True)


def shown(path: Path) -> str:
    """A path fit to be shown to others: the home folder's name, which is often a person's, as ~."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if home != Path("/") and path.is_relative_to(home) else str(path)
