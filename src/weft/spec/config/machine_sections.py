"""What a run uses of its machine: ranks and devices, pinned memory, kernels of the GPU."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.spec.config.section import Section
from weft.spec.config.setting_types import Count, Duration, HostPort, SecretRef, ShareOrSize, Width


class LaunchSection(Section):
    ranks: Literal["all"] | Width = "all"
    """Number of ranks to start on this machine; a '*' in the plan is set to fit it. all: one per GPU, or up to two on a
    CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPUs if there are any, else the CPU."""
    numa: bool = True
    """On GPUs: keep each rank on its share of the cores of the NUMA node that its GPU hangs on, with its threads and
    the processes it starts. Cores that taskset, SLURM or others have chosen for it stay. `weft doctor` tells."""
    timeout: Duration = "30m"
    """How long a rank waits for another before the run ends with an error, such as 90s, 30m or 2h."""
    warn_after: Literal["auto"] | Duration = "auto"
    """Report a wait that has lasted this long: which rank is missing, in which collective, since when. auto: 20 steps
    as they usually take or were planned, at least 10 s; 1 minute before that is known, and for saves and other long
    work. `timeout` or more: no reports."""
    route: Literal["auto", "flat", "two_level"] = "auto"
    """How bytes go between hosts of CPU ranks. auto: first within each host, then between them, where hosts hold equal
    blocks of 2, 4, 8 ... neighbouring ranks of an axis, else flat; flat: each rank to all others; two_level: as auto,
    with an error where that is not possible. No result depends on it. GPUs use what NCCL chooses."""
    links: str | None = Field(default=None, examples=["links.json"])
    """Profile of the links between ranks, from `weft calibrate --hosts`: with it, route=auto sends each call of CPU
    ranks the way that was measured to be faster, by operation and size. Absent: links.json in the cache folder
    (WEFT_HOME), where there is one. The first rank of each axis reads it and tells the others."""
    restarts: Count = 0
    """How many times in a row `weft train` restarts the ranks after a rank died, hung or failed: from the newest good
    checkpoint, or from the newest copy in memory (checkpoint.peer_every) where that is later. A newer one than at the
    restart before resets the count. Not for ranks that torchrun or srun started."""
    restart_pause: Duration = "5s"
    """Pause before the first restart in a row; each further pause is twice as long, up to 5 minutes."""
    min_ranks: Width | None = None
    """When the same rank fails twice in a row, go on without it, with at least this many ranks: the planner makes a
    plan for them, and the global batch stays. Absent: always all ranks."""
    on_failure: Literal["stop", "hold"] = "stop"
    """After the last restart: stop, or wait with the folder held and the devices free until `weft resume RUN`."""
    replicas_apart: bool = False
    """Under sync=diloco:H or average:H: start each replica as a world of its own, with its own processes, restarts and
    checkpoints. One that is late or lost does not stop the others, and joins again at a meeting."""
    meeting_timeout: Duration = "1m"
    """How long replicas that are worlds of their own wait at a meeting for one that is late, and for a word or bytes of
    another one."""
    replica: Count | None = Field(default=None, examples=[1])
    """Start only this replica here, counted from 0, with the others on other machines. Absent: all of them here."""
    meet_at: HostPort | None = Field(default=None, examples=["10.0.0.1:29600"])
    """HOST:PORT where replicas on several machines leave word: on the machine of replica 0, which listens there."""
    meeting_key: SecretRef | None = Field(default=None, examples=["env:WEFT_MEETING_KEY"])
    """Where the secret is that replicas on several machines prove to each other, of 16 characters or more, the same for
    all: env:NAME or file:PATH. Needed where meet_at is not an address of this machine alone (127.0.0.1)."""


class MemorySection(Section):
    pinned_limit: ShareOrSize = "60%"
    """Maximum host memory that the ranks of one machine pin in total for offload: a size, or a share of the machine's
    or container's memory."""


class KernelSection(Section):
    """On GPUs: which kernels torch takes where it knows several. Results differ by rounding."""

    attention: Literal["auto", "flash", "efficient", "cudnn", "fa3", "fa4"] = "auto"
    """What computes attention in bf16 and fp16 where it can; calls that it cannot take (masks, wide heads) go to the
    others. auto: torch's own order; flash, efficient, cudnn: these first; fa3, fa4: FlashAttention 3 (Hopper, package
    flash_attn_interface) or 4 (Hopper, Blackwell, package flash_attn.cute) in place of flash."""
    convolutions: Literal["auto", "measured", "guessed"] = "auto"
    """How cuDNN chooses among its algorithms for convolutions. measured: it tries them for each of the first 8 shapes
    of batches and keeps the fastest: faster steps for a slower first one, and another choice in another run; guessed:
    it knows at once. auto: measured where the model has convolutions, tp is 1 and torch was not told to be
    deterministic; what torch was told to measure before stays."""
