"""A network link between two hosts fails for 20 s: the replicas continue, and synchronize again afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.test_replica_launch import TrainCommand, assert_close, tensors
from tests.train.conftest import text as text  # a fixture
from tests.train.replica_runs import steps_of
from weft.checkpoint.load import load_checkpoint, newest_checkpoint
from weft.monitor.events import read_events

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]
CUT_S = 20.0
PLAN = "plan=dp_replicate=2 sync=diloco:5 compress=int8"
HOSTS = {"weftcut0": "10.79.0.1", "weftcut1": "10.79.0.2"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def link():
    """Connect two network namespaces. Yield a function that takes the link down or up."""
    names = list(HOSTS)
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        ip("netns", "add", name)
    ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
    for name, address in HOSTS.items():
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", "eth0", "up")
    yield lambda state: ip("-n", names[1], "link", "set", "eth0", state)
    for name in names:
        ip("netns", "del", name)


class CommandOnHost(TrainCommand):
    """Starts commands in one of the namespaces."""

    def on(self, host: str, name: str, *settings: str) -> subprocess.Popen[str]:
        self.program = ["ip", "netns", "exec", host, sys.executable]
        return self.start(name, *settings)


def last_step(folder) -> int:
    return max(steps_of(folder), default=0)


def test_replicas_continue_during_a_20_s_link_outage_and_resync(link, tmp_path, text):
    train = CommandOnHost(tmp_path, text)
    address = f"{HOSTS['weftcut0']}:29600"
    key = tmp_path / "key"
    key.write_text("the key of these replicas")
    settings = [
        PLAN, "launch.replicas_apart=true", f"launch.meet_at={address}", f"launch.meeting_key=file:{key}",
        "launch.meeting_timeout=2s",
        "train.steps=100000", "checkpoint.every=0", "eval.every=0", "log.every=100", "schedule.kind=constant",
    ]  # fmt: skip
    try:
        both = [train.on(host, "cut", *settings, f"launch.replica={k}") for k, host in enumerate(HOSTS)]
        first, second = train.folder("cut"), train.folder("cut", 1)
        train.wait_for_step(second, 30, both[1])
        link("down")
        at = last_step(first), last_step(second)
        time.sleep(CUT_S)
        then = last_step(first), last_step(second)
        link("up")
        assert then[0] > at[0] + 20, "replica 0 has the meeting place, and goes on"
        assert then[1] > at[1] + 5, "replica 1 reaches nobody, and trains on"
        end = time.monotonic() + 90
        while not any("joined the others again" in event.get("text", "") for event in read_events(second.events)):
            assert time.monotonic() < end, "they never met again"
            time.sleep(0.1)
        train.wait_for_step(second, last_step(first) + 20, both[1])
        for process in both:
            process.send_signal(signal.SIGINT)
        shown = train.finish(*both)
    finally:
        for process in train.processes:
            process.kill()
    assert "synchronizations continue without replica 1" in shown[0]
    assert "all replicas take part in meetings again" in shown[0]
    assert "no synchronization" in shown[1]
    newest = [load_checkpoint(newest_checkpoint(one.checkpoints).path) for one in (first, second)]
    assert newest[0].state["replica"]["token"] == newest[1].state["replica"]["token"]
    assert_close(tensors(first, "model", "outer"), tensors(second, "model", "outer"))
