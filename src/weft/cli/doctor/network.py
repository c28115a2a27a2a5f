"""What ranks need to find each other. No addresses are shown beyond the loopback's, and no host name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from weft import env
from weft.cli.doctor.line import CheckLine

#: Prefixes of the variables that change how training runs.
_PREFIXES = ("WEFT_", "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "GOMP_", "SLURM_",
             "NVIDIA_", "HF_", "TOKENIZERS_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "UCX_", "FI_", "LD_PRELOAD",
             "PYTHON", "XDG_CACHE_HOME", "TRITON_", "CI")  # fmt: skip
#: Of these only the presence is shown: their values name users, hosts and folders.
_PRESENCE = ("SLURM_", "MASTER_ADDR", "PYTHON", "XDG_CACHE_HOME", "LD_PRELOAD", "WEFT_HOME", "HF_HOME")


def loopback() -> Iterator[CheckLine]:
    """Whether a port can be opened on this machine, and torch's usual one is free."""
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
    text = f"ports can be opened on 127.0.0.1; {_port_range()}"
    if taken:
        remedy = "Give torchrun another --master-port; `weft train` finds a free one itself."
        yield CheckLine("network", "loopback", f"{text}; 29500, torchrun's usual port, is in use", "warn", remedy)
    else:
        yield CheckLine("network", "loopback", f"{text}; 29500, torchrun's usual port, is free")


def interfaces() -> Iterator[CheckLine]:
    """Names of the interfaces, their speed, and InfiniBand devices."""
    parts = []
    for name, state in sorted(psutil.net_if_stats().items()):
        speed = f" {state.speed} Mb/s" if state.speed else ""
        parts.append(f"{name} ({'up' if state.isup else 'down'}{speed})")
    yield CheckLine("network", "interfaces", ", ".join(parts) or "none")
    infiniband = Path("/sys/class/infiniband")
    if infiniband.is_dir():
        yield CheckLine(
            "network", "infiniband", ", ".join(sorted(device.name for device in infiniband.iterdir())) or "none"
        )


def hostname() -> Iterator[CheckLine]:
    """Whether the machine knows itself by name: gloo asks for that address."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
        yield CheckLine("network", "hostname", "resolves (name not shown)")
    except OSError:
        remedy = "Add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo for one machine."
        yield CheckLine("network", "hostname", "does not resolve (name not shown)", "warn", remedy)


def variables() -> Iterator[CheckLine]:
    """Environment variables that change how training runs; secrets are not shown."""
    shown = []
    for name, value in env.report(_PREFIXES).items():
        shown.append(f"{name} is set" if name.startswith(_PRESENCE) else f"{name}={value}")
    yield CheckLine("environment", "variables", "; ".join(shown) or "no relevant variables")


def _port_range() -> str:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return f"the system assigns ports {low} to {high}"
    except (OSError, ValueError):
        return "the system's port range is unknown"
