"""Training on the mirror device, an accelerator simulated in host memory, equals one process, also with CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.choice import todays
from tests.parallel.table_cases import Script, TableCase, reference
from tools.gpu_sim.stub_library import built_library
from tools.mirror_device.device import NAME, SOURCE, load, package_in, why_not
from weft import env
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.monitor.events import read_events
from weft.verify.parity import DecoderCase, ParityResult, train_case, train_plain
from weft.verify.rank_pool import RankPool

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

SPEC = DecoderSpec(vocab_size=32, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=32, max_seq_len=8)
CASE = DecoderCase(SPEC, num_steps=3, seq_len=8)


@pytest.fixture(scope="module", params=[("mirror:0", "cpu"), ("mirror:0", "mirror:1")], ids="-".join)
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[RankPool, tuple[str, str]]]:
    """Two ranks and their devices. A process registers the device before its first backward, and keeps it."""
    built_library(SOURCE)  # once, before two ranks need it
    with RankPool(2) as pool:
        yield pool, request.param


def train_on(plan: str, devices: tuple[str, str], case: DecoderCase) -> tuple[ParityResult, bool]:
    """Train on this rank's device. Also return True if its memory held the model."""
    device = devices[dist.get_rank()]
    if device != "cpu":
        load()
        torch.get_device_module(NAME).set_device(device)
    result = train_case(plan, case, device=device)
    result.grads = {name: grad.cpu() for name, grad in result.grads.items()}
    result.weights = {name: weight.cpu() for name, weight in result.weights.items()}
    return result, device == "cpu" or torch.get_device_module(NAME).max_memory_allocated() > 0


@pytest.mark.parametrize(
    "plan",
    todays(["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=3", "tp=2", "tp=2 sp=on",
            "cp=2", "pp=2 accumulation=2"], parts=2),
)  # fmt: skip
def test_device_equals_one_process(ranks, plan):
    (pool, devices), plain = ranks, train_plain(CASE)
    for result, used_memory in pool.run(train_on, f"{plan} precision=fp64", devices, CASE):
        assert used_memory
        assert result.largest_difference(plain) < 1e-12


def train_tables(case: TableCase, devices: tuple[str, str], folder: str):
    """Train a recommender, save it, and resume under other styles. Return its weights and the devices of tables."""
    device = devices[dist.get_rank()]
    if device != "cpu":
        load()
        torch.get_device_module(NAME).set_device(device)
    script = Script(case, device=device)
    script.train(0, 2)
    script.run.save(folder, step=2, model=script.model, optimizer=script.step)
    script = Script(replace(case, layout="{user,item}=host {genre,seen,tags}=rows"), device=device)
    script.run.load(folder, model=script.model, optimizer=script.step)
    script.train(2, case.steps)
    places = [(one.weight.device.type, one.read(torch.arange(0), False).device.type) for one in script.tables]
    return {name: tensor.cpu() for name, tensor in script.weights().items()}, places


def test_tables_in_host_memory_equal_plain_torch(ranks, tmp_path):
    pool, devices = ranks
    case = TableCase("{user,seen}=host item=columns genre=replicate tags=rows", "dp_replicate=2", steps=4)
    plain = reference(case)[1]
    for (weights, places), device in zip(pool.run(train_tables, case, devices, str(tmp_path)), devices, strict=True):
        kind = device.partition(":")[0]
        assert places == [("cpu", kind)] * 2 + [(kind, kind)] * 3
        for name, tensor in plain.items():
            assert float((weights[name] - tensor).abs().max()) <= 1e-10, name


@pytest.mark.full
def test_weft_train_and_doctor_on_a_device_of_a_package(tmp_path):
    package_in(tmp_path)
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "warp {i}, weft {i * i}"}}\n' for i in range(200)))
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    variables = env.child_env(PYTHONPATH=paths, OMP_NUM_THREADS="1")

    def weft(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "weft", *words]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)

    report = json.loads(weft("doctor", "--json").stdout)["lines"]
    lines = {line["name"]: line for line in report if line["section"] == "device"}
    assert lines["kind"]["text"] == "mirror: mirror, collectives by gloo through host memory"
    # torch's fallback to the CPU has no convolution.
    assert {name for name, line in lines.items() if line["status"] == "fail"} == {"convolution"}
    assert lines["convolution"]["text"].startswith("convolution_overrideable not implemented")

    def final_loss(device: str) -> float:
        folder = tmp_path / device
        done = weft(
            "train", f"launch.device={device}", "plan=dp_replicate=2 precision=fp64", f"run.dir={folder}",
            f"data.train={tmp_path}/text.jsonl", f"data.cache_dir={tmp_path}/cache", "tokenizer.kind=bytes",
            "model.dim=16", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_dim=32",
            "train.seq_len=16", "train.global_batch=4", "train.steps=3", "eval.every=0", "checkpoint.every=0",
            "sample.prompt=",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        steps = [event for event in read_events(next(folder.glob("*/events.jsonl"))) if "loss" in event]
        return steps[-1]["loss"]

    assert final_loss(NAME) == pytest.approx(final_loss("cpu"), rel=1e-12)
