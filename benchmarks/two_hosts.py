"""Training on two hosts whose link is cut, or of which one is lost. The hosts are network and process namespaces.

Each host runs torchrun, as `weft launch torchrun` prints it, with ranks of `weft train`. A switch between them is not
needed: a pair of virtual interfaces is the link, and taking one end down cuts it.

    sudo python benchmarks/two_hosts.py [--ranks 1] [--copies 1] [--cases cut,cut_long,lose_host]

It needs root and iproute2, and says so where it has neither. `cut`: the link is away for some seconds, less than
launch.timeout. `cut_long`: for longer than that. `lose_host`: all processes of the second host are killed for good.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft import env
from weft.checkpoint.load import list_checkpoints
from weft.cli.console import table
from weft.monitor.events import read_events
from weft.train.folder import RunFolder

CONFIG = """
[model]
name = "tiny"
dim = 32
num_layers = 2
num_heads = 2
num_kv_heads = 2
ffn_dim = 64
[tokenizer]
kind = "bytes"
[data]
holdout = 0.2
[train]
seq_len = 32
global_batch = 8
[eval]
every = 0
batches = 1
[sample]
prompt = ""
[launch]
device = "cpu"
min_ranks = 1
"""
NET, PORT = "10.79.0", 29511
#: Steps of a run, and the one after which the fault comes.
STEPS, FAULT_AT, SAVE_EVERY = 120, 30, 25
TIMEOUT_S, CUT_S, LONG_CUT_S = 10, 4.0, 20.0
LIMIT_S = 300.0
LOOK_S = 0.02
CASES = ("cut", "cut_long", "lose_host")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Names of two network namespaces with a link between them; both are gone afterwards."""
    names = [f"weft{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{NET}.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start_host(names: list[str], number: int, ranks: int, words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Torchrun on one host, in process and host-name namespaces of its own: killing it kills all that it started."""
    conf = f"is_host={int(number == 0)},join_timeout=120,last_call_timeout=5"
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={ranks}", "--rdzv-id=two",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={NET}.1:{PORT}", f"--rdzv-conf={conf}", "--max-restarts=5",
        f"--local-addr={NET}.{number + 1}", "-m", "weft", "train", *words,
    ]  # fmt: skip
    inside = ["bash", "-c", 'hostname "host$1"; shift; "$@"', "bash", str(number), *torchrun]
    apart = ["unshare", "--pid", "--uts", "--mount-proc", "--fork", "--kill-child", *inside]
    given = env.child_env(GLOO_SOCKET_IFNAME="eth0", TP_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1")
    with log.open("a") as out:
        return subprocess.Popen(
            ["ip", "netns", "exec", names[number], *apart], stdout=out, stderr=subprocess.STDOUT, env=given
        )


def last_step(folder: RunFolder) -> int:
    return max((int(one["step"]) for one in read_events(folder.events) if one.get("event") == "step"), default=0)


def starts(folder: RunFolder) -> list[dict[str, Any]]:
    return [one for one in read_events(folder.events) if one.get("event") == "start"]


def wait_until(done: Any, what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not done():
        if time.monotonic() > end:
            raise RuntimeError(f"after {LIMIT_S:g} s: not {what}")
        time.sleep(LOOK_S)


def run_case(case: str, place: Path, ranks: int, copies: int) -> dict[str, Any]:
    """Train with one fault ("none": without); what is to be told of it."""
    folder = RunFolder(place / case)
    words = [
        str(place / "config.toml"),
        f"plan=dp_shard={2 * ranks} zero=3", f"data.train={place / 'text.jsonl'}", f"data.cache_dir={place / 'cache'}",
        f"run.dir={place}", f"run.name={case}", f"train.steps={STEPS}", f"checkpoint.every={SAVE_EVERY}",
        f"checkpoint.peer_every={copies}", f"launch.timeout={TIMEOUT_S}s", "launch.warn_after=2s",
    ]  # fmt: skip
    with two_hosts() as names:
        hosts = [start_host(names, number, ranks, words, place / f"{case}-{number}.txt") for number in (0, 1)]
        try:
            wait_until(lambda: last_step(folder) >= FAULT_AT, f"at step {FAULT_AT}")
            before, count, began = last_step(folder), len(starts(folder)), time.time()
            if case in ("cut", "cut_long"):
                ip("-n", names[1], "link", "set", "eth0", "down")
                time.sleep(CUT_S if case == "cut" else LONG_CUT_S)
                before = last_step(folder)
                ip("-n", names[1], "link", "set", "eth0", "up")
            elif case == "lose_host":
                hosts[1].kill()
                hosts[1].wait()
                before = last_step(folder)
            wait_until(lambda: last_step_now(folder) > before or hosts[0].poll() is not None, "back")
            back = time.time() - began
            code = hosts[0].wait(LIMIT_S)
        finally:
            for host in hosts:
                host.kill()
                host.wait()
    again = starts(folder)[count:]
    lost = sum(max(0, before - int(one["step"])) for one in again[:1])
    return {"case": case, "back_s": back, "lost": lost, "starts": 1 + len(again), "code": code, "folder": folder}


def last_step_now(folder: RunFolder) -> int:
    """The last step of the newest start."""
    step = 0
    for one in read_events(folder.events):
        if one.get("event") in ("start", "step"):
            step = int(one["step"])
    return step


def state_of(folder: RunFolder, sound: RunFolder) -> str:
    try:
        ours, theirs = (
            json.loads((Path(str(list_checkpoints(one.checkpoints)[-1])) / "manifest.json").read_text())["files"]
            for one in (folder, sound)
        )
        losses = [
            [one["loss"] for one in read_events(run.events) if one.get("event") == "step"][-1]
            for run in (folder, sound)
        ]
    except (OSError, IndexError):
        return "no last checkpoint"
    if ours == theirs:
        return "equal"
    gap = abs(losses[0] / losses[1] - 1)
    return f"last loss differs by {gap:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each host")
    parser.add_argument("--copies", type=int, default=1, help="checkpoint.peer_every; 0: no copies in memory")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--keep", type=Path, help="a new folder for the runs, which stays")
    asked = parser.parse_args()
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        print("two_hosts: skipped, because network namespaces need root, iproute2 and util-linux.")
        return
    place = asked.keep or Path(tempfile.mkdtemp(prefix="weft-two-hosts-"))
    place.mkdir(exist_ok=True)
    (place / "config.toml").write_text(CONFIG)
    (place / "text.jsonl").write_text("".join(f'{{"text": "warp {i}, weft {i * i}"}}\n' for i in range(400)))
    try:
        sound = run_case("none", place, asked.ranks, asked.copies)["folder"]
        rows = [run_case(case, place, asked.ranks, asked.copies) for case in asked.cases.split(",")]
        told = [
            (one["case"], f"{one['back_s']:.0f} s", str(one["lost"]), str(one["starts"]), str(one["code"]),
             state_of(one["folder"], sound))
            for one in rows
        ]  # fmt: skip
        head = ("fault", "back in", "steps lost", "starts", "exit code", "final state")
        print("\n".join(table([head, *told], right=(1, 2, 3, 4))))
    finally:
        if asked.keep is None:
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
