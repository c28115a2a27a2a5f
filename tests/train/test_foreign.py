"""Import of torch.distributed.checkpoint and DeepSpeed checkpoints; hostile ones are rejected with one message."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.train.foreign_cases import NAMES, STEPS, resume_imported, train_fsdp2, write_zero
from weft.checkpoint.load import load_checkpoint, verify_checkpoint
from weft.cli.app import run
from weft.errors import CheckpointError
from weft.train.weights.foreign_checkpoint import bring_in, sorted_names
from weft.train.weights.foreign_files import NotTaken, Taken, most_bytes, read_dcp, read_pickled, read_zero


@pytest.fixture
def no_sandbox(monkeypatch) -> None:
    """Read in this process. A process that loads torch takes seconds, and only the sandbox tests need it."""

    def read(kind: str, source: Path, work: Path, limit_s: float) -> None:
        taken = Taken(work, 2**30)
        try:
            (read_dcp if kind == "dcp" else read_zero)(source, taken)
        except NotTaken as error:
            raise CheckpointError(f"SOURCE={source}: {error}. Import a checkpoint that you saved yourself.") from error
        taken.close()

    monkeypatch.setattr("weft.train.weights.foreign_checkpoint.run_confined", read)


@pytest.mark.parametrize("flatten", [False, True])
def test_fsdp2_checkpoint_resumes_in_weft(tmp_path, ranks2, no_sandbox, flatten):
    wanted = ranks2.run(train_fsdp2, str(tmp_path / "dcp"), flatten)[0]
    found = bring_in(tmp_path / "dcp", tmp_path / "run")
    assert (found.step, found.num_weights, found.num_states) == (STEPS, 4, 9)
    assert found.left_out == ("extra.rng",)
    assert verify_checkpoint(found.path) == []
    opened = load_checkpoint(found.path)
    for name, tensor in wanted.items():
        if not name.startswith("after/"):
            assert torch.equal(opened.tensors("optimizer" if "/" in name else "model")[name], tensor)
    assert opened.tensors("optimizer")["a.bias/step"].item() == STEPS
    for plan in ("dp_replicate=2", "dp_shard=2 zero=3"):
        after = ranks2.run(resume_imported, str(tmp_path / "run"), plan)[0]
        for name in NAMES:
            torch.testing.assert_close(after[name], wanted[f"after/{name}"], rtol=1e-6, atol=1e-7)


def test_imported_torch_checkpoint_resumes_bitwise(tmp_path, start, no_sandbox):
    """Step 6 of a run, saved by torch and imported into another run, gives equal final weights and moments."""
    first, _, _ = start("run.name=first", "checkpoint.keep=9")
    opened = load_checkpoint(first.checkpoint(6))
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in opened.tensors("optimizer").items():
        weight, _, kind = name.rpartition("/")
        states.setdefault(weight, {})[kind] = tensor
    saved = {"model": dict(opened.tensors("model")), "optimizer": {"state": states}, "step": 6}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    bring_in(tmp_path / "dcp", tmp_path / "second" / "checkpoints")
    second, _, shown = start("run.name=second")
    assert "resumed from step 6 (imported from torch.distributed.checkpoint)" in shown
    ends = [load_checkpoint(folder.checkpoint(12)) for folder in (first, second)]
    for group in ("model", "optimizer"):
        for name, tensor in ends[0].tensors(group).items():
            assert torch.equal(ends[1].tensors(group)[name], tensor), name


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_deepspeed_layout(tmp_path, no_sandbox, stage, world_size):
    wanted = write_zero(tmp_path / "ds", stage, world_size, gaps=stage == 2)
    found = bring_in(tmp_path / "ds", tmp_path / "run")
    assert (found.step, found.num_weights, found.num_states) == (STEPS, 4, 9)
    opened = load_checkpoint(found.path, verify=True)
    for name, tensor in wanted.items():
        assert torch.equal(opened.tensors("optimizer" if "/" in name else "model")[name], tensor)
    assert torch.equal(opened.tensors("model")["count"], torch.arange(3.0))


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_files_written_by_deepspeed(tmp_path, stage):
    """DeepSpeed writes the files if it is installed (extra `bench`)."""
    pytest.importorskip("deepspeed")
    script = tmp_path / "script.py"
    script.write_text(DEEPSPEED_SCRIPT)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{os.getcwd()}:{os.getcwd()}/src"}
    subprocess.run([*ranks, str(script), str(stage), str(tmp_path / "ds")], check=True, env=environment, timeout=300)
    opened = load_checkpoint(bring_in(tmp_path / "ds", tmp_path / "run").path)
    for name, tensor in torch.load(tmp_path / "ds" / "want.pt", weights_only=True).items():
        torch.testing.assert_close(opened.tensors("optimizer" if "/" in name else "model")[name], tensor)


DEEPSPEED_SCRIPT = """
import sys, torch, deepspeed
from tests.train.foreign_cases import STEPS, batch, small
stage, out = int(sys.argv[1]), sys.argv[2]
deepspeed.init_distributed("gloo")
def groups(m):
    return [{"params": [m.a.weight, m.b.weight], "weight_decay": 0.1}, {"params": [m.a.bias], "weight_decay": 0.0}]
