"""Edge cases of expert parallelism: ranks without tokens or labels, user modules, errors, sent bytes, resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.parity.moe_cases import MOE, HuggingFaceMoECase, MoECase
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.save import save_slices
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.fields.layout import Layout
from weft.config.plan import Plan
from weft.errors import CommError, ModelError
from weft.models.experts import routers
from weft.models.registry import build_decoder
from weft.parallel.expert import _by_expert, distribute_experts, expect_experts
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.states.model_state import resume, state_slices
from weft.train.states.state_io import rank_group
from weft.train.step.train_step import TrainStep
from weft.verify.parity import DecoderCase, local_microbatches, train_case

RTOL = 1e-10
BIAS = dataclasses.replace(MOE, balance="bias", balance_rate=0.02)


@dataclasses.dataclass(frozen=True)
class FirstTwoCase(MoECase):
    """A case that routes every token to experts 0 and 1, so later ranks never get tokens."""

    def model(self) -> nn.Module:
        model = super().model()
        for router in routers(model):
            router.bias_ppm[:2] = 10**9
        return model


@dataclasses.dataclass(frozen=True)
class HuggingFaceFirstTwoCase(HuggingFaceMoECase):
    def model(self) -> nn.Module:
        model = super().model()
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(_to_first_two)
        return model


def _to_first_two(gate, args, output):
    logits, scores, ids = output
    return logits, scores, torch.arange(2).expand_as(ids)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_ranks_without_tokens_match_one_process(zero, ranks2):
    for case in (
        FirstTwoCase(BIAS, global_batch=4, num_steps=2),
        HuggingFaceFirstTwoCase(MOE, global_batch=4, num_steps=2),
    ):
        reference = train_case("precision=fp64", case)
        for result in ranks2.run(train_case, f"dp_shard=2 ep=2 zero={zero} precision=fp64", case):
            assert result.largest_difference(reference) < RTOL
        idle = [name for name in reference.grads if "experts" in name]
        assert idle
        assert all(not reference.grads[name][2:].any() for name in idle)


def test_rank_with_masked_labels_still_runs_its_experts(ranks2):
    case = MoECase(MOE, global_batch=2, num_steps=2)  # the last sample has no labels
    assert (case.batch(0)["labels"][1] == -100).all()
    reference = train_case("precision=fp64", case)
    for result in ranks2.run(train_case, "dp_shard=2 ep=2 zero=1 precision=fp64", case):
        assert result.largest_difference(reference) < RTOL


def train(plan_text: str, case: DecoderCase, first: int, last: int, load: str = "", save: str = ""):
    """Return losses, weights and biases of some steps, new or from a checkpoint."""
    plan = Plan.parse(f"{plan_text} precision=fp64")
    mesh = build_mesh(plan)
    model = parallelize(case.model(), mesh)
    step = TrainStep(model, case.optimizer_of(model), case.loss, mesh, forward=case.forward, max_grad_norm=0.5)
    if load:
        resume(model, step.optimizer, load_checkpoint(Path(load), lazily=True))
    losses = [step(local_microbatches(case.batch(index), plan, mesh.data.rank)).loss for index in range(first, last)]
    if save:
        save_slices(Path(save), last, state_slices(model, step.optimizer), {}, rank_group(mesh))
    weights = {name: weight.detach().clone() for name, weight in data_parallel(model).weights()}
    return losses, weights, [router.bias_ppm.tolist() for router in routers(model)]


def test_balance_biases_use_all_tokens_and_resume_under_any_ep(ranks2, ranks4, tmp_path):
    case = MoECase(BIAS, global_batch=4, num_steps=4)
    losses, weights, biases = train("", case, 0, 4)
    assert any(any(bias) for bias in biases)
    assert all(value % 20_000 == 0 for bias in biases for value in bias)  # multiples of the rate
    saved = ranks4.run(train, "dp_shard=4 ep=4 zero=2", case, 0, 2, save=str(tmp_path))[0]
    assert saved[0] == pytest.approx(losses[:2], rel=1e-12)
    path = str(tmp_path / "step_00000002")
    runs = [train("", case, 2, 4, load=path)]
    for ranks, plans in (
        (ranks2, ["dp_shard=2 ep=2 zero=3", "dp_shard=2 zero=1", "cp=2 ep=2"]),
        (ranks4, ["dp_shard=4 ep=2 zero=1", "dp_replicate=2 dp_shard=2 ep=2 zero=0 accumulation=1"]),
    ):
        for plan in plans:
            runs += ranks.run(train, plan, case, 2, 4, load=path)
    for resumed in runs:
        assert resumed[0] == pytest.approx(losses[2:], rel=1e-12)
        assert resumed[2] == biases
        for name, weight in weights.items():
            torch.testing.assert_close(resumed[1][name], weight, rtol=1e-9, atol=1e-12, msg=name)


def weights_from_shapes(plan_text: str) -> dict[str, torch.Tensor]:
    """Return the weights of a model built on the meta device, so that no rank ever has all experts."""
    mesh = build_mesh(Plan.parse(plan_text))
    model = parallelize(build_decoder(BIAS, device="meta", dtype=torch.float64), mesh, seed=3)
    return {name: weight.detach().clone() for name, weight in data_parallel(model).weights()}


@pytest.mark.parametrize("zero", [1, 3])
def test_experts_from_meta_match_one_process_weights(zero, ranks2):
    expected = dict(build_decoder(BIAS, dtype=torch.float64, seed=3).named_parameters())
    for weights in ranks2.run(weights_from_shapes, f"dp_shard=2 ep=2 zero={zero}"):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def bytes_of_one_step(plan_text: str, spec, num_tokens: int) -> tuple[int, int, int]:
    """Return calls and bytes of all_to_all over ep, and all bytes over ep."""
    plan, ledger = Plan.parse(f"{plan_text} precision=fp64"), Ledger()
    mesh = build_mesh(plan, record=ledger.record)
    model = build_decoder(spec, dtype=torch.float64)
    distribute_experts(model, mesh)
    ledger.clear()
    model(torch.zeros(1, num_tokens, dtype=torch.int64)).sum().backward()
    entry = ledger.entry("ep", "all_to_all")
    return entry.calls, entry.num_bytes, sum(row.num_bytes for axis, name, row in ledger.rows() if axis == "ep")


@pytest.mark.parametrize("ep", [2, 4])
def test_all_to_all_bytes_match_the_formula(ep, ranks4):
    """Expect 4 exchanges of M * k * h values per layer with experts: dispatch and combine, forward and backward.

    Of each, (ep - 1) / ep leaves the rank. Every token is routed to all experts, so the load is even as in the formula.
    """
    spec, num_tokens = dataclasses.replace(MOE, num_experts=4, top_k=4, balance="none"), 24
    layers = len(spec.moe_layers)
    for calls, num_bytes, all_bytes in ranks4.run(bytes_of_one_step, f"dp_shard=4 ep={ep}", spec, num_tokens):
        assert calls == 4 * layers
        assert num_bytes == calls * num_tokens * spec.top_k * spec.dim * 8
        assert all_bytes - num_bytes == layers * ep * spec.num_experts * 4  # all ranks' counts, int32


class UsersExperts(nn.Module):
    """A user's module of stacked experts with biases."""

    def __init__(self, num_experts: int, dim: int):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrices = nn.Parameter(torch.randn(num_experts, dim, dim, generator=generator, dtype=torch.float64))
        self.shifts = nn.Parameter(torch.randn(num_experts, dim, generator=generator, dtype=torch.float64))

    def forward(self, x, ids, weights):
        y = x.new_zeros(x.shape)
        for expert in range(self.matrices.shape[0]):
            tokens, slots = torch.where(ids == expert)
            out = (x[tokens] @ self.matrices[expert] + self.shifts[expert]).tanh()
            y = y.index_add(0, tokens, out * weights[tokens, slots, None])
        return y


