"""A step of every technique on a simulated GPU: no tensor on the wrong device, no race, no extra waits."""

from __future__ import annotations

import json

import pytest
import torch

from tools.gpu_sim.clock import FLOPS
from tools.gpu_sim.decoder_plans import PaperModel
from tools.gpu_sim.plans import PaperReport, plans_on_paper, script_on_paper
from weft.comm.transports.backend import NCCL_FORMATS
from weft.config.plan import Plan
from weft.planner.cost.memory_terms import axis_groups, lanes
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape

pytestmark = pytest.mark.paper

#: Number of host waits for the device in one step of each plan, and of blocking copies among them. The
#: step itself needs none: the device decides whether to apply it, and the host reads its numbers in the next one.
DENSE = {
    "precision=fp16": (0, 0),
    "dp_replicate=2 accumulation=2 precision=bf16 reduce=bf16": (0, 0),
    "dp_shard=4 zero=2 accumulation=2 precision=bf16": (0, 0),
    "dp_replicate=2 dp_shard=2 zero=3 accumulation=2 precision=bf16": (0, 0),
    "cp=2 cp_mode=ulysses precision=bf16": (0, 0),
    "cp=2 cp_mode=ring tp=2 dp_shard=2 zero=1 precision=bf16": (0, 0),
    "pp=2 tp=2 dp_shard=2 zero=1 microbatches=4 precision=bf16": (0, 0),
    "tp=2 sp=on dp_shard=2 zero=1 precision=fp8": (0, 0),
    "recompute=selective dp_shard=2 zero=3 precision=bf16": (0, 0),
    "offload=optimizer dp_shard=2 zero=1 precision=bf16": (2, 1),
    "offload=params dp_shard=2 zero=3 precision=bf16": (3, 1),
    "offload=activations recompute=full dp_shard=2 zero=1 precision=bf16": (0, 0),
}
#: Each technique in these is part of a plan above. Together they form the published table.
MORE = {
    "precision=fp32": (0, 0),
    "precision=bf16": (0, 0),
    "dp_shard=2 zero=3 reshard=after_step accumulation=2 precision=bf16": (0, 0),
    "tp=2 sp=on dp_shard=2 zero=1 precision=bf16": (0, 0),
    "tp=2 dp_shard=2 zero=3 precision=bf16": (0, 0),
    "recompute=full dp_shard=2 zero=3 precision=bf16": (0, 0),
    "recompute=selective dp_shard=2 zero=3 precision=fp8": (0, 0),
    "recompute=selective precision=bf16": (0, 0),
    "cp=2 cp_mode=gather precision=bf16": (0, 0),
    "recompute=full cp=2 cp_mode=ring precision=bf16": (0, 0),
    "recompute=attention precision=bf16": (0, 0),
    "dp_shard=2 zero=3 precision=bf16": (0, 0),
    "accumulation=2 precision=bf16": (0, 0),
    "dp_replicate=2 precision=bf16": (0, 0),
    "dp_shard=4 zero=1 precision=bf16": (0, 0),
    "dp_replicate=2 dp_shard=2 zero=1 precision=bf16": (0, 0),
    "dp_shard=2 zero=3 reshard=after_backward precision=bf16": (0, 0),
    "tp=2 precision=bf16": (0, 0),
    "tp=2 sp=on precision=bf16": (0, 0),
    "cp=2 cp_mode=ring precision=bf16": (0, 0),
    "pp=2 microbatches=4 schedule=gpipe precision=bf16": (0, 0),
    "pp=2 microbatches=4 precision=bf16": (0, 0),
    "recompute=full precision=bf16": (0, 0),
    "offload=optimizer precision=bf16": (2, 1),
    "offload=activations precision=bf16": (0, 0),
    "dp_replicate=2 dp_shard=2 zero=2 accumulation=2 precision=bf16": (0, 0),
}
#: Expert layers. Over ep the host must know the number of rows per destination: once in each of two layers. Without
#: a grouped kernel, as in fp32 and fp16, it splits rows by expert: once in each.
EXPERTS = {
    "precision=bf16": (0, 0),
    "dp_shard=2 ep=2 zero=1 precision=fp32": (4, 4),
}
MORE_EXPERTS = {
    "precision=fp32": (2, 2),
    "precision=fp16": (2, 2),
    "dp_shard=2 ep=2 zero=1 precision=bf16": (2, 2),
}
#: Blocks compiled by torch's inductor up to its kernels, with collectives and with code that is one custom operator.
COMPILED = {
    "precision=bf16 compile=on": (0, 0),
    "tp=2 sp=on dp_shard=2 zero=1 precision=bf16 compile=on": (0, 0),
    "cp=2 cp_mode=ring precision=bf16 compile=on": (0, 0),
    "recompute=selective precision=bf16 compile=on": (0, 0),
    "recompute=full precision=bf16 compile=on": (0, 0),
    "recompute=attention precision=bf16 compile=on": (0, 0),
    "recompute=full dp_shard=2 zero=3 precision=bf16 compile=on": (0, 0),
}
#: The same with experts. Recompute asks for the row counts once more.
COMPILED_EXPERTS = {
    "precision=bf16 compile=on": (0, 0),
    "dp_shard=2 ep=2 zero=1 precision=bf16 compile=on": (2, 2),
    "dp_shard=2 ep=2 zero=3 precision=bf16 compile=on": (2, 2),
    "recompute=full dp_shard=2 ep=2 zero=1 precision=bf16 compile=on": (4, 4),
}
#: Optimizers with their own kernels: plan, optimizer, states. None waits.
OPTIMIZERS = (
    ("precision=bf16", "muon", "fp32"),
    ("tp=2 dp_shard=2 zero=1 precision=bf16", "muon", "fp32"),
    ("dp_shard=2 zero=3 precision=fp16", "muon", "fp32"),
    ("dp_shard=2 zero=1 precision=bf16", "adamw", "bf16"),
    ("dp_shard=2 zero=3 precision=bf16", "adamw", "fp8"),
)
#: Steps in which the device is slower than the host.
LARGE = ("precision=bf16", "dp_shard=2 zero=3 precision=fp16")
#: Sequences of several documents, whose boundaries are part of the batch.
DOCUMENTS = {"cp=2 cp_mode=ring precision=bf16": (0, 0)}


