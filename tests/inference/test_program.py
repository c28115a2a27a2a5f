"""`weft export --to program`: exported programs equal the model, and some models are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.inference.models import write_folder
from weft.cli import app as main
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.inference import program
from weft.inference.open_model import open_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("families") / "llama", "llama")


def export(source: Path, file: Path, *words: str) -> int:
    return main.run(["export", str(source), str(file), "--to", "program", *words])


def expect_equal(source: Path, file: Path, shape: tuple[int, int], dtype: str = "fp32") -> None:
    """Compare the program's logits with the model's for ids of a shape that the export did not try."""
    ids = torch.randint(0, 250, shape, generator=torch.Generator().manual_seed(5))
    plan = Plan(precision=dtype)
    model = program.TokenLogits(open_model(source, plan, build_mesh(plan)).model)
    with torch.no_grad():
        wanted, found = model(ids), torch.export.load(file).module()(ids)
    assert found.shape == (*shape, wanted.shape[2])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["decoder", "decoder_lora", "folder_lora"])
def test_program_of_a_run_computes_its_logits(name, runs, tmp_path, capsys):
    """Adapters are merged."""
    assert export(Path(runs[name]), tmp_path / "run.pt2") == 0
    assert "batch and length may vary" in capsys.readouterr().err
    expect_equal(Path(runs[name]), tmp_path / "run.pt2", (5, 33))


def test_program_of_a_hugging_face_model_computes_its_logits(folder, tmp_path, capsys):
    assert export(folder, tmp_path / "llama.pt2") == 0
    assert "batch and length may vary; its logits differ from the model's by at most" in capsys.readouterr().err
    expect_equal(folder, tmp_path / "llama.pt2", (1, 64))
    assert export(folder, tmp_path / "llama.pt2") == 2
    assert "the file exists" in capsys.readouterr().err


@pytest.mark.full
def test_experts_are_chosen_by_the_ids_that_the_program_gets(runs, tmp_path, capfd):
    """torch traces grouped matmuls only in bf16."""
    source = Path(runs["experts"])
    assert export(source, tmp_path / "run.pt2", "--dtype", "bf16") == 0
    expect_equal(source, tmp_path / "run.pt2", (5, 33), "bf16")
    capfd.readouterr()
    assert export(source, tmp_path / "other.pt2") == 2
    error = capfd.readouterr().err
    assert "Experts need --dtype bf16." in error
    assert "Traceback" not in error


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral", "mamba", "bloom"])
def test_program_of_each_family(family, tmp_path):
    source = write_folder(tmp_path / family, family)
    assert export(source, tmp_path / "out.pt2") == 0
    expect_equal(source, tmp_path / "out.pt2", (4, 12 if family == "mamba" else 31))


def test_model_that_cannot_be_traced_is_refused(folder, tmp_path, capsys, monkeypatch):
    def reads_values(self, input_ids):
        return self.model(input_ids=input_ids[:, : int(input_ids.max())], use_cache=False).logits

    monkeypatch.setattr(program.TokenLogits, "forward", reads_values)
    assert export(folder, tmp_path / "out.pt2") == 2
    error = capsys.readouterr().err
    assert "torch.export cannot trace LlamaForCausalLM" in error
    assert "weft export RUN FOLDER" in error
    assert not list(tmp_path.iterdir())


def test_program_that_computes_something_else_is_deleted(folder, tmp_path, capsys, monkeypatch):
    load = torch.export.load

    def damaged(file):
        found = load(file)
        with torch.no_grad():
            found.state_dict["model.model.layers.1.mlp.up_proj.weight"].mul_(1.01)
        return found

    monkeypatch.setattr(torch.export, "load", damaged)
    assert export(folder, tmp_path / "out.pt2") == 2
    assert "No file was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_wrong_words_are_refused(folder, tmp_path, capsys):
    for words, said in {
        ("--to", "onnx"): "--to onnx: it is program",
        ("--to", "program", "--own-names"): "--own-names: it sets something else",
        ("--to", "program", "--dtype", "q8_0"): "--dtype q8_0",
        ("--to", "program", "--step", "3"): "and has no checkpoints",
    }.items():
        assert main.run(["export", str(folder), str(tmp_path / "out.pt2"), *words]) == 2
        assert said in capsys.readouterr().err
    assert main.run(["export", str(folder), str(tmp_path / "out.onnx"), "--to", "program"]) == 2
    assert "programs are .pt2 files" in capsys.readouterr().err
