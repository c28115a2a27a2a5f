"""Exact bytes of live tensors in a step, on any device, without a GPU's allocator."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from weft.comm.mesh import build_mesh
from weft.config.cluster import ClusterSpec
from weft.config.partitioning import batch_unit, bucket_bytes
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.adapters import add_adapter
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.planner.cost.machine import Tables
from weft.planner.cost.memory_terms import layer_bytes
from weft.planner.estimator import estimate
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape, Stack
from weft.planner.space.trained_part import AdapterSize
from weft.private_torch import TorchDispatchMode, storage_key, tree_leaves
from weft.train.step.errors import live_bytes
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.private_torch import storage_behind


class LiveTensors(TorchDispatchMode):
    """Tracks, while active, the storages that operations create.

    Storages of `known` tensors, such as parameters, are not counted. Operations of compiled code are not tracked.

    Attributes:
        now: bytes of live storages, including storages that autograd's graph references.
        peak: maximum of `now` after any operation.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.peak = 0
        self._known = {storage_key(tensor.untyped_storage()) for tensor in known}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        self._made = {key: value for key, value in self._made.items() if not value[0].expired()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage_key(storage) not in self._known:
                    self._made[storage_key(storage)] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return outputs


# Bytes that autograd saves for backward, also in compiled code, whose operations are not visible otherwise.


def saved_bytes(forward: Callable[[], object], known: Iterable[torch.Tensor]) -> int:
    """Return the bytes of storages that autograd saves in one call to `forward`, without those of `known`."""
    ignored = {storage_key(tensor.untyped_storage()) for tensor in known}
    found: dict[int, torch.UntypedStorage] = {}  # keeps storages alive, so that no address is reused

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (key := storage_key(storage)) not in ignored:
            found[key] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in found.values())


# Peak bytes of live tensors in one training step, including tensors that exist before it.


class StepBytes(LiveTensors):
    """Also counts tensors that exist before a step, and tensors that it reads but that were created without dispatch.

    Storages count with their current size: storages of gathered parameters are resized to zero, and stay alive.
    """

    def __init__(self, begins_with: Iterable[torch.Tensor], outside: Iterable[torch.Tensor]):
        super().__init__(outside)
        for tensor in begins_with:
            self._note(tensor)

    @property
    def now(self) -> int:
        self._made = {key: value for key, value in self._made.items() if not value[0].expired()}
        alive = (storage_behind(ref.cdata) for ref, _ in self._made.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, tensor: torch.Tensor) -> None:
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self._known:
            self._made.setdefault(storage_key(storage), (StorageWeakRef(storage), storage.nbytes()))


def peak_of_step(step: TrainStep, batch: Any) -> int:
    """Return this rank's peak bytes in a step, without the batch. Trains one step."""
    gc.collect()
    parts = [batch] if isinstance(batch, dict) else list(batch)
    given = [leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]
    watch = StepBytes(_states(step), given)
    with watch:
        step(batch)
    return watch.peak


def _states(step: TrainStep) -> Iterator[torch.Tensor]:
    """Yield weights, gradients and optimizer states. Callers must not keep references to them."""
    pieces = [param for group in step.optimizer.param_groups for param in group["params"]]
    for param in (*step.model.parameters(), *pieces):
        yield param.detach()
        if param.grad is not None:
            yield param.grad.detach()
    for state in step.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    yield from step.local_gradients()


# Peak memory of a step with an adapter, measured and planned.

_MODEL = DecoderSpec(
    vocab_size=512, dim=256, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=768, max_seq_len=128, tied=False
)
_RANK, _ROWS, _TOKENS = 8, 2, 32


