"""Functions that ranks run in the tests of the pipeline runtime."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.full_state import capture, restore
from tests.parity.pipeline_cases import GPT2, TIED
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.save import save_checkpoint
from weft.comm import peer as lanes
from weft.comm.mesh import build_mesh, join_group
from weft.config.plan import Plan
from weft.config.sections import OptimizerSection
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.decoder import as_shapes
from weft.models.registry import build_decoder
from weft.optim.build import build_optimizer
from weft.parallel.dropout.by_position import draws_nothing
from weft.parallel.parallelize import parallelize
from weft.parallel.pipeline.runtime import pipeline_of
from weft.parallel.state.gradients import data_parallel
from weft.train.batches.microbatches import Microbatches
from weft.train.states.model_state import resume
from weft.train.step.evaluation import mean_loss
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.parity import DecoderCase, local_microbatches


def start(plan_text: str, spec: DecoderSpec = TIED, *, device: str | None = None, dtype: torch.dtype | None = None):
    """Return model, optimizer and step of a plan."""
    mesh = build_mesh(Plan.parse(plan_text))
    model = build_decoder(spec, device=device, dtype=dtype, seed=0)
    parallelize(model, mesh, seed=0)
    optimizer = build_optimizer(model.named_parameters(), OptimizerSection(lr=1e-3))
    step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward, max_grad_norm=1.0)
    return mesh, model, optimizer, step


def losses(plan_text: str, spec: DecoderSpec = TIED, num_steps: int = 2) -> list[float]:
    """Return the losses of some steps in the plan's precision."""
    mesh, _, _, step = start(plan_text, spec)
    case = DecoderCase(spec, global_batch=16, seq_len=8)
    return [step(local_microbatches(case.batch(index), mesh.plan, mesh.data.rank)).loss for index in range(num_steps)]


class _NotGloo:
    """A backend that needs separate groups, as NCCL does."""

    def name(self) -> str:
        return "nccl"


def losses_with_group_per_flow(plan_text: str) -> tuple[list[float], list[tuple[int, ...]]]:
    """Return the losses with one group per flow between two ranks, and the groups."""
    made: list[tuple[int, ...]] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(lanes, "backend_for", lambda group, device: _NotGloo())
    patch.setattr(lanes, "join_group", lambda ranks, purpose: (made.append(ranks), join_group(ranks, purpose))[1])
    try:
        return losses(plan_text), made
    finally:
        patch.undo()


def most_pending_sends(plan_text: str) -> int:
    """Return the most tensors that this rank keeps alive for pending sends."""
    mesh, model, _, step = start(plan_text)
    boundary, found = pipeline_of(model)._boundary, []
    post = boundary._post

    def posted(*args):
        post(*args)
        found.append(len(boundary._sent))

    case = DecoderCase(TIED, global_batch=mesh.plan.microbatches, seq_len=8)
    step(local_microbatches(case.batch(0), mesh.plan, mesh.data.rank))  # the first step also exchanges shapes
    boundary._post = posted
    step(local_microbatches(case.batch(1), mesh.plan, mesh.data.rank))
    return max(found)


def overflows(plan_text: str) -> list[tuple[bool, float | None]]:
    """Return whether each of two steps was skipped, and its loss scale, which starts too high for fp16."""
    mesh, _, _, step = start(plan_text)
    step.loss_scale.scale = 2.0**32
    case = DecoderCase(TIED, global_batch=16, seq_len=8)
    done = [step(local_microbatches(case.batch(index), mesh.plan, mesh.data.rank)) for index in range(2)]
    return [(metrics.skipped is not None, metrics.loss_scale) for metrics in done]


def losses_of_lengths(plan_text: str, rounds: list[list[int]]) -> list[float]:
    """Return the losses with microbatches of different lengths, which change between steps."""
    _mesh, _, _, step = start(plan_text, dtype=torch.float64)
    found = []
    for index, lengths in enumerate(rounds):
        batches = [DecoderCase(TIED, global_batch=2, seq_len=length, seed=index).batch(0) for length in lengths]
        found.append(step(Microbatches(batches)).loss)
    return found


def save_and_load(first: str, second: str) -> tuple[list[float], list[float]]:
    """Return the losses of four steps under one plan, and of two steps, a save, and two steps under another plan."""
    case = DecoderCase(TIED, global_batch=16, seq_len=8)

    def train(mesh, step, numbers):
        return [step(local_microbatches(case.batch(n), mesh.plan, mesh.data.rank)).loss for n in numbers]

    mesh, model, optimizer, step = start(first, dtype=torch.float64)
    found = train(mesh, step, (0, 1))
    groups = {kind: {k: v.clone() for k, v in part.items()} for kind, part in capture(model, optimizer).items()}
    onward = train(mesh, step, (2, 3))
    mesh, model, optimizer, step = start(second, dtype=torch.float64)
    restore(model, optimizer, groups)
    return found + onward, found + train(mesh, step, (2, 3))


