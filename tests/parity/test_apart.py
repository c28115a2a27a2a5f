"""A replica that stands still or dies stops no other: it joins again, and all equals one process with such meetings."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.parity.elastic_cases import CASE, EVERY, KEY, STEPS, TIMEOUT_S
from tests.parity.test_sync import Alone, outer_step
from weft.comm.replica_rendezvous import RendezvousServer
from weft.config.plan import Plan
from weft.optim.build import clip_factor, global_norm

PLAN = "dp_replicate=2 sync=diloco:2 precision=fp64"


class Oracle(Alone):
    """Both replicas on this process; which of them trains a step, and which gives at a meeting, is said."""

    def step_of(self, place: int, index: int) -> None:
        batch, model, optimizer = self.case.batch(index), self.models[place], self.optimizers[place]
        own = {name: one[self.samples(place)] for name, one in batch.items()}
        loss_sum, number = self.case.loss(self.case.forward(model, own), own)
        optimizer.zero_grad()
        (loss_sum / number).backward()
        params = list(model.parameters())
        norm = float(global_norm([param.grad for param in params]))
        for param in params:
            param.grad *= clip_factor(norm, self.case.max_grad_norm)
        optimizer.step()

    @torch.no_grad()
    def meet_of(self, givers: list[int], members: list[int]) -> None:
        for name, anchor in self.anchor.items():
            deltas = [anchor - self.models[place].get_parameter(name) for place in givers]
            outer_step(self.way, anchor, self.momentum[name], sum(deltas) / len(givers))
            for place in members:
                self.models[place].get_parameter(name).copy_(anchor)

    def begins_again(self, place: int) -> None:
        self.models[place] = self.case.model()
        self.optimizers[place] = self.case.optimizer_of(self.models[place])


def wait_for(path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} never came"
        time.sleep(0.02)


@pytest.fixture
def replicas(tmp_path):
    place, processes = RendezvousServer("127.0.0.1", 0, 2, TIMEOUT_S, KEY), []

    def start(replica: int, fault: str = "none") -> subprocess.Popen:
        words = ["tests.parity.elastic_replica", place.address, str(replica), PLAN, str(tmp_path), fault]
        processes.append(subprocess.Popen([sys.executable, "-m", *words]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
    place.close()


def both_found(folder):
    found = [torch.load(folder / f"found-{replica}", weights_only=True) for replica in (0, 1)]
    for name, anchor in found[0]["anchor"].items():
        assert torch.equal(anchor, found[1]["anchor"][name]), name
        assert torch.equal(found[0]["momentum"][name], found[1]["momentum"][name]), name
    return found


def assert_equal(found, oracle) -> None:
    for name, anchor in found["anchor"].items():
        torch.testing.assert_close(anchor.view(-1), oracle.anchor[name].reshape(-1), rtol=0, atol=1e-10)


@pytest.mark.full
def test_a_replica_that_stands_still_is_left_out_and_joins_again(replicas, tmp_path):
    first, second = replicas(0), replicas(1, "stops")
    wait_for(tmp_path / "at-1-3")
    wait_for(tmp_path / "at-0-4")  # the other went on
    second.send_signal(signal.SIGCONT)
    assert first.wait(60) == second.wait(60) == 0
    found = both_found(tmp_path)
    assert found[0]["met"] == [(1, 2), (2, 4), (3, 6), (4, 8)]
    assert found[1]["met"] == [(1, 2), (3, 6), (4, 8)]
    assert found[1]["trained"] == [0, 1, 2, 3, 6, 7]
    oracle = Oracle(CASE, Plan.parse(PLAN))
    for index in range(STEPS):
        for place in (0, 1):
            if index in found[place]["trained"]:
                oracle.step_of(place, index)
        if (index + 1) % EVERY == 0:
            away = index + 1 in (4, 6)
            oracle.meet_of([0] if away else [0, 1], [0] if index + 1 == 4 else [0, 1])
    assert_equal(found[0], oracle)


@pytest.mark.full
def test_a_replica_that_dies_in_an_exchange_changes_nothing_and_its_next_start_joins(replicas, tmp_path):
    first, second = replicas(0, "waits for 1"), replicas(1, "dies in exchange")
    assert second.wait(60) == -signal.SIGKILL
    again = replicas(1)
    assert first.wait(60) == again.wait(60) == 0
    found = both_found(tmp_path)
    assert any("failed, and nothing was changed" in line for line in found[0]["lines"])
    assert found[0]["trained"] == list(range(STEPS))
    assert found[0]["met"] == [(1, 2), (2, 4), (3, 6), (4, 8)]
    assert found[1]["met"] == [(3, 6), (4, 8)]
    assert found[1]["trained"] == [0, 6, 7]
    oracle = Oracle(CASE, Plan.parse(PLAN))
    for index in range(STEPS):
        oracle.step_of(0, index)
        if index < 4:
            oracle.step_of(1, index)
        if index == 3:
            oracle.begins_again(1)
            oracle.step_of(1, 0)  # before it knew that the others are further
        if index >= 6:
            oracle.step_of(1, index)
        if index + 1 == 2 or (index + 1) % EVERY == 0:
            away = index + 1 in (4, 6)
            oracle.meet_of([0] if away else [0, 1], [0] if index + 1 == 4 else [0, 1])
    assert_equal(found[0], oracle)
