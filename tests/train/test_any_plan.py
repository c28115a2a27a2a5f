"""Checkpoints written under one plan load under any other: the full state and the next steps are equal."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.choice import gate_runs
from tests.full_state import capture
from tests.parity.cases import LLAMA
from weft.checkpoint.load import load_checkpoint, newest_checkpoint, verify_checkpoint
from weft.checkpoint.manifest import commit_text
from weft.checkpoint.save import save_slices
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.sections import OptimizerSection
from weft.errors import CheckpointError
from weft.optim.build import build_optimizer
from weft.optim.rounded_adamw import exact_moment
from weft.parallel.parallelize import parallelize
from weft.train.states.model_state import resume, state_slices
from weft.train.states.state_io import rank_group
from weft.train.step.train_step import TrainStep
from weft.verify.matrix import layout_of, legal
from weft.verify.parity import DecoderCase, local_microbatches, several_buckets
from weft.verify.rank_pool import RankPool

CASE = DecoderCase(LLAMA, num_steps=4)
HALF, STEPS = 2, 4
PLANS = {
    1: ["dp_replicate=1", "dp_replicate=1 precision=fp64 accumulation=2"],
    2: [
        "dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=3", "tp=2", "tp=2 sp=on",
        "pp=2 accumulation=2", "cp=2 zero=1",
    ],
    4: [
        "dp_replicate=4", "dp_shard=4 zero=1", "dp_replicate=2 dp_shard=2 zero=2", "dp_replicate=2 dp_shard=2 zero=3",
        "dp_shard=2 tp=2 zero=1", "dp_shard=2 tp=2 zero=3", "pp=2 dp_shard=2 zero=1 accumulation=2",
        "pp=2 tp=2 accumulation=2", "dp_shard=2 cp=2 zero=2", "tp=4", "dp_replicate=2 tp=2",
    ],
}  # fmt: skip


def rounded(model: nn.Module, states: str = "bf16") -> torch.optim.Optimizer:
    """AdamW with stochastically rounded moments."""
    return build_optimizer(model.named_parameters(), OptimizerSection.model_validate({"states": states, "lr": 3e-3}), 3)


def train_rounded(plan_text: str, last: int, states: str = "bf16", **options: Any) -> dict | None:
    return train(plan_text, last, optimizer_of=functools.partial(rounded, states=states), **options)


def train(
    plan_text: str,
    last: int,
    load: str = "",
    save: str = "",
    several: bool = True,
    optimizer_of: Any = CASE.optimizer_of,
    case: DecoderCase = CASE,
) -> dict | None:
    """Train to step `last`, from a checkpoint or from the start; return the full state on rank 0."""
    plan = Plan.parse(f"{plan_text} precision=fp64" if "precision" not in plan_text else plan_text)
    mesh, model = build_mesh(plan), case.model()
    if several:
        with several_buckets(model):
            parallelize(model, mesh)
    else:
        parallelize(model, mesh)
    step = TrainStep(model, optimizer_of(model), case.loss, mesh, forward=case.forward, max_grad_norm=0.5)
    first = 0
    if load:
        checkpoint = load_checkpoint(Path(load), lazily=True)
        assert resume(model, step.optimizer, checkpoint) == []
        first = checkpoint.step
    losses = [step(local_microbatches(case.batch(n), plan, mesh.data.rank)).loss for n in range(first, last)]
    if save:
        save_slices(Path(save), last, state_slices(model, step.optimizer), {"plan": str(plan)}, rank_group(mesh))
    groups = capture(model, step.optimizer, keep=mesh.rank == 0)
    if mesh.rank:
        return None
    return {"losses": losses, **{group: {n: t.clone() for n, t in found.items()} for group, found in groups.items()}}


def assert_equal(found: dict, expected: dict, what: str, tolerance: float = 0.0) -> None:
    for group in ("model", "optimizer"):
        assert found[group].keys() == expected[group].keys(), what
        for name, tensor in expected[group].items():
            other = found[group][name]
            assert other.shape == tensor.shape, (what, name)
            assert float((other - tensor).abs().max()) <= tolerance * max(1e-3, float(tensor.abs().max())), (what, name)


def check_pairs(pairs, run, tmp_path: Path, resumes: bool) -> None:
    undisturbed = run(1, "dp_replicate=1", STEPS)
    kept: dict[tuple[int, str], dict] = {}
    for number, (source, target) in enumerate(pairs):
        folder = tmp_path / f"run{number}"
        if source not in kept:
            kept[source] = {"folder": folder, "state": run(*source, HALF, save=str(folder))}
            assert verify_checkpoint(folder / f"step_{HALF:08d}") == []
        path = kept[source]["folder"] / f"step_{HALF:08d}"
        what = f"{source[1]} -> {target[1]}"
        assert_equal(run(*target, HALF, load=str(path)), kept[source]["state"], what)
        if resumes:
            assert_equal(run(*target, STEPS, load=str(path)), undisturbed, what, 1e-10)


#: Plans of the gate: each axis and each ZeRO stage, alone or combined with another.
FEW = (
    (1, "dp_replicate=1 precision=fp64 accumulation=2"), (4, "pp=2 tp=2 accumulation=2"),
    (2, "dp_shard=2 zero=2"), (2, "tp=2 sp=on"), (4, "dp_replicate=2 dp_shard=2 zero=3"), (2, "cp=2 zero=1"),
)  # fmt: skip


@pytest.mark.parametrize("few", [FEW, pytest.param((), marks=pytest.mark.full)], ids=["few", "all"])
def test_every_kind_of_plan_resumes_under_another(few, tmp_path, ranks2, ranks4):
    def run(number, plan, *args, **options):
        if number == 1:
            return train(plan, *args, **options)
        return (ranks2 if number == 2 else ranks4).run(train, plan, *args, **options)[0]

    every = list(few) or [(number, plan) for number, plans in PLANS.items() for plan in plans]
    targets = every[1:] + every[:1]
    if not few:
        random.Random(7).shuffle(targets)
    check_pairs(list(zip(every, targets, strict=True)), run, tmp_path, resumes=True)


@pytest.mark.parametrize("states", [pytest.param("bf16", marks=pytest.mark.full), "fp8"])
def test_stochastically_rounded_states_resume_under_another_plan(states, tmp_path, ranks2):
    """States are stored unchanged. Random bits depend on the position in the full tensor."""

    def run(number, plan, *args, **options):
        return (train_rounded if number == 1 else lambda *all, **more: ranks2.run(train_rounded, *all, **more)[0])(
            plan, *args, states=states, **options
        )

    plans = ["dp_shard=2 zero=1", "tp=2", "dp_shard=2 zero=3", "pp=2 accumulation=2"]
    check_pairs(
        [((2, one), (2, other)) for one, other in zip(plans, plans[1:] + plans[:1], strict=True)], run, tmp_path, True
    )


@functools.cache
def plans_by_layout(num_ranks: int) -> dict[str, list[str]]:
    """Return legal plans, grouped by how their ranks divide the work."""
    found: dict[str, list[str]] = {}
    only = {"precision": ("fp64",), "offload": (Plan().offload,)}
    batch = case_of(num_ranks).global_batch
    for plan in legal(num_ranks, model=LLAMA, global_batch=batch, seq_len=CASE.seq_len, passes=(1, 2), **only):
        found.setdefault(layout_of(plan), []).append(str(plan))
    return found


def any_plans(num_ranks: int, number: int, chance: random.Random) -> list[str]:
    """Sample plans of `num_ranks` ranks; each division of the work is equally likely."""
    by_layout = plans_by_layout(num_ranks)
    return [chance.choice(by_layout[chance.choice([*by_layout])]) for _ in range(number)]


def case_of(num_ranks: int) -> DecoderCase:
    """Return a case whose batch divides among `num_ranks` ranks."""
    odd = num_ranks // (num_ranks & -num_ranks)
    return dataclasses.replace(CASE, global_batch=CASE.global_batch * odd)


@pytest.mark.full
def test_two_hundred_random_plan_pairs_on_one_to_eight_ranks(tmp_path):
    """Save five plans per number of ranks; load each under five plans of any number of ranks and compare full state."""
    chance = random.Random(11)
    sources = [(number, plan) for number in range(1, 9) for plan in any_plans(number, 5, chance)]
    drawn = [(chance.randint(1, 8), place) for place in range(len(sources)) for _ in range(5)]
    pairs = [(number, any_plans(number, 1, chance)[0], place) for number, place in sorted(drawn)]
    saved: list[dict] = []
    for number, plans in itertools.groupby(enumerate(sources), lambda item: item[1][0]):
        with RankPool(number, timeout_s=600.0) as pool:
            for place, (_, plan) in plans:
                saved.append(pool.run(train, plan, HALF, save=str(tmp_path / str(place)), case=case_of(number))[0])
    for number, targets in itertools.groupby(pairs, lambda pair: pair[0]):
        with RankPool(number, timeout_s=600.0) as pool:
            for _, target, place in targets:
                path = tmp_path / str(place) / f"step_{HALF:08d}"
                found = pool.run(train, target, HALF, load=str(path), case=case_of(number))[0]
                assert_equal(found, saved[place], f"{sources[place][1]} -> {target}")
    assert len(pairs) == 200
    assert {(sources[place][0], number) for number, _, place in pairs} > {(8, 1), (1, 8), (7, 3), (3, 4)}


@pytest.mark.full
@pytest.mark.parametrize(
    "target",
    [
        "dp_replicate=2",
        "dp_shard=4 zero=3",
        "dp_shard=2 tp=2 zero=1",
        "pp=2 tp=2 accumulation=2",
        "dp_shard=2 cp=2 zero=2",
    ],
)
def test_twenty_steps_after_resume_under_another_plan_match_undisturbed_run(target, tmp_path, ranks2, ranks4):
    """Save under zero=2 on 4 ranks after 2 steps; compare weights, states and losses of the next 20 steps."""
    last = HALF + 20
    ranks4.run(train, "dp_shard=4 zero=2", HALF, save=str(tmp_path))
    undisturbed = train("dp_replicate=1", last)
    ranks = ranks2 if Plan.parse(target).world_size == 2 else ranks4
    found = ranks.run(train, target, last, load=str(tmp_path / f"step_{HALF:08d}"))[0]
    assert_equal(found, undisturbed, target, 1e-10)
    # Each step has its own batch, so a wrong order would change the first digits of some loss.
    assert found["losses"] == pytest.approx(undisturbed["losses"][HALF:], rel=1e-10, abs=0)


@pytest.mark.parametrize("plan", gate_runs(["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=3", "tp=2"], 2, 3))
def test_resume_under_same_plan_is_bitwise_equal(plan, tmp_path, ranks2):
    text = f"{plan} precision=bf16"
    undisturbed = ranks2.run(train, text, STEPS)[0]
    ranks2.run(train, text, HALF, save=str(tmp_path))
    found = ranks2.run(train, text, STEPS, load=str(tmp_path / f"step_{HALF:08d}"))[0]
    assert found["losses"] == undisturbed["losses"][HALF:]
    assert_equal(found, undisturbed, plan)


def bytes_read(plan_text: str, load: str) -> tuple[int, int]:
    """Return the bytes of tensors that a rank reads, and the bytes that it stores."""
    plan = Plan.parse(plan_text)
    mesh, model = build_mesh(plan), CASE.model()
    parallelize(model, mesh)
    step = TrainStep(model, CASE.optimizer_of(model), CASE.loss, mesh, forward=CASE.forward)
    checkpoint = load_checkpoint(Path(load), lazily=True)
    resume(model, step.optimizer, checkpoint)
    from weft.parallel.state.gradients import data_parallel

    engine = data_parallel(model)
    held = [*engine.model_slices(), *engine.state_slices(step.optimizer)]
    return checkpoint.num_bytes_read, sum(one.flat.nbytes for one in held)


def test_rank_reads_and_writes_only_its_share(tmp_path, ranks4):
    plan = "dp_shard=4 zero=3 precision=fp64"
    ranks4.run(train, plan, HALF, save=str(tmp_path))
    path = tmp_path / f"step_{HALF:08d}"
    for read, held in ranks4.run(bytes_read, plan, str(path)):
        assert read == held
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["version"] == 2
    sizes = [manifest["files"][f"optimizer-0000{rank}.safetensors"]["bytes"] for rank in range(4)]
    assert max(sizes) < 1.6 * min(sizes)


def test_damaged_shard_is_named_and_previous_step_is_loaded(tmp_path, ranks2):
    for last in (1, 2):
        ranks2.run(train, "dp_shard=2 zero=1", last, save=str(tmp_path))
    newest = tmp_path / "step_00000002"
    chance = random.Random(3)
    files = sorted(newest.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"{group}-0000{rank}.safetensors" for group in ("model", "optimizer") for rank in (0, 1)
    ]
    for file in files:
        good = file.read_bytes()
        place = chance.randrange(len(good))
        for bad in (good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :], good[:place], good + b"x", None):
            file.unlink()
            if bad is not None:
                file.write_bytes(bad)
            found = newest_checkpoint(tmp_path)
            assert found is not None
            assert found.step == 1
            assert file.name in found.passed_over[0].reason
        file.unlink(missing_ok=True)
        file.symlink_to("../step_00000001/" + file.name)
        assert f"{file.name} is not a plain file" in newest_checkpoint(tmp_path).passed_over[0].reason
        file.unlink()
        file.write_bytes(good)
    assert newest_checkpoint(tmp_path).step == 2


@pytest.fixture
def sharded_checkpoint(tmp_path, ranks2) -> Path:
    """Save a small checkpoint of two ranks, with interleaved slices and runs."""
    ranks2.run(train, "tp=2", 1, save=str(tmp_path))
    return tmp_path / "step_00000001"


def test_unreferenced_checkpoint_closes_its_files(sharded_checkpoint):
    gc.collect()  # leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = load_checkpoint(sharded_checkpoint)
    checkpoint.block("model/" + next(iter(checkpoint.entries("model"))))
    assert len(os.listdir("/proc/self/fd")) > before
    del checkpoint
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.full
def test_every_flipped_byte_is_detected(sharded_checkpoint):
    chance, files = random.Random(5), sorted(sharded_checkpoint.iterdir())
    for _ in range(1000):
        file = chance.choice(files)
        good = file.read_bytes()
        place = chance.randrange(len(good))
        file.write_bytes(good[:place] + bytes([good[place] ^ (1 << chance.randrange(8))]) + good[place + 1 :])
        problems = verify_checkpoint(sharded_checkpoint)
        assert problems, (file.name, place)
        assert file.name in problems[0] or file.name in ("COMMIT", "manifest.json")
        file.write_bytes(good)
    assert verify_checkpoint(sharded_checkpoint) == []


def value_paths(value: Any, path: tuple = ()) -> list[tuple]:
    """Return the paths of all values inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(one for key, found in inner for one in value_paths(found, (*path, key)))]