class UsersModel(nn.Module):
    def __init__(self, num_experts: int = 4, dim: int = 3):
        super().__init__()
        self.experts = UsersExperts(num_experts, dim)

    def forward(self, x, ids, weights):
        return self.experts(x, ids, weights)


def users_inputs(num_tokens: int, part: int):
    generator = torch.Generator().manual_seed(part)
    x = torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64)
    weights = torch.rand(num_tokens, 2, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(num_tokens)])
    return x.requires_grad_(), ids, weights.requires_grad_()


def run_user_model(plan_text: str, num_tokens: int) -> dict[str, torch.Tensor]:
    """Return output and gradients. Under tp all ranks have the same tokens."""
    mesh = build_mesh(Plan.parse(plan_text))
    model = UsersModel()
    distribute_experts(model, mesh, Layout.parse("experts=expert"))
    x, ids, weights = users_inputs(num_tokens, mesh.data.rank)
    out = model(x, ids, weights)
    out.square().sum().backward()
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    return found | {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("plan", ["dp_shard=2 ep=2", "tp=2 ep=2", "tp=2"])
@pytest.mark.parametrize("num_tokens", [6, 7, 1])
def test_layout_distributes_user_modules_of_stacked_experts(plan, num_tokens, ranks2):
    """Token counts that tp does not divide are padded. Gradients of experts are partial sums over tp."""
    results = ranks2.run(run_user_model, plan, num_tokens)
    references = [run_user_model("", num_tokens)]
    parts = Plan.parse(plan).dp_size
    if parts == 2:
        model, (x, ids, weights) = UsersModel(), users_inputs(num_tokens, 1)
        out = model(x, ids, weights)
        out.square().sum().backward()
        references.append({"out": out.detach(), "x": x.grad, "weights": weights.grad}
                     | {name: parameter.grad for name, parameter in model.named_parameters()})  # fmt: skip
    for rank, result in enumerate(results):
        for name in ("out", "x", "weights"):
            torch.testing.assert_close(result[name], references[rank % parts][name], rtol=1e-12, atol=1e-12)
    for name in ("experts.matrices", "experts.shifts"):
        total = sum(one[name] for one in references)
        ours = [torch.zeros(()) if one[name] is None else one[name] for one in results]
        if "ep=2" in plan:
            for rank, grad in enumerate(ours):
                torch.testing.assert_close(grad + torch.zeros_like(total[:2]), total[2 * rank : 2 * rank + 2])
        else:
            torch.testing.assert_close(sum(ours), total)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4))
