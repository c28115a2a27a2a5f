"""What a plan keeps: bytes per parameter between steps, and saved activations; measured, and what the planner says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from weft.mesh import build_mesh
from weft.models import build_decoder
from weft.parallel import parallelize
from weft.planner import estimate
from weft.planner.cost import layer_bytes
from weft.planner.cost.machine import Tables
from weft.planner.measured.host import host_memory
from weft.planner.space import Columns, Job, Shape, Stack
from weft.spec import ClusterSpec, DecoderSpec
from weft.spec.plan import Plan
from weft.spec.shares import batch_unit, bucket_bytes
from weft.testing.memory.live_tensors import LiveTensors
from weft.testing.memory.step_bytes import peak_of_step
from weft.train import TrainStep
from weft.train.step import live_bytes
from weft.train.tasks import model_forward, token_cross_entropy

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
    """What the planner counts for AdamW: weights, fp32 gradients, two fp32 moments, and masters where rounded."""
    shape = Shape.of_decoder(MODEL)
    cluster = ClusterSpec.parse(f"{plan.world_size}xh100")
    job = Job(shape=shape, seq_len=8, global_batch=batch_unit(plan.dp_size, plan.microbatches_per_step))
    memory = estimate(job, cluster, Columns.of([plan], job), Tables.of(cluster.device)).memory
    each = {name: float(memory[name][0]) / shape.num_params for name in ("parameters", "gradients", "optimizer")}
    return PerParameter(each["parameters"], each["gradients"], each["optimizer"])


#: Plans of two ranks whose saved activations are measured, under each policy; sequences and tokens of the batch.
SAVING = ("dp_replicate=2", "tp=2", "tp=2 sp=on")
SAVED_POLICIES = ("none", "attention", "selective", "full")
_ROWS, _TOKENS = 2, 128
_SAVING_MODEL = DecoderSpec(
    vocab_size=512, dim=256, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=768, max_seq_len=_TOKENS, tied=True
)


def planned_saving(plan: Plan) -> float:
    """Bytes that one layer of the project's decoder keeps for backward, per token and unit of width, by the planner."""
    shape = Shape.of_decoder(_SAVING_MODEL)
    job = Job(shape=shape, seq_len=_TOKENS, global_batch=_ROWS * plan.dp_size)
    return float(layer_bytes(job, Columns.of([plan], job)).kept[0]) / (_ROWS * _TOKENS * shape.hidden)


def measure_saving(plan_text: str) -> float:
    """The same, of tensors that are alive after forward: what two layers more add."""
    two, four = (_alive_bytes(Plan.parse(plan_text), layers) for layers in (2, 4))
    return (four - two) / 2 / (_ROWS * _TOKENS * _SAVING_MODEL.dim)


def _alive_bytes(plan: Plan, num_layers: int) -> int:
    """Bytes of what forward and loss made and did not let go, without parameters."""
    mesh = build_mesh(plan)
    model = build_decoder(dataclasses.replace(_SAVING_MODEL, num_layers=num_layers))
    parallelize(model, mesh)
    ids = torch.zeros(_ROWS, _TOKENS, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "positions": torch.arange(_TOKENS).repeat(_ROWS, 1)}
    held = (param.to_local() if isinstance(param, DTensor) else param for param in model.parameters())
    with LiveTensors(held) as live:
        loss_sum, _ = token_cross_entropy(model_forward(model, batch), batch)
        found = live.now
    loss_sum.backward()  # some engines wait for it
    return found


#: Plans whose fullest moment is measured, by what fills it; models, sequences and tokens of the batch.
_WIDE_VOCABULARY = dataclasses.replace(_SAVING_MODEL, vocab_size=16384, tied=False)
_MANY_PARAMETERS = dataclasses.replace(_SAVING_MODEL, dim=384, num_layers=8, num_kv_heads=4, ffn_dim=1536, tied=False)
FULLEST: dict[str, tuple[DecoderSpec, int, int]] = {
    **dict.fromkeys(("dp_replicate=2", "tp=2", "tp=2 sp=on"), (_WIDE_VOCABULARY, 4, _TOKENS)),
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


def planned_peak(plan: Plan, of_host: bool = False) -> dict[str, float]:
    """Bytes by class at the fullest moment of a step with a plan of `FULLEST`, by the planner or its half for hosts."""
    spec, rows, tokens = FULLEST[plan.format()]
    cluster = ClusterSpec.parse(f"{plan.world_size}xh100")
    # What is measured runs on a CPU, with its buckets.
    stack = Stack(bucket_params=bucket_bytes("cpu") // 4)
    job = Job(shape=Shape.of_decoder(spec), seq_len=tokens, global_batch=rows * plan.dp_size, stack=stack)
    columns = Columns.of([plan], job)
    memory = host_memory(job, columns) if of_host else estimate(job, cluster, columns, Tables.of(cluster.device)).memory
    classes = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    return {name: float(memory[name][0]) for name in classes}


def measure_peak(plan_text: str) -> int:
    """Bytes of live tensors at that moment, on this rank of those that are joined."""
    plan = Plan.parse(plan_text)
    spec, rows, tokens = FULLEST[plan.format()]
    mesh = build_mesh(plan)
    model = build_decoder(spec)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward)
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "positions": torch.arange(tokens).repeat(rows, 1)}
    step(batch)  # makes the optimizer's states
    return peak_of_step(step, batch)


def measure(plan_text: str) -> PerParameter:
    """After one step with AdamW, on this rank of those that are joined."""
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
