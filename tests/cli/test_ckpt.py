"""`weft ckpt`: output for complete, damaged, equal and different checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.save import save_checkpoint
from weft.cli.app import run
from weft.models.adapters import add_adapter
from weft.models.peft_files import load_adapter
from weft.train.states.model_state import adapter_state


def saved(root: Path, step: int, scale: float = 1.0, **state: object) -> Path:
    weight = torch.arange(12.0).reshape(3, 4) * scale
    tensors = {
        "model": {"w": weight, "head": weight, "b": torch.ones(4, dtype=torch.bfloat16)},
        "optimizer": {"w/exp_avg": torch.zeros(3, 4)},
    }
    return save_checkpoint(root / "checkpoints", step, tensors, {"plan": "dp_shard=2", **state})


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        saved(tmp_path, step, progress={"step": step, "best_step": 10})
    return tmp_path


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def test_list_shows_step_size_state_and_plan(three, capsys):
    (three / "checkpoints" / "step_00000040").mkdir()
    (three / "checkpoints" / "step_00000010").rename(three / "checkpoints" / "step_00000010.aside")
    assert run(["ckpt", "list", str(three)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "10", "20", "30", "40"]
    assert "set aside" in lines[1]
    assert lines[2].endswith("committed   dp_shard=2")
    assert "unfinished" in lines[4]
    assert run(["ckpt", "list", str(three / "checkpoints"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    size = sum(file.stat().st_size for file in (three / "checkpoints" / "step_00000030").iterdir())
    assert (found[2]["step"], found[2]["num_bytes"], found[2]["num_files"]) == (30, size, 5)


def test_list_reports_a_symlink_loop_as_unreadable(three, capsys):
    commit = three / "checkpoints" / "step_00000020" / "COMMIT"
    commit.unlink()
    commit.symlink_to(commit)
    assert run(["ckpt", "list", str(three)]) == 0
    assert "unreadable: COMMIT is not a plain file" in capsys.readouterr().out.splitlines()[2]


def test_verify_names_files_tensors_and_newest_intact_step(three, capsys):
    assert run(["ckpt", "verify", str(three)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("newest intact checkpoint: step 30, ")
    root = three / "checkpoints"
    flip(root / "step_00000030" / "model.safetensors")
    flip(root / "step_00000020" / "manifest.json")
    (root / "step_00000010" / "optimizer.safetensors").unlink()
    saved(three, 5)
    (root / "step_00000040").mkdir()
    assert run(["ckpt", "verify", str(three)]) == 1
    output = capsys.readouterr().out
    assert output.splitlines() == [
        "step_00000005  whole",
        "step_00000010  damaged",
        "  optimizer.safetensors is missing",
        "    holds optimizer/w/exp_avg",
        "step_00000020  damaged",
        "  COMMIT does not contain the digest of manifest.json: one of them changed",
        "step_00000030  damaged",
        "  model.safetensors does not match its digest: its bytes changed after it was written",
        "    holds model/w, model/b",
        "step_00000040  unfinished: it has no COMMIT file, so its save never completed",
        f"newest intact checkpoint: step 5, {root / 'step_00000005'}",
    ]
    assert run(["ckpt", "verify", str(three), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["newest_whole"] == 5
    assert found["checkpoints"][3]["damages"][0]["tensors"] == ["model/w", "model/b"]


def test_verify_names_the_tensors_after_a_truncation(three, capsys):
    file = three / "checkpoints" / "step_00000030" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert run(["ckpt", "verify", str(three / "checkpoints" / "step_00000030")]) == 1
    output = capsys.readouterr().out
    assert "    holds model/b\n" in output  # the narrower elements are stored last
    assert output.endswith("no intact checkpoint\n")


def test_verify_fast_skips_digests(three, capsys):
    flip(three / "checkpoints" / "step_00000030" / "model.safetensors")
    assert run(["ckpt", "verify", str(three), "--fast"]) == 0
    assert run(["ckpt", "verify", f"{three}@30"]) == 1
    capsys.readouterr()


def test_show_filters_by_pattern(three, capsys):
    assert run(["ckpt", "show", str(three), "exp_avg"]) == 0
    assert "optimizer/w/exp_avg  F32    [3, 4]  48 B  optimizer.safetensors" in capsys.readouterr().out
    assert run(["ckpt", "show", f"{three}@20", "model/*", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 20
    assert [(one["name"], one["shape"], one["same_as"]) for one in found["tensors"]] == [
        ("model/w", [3, 4], None),
        ("model/head", [3, 4], "w"),
        ("model/b", [4], None),
    ]


def test_diff_reports_missing_reshaped_and_changed_tensors(tmp_path, capsys):
    left = saved(tmp_path / "a", 1, rate={"lr": 0.1})
    (tmp_path / "a" / "config.toml").write_text("seed = 1\n[train]\nsteps = 5\n")
    tensors = {
        "model": {"w": torch.arange(12.0).reshape(3, 4) + 0.5, "b": torch.ones(5), "new": torch.ones(1)},
        "optimizer": {"w/exp_avg": torch.full((3, 4), torch.nan)},
    }
    right = save_checkpoint(tmp_path / "b" / "checkpoints", 1, tensors, {"plan": "zero=3", "rate": {"lr": 0.2}})
    (tmp_path / "b" / "config.toml").write_text("seed = 2\n[train]\nsteps = 5\n")
    assert run(["ckpt", "diff", str(left), str(right), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "only_left": ["model/head"],
        "only_right": ["model/new"],
        "layout": [["model/b", "BF16 [4]", "F32 [5]"]],
        "numbers": [{"name": "model/w", "largest": 0.5}, {"name": "optimizer/w/exp_avg", "largest": "nan"}],
        "settings": [["state.plan", "dp_shard=2", "zero=3"], ["state.rate.lr", "0.1", "0.2"], ["seed", "1", "2"]],
        "num_equal": 0,
    }
    assert run(["ckpt", "diff", str(left), str(right)]) == 1
    output = capsys.readouterr().out
    assert "different numbers (2):\n  tensor" in output
    assert "  model/w              0.045     0.5            11\n" in output
    assert run(["ckpt", "diff", str(left), str(left)]) == 0
    assert capsys.readouterr().out == "identical: 4 tensors\n"


def test_diff_lists_weights_and_large_relative_differences_first(tmp_path, capsys):
    for name, factor in (("a", 1.0), ("b", 2.0)):
        tensors = {
            "optimizer": {"w/step": torch.tensor(10.0 * factor)},
            "model": {"large": torch.tensor([1000.0, factor]), "small": torch.tensor([0.1 * factor])},
        }
        save_checkpoint(tmp_path / name / "checkpoints", 1, tensors, {})
    assert run(["ckpt", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["model/small", "model/large", "optimizer/w/step"]
    assert lines[-1] == "identical: 0 tensors"


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_export_writes_full_tensors_readable_by_safetensors(three, capsys, dtype):
    out = three / "out"
    assert run(["export", str(three), str(out), *([] if dtype is None else ["--dtype", dtype])]) == 0
    found, checkpoint = load_file(out / "model.safetensors"), load_checkpoint(three / "checkpoints/step_00000030")
    expected = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert torch.equal(found["w"], checkpoint.tensors("model")["w"].to(expected))
    assert json.loads((out / "shared_names.json").read_text()) == {"head": "w"}
    assert run(["export", str(three), str(out)]) == 2
    assert "the folder exists, and Weft does not overwrite it" in capsys.readouterr().err


def test_export_like_a_hugging_face_model_can_be_loaded(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "like")
    (tmp_path / "like" / "tokenizer.json").write_text("{}")
    (tmp_path / "like" / "model.safetensors.index.json").write_text("{}")
    weights = {name: one.detach() for name, one in model.named_parameters()}
    save_checkpoint(tmp_path / "checkpoints", 1, {"model": weights, "optimizer": {}}, {})
    like = ["--like", str(tmp_path / "like")]
    assert run(["export", str(tmp_path), str(tmp_path / "out"), "--dtype", "bf16", *like]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, weights[name].bfloat16())
    config.num_hidden_layers = 2
    config.save_pretrained(tmp_path / "like")
    assert run(["export", str(tmp_path), str(tmp_path / "other"), *like]) == 2
    assert "the checkpoint lacks it. Give the folder of the model that was trained." in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("norm", [False, True])
def test_adapter_is_exported_separately_or_merged(norm, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "like")
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "like")
    model = add_adapter(base, rank=2, kind="dora", targets=["q_proj", "down_proj"])
    model.get_parameter("model.norm.weight").requires_grad_(norm)
    for param in model.parameters():
        if param.requires_grad:
            param.data += 0.1 * torch.randn(param.shape)
    trained = {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}
    groups = {"model": trained, "optimizer": {}}
    save_checkpoint(tmp_path / "checkpoints", 1, groups, {"adapter": adapter_state(model)})
    ids, like = torch.arange(6)[None], ["--like", str(tmp_path / "like")]
    with torch.no_grad():
        expected = model(ids).logits
        if norm:
            assert run(["export", str(tmp_path), str(tmp_path / "alone")]) == 2
            assert "'model.norm.weight': it was trained in addition to the adapter" in capsys.readouterr().err
        else:
            assert run(["export", str(tmp_path), str(tmp_path / "alone")]) == 0
            written = {path.name for path in (tmp_path / "alone").iterdir()}
            assert written == {"adapter_config.json", "adapter_model.safetensors"}
            again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "like")
            torch.testing.assert_close(load_adapter(again, tmp_path / "alone")(ids).logits, expected)
        assert run(["export", str(tmp_path), str(tmp_path / "merged"), *like]) == 0
        merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(ids).logits, expected)
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "like")
    assert run(["export", str(tmp_path), str(tmp_path / "other"), *like]) == 2
    assert "an adapter of another base: 'lm_head" not in (said := capsys.readouterr().err)
    assert "an adapter of another base: 'model." in said


def test_rounding_to_bf16_matches_torch():
    from weft.checkpoint.safetensors_files import block_of, tensor_of
    from weft.cli.export import converted

    numbers = torch.cat([torch.randn(10_000) * 10.0**k for k in (-40, -3, 0, 37)])
    numbers = torch.cat([numbers, torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38, -0.0])])
    found = tensor_of(converted(block_of(numbers), "bf16"))
    assert torch.equal(found.nan_to_num(), numbers.bfloat16().nan_to_num())
    assert found.isnan().equal(numbers.isnan())


def test_prune_is_a_dry_run_without_yes(three, capsys):
    for step in (40, 50):
        saved(three, step, progress={"step": step, "best_step": 10}, evaluated=step == 40)
    root = three / "checkpoints"
    before = sorted(os.listdir(root))
    assert run(["ckpt", "prune", str(three), "--keep-last", "1"]) == 0
    output = capsys.readouterr()
    assert output.out.split() == [
        "would",
        "delete",
        str(root / "step_00000020"),
        "would",
        "delete",
        str(root / "step_00000030"),
    ]
    assert "dry run: add --yes to delete 2 checkpoints, " in output.err
    assert sorted(os.listdir(root)) == before
    assert run(["ckpt", "prune", str(three), "--keep-last", "1", "--every", "15", "--yes"]) == 0
    assert sorted(path.name for path in root.glob("step_*")) == [
        "step_00000010", "step_00000030", "step_00000040", "step_00000050",
    ]  # fmt: skip


def test_prune_keeps_the_last_intact_checkpoint(three, capsys):
    for step in (20, 30):
        flip(three / "checkpoints" / f"step_000000{step}" / "model.safetensors")
    assert run(["ckpt", "prune", str(three), "--keep-last", "1", "--yes"]) == 0
    assert run(["ckpt", "verify", str(three)]) == 1
    assert "newest intact checkpoint: step 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ckpt", "list", "{}/nowhere"], "RUN={}/nowhere: there is no such folder. Give a run's folder"),
        (["ckpt", "list", "{}/empty"], "RUN={}/empty: it has no checkpoints. "),
        (["ckpt", "show", "{}@7"], "RUN={}@7: it has no finished checkpoint of step '7'. Use one of: 10, 20, 30."),
        (["export", "{}", "{}/out", "--dtype", "int4"],
            "--dtype int4: not a format for weights. Use fp32, bf16, fp16."),
        (["export", "{}", "{}/out", "--group", "modle"], "has no tensors named 'modle'"),
        (["export", "{}", "{}/out", "--like", "{}/empty"], "it has no config.json. Give the folder of the"),
    ],
)  # fmt: skip
def test_errors_are_one_line(three, capsys, words, text):
    (three / "empty").mkdir()
    assert run([word.replace("{}", str(three)) for word in words]) == 2
    assert text.replace("{}", str(three)) in capsys.readouterr().err


def test_inspection_needs_no_torch(three):
    import subprocess
    import sys

    code = (
        "import sys; from weft.cli.app import run;"
        "run(['ckpt', 'list', sys.argv[1]]); run(['ckpt', 'verify', sys.argv[1]]);"
        "run(['ckpt', 'show', sys.argv[1]]); run(['ckpt', 'diff', sys.argv[1] + '@10', sys.argv[1] + '@20']);"
        "run(['export', sys.argv[1], sys.argv[1] + '/out', '--dtype', 'bf16']);"
        "run(['ckpt', 'prune', sys.argv[1], '--keep-last', '1']); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code, str(three)], capture_output=True).returncode == 0
