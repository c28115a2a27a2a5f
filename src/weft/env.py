"""Environment variables. No other module reads or writes os.environ.

| variable | meaning |
|---|---|
| RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT | set by torchrun for each rank |
| SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID | set by srun for each task |
| TORCHELASTIC_RUN_ID, TORCHELASTIC_ERROR_FILE, TORCHELASTIC_RESTART_COUNT | set by torch's elastic launcher |
| TORCHELASTIC_USE_AGENT_STORE | set by torch's elastic launcher if ranks use its store |
| GLOO_SOCKET_IFNAME | set to the loopback interface if all ranks are on this machine, unless the user sets it |
| PYTORCH_ALLOC_CONF, TORCH_NCCL_HIGH_PRIORITY | set for ranks on GPUs (comm/gpu_settings.py), unless the user does |
| WEFT_HOME | folder of tokenised data and profiles (default: $XDG_CACHE_HOME/weft or ~/.cache/weft) |
| WEFT_LAUNCHED | the launcher's process id, set by `weft train` for the ranks it starts |
| WEFT_PARENT | id of the process that started or forked a rank. The rank exits when it ends |
| WEFT_LINE | address of the launcher's socket, set by `weft train` for the ranks it starts |
| WEFT_HOST | ranks with another value count as ranks of another host: two hosts on one machine, for tests |
| WEFT_DRILL | a fault that `weft drill` injects into one of its ranks, as JSON |
| WEFT_TRACEBACK | 1: scripts print the traceback of Weft's errors on every rank |
| OMP_NUM_THREADS | threads of one CPU rank. If unset, `weft train` divides the cores |
| OPENBLAS_NUM_THREADS | set to 1 by `weft plan`, which multiplies no matrices in numpy, unless the user sets it |
| TPU_SKIP_MDS_QUERY, TPU_WORKER_HOSTNAMES | set by `weft plan --compile`, so that libtpu looks for no TPU here |
| ALLOW_MULTIPLE_LIBTPU_LOAD | set to 1 by `weft plan --compile`, which may run next to a training on the TPU |
| HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE | 1: names on the Hugging Face hub are found in its cache only |
| DISABLE_MULTIPROC | set to 1 by `weft eval`: lm-eval starts no processes, which ranks cannot have |
| HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_TOKEN | read by huggingface_hub for such names: server, cache and login |
| NO_COLOR, CI, COLUMNS | respected by the terminal output |
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.errors import LaunchError

_SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|COOKIE|AUTH|SIGNATURE|(^|_)(API)?KEY(_|$)|_PWD$"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


#: Loopback address, which other machines cannot reach.
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankEnv:
    """Rank, world size and rendezvous address of this process, as its launcher set them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    starter: str  # "weft", "torchrun" or "slurm"


def weft_version() -> str:
    """Return the version of the installed distribution, or "not installed" if Weft runs from a source tree."""
    from importlib.metadata import PackageNotFoundError, version  # a slow import

    try:
        return version("weft-train")
    except PackageNotFoundError:
        return "not installed"


def rank_env() -> RankEnv | None:
    """Return this process's rank environment, or None if it was not started as a rank.

    Raises:
        LaunchError: if the variables are not numbers or contradict each other.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        world_size = _number("WORLD_SIZE", lowest=1)
        rank = _number("RANK")
        return _consistent(
            RankEnv(
                rank=rank,
                world_size=world_size,
                local_rank=_number("LOCAL_RANK", rank),
                local_world_size=_number("LOCAL_WORLD_SIZE", world_size, lowest=1),
                master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
                master_port=_number("MASTER_PORT", 29500, lowest=1, highest=65535),
                starter="weft" if "WEFT_LAUNCHED" in env else "torchrun",
            ),
            "RANK",
            "LOCAL_RANK",
        )
    # A plain `sbatch` or `salloc` shell also has SLURM_NTASKS, but only a task started by srun has a step id.
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and _number("SLURM_NTASKS", 1, lowest=1) > 1:
        return _slurm_rank()
    return None


def _slurm_rank() -> RankEnv:
    env = os.environ
    world_size = _number("SLURM_NTASKS", lowest=1)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    num_nodes = _number("SLURM_STEP_NUM_NODES", _number("SLURM_NNODES", 1, lowest=1), lowest=1)
    # Jobs that share a node must not share a port, so it is derived from the job's number.
    port = 20_000 + _number("SLURM_JOB_ID", 0) % 20_000
    tasks_here = _slurm_local_tasks(world_size, num_nodes)
    # Tasks on one machine rendezvous on its loopback interface, which other machines cannot reach.
    host = "127.0.0.1" if tasks_here == world_size else first_slurm_host(nodes)
    return _consistent(
        RankEnv(
            rank=_number("SLURM_PROCID"),
            world_size=world_size,
            local_rank=_number("SLURM_LOCALID", 0),
            local_world_size=tasks_here,
            master_addr=env.get("MASTER_ADDR", host),
            master_port=_number("MASTER_PORT", port, lowest=1, highest=65535),
            starter="slurm",
        ),
        "SLURM_PROCID",
        "SLURM_LOCALID",
    )


def _slurm_local_tasks(world_size: int, num_nodes: int) -> int:
    """Return the number of tasks on this node.

    SLURM lists them by node, '4(x2),3'. Without the list, an even distribution is assumed.
    """
    listed = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
    node = _number("SLURM_NODEID", 0)
    counts: list[int] = []
    for part in filter(None, listed.split(",")):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part)
        if match is None or int(match[2] or 1) > 1_000_000:
            raise LaunchError(
                f"SLURM_TASKS_PER_NODE={listed}: not a list such as '4(x2),3'. Start the ranks with srun or torchrun."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if sum(counts) == world_size and node < len(counts):
        return counts[node]
    return -(-world_size // num_nodes)


def _number(name: str, default: int | None = None, lowest: int = 0, highest: int = 10**9) -> int:
    """Return a variable as an integer, or `default` if it is not set. Raise LaunchError for other texts."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d{1,10}", text.strip()) or not lowest <= int(text) <= highest:
        raise LaunchError(
            f"{name}={text or ''}: it must be a whole number from {lowest} to {highest}. "
            f"Start the ranks with torchrun or srun, which set it, or unset it."
        )
    return int(text)