def test_received_rows_are_sorted_by_expert(by_source):
    index, inverse, ends = _by_expert(torch.tensor(by_source), sum(map(sum, by_source)))
    received = [(expert, source, row) for source, counts in enumerate(by_source)
               for expert, count in enumerate(counts) for row in range(count)]  # fmt: skip
    ordered = [received[position] for position in index.tolist()]
    assert ordered == sorted(received)
    assert [ordered[position] for position in inverse.tolist()] == received
    assert ends.tolist() == [sum(row[0] <= expert for row in received) for expert in range(3)]


class Unstacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Linear(4, 6)


def distribute_once(plan_text: str, model: nn.Module, layout: str | None = None) -> None:
    distribute_experts(model, build_mesh(Plan.parse(plan_text)), Layout.parse(layout) if layout else None)


@pytest.mark.parametrize(("model", "layout", "text"), [
    (nn.Linear(2, 2), None, "ep=2: the model Linear has no experts. Use ep=1, or name its modules of stacked "
     "experts in a layout, such as blocks.*.mlp.experts=expert."),
    (UsersModel(3), "experts=expert", "ep=2: 'experts' has 3 experts, and 3 is not a multiple of 2. "
     "Use ep=1 or 3."),
    (Unstacked(), "experts=expert", "module 'experts': experts can be divided only if every parameter stacks them "
    "in dim 0, and its parameters are weight (6, 4), bias (6,). Stack the experts, or leave the module out of the "
     "layout."),
])  # fmt: skip
def test_undividable_experts_are_rejected(model, layout, text, ranks2):
    with pytest.raises(CommError) as caught:
        ranks2.run(distribute_once, "dp_shard=2 ep=2", model, layout)
    assert text in str(caught.value)
    assert ModelError.__name__ in str(caught.value)


@pytest.mark.parametrize(("family", "kind", "text"), [
    ("llama4", "Llama4TextExperts", "its router multiplies the inputs of experts"),
    ("dbrx", "DbrxExpertGLU", "its experts are rows of one matrix"),
    ("jetmoe", "JetMoeParallelExperts", "it gets tokens that its model sorted by expert"),
    ("longcat_flash", "LongcatFlashExperts", "some of its experts are the identity"),
])  # fmt: skip
def test_experts_in_other_forms_are_refused_by_class(family, kind, text):
    models = pytest.importorskip("transformers").models
    assert hasattr(getattr(models, family), f"modeling_{family}")
    experts = getattr(getattr(getattr(models, family), f"modeling_{family}"), kind)
    model = nn.ModuleDict({"experts": experts.__new__(experts)})
    nn.Module.__init__(model["experts"])
    with pytest.raises(ModelError, match=rf"ep=2: experts is {kind}: {text}.*Use ep=1, and zero=3"):
        expect_experts(model, Layout.parse("experts=expert"), 2)


def distribute_again(then: str) -> tuple[str, list[int]]:
    """Return the error of a second distribution, as after a failed `parallelize`, and the experts in each parameter."""
    model, layout = UsersModel(2), Layout.parse("experts=expert")
    distribute_experts(model, build_mesh(Plan.parse("dp_shard=2 ep=2")), layout)
    with pytest.raises(ModelError) as caught:
        distribute_experts(model, build_mesh(Plan.parse(then)), layout)
    return str(caught.value), [len(param) for param in model.parameters()]


@pytest.mark.parametrize("then", ["dp_shard=2 ep=2", "dp_shard=2"])
def test_distributed_experts_are_rejected_unchanged(then, ranks2):
    text = "module of type UsersExperts: its experts are already divided over ep. Build a new model."
    assert ranks2.run(distribute_again, then) == [(text, [1, 1])] * 2
