"""Federated rounds: parity with data parallelism, and the same bits on any workers and after interruptions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.federated.runs import InProcess, same, train, weights, write_config
from tests.tools.warm_python import FORKS
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import CheckpointError, CommError, ConfigError
from weft.federated.config import read_federated
from weft.federated.server import ServerState
from weft.federated.trainer import ClientTrainer, read_clients, train_client
from weft.pools.pool import Pool
from weft.train.script.script_run import Run
from weft.verify.rank_pool import RankPool

ALL_AT_ONCE = "rounds = 3\nclients = 5\nsplit = 'dirichlet'\nalpha = 0.5\nlocal_steps = 1\n"
FAULTY = """
rounds = 3
clients = 8
split = "dirichlet"
alpha = 0.5
sampled = 6
local_steps = 3
seed = 3
[server]
momentum = 0.5
[faults]
drop = 0.2
straggle = 0.3
late = "partial"
"""


def central_steps(records, labels, steps):
    """Train by data parallelism on two ranks. Return the weights of this rank."""
    plan = Plan.parse("dp_replicate=2 precision=fp64")
    run = Run(plan, build_mesh(plan), Ledger(), seed=0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
    model = run.parallelize(model)

    def loss_fn(output, batch):
        return torch.nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])

    step = run.train_step(model, torch.optim.SGD, loss_fn, lr=0.2)
    half = slice(run.mesh.rank * 30, run.mesh.rank * 30 + 30)
    for _ in range(steps):
        step((records[half], labels[half]))
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def test_fedavg_of_one_step_equals_data_parallelism(tmp_path):
    words = ["train.global_batch=60", "optimizer.momentum=0.0", "seed=0"]
    file = write_config(tmp_path, ALL_AT_ONCE, kind="PlainPoints", settings=words)
    result = train(file, tmp_path / "out")
    sizes = [len(part) for part in read_clients(tmp_path / "out/clients.npz")]
    assert sum(sizes) == 60
    assert len(set(sizes)) > 1  # clients of different weight
    trainer = ClientTrainer(read_federated(file), tmp_path / "out")
    records = torch.stack([one["x"] for one in trainer.samples])
    labels = torch.stack([one["labels"] for one in trainer.samples])
    with RankPool(2) as ranks:
        central = ranks.run(central_steps, records, labels, 3)[0]
    found = weights(tmp_path / "out")
    assert max(float((found[name] - central[name]).abs().max()) for name in central) < 1e-10
    assert result.state.round == 3
    assert [one["clients"] for one in result.rounds] == [5, 5, 5]


def test_killed_worker_changes_nothing(tmp_path, monkeypatch):
    """Two workers, of which one is killed, give the bits of a run in this process."""
    monkeypatch.setenv(FORKS, "1")
    marker = tmp_path / "killed"
    file = write_config(tmp_path, FAULTY)
    train(file, tmp_path / "here")
    other = write_config(tmp_path / "other", FAULTY, options=f'kill = "{marker}"')
    with Pool("local:2") as pool:
        train(other, tmp_path / "pool", pool)
    assert marker.exists()
    assert same(tmp_path / "here", tmp_path / "pool")
    assert (tmp_path / "here/rounds.jsonl").read_text() == (tmp_path / "pool/rounds.jsonl").read_text()


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 4])
def test_number_of_workers_changes_nothing(tmp_path, workers):
    file = write_config(tmp_path, FAULTY)
    train(file, tmp_path / "here")
    with Pool(f"local:{workers}") as pool:
        train(file, tmp_path / "pool", pool)
    assert same(tmp_path / "here", tmp_path / "pool")


def test_interrupted_run_continues_with_the_same_bits(tmp_path):
    file = write_config(tmp_path, FAULTY)
    whole = train(file, tmp_path / "whole")
    first = whole.rounds[0]["clients"]
    for stop_after in (2, first + 1):  # in the first round, and in the second one
        with pytest.raises(KeyboardInterrupt):
            train(file, tmp_path / "parts", InProcess(stop_after))
    assert ServerState.load(tmp_path / "parts/state.safetensors").round == 1
    # A command that was killed between the line of a round and its state leaves the line.
    with (tmp_path / "parts/rounds.jsonl").open("a") as file_of_rounds:
        file_of_rounds.write('{"round": 2, "clients": 1}\n{"rou')
    parts = train(file, tmp_path / "parts")
    assert same(tmp_path / "whole", tmp_path / "parts")
    assert whole.rounds == parts.rounds
    assert len(parts.rounds) == 3
    assert not any((tmp_path / "parts/rounds").iterdir())


def test_more_rounds_continue_a_finished_run(tmp_path):
    file = write_config(tmp_path, FAULTY)
    train(write_config(tmp_path / "short", FAULTY.replace("rounds = 3", "rounds = 2")), tmp_path / "out")
    assert train(file, tmp_path / "out").state.round == 3
    train(file, tmp_path / "whole")
    assert same(tmp_path / "out", tmp_path / "whole")


def test_other_settings_are_refused(tmp_path):
    train(write_config(tmp_path, ALL_AT_ONCE), tmp_path / "out")
    other = write_config(tmp_path, ALL_AT_ONCE.replace("local_steps = 1", "local_steps = 2"))
    with pytest.raises(ConfigError, match=r"its run began with another value of local_steps. Restore it to continue"):
        train(other, tmp_path / "out")
    other = write_config(tmp_path, ALL_AT_ONCE, settings=["optimizer.lr=0.3"])
    with pytest.raises(ConfigError, match="its run began with another value of the clients' config"):
        train(other, tmp_path / "out")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/notes.txt").touch()
    with pytest.raises(ConfigError, match=r"used: it has other files, such as notes.txt. Give a new folder"):
        train(other, tmp_path / "used")


def test_damaged_state_is_refused(tmp_path):
    file = write_config(tmp_path, ALL_AT_ONCE)
    train(file, tmp_path / "out")
    state = tmp_path / "out/state.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="it cannot be read"):
        train(file, tmp_path / "out")


def test_diverged_clients_are_left_out(tmp_path):
    text = "rounds = 2\nsplit = 'column'\ncolumn = 'labels'\nlocal_steps = 2\n"
    file = write_config(tmp_path, text, options="bad_label = 2")
    result = train(file, tmp_path / "out")
    assert [(one["clients"], one["refused"]) for one in result.rounds] == [(2, 1), (2, 1)]
    assert result.state.refused == 2
    assert all(one.isfinite().all() for one in weights(tmp_path / "out").values())


@pytest.mark.parametrize(("options", "plan"), [("norm = true", ""), ("", " accumulation=2")])
def test_clients_do_not_depend_on_earlier_ones(tmp_path, options, plan):
    """A client's update is the same after other clients, with momentum, dropout and batch norm."""
    file = write_config(tmp_path, ALL_AT_ONCE, options=options, plan=plan)
    train(file, tmp_path / "out")
    config = read_federated(file)
    first, second = (ClientTrainer(config, tmp_path / "out") for _ in range(2))
    start, records = first.weights(), np.arange(12)
    for client in range(3):
        first.train(start, records + client, 0, client, 2)
    one, other = first.train(start, records, 1, 4, 3), second.train(start, records, 1, 4, 3)
    assert one.loss == other.loss
    assert all(torch.equal(one.delta[name], other.delta[name]) for name in one.delta)
    assert ("1.running_mean" in one.delta) == bool(options)


