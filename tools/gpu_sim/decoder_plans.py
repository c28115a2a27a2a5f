"""Training of a small decoder under a plan on the open simulated GPU, with one real rank.

Collectives use torch's fake process group, which returns immediately with the existing data. Counts cover one step: the
third, because the first includes one-time work and the host reads a step's numbers in the next one. With graphs=on it
is the eighth, when passes and the optimizer's step are recorded.
"""

from __future__ import annotations

import gc
import traceback
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from tools.gpu_sim.clock import Notes, joint_times
from tools.gpu_sim.cuda import join_silent_ranks
from tools.gpu_sim.device import CUDA, PaperDevice
from tools.gpu_sim.plans import PaperReport
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.comm.rank_positions import members_of
from weft.config.plan import Plan
from weft.config.rules.plan_rules import check
from weft.config.rules.rule import Facts
from weft.config.sections import OptimizerSection
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import WeftError
from weft.models.registry import build_decoder
from weft.monitor.step_times import Meter
from weft.optim.build import build_optimizer
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy


@dataclass(frozen=True, slots=True)
class PaperModel:
    """The decoder to train. The default is large enough for activation offloading.

    Attributes:
        heads: attention heads, with half as many for keys and values; 0 for heads of width 64, as is usual at this
            size.
        batch: sequences per microbatch and rank.
        optimizer, states: as `optimizer.name` and `optimizer.states` of a config.
    """

    layers: int = 4
    dim: int = 256
    heads: int = 0
    seq_len: int = 512
    vocab_size: int = 1024
    batch: int = 4
    experts: int = 0
    documents: bool = False
    optimizer: str = "adamw"
    states: str = "fp32"

    @property
    def spec(self) -> DecoderSpec:
        heads = self.heads or max(4, self.dim // 64)
        return DecoderSpec(
            vocab_size=self.vocab_size, dim=self.dim, num_layers=self.layers, num_heads=heads, num_kv_heads=heads // 2,
            ffn_dim=2 * self.dim, max_seq_len=self.seq_len, num_experts=self.experts,
        )  # fmt: skip

    def microbatches(self, number: int) -> dict[str, torch.Tensor]:
        """Return a rank's part of a global batch in pinned memory, in the format of Weft's loaders."""
        shape = (number * self.batch, self.seq_len)
        positions = torch.arange(self.seq_len).expand(shape).contiguous()
        batch = {
            "input_ids": positions % self.vocab_size,
            "labels": (positions + 1) % self.vocab_size,
            "positions": positions,
        }
        if self.documents:
            batch["document_ids"] = positions // 100
            batch["document_starts"] = torch.arange(0, self.seq_len, 100).expand(len(positions), -1).contiguous()
        return {name: tensor.pin_memory() for name, tensor in batch.items()}


def stages_reports(text: str, device: PaperDevice, subject: PaperModel) -> list[PaperReport]:
    """Return reports of one step of each stage's first rank, with times that include waiting for each other."""
    plan = Plan.parse(text)
    mesh_ranks = members_of(plan, 0, ("pp",))
    noted: list[Notes] = []
    reports = [plan_report(text, device, subject, rank, noted) for rank in mesh_ranks]
    if len(noted) < len(reports):
        return reports
    return [
        replace(
            report,
            name=f"{text}, rank {rank}",
            step_s=timed.step_s,
            idle_s={f"waits @ {why}": seconds for why, seconds in timed.idle_s.items()},
            over_s={},
            error=report.error or (f"the ranks wait for each other for ever: {timed.stuck[0]}" if timed.stuck else ""),
        )
        for rank, report, timed in zip(mesh_ranks, reports, joint_times(noted), strict=True)
    ]


def plan_report(
    text: str, device: PaperDevice, subject: PaperModel, rank: int = 0, noted: list[Notes] | None = None
) -> PaperReport:
    """Return the report of one step of a rank. An exception sets its `error`.

    Args:
        text: the plan.
        device: the simulated GPU.
        subject: the decoder to train.
        rank: the rank to run.
        noted: receives the dependency graph of the step.
    """
    plan = Plan.parse(text)
    problems = check(plan, Facts(world_size=plan.world_size, model=subject.spec, seq_len=subject.seq_len))
    if problems:
        raise WeftError("\n".join(problem.message for problem in problems))
    if plan.world_size > 1:
        join_silent_ranks(plan.world_size, rank)
    device.forget()
    device.clock.notes = None if noted is None else Notes()
    try:
        report = _some_steps(plan, device, subject, noted)
    except (RuntimeError, WeftError, NotImplementedError, ValueError, TypeError, IndexError, AssertionError) as raised:
        traceback.print_exc()
        why = f"{type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised) else ''}"
        report = replace(device.report(), error=why)
    gc.collect()
    if plan.world_size > 1:
        dist.destroy_process_group()
    return replace(report, name=text)


def _some_steps(plan: Plan, device: PaperDevice, subject: PaperModel, noted: list[Notes] | None) -> PaperReport:
    ledger = Ledger()
    meter = Meter(CUDA, communication=ledger)
    mesh = build_mesh(plan, CUDA, ledger.record)
    model = parallelize(build_decoder(subject.spec, seed=0), mesh, seed=0)
    settings = OptimizerSection.model_validate({"name": subject.optimizer, "states": subject.states})
    optimizer = build_optimizer(model.named_parameters(), settings)
    options = {"forward": model_forward, "max_grad_norm": 1.0, "meter": meter, "weights_follow": True}
    step = TrainStep(model, optimizer, token_cross_entropy, mesh, **options)
    before = ledger.mark()
    for _ in range(8 if plan.graphs else 3):
        device.begin()
        before = ledger.mark()
        step(subject.microbatches(plan.microbatches_per_step))
    # Report before the model is deleted, because work at its end is not part of a step. Reading the ledger
    # synchronizes.
    report, after = device.report(), ledger.mark()
    if noted is not None and device.clock.notes is not None:
        noted.append(device.clock.notes)
        device.clock.notes = None
    step.wait_for_weights()  # weights that the next forward would wait for
    device.wait_unawaited()
    over_s = ledger.seconds_between(before, after)
    return replace(report, races=dict(device.races.found), over_s=over_s, outlived=device.outlived())