def refused_by_nccl(report):
    """Return dtypes of a step's collectives that NCCL does not support. Each plan of several ranks has a collective."""
    assert bool(report.formats) == (Plan.parse(report.name).world_size > 1), report.formats
    return {text for text in report.formats if getattr(torch, text.rpartition(" ")[2]) not in NCCL_FORMATS}


#: Plans of the gate, in one process: starting a process takes as long as three plans.
TRIED = {"dense": (DENSE, {}), "experts": (EXPERTS, {"experts": 4}), "documents": (DOCUMENTS, {"documents": True})}
TRY = """
import gc, json

from tools.gpu_sim.decoder_plans import PaperModel, plan_report
from tools.gpu_sim.cuda import current_device

gc.freeze()
for options, plans in json.loads(TRIED):
    for plan in plans:
        print(json.dumps(plan_report(plan, current_device(), PaperModel(layers=2, **options)).as_dict()))
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> list[PaperReport]:
    """Return reports of all plans of `TRIED`, in order."""
    script = tmp_path_factory.mktemp("plans") / "plans.py"
    words = json.dumps([(options, list(known)) for known, options in TRIED.values()])
    script.write_text(TRY.replace("TRIED", repr(words)))
    done = script_on_paper(script)
    assert done.returncode == 0, done.stderr
    return [PaperReport(**json.loads(line)) for line in done.stdout.splitlines()]


def test_gate_covers_at_least_fifteen_plans(tried):
    assert len(tried) == sum(len(known) for known, _ in TRIED.values()) >= 15


@pytest.mark.parametrize("kind", TRIED)
def test_each_plan_uses_its_device_without_extra_waits(kind, tried):
    first = sum(len(TRIED[one][0]) for one in list(TRIED)[: list(TRIED).index(kind)])
    known, options = TRIED[kind]
    check(known, tried[first : first + len(known)], experts=options.get("experts", 0))


@pytest.mark.full
@pytest.mark.parametrize(
    ("known", "least", "experts"),
    [(MORE, 200, 0), (MORE_EXPERTS, 200, 4), (COMPILED, 100, 0), (COMPILED_EXPERTS, 100, 4)],
    ids=["more", "more experts", "compiled", "compiled experts"],
)
def test_more_plans_use_their_device_without_extra_waits(known, least, experts):
    done = plans_on_paper(list(known), "--layers=2", f"--experts={experts}")
    assert done.reports, done.stderr
    check(known, done.reports, least, experts)


def communicators(text: str, experts: int) -> int:
    """Return the planner's number of communicators on rank 0."""
    spec = PaperModel(layers=2, experts=experts).spec
    job = Job(shape=Shape.of_decoder(spec), seq_len=512, global_batch=64)
    columns = Columns.of([Plan.parse(text)], job)
    return int(axis_groups(job, columns, end=True)[0] + lanes(columns, 0)[0])