def _consistent(place: RankEnv, rank_name: str, local_name: str) -> RankEnv:
    for name, value, size in (
        (rank_name, place.rank, place.world_size),
        (local_name, place.local_rank, place.local_world_size),
    ):
        if value >= size:
            raise LaunchError(
                f"{name}={value}: there are {size} ranks, counted from 0. "
                f"Start the ranks with torchrun or srun, which set it, or unset it."
            )
    return place


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of SLURM's compressed list: 'gpu[003-007,9],login1' -> 'gpu003'.

    Ranges may occur anywhere in a name: 'r[1-2]n[5,7]' -> 'r1n5'.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist.strip())
    if first is None:
        return nodelist
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def export_rank(place: RankEnv) -> None:
    """Set the variables that torch.distributed's env:// rendezvous reads. srun does not set them."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        MASTER_ADDR=place.master_addr,
        MASTER_PORT=str(place.master_port),
    )


def default_for_libraries(**values: str) -> None:
    """Set variables that libraries of this process read, unless the user has set them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def keeps_agent_store() -> bool:
    """Return True if this rank's launcher (torchrun, `weft train`) hosts the process group's store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count() -> str:
    """Return the number of restarts of this rank by torch's elastic launcher, as text."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def wants_traceback() -> bool:
    """Return True if scripts should print the tracebacks of Weft's errors."""
    return os.environ.get("WEFT_TRACEBACK", "") not in ("", "0")


def child_env(**extra: str) -> dict[str, str]:
    """Return a copy of the environment for a child process, updated with `extra`."""
    return {**os.environ, **extra}


def bare_env() -> dict[str, str]:
    """Return a minimal environment without secrets for a child: paths of programs, modules and temporary files."""
    names = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR", "LANG", "LC_ALL")
    return {name: os.environ[name] for name in names if name in os.environ}


#: Variables that make a process a rank of the run that started it.
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID", "WEFT_LAUNCHED")


def alone_env() -> dict[str, str]:
    """Return a copy of the environment of a rank for a child process that is not a rank."""
    return {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}


def take_over(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process by the result of `child_env` in another process."""
    os.environ.clear()
    os.environ.update(environment)


def set_for_children(**extra: str) -> None:
    """Set variables of this process and of children that another library starts."""
    os.environ.update(extra)


@contextmanager
def lent_to_children(**extra: str) -> Generator[None]:
    """Set variables of this process, and of children that a library starts, inside the block. Restore them on exit."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def launcher_pid() -> int | None:
    """Return the process id of the `weft train` that started this rank, or None."""
    return _number("WEFT_LAUNCHED", lowest=1) if "WEFT_LAUNCHED" in os.environ else None


def parent_pid() -> int | None:
    """Return the process id of the launcher, or of the server that forked this rank, or None."""
    return _number("WEFT_PARENT", lowest=1) if "WEFT_PARENT" in os.environ else None


def own_rank(rank: int, num_ranks: int, port: int, parent: int) -> dict[str, str]:
    """Return the variables of a rank that `weft train` starts on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # With this variable of torch, the first rank connects to the store like all others and does not host it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WEFT_PARENT": str(parent),
    }


def pretended_host() -> str:
    """Return the host that WEFT_HOST simulates for this rank, or ""."""
    return os.environ.get("WEFT_HOST", "")


def sysfs() -> Path:
    """Return the folder of the kernel's devices: /sys, or another one in tests (WEFT_SYSFS)."""
    return Path(os.environ.get("WEFT_SYSFS", "/sys"))


def cache_dir() -> Path:
    """Return the folder of tokenised data and machine profiles, which is kept between runs."""
    if os.environ.get("WEFT_HOME"):
        return Path(os.environ["WEFT_HOME"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "weft"


def hub_is_offline() -> bool:
    """Return True if huggingface_hub may not use the network."""
    text = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return text.upper() in ("1", "ON", "YES", "TRUE")


def is_ci() -> bool:
    """Return True in a CI system, in which progress bars are not shown."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false", "no")


def get(name: str, default: str = "") -> str:
    """Return one variable by name, for reports such as `weft doctor`."""
    return os.environ.get(name, default)


def report(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables whose name starts with one of `prefixes`, sorted and redacted.

    The value of a secret name (TOKEN, KEY, PASSWORD, ...) is replaced, and so is a login inside a URL.
    """
    shown: dict[str, str] = {}
    for name in sorted(os.environ):
        if name.startswith(prefixes):
            shown[name] = "[redacted]" if is_secret(name) else _URL_LOGIN.sub("[redacted]", os.environ[name])
    return shown


def is_secret(name: str) -> bool:
    """Return True if a variable's name indicates a secret value."""
    return _SECRET.search(name.upper()) is not None
