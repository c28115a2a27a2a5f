"""`weft doctor`: checks of GPUs (from NVIDIA's management library), system, network and versions."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import typer

import weft
from weft import env
from weft.cli.console import paint
from weft.cli.launch.launch import usable_cores
from weft.errors import install_extra
from weft.monitor.terminal import print_wrapped
from weft.units import format_bytes

#: fail: training cannot work on this machine. warn: training works, maybe in part, but a change is recommended.
Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class CheckLine:
    """A line of the report: a fact about the machine. `remedy` is the recommended action if the status is not ok."""

    section: str
    name: str
    text: str
    status: Status = "ok"
    remedy: str = ""


#: A check: a function that returns lines of the report.
Check = Callable[[], Iterable[CheckLine]]


def examine(section: str, check: Check) -> list[CheckLine]:
    """Run a check and return its lines, or one line with the error if it fails."""
    try:
        return list(check())
    # The report must be complete on any machine, so an error of a check becomes a line.
    except Exception as error:
        text = f"could not be read ({type(error).__name__}: {error})"
        return [CheckLine(section, check.__name__, text, "warn", "Please report this line.")]


def gpus() -> Iterator[CheckLine]:
    """Yield lines for the driver, each GPU (name, memory, power limit, PCIe link, active NVLinks), cores and settings.

    Without a driver, yields only one line, which reports that.
    """
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if torch.version.cuda:
            remedy = "Install the NVIDIA driver, or give the container its GPUs (docker run --gpus all)."
            yield CheckLine("gpus", "driver", f"none found, though torch is built for CUDA ({error})", "warn", remedy)
        else:
            yield CheckLine("gpus", "driver", "no NVIDIA driver here; training will use the CPU")
        return
    try:
        count = pynvml.nvmlDeviceGetCount()
        driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
        yield CheckLine("gpus", "driver", f"{driver}, up to CUDA {cuda // 1000}.{cuda % 1000 // 10}; {count} GPUs")
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        for index, handle in enumerate(handles):
            yield CheckLine("gpus", f"gpu {index}", _describe(pynvml, handle))
        try:
            pci_ids = [_pci_id(pynvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
        except pynvml.NVMLError as error:
            yield CheckLine("gpus", "cores", f"the driver does not report the NUMA nodes of the GPUs ({error})")
        else:
            yield from cores(pci_ids)
    finally:
        pynvml.nvmlShutdown()
    if count:
        from weft.comm.gpu_settings import library_settings

        yield CheckLine("gpus", "settings", "; ".join(library_settings()))
    if count and not torch.cuda.is_available():
        cause = "CUDA_VISIBLE_DEVICES hides them" if torch.version.cuda else "this torch is built for the CPU"
        remedy = "Unset CUDA_VISIBLE_DEVICES." if torch.version.cuda else "Install a CUDA build: https://pytorch.org"
        yield CheckLine("gpus", "torch", f"sees no GPU: {cause}, or the driver is too old", "fail", remedy)


def cores(pci_ids: list[str]) -> Iterator[CheckLine]:
    """Yield the CPU cores on which `weft train` would run the ranks of these GPUs, a line for each distinct choice.

    Yields nothing on systems without CPU affinity.
    """
    from weft.comm.gpu_settings import Topology, choose_cores

    if not hasattr(os, "sched_getaffinity"):
        return
    allowed = frozenset(os.sched_getaffinity(0))
    chosen = [choose_cores(Topology(), allowed, pci_ids, rank) for rank in range(len(pci_ids))]
    for rank, choice in enumerate(chosen):
        if choice.text not in [other.text for other in chosen[:rank]]:
            name = f"cores of gpu {rank}" if len({other.text for other in chosen}) > 1 else "cores"
            yield CheckLine("gpus", name, f"a rank is {choice.text}")


def _pci_id(bus_id: str | bytes) -> str:
    """Return a PCI bus id in the format of /sys, with a domain of four digits if possible."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _describe(nvml: Any, gpu: Any) -> str:
    def read(call: str, *args: Any) -> Any:
        try:
            return getattr(nvml, call)(gpu, *args)
        except nvml.NVMLError:
            return None  # some GPUs, drivers and virtual machines do not support every query

    parts = [str(read("nvmlDeviceGetName") or "unnamed")]
    memory = read("nvmlDeviceGetMemoryInfo")
    if memory is not None:
        parts.append(f"{format_bytes(memory.free)} free of {format_bytes(memory.total)}")
    power = read("nvmlDeviceGetPowerManagementLimit")
    if power is not None:
        parts.append(f"power limit {power // 1000} W")
    width, most = read("nvmlDeviceGetCurrPcieLinkWidth"), read("nvmlDeviceGetMaxPcieLinkWidth")
    if width is not None:
        parts.append(f"PCIe {read('nvmlDeviceGetCurrPcieLinkGeneration')}.0 x{width} of x{most}")
    links = [read("nvmlDeviceGetNvLinkState", link) for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))]
    parts.append(f"NVLink {sum(1 for link in links if link)} up")
    if read("nvmlDeviceGetMigMode") not in (None, [0, 0], (0, 0)):
        parts.append("MIG on")
    return ", ".join(parts)


