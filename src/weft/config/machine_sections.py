"""The sections [launch] and [energy] of a run's config: its ranks, and the energy of their machines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from weft.config.sections import Count, DeviceName, Duration, HostPort, PositiveFloat, SecretRef, Section, Width

_GRID = r"^([A-Za-z]{2,30}|([0-9]{1,5}(\.[0-9]{1,6})?|\.[0-9]{1,6})g?)$"
Grid = Annotated[
    str,
    BeforeValidator(lambda value: f"{value:g}" if type(value) in (int, float) else value),
    Field(pattern=_GRID, json_schema_extra={"x-rule": "grams of CO2 per kWh, or a region such as france"}),
]
Price = Annotated[str, Field(max_length=30, json_schema_extra={"x-rule": "a price of one kWh such as 0.25eur"})]


class LaunchSection(Section):
    engine: Literal["torch", "jax"] = "torch"
    """What computes the steps. torch: PyTorch, with one process for each rank. jax: one process compiles the step for
    all devices with JAX; it needs the extra `jax`, and trains the default task. A run may change engines when it
    resumes."""
    ranks: Literal["all"] | Width = "all"
    """Number of ranks to start on this machine; a '*' in the plan is set to fit it. all: one per GPU, or up to two on a
    CPU."""
    device: DeviceName = "auto"
    """A kind of the table of devices, or the name of a device that a package registers with torch. auto: the GPUs, or
    accelerators with collectives of their own, if there are any, else the CPU."""
    numa: bool = True
    """On GPUs: bind each rank, its threads and its child processes to its share of the cores of its GPU's NUMA node.
    Cores chosen by taskset, SLURM or others stay. `weft doctor` shows the binding."""
    evaluate_on: Literal["ranks", "cpu"] = "ranks"
    """Device of evaluations. ranks: the run's ranks evaluate between steps. cpu: a separate process on the first host
    evaluates checkpoints in float32 (float64 under precision=fp64) while training continues. Each result has the step
    of its checkpoint. If evaluation is slower than training, only the newest waiting checkpoint is evaluated, with a
    warning for each skipped one."""
    timeout: Duration = "30m"
    """How long a rank waits for another before the run ends with an error, such as 90s, 30m or 2h."""
    warn_after: Literal["auto"] | Duration = "auto"
    """Report a rank that has waited this long: which rank is missing, in which collective, and since when. auto: 20
    usual or planned steps, at least 10 s; 1 minute before the step time is known, and for saves and other long work.
    `timeout` or more: no reports."""
    route: Literal["auto", "flat", "two_level"] = "auto"
    """Route of bytes between hosts of CPU ranks. auto: first within each host, then between hosts, if hosts have equal
    blocks of 2, 4, 8 ... adjacent ranks of an axis, else flat; flat: each rank to all others; two_level: as auto, but
    an error if that is impossible. Results do not depend on it. GPUs use NCCL's choice."""
    links: str | None = Field(default=None, examples=["links.json"])
    """Profile of the links between ranks, from `weft calibrate --hosts`: route=auto then uses the faster measured route
    for each collective of CPU ranks, by operation and size. Default: links.json in the cache folder (WEFT_HOME), if it
    exists. The first rank of each axis reads it and sends it to the others."""
    restarts: Count = 0
    """Consecutive restarts of the ranks by `weft train` after a rank died, hung or failed: from the newest good
    checkpoint, or from the newest copy in memory (checkpoint.peer_every) if that is later. Progress since the restart
    before resets the count. Not for ranks that torchrun or srun started."""
    restart_pause: Duration = "5s"
    """Pause before the first restart in a row; each further pause is twice as long, up to 5 minutes."""
    min_ranks: Width | None = None
    """If the same rank fails twice in a row, continue without it, with at least this many ranks: the planner makes a
    plan for them, and the global batch stays. Default: always all ranks."""
    on_failure: Literal["stop", "hold"] = "stop"
    """After the last restart: stop, or pause with the devices free until `weft runs resume RUN`."""
    replicas_apart: bool = False
    """Under sync=diloco:H or average:H: start each replica as a separate world with its own processes, restarts and
    checkpoints. A late or lost replica does not stop the others, and rejoins at a synchronization."""
    meeting_timeout: Duration = "1m"
    """How long separate replicas wait at a synchronization for a late one, and for a message or data of another one."""
    replica: Count | None = Field(default=None, examples=[1])
    """Start only this replica here, counted from 0, with the others on other machines. Absent: all of them here."""
    meet_at: HostPort | None = Field(default=None, examples=["10.0.0.1:29600"])
    """HOST:PORT of the rendezvous of replicas on several machines. The machine of replica 0 listens there."""
    meeting_key: SecretRef | None = Field(default=None, examples=["env:WEFT_MEETING_KEY"])
    """Shared secret of replicas on several machines, of 16 characters or more: env:NAME or file:PATH. Required unless
    meet_at is an address of this machine (127.0.0.1)."""


class EnergySection(Section):
    """Energy of the run: its meters, and their price, CO2 and limit."""

    meter: bool = True
    """Measure the energy of GPUs and CPU packages, and record it by cause in events.jsonl."""
    pue: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Power usage effectiveness of the building: energy at its meter over the energy of its machines. Reported kWh,
    cost and CO2 include it."""
    grid: Grid | None = Field(default=None, examples=["france"])
    """Carbon intensity of the electricity: grams of CO2 per kWh, or a region, such as france (means of 2023)."""
    price: Price | None = Field(default=None, examples=["0.25eur"])
    """Price of one kWh, such as 0.25eur."""
    budget: PositiveFloat | None = Field(default=None, examples=[10.0])
    """Energy of the whole run in kWh, over all its starts, at which it saves and pauses. `weft runs resume RUN
    energy.budget=KWH` continues it."""
    cpu_watts: PositiveFloat | None = Field(default=None, examples=[250.0])
    """Power of all CPU packages of a machine at full load, for an estimate if they have no readable counter."""
    gpu_watts: PositiveFloat | None = Field(default=None, examples=[300.0])
    """Power of one GPU at full load, for an estimate if it has no counter; by default its data sheet's."""
