"""Checkpoints in object stores: fsspec's memory store for most tests, and a real S3 server."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
import uuid
import warnings

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from typer.testing import CliRunner

from weft import env
from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import list_checkpoints, load_checkpoint, newest_checkpoint, verify_checkpoint
from weft.checkpoint.object_store import located
from weft.checkpoint.prune import prune_checkpoints, set_aside
from weft.checkpoint.read import OwnershipMap, Part
from weft.checkpoint.save import SavedSlice, save_checkpoint, save_slices
from weft.cli.app import run
from weft.cli.checkpoints.ckpt import app
from weft.errors import CheckpointError
from weft.train.weights.foreign_files import Taken, read_dcp

from .faults import content


@pytest.fixture
def root():
    return located(f"memory://{uuid.uuid4().hex}/run")


def save(root, step: int, tag: str = "first"):
    return save_checkpoint(root, step, *content(step, tag))


def write(path, data: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(path.url.removeprefix("memory:/"), data)


def delete(path) -> None:
    fsspec.filesystem("memory").rm_file(path.url.removeprefix("memory:/"))


def steps(root) -> list[int]:
    return [load_checkpoint(path, lazily=True).step for path in list_checkpoints(root)]


def test_save_and_load_round_trip_with_digests(root):
    path = save(root, 3)
    opened, (tensors, state) = load_checkpoint(path, verify=True), content(3)
    assert opened.state == state
    for group, members in tensors.items():
        assert all(torch.equal(opened.tensors(group)[name], tensor) for name, tensor in members.items())
    file = path / "model.safetensors"
    data = fsspec.filesystem("memory").cat_file(file.url.removeprefix("memory:/"))
    write(file, data[:-1] + b"x")
    assert verify_checkpoint(path) == [
        "model.safetensors does not match its digest: its bytes changed after it was written"
    ]
    write(file, data[:-1])
    assert verify_checkpoint(path, digests=False)[0].startswith("model.safetensors has ")


def test_killed_upload_is_reported_ignored_and_removed_by_next_pruning(root):
    save(root, 3)
    delete(save(root, 6) / "COMMIT")
    found = newest_checkpoint(root)
    assert found.step == 3
    assert [str(one) for one in found.passed_over] == ["step_00000006: it has no COMMIT, so saving it never finished"]
    assert save(root, 6).name == "step_00000006.again"  # nothing is overwritten
    assert steps(root) == [3, 6]
    prune_checkpoints(root, 1)
    assert [path.name for path in root.iterdir()] == ["step_00000006.again"]


def test_last_save_of_a_step_is_used(root):
    for number, tag in enumerate(("first", "second", "third")):
        assert save(root, 3, tag).name == f"step_00000003{('', '.again', '.again2')[number]}"
        assert load_checkpoint(newest_checkpoint(root).path).state["tag"] == tag
    assert len(list(root.iterdir())) == 1


def test_set_aside_writes_a_marker(root):
    save(root, 3), save(root, 6)
    set_aside(root, lambda one: one.step == 6)
    assert newest_checkpoint(root).step == 3
    assert verify_checkpoint(root / "step_00000006") == []


@pytest.mark.parametrize("url", ["s3://KEY:WORD@bucket/x", "s3://bucket/x?token=WORD"])
def test_credentials_in_a_url_are_rejected_and_not_printed(url):
    with pytest.raises(CheckpointError, match=r"s3://...: a URL with a user, a password or a query") as caught:
        located(url)
    assert "WORD" not in str(caught.value)


def run_weft(capsys, *words: str) -> tuple[int, str]:
    """Return the exit code and output of `weft`."""
    code = run([*words])
    told = capsys.readouterr()
    return code, told.out + told.err


def check_verbs(root, tmp_path, capsys) -> None:
    """Run each verb of `weft ckpt`, and `weft export`, on steps 3 and 6 of a store, and on missing steps."""
    assert run_weft(capsys, "ckpt", "show", f"{root}@3", "model/w") == (
        0,
        f"{root}/step_00000003: step 3, no plan\n"
        "tensor   dtype  shape       size  files\n"
        "model/w  F32    [1000]  3.91 KiB  model.safetensors\n"
        "1 tensor, 3.91 KiB\n",
    )
    code, told = run_weft(capsys, "ckpt", "diff", f"{root}@3", str(root), "--json")
    assert code == 1
    assert [one["name"] for one in json.loads(told)["numbers"]] == ["model/w", "model/b", "optimizer/m"]
    assert run_weft(capsys, "ckpt", "diff", f"{root}/step_00000003", f"{root}@3") == (0, "identical: 3 tensors\n")
    assert run_weft(capsys, "export", str(root), str(tmp_path / "out"), "--dtype", "bf16")[0] == 0
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], content(6)[0]["model"]["w"].bfloat16())
    code, told = run_weft(capsys, "export", str(root), f"{root}/out")
    assert (code, "FOLDER=" in told, "Give a path" in told) == (2, True, True)
    code, told = run_weft(capsys, "ckpt", "show", f"{root}@5")
    assert (code, told) == (
        2,
        f"error: RUN={root}@5: it has no finished checkpoint of step '5'. Use one of: 3, 6.\n",
    )
    assert "whole" in run_weft(capsys, "ckpt", "verify", f"{root}@3", "--fast")[1]
    pruned = run_weft(capsys, "ckpt", "prune", str(root), "--keep-last", "1")[1]
    assert pruned.startswith(f"would delete {root}/step_00000003")
    lists = "RUN=" in run_weft(capsys, "ckpt", "list", f"{root}/nothing")[1]
    assert (lists, steps(root)) == (True, [3, 6])


def test_ckpt_commands_accept_store_urls(root, tmp_path, capsys):
    save(root, 3), save(root, 6)
    check_verbs(root, tmp_path, capsys)


def test_imported_checkpoint_is_saved_to_a_store(root, tmp_path, capsys, monkeypatch):
    def read(kind, source, work, limit_s):
        taken = Taken(work, 2**30)
        read_dcp(source, taken)
        taken.close()

    monkeypatch.setattr("weft.train.weights.foreign_checkpoint.run_confined", read)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": {"w": torch.ones(3)}, "step": 4}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert run_weft(capsys, "ckpt", "import", str(tmp_path / "dcp"), str(root))[0] == 0
    assert torch.equal(load_checkpoint(root / "step_00000004", verify=True).tensors("model")["w"], torch.ones(3))
    code, told = run_weft(capsys, "ckpt", "import", str(root), str(tmp_path / "run"))
    assert (code, told) == (2, f"error: SOURCE={root}: it is a URL, and only a folder works here. Give a path.\n")


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("gs://b/x", "gcsfs", "gcs"), ("abfs://b/x", "adlfs", "azure"), ("s3://b/x", "s3fs", "s3")],
)
def test_missing_package_is_named_with_its_install_command(url, package, extra, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url[: url.index(":")], raising=False)
    for words in (
        ("list", url),
        ("show", url),
        ("verify", url),
        ("diff", url, url),
        ("prune", url, "--keep-last", "1"),
    ):
        assert run_weft(capsys, "ckpt", *words) == (
            2,
            f"error: {package} is not installed: {url[:-3]} needs it. In a checkout of Weft, run: "
            f'pip install -e ".[{extra}]".\n',
        )


class Refusing(http.server.BaseHTTPRequestHandler):
    """Store that answers each request with 403."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        text = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing(monkeypatch):
    pytest.importorskip("s3fs")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEYNAME")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "KEYWORD")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield "s3://refused/run"
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.shutdown()
    server.server_close()


