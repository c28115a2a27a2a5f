"""The fullest moment of a step with an adapter, measured and planned."""

from __future__ import annotations

import torch

from weft.mesh import build_mesh
from weft.models import build_decoder
from weft.models.adapters import add_adapter
from weft.parallel import parallelize
from weft.planner import estimate
from weft.planner.cost.machine import Tables
from weft.planner.space import AdapterSize, Columns, Job, Shape, Stack
from weft.spec import ClusterSpec, DecoderSpec
from weft.spec.plan import Plan
from weft.spec.shares import bucket_bytes
from weft.testing.memory.step_bytes import peak_of_step
from weft.train import TrainStep
from weft.train.tasks import model_forward, token_cross_entropy

_MODEL = DecoderSpec(
    vocab_size=512, dim=256, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=768, max_seq_len=128, tied=False
)
_RANK, _ROWS, _TOKENS = 8, 2, 32


def adapter_peaks(text: str, base: str) -> tuple[float, float]:
    """Return the bytes of live tensors at the fullest moment of a step on one rank, and what the planner expects.

    Args:
        text: of the plan.
        base: how frozen linear layers keep their weights.
    """
    plan = Plan.parse(text)
    mesh, model = build_mesh(plan), build_decoder(_MODEL)
    add_adapter(model, rank=_RANK, base=base)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], fused=True)
    step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward)
    ids = torch.zeros(_ROWS, _TOKENS, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "positions": torch.arange(_TOKENS).repeat(_ROWS, 1)}
    step(batch)  # makes the optimizer's states
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