# Processor, memory, disks and limits.

#: CPU features that determine the speed of matmuls.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "bf16", "sve")
_WRITE_BYTES = 32 * 2**20
_GIB = 2**30


def system() -> Iterator[CheckLine]:
    """Yield the operating system, and whether this is a container."""
    libc = " ".join(platform.libc_ver()).strip()
    container = ", in a container" if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() else ""
    text = f"{platform.system()} {platform.release()} {platform.machine()} {libc}{container}"
    yield CheckLine("machine", "system", text)


def processor() -> Iterator[CheckLine]:
    """Yield the processor's model, its cores, and the features that affect matmuls."""
    model, flags = _cpu()
    physical = psutil.cpu_count(logical=False)
    cores = f"{usable_cores()} usable of {psutil.cpu_count()} logical, {physical or '?'} physical"
    yield CheckLine("machine", "cpu", f"{model or platform.processor() or 'unknown'}; {cores}")
    found = " ".join(flag for flag in _FLAGS if flag in flags)
    yield CheckLine("machine", "cpu flags", found or "none of the relevant ones")


def memory() -> Iterator[CheckLine]:
    """Yield check lines for RAM, with the container's limit, and for /dev/shm."""
    ram = psutil.virtual_memory()
    limit = None
    for file in ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(file).read_text())
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
    """Yield free space of the disks for runs and tokenised data, and the speed of writing a temporary file there."""
    for name, folder in (("disk for runs", Path.cwd()), ("disk for data", env.cache_dir())):
        yield _disk(name, folder)


def limits() -> Iterator[CheckLine]:
    """Yield a line with the process limits that training can exceed; nothing on Windows."""
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
    """Return a path with the home folder, which may contain the user's name, replaced by ~."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if home != Path("/") and path.is_relative_to(home) else str(path)


# Network requirements of ranks. Only the loopback address is shown, and no host name.

#: Prefixes of variables that affect training.
_PREFIXES = ("WEFT_", "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "GOMP_", "SLURM_",
             "NVIDIA_", "HF_", "TOKENIZERS_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "UCX_", "FI_", "LD_PRELOAD",
             "PYTHON", "XDG_CACHE_HOME", "TRITON_", "CI")  # fmt: skip
#: Prefixes of variables whose values are hidden, because they may name users, hosts and folders.
_PRESENCE = ("SLURM_", "MASTER_ADDR", "PYTHON", "XDG_CACHE_HOME", "LD_PRELOAD", "WEFT_HOME", "HF_HOME")


def loopback() -> Iterator[CheckLine]:
    """Check that a port can be opened on this machine, and that torch's default port is free."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=2):
                pass
    except OSError as error:
        remedy = "Allow programs to listen on 127.0.0.1 (firewall, sandbox)."
        yield CheckLine("network", "loopback", f"no port can be opened on 127.0.0.1 ({error})", "fail", remedy)
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken = probe.connect_ex(("127.0.0.1", 29500)) == 0
    ports = "the system's port range is unknown"
    with contextlib.suppress(OSError, ValueError):
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        ports = f"the system assigns ports {low} to {high}"
    text = (
        f"ports can be opened on 127.0.0.1; {ports}; 29500, torchrun's usual port, is {'in use' if taken else 'free'}"
    )
    remedy = "Give torchrun another --master-port; `weft train` finds a free one itself." if taken else ""
    yield CheckLine("network", "loopback", text, "warn" if taken else "ok", remedy)


