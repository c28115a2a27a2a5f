"""Checkpoints of other trainers: torch's are written by torch, DeepSpeed's follow its documented layout."""

from __future__ import annotations

import math
import sys
import types
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

import weft
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan

STEPS = 3
NAMES = ("a.weight", "a.bias", "b.weight")


class Small(nn.Module):
    """Small model with odd sizes, so that no sharding divides evenly, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 13)
        self.b = nn.Linear(13, 5, bias=False)
        self.register_buffer("count", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def train_fsdp2(folder: str, flatten: bool) -> dict[str, torch.Tensor]:
    """Train FSDP2, save, and train one more step; return full weights and moments of both, on each rank."""
    rank = torch.distributed.get_rank()
    model = small()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        model(batch(number, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS):
        step(number)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, states = get_state_dict(model, optimizer, options=options)
    extra = {"rng": torch.get_rng_state(), "epoch": 1}
    saved = {"model": weights, "optimizer": states, "step": STEPS, "extra": extra}
    dcp.save(saved, checkpoint_id=folder)
    found = {name: one.full_tensor().clone() for name, one in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{kind}"] = optimizer.state[parameter][kind].full_tensor().clone()
    step(STEPS)
    after = {f"after/{name}": one.full_tensor().clone() for name, one in model.named_parameters()}
    return found | after


def resume_imported(folder: str, plan_text: str) -> dict[str, torch.Tensor]:
    """Load an imported checkpoint in Weft and take the next step; return full weights, on each rank."""
    plan = Plan.parse(plan_text)
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    model = run.parallelize(Small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = run.train_step(model, optimizer, lambda output, _: (output.pow(2).sum(), output.numel()), max_grad_norm=0.0)
    loaded = run.load(folder, model=model, optimizer=step)
    assert loaded is not None
    assert loaded.step == STEPS
    step([batch(STEPS, run.mesh.data.rank)])
    return run.full_state_dict(model, everywhere=True)


def deepspeed_names() -> dict[str, types.ModuleType]:
    """Return modules with DeepSpeed's class names, which its pickles refer to."""
    said = {
        "deepspeed.runtime.fp16.loss_scaler": "LossScaler",
        "deepspeed.runtime.zero.config": "ZeroStageEnum",
        "deepspeed.utils.tensor_fragment": "fragment_address",
    }
    modules: dict[str, types.ModuleType] = {}
    for name in said:
        parts = name.split(".")
        modules |= {".".join(parts[:end]): types.ModuleType(".".join(parts[:end])) for end in range(1, len(parts) + 1)}
    for name, kind in said.items():
        bases: tuple[type, ...] = (int,) if kind == "ZeroStageEnum" else ()
        setattr(modules[name], kind, type(kind, bases, {"__module__": name, "__qualname__": kind}))
    return modules


class _Enum:
    """Pickle like an enum: the class, called with the number."""

    def __init__(self, kind: type, value: int):
        self.kind, self.value = kind, value

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return self.kind, (self.value,)


def write_zero(folder: Path, stage: int, world_size: int, *, gaps: bool = False) -> dict[str, torch.Tensor]:
    """Write a checkpoint in the layout of DeepSpeed 0.19 (see zero_to_fp32.py); return its tensors."""
    groups = [["a.weight", "b.weight"], ["a.bias"]]
    model = small()
    whole = {name: one.detach().clone() for name, one in model.named_parameters()}
    for kind in ("exp_avg", "exp_avg_sq"):
        whole |= {f"{name}/{kind}": torch.rand(whole[name].shape) for name in NAMES}
    modules = deepspeed_names()
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        tag = folder / "global_step3"
        tag.mkdir(parents=True)
        (folder / "latest").write_text("global_step3")
        padding = [[3 if gaps else 0 for _ in group] for group in groups]
        for rank in range(world_size):
            states = _rank_states(whole, groups, padding, modules, stage, rank, world_size)
            said = {"optimizer_state_dict": states, "ds_config": {"zero_optimization": {"stage": stage}}}
            torch.save(said, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        shapes = [OrderedDict((name, whole[name].shape) for name in group) for group in groups]
        saved = {
            "module": OrderedDict(model.state_dict()), "buffer_names": ["count"], "param_shapes": shapes,
            "shared_params": {}, "frozen_param_shapes": None, "frozen_param_fragments": None, "global_steps": STEPS,
            "global_samples": 24, "skipped_steps": 0, "dp_world_size": world_size, "mp_world_size": 1,
        }  # fmt: skip
        for rank in range(world_size if stage == 3 else 1):
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(saved, tag / f"{prefix}mp_rank_00_model_states.pt")
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
    return whole


def _rank_states(whole, groups, padding, modules, stage: int, rank: int, world_size: int) -> dict:
    enum = modules["deepspeed.runtime.zero.config"].ZeroStageEnum
    common = {
        "zero_stage": _Enum(enum, stage),
        "loss_scaler": modules["deepspeed.runtime.fp16.loss_scaler"].LossScaler(),
        "overflow": False,
    }

    def mine(kind: str) -> list[torch.Tensor]:
        cut = _third if stage == 3 else _second
        return [cut(whole, group, gap, kind, rank, world_size) for group, gap in zip(groups, padding, strict=True)]

    moments = {kind: mine(f"/{kind}") for kind in ("exp_avg", "exp_avg_sq")}
    state = {
        number: {"step": torch.tensor(float(STEPS)), **{kind: one[number] for kind, one in moments.items()}}
        for number in range(len(groups))
    }
    base = {"state": state, "param_groups": [{"lr": 1e-2, "params": [number]} for number in range(len(groups))]}
    if stage == 3:
        return {**common, "partition_count": world_size, "optimizer_state_dict": base, "fp32_flat_groups": mine("")}
    fragment = modules["deepspeed.utils.tensor_fragment"].fragment_address()
    return {
        **common, "partition_count": [world_size] * len(groups), "base_optimizer_state": base,
        "single_partition_of_fp32_groups": mine(""), "param_alignment_paddings": padding,
        "param_slice_mappings": [OrderedDict((name, fragment) for name in group) for group in groups],
    }  # fmt: skip


def _second(whole, group, gaps, kind: str, rank: int, world_size: int) -> torch.Tensor:
    """Stages 1 and 2: one flat tensor per group, aligned to 2 * world_size, then sharded."""
    pieces = []
    for name, gap in zip(group, gaps, strict=True):
        pieces += [whole[f"{name}{kind}"].reshape(-1), torch.zeros(gap)]
    line = torch.cat(pieces)
    align = 2 * world_size
    line = torch.cat([line, torch.zeros(-line.numel() % align)])
    return line.chunk(world_size)[rank].clone()


def _third(whole, group, gaps, kind: str, rank: int, world_size: int) -> torch.Tensor:
    """Stage 3: each parameter is padded and sharded; a rank's shards are concatenated."""
    pieces = []
    for name in group:
        flat = whole[f"{name}{kind}"].reshape(-1)
        each = math.ceil(flat.numel() / world_size)
        pieces.append(torch.cat([flat, torch.zeros(each * world_size - flat.numel())])[rank * each : (rank + 1) * each])
    return torch.cat(pieces)