def test_access_denied_is_one_message(refusing, tmp_path, capsys):
    for words in (
        ("ckpt", "list", refusing),
        ("ckpt", "show", f"{refusing}@3"),
        ("ckpt", "show", f"{refusing}/step_00000003"),
        ("ckpt", "verify", refusing),
        ("ckpt", "diff", refusing, refusing),
        ("ckpt", "prune", refusing, "--keep-last", "1"),
        ("export", refusing, str(tmp_path / "out")),
    ):
        code, told = run_weft(capsys, *words)
        assert code == 2
        assert told.startswith(f"error: {refusing}")
        assert told.endswith(
            ": the store refused access: check the credentials of this machine, and what they may do there.\n"
        )
    with pytest.raises(CheckpointError, match="the store refused access"):
        save(located(refusing), 1)
    with pytest.raises(CheckpointError, match="the store refused access"):
        newest_checkpoint(located(refusing))


def save_two_halves(root, step: int, look=None):
    """Save with two ranks, as threads, each with half of a tensor."""
    barrier, run_weft, value = threading.Barrier(2), [b"", b""], [None]
    whole, ended = torch.arange(4_000_000.0), []

    def gather(rank):
        def act(record):
            run_weft[rank] = record
            barrier.wait()
            found = [*run_weft]
            barrier.wait()
            return found

        return act

    def on_first(rank):
        def act(do):
            if rank == 0:
                try:
                    value[0] = {"value": do()}
                except Exception as error:
                    value[0] = {"error": error}
            barrier.wait()
            found = value[0]
            barrier.wait()
            if "error" in found:
                raise found["error"]
            return found["value"]

        return act

    def run(rank):
        part = Part((4_000_000,))
        piece = SavedSlice(
            "model/w",
            part,
            OwnershipMap((0, 1), length=2_000_000),
            rank * 2_000_000,
            whole[rank * 2_000_000 :][:2_000_000],
        )
        together = RankGroup(rank, 2, on_first(rank), gather(rank))
        try:
            ended.append(save_slices(root, step, [piece], {"n": 1}, together, ("model",), look))
        except CheckpointError as error:
            ended.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    [one.start() for one in threads], [one.join() for one in threads]
    return ended, whole