def adapter_peaks(text: str, base: str) -> tuple[float, float]:
    """Return the measured peak bytes of live tensors in a step on one rank, and the planner's estimate."""
    plan = Plan.parse(text)
    mesh, model = build_mesh(plan), build_decoder(_MODEL)
    add_adapter(model, rank=_RANK, base=base)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], fused=True)
    step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward)
    ids = torch.zeros(_ROWS, _TOKENS, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "positions": torch.arange(_TOKENS).repeat(_ROWS, 1)}
    step(batch)  # creates the optimizer's states
    live = peak_of_step(step, batch)
    shape, cluster = Shape.of_decoder(_MODEL), ClusterSpec.parse("1xh100")
    job = Job(
        shape=shape,
        seq_len=_TOKENS,
        global_batch=_ROWS,
        stack=Stack(bucket_params=bucket_bytes("cpu") // 4),
        adapter=AdapterSize.of_shape(shape, _RANK, base),
    )
    memory = estimate(job, cluster, Columns.of([plan], job), Tables.of(cluster.device)).memory
    classes = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    return live, sum(float(memory[name][0]) for name in classes)


# Persistent memory of a plan, measured and planned: bytes per parameter between steps, and saved activations.

MODEL = DecoderSpec(
    vocab_size=2048, dim=128, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=384, max_seq_len=32, tied=True
)
LAYOUTS = {
    2: ("dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=3"),
    4: (
        "dp_shard=4 zero=1",
        "dp_shard=4 zero=1 accumulation=2",
        "dp_shard=4 zero=2",
        "dp_shard=4 zero=3",
        "dp_replicate=2 dp_shard=2 zero=1",
        "dp_replicate=2 dp_shard=2 zero=2",
        "dp_replicate=2 dp_shard=2 zero=3",
    ),
}
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class PerParameter:
    """Bytes per parameter on one rank."""

    params: float
    grads: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.params + self.grads + self.optimizer


def formula(plan: Plan) -> PerParameter:
    """Return the planner's count for AdamW: weights, fp32 gradients, two fp32 moments, masters of rounded weights."""
    shape = Shape.of_decoder(MODEL)
    cluster = ClusterSpec.parse(f"{plan.world_size}xh100")
    job = Job(shape=shape, seq_len=8, global_batch=batch_unit(plan.dp_size, plan.microbatches_per_step))
    memory = estimate(job, cluster, Columns.of([plan], job), Tables.of(cluster.device)).memory
    each = {name: float(memory[name][0]) / shape.num_params for name in ("parameters", "gradients", "optimizer")}
    return PerParameter(each["parameters"], each["gradients"], each["optimizer"])


#: Plans of two ranks whose saved activations are measured, under each policy; sequences and tokens of the batch.
SAVING = ("dp_replicate=2", "tp=2", "tp=2 sp=on")
SAVED_POLICIES = ("none", "attention", "selective", "full")
_PARAMETER_ROWS, _PARAMETER_TOKENS = 2, 128
_SAVING_MODEL = DecoderSpec(
    vocab_size=512,
    dim=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=768,
    max_seq_len=_PARAMETER_TOKENS,
    tied=True,
)


def planned_saving(plan: Plan) -> float:
    """Return the planner's bytes that one decoder layer saves for backward, per token and unit of width."""
    shape = Shape.of_decoder(_SAVING_MODEL)
    job = Job(shape=shape, seq_len=_PARAMETER_TOKENS, global_batch=_PARAMETER_ROWS * plan.dp_size)
    return float(layer_bytes(job, Columns.of([plan], job)).kept[0]) / (
        _PARAMETER_ROWS * _PARAMETER_TOKENS * shape.hidden
    )


def measure_saving(plan_text: str) -> float:
    """Measure the value of `planned_saving` from live tensors after forward.

    It is half the difference between models of four layers and of two.
    """
    two, four = (_alive_bytes(Plan.parse(plan_text), layers) for layers in (2, 4))
    return (four - two) / 2 / (_PARAMETER_ROWS * _PARAMETER_TOKENS * _SAVING_MODEL.dim)


def _alive_bytes(plan: Plan, num_layers: int) -> int:
    """Return the bytes of tensors that forward and loss created and did not free, without parameters."""
    mesh = build_mesh(plan)
    model = build_decoder(dataclasses.replace(_SAVING_MODEL, num_layers=num_layers))
    parallelize(model, mesh)
    ids = torch.zeros(_PARAMETER_ROWS, _PARAMETER_TOKENS, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "positions": torch.arange(_PARAMETER_TOKENS).repeat(_PARAMETER_ROWS, 1)}
    held = (param.to_local() if isinstance(param, DTensor) else param for param in model.parameters())
    with LiveTensors(held) as live:
        loss_sum, _ = token_cross_entropy(model_forward(model, batch), batch)
        found = live.now
    loss_sum.backward()  # some engines wait for it
    return found


#: Plans whose peak is measured, grouped by the dominant part; models, sequences and tokens of the batch.
_WIDE_VOCABULARY = dataclasses.replace(_SAVING_MODEL, vocab_size=16384, tied=False)
_MANY_PARAMETERS = dataclasses.replace(_SAVING_MODEL, dim=384, num_layers=8, num_kv_heads=4, ffn_dim=1536, tied=False)
FULLEST: dict[str, tuple[DecoderSpec, int, int]] = {
    **dict.fromkeys(("dp_replicate=2", "tp=2", "tp=2 sp=on"), (_WIDE_VOCABULARY, 4, _PARAMETER_TOKENS)),
    **dict.fromkeys(
        (
            "dp_replicate=2 recompute=full",
            "dp_shard=2 zero=1",
            "dp_shard=2 zero=2",
            "dp_shard=2 zero=3",
            "dp_shard=2 zero=3 reshard=after_step",
        ),
        (_MANY_PARAMETERS, 1, 8),
    ),
}


def planned_peak(plan: Plan) -> dict[str, float]:
    """Return planned bytes by class at the peak of a step with a plan of `FULLEST`."""
    spec, rows, tokens = FULLEST[plan.format()]
    cluster = ClusterSpec.parse(f"{plan.world_size}xh100")
    # The measured step runs on a CPU, with the CPU's bucket size.
    stack = Stack(bucket_params=bucket_bytes("cpu") // 4)
    job = Job(shape=Shape.of_decoder(spec), seq_len=tokens, global_batch=rows * plan.dp_size, stack=stack)
    columns = Columns.of([plan], job)
    memory = estimate(job, cluster, columns, Tables.of(cluster.device)).memory
    classes = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    return {name: float(memory[name][0]) for name in classes}


def measure_peak(plan_text: str) -> int:
    """Measure the peak bytes of live tensors in a step on this rank."""
    plan = Plan.parse(plan_text)
    spec, rows, tokens = FULLEST[plan.format()]
    mesh = build_mesh(plan)
    model = build_decoder(spec)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward)
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "positions": torch.arange(tokens).repeat(rows, 1)}
    step(batch)  # creates the optimizer's states
    return peak_of_step(step, batch)


def measure(plan_text: str) -> PerParameter:
    """Measure the bytes per parameter on this rank after one step with AdamW."""
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model = build_decoder(MODEL)
    num_params = sum(param.numel() for param in model.parameters())
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    step({"input_ids": ids, "labels": ids, "positions": torch.arange(8).repeat(2, 1)})
    live = live_bytes(model, step.optimizer)
    return PerParameter(live.parameters / num_params, live.gradients / num_params, live.optimizer / num_params)
