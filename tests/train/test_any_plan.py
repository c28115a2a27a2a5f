"""What ranks of one plan write, ranks of any other read: full state equal, and the next steps too."""

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
from weft.train.model_state import resume, state_slices
from weft.train.state_io import rank_group
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
    """AdamW with moments that are rounded at random."""
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
    """Go on to step `last`, from a checkpoint or the start; the whole state on the first rank."""
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


def check_pairs(pairs, run, tmp_path: Path, goes_on: bool) -> None:
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
        if goes_on:
            assert_equal(run(*target, STEPS, load=str(path)), undisturbed, what, 1e-10)


#: In the gate: each axis and each stage of ZeRO, alone or beside another one.
FEW = (
    (1, "dp_replicate=1 precision=fp64 accumulation=2"), (2, "dp_replicate=2"), (4, "pp=2 tp=2 accumulation=2"),
    (2, "dp_shard=2 zero=2"), (2, "tp=2 sp=on"), (4, "dp_replicate=2 dp_shard=2 zero=3"), (2, "cp=2 zero=1"),
)  # fmt: skip


@pytest.mark.parametrize("few", [FEW, pytest.param((), marks=pytest.mark.full)], ids=["few", "all"])
def test_every_kind_of_plan_goes_on_under_another(few, tmp_path, ranks2, ranks4):
    def run(number, plan, *args, **options):
        if number == 1:
            return train(plan, *args, **options)
        return (ranks2 if number == 2 else ranks4).run(train, plan, *args, **options)[0]

    every = list(few) or [(number, plan) for number, plans in PLANS.items() for plan in plans]
    targets = every[1:] + every[:1]
    if not few:
        random.Random(7).shuffle(targets)
    check_pairs(list(zip(every, targets, strict=True)), run, tmp_path, goes_on=True)


@pytest.mark.parametrize("states", [pytest.param("bf16", marks=pytest.mark.full), "fp8"])
def test_states_that_were_rounded_at_random_go_on_under_another_plan(states, tmp_path, ranks2):
    """They are stored as they are, and what is drawn depends on places in the whole."""

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
    """Legal plans by how their ranks divide the work."""
    found: dict[str, list[str]] = {}
    only = {"precision": ("fp64",), "offload": (Plan().offload,)}
    batch = case_of(num_ranks).global_batch
    for plan in legal(num_ranks, model=LLAMA, global_batch=batch, seq_len=CASE.seq_len, passes=(1, 2), **only):
        found.setdefault(layout_of(plan), []).append(str(plan))
    return found


def any_plans(num_ranks: int, number: int, chance: random.Random) -> list[str]:
    """Plans of so many ranks, each way to divide the work as likely as any other."""
    by_layout = plans_by_layout(num_ranks)
    return [chance.choice(by_layout[chance.choice([*by_layout])]) for _ in range(number)]


def case_of(num_ranks: int) -> DecoderCase:
    """With a batch that so many ranks can share."""
    odd = num_ranks // (num_ranks & -num_ranks)
    return dataclasses.replace(CASE, global_batch=CASE.global_batch * odd)


@pytest.mark.full
def test_two_hundred_random_pairs_of_plans_on_one_to_eight_ranks(tmp_path):
    """Five plans of each number of ranks are saved, each is loaded under five of any number: full state equal."""
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
def test_twenty_steps_under_another_plan_are_those_of_an_undisturbed_run(target, tmp_path, ranks2, ranks4):
    """Saved under zero=2 on 4 ranks after 2 steps; weights, states and each loss of the 20 steps after it."""
    last = HALF + 20
    ranks4.run(train, "dp_shard=4 zero=2", HALF, save=str(tmp_path))
    undisturbed = train("dp_replicate=1", last)
    ranks = ranks2 if Plan.parse(target).world_size == 2 else ranks4
    found = ranks.run(train, target, last, load=str(tmp_path / f"step_{HALF:08d}"))[0]
    assert_equal(found, undisturbed, target, 1e-10)
    # Each step's batch is its own: in another order some loss would differ in its first digits.
    assert found["losses"] == pytest.approx(undisturbed["losses"][HALF:], rel=1e-10, abs=0)