def check(known, reports, least=200, experts=0):
    """least: minimum number of kernels per step; compiled plans have fewer."""
    assert [report.name for report in reports] == list(known)
    for report in reports:
        assert (report.error, report.mismatch, report.races) == ("", "", {}), report.lines()
        waits, blocking = known[report.name]
        assert report.num_syncs <= waits, report.lines()
        assert report.num_blocking <= blocking, report.lines()
        assert report.kernels > least, report.lines()
        assert report.communicators == communicators(report.name, experts), report.name
        assert not refused_by_nccl(report), report.formats
        if "offload" not in report.name:
            # A run's communication time is the compute stream's wait for other streams. At zero=3 torch adds one wait
            # at the end of each backward.
            waits_s = sum(seconds for why, seconds in report.idle_s.items() if "another stream" in why)
            assert 0.9 * waits_s <= sum(report.over_s.values()) <= 1.001 * waits_s, report.lines()


STEPPED = """
import json

from tools.gpu_sim.decoder_plans import PaperModel, plan_report
from tools.gpu_sim.cuda import current_device

for plan, optimizer, states in json.loads(OPTIMIZERS):
    subject = PaperModel(layers=1, seq_len=128, batch=2, optimizer=optimizer, states=states)
    print(json.dumps(plan_report(plan, current_device(), subject).as_dict()))
"""


@pytest.mark.full  # each of these optimizers has its own test; this one checks only host waits
def test_optimizers_of_weft_cause_no_host_wait(tmp_path):
    script = tmp_path / "optimizers.py"
    script.write_text(STEPPED.replace("OPTIMIZERS", repr(json.dumps(OPTIMIZERS))))
    done = script_on_paper(script)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(OPTIMIZERS)
    for report in map(json.loads, lines):
        assert (report["error"], report["mismatch"], report["races"]) == ("", "", {}), report
        assert report["syncs"] == {}, report


@pytest.mark.full
def test_host_is_one_step_ahead_of_a_slow_device():
    """The host waits once, for the numbers of the previous step, while the device executes this one."""
    done = plans_on_paper(LARGE, "--layers=2", "--dim=2048", "--seq-len=4096")
    assert len(done.reports) == len(LARGE), done.stderr
    for report in done.reports:
        assert (report.error, report.num_syncs) == ("", 0), report.lines()
        assert [name.partition(" @")[0] for name in report.behind] == ["event.synchronize"], report.lines()
        assert list(report.behind.values()) == [1], report.lines()
        assert "waits for the host" not in report.idle_s, report.lines()
        assert report.step_s <= 1.1 * report.busy_s, report.lines()


#: Each fault is injected into Weft's code for one step on the simulated GPU.
FAULTS = """
import contextlib, gc, json, sys
from unittest.mock import patch

import torch
import weft.train.script.script_run
from weft.comm.transports.backend import BackendLink
from weft.memory.host_link import _CudaCopy
from weft.models.decoder import SwiGLU
from weft.parallel.zero_sharded.hooks import FirstGathers
from tools.gpu_sim.decoder_plans import PaperModel, plan_report
from tools.gpu_sim.cuda import current_device
from weft.train.step.update import WeightUpdate


def finished_unawaited(link, operation):
    operation.finished = True
    return True


def reads_the_norm(step, *numbers, **settings):
    torch.ones(1, device="cuda:0").item()
    return update(step, *numbers, **settings)


@contextlib.contextmanager
def labels_stay():
    with contextlib.ExitStack() as patches:
        for module in list(sys.modules.values()):
            if module.__name__.startswith("weft.") and hasattr(module, "move_batch"):
                move = module.move_batch


                def stay(batch, device, move=move):
                    moved = move(batch, device)
                    return {**moved, "labels": batch["labels"]} if isinstance(batch, dict) else moved

                patches.enter_context(patch.object(module, "move_batch", stay))
        yield


def scaled_on_the_host(block, x):
    return feed_forward(block, x) * torch.ones(x.shape[-1])


def gathers_at_once(first, units, stream):
    with torch.cuda.stream(stream):
        for number in units:
            first._modules[number].unshard(async_op=True)


update = WeightUpdate.apply_late
feed_forward = SwiGLU.forward
TRIED = {
    "none": ("offload=optimizer precision=bf16", contextlib.nullcontext()),
    "copy": ("offload=optimizer precision=bf16", patch.object(_CudaCopy, "wait", lambda copy: None)),
    "collective": ("dp_shard=2 zero=1 precision=bf16", patch.object(BackendLink, "block", finished_unawaited)),
    "host": ("precision=bf16", patch.object(WeightUpdate, "apply_late", reads_the_norm)),
    "device": ("precision=bf16", labels_stay()),
    "freed": ("dp_replicate=2 dp_shard=2 zero=3 accumulation=2 precision=bf16",
              patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None)),
    "early": ("dp_shard=2 zero=3 precision=bf16", patch.object(FirstGathers, "_gather", gathers_at_once)),
    "compiled": ("tp=2 precision=bf16 compile=on", patch.object(BackendLink, "block", finished_unawaited)),
    "compiled device": ("precision=bf16 compile=on", patch.object(SwiGLU, "forward", scaled_on_the_host)),
    "compiled none": ("precision=bf16 compile=on", contextlib.nullcontext()),
    "compiled attention": ("recompute=attention precision=bf16 compile=on", contextlib.nullcontext()),
}
found = {}
gc.freeze()
for name, (plan, fault) in TRIED.items():
    with fault:
        found[name] = plan_report(plan, current_device(), PaperModel(layers=2)).as_dict()
print(json.dumps(found))
"""


