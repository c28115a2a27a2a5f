"""A wire format with error feedback matches one process under every ZeRO stage, and resumes bitwise."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import weft
from tests.choice import todays
from tests.comm.block8 import Block8
from tests.parity.cases import LLAMA
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.save import save_slices
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.fields.wire_formats import wire_spec
from weft.config.plan import Plan
from weft.optim.step_decision import clip_factor, global_norm
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.zero.states import local_wire_state
from weft.parallel.zero_flat.model import FlatModel
from weft.train.states.model_state import resume, state_slices
from weft.train.states.state_io import rank_group
from weft.train.step.train_step import TrainStep
from weft.verify.oracles import WireOracle
from weft.verify.parity import DecoderCase, ParityResult, local_microbatches, several_buckets, train_case

CASE = DecoderCase(LLAMA, num_steps=4)
STAGES = ("dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=3")
WIRE = f" reduce={Block8.__name__.lower()}"

#: Per bucket or unit: its number of elements, and the index of each parameter's elements.
Layout = list[tuple[int, dict[str, torch.Tensor]]]


def train_all(plans: list[str]) -> list[tuple[ParityResult, Layout]]:
    return [(train_case(plan, CASE), bucket_layout(plan)) for plan in plans]


def bucket_layout(plan: str) -> Layout:
    """Return the layout of gradients in the flat tensors that ranks sum."""
    mesh = build_mesh(Plan.parse(plan))
    model = CASE.model()
    shapes = {name: param.shape for name, param in model.named_parameters()}
    with several_buckets(model):
        engine = data_parallel(parallelize(model, mesh))
    if isinstance(engine, FlatModel):
        return [
            (bucket.size, {slot.name: slot.start + torch.arange(slot.numel) for slot in bucket.slots})
            for bucket in engine.reducer.buckets
        ]
    found, seen = [], set()
    for unit in engine.parameters.units:
        names = [f"{unit.name}.{name}".lstrip(".") for name, _ in unit.module.named_parameters()]
        names = [name for name in names if name not in seen]
        seen |= {*names}
        indices, end = {name: [] for name in names}, 0
        for _ in range(2):  # each rank has half of the rows of each parameter, padded if the number is odd
            for name in names:
                rows = -(-shapes[name][0] // 2)
                numel = rows * shapes[name][1:].numel()
                indices[name].append(end + torch.arange(numel))
                end += numel
        found.append((end, {name: torch.cat(parts)[: shapes[name].numel()] for name, parts in indices.items()}))
    return found


def train_reference(plan: Plan, layout: Layout) -> ParityResult:
    """Train in one process: each rank's gradients, summed with the same wire format."""
    model, oracle, result = CASE.model(), WireOracle(plan.reduce), ParityResult()
    optimizer, params = CASE.optimizer_of(model), dict(model.named_parameters())
    nominal = 2.0 ** (CASE.batch(0)["labels"].numel().bit_length() - 1)
    for step in range(CASE.num_steps):
        batch, grads, total = CASE.batch(step), [], 0.0
        for rank in range(2):
            (part,) = local_microbatches(batch, plan, rank)
            loss_sum, _ = CASE.loss(CASE.forward(model, part), part)
            grads.append(dict(zip(params, torch.autograd.grad(loss_sum / nominal, [*params.values()]), strict=True)))
            total += float(loss_sum.detach())
        num_tokens = int((batch["labels"] >= 0).sum())
        for index, (numel, indices) in enumerate(layout):
            flats = [torch.zeros(numel, dtype=torch.float64) for _ in grads]
            for flat, mine in zip(flats, grads, strict=True):
                for name, at in indices.items():
                    flat[at] = mine[name].flatten()
            sharded = plan.zero > 0
            sums = torch.cat(oracle.reduce_scatter(flats, index)) if sharded else oracle.all_reduce(flats, index)
            for name, at in indices.items():
                params[name].grad = (sums[at] * (nominal / num_tokens)).view_as(params[name])
        norm = float(global_norm([param.grad for param in params.values()]))
        for param in params.values():
            param.grad *= clip_factor(norm, CASE.max_grad_norm)
        optimizer.step()
        result.losses.append(total / num_tokens)
        result.grad_norms.append(norm)
    result.grads = {name: param.grad for name, param in params.items()}
    result.weights = {name: param.detach() for name, param in params.items()}
    return result


