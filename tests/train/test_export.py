"""`weft export` from the command line: runs become transformers folders with the same outputs."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.conftest import SMALL
from weft import env
from weft.checkpoint.load import load_checkpoint
from weft.cli.app import run as weft_run
from weft.config.files import load_config
from weft.data.text.tokenizer import Tokenizer
from weft.errors import CheckpointError
from weft.models.registry import build_decoder
from weft.train.folder import RunFolder
from weft.train.preparation import prepare_run
from weft.train.rank_run import Start, run_rank
from weft.train.states.model_state import restore_model
from weft.train.tasks.generation import generate_text
from weft.train.weights.decoder_files import decoder_of, tokenizer_of
from weft.train.weights.foreign_files import NotTaken, Taken, read_pickled

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

CHATS = [
    {"messages": [{"role": "user", "content": f"warp {one}?"}, {"role": "assistant", "content": f"weft {one * one}"}]}
    for one in range(24)
]
TUNED = [
    "train.seq_len=48", "train.global_batch=4", "train.steps=4", "schedule.warmup_steps=1", "optimizer.lr=2e-2",
    "eval.every=0", "eval.batches=1", "checkpoint.every=2", "checkpoint.keep=9", "data.holdout=0.2", "sample.prompt=",
    "launch.device=cpu",
]  # fmt: skip
ADAPTER = ["adapter.rank=3", 'adapter.targets=["q_proj","down_proj"]', "adapter.kind=dora"]
PROMPT = "warp 3"


def train(*settings: str) -> RunFolder:
    """Train a run of one rank in this process."""
    folder = prepare_run(load_config(None, [*settings]).config, world_size=1)
    run_rank(folder.path, None, io.StringIO(), Start())
    return RunFolder(folder.path)


def command(*words: str) -> str:
    """Run a command in its own process, check that it succeeds, and return its output."""
    line = [sys.executable, "-m", "weft", *words]
    ended = subprocess.run(line, env=env.child_env(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Prepare texts and chats, a trained base with its export, and an adapter and a full run on that base."""
    here = tmp_path_factory.mktemp("export")
    words = ["warp", "weft", "loom", "thread", "cloth"]
    lines = [" ".join(words[(i * k) % 5] for k in range(1, 40)) for i in range(1, 41)]
    (here / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (here / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in CHATS))
    places = [f"run.dir={here}", f"data.cache_dir={here / 'cache'}"]
    train(
        *SMALL, *places, f"data.train={here / 'text.jsonl'}", "run.name=base", "tokenizer.kind=bpe",
        "tokenizer.vocab_size=300", "train.steps=6", "checkpoint.keep=9", "model.max_seq_len=96",
    )  # fmt: skip
    assert weft_run(["export", str(here / "base"), str(here / "exported")]) == 0
    tuned = [*TUNED, *places, f"data.train={here / 'chats.jsonl'}", f"model.path={here / 'exported'}"]
    train(*tuned, "run.name=adapter", *ADAPTER)
    train(*tuned, "run.name=full", "plan=dp_replicate=1 precision=bf16")
    return here


def theirs(folder: Path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def generated(folder: Path, prompt: str = PROMPT, num_tokens: int = 24) -> str:
    """Return greedy text of transformers' classes from an exported folder."""
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), theirs(folder)
    read = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    found = model.generate(**read, max_new_tokens=num_tokens, do_sample=False)
    return prompt + tokenizer.decode(found[0, read["input_ids"].shape[1] :], skip_special_tokens=True)


