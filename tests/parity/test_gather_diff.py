"""gather=diff4: weights are updated by 4-bit differences to their masters, as in one process with the same codec.

The reference trains masters with gradients of the model weights and adds the decoded differences to the model weights,
in the flat order of the ranks' buckets.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import weft
from tests.choice import product
from tests.parity.cases import LLAMA
from tests.parity.test_wire import Layout, bucket_layout
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.comm.wire.wire_format import find_wire
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.optim.step_decision import clip_factor, global_norm
from weft.parallel.choose_engine import quantized_slices
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.zero_flat.model import FlatModel
from weft.verify.parity import DecoderCase, ParityResult, local_microbatches, several_buckets, train_case

CASE = DecoderCase(LLAMA, num_steps=4, max_grad_norm=0.5)
TWO = ("dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=1 accumulation=2", "cp=2 zero=1")
FOUR = ("dp_replicate=2 dp_shard=2 zero=1", "dp_shard=4 zero=2")


def train_all(plans: tuple[str, ...]) -> list[tuple[ParityResult, Layout]]:
    return [
        (train_case(f"{plan} gather=diff4 precision=fp64", CASE), bucket_layout(f"{plan} gather=diff4 precision=fp64"))
        for plan in plans
    ]


#: Per bucket: its number of elements and, by parameter, indices in the bucket and indices in the full parameter.
BucketElements = list[tuple[int, dict[str, tuple[torch.Tensor, torch.Tensor]]]]


def local_elements(plan: str) -> BucketElements:
    """Return which elements of the full parameters this rank's buckets have."""
    mesh, model = build_mesh(Plan.parse(plan)), CASE.model()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(1, param.numel() + 1).view_as(param))  # 0 marks padding
    with several_buckets(model):
        engine = data_parallel(parallelize(model, mesh))
    assert isinstance(engine, FlatModel)
    found: BucketElements = []
    for bucket in engine.reducer.buckets:
        spans = {slot.name: slot.start + torch.arange(slot.numel) for slot in bucket.slots}
        spans = {name: span[bucket.weights[span] > 0] for name, span in spans.items()}
        found.append((bucket.size, {name: (span, bucket.weights[span].long() - 1) for name, span in spans.items()}))
    return found


def train_with_elements(plans: tuple[str, ...]) -> list[tuple[ParityResult, BucketElements]]:
    texts = [f"{plan} gather=diff4 precision=fp64" for plan in plans]
    return [(train_case(text, CASE), local_elements(text)) for text in texts]


def full_parameters(layout: Layout) -> BucketElements:
    """Return the layout for buckets with full parameters."""
    return [
        (size, {name: (index, torch.arange(len(index))) for name, index in elements.items()})
        for size, elements in layout
    ]


