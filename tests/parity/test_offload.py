"""Offload to the host changes no result: loss, norm, gradients and weights match one process."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest
import torch

from tests.choice import gate_runs, product, todays
from tests.full_state import capture, restore
from tests.memory.links import LateLink
from tests.parity.cases import ImageCase, TreeCase, cases
from tests.parity.plans import train_quietly
from tests.tools.warm_python import FORKS
from weft import env
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.memory import offload
from weft.memory.offload import HostPool
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.verify.parity import Case, local_microbatches, train_cases

RTOL = 1e-10
CHOSEN = ("decoder", "cnn")
LAYOUTS = ["", "dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2"]
OFFLOADS = ["optimizer", "optimizer:0.5", "activations", "optimizer+activations:0.5"]


def chosen_cases() -> dict[str, Case]:
    return {name: case for name, case in cases().items() if name in CHOSEN}


@pytest.fixture(scope="module")
def references():
    return train_cases("precision=fp64", chosen_cases())


@pytest.mark.parametrize(*product("layout, offloads, accumulation", LAYOUTS, OFFLOADS, [1, 4]))
def test_offload_matches_one_process(layout, offloads, accumulation, references, request):
    plan = f"{layout} accumulation={accumulation} precision=fp64 offload={offloads}"
    if layout:
        results = request.getfixturevalue("ranks2").run(train_quietly, plan, chosen_cases())
    else:
        results = [train_quietly(plan, chosen_cases())]
    for result in results:
        for name, numbers in result.items():
            assert numbers.largest_difference(references[name]) < RTOL, name


@pytest.mark.parametrize("recompute", gate_runs(["full", "selective", "attention", "60%"], 1, 3))
def test_saved_activations_of_a_policy_are_offloaded(recompute, references, ranks2):
    """Compare one process, and zero=3, which gathers and frees parameters while blocks are recomputed."""
    chosen = chosen_cases() if recompute == "selective" else {"decoder": cases()["decoder"]}
    rest = f"accumulation=2 precision=fp64 recompute={recompute} offload=activations"
    single = train_quietly(rest, chosen)
    for result in (single, *ranks2.run(train_quietly, f"dp_shard=2 zero=3 {rest}", chosen)):
        for name, numbers in result.items():
            assert numbers.largest_difference(references[name]) < RTOL, name


@pytest.mark.full
def test_compiled_blocks_offload_their_saved_tensors(references, ranks2):
    chosen = {"decoder": cases()["decoder"]}
    plan = "precision=fp64 compile=on offload=activations"
    single = train_quietly(f"{plan} recompute=selective", chosen)
    for result in (single, *ranks2.run(train_quietly, f"dp_shard=2 zero=3 {plan}", chosen)):
        assert result["decoder"].largest_difference(references["decoder"]) < RTOL


@pytest.mark.parametrize("zero", gate_runs([1, 2], 1))
def test_offload_with_replicas_of_shards_matches_one_process(zero, references, ranks4):
    plan = f"dp_replicate=2 dp_shard=2 zero={zero} accumulation=2 precision=fp64 offload=optimizer"
    for result in ranks4.run(train_quietly, plan, chosen_cases()):
        for name, numbers in result.items():
            assert numbers.largest_difference(references[name]) < RTOL, name


OFFLOADS_OF_ZERO_3 = [
    "params",
    "params:0.5",
    "activations",
    "params+activations",
    "optimizer",
    "optimizer:0.4",
    "params:0.4+optimizer:0.8",
    "params+optimizer",
]


@pytest.mark.parametrize(
    *product("offloads, accumulation, reshard", OFFLOADS_OF_ZERO_3, [1, 4], ["after_forward", "after_step"])
)
def test_offload_with_zero_3_matches_one_process(offloads, accumulation, reshard, references, ranks2):
    plan = f"dp_shard=2 zero=3 reshard={reshard} accumulation={accumulation} precision=fp64 offload={offloads}"
    for result in ranks2.run(train_quietly, plan, chosen_cases()):
        for name, numbers in result.items():
            assert numbers.largest_difference(references[name]) < RTOL, name


def order_of_copies(plan: str) -> list[str]:
    """Return the order of gradient copies to the host ("sent") and ends of backward in the first block ("end")."""
    module, link, order = importlib.import_module("weft.parallel.parallelize"), LateLink(), []
    before, down = module.open_host, link.down
    module.open_host = lambda plan, device, limit: offload.Host(link, HostPool(1 << 30))
    link.down = lambda *args: (order.append("sent"), down(*args))[1]
    try:
        mesh, case = build_mesh(Plan.parse(plan)), cases()["decoder"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = parallelize(case.model(), mesh)
    finally:
        module.open_host = before
    step = TrainStep(model, case.optimizer_of(model), case.loss, mesh, forward=case.forward)
    model.blocks[0].register_forward_pre_hook(
        lambda _, args: args[0].register_hook(lambda grad: order.append("end")) and None
    )
    step(local_microbatches(case.batch(0), mesh.plan, mesh.data.rank))
    return order


def test_zero_3_offloads_gradients_during_the_last_backward(ranks2):
    """Expect at least the gradients of the head and the last block, and none before the last microbatch."""
    for order in ranks2.run(order_of_copies, "dp_shard=2 zero=3 accumulation=2 offload=optimizer precision=fp64"):
        first, second = (index for index, what in enumerate(order) if what == "end")
        assert "sent" not in order[:first]
        assert order[first:second].count("sent") >= 2
        assert "sent" in order[second:]


@pytest.mark.parametrize(*product("precision, layout", ["bf16", "fp16"], ["", "dp_shard=2 zero=1"]))
def test_half_precision_is_bitwise_equal_with_offload(layout, precision, request):
    """The masters are the same fp32 numbers on either device."""
    chosen = chosen_cases()
    del chosen["cnn"]  # its optimizer is not fused, but offload makes it so
    run = (lambda *args: request.getfixturevalue("ranks2").run(*args)[0]) if layout else (lambda f, *args: f(*args))
    plain = run(train_cases, f"{layout} precision={precision}", chosen)["decoder"]
    moved = run(train_quietly, f"{layout} precision={precision} offload=optimizer+activations", chosen)["decoder"]
    assert moved.losses == plain.losses
    assert all(torch.equal(moved.weights[name], plain.weights[name]) for name in plain.weights)


@pytest.mark.parametrize("seed", todays(range(6), parts=3))
def test_offload_of_random_module_trees_matches_one_process(seed):
    chosen = {"tree": TreeCase(seed)}
    reference = train_cases("precision=fp64", chosen)["tree"]
    late = train_quietly("precision=fp64 accumulation=2 offload=optimizer:0.4+activations", chosen)["tree"]
    assert late.largest_difference(reference) < RTOL


def resume_with(first: str, second: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train two steps under each plan, with `capture` and `restore` between. Return the final state."""
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
def test_resume_across_offload_settings_is_bitwise_equal(layout, request):
    run = (lambda *args: request.getfixturevalue("ranks2").run(*args)[0]) if layout else (lambda f, *args: f(*args))
    base = f"{layout} precision=bf16"
    expected = run(resume_with, base, base)
    for plans in ((f"{base} offload=optimizer", base), (base, f"{base} offload=optimizer:0.5")):
        found = run(resume_with, *plans)
        for group, tensors in expected.items():
            assert tensors.keys() == found[group].keys()
            assert all(torch.equal(found[group][name], tensors[name]) for name in tensors)


def test_missing_wait_is_detected(monkeypatch):
    """Skip all waits: `LateLink` never runs a copy that is not waited for."""
    monkeypatch.setattr(offload.HostPart, "wait", lambda self: None)
    with pytest.raises(AssertionError, match="forward uses other weights"):
        train_quietly("precision=fp64 offload=optimizer", {"cnn": ImageCase()})


ONE_RANK = """
from tests.parity.plans import train_quietly
from tests.parity.test_offload import chosen_cases
from weft.verify import train_cases

references = train_cases("precision=fp64", chosen_cases())
for offloads in ("params", "optimizer+params", "activations+optimizer+params"):
    found = train_quietly(f"zero=3 accumulation=2 precision=fp64 offload={offloads}", chosen_cases())
    for name, numbers in found.items():
        print(offloads, name, numbers.largest_difference(references[name]))
"""


def test_one_rank_matches_with_offloaded_parameters():
    """Run in a process without ranks, as on a laptop or a single GPU."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_RANK], capture_output=True, text=True, check=False, timeout=300,
        env=env.child_env(**{FORKS: "1"}),
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 6, done.stderr
    assert all(float(difference) < RTOL for *_, difference in lines), lines
