"""What lives on the host changes no number: loss, norm, gradients and weights equal those of one process."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

from tests.memory.links import LateLink
from tests.parity.cases import ImageCase, TreeCase, cases, train_cases
from weft.memory import activations, offload
from weft.memory.pool import HostPool
from weft.mesh import build_mesh
from weft.parallel import parallelize
from weft.spec.plan import Plan
from weft.testing import Case, ParityResult
from weft.train.state import capture, restore
from weft.train.step import TrainStep

RTOL = 1e-10
CHOSEN = ("decoder", "cnn")
LAYOUTS = ["", "dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2"]
OFFLOADS = ["optimizer", "optimizer:0.5", "activations", "optimizer+activations:0.5"]


def train_late(plan: str, chosen: dict[str, Case]) -> dict[str, ParityResult]:
    """`train_cases` with copies that happen as late as their waits allow, of activations of any size."""
    module = importlib.import_module("weft.parallel.parallelize")
    before = module.open_host, activations.LEAST_BYTES
    module.open_host = lambda plan, device: offload.Host(LateLink(), HostPool(1 << 30)) if plan.offload else None
    activations.LEAST_BYTES = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return train_cases(plan, chosen)
    finally:
        module.open_host, activations.LEAST_BYTES = before


def chosen_cases() -> dict[str, Case]:
    return {name: case for name, case in cases().items() if name in CHOSEN}


@pytest.fixture(scope="module")
def references():
    return train_cases("precision=fp64", chosen_cases())


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("offloads", OFFLOADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_with_offload_equals_one_process(layout, offloads, accumulation, references, request):
    plan = f"{layout} accumulation={accumulation} precision=fp64 offload={offloads}"
    if layout:
        results = request.getfixturevalue("ranks2").run(train_late, plan, chosen_cases())
    else:
        results = [train_late(plan, chosen_cases())]
    for result in results:
        for name, numbers in result.items():
            assert numbers.largest_difference(references[name]) < RTOL, name


@pytest.mark.parametrize("zero", [1, 2])
def test_replicas_of_shards(zero, references, ranks4):
    plan = f"dp_replicate=2 dp_shard=2 zero={zero} accumulation=2 precision=fp64 offload=optimizer"
    for result in ranks4.run(train_late, plan, chosen_cases()):
        for name, numbers in result.items():
            assert numbers.largest_difference(references[name]) < RTOL, name


@pytest.mark.parametrize("reshard", ["after_forward", "after_step"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    "offloads",
    [
        "params",
        "params:0.5",
        "activations",
        "params+activations",
        "optimizer",
        "optimizer:0.4",
        "params:0.4+optimizer:0.8",
        "params+optimizer",
    ],
)
def test_zero_3(offloads, accumulation, reshard, references, ranks2):
    plan = f"dp_shard=2 zero=3 reshard={reshard} accumulation={accumulation} precision=fp64 offload={offloads}"
    for result in ranks2.run(train_late, plan, chosen_cases()):
        for name, numbers in result.items():
            assert numbers.largest_difference(references[name]) < RTOL, name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["", "dp_shard=2 zero=1"])
def test_half_precision_gives_the_same_bits_as_without_offload(layout, precision, request):
    """The masters are the same fp32 numbers, wherever they lie."""
    chosen = chosen_cases()
    del chosen["cnn"]  # its optimizer is not told to be fused, and on the host it is
    run = (lambda *args: request.getfixturevalue("ranks2").run(*args)[0]) if layout else (lambda f, *args: f(*args))
    plain = run(train_cases, f"{layout} precision={precision}", chosen)["decoder"]
    moved = run(train_late, f"{layout} precision={precision} offload=optimizer+activations", chosen)["decoder"]
    assert moved.losses == plain.losses
    assert all(torch.equal(moved.weights[name], plain.weights[name]) for name in plain.weights)


@pytest.mark.parametrize("seed", range(6))
def test_any_tree_of_modules(seed):
    chosen = {"tree": TreeCase(seed)}
    reference = train_cases("precision=fp64", chosen)["tree"]
    late = train_late("precision=fp64 accumulation=2 offload=optimizer:0.4+activations", chosen)["tree"]
    assert late.largest_difference(reference) < RTOL


def resume_with(first: str, second: str) -> dict[str, dict[str, torch.Tensor]]:
    """Two steps under one plan, then two under another, from what `capture` gave. Returns what it gives at the end."""
    case = cases()["decoder"]
    groups = None
    for start, text in ((0, first), (2, second)):
        mesh = build_mesh(Plan.parse(text))
        model = case.model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallelize(model, mesh)
        optimizer = case.optimizer_of(model)
        step = TrainStep(model, optimizer, case.loss, mesh, forward=case.forward, max_grad_norm=1.0)
        if groups is not None:
            restore(model, optimizer, groups)
        size = mesh.plan.dp_size
        for index in (start, start + 1):
            step({name: tensor.chunk(size)[mesh.data.rank] for name, tensor in case.batch(index).items()})
        found = capture(model, optimizer)
        groups = {name: {key: one.clone() for key, one in group.items()} for name, group in found.items()}
    return groups


@pytest.mark.parametrize("layout", ["", "dp_shard=2 zero=2"])
def test_resuming_with_and_without_offload_gives_the_same_bits(layout, request):
    run = (lambda *args: request.getfixturevalue("ranks2").run(*args)[0]) if layout else (lambda f, *args: f(*args))
    base = f"{layout} precision=bf16"
    expected = run(resume_with, base, base)
    for plans in ((f"{base} offload=optimizer", base), (base, f"{base} offload=optimizer:0.5")):
        found = run(resume_with, *plans)
        for group, tensors in expected.items():
            assert tensors.keys() == found[group].keys()
            assert all(torch.equal(found[group][name], tensors[name]) for name in tensors)


def test_the_matrix_sees_a_wait_that_is_missing(monkeypatch):
    """Copies that nobody waits for never happen here."""
    monkeypatch.setattr(offload.HostPart, "arrive", lambda self: None)
    with pytest.raises(AssertionError, match="nan"):
        train_late("precision=fp64 offload=optimizer", {"cnn": ImageCase()})


def optimizer_refused(plan: str) -> str:
    from weft.errors import ModelError
    from weft.optim import Muon

    case = chosen_cases()["decoder"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = parallelize(case.model(), mesh := build_mesh(Plan.parse(plan)))
    with pytest.raises(ModelError) as caught:
        TrainStep(model, Muon([p for p in model.parameters() if p.ndim == 2]), case.loss, mesh)
    return str(caught.value)


def test_an_optimizer_of_whole_weights_is_not_taken_to_the_host_from_zero_3(ranks2):
    for text in ranks2.run(optimizer_refused, "dp_shard=2 zero=3 offload=optimizer"):
        assert text.startswith("offload=optimizer: under zero=3 an optimizer that sees whole weights, as for 'embed.")
        assert text.endswith("Use zero=2, or leave optimizer out of offload.")