@pytest.mark.parametrize("plan", gate_runs(["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=3", "tp=2"], 2, 3))
def test_the_same_plan_goes_on_to_the_bit(plan, tmp_path, ranks2):
    text = f"{plan} precision=bf16"
    undisturbed = ranks2.run(train, text, STEPS)[0]
    ranks2.run(train, text, HALF, save=str(tmp_path))
    found = ranks2.run(train, text, STEPS, load=str(tmp_path / f"step_{HALF:08d}"))[0]
    assert found["losses"] == undisturbed["losses"][HALF:]
    assert_equal(found, undisturbed, plan)


def bytes_read(plan_text: str, load: str) -> tuple[int, int]:
    """Bytes that a rank reads of tensors, and bytes that it holds."""
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


def test_a_rank_reads_and_writes_its_share_alone(tmp_path, ranks4):
    plan = "dp_shard=4 zero=3 precision=fp64"
    ranks4.run(train, plan, HALF, save=str(tmp_path))
    path = tmp_path / f"step_{HALF:08d}"
    for read, held in ranks4.run(bytes_read, plan, str(path)):
        assert read == held
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["version"] == 2
    sizes = [manifest["files"][f"optimizer-0000{rank}.safetensors"]["bytes"] for rank in range(4)]
    assert max(sizes) < 1.6 * min(sizes)


def test_a_damaged_shard_is_named_and_the_step_before_is_taken(tmp_path, ranks2):
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
def sharded(tmp_path, ranks2) -> Path:
    """A small checkpoint of two ranks, with interleaved parts and runs."""
    ranks2.run(train, "tp=2", 1, save=str(tmp_path))
    return tmp_path / "step_00000001"


def test_a_checkpoint_that_nobody_has_any_more_holds_no_file_open(sharded):
    gc.collect()  # what tests before left
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = load_checkpoint(sharded)
    checkpoint.block("model/" + next(iter(checkpoint.entries("model"))))
    assert len(os.listdir("/proc/self/fd")) > before
    del checkpoint
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.full
def test_every_flipped_byte_is_found(sharded):
    chance, files = random.Random(5), sorted(sharded.iterdir())
    for _ in range(1000):
        file = chance.choice(files)
        good = file.read_bytes()
        place = chance.randrange(len(good))
        file.write_bytes(good[:place] + bytes([good[place] ^ (1 << chance.randrange(8))]) + good[place + 1 :])
        problems = verify_checkpoint(sharded)
        assert problems, (file.name, place)
        assert file.name in problems[0] or file.name in ("COMMIT", "manifest.json")
        file.write_bytes(good)
    assert verify_checkpoint(sharded) == []


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all values inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(one for key, found in inner for one in places(found, (*path, key)))]


@pytest.mark.parametrize("number", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_an_edited_manifest_of_slices_is_an_error_or_reads_within_its_files(sharded, number):
    """Whoever edits it can sign it too: nothing but CheckpointError comes of it, and no memory beyond the files."""
    chance, text = random.Random(number), (sharded / "manifest.json").read_bytes()
    raw = json.loads(text)
    known = [path for path in places(raw) if path and path[0] in ("tensors", "ranks")]
    lies = [-1, 0, 1, 3, 2**31, 2**60, "x", None, [], {}, [0], [[0, 9]], 1.5, True, "../../etc/passwd"]
    for _ in range(number):
        changed = json.loads(text)
        *above, last = chance.choice(known)
        place = changed
        for key in above:
            place = place[key]
        place[last] = chance.choice(lies)
        edited = json.dumps(changed).encode()
        (sharded / "manifest.json").write_bytes(edited)
        (sharded / "COMMIT").write_bytes(commit_text(edited))
        try:
            checkpoint = load_checkpoint(sharded)
            for group in checkpoint.groups:
                for name, tensor in checkpoint.tensors(group).items():
                    assert tuple(tensor.shape) == checkpoint.entries(group)[name].shape
        except CheckpointError:
            continue


def test_states_of_one_byte_go_on_in_fp32_and_back(tmp_path):
    """What one format saved is what the other starts from, as numbers; bytes come back as they were."""

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