model = small()
config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True,
          "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for step in range(STEPS):
    engine.backward(engine(batch(step, engine.global_rank)).pow(2).mean())
    engine.step()
engine.save_checkpoint(out)
if engine.global_rank == 0:
    plain = small()
    optimizer = torch.optim.AdamW(groups(plain), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        plain(torch.cat([batch(step, 0), batch(step, 1)])).pow(2).mean().backward()
        optimizer.step()
    want = {}
    for name, parameter in plain.named_parameters():
        want[name] = parameter.detach()
        want |= {f"{name}/{kind}": optimizer.state[parameter][kind] for kind in ("exp_avg", "exp_avg_sq")}
    torch.save(want, out + "/want.pt")
"""


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


class Opens(Evil):
    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.fixture(scope="module")
def dcp_folder(tmp_path_factory) -> Path:
    """Save a plain checkpoint of one process."""
    folder = tmp_path_factory.mktemp("dcp")
    tensors = {"model": {"w": torch.arange(12.0).reshape(3, 4)}, "step": 5}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("kind", [Evil, pytest.param(Opens, marks=pytest.mark.full)])
def test_hostile_metadata_is_rejected_with_one_message(tmp_path, dcp_folder, capsys, kind):
    source = Path(shutil.copytree(dcp_folder, tmp_path / "source"))
    (source / ".metadata").write_bytes(pickle.dumps(kind(tmp_path / "touched")))
    assert run(["ckpt", "import", str(source), str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    name = "posix.system" if kind is Evil else "io.open"
    assert f".metadata: it holds {name}, which is not a weight; Weft ran and loaded nothing from it. Import" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "touched").exists()
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == []


@pytest.mark.parametrize("kind", [Opens, pytest.param(Evil, marks=pytest.mark.full)])
def test_hostile_weights_are_rejected(tmp_path, dcp_folder, kind):
    write_zero(tmp_path / "ds", 2, 2)
    torch.save({"module": kind(tmp_path / "touched")}, tmp_path / "ds/global_step3/mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="which is not a weight; Weft ran and loaded nothing from it"):
        bring_in(tmp_path / "ds", tmp_path / "run")
    assert not (tmp_path / "touched").exists()


def test_sandbox_blocks_code_that_passes_the_unpickler(tmp_path):
    """Code that ran would start no program, open no connection and write nowhere."""
    for attempt in (
        "os.system('touch {touched}')",
        "open('{touched}', 'w')",
        "os.open('{touched}', os.O_CREAT)",
        "os.mkdir('{touched}')",
        "__import__('subprocess').run(['touch', '{touched}'])",
        "__import__('socket').create_connection(('127.0.0.1', 9))",
        "os.fork()",
        "os.remove('{out}/../kept')",
    ):
        (tmp_path / "kept").write_text("")
        code = (
            "import os, pathlib; from weft.train.weights.foreign_reader import _stand_wall\n"
            f"_stand_wall(pathlib.Path('{tmp_path}/out'))\n" + attempt
        ).format(touched=tmp_path / "touched", out=tmp_path / "out")
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "PermissionError: reading the checkpoint tri" in ended.stderr, attempt
        assert not (tmp_path / "touched").exists()
        assert (tmp_path / "kept").exists()


def climb(source: Path) -> None:
    text = (source / ".metadata").read_bytes()
    (source / ".metadata").write_bytes(text.replace(b"__0_0.distcp", b"../secret.dc"))


def link(source: Path) -> None:
    (source / "__0_0.distcp").rename(source.parent / "elsewhere")
    (source / "__0_0.distcp").symlink_to(source.parent / "elsewhere")


DAMAGES = {
    "climbs": (climb, "'../secret.dc' names a file outside the checkpoint's folder"),
    "link": (link, "__0_0.distcp is missing or is not a plain file"),
    "missing": (lambda source: (source / "__0_0.distcp").unlink(), "__0_0.distcp is missing or is not a plain file"),
    "cut": (lambda source: os.truncate(source / "__0_0.distcp", 100), "__0_0.distcp is shorter than .metadata records"),
    "empty": (lambda source: (source / ".metadata").write_bytes(b""), ".metadata: it cannot be read as weights"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_sources_are_rejected_with_the_reason(tmp_path, dcp_folder, no_sandbox, name):
    source = Path(shutil.copytree(dcp_folder, tmp_path / "source"))
    damage, reason = DAMAGES[name]
    damage(source)
    with pytest.raises(CheckpointError) as caught:
        bring_in(source, tmp_path / "run")
    assert str(caught.value).startswith(f"SOURCE={source}: ")
    assert reason in str(caught.value)


def test_confined_process_imports(tmp_path, dcp_folder, capsys):
    assert run(["ckpt", "import", str(dcp_folder), str(tmp_path / "run")]) == 0
    message = capsys.readouterr().err
    path = tmp_path / "run" / "checkpoints" / "step_00000005"
    assert message == (
        f"weft: imported 1 weight and 0 optimizer states of torch.distributed.checkpoint, step 5, into {path}.\n"
    )
    assert torch.equal(load_checkpoint(path).tensors("model")["w"], torch.arange(12.0).reshape(3, 4))


def test_slow_source_times_out(tmp_path, dcp_folder):
    with pytest.raises(
        CheckpointError,
        match=r"took longer than 0\.01 s\. If the checkpoint is large, raise "
        r"--limit\.",
    ):
        bring_in(dcp_folder, tmp_path, limit_s=0.01)


def test_folder_without_checkpoint_is_rejected(tmp_path, capsys):
    assert run(["ckpt", "import", str(tmp_path), str(tmp_path / "run")]) == 2
    assert "not a checkpoint that Weft imports." in capsys.readouterr().err


def test_existing_step_is_not_overwritten(tmp_path, dcp_folder, no_sandbox):
    assert bring_in(dcp_folder, tmp_path).step == 5
    with pytest.raises(CheckpointError, match="already has a checkpoint of step 5"):
        bring_in(dcp_folder, tmp_path)
    assert bring_in(dcp_folder, tmp_path, step=6).step == 6


def test_ambiguous_tensor_names_are_resolved():
    places = [
        ("app", "model", "module.w"), ("app", "model", "module.b.w"), ("rng", "cpu"),
        ("app", "optim", "state", "module.w", "exp_avg"), ("app", "optim", "state.module.b.w.exp_avg"),
    ]  # fmt: skip
    found = sorted_names(places)
    assert dict(found.weights) == {"w": places[0], "b.w": places[1]}
    assert dict(found.states) == {"w/exp_avg": places[3], "b.w/exp_avg": places[4]}
    assert found.left_out == (("rng", "cpu"),)
    with pytest.raises(CheckpointError, match=r"Name their table with --model, one of: x, y\."):
        sorted_names([("x", "w"), ("y", "w")])
    assert dict(sorted_names([("x", "w"), ("y", "w")], "y").weights) == {"w": ("y", "w")}
    with pytest.raises(CheckpointError, match="are keyed by number instead of by name"):
        sorted_names([("model", "w"), ("optim", "state", 0, "exp_avg")], "model")


def _old_format(path: Path) -> None:
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)


HOSTILE_PICKLES: dict[str, Any] = {
    r"a: it expands to 900000000 bytes": lambda path: torch.save({"a": torch.zeros(1).expand(15000, 15000)}, path),
    r"8: it expands to": lambda path: torch.save(dict.fromkeys(map(str, range(20)), torch.ones(2**20)), path),
    r"not in the format of torch\.save since torch 1\.6\. If you trust it": _old_format,
    r"not in the format of torch\.save since": lambda path: path.write_bytes(b"hello"),
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_PICKLES)
def test_expanding_or_old_format_pickles_are_rejected(tmp_path, text, monkeypatch):
    monkeypatch.setattr("weft.train.weights.foreign_files._MOST_MORE", 2**20)
    file = tmp_path / "pytorch_model.bin"
    HOSTILE_PICKLES[text](file)
    with pytest.raises(NotTaken, match=text):
        read_pickled(tmp_path, Taken(tmp_path, most_bytes(file.stat().st_size)))


def test_tensor_with_several_names_is_stored(tmp_path):
    weight = torch.ones(2**18)
    torch.save({"a": weight, "b": weight, "c": torch.arange(4).expand(100, 4)}, tmp_path / "pytorch_model.bin")
    taken = Taken(tmp_path, most_bytes((tmp_path / "pytorch_model.bin").stat().st_size))
    read_pickled(tmp_path, taken)
    taken.close()
    assert (tmp_path / "0.safetensors").stat().st_size > 2 * 2**20


def test_pickled_entries_that_are_no_tensors_are_left_out(tmp_path):
    entries = {
        "state_dict": {"a": torch.ones(2), "head": {"b": torch.ones(3)}, 7: torch.ones(4)},
        "more": {},
        "epoch": 1,
    }
    torch.save(entries, tmp_path / "pytorch_model.bin")
    taken = Taken(tmp_path, 2**20)
    read_pickled(tmp_path, taken)
    taken.close()
    said = json.loads((tmp_path / "taken.json").read_text())
    assert [one["place"] for one in said["tensors"]] == [["a"]]
    assert said["values"] == []
    assert said["left_out"] == [f"pytorch_model.bin: {name}" for name in ("more", "epoch", "head", "7")]


def test_confined_process_has_a_memory_limit():
    code = (
        "import numpy; from weft.train.weights.foreign_reader import _limit_memory\n"
        "_limit_memory(2**20)\n"
        "try: numpy.ones(2**30)\n"
        "except MemoryError: print('refused')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "refused\n" or sys.platform != "linux", ended.stderr