def test_ranks_write_their_own_objects_and_read_only_their_ranges(root):
    ended, whole = save_two_halves(root, 3)
    path = ended[0]
    assert ended == [path, path]
    assert {one.name for one in path.iterdir()} == {
        "COMMIT", "manifest.json", "model-00000.safetensors", "model-00001.safetensors", "state.json"
    }  # fmt: skip
    opened, out = load_checkpoint(path, lazily=True), bytearray(400)
    opened.read("model", "w", Part((4_000_000,)), 1_999_950, memoryview(out))  # across the boundary of the two files
    assert torch.equal(torch.frombuffer(out, dtype=torch.float32), whole[1_999_950:2_000_050])
    assert torch.equal(opened.tensors("model")["w"], whole)


def test_s3_server_stores_checkpoints_of_two_ranks(s3, tmp_path, capsys):
    root = s3 / "run"
    path, whole = save_two_halves(root, 3)[0][0], save_two_halves(root, 6)[1]
    assert str(path) == "s3://bucket/run/step_00000003"
    assert torch.equal(load_checkpoint(path, verify=True).tensors("model")["w"], whole)
    shown = CliRunner().invoke(app, ["list", str(root), "--json"])
    assert [(one["step"], one["state"], one["num_files"]) for one in json.loads(shown.output)] == [
        (3, "committed", 5), (6, "committed", 5)
    ]  # fmt: skip
    assert CliRunner().invoke(app, ["verify", str(root)]).exit_code == 0
    assert CliRunner().invoke(app, ["prune", str(root), "--keep-last", "1", "--yes"]).exit_code == 0
    assert steps(root) == [6]
    assert run_weft(capsys, "ckpt", "list", "s3://nowhere/x") == (
        2,
        "error: RUN=s3://nowhere/x: the store has no s3://nowhere. Check its name.\n",
    )
    assert "KEYWORD" not in str(load_checkpoint(root / "step_00000006")._manifest)
    save(s3 / "verbs", 3), save(s3 / "verbs", 6)
    check_verbs(s3 / "verbs", tmp_path, capsys)
    with pytest.raises(CheckpointError, match=r"checkpoint.dir=s3://nowhere/x: nothing can be written "):
        save_checkpoint(located("s3://nowhere/x"), 1, *content(1))


@pytest.mark.full
def test_writer_killed_during_upload_leaves_no_valid_checkpoint(s3, tmp_path):
    root = s3 / "killed"
    save(root, 1)
    script = (
        "import torch, time; from weft.checkpoint.save import save_checkpoint\n"
        "from weft.checkpoint.object_store import located\n"
        "look = lambda group, name, values: (print('x', flush=True), time.sleep(0.2))\n"
        f"save_checkpoint(located('{root}'), 2, {{'model': {{'w': torch.zeros(30_000_000)}}}}, {{}}, look=look)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    for _ in range(12):  # 48 MiB: the first part is being uploaded
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert newest_checkpoint(root).step == 1
    save(root, 2)
    assert steps(root) == [1, 2]


def trained(folder, *settings: str) -> subprocess.CompletedProcess[str]:
    """Run `weft train` with two rank processes, a tiny decoder and a checkpoint every 3 steps."""
    (folder / "text.jsonl").write_text("".join(f'{{"text": "warp {i}, weft {i * i}"}}\n' for i in range(200)))
    words = ["model.name=tiny", "model.dim=32", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=2",
             "model.ffn_dim=64", "tokenizer.kind=bytes", "train.seq_len=32", "train.global_batch=8", "eval.every=0",
             "eval.batches=1", "sample.prompt=", "launch.device=cpu", "plan=dp_shard=2 zero=3", "checkpoint.every=3",
             f"data.train={folder / 'text.jsonl'}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder}",
             *settings]  # fmt: skip
    command = [sys.executable, "-m", "weft", "train", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env.child_env(OMP_NUM_THREADS="1"))


@pytest.mark.full
def test_rank_processes_save_to_an_s3_server_and_resume_from_it(s3, tmp_path):
    kept, root = f"checkpoint.dir={s3 / 'ranks'}", s3 / "ranks" / "away"
    fixed = ("schedule.kind=constant", "run.name=away")
    assert trained(tmp_path, *fixed, kept, "train.steps=6").returncode == 0
    assert steps(root) == [3, 6]
    assert not [*tmp_path.glob("away/checkpoints/step_*")]
    done = trained(tmp_path, *fixed, kept, "train.steps=9")
    assert (done.returncode, "resumed from step 6" in done.stdout) == (0, True), done.stderr
    assert trained(tmp_path, "schedule.kind=constant", "run.name=here", "train.steps=9").returncode == 0
    ours, theirs = newest_checkpoint(root), newest_checkpoint(tmp_path / "here" / "checkpoints")
    assert (ours.step, theirs.step) == (9, 9)
    for group in ("model", "optimizer"):
        found, wanted = (load_checkpoint(one.path, verify=True).tensors(group) for one in (ours, theirs))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.full
def test_run_denied_by_a_store_ends_with_one_message(refusing, tmp_path):
    done = trained(tmp_path, f"checkpoint.dir={refusing}", "train.steps=6")
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.stderr
    assert "the store refused access: check the credentials of this machine" in told[0]
    assert "Traceback" not in done.stderr
    assert "KEYWORD" not in done.stderr + done.stdout