@pytest.mark.parametrize("number", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_edited_slice_manifest_raises_or_reads_within_its_files(sharded_checkpoint, number):
    """A signed edit may only raise CheckpointError, and must use no memory beyond the files' size."""
    chance, text = random.Random(number), (sharded_checkpoint / "manifest.json").read_bytes()
    raw = json.loads(text)
    known = [path for path in value_paths(raw) if path and path[0] in ("tensors", "ranks")]
    lies = [-1, 0, 1, 3, 2**31, 2**60, "x", None, [], {}, [0], [[0, 9]], 1.5, True, "../../etc/passwd"]
    for _ in range(number):
        changed = json.loads(text)
        *above, last = chance.choice(known)
        place = changed
        for key in above:
            place = place[key]
        place[last] = chance.choice(lies)
        edited = json.dumps(changed).encode()
        (sharded_checkpoint / "manifest.json").write_bytes(edited)
        (sharded_checkpoint / "COMMIT").write_bytes(commit_text(edited))
        try:
            checkpoint = load_checkpoint(sharded_checkpoint)
            for group in checkpoint.groups:
                for name, tensor in checkpoint.tensors(group).items():
                    assert tuple(tensor.shape) == checkpoint.entries(group)[name].shape
        except CheckpointError:
            continue


def test_one_byte_states_resume_in_fp32_and_back(tmp_path):
    """Each format resumes from the other's states by value; fp8 bytes are unchanged after a round trip."""

    def run(states: str, last: int, **options: Any) -> dict:
        found = train_rounded("", last, states, **options)
        assert found is not None
        return found

    saved, path = run("fp8", HALF, save=str(tmp_path / "a")), tmp_path / f"a/step_{HALF:08d}"
    wide = run("fp32", HALF, load=str(path), save=str(tmp_path / "b"))
    back = run("fp8", HALF, load=str(path))
    assert_equal(back, saved, "fp8 -> fp8")
    for name, codes in saved["optimizer"].items():
        if name.rpartition("/")[2] in ("exp_avg", "exp_avg_sq"):
            assert codes.itemsize == 1
            assert torch.equal(wide["optimizer"][name].float(), exact_moment(codes)), name
    again = run("fp8", HALF + 1, load=str(tmp_path / f"b/step_{HALF:08d}"))
    assert_equal(again, run("fp8", HALF + 1, load=str(path)), "fp8 -> fp32 -> fp8")