def interfaces() -> Iterator[CheckLine]:
    """Yield the names of the network interfaces, their speed, and InfiniBand devices."""
    parts = []
    for name, state in sorted(psutil.net_if_stats().items()):
        speed = f" {state.speed} Mb/s" if state.speed else ""
        parts.append(f"{name} ({'up' if state.isup else 'down'}{speed})")
    yield CheckLine("network", "interfaces", ", ".join(parts) or "none")
    infiniband = Path("/sys/class/infiniband")
    if infiniband.is_dir():
        devices = ", ".join(sorted(device.name for device in infiniband.iterdir()))
        yield CheckLine("network", "infiniband", devices or "none")


def hostname() -> Iterator[CheckLine]:
    """Check that the machine can resolve its host name, because gloo uses that address."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
        yield CheckLine("network", "hostname", "resolves (name not shown)")
    except OSError:
        remedy = "Add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo for one machine."
        yield CheckLine("network", "hostname", "does not resolve (name not shown)", "warn", remedy)


def variables() -> Iterator[CheckLine]:
    """Yield the environment variables that affect training, without secrets."""
    shown = []
    for name, value in env.report(_PREFIXES).items():
        shown.append(f"{name} is set" if name.startswith(_PRESENCE) else f"{name}={value}")
    yield CheckLine("environment", "variables", "; ".join(shown) or "no relevant variables")


# Versions, and torch's build options.

_NEEDED = ("numpy", "fsspec", "pydantic", "typer", "rich", "safetensors", "tokenizers", "pyarrow", "psutil",
           "matplotlib", "tomli-w", "nvidia-ml-py", "starlette", "uvicorn")  # fmt: skip
_OPTIONAL = ("transformers",)


#: Name of Weft's distribution, and the unrelated distribution that is called `weft`.
_DISTRIBUTION, _STRANGER = "weft-train", "weft"


def namesake() -> Iterator[CheckLine]:
    """Yield a warning if the distribution `weft` is installed, which has the same import and command as Weft."""
    try:
        found = metadata.metadata(_STRANGER)
    except metadata.PackageNotFoundError:
        return
    ours = (found["Summary"] or "").startswith("One plan for training")
    whose = f"an old install of this project, now {_DISTRIBUTION}" if ours else "another project"
    text = f"{_STRANGER} {found['Version']} is installed too: {whose}, with the same import and command"
    remedy = f"Run: pip uninstall {_STRANGER}, then install Weft again: pip install -e . in its checkout"
    yield CheckLine("software", "name clash", text, "warn", remedy)


def versions() -> Iterable[CheckLine]:
    """Yield the versions of Weft, Python and the packages that Weft depends on."""
    yield CheckLine("software", "weft", weft.__version__)
    home = "virtual environment" if sys.prefix != sys.base_prefix else "system"
    yield CheckLine("software", "python", f"{platform.python_version()} ({platform.python_implementation()}, {home})")
    found, missing = [], []
    for package in (*_NEEDED, *_OPTIONAL):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    yield CheckLine("software", "packages", ", ".join(found))
    needed = [package for package in missing if package in _NEEDED]
    if needed:
        remedy = f"Run: pip install {' '.join(needed)}"
        yield CheckLine("software", "missing", ", ".join(needed), "fail", remedy)
    optional = [package for package in missing if package in _OPTIONAL]
    if optional:
        yield CheckLine("software", "not installed", f"{', '.join(optional)} (optional). {install_extra('hf')}.")


def torch_build() -> Iterator[CheckLine]:
    """Yield the version of torch, its CUDA version, its devices, and its communication backends."""
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    cuda = torch.version.cuda or "none (CPU build)"
    cudnn = torch.backends.cudnn.version() or "none"
    yield CheckLine("software", "torch", f"{torch.__version__}, CUDA {cuda}, cuDNN {cudnn}")
    if not dist.is_available():
        remedy = "Install a build of torch with distributed support."
        yield CheckLine("software", "distributed", "torch was built without it", "fail", remedy)
        return
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
    release = f"; NCCL {'.'.join(map(str, nccl.version()))}" if "nccl" in backends else ""
    status, remedy = ("ok", "") if "gloo" in backends else ("fail", "Install a build of torch with gloo.")
    yield CheckLine("software", "backends", f"{', '.join(backends)}{release}", status, remedy)
    device = torch.accelerator.current_accelerator(check_available=True)
    devices = "cpu only" if device is None else f"{torch.accelerator.device_count()} x {device.type}"
    yield CheckLine("software", "torch devices", f"{devices}; {torch.get_num_threads()} threads in one process")


def device_operators() -> Iterator[CheckLine]:
    """Yield kind, backend and precisions of torch's accelerator, or of the CPU, and a line for each operator class."""
    import torch

    from weft.comm.connect import try_backend
    from weft.devices import access
    from weft.devices.checks import operator_checks, working_precisions

    found = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if found is None else torch.device(found.type, 0)
    kind = access.kind_of(device)
    backend = f"{kind.backend} through host memory" if kind.through_host else kind.backend
    yield CheckLine("device", "kind", f"{kind.name}: {access.device_name(device)}, collectives by {backend}")
    yield CheckLine("device", "precisions", ", ".join(working_precisions(device)))
    remedy = "Use launch.device=cpu, or update the package of this device: " + kind.package
    for name, why in operator_checks(device):
        yield CheckLine("device", name, why or "runs, as on the CPU", "fail" if why else "ok", remedy if why else "")
    try:
        try_backend(device)
        yield CheckLine("device", "collective", f"{kind.backend} sums on one rank")
    except (RuntimeError, ValueError) as error:
        yield CheckLine("device", "collective", str(error).splitlines()[0], "fail", remedy)


