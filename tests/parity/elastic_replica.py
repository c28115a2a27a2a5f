"""One replica as a process: SERVER_ADDRESS REPLICA PLAN FOLDER FAULT. Writes its results into the folder."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from tests.parity.elastic_cases import CASE, KEY, PAUSE_S, STEPS, TIMEOUT_S
from weft.comm.mesh import build_mesh
from weft.comm.replica_client import ReplicaGroup
from weft.config import partitioning as shares
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.parallel.replicas.elastic_local_sgd import ElasticDiLoCo, attach_elastic_diloco
from weft.parallel.state.gradients import data_parallel
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep


class Faulty(ElasticDiLoCo):
    """Kills the process in the middle of its second exchange."""

    def _receive(self, call, axis):
        if call.number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._receive(call, axis)


def main(address: str, replica: int, text: str, folder: Path, fault: str) -> None:
    plan = Plan.parse(text)
    mesh = build_mesh(plan.replace(dp_replicate=1, sync="step", compress="none"))
    model = parallelize(CASE.model(), mesh)
    lines: list[str] = []
    group = ReplicaGroup(
        mesh, replica, address, "127.0.0.1", TIMEOUT_S, KEY, lambda act: act(), lambda own: [own], lines.append
    )
    sync = attach_elastic_diloco(model, data_parallel(model), mesh, plan, group)
    wait_for_round = group.wait_for_round

    def wait_and_mark(layout: str):
        (folder / f"waits-{replica}-{sync.step}").touch()
        return wait_for_round(layout)

    group.wait_for_round = wait_and_mark
    if fault == "dies in exchange":
        sync.__class__ = Faulty
    step = TrainStep(
        model, CASE.optimizer_of(model), CASE.loss, mesh, forward=CASE.forward, max_grad_norm=CASE.max_grad_norm
    )
    group.timeout_s = 60.0
    group.begin()  # of two replicas that are started together, one may be ready some seconds before the other
    group.timeout_s = TIMEOUT_S
    awaited_steps = (1,) if fault == "waits for 1" else (4,)
    index, trained, rounds = 0, [], []
    while index < STEPS:
        if replica == 0 and index == 5:  # the other rejoins meanwhile
            while not any((folder / f"waits-1-{number}").exists() for number in awaited_steps):
                time.sleep(0.02)
            time.sleep(PAUSE_S)
        before = sync.meetings
        parts = shares.microbatch_samples(CASE.global_batch, plan.dp_size, 1, replica)
        batch = CASE.batch(index)
        step(Microbatches([{name: one[list(part)] for name, one in batch.items()} for part in parts]))
        trained.append(index)
        index += 1
        if sync.goes_to is not None:
            index = sync.goes_to
        if sync.meetings != before:
            rounds.append((sync.meetings, index))
        (folder / f"at-{replica}-{index}").touch()
        if fault == "stops" and index == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
    torch.save(
        {
            "anchor": {one.name: one.flat.clone() for one in sync.anchors()},
            "momentum": {one.name: one.flat.clone() for one in sync.momenta()},
            "trained": trained, "rounds": rounds, "lines": lines,
        },
        folder / f"found-{replica}",
    )  # fmt: skip
    group.end(str(folder))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5])