def train_reference(buckets: list[BucketElements], parts: int) -> ParityResult:
    """Train masters and model weights in one process.

    buckets: those of each rank that has another part of the model. parts: number of ranks that share each bucket.
    """
    model, result, wire = CASE.model(), ParityResult(), find_wire("int4")
    params = dict(model.named_parameters())
    masters = {name: torch.nn.Parameter(param.detach().clone()) for name, param in params.items()}
    holder = torch.nn.ParameterDict({name.replace(".", "/"): one for name, one in masters.items()})
    optimizer = CASE.optimizer_of(holder)
    for step in range(CASE.num_steps):
        batch = CASE.batch(step)
        loss_sum, number = CASE.loss(CASE.forward(model, batch), batch)
        model.zero_grad()
        (loss_sum / number).backward()
        norm = float(global_norm([param.grad for param in params.values()]))
        for name, param in params.items():
            masters[name].grad = param.grad * clip_factor(norm, CASE.max_grad_norm)
        optimizer.step()
        before = {name: param.detach().clone() for name, param in params.items()}
        for size, elements in itertools.chain(*buckets):
            if not elements.keys() <= params.keys():
                continue  # the last stage's head, tied to the first stage's embedding: a copy
            flat = torch.zeros(size, dtype=torch.float64)
            for name, (index, full_index) in elements.items():
                flat[index] = (masters[name].detach() - before[name]).reshape(-1)[full_index]
            codes = [wire.encode(part[None], None)[0] for part in flat.chunk(parts)]
            found = torch.cat([wire.decode(one, size // parts, flat.dtype).view(-1) for one in codes])
            for name, (index, full_index) in elements.items():
                # Ranks with the same elements have the same values.
                params[name].detach().view(-1)[full_index] = before[name].view(-1)[full_index] + found[index]
        result.losses.append(float(loss_sum.detach()) / int(number))
        result.grad_norms.append(norm)
    result.grads = {name: one.grad for name, one in masters.items()}
    result.weights = {name: one.detach() for name, one in masters.items()}
    return result


def check(pool, plans: tuple[str, ...]) -> None:
    exact = train_case("precision=fp64", CASE)
    answers = pool.run(train_all, plans)
    for index, plan in enumerate(plans):
        read = Plan.parse(plan)
        expected = train_reference([full_parameters(answers[0][index][1])], read.dp_shard * read.cp)
        assert expected.largest_difference(exact) > 1e-6, "nothing was rounded"
        assert expected.losses == pytest.approx(exact.losses, rel=2e-3)
        for rank, answer in enumerate(answers):
            assert answer[index][0].largest_difference(expected) < 1e-10, (plan, rank)


def test_layouts_match_one_process_with_the_same_differences(ranks2):
    check(ranks2, TWO)


@pytest.mark.full
def test_layouts_match_one_process_on_four_ranks(ranks4):
    check(ranks4, FOUR)


SHARDED = ("pp=2 dp_shard=2 zero=1 microbatches=2", "tp=2 dp_shard=2 zero=1", "tp=2 sp=on dp_shard=2 zero=2")


@pytest.mark.full
@pytest.mark.parametrize("plan", SHARDED)
def test_sharded_models_match_one_process(plan, ranks4):
    """Under tp and pp each rank has a part of the model, with its own buckets."""
    exact = train_case("precision=fp64", CASE)
    answers = [one[0] for one in ranks4.run(train_with_elements, (plan,))]
    # Neighbors on tp, or the stages: the ranks with one dp_shard index.
    mesh_ranks = (0, 2) if "pp" in plan else (0, 1)
    expected = train_reference([answers[rank][1] for rank in mesh_ranks], 2)
    assert expected.largest_difference(exact) > 1e-6, "nothing was rounded"
    for result, _ in answers:
        assert result.largest_difference(expected) < 1e-10


class Script:
    """A user's script that may resume from a checkpoint."""

    def __init__(self, plan_text: str, case: DecoderCase = CASE):
        plan = Plan.parse(plan_text)
        self.ledger, self.case = Ledger(), case
        self.run = weft.Run(plan, build_mesh(plan, record=self.ledger.record), self.ledger, seed=0)
        self.model = self.run.parallelize(case.model() if plan.precision == "fp64" else case.model().float())
        self.step = self.run.train_step(
            self.model, case.optimizer_of(self.model), case.loss, forward=case.forward, max_grad_norm=0.5
        )

    def train(self, first: int, last: int) -> list[float]:
        rank = self.run.mesh.data.rank
        parts = [local_microbatches(self.case.batch(index), self.run.plan, rank) for index in range(first, last)]
        return [self.step(part).loss for part in parts]

    def model_weights(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def save_and_continue(plan_text: str, folder: str) -> tuple[list[float], dict, dict]:
    script = Script(plan_text)
    script.train(0, 2)
    script.run.save(folder, step=2, model=script.model, optimizer=script.step)
    return script.train(2, 5), script.model_weights(), script.run.full_state_dict(script.model, everywhere=True)


def load_and_continue(plan_text: str, folder: str) -> tuple[list[float], dict, dict]:
    script = Script(plan_text)
    script.train(7, 8)  # so that loading changes the state
    script.run.load(folder, model=script.model, optimizer=script.step)
    return script.train(2, 5), script.model_weights(), script.run.full_state_dict(script.model, everywhere=True)


@pytest.mark.parametrize(*product("precision, zero", ["fp64", "bf16"], [1, 2]))
def test_resume_is_bitwise_equal(zero, precision, ranks2, tmp_path):
    plan = f"dp_shard=2 zero={zero} gather=diff4 precision={precision}"
    saved = ranks2.run(save_and_continue, plan, str(tmp_path))
    loaded = ranks2.run(load_and_continue, plan, str(tmp_path))
    for before, after in zip(saved, loaded, strict=True):
        assert before[0] == after[0]
        for ours, theirs in zip(before[1:], after[1:], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        # All ranks have the same weights.
        assert all(torch.equal(after[1][name], loaded[0][1][name]) for name in after[1])


def test_checkpoints_resume_with_and_without_diff4(ranks2, ranks4, tmp_path):
    diff, plain = "dp_shard=2 zero=1 gather=diff4 precision=fp64", "dp_shard=2 zero=3 precision=fp64"
    saved = ranks2.run(save_and_continue, diff, str(tmp_path / "diff"))
    more = ranks4.run(load_and_continue, diff.replace("dp_shard=2", "dp_shard=4"), str(tmp_path / "diff"))
    assert more[0][0][0] == pytest.approx(saved[0][0][0], rel=1e-12)  # the first forward uses the saved model weights
    other = ranks2.run(load_and_continue, plain, str(tmp_path / "diff"))
    assert other[0][0] == pytest.approx(saved[0][0], rel=1e-3)
    exact = ranks2.run(save_and_continue, plain, str(tmp_path / "plain"))
    back = ranks2.run(load_and_continue, diff, str(tmp_path / "plain"))
    assert back[0][0][0] == pytest.approx(exact[0][0][0], rel=1e-12)  # initialized from unrounded masters
    assert back[0][0] == pytest.approx(exact[0][0], rel=1e-3)


def train_with_zero_lr(plan_text: str) -> tuple[list[float], int, int]:
    """Train with learning rate 0. Return the distances to the masters, gathered bytes per step and local elements."""
    script = Script(plan_text)
    script.train(0, 3)
    engine, distances = data_parallel(script.model), []
    for group in script.step.optimizer.param_groups:
        group["lr"] = 0.0
    before = _gathered(script.ledger)
    for index in range(12):
        script.train(3 + index, 4 + index)
        masters = {one.name: one.flat for one in engine.model_slices()}
        distances.append(max(float((one.flat - masters[one.name]).abs().max()) for one in quantized_slices(engine)))
    own = sum(one.numel() for one in engine.local_weights().values())
    return distances, (_gathered(script.ledger) - before) // 12, own


def _gathered(ledger: Ledger) -> int:
    return sum(found.num_bytes for axis, name, found in ledger.rows() if (axis, name) == ("dp_shard", "all_gather"))


def test_weights_converge_to_masters_with_half_a_byte_per_weight(ranks2):
    for distances, num_bytes, own in ranks2.run(train_with_zero_lr, "dp_shard=2 zero=1 gather=diff4 precision=fp32"):
        assert distances[0] > 0
        assert distances[-1] < 1e-6
        assert all(after <= before or after < 1e-7 for before, after in itertools.pairwise(distances))
        assert num_bytes < 2 * 0.6 * own + 1000


def average(plan_text: str) -> str:
    script = Script(plan_text)
    with pytest.raises(ModelError) as caught:
        script.run.ema(script.model)
    return str(caught.value)


def test_ema_is_rejected(ranks2):
    assert ranks2.run(average, "dp_shard=2 zero=1 gather=diff4")[0] == (
        "gather=diff4: averages that replace the weights would be encoded as differences, which changes the "
        "training. Leave run.ema out, or gather."
    )


def train_in_user_loop(plan_text: str) -> dict[str, torch.Tensor]:
    mesh = build_mesh(Plan.parse(plan_text))
    model = parallelize(CASE.model(), mesh)
    optimizer = CASE.optimizer_of(model)
    for index in range(3):
        loss_sum, number = CASE.loss(CASE.forward(model, CASE.batch(index)), CASE.batch(index))
        (loss_sum / number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_user_training_loop_is_supported(ranks2):
    """Both ranks have the same samples, so that means equal one rank's."""
    driven = ranks2.run(train_in_user_loop, "dp_shard=2 zero=1 gather=diff4 precision=fp64")
    plain = ranks2.run(train_in_user_loop, "dp_shard=2 zero=1 precision=fp64")
    differ = [(driven[0][name] - plain[0][name]).abs().max() for name in plain[0]]
    assert 1e-9 < max(differ) < 1e-2
    assert all(torch.equal(driven[0][name], driven[1][name]) for name in driven[0])
