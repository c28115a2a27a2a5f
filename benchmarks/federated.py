"""Federated training of Weft and of Flower's simulation on digits, interleaved; and accuracy next to central training.

    python benchmarks/federated.py time                  # 100 clients, 10 rounds, 2 workers (needs flwr[simulation])
    python benchmarks/federated.py time --flower-app     # also Weft's client under Flower's simulation
    python benchmarks/federated.py accuracy              # 20 clients, Dirichlet 0.3

Both train the same network on the same parts of the data for the same local epochs. Flower's client is plain PyTorch.
Times are of wall and contain the start of the workers; times of rounds are from the end of the first round to the end.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from weft.federated.clients import split_records
from weft.federated.config import FederatedConfig, read_federated
from weft.federated.flower import flower_app
from weft.federated.simulation import federated_folder, run_federated
from weft.pools.pool import Pool
from weft.train.tasks.base import Metric, Task

# Flower and scikit-learn are not in the development environment.
# pyright: reportMissingImports=false

BASE = f"""
plan = "dp_replicate=1"
task = "{Path(__file__).resolve()}:Digits"
train = {{global_batch = 16}}
eval = {{batches = 18}}
optimizer = {{name = "sgd", lr = 0.1, momentum = 0.0, weight_decay = 0.0, max_grad_norm = 0.0}}
schedule = {{kind = "constant", warmup_steps = 0}}
launch = {{device = "cpu"}}
"""
RUN = """
config = "base.toml"
rounds = {rounds}
clients = {clients}
split = "dirichlet"
alpha = 0.3
local_epochs = {epochs}
seed = {seed}
eval_every = {rounds}
"""


class Digits(Task):
    """Classifies the 8 x 8 digits of scikit-learn. Every sixth digit is for evaluation."""

    metrics = (Metric("accuracy", "", "Share of the digits that the model names."),)
    sum_names = ("right",)

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def samples(self, split: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        is_eval = np.random.Generator(np.random.Philox(0)).permutation(len(x)) % 6 == 0
        chosen = is_eval if split == "eval" else ~is_eval
        return list(zip(torch.tensor(x[chosen] / 16, dtype=torch.float32), torch.tensor(y[chosen]), strict=True))

    def loss(self, output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])

    def sums(self, output: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
        return {"right": (output.argmax(1) == batch[1]).sum()}

    def measure(self, sums: Any) -> dict[str, float]:
        return {"accuracy": sums["right"] / sums["count"]}


def config_in(home: Path, **values: Any) -> FederatedConfig:
    """Write the files of a run into a folder, and read them."""
    (home / "base.toml").write_text(BASE)
    (home / "run.toml").write_text(RUN.format(**{"epochs": 1, "seed": 0, **values}))
    return read_federated(home / "run.toml")


class Clock:
    """Times of the ends of rounds."""

    def __init__(self) -> None:
        self.began, self.ends = time.perf_counter(), list[float]()

    def note(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def result(self) -> tuple[float, float]:
        """Return the seconds in total, and of a round after the first one."""
        return time.perf_counter() - self.began, (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)


def weft_run(config: FederatedConfig, out: Path, workers: int) -> tuple[float, float]:
    """Return the seconds of a run, and of a round."""
    clock = Clock()
    with Pool(f"local:{workers}") as pool, federated_folder(config, out):
        run_federated(config, out, pool, clock.note)
    return clock.result()


def simulated(server: Any, client: Any, clients: int, workers: int) -> None:
    """Run two apps in Flower's simulation."""
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": workers}}
    run_simulation(server_app=server, client_app=client, num_supernodes=clients, backend_config=resources)


@functools.cache
def part_of(config: FederatedConfig, client: int) -> torch.utils.data.TensorDataset:
    """Return the records of a client, which stay in the memory of a worker."""
    samples = Digits().samples("train")
    own = [samples[index] for index in split_records(config, samples)[client]]
    return torch.utils.data.TensorDataset(*(torch.stack(one) for one in zip(*own, strict=True)))


def flower_run(config: FederatedConfig, clients: int, workers: int) -> tuple[float, float]:
    """Return the seconds of a run of Flower's FedAvg with a plain PyTorch client, and of a round."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    client, server, clock = ClientApp(), ServerApp(), Clock()
    # From the imported module, so that workers import the function and keep its cache.
    part = importlib.import_module(Path(__file__).stem).part_of

    @client.train()
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        own = part(config, int(context.node_config["partition-id"]))
        for some, labels in torch.utils.data.DataLoader(own, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(net(some), labels).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(own)})}
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=clients)
        start = ArrayRecord(Digits().build().state_dict())
        evaluate = lambda round_, arrays: clock.note() if round_ else None  # noqa: E731
        strategy.start(grid=grid, initial_arrays=start, num_rounds=config.rounds, evaluate_fn=evaluate)

    simulated(server, client, clients, workers)
    return clock.result()


def flower_app_run(config: FederatedConfig, out: Path, workers: int) -> tuple[float, float]:
    """Return the seconds of a run of `weft.federated.flower_app` in Flower's simulation, and of a round."""
    client, server = flower_app(config, out)
    began = time.perf_counter()
    simulated(server, client, config.clients, workers)
    total = time.perf_counter() - began
    return total, total / config.rounds


def measure(options: argparse.Namespace) -> None:
    """Print times of Weft and Flower, taking them in turn."""
    found: dict[str, list[tuple[float, float]]] = {}
    for repeat in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            config = config_in(home, rounds=options.rounds, clients=options.clients)
            found.setdefault("weft", []).append(weft_run(config, home / "weft", options.workers))
            found.setdefault("flower", []).append(flower_run(config, options.clients, options.workers))
            if options.flower_app:
                found.setdefault("flower_app", []).append(flower_app_run(config, home / "app", options.workers))
        print(f"repeat {repeat}: { ({name: one[-1] for name, one in found.items()}) }", flush=True)
    medians = {name: [statistics.median(one) for one in zip(*times, strict=True)] for name, times in found.items()}
    for name, (total, each) in medians.items():
        print(f"{name:12} total {total:7.2f} s   a round {each:6.3f} s")
    weft, flower = medians["weft"], medians["flower"]
    print(f"weft / flower: total {weft[0] / flower[0]:.2f}, a round {weft[1] / flower[1]:.2f}")


def accuracy(options: argparse.Namespace) -> None:
    """Print the accuracy of federated training, and of one client with all records and the same number of steps."""
    for seed in range(options.repeats):
        row = {}
        for name, clients in (("federated", 20), ("central", 1)):
            with tempfile.TemporaryDirectory() as folder:
                home = Path(folder)
                config = config_in(home, rounds=options.rounds, clients=clients, epochs=2, seed=seed)
                with Pool(f"local:{options.workers}") as pool, federated_folder(config, home / "out"):
                    result = run_federated(config, home / "out", pool, lambda text: None)
                row[name] = result.rounds[-1]["accuracy"]
        print(json.dumps({"seed": seed, **row, "difference": row["central"] - row["federated"]}), flush=True)


def main() -> None:
    """Parse the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["time", "accuracy"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flower-app", action="store_true")
    options = parser.parse_args()
    (measure if options.mode == "time" else accuracy)(options)


if __name__ == "__main__":
    main()