def test_stages_match_one_process_with_the_same_wire_format(ranks2):
    texts = [f"{plan} precision=fp64{WIRE}" for plan in STAGES]
    exact = train_case("precision=fp64", CASE)
    for text, (found, layout), (other, _) in zip(texts, *ranks2.run(train_all, texts), strict=True):
        reference = train_reference(Plan.parse(text), layout)
        assert found.largest_difference(reference) < 1e-10, text
        assert all(torch.equal(other.weights[name], weight) for name, weight in found.weights.items())
        # Rounding has an effect, but a small one.
        assert found.largest_difference(exact) > 1e-5, text
        assert found.losses == pytest.approx(exact.losses, rel=1e-3)
        # The rest is each step's totals and the checks at the start.
        spec = wire_spec("block8")
        rows = [spec.num_bytes(numel // 2) * 2 if "zero" in text else spec.num_bytes(numel) for numel, _ in layout]
        rest = found.reduced_bytes - CASE.num_steps * sum(rows)
        assert 0 < rest < 1000 < sum(rows), (text, rest)


def test_wire_format_with_tp_replicas_accumulation_and_bf16(ranks4):
    plans = [
        "dp_replicate=2 dp_shard=2 zero=2 accumulation=2",
        "dp_shard=2 tp=2 sp=on zero=3 accumulation=2",
        "dp_replicate=2 dp_shard=2 zero=3 precision=bf16",
    ]
    wide = ranks4.run(train_each, plans)[0]
    answers = ranks4.run(train_each, [plan + WIRE for plan in plans])
    for plan, exact, (found, *others) in zip(plans, wide, zip(*answers, strict=True), strict=True):
        assert found.losses == pytest.approx(exact.losses, rel=5e-3), plan
        assert found.losses != exact.losses
        for other in others:
            assert all(torch.equal(other.weights[name], weight) for name, weight in found.weights.items())


def train_each(plans: list[str]) -> list[ParityResult]:
    return [train_case(plan, CASE) for plan in plans]


def train_steps(plan_text: str, first: int, last: int, load: str = "", save: str = "") -> tuple[dict, dict, list[str]]:
    """Train some steps, new or from a checkpoint. Return weights, the wire format's state and messages."""
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model = CASE.model()
    with several_buckets(model):
        parallelize(model, mesh)
    step = TrainStep(model, CASE.optimizer_of(model), CASE.loss, mesh, forward=CASE.forward, max_grad_norm=0.5)
    messages = resume(model, step.optimizer, load_checkpoint(load)) if load else []
    for index in range(first, last):
        step(local_microbatches(CASE.batch(index), plan, mesh.data.rank))
    carried = {name: tensor.clone() for name, tensor in local_wire_state(data_parallel(model))}
    if save:
        save_slices(Path(save), last, state_slices(model, step.optimizer), {}, rank_group(mesh))
    weights = {name: weight.detach().clone() for name, weight in data_parallel(model).weights()}
    return weights, carried, messages


@pytest.mark.parametrize("stage", todays(STAGES, parts=2))
def test_killed_run_resumes_bitwise(stage, tmp_path, ranks2):
    plan, folder = f"{stage} precision=bf16{WIRE}", str(tmp_path / "step_00000002")
    undisturbed, carried, _ = ranks2.run(train_steps, plan, 0, 4)[0]
    assert {name.partition("/")[0] for name in carried} == {"0", "plan"}
    assert all(tensor.any() for name, tensor in carried.items() if name != "plan")
    ranks2.run(train_steps, plan, 0, 2, save=str(tmp_path))
    for answer in ranks2.run(train_steps, plan, 2, 4, load=folder):
        assert all(torch.equal(answer[0][name], weight) for name, weight in undisturbed.items())
        assert answer[2] == []
    for rank, (_, carried, _) in enumerate(ranks2.run(train_steps, plan, 2, 2, load=folder)):
        saved = load_checkpoint(Path(folder)).private("wire", rank)
        assert saved.keys() == carried.keys()
        assert all(torch.equal(carried[name], tensor) for name, tensor in saved.items())


def test_other_plan_drops_the_residual_with_a_message(tmp_path, ranks2):
    saved, folder = f"dp_shard=2 zero=1{WIRE}", str(tmp_path / "step_00000002")
    ranks2.run(train_steps, saved, 0, 2, save=str(tmp_path))
    for plan in (f"dp_shard=2 zero=3{WIRE}", "dp_shard=2 zero=1"):
        _, carried, messages = ranks2.run(train_steps, plan, 2, 2, load=folder)[0]
        assert carried == {}
        assert messages == [
            f"the rounding errors of reduce under '{saved}' are dropped: this plan is '{plan}', and it starts "
            "without them"
        ]


def skip_one(plan_text: str) -> list[bool]:
    """Train a step with a non-finite loss between two finite ones."""
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model = parallelize(CASE.model(), mesh)
    step = TrainStep(model, CASE.optimizer_of(model), CASE.loss, mesh, forward=CASE.forward)
    part = local_microbatches(CASE.batch(0), plan, mesh.data.rank)
    step(part)
    before = {name: tensor.clone() for name, tensor in data_parallel(model).coders.states().items()}
    spoilt = model.register_forward_hook(lambda module, args, output: output * float("nan"))
    assert step(part).skipped
    spoilt.remove()
    after = data_parallel(model).coders.states()
    same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    metrics = step(part)
    return [bool(before), same, metrics.skipped is None]


def test_skipped_step_leaves_the_residual_unchanged(ranks2):
    for stage in STAGES:
        assert ranks2.run(skip_one, stage + WIRE) == [[True] * 3] * 2, stage


def own_loop(plan_text: str) -> tuple[list[float], bool]:
    """Train in a user's loop with two backwards per step. Return losses and whether there is a residual."""
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model = parallelize(CASE.model(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for index in range(3):
        for _ in range(2):
            (part,) = local_microbatches(CASE.batch(index), plan, mesh.data.rank)
            loss_sum, _ = CASE.loss(CASE.forward(model, part), part)
            (loss_sum / 32).backward()
            losses.append(float(loss_sum.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, bool(data_parallel(model).coders.states())


def test_user_training_loop_with_error_feedback(ranks2):
    for stage in STAGES:
        plain, wired = (ranks2.run(own_loop, stage + wire)[0] for wire in ("", WIRE))
        assert wired[0] == pytest.approx(plain[0], rel=2e-2), stage
        assert wired[1], stage


def load_in_a_script(saved: str, plan: str, folder: str) -> list[str]:
    """Save under one plan and load under another with `weft.Run`. Return the warnings."""
    for text in (saved, plan):
        run = weft.Run(Plan.parse(text), build_mesh(Plan.parse(text)), Ledger(), seed=0)
        model = run.parallelize(CASE.model() if run.plan.precision == "fp64" else CASE.model().float())
        step = run.train_step(model, CASE.optimizer_of(model), CASE.loss, forward=CASE.forward)
        if text == saved:
            step(local_microbatches(CASE.batch(0), run.plan, run.mesh.data.rank))
            run.save(folder, step=1, model=model, optimizer=step)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert run.load(folder, model=model, optimizer=step).step == 1
    return [str(one.message) for one in seen if issubclass(one.category, weft.WeftWarning)]


def test_script_warns_once_of_a_dropped_residual(tmp_path, ranks2):
    saved, plan = f"dp_shard=2 zero=2{WIRE}", "dp_shard=2 zero=2"
    first, second = ranks2.run(load_in_a_script, saved, plan, str(tmp_path))
    assert first == [
        f"step_00000001: the rounding errors of reduce under '{saved}' are dropped: this plan is '{plan}', and it "
        "starts without them"
    ]
    assert second == []