def test_exported_decoder_matches_transformers(home):
    run = RunFolder(home / "base")
    own = build_decoder(decoder_of(run), seed=0)
    restore_model(own, load_checkpoint(run.checkpoint(6)))
    ids = torch.arange(40)[None] * 7 % 290
    torch.testing.assert_close(logits(theirs(home / "exported"), ids), own(ids), rtol=1e-5, atol=1e-5)
    assert generated(home / "exported") == generate_text(run, PROMPT, 24, temperature=0.0)
    ours = Tokenizer.load(tokenizer_of(run)).encode("warp, weft\nand 12")
    assert transformers.AutoTokenizer.from_pretrained(home / "exported").encode("warp, weft\nand 12") == ours
    card = (home / "exported" / "README.md").read_text()
    assert "| step | 6 of 6 |" in card
    assert "| plan | `dp_replicate=1` |" in card
    assert "text.jsonl: text" in card


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 asks for it
def test_adapter_is_merged_or_written_for_peft(home, capsys):
    run, merged, alone = home / "adapter", home / "merged", home / "alone"
    assert weft_run(["export", str(run), str(merged), "--merge"]) == 0
    assert weft_run(["export", str(run), str(alone)]) == 0
    assert json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"] == str(home / "exported")
    wanted = peft.AutoPeftModelForCausalLM.from_pretrained(alone).eval()  # finds the base by its name
    ids = torch.arange(40)[None] * 7 % 290
    torch.testing.assert_close(logits(theirs(merged), ids), logits(wanted, ids), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(theirs(merged), ids), logits(theirs(home / "exported"), ids), atol=1e-3)
    assert generated(merged) == generate_text(run, PROMPT, 24, temperature=0.0)
    assert "| adapter | dora of rank 3, alpha 6 |" in (merged / "README.md").read_text()
    assert weft_run(["export", str(run), str(home / "like"), "--like", str(home / "exported")]) == 0
    first, second = load_file(merged / "model.safetensors"), load_file(home / "like" / "model.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-6, atol=1e-7)
    capsys.readouterr()


def test_each_export_option(home, capsys):
    run = RunFolder(home / "full")
    for words, out in (
        (["--step", "2"], "step"), (["--dtype", "bf16"], "bf16"), (["--dtype", "fp16"], "fp16"),
        (["--own-names"], "own"),
    ):  # fmt: skip
        assert weft_run(["export", str(run.path), str(home / out), *words]) == 0, out
    error = capsys.readouterr().err
    assert f"step 2 of {run.checkpoint(2)} is in {home / 'step'}: README.md, config.json" in error
    assert weft_run(["export", f"{run.path}@2", str(home / "again")]) == 0
    early, late = (dict(load_checkpoint(run.checkpoint(step)).tensors("model")) for step in (2, 4))
    for folder in (home / "step", home / "again"):
        for name, tensor in theirs(folder).named_parameters():
            assert torch.equal(tensor, early[name]), name
    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model = theirs(home / kind)
        assert json.loads((home / kind / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        for name, tensor in model.named_parameters():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, late[name].to(dtype)), name
    assert {file.name for file in (home / "own").iterdir()} == {"model.safetensors"}
    assert load_file(home / "own" / "model.safetensors").keys() == late.keys()


GOLDEN = (
    (["{base}", "{exported}"],
     "OUT={exported}: the folder exists, and Weft does not overwrite it. Give another name, or delete it."),
    (["{base}", "{out}", "--merge"], "--merge: this checkpoint has a full model. Leave --merge out."),
    (["{adapter}", "{out}", "--merge", "--like", "{exported}"],
     "--merge: --like sets something else to write. Use one of them."),
    (["{adapter}", "{out}", "--merge", "--own-names"],
     "--merge: --own-names sets something else to write. Use one of them."),
    (["{base}", "{out}", "--dtype", "int4"], "--dtype int4: not a format for weights. Use fp32, bf16, fp16."),
    (["{base}", "{out}", "--step", "5"],
     "RUN={base}@5: it has no finished checkpoint of step '5'. Use one of: 3, 4, 6."),
    (["{adapter}", "{out}", "--merge", "--step", "3"],
     "RUN={adapter}@3: it has no finished checkpoint of step '3'. Use one of: 2, 4."),
)  # fmt: skip


@pytest.mark.parametrize("words, wanted", GOLDEN)
def test_invalid_exports_are_rejected_with_a_message(home, capsys, words, wanted):
    places = {name: str(home / name) for name in ("base", "exported", "adapter", "out")}
    capsys.readouterr()
    assert weft_run(["export", *(word.format(**places) for word in words)]) == 2
    assert capsys.readouterr().err == f"error: {wanted.format(**places)}\n"
    assert not (home / "out").exists()


def test_adapter_of_another_base_and_missing_base_are_rejected(home, tmp_path, capsys, prepares_locally):
    base, aside = home / "exported", tmp_path / "aside"
    run, out = str(home / "adapter"), str(tmp_path / "out")
    settings = [*TUNED, f"run.dir={home}", f"data.cache_dir={home / 'cache'}", f"data.train={home / 'chats.jsonl'}"]
    resumed = ["train", *settings, f"model.path={base}", "run.name=adapter", *ADAPTER, "train.steps=5"]
    capsys.readouterr()

    def error_of(*words: str) -> str:
        assert weft_run([*words]) == 2
        return capsys.readouterr().err

    base.rename(aside)
    try:
        lost = f"model.path={base}: there is no such folder"
        assert error_of(*resumed) == (
            f"error: {lost}, and an adapter's checkpoints do not contain the base. Restore the folder.\n"
        )
        assert error_of("generate", run) == (
            f"error: {lost}. Give a Hugging Face model's: config.json, safetensors weights, tokenizer.\n"
        )
        assert error_of("export", run, out, "--merge") == (
            f"error: --merge: the adapter's base, model.path={base}, does not exist. Restore the folder, or set its "
            "new path with --like instead of --merge.\n"
        )
        shutil.copytree(aside, base)
        tensors = load_file(base / "model.safetensors")
        tensors["model.norm.weight"] += 1
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
        other = (
            f"error: {home}/adapter/checkpoints/step_00000004: an adapter of another base: 'model.norm.weight' had "
            "other values when it was saved. Start from the weights that the adapter was trained on.\n"
        )
        for words in (("generate", run), ("export", run, out, "--merge"), ("export", run, out, "--like", str(base))):
            assert error_of(*words).splitlines()[-1] + "\n" == other
        shutil.rmtree(base)
    finally:
        aside.rename(base)


def test_inconsistent_folder_is_rejected_before_the_run(home, tmp_path, capsys, prepares_locally, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = ["train", *TUNED, f"run.dir={tmp_path}", f"data.train={home / 'chats.jsonl'}"]

    def error_of(path: Path | str) -> str:
        capsys.readouterr()
        assert weft_run([*settings, f"model.path={path}"]) == 2
        return capsys.readouterr().err

    def copied(name: str) -> Path:
        return shutil.copytree(home / "exported", tmp_path / name)

    lies = copied("lies")
    config = json.loads((lies / "config.json").read_text())
    (lies / "config.json").write_text(json.dumps({**config, "intermediate_size": 72}))
    assert error_of(lies) == (
        f"error: model.path={lies}: tensor 'model.layers.0.mlp.gate_proj.weight' has shape (64, 32) in the files, and "
        "config.json makes it (72, 32). Give the config.json that belongs to these weights.\n"
    )
    cut = copied("cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-64])
    assert error_of(cut.parent) == (
        f"error: model.path={cut.parent}: model.safetensors: not a safetensors file (tensor 'model.norm.weight' "
        "does not fit). Download model.safetensors again.\n"
    )
    index = copied("index")
    (index / "model.safetensors").rename(index / "model-00001-of-00002.safetensors")
    where = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert error_of(index) == (
        f"error: model.path={index}: model.safetensors.index.json names model-00002-of-00002.safetensors, which is "
        "missing. Download the folder again.\n"
    )
    (index / "model.safetensors.index.json").unlink()
    assert error_of(index) == (
        f"error: model.path={index}: it has neither model.safetensors nor model.safetensors.index.json. Give a folder "
        "with safetensors weights.\n"
    )
    bare = copied("bare")
    (bare / "config.json").unlink()
    assert error_of(bare) == (
        f"error: model={bare}: it has no config.json. Give the folder of a Hugging Face model, or "
        "package.module:function.\n"
    )
    assert error_of("org/name") == (
        "error: model.path=org/name: there is no such folder, HF_HUB_OFFLINE is set, and the cache does not have all "
        "files of org/name. Run the command once without HF_HUB_OFFLINE.\n"
    )
    assert not any(tmp_path.glob("*/config.toml"))


@pytest.fixture
def pickled(home, tmp_path) -> Path:
    """Save the base as two pickles with an index."""
    source = shutil.copytree(home / "exported", tmp_path / "pickled")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"pytorch_model-1.bin": names[:5], "pytorch_model-2.bin": names[5:]}
    for file, part in shards.items():
        torch.save({name: tensors[name] for name in part}, source / file)
    table = {name: file for file, part in shards.items() for name in part}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    return source


def read_without_sandbox(kind: str, source: Path, work: Path, limit_s: float, remedy: str) -> None:
    """Read in this process. A process that loads torch takes seconds, and only the sandbox tests need it."""
    assert kind == "pickled"
    taken = Taken(work, 2**30)
    try:
        read_pickled(source, taken)
    except NotTaken as error:
        raise CheckpointError(f"SOURCE={source}: {error}. {remedy}") from error
    taken.close()


@pytest.mark.parametrize("is_here", [True, pytest.param(False, marks=pytest.mark.full)])
def test_pickles_are_converted_and_nothing_else_is_loaded(
    is_here, home, pickled, tmp_path, monkeypatch, capsys, prepares_locally
):
    if is_here:
        monkeypatch.setattr("weft.train.weights.foreign_checkpoint.run_confined", read_without_sandbox)
    run = ["train", *TUNED, f"run.dir={tmp_path}", f"data.train={home / 'chats.jsonl'}", f"model.path={pickled}"]
    capsys.readouterr()
    assert weft_run(run) == 2
    assert capsys.readouterr().err == (
        f"error: model.path={pickled}: its weights are pickles (pytorch_model-1.bin), which can run code when they "
        f"are read. Run weft ckpt convert {pickled} {pickled}-safetensors, which reads them in a confined process, "
        "and use that folder.\n"
    )
    out = tmp_path / "plain"
    assert weft_run(["ckpt", "convert", str(pickled), str(out)]) == 0
    assert f"weft: the weights of {pickled} are in {out}: config.json" in capsys.readouterr().err
    found, wanted = load_file(out / "model.safetensors"), load_file(home / "exported" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert generated(out) == generated(home / "exported")

    def error_of(*words: str) -> str:
        capsys.readouterr()
        assert weft_run(["ckpt", "convert", str(pickled), str(tmp_path / "evil"), *words]) == 2
        assert not (tmp_path / "evil").exists()
        return capsys.readouterr().err

    remedy = "Give a folder with the weights of a model.\n"
    torch.save({"lm_head.weight": torch.ones(2), "more": Start}, pickled / "pytorch_model-2.bin")
    assert error_of() == (
        f"error: SOURCE={pickled}: pytorch_model-2.bin: it holds weft.train.rank_run.Start, which is not a weight; "
        f"Weft ran and loaded nothing from it. {remedy}"
    )
    torch.save([1, 2], pickled / "pytorch_model-2.bin")
    assert error_of() == f"error: SOURCE={pickled}: pytorch_model-2.bin: it holds a list, no table of tensors. {remedy}"
    (pickled / "pytorch_model-2.bin").unlink()
    assert error_of() == f"error: SOURCE={pickled}: pytorch_model-2.bin is missing or is not a plain file. {remedy}"
    for file in pickled.glob("*.bin*"):
        file.unlink()
    assert error_of() == (
        f"error: SOURCE={pickled}: it has neither pytorch_model.bin nor pytorch_model.bin.index.json, nor another "
        f"pickle of weights. {remedy}"
    )
    assert error_of("--dtype", "int4") == "error: --dtype int4: not a format for weights. Use fp32, bf16, fp16.\n"
    assert error_of("--limit", "soon").startswith("error: --limit soon: ")


PLANS = ["tp=2", "pp=2 microbatches=2", "dp_shard=2 zero=3", "cp=2", "tp=2 sp=on precision=bf16"]


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["full", "adapter", "own"])
def test_exported_folder_of_any_plan_matches_the_run(home, tmp_path, plan, kind):
    places = [f"run.dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}", f"plan={plan}", "run.name=tried"]
    if kind == "own":
        own = [*SMALL, f"data.train={home / 'text.jsonl'}", "tokenizer.kind=bpe", "tokenizer.vocab_size=300"]
        command("train", *own, *places, "sample.prompt=", "model.num_kv_heads=2")
    else:
        tuned = [*TUNED, f"data.train={home / 'chats.jsonl'}", f"model.path={home / 'exported'}"]
        command("train", *tuned, *places, *(ADAPTER if kind == "adapter" else []))
    run, out = tmp_path / "tried", tmp_path / "out"
    command("export", str(run), str(out), *(["--merge"] if kind == "adapter" else []))
    wanted = generate_text(run, PROMPT, 24, temperature=0.0)
    assert generated(out) == wanted
    if kind == "full":
        saved = load_checkpoint(max((run / "checkpoints").glob("step_*"))).tensors("model")
        for name, tensor in theirs(out).named_parameters():
            assert torch.equal(tensor, saved[name]), name


@pytest.mark.full
def test_new_user_workflow_from_text_to_tuned_model(tmp_path):
    """Train a base, export, tune on chats on two ranks, resume with one, merge, and load in transformers."""
    words = ["warp", "weft", "loom", "thread", "cloth"]
    lines = [" ".join(words[(i * k) % 5] for k in range(1, 40)) for i in range(1, 81)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in CHATS))
    places = [f"run.dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}"]
    own = [*SMALL, f"data.train={tmp_path / 'text.jsonl'}", "tokenizer.kind=bpe", "tokenizer.vocab_size=300"]
    command("train", *own, *places, "run.name=base", "launch.ranks=2")
    assert "config.json" in command("export", str(tmp_path / "base"), str(tmp_path / "exported"))
    tuned = [*TUNED, *places, f"data.train={tmp_path / 'chats.jsonl'}", f"model.path={tmp_path / 'exported'}"]
    tuned += ["run.name=tuned", "adapter.rank=4", "train.max_time=1h"]
    command("train", *tuned, "plan=dp_shard=2 zero=3", "train.steps=6")
    shown = command("train", *tuned, "plan=dp_replicate=1", "launch.ranks=1", "train.steps=10")
    assert "resumed from step 6" in shown
    command("export", str(tmp_path / "tuned"), str(tmp_path / "merged"), "--merge")
    options = ["--raw", "--prompt", PROMPT, "--temperature", "0", "--max-tokens", "24"]
    for run, exported in (("tuned", "merged"), ("base", "exported")):
        text = command("generate", str(tmp_path / run), *options)
        assert text.rstrip("\n") == generated(tmp_path / exported).rstrip("\n")
