"""Peak memory of a host's rank in the planner, compared with live tensors of a real step in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tools.live_memory import peak_of_step
from weft.comm.mesh import build_mesh
from weft.config.cluster import ClusterSpec
from weft.config.partitioning import bucket_bytes
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.planner.cost.machine import Tables
from weft.planner.estimator import estimate
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.parity import DecoderCase, local_microbatches

SPEC = DecoderSpec(vocab_size=1024, dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=192, max_seq_len=128)
SEQ_LEN, ROWS = 128, 4


PIPED = DecoderSpec(vocab_size=64, dim=128, num_layers=8, num_heads=4, num_kv_heads=4, ffn_dim=512, max_seq_len=16)
#: Gradients and activations never have their full size at the same time if a schedule runs most forwards first.
PIPELINES = (
    "pp=2 dp_shard=2 zero=1 schedule=interleaved microbatches=2 virtual_stages=4",
    "pp=2 dp_shard=2 zero=2 schedule=interleaved microbatches=8 virtual_stages=4",
    "pp=2 dp_replicate=2 microbatches=2",
    "pp=4 schedule=gpipe microbatches=4",
)


def planned_bytes(job: Job, plan: Plan) -> float:
    """Return the peak bytes in tensors of a CPU rank, in the planner's estimate."""
    cluster = ClusterSpec.parse(f"{plan.world_size}xcpu")
    job = replace(job, stack=replace(job.stack, bucket_params=bucket_bytes("cpu") // 4))
    return float(estimate(job, cluster, Columns.of([plan], job), Tables.of(cluster.device)).allocated_bytes[0])


@pytest.mark.parametrize("text", ["", "accumulation=2", "recompute=full", "recompute=selective"])
def test_peak_memory_matches_live_tensors(text: str) -> None:
    plan = Plan.parse(text)
    mesh, model = build_mesh(plan), build_decoder(SPEC)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward)
    ids = torch.randint(SPEC.vocab_size, (ROWS, SEQ_LEN))
    batch = {"input_ids": ids, "labels": ids.clone(), "positions": torch.arange(SEQ_LEN).repeat(ROWS, 1)}
    step(batch)  # the first step creates optimizer states
    job = Job(shape=Shape.of_decoder(SPEC), seq_len=SEQ_LEN, global_batch=ROWS)
    assert planned_bytes(job, plan) == pytest.approx(peak_of_step(step, batch), rel=0.03)


def pipeline_peak(text: str) -> int:
    """Return this rank's peak bytes in the third step."""
    mesh, model = build_mesh(Plan.parse(text)), build_decoder(PIPED)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward)
    case = DecoderCase(PIPED, global_batch=mesh.plan.microbatches * mesh.plan.dp_size, seq_len=16)
    batches = [local_microbatches(case.batch(index), mesh.plan, mesh.data.rank) for index in range(3)]
    for batch in batches[:2]:  # in the first step buckets do not yet have the order of gradients
        step(batch)
    return peak_of_step(step, batches[2])


@pytest.mark.full
@pytest.mark.parametrize("text", PIPELINES)
def test_peak_memory_of_pipelines_matches_live_tensors(text: str, ranks4) -> None:
    plan = Plan.parse(text)
    job = Job(shape=Shape.of_decoder(PIPED), seq_len=16, global_batch=plan.microbatches * plan.dp_size)
    assert planned_bytes(job, plan) == pytest.approx(max(ranks4.run(pipeline_peak, text)), rel=0.035)
