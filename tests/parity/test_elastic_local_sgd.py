"""Elastic local SGD: a stopped or killed replica does not block the others, rejoins, and results match one process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.parity.elastic_cases import CASE, EVERY, KEY, STEPS, TIMEOUT_S
from tests.parity.test_sync import ReferenceReplicas, outer_step
from weft.comm.replica_rendezvous import RendezvousServer
from weft.config.plan import Plan
from weft.optim.step_decision import clip_factor, global_norm

PLAN = "dp_replicate=2 sync=diloco:2 precision=fp64"


class Oracle(ReferenceReplicas):
    """Both replicas in this process. The test chooses which replica trains a step and which contributes to a round."""

    def step_of(self, replica: int, index: int) -> None:
        batch, model, optimizer = self.case.batch(index), self.models[replica], self.optimizers[replica]
        own = {name: one[self.samples(replica)] for name, one in batch.items()}
        loss_sum, number = self.case.loss(self.case.forward(model, own), own)
        optimizer.zero_grad()
        (loss_sum / number).backward()
        params = list(model.parameters())
        norm = float(global_norm([param.grad for param in params]))
        for param in params:
            param.grad *= clip_factor(norm, self.case.max_grad_norm)
        optimizer.step()

    @torch.no_grad()
    def exchange_of(self, givers: list[int], members: list[int]) -> None:
        for name, anchor in self.anchor.items():
            deltas = [anchor - self.models[replica].get_parameter(name) for replica in givers]
            outer_step(self.method, anchor, self.momentum[name], sum(deltas) / len(givers))
            for replica in members:
                self.models[replica].get_parameter(name).copy_(anchor)

    def restart(self, replica: int) -> None:
        self.models[replica] = self.case.model()
        self.optimizers[replica] = self.case.optimizer_of(self.models[replica])


def wait_for(path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} was not written"
        time.sleep(0.02)


@pytest.fixture
def replicas(tmp_path):
    server, processes = RendezvousServer("127.0.0.1", 0, 2, TIMEOUT_S, KEY), []

    def start(replica: int, fault: str = "none") -> subprocess.Popen:
        arguments = ["tests.parity.elastic_replica", server.address, str(replica), PLAN, str(tmp_path), fault]
        processes.append(subprocess.Popen([sys.executable, "-m", *arguments]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
    server.close()


def load_results(folder):
    found = [torch.load(folder / f"found-{replica}", weights_only=True) for replica in (0, 1)]
    for name, anchor in found[0]["anchor"].items():
        assert torch.equal(anchor, found[1]["anchor"][name]), name
        assert torch.equal(found[0]["momentum"][name], found[1]["momentum"][name]), name
    return found


def assert_equal(found, oracle) -> None:
    for name, anchor in found["anchor"].items():
        torch.testing.assert_close(anchor.view(-1), oracle.anchor[name].reshape(-1), rtol=0, atol=1e-10)


@pytest.mark.full
def test_stopped_replica_is_skipped_and_rejoins(replicas, tmp_path):
    first, second = replicas(0), replicas(1, "stops")
    wait_for(tmp_path / "at-1-3")
    wait_for(tmp_path / "at-0-4")  # the other replica continued
    second.send_signal(signal.SIGCONT)
    assert first.wait(60) == second.wait(60) == 0
    found = load_results(tmp_path)
    assert found[0]["rounds"] == [(1, 2), (2, 4), (3, 6), (4, 8)]
    assert found[1]["rounds"] == [(1, 2), (3, 6), (4, 8)]
    assert found[1]["trained"] == [0, 1, 2, 3, 6, 7]
    oracle = Oracle(CASE, Plan.parse(PLAN))
    for index in range(STEPS):
        for replica in (0, 1):
            if index in found[replica]["trained"]:
                oracle.step_of(replica, index)
        if (index + 1) % EVERY == 0:
            excluded = index + 1 in (4, 6)
            oracle.exchange_of([0] if excluded else [0, 1], [0] if index + 1 == 4 else [0, 1])
    assert_equal(found[0], oracle)


@pytest.mark.full
def test_replica_killed_in_exchange_changes_nothing_and_rejoins(replicas, tmp_path):
    first, second = replicas(0, "waits for 1"), replicas(1, "dies in exchange")
    assert second.wait(60) == -signal.SIGKILL
    again = replicas(1)
    assert first.wait(60) == again.wait(60) == 0
    found = load_results(tmp_path)
    assert any("failed, and nothing was changed" in line for line in found[0]["lines"])
    assert found[0]["trained"] == list(range(STEPS))
    assert found[0]["rounds"] == [(1, 2), (2, 4), (3, 6), (4, 8)]
    assert found[1]["rounds"] == [(3, 6), (4, 8)]
    assert found[1]["trained"] == [0, 6, 7]
    oracle = Oracle(CASE, Plan.parse(PLAN))
    for index in range(STEPS):
        oracle.step_of(0, index)
        if index < 4:
            oracle.step_of(1, index)
        if index == 3:
            oracle.restart(1)
            oracle.step_of(1, 0)  # before it learned that the others are ahead
        if index >= 6:
            oracle.step_of(1, index)
        if index + 1 == 2 or (index + 1) % EVERY == 0:
            excluded = index + 1 in (4, 6)
            oracle.exchange_of([0] if excluded else [0, 1], [0] if index + 1 == 4 else [0, 1])
    assert_equal(found[0], oracle)
