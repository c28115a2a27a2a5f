"""Stage "ranks": several ranks on one GPU train like one process on the CPU.

NCCL refuses two ranks on one device, so tensors go through host memory (comm/links/staged.py). Every plan can be tried,
with the sums of ranks on CPUs. Real NCCL calls are then tried with a different host ID for each rank.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.gpu.cases import Case, Figures, Setting, Skipped, require
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan, plan_fields
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.verify.matrix import covering, legal, row_of, sample
from weft.verify.parity import DecoderCase, local_microbatches, several_buckets, train_plain
from weft.verify.rank_pool import RankPool

SPEC = DecoderSpec(
    vocab_size=64, dim=32, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=64, max_seq_len=32, num_experts=4,
    expert_ffn_dim=32, first_moe_layer=2, balance="none",
)  # fmt: skip
CASE = DecoderCase(SPEC, num_steps=3, global_batch=8, seq_len=16)
#: Plans whose ranks, streams or orders NCCL must support.
NCCL_PLANS = {
    2: (
        "dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=3", "tp=2 sp=on",
        "tp=2 sp=on tp_chunks=2", "cp=2 cp_mode=ring", "dp_shard=2 ep=2",
    ),
    3: ("pp=3 microbatches=4",),
}  # fmt: skip


def train_on(plan_text: str, device: str) -> tuple[list[float], list[float]]:
    """On one rank of a pool: return losses and norms of a short training in float64.

    device="cuda" gives each rank its own.
    """
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan, f"cuda:{dist.get_rank()}" if device == "cuda" else device)
    model = CASE.model()
    with several_buckets(model):
        parallelize(model, mesh)
    step = TrainStep(model, CASE.optimizer_of(model), CASE.loss, mesh, forward=CASE.forward, max_grad_norm=1.0)
    metrics = [step(local_microbatches(CASE.batch(index), plan, mesh.data.rank)) for index in range(CASE.num_steps)]
    return [one.loss for one in metrics], [one.grad_norm for one in metrics]


def use_separate_hosts(device: str) -> None:
    """On one rank: make NCCL treat each rank as a separate host. Call it before the first collective."""
    os.environ.update(
        NCCL_HOSTID=f"rank{dist.get_rank()}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_SOCKET_IFNAME="lo",
        NCCL_ALGO="Ring", NCCL_PROTO="Simple",
    )  # fmt: skip
    dist.all_reduce(torch.ones(1, device=device))


def _differences(pool: RankPool, plans: list[str], device: str) -> dict[str, float]:
    """Return the largest relative difference of each plan from one process on the CPU."""
    plain = train_plain(CASE)
    expected = torch.tensor([plain.losses, plain.grad_norms], dtype=torch.float64)
    found: dict[str, float] = {}
    for plan in plans:
        ours = torch.tensor(pool.run(train_on, plan, device)[0], dtype=torch.float64)
        found[plan] = float(((ours - expected).abs() / expected.abs()).max())
        require(found[plan], 1e-10, f"{plan}: losses or norms apart from one process")
    return found


def chosen_plans(num_ranks: int, count: int) -> list[str]:
    """Return a few plans that cover every value of every field, and random others."""
    plans = legal(num_ranks, model=SPEC, global_batch=CASE.global_batch, seq_len=CASE.seq_len, passes=(1, 2))
    covered = covering([row_of(plan) for plan in plans], [(name,) for name in plan_fields()])
    some = [plans[index] for index in covered]
    return [plan.format() for plan in (*sample(some, count), *sample(plans, max(0, count - len(some))))]


def _staged(setting: Setting, num_ranks: int, count: int) -> Figures:
    backend = "cpu:gloo,cuda:gloo" if setting.is_cuda else "gloo"
    plans = chosen_plans(num_ranks, count)
    with RankPool(num_ranks, timeout_s=240, backend=backend) as pool:
        found = _differences(pool, plans, "cuda:0" if setting.is_cuda else "cpu")
    return {"plans": len(found), "largest difference": max(found.values())}


def two_ranks(setting: Setting) -> Figures:
    """Plans of two ranks, staged through the host."""
    return _staged(setting, 2, 3 if setting.small else 24)


def four_ranks(setting: Setting) -> Figures:
    """Plans of four ranks, staged through the host."""
    return _staged(setting, 4, 2 if setting.small else 16)


def nccl_as_hosts(setting: Setting) -> Figures:
    """Real NCCL between ranks of one GPU, each with its own host ID."""
    setting.need_cuda("NCCL")
    found: dict[str, float] = {}
    for num_ranks, plans in NCCL_PLANS.items():
        with RankPool(num_ranks, timeout_s=120, backend="cpu:gloo,cuda:nccl") as pool:
            pool.run(use_separate_hosts, "cuda:0")
            found |= _differences(pool, list(plans), "cuda:0")
    return {"plans": len(found), "largest difference": max(found.values())}


def nccl_on_several(setting: Setting) -> Figures:
    """Real NCCL between all GPUs, four at most."""
    count = min(torch.cuda.device_count(), 4) if setting.is_cuda else 0
    if count < 2:
        raise Skipped("this needs two GPUs or more")
    found: dict[str, float] = {}
    for num_ranks in (2, 3, 4)[: count - 1]:
        plans = list(NCCL_PLANS.get(num_ranks, ())) or chosen_plans(num_ranks, 12)
        with RankPool(num_ranks, timeout_s=120, backend="cpu:gloo,cuda:nccl") as pool:
            found |= _differences(pool, plans, "cuda")
    return {"GPUs": count, "plans": len(found), "largest difference": max(found.values())}


def tied_ends(setting: Setting) -> Figures:
    """A pipeline of three whose ends share a weight: ranks that make different groups must not wait for each other."""
    backend = "cpu:gloo,cuda:gloo" if setting.is_cuda else "gloo"
    with RankPool(3, timeout_s=60, backend=backend) as pool:
        losses = pool.run(train_tied, "pp=3 microbatches=4", "cuda:0" if setting.is_cuda else "cpu")
    require(max(losses) - min(losses), 0.0, "ranks disagree on the loss")
    return {"loss": losses[0]}


def train_tied(plan_text: str, device: str) -> float:
    """On one rank: return the loss after two steps of a model with tied ends."""
    case = replace(CASE, spec=replace(SPEC, num_experts=0, tied=True, num_layers=3))
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan, device)
    model = case.model()
    parallelize(model, mesh)
    step = TrainStep(model, case.optimizer_of(model), case.loss, mesh, forward=case.forward)
    step(local_microbatches(case.batch(0), plan, mesh.data.rank))
    return step(local_microbatches(case.batch(1), plan, mesh.data.rank)).loss


CASES = [
    Case("ranks", "two ranks", two_ranks, 300),
    Case("ranks", "four ranks", four_ranks, 300),
    Case("ranks", "tied ends of a pipeline", tied_ends, 120),
    Case("ranks", "NCCL, each rank a host", nccl_as_hosts, 400),
    Case("ranks", "NCCL on several GPUs", nccl_on_several, 400),
]