# Two ranks on this machine that connect and run an all-reduce, as a minimal test of training on several ranks.

_LIMIT_S = 20.0
_REMEDY = "See the lines about network and limits; GLOO_SOCKET_IFNAME=lo keeps gloo on this machine."


class TwoRanks:
    """Two gloo ranks, started before the other checks to run at the same time."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self._ranks = [self._start(rank, port) for rank in (0, 1)]

    def _start(self, rank: int, port: str) -> subprocess.Popen[str]:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        variables = env.child_env(**place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
        command, pipe = [sys.executable, "-m", "weft.cli.machines.doctor"], subprocess.PIPE
        return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)

    def two_ranks(self) -> Iterator[CheckLine]:
        """Wait for the ranks, and yield a line with the result."""
        try:
            ends = [
                rank.communicate(timeout=max(0.1, self._begin + _LIMIT_S - time.monotonic())) for rank in self._ranks
            ]
        except subprocess.TimeoutExpired:
            yield CheckLine("network", "two ranks", f"did not connect within {_LIMIT_S:.0f} s", "fail", _REMEDY)
            return
        finally:
            self.close()
        for rank, (process, (out, err)) in enumerate(zip(self._ranks, ends, strict=True)):
            if process.returncode or "sum 3.0" not in out:
                last = (err.strip().splitlines() or ["no output"])[-1]
                text = f"gloo all_reduce failed on rank {rank}: {last}"
                yield CheckLine("network", "two ranks", text, "fail", _REMEDY)
                return
        connect_s, sum_s = (float(ends[0][0].split()[index]) for index in (3, 5))
        text = f"gloo: connected in {1e3 * connect_s:.0f} ms, all_reduce in {1e3 * sum_s:.1f} ms"
        yield CheckLine("network", "two ranks", text)

    def close(self) -> None:
        """Kill the processes that are still running, and close all pipes."""
        for process in self._ranks:
            if process.poll() is None:
                process.kill()
                process.wait(5)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def main() -> None:
    """Run one of the two ranks. Prints 'sum 3.0 met SECONDS reduced SECONDS' (connecting, all-reduce)."""
    import torch

    from weft.comm.collectives import all_reduce
    from weft.comm.mesh import build_mesh, join_ranks, leave_ranks
    from weft.config.plan import Plan

    place = env.rank_env()
    if place is None:
        sys.exit("error: this is a part of `weft doctor`. Run: weft doctor.")
    begin = time.perf_counter()
    join_ranks(place, torch.device("cpu"), timeout_s=_LIMIT_S)
    mesh = build_mesh(Plan(dp_replicate=2))
    met = time.perf_counter()
    total = all_reduce(torch.tensor([1.0 + place.rank]), mesh["dp_replicate"])
    print(f"sum {total.item()} met {met - begin:.6f} reduced {time.perf_counter() - met:.6f}", flush=True)
    leave_ranks()


# Running the checks and printing them.

#: Width of the columns before a line's text.
_TEXT_COLUMN = 23
_CHECKS = (
    ("software", versions),
    ("software", namesake),
    ("software", torch_build),
    ("machine", system),
    ("machine", processor),
    ("machine", memory),
    ("machine", disks),
    ("machine", limits),
    ("gpus", gpus),
    ("device", device_operators),
    ("network", loopback),
    ("network", interfaces),
    ("network", hostname),
)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Format the report as Markdown, for a bug report.")
    ] = False,
) -> None:
    """Check this machine. Exit code 0, or 1 if something must be changed before training works.

    The output contains no host, user, network address or secret, so that it can be pasted into a bug report.
    """
    lines = report()
    is_healthy = all(line.status != "fail" for line in lines)
    if as_json:
        print(json.dumps({"healthy": is_healthy, "lines": [asdict(line) for line in lines]}, indent=1))
    elif markdown:
        print(f"```\n{text(lines, plain=True)}\n```")
    else:
        print_wrapped(sys.stdout, [text(lines)], indent=_TEXT_COLUMN)
    if not is_healthy:
        raise typer.Exit(1)


def report() -> list[CheckLine]:
    """Return the lines of all checks, in the order of the report."""
    two_ranks = TwoRanks()
    try:
        lines = [line for section, check in _CHECKS for line in examine(section, check)]
        lines += examine("network", two_ranks.two_ranks)
        lines += examine("environment", variables)
    finally:
        two_ranks.close()
    return lines


def text(lines: Iterable[CheckLine], plain: bool = False) -> str:
    """Return the report for users, grouped by section. plain: without colours."""
    rows: list[str] = []
    section = ""
    for line in lines:
        if line.section != section:
            section = line.section
            rows.append(section)
        mark = line.status if plain or line.status == "ok" else paint(line.status, line.status, sys.stdout)
        pad = " " * (4 - len(line.status))
        rows.append(f"  {mark}{pad}  {line.name:<14} {line.text}")
        if line.remedy:
            rows.append(f"{'':<{_TEXT_COLUMN}}-> {line.remedy}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