def evaluation(plan_text: str) -> tuple[float, int]:
    """Return loss and tokens of an evaluation of two batches of different lengths."""
    mesh, model, _, _ = start(plan_text, dtype=torch.float64)
    batches = [DecoderCase(TIED, global_batch=2, seq_len=length).batch(0) for length in (8, 5, 8)]
    return mean_loss(model, batches, mesh, token_cross_entropy, model_forward)


def parameters_of_rank(plan_text: str) -> tuple[list[str], int, tuple[int, ...]]:
    """Return this rank's parameter names, their number of elements, and the blocks of each stage."""
    _, model, _, _ = start(plan_text, GPT2)
    pipeline = pipeline_of(model)
    assert pipeline is not None
    names = [name for name, _ in model.named_parameters()]
    return names, sum(param.numel() for param in model.parameters()), pipeline.counts


def needs_no_seeds(plan_text: str, has_dropout: bool) -> bool:
    """Return True if this rank finds no random numbers in any stage of a decoder, maybe with dropout in the last."""
    model = build_decoder(TIED, seed=0)
    if has_dropout:
        model.blocks[-1].mlp = nn.Sequential(model.blocks[-1].mlp, nn.Dropout(0.1))
    parallelize(model, build_mesh(Plan.parse(plan_text)))
    return draws_nothing(model)


def weights_by_name(plan_text: str, device: str | None) -> dict[str, torch.Tensor]:
    """Return the initial weights of a model that is split on `device`, such as meta."""
    _, model, _, _ = start(plan_text, device=device)
    return {name: tensor.clone() for name, tensor in data_parallel(model).weights()}


#: Large enough to be visible in a process's memory.
LARGE = DecoderSpec(
    vocab_size=512, dim=512, num_layers=16, num_heads=8, num_kv_heads=8, ffn_dim=2048, max_seq_len=32, tied=True
)


def build_shapes(family: str) -> nn.Module:
    """Return the model of `LARGE`, Weft's or Hugging Face's, without weights."""
    if family == "weft":
        return build_decoder(LARGE, device="meta")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=LARGE.vocab_size, hidden_size=LARGE.dim, num_hidden_layers=LARGE.num_layers,
        num_attention_heads=LARGE.num_heads, intermediate_size=LARGE.ffn_dim, tie_word_embeddings=True,
    )  # fmt: skip
    with as_shapes():
        return transformers.LlamaForCausalLM(config)


def write_weights(family: str, folder: Path) -> None:
    """Write a checkpoint of random weights and of a new optimizer."""
    named = dict(build_shapes(family).named_parameters())
    tensors = {name: torch.full(param.shape, float(index)) for index, (name, param) in enumerate(named.items())}
    save_checkpoint(folder, 1, {"model": tensors, "optimizer": {}}, {})


def peak_growths(plan_text: str, family: str, folder: Path) -> tuple[int, int]:
    """Return the growth of peak memory while a model is built and parallelized, and while weights are loaded."""
    build_shapes(family)  # so that imports do not count
    start_peak()
    before = resource_bytes("VmRSS")
    mesh = build_mesh(Plan.parse(plan_text))
    model = build_shapes(family)
    parallelize(model, mesh, seed=0)
    built = resource_bytes("VmHWM") - before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data_parallel(model).adopt(optimizer)
    start_peak()
    before = resource_bytes("VmRSS")
    checkpoint = load_checkpoint(folder / "step_00000001")
    resume(model, optimizer, checkpoint)
    for name, weight in model.named_parameters():
        assert float(weight.detach().std()) == 0, name  # each was filled with one value
    return built, resource_bytes("VmHWM") - before


def start_peak() -> None:
    """Reset the peak memory."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def resource_bytes(key: str) -> int:
    """Return a line of this process's status, in bytes."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(key))
    return int(line.split()[1]) * 1024


def wrong_number(plan_text: str) -> str:
    """Return the error of a step with too few microbatches."""
    _, _, _, step = start(plan_text)
    try:
        step(Microbatches([DecoderCase(TIED, global_batch=2).batch(0)]))
    except Exception as error:
        return str(error)
    return ""