@pytest.mark.parametrize("plan", [" dp_replicate=2", pytest.param(" dp_shard=2 zero=2", marks=pytest.mark.full)])
def test_clients_of_several_ranks(tmp_path, plan):
    """They send the same updates as clients of one rank, with momentum and dropout."""
    for name, own in (("one", ""), ("two", plan)):
        train(write_config(tmp_path / name, FAULTY, plan=own), tmp_path / name / "out")
    found, want = (weights(tmp_path / name / "out") for name in ("two", "one"))
    assert max(float((found[name] - one).abs().max()) for name, one in want.items()) < 1e-10
    unknown = {"folder": str(tmp_path / "two/out"), "round": 3, "client": 99, "steps": 1, "ranks": 2}
    with pytest.raises(CommError, match=r"^IndexError: list index out of range$"):
        train_client(unknown)


def test_fedprox_adds_the_distance(tmp_path):
    text = ALL_AT_ONCE + "[server]\nmethod = 'fedprox'\nmu = 0.7\n"
    file = write_config(tmp_path, text, kind="PlainPoints", settings=["optimizer.momentum=0.0"], plan=" accumulation=2")
    train(file, tmp_path / "out")
    trainer = ClientTrainer(read_federated(file), tmp_path / "out")
    start, records = trainer.weights(), np.arange(8)
    update = trainer.train(start, records, 0, 0, 4)
    model = trainer.task.build()
    model.load_state_dict(start)
    batch = trainer.task.collate([trainer.samples[n] for n in range(8)])
    for _ in range(4):
        total, count = trainer.task.loss(model(batch["x"]), batch)
        distance = sum((param - start[name]).square().sum() for name, param in model.named_parameters())
        grads = torch.autograd.grad(total / count + 0.35 * distance, list(model.parameters()))
        with torch.no_grad():
            for param, grad in zip(model.parameters(), grads, strict=True):
                param -= 0.2 * grad
    wanted = {name: start[name] - one for name, one in model.state_dict().items()}
    assert max(float((update.delta[name] - wanted[name]).abs().max()) for name in wanted) < 1e-12


def test_command(tmp_path, capsys, monkeypatch):
    from weft.cli.app import run

    monkeypatch.chdir(tmp_path)
    file = write_config(tmp_path, "rounds = 1\nclients = 3\nlocal_steps = 1\n")
    assert run(["federate", str(file), "--on", "local:1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["round"], found["clients"], found["refused_in_total"]) == (1, 3, 0)
    assert found["eval_loss"] > 0
    shutil.rmtree(tmp_path / "federated")
    file.write_text(file.read_text() + "local_stps = 3\n")
    assert run(["federate", str(file)]) == 2
    assert "unknown key 'local_stps'. Did you mean 'local_steps'?" in capsys.readouterr().err


@pytest.mark.full
def test_killed_command_continues_with_the_same_bits(tmp_path):
    file = write_config(tmp_path, FAULTY.replace("rounds = 3", "rounds = 6"))
    train(file, tmp_path / "whole")
    words = [sys.executable, "-m", "weft", "federate", str(file), "--on", "local:2", "--out", str(tmp_path / "parts")]
    first = subprocess.Popen(words)
    state = tmp_path / "parts/state.safetensors"
    while first.poll() is None and not (state.exists() and ServerState.load(state).round >= 2):
        time.sleep(0.01)
    first.kill()
    first.wait()
    assert ServerState.load(state).round < 6
    assert subprocess.run(words).returncode == 0
    assert same(tmp_path / "whole", tmp_path / "parts")
