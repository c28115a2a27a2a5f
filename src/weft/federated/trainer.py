"""Local training of clients: the model is built once, and each client starts from the server's weights.

`train_client` is the function that a pool's workers call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.comm.gpu_settings import pick_device
from weft.comm.mesh import build_mesh
from weft.config.files import parse_config
from weft.config.partitioning import microbatch_samples
from weft.config.plan import Plan
from weft.data.order.stream import permutation
from weft.devices import access
from weft.errors import CommError, ConfigError
from weft.federated.config import FederatedConfig
from weft.federated.updates import ClientUpdate, Tensors, read_tensors, write_update
from weft.optim.build import build_optimizer
from weft.optim.schedule import lr_factor
from weft.parallel.state.gradients import data_parallel
from weft.train.batches.data_share import MapDataset, Share
from weft.train.batches.microbatches import Microbatches
from weft.train.engine import Evaluation, derive_seed
from weft.train.folder import RunFolder
from weft.train.losses import GlobalBatchLoss, GroupLoss, LossFn
from weft.train.privacy.records import refuse_streams, single_records
from weft.train.states.model_state import capture_model
from weft.train.step.evaluation import evaluate_run
from weft.train.step.train_step import TrainStep
from weft.train.tasks.registry import find_task
from weft.train.weights.built_model import built_model
from weft.train.weights.run_adapter import set_values
from weft.verify.rank_pool import RankError, RankPool

#: Files of a federated run's folder.
STATE, CLIENTS, RUN = "state.safetensors", "clients.npz", "federated.json"
#: Seconds after which ranks of a client count as hung. The pool's timeout is usually shorter.
_LONGEST_S = 24 * 3600.0
#: First part of the seeds of local steps.
_STEPS = 4


class ClientTrainer:
    """A model that trains one client after another. Nothing of a client remains for the next one.

    Args:
        config: the federated run.
        folder: its folder, with the task's prepared data.
        alone: build the model on this process, whatever the plan, to evaluate it.

    Attributes:
        batch: records of a local step.
        num_ranks: ranks of the plan.

    Raises:
        ConfigError: if the task's batches are not made of single records.
    """

    def __init__(self, config: FederatedConfig, folder: Path, *, alone: bool = False):
        self.config, self._base = config, parse_config(config.base, "config").config
        self.task = find_task(self._base)
        self.task.open(RunFolder(folder, resolved=self._base))
        refuse_streams(self.task, f"task.name={self._base.task.name}")
        self.batch = self._base.train.global_batch
        plan, device = Plan.parse(self._base.plan, 1), pick_device(self._base.launch.device, 0)
        if plan.world_size > 1 and access.is_accelerator(device):
            raise ConfigError(
                f"plan={plan}: clients of several ranks train on CPUs. Use launch.device=cpu, or plan=dp_replicate=1."
            )
        self.num_ranks = plan.world_size
        self.mesh = build_mesh(plan.replace(dp_replicate=1, dp_shard=1, zero=0) if alone else plan, device)
        self.model = built_model(self.task, self._base, self.mesh)
        self._engine = data_parallel(self.model)
        named = [(name, param) for name, param in self.model.named_parameters()]
        optimizer = build_optimizer(named, self._base.full_optimizer, self._base.seed)
        self._anchors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._step = TrainStep(
            self.model, optimizer, self._loss(), self.mesh, forward=self.task.forward, reads_late=False,
            max_grad_norm=self._base.optimizer.max_grad_norm, nominal_tokens=self.task.nominal_count(),
            check_batch=self._base.train.check_batch,
        )  # fmt: skip
        self._step.wait_for_weights()
        self._groups = [
            copy.deepcopy({k: v for k, v in one.items() if k != "params"}) for one in optimizer.param_groups
        ]
        saved_name = self._engine.axes.saved_name
        #: Names of the tensors that clients send: trained weights and floating-point buffers.
        self._sent = self._names()
        #: Initial values of the buffers that clients do not send, such as integer counters.
        self._own_buffers = [
            (one, one.clone()) for name, one in self.model.named_buffers() if saved_name(name) not in self._sent
        ]

    @cached_property
    def samples(self) -> MapDataset:
        """The training records of all clients."""
        return single_records(self.task, f"task.name={self._base.task.name}")

    def weights(self) -> Tensors:
        """Return copies of the trained weights and floating-point buffers by name, on the CPU. All ranks call it."""
        self._step.wait_for_weights()
        found = capture_model(self.model)
        return {name: found[name].detach().cpu().clone() for name in self._sent}

    @property
    def float_buffers(self) -> list[str]:
        """Names of the buffers that clients average, such as running statistics."""
        trained = {self._engine.axes.saved_name(name) for name in self._engine.local_weights()}
        return [name for name in self._sent if name not in trained]

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the model to the server's weights, and remove the last client's optimizer state and counters."""
        optimizer = self._step.optimizer
        optimizer.state.clear()
        for group, first in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(first))
        set_values(self.model, weights)
        for buffer, first in self._own_buffers:
            buffer.copy_(first)
        if self.config.server.method == "fedprox":
            trained = [param for param in self.model.parameters() if param.requires_grad]
            self._anchors = [(param, param.detach().clone()) for param in trained]

    def train(
        self, weights: Mapping[str, torch.Tensor], records: np.ndarray, round_: int, client: int, steps: int
    ) -> ClientUpdate:
        """Train a client, and return its update.

        Args:
            weights: the server's weights.
            records: the client's records, int64.
            round_: rounds done before.
            client: index of the client.
            steps: local steps.
        """
        with one_thread():
            self.set_weights(weights)
            losses = [self._local_step(records, round_, client, step) for step in range(steps)]
            after = self.weights()
        delta = {name: weights[name] - after[name] for name in after}
        return ClientUpdate(round_, client, len(records), sum(losses) / len(losses), delta)

    def _local_step(self, records: np.ndarray, round_: int, client: int, step: int) -> float:
        config, base = self.config, self._base
        size = min(self.batch, len(records))
        chosen: list[int] = []
        while len(chosen) < size:
            epoch, start = divmod(step * size + len(chosen), len(records))
            order = permutation(len(records), "client", config.seed, round_, client, epoch)
            end = min(len(records), start + size - len(chosen))
            chosen += [int(records[order(place)]) for place in range(start, end)]
        micro = self.mesh.plan.microbatches_per_step
        own = microbatch_samples(size, self.mesh.data.size, micro, self.mesh.data.rank)
        batch = Microbatches.of_samples(lambda at: self.samples[chosen[at]], own, self.task.collate, total=size)
        factor = lr_factor(round_, config.rounds, base.schedule)
        for group in self._step.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        key = derive_seed(config.seed, _STEPS, round_, client, step)
        seeds = [derive_seed(key, index) for index in range(micro)]
        return self._step(batch, seeds, key).loss

    def _loss(self) -> LossFn:
        """Return the task's loss, with FedProx's term: mu / 2 times the squared distance from the server's weights."""
        loss, mu = self.task.loss, self.config.server.mu
        if self.config.server.method != "fedprox":
            return loss
        if isinstance(loss, GlobalBatchLoss | GroupLoss):
            raise ConfigError(
                "server.method=fedprox: the task's loss compares samples, and the proximal term is added to sums over "
                "samples. Use fedavg."
            )

        def proximal(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
            total, count = loss(output, batch)
            distance = sum(((param - first).square().sum() for param, first in self._anchors), total.new_zeros(()))
            return total + count * (mu / 2) * distance, count

        return proximal

    def evaluate(self, weights: Mapping[str, torch.Tensor]) -> Evaluation | None:
        """Return the evaluation of weights on the task's evaluation set, or None without one."""
        share = Share(self.batch, self.mesh.plan.microbatches_per_step)
        batches = self.task.eval_batches(share)
        if batches is None:
            return None
        with one_thread():
            self.set_weights(weights)
            return evaluate_run(self.model, batches, self.mesh, self.task)

    def _names(self) -> list[str]:
        name_of = self._engine.axes.saved_name
        names = {*map(name_of, self._engine.local_weights()), *(name_of(one) for one, _ in self.model.named_buffers())}
        slices = self._engine.model_slices()
        return list(dict.fromkeys(one.name for one in slices if one.name in names and one.flat.is_floating_point()))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread in the context: the sums of several threads depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# In a worker of a pool.


class _Warm:
    """The trainer of this process and the weights of its round; or the ranks of a plan of several, which have them."""

    ranks: RankPool | None = None
    folder: Path | None = None
    trainer: ClientTrainer
    records: list[np.ndarray]
    round_ = -1
    weights: Tensors


def write_clients(path: Path, records: list[np.ndarray]) -> None:
    """Write the records of each client."""
    ends = np.cumsum([len(one) for one in records])
    with path.open("wb") as file:
        np.savez(file, records=np.concatenate(records), ends=ends)


def read_clients(path: Path) -> list[np.ndarray]:
    """Return the records of each client, int64."""
    with np.load(path, allow_pickle=False) as file:
        return np.split(file["records"], file["ends"][:-1])


def train_client(item: Mapping[str, Any]) -> dict[str, Any]:
    """Train a client in this process, or on ranks that it starts once, and write its update.

    Args:
        item: "folder" of the run, "round", "client", its number of "steps", and the "ranks" of the plan.

    Raises:
        CommError: if one of the ranks failed, with its error in one line.
    """
    if item["ranks"] == 1:
        _train(item)
    else:
        if _Warm.ranks is None or _Warm.ranks.num_ranks != item["ranks"]:
            _Warm.ranks = RankPool(item["ranks"], timeout_s=_LONGEST_S)
        try:
            _Warm.ranks.run(_train, item)
        except RankError as error:
            reason = error.said or str(error).strip().rpartition("\n")[2]
            raise CommError(reason) from error
    return {"client": item["client"]}


def _train(item: Mapping[str, Any]) -> None:
    folder, round_, client = Path(item["folder"]), int(item["round"]), int(item["client"])
    if _Warm.folder != folder:
        config = FederatedConfig.model_validate_json((folder / RUN).read_bytes())
        _Warm.trainer, _Warm.records = ClientTrainer(config, folder), read_clients(folder / CLIENTS)
        _Warm.folder, _Warm.round_ = folder, -1
    if _Warm.round_ != round_:
        weights, about = read_tensors(folder / STATE, "weights/")
        if about["round"] != round_:
            raise ValueError(f"the server is in round {about['round']}, and the client is to train round {round_}")
        _Warm.weights, _Warm.round_ = weights, round_
    update = _Warm.trainer.train(_Warm.weights, _Warm.records[client], round_, client, int(item["steps"]))
    if _Warm.trainer.mesh.rank == 0:
        write_update(update_file(folder, round_, client), update)


def update_file(folder: Path, round_: int, client: int) -> Path:
    """Return the file of a client's update."""
    return folder / "rounds" / f"{round_:06d}" / f"client_{client}.safetensors"
