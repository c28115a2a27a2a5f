"""Folders, data and adapters that cannot be fine-tuned: one error line each, exit code 2, and no training."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.train.tuned_folders import save_model
from weft.cli.app import run as weft_run

transformers = pytest.importorskip("transformers")

SMALL = ["train.seq_len=16", "train.global_batch=4", "train.steps=2", "launch.device=cpu", "launch.ranks=1",
         "eval.every=0", "eval.batches=1", "checkpoint.every=1", "schedule.warmup_steps=1",
         "sample.prompt="]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Create a folder with one weight file, the same with several, and texts."""
    here = tmp_path_factory.mktemp("bad")
    save_model(here / "single", "llama")
    shutil.copytree(here / "single", here / "sharded")
    (here / "sharded" / "model.safetensors").unlink()
    transformers.AutoModelForCausalLM.from_pretrained(here / "single").save_pretrained(
        here / "sharded", max_shard_size="20KB"
    )
    (here / "texts.jsonl").write_text('{"text": "the cat runs in the house"}\n' * 40)
    return here


@pytest.fixture
def error_of(home, tmp_path, capsys):
    """Return a function that runs `weft train` on a folder, which must be refused, and returns the error without the
    folder's name.
    """

    def train(folder: Path, *words: str, data: Path | None = None, code: int = 2) -> str:
        places = [f"run.dir={tmp_path}", "run.name=run", f"data.cache_dir={tmp_path / 'cache'}"]
        capsys.readouterr()
        read = [f"model.path={folder}", f"data.train={data or home / 'texts.jsonl'}"]
        found = weft_run(["train", *SMALL, *places, *read, *words])
        error = capsys.readouterr().err
        assert found == code, error
        assert not code or not (tmp_path / "run" / "events.jsonl").exists()
        return error.replace(str(folder), "FOLDER")

    return train


@pytest.fixture
def copied(home, tmp_path):
    """Return a function that copies a folder with other values in its config."""

    def copy(name: str = "single", **fields: object) -> Path:
        folder = Path(shutil.copytree(home / name, tmp_path / f"copy{len(list(tmp_path.iterdir()))}"))
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
        return folder

    return copy


REMEDY = "Give the config.json that belongs to these weights.\n"


def test_config_that_does_not_match_the_weights(copied, error_of, prepares_locally):
    assert error_of(copied(hidden_size=48)) == (
        "error: model.path=FOLDER: tensor 'model.embed_tokens.weight' has shape (90, 32) in the files, and config.json "
        f"makes it (90, 48). {REMEDY}"
    )
    assert error_of(copied(num_hidden_layers=3)) == (
        "error: model.path=FOLDER: the files lack 'model.layers.2.self_attn.q_proj.weight', "
        "'model.layers.2.self_attn.k_proj.weight', 'model.layers.2.self_attn.v_proj.weight' and 6 more, which the "
        f"model of config.json has. {REMEDY}"
    )
    for number, layer in ((1, 1), (-1, 0)):
        assert error_of(copied(num_hidden_layers=number)) == (
            f"error: model.path=FOLDER: the files have tensor 'model.layers.{layer}.input_layernorm.weight', and "
            f"config.json makes only {max(number, 0)} modules in 'model.layers'. {REMEDY}"
        )
    assert error_of(copied(num_attention_heads=5)) == (
        "error: model=FOLDER: transformers cannot read its config.json (Class validation error for validator "
        "'validate_architecture': ValueError: The hidden size (32) is not a multiple of the number of attention heads "
        "(5)). Check the file, or use package.module:function.\n"
    )


def test_truncated_or_missing_files(copied, error_of, prepares_locally):
    folder = copied("sharded")
    shard = sorted(folder.glob("*.safetensors"))[2]
    os.truncate(shard, shard.stat().st_size - 100)
    assert error_of(folder) == (
        f"error: model.path=FOLDER: {shard.name}: not a safetensors file (tensor "
        f"'model.layers.0.self_attn.o_proj.weight' does not fit). Download {shard.name} again.\n"
    )
    shard.unlink()
    assert error_of(folder) == (
        f"error: model.path=FOLDER: model.safetensors.index.json names {shard.name}, which is missing. Download the "
        "folder again.\n"
    )
    folder = copied("sharded")
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    del table["weight_map"]["model.layers.0.mlp.down_proj.weight"]
    index.write_text(json.dumps(table))
    assert error_of(folder) == (
        "error: model.path=FOLDER: the files lack 'model.layers.0.mlp.down_proj.weight', which the model of "
        f"config.json has. {REMEDY}"
    )


def test_preferences_without_rejected_answer(home, error_of, tmp_path, prepares_locally):
    file = tmp_path / "pairs.jsonl"
    pair = {"prompt": "the cat", "chosen": " runs", "rejected": " is"}
    lines = [pair] * 20 + [{"prompt": "the cat", "chosen": " runs"}] * 5
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    error = error_of(home / "single", "task=prefer", data=file)
    quarantine = next((tmp_path / "cache").glob("*.quarantine.jsonl"))
    assert error == (
        f"error: data.train.0.path={file}: 5 of 25 records are broken (5 no rejected answer), more than "
        f"data.max_bad_fraction=0.01 allows; the first is {file}:21. Repair them (all are in {quarantine}), or set a "
        "larger data.max_bad_fraction.\n"
    )


@pytest.mark.full
def test_adapter_of_another_base(home, copied, error_of, tmp_path, capsys):
    base = copied()
    error_of(base, "adapter.rank=2", code=0)
    file = base / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] += 1
    save_file(tensors, file, {"format": "pt"})
    for words in (["--merge"], ["--like", str(base)]):
        assert weft_run(["export", str(tmp_path / "run"), str(tmp_path / "out"), *words]) == 2
        error = capsys.readouterr().err
        assert error.count("error: ") == 1
        assert "model.layers.0.mlp.up_proj.weight" in error, error
        assert not (tmp_path / "out").exists()