@pytest.mark.full
def test_injected_faults_are_detected(tmp_path):
    script = tmp_path / "faults.py"
    script.write_text(FAULTS)
    done = script_on_paper(script)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["none"]["races"] == {}
    assert any("copy @" in race and "nothing orders them" in race for race in found["copy"]["races"])
    assert any("nobody waits for it" in race for race in found["collective"]["races"])
    assert any(
        "_reduce_scatter_base_" in race and "nothing orders them" in race for race in found["collective"]["races"]
    )
    assert sum(found["host"]["syncs"].values()) == 1
    assert any(what.startswith("item @") for what in found["host"]["syncs"])
    assert "cpu" in found["device"]["mismatch"]
    assert found["device"]["error"]
    # In compiled blocks, attention that is recomputed in backward repeats its products.
    for name in ("compiled none", "compiled attention"):
        assert (found[name]["error"], found[name]["races"], found[name]["syncs"]) == ("", {}, {})
    again_s = found["compiled attention"]["products_s"] - found["compiled none"]["products_s"]
    model = PaperModel(layers=2)
    flops = 4 * model.layers * model.batch * model.seq_len**2 * model.dim
    assert again_s * FLOPS == pytest.approx(flops)
    # torch.compile itself refuses tensors of two devices.
    assert "Tensor device mismatch" in found["compiled device"]["error"]
    assert any("nobody waits for it" in race for race in found["compiled"]["races"])
    assert any(race.startswith("joined ") and "nothing orders them" in race for race in found["compiled"]["races"])
    assert any("nothing orders them" in race for race in found["early"]["races"])
    assert any("no record_stream" in race for race in found["freed"]["races"])


#: One communicator for both directions instead of lanes; receives stay early.
ONE_COMMUNICATOR = """
from dataclasses import replace

import weft.parallel.pipeline.runtime as runtime


def joined(axis, device, lanes):
    ends = {lane: tuple(sorted((lane.sender, lane.receiver))) for lane in lanes}
    return {
        lane: replace(axis, size=2, rank=pair.index(axis.rank), ranks=tuple(axis.ranks[end] for end in pair))
        for lane, pair in ends.items()
    }


runtime.join_lanes = joined
"""


@pytest.mark.full
def test_stages_wait_for_each_other_but_messages_of_one_kind_do_not_block_others(tmp_path):
    """Simulate the ranks of a pipeline with one clock; NCCL executes the operations of a communicator in order."""
    plan = "pp=2 microbatches=4 precision=bf16"
    options = ("--stages", "--layers=2", "--seq-len=64", "--batch=1")
    done = plans_on_paper([plan], *options)
    assert [report.name for report in done.reports] == [f"{plan}, rank {rank}" for rank in (0, 1)], done.stderr
    for report in done.reports:
        assert (report.error, report.mismatch, report.races, report.num_syncs) == ("", "", {}, 0), report.lines()
        # The step ends on both ranks with the norm; each waits for the other once in forward and once in backward.
        assert report.step_s == pytest.approx(done.reports[0].step_s, rel=0.05)
        assert any("comm/peer.py" in why for why in report.idle_s), report.lines()
    first = tmp_path / "first.py"
    first.write_text(ONE_COMMUNICATOR)
    planted = plans_on_paper([plan], f"--first={first}", *options)
    assert [report.error.partition(":")[0] for report in planted.reports] == [
        "the ranks wait for each other for ever"
    ] * 2
