"""`weft generate --prompts`: texts under plans equal one process, and files, options and prompts that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.choice import todays
from tests.inference.models import FAMILIES, VOCAB, plain_model, write_folder
from weft.cli import app as main
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.generation.batch import Limits, generate_batch
from weft.generation.ranks import MeshRanks
from weft.generation.requests import Completion, Request, Sampling
from weft.inference.generate import GenerateJob
from weft.inference.open_model import open_model
from weft.inference.ranks import inference_plan
from weft.verify.verifier import Float64Throughout

pytest.importorskip("transformers")

PLANS = ("tp=2", "dp_shard=2 zero=3", "dp_shard=2 ep=2", "dp_replicate=2", "pp=2")
LENGTHS = (3, 11, 7, 7, 1)
SAMPLINGS = (Sampling(8, temperature=0), Sampling(8, temperature=1.2, top_k=30, top_p=0.9, seed=3))


def some_requests() -> list[Request]:
    draw = torch.Generator().manual_seed(2)
    return [
        Request(key, tuple(torch.randint(0, 250, (length,), generator=draw).tolist()))
        for key, length in enumerate(LENGTHS)
    ]


def texts_of(model: Any, requests: list[Request], together: Any = None) -> list[list[Completion]]:
    return [generate_batch(model, requests, one, Limits(VOCAB, 64, rows=3), together=together) for one in SAMPLINGS]


def texts_under(plan: str, sources: dict[str, str]) -> dict[str, list[list[Completion]]]:
    """Return the completions of this rank for each model. Under dp, only the first rank has requests."""
    settled, _ = inference_plan(Plan.parse(plan), "fp64")
    mesh, found = build_mesh(settled), {}
    with Float64Throughout():
        for name, source in sources.items():
            opened = open_model(source, settled, mesh)
            own = some_requests() if mesh.data.size == 1 else some_requests()[:4] * (1 - mesh.data.rank)
            found[name] = texts_of(opened.model, own, MeshRanks(opened.mesh))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("families")
    return {family: str(write_folder(home / family, family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def plain(folders) -> dict[str, list[list[Completion]]]:
    with Float64Throughout():
        return {family: texts_of(plain_model(Path(folder)), some_requests()) for family, folder in folders.items()}


@pytest.mark.parametrize("plan", todays(PLANS, parts=2))
def test_texts_under_a_plan_equal_one_process(plan, folders, plain, ranks2):
    """Under dp the second rank has no requests, and takes part in the forwards of the first."""
    chosen = {name: folder for name, folder in folders.items() if "ep=" not in plan or name == "mixtral"}
    if plan == "tp=2":
        chosen.pop("mamba")
    if "zero=3" in plan:  # ranks gather all weights, whatever the family
        chosen = {name: folders[name] for name in ("llama", "mamba")}
    first, second = ranks2.run(texts_under, plan, chosen)
    for family in chosen:
        for mine, wanted in zip(first[family], plain[family], strict=True):
            assert [one.ids for one in mine] == [one.ids for one in wanted[: len(mine)]], family
            for one, other in zip(mine, wanted, strict=False):
                assert one.log_probs == pytest.approx(other.log_probs, abs=1e-8)
        if plan in ("tp=2", "pp=2"):
            assert second[family] == first[family]


# The command.


@pytest.fixture(scope="module")
def folder(folders) -> str:
    return folders["llama"]


def run(folder: str, lines: list[Any], home: Path, *options: str) -> list[dict[str, Any]]:
    """Write the prompts, run `weft generate`, and return the lines of its result."""
    (home / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--prompts", str(home / "in.jsonl"), "--out", str(home / "out.jsonl"), "--device", "cpu", *options]
    assert main.run(["generate", folder, *words]) == 0
    return [json.loads(line) for line in (home / "out.jsonl").read_text().splitlines()]


def test_command_writes_one_line_per_text(folder, tmp_path, capsys):
    lines = [
        {"prompt": "warp", "id": "a"},
        {"prompt_ids": [5, 6]},
        {"prompt": ""},
        {"prompt_ids": [VOCAB]},
        {"prompt": "x" * 64},
    ]
    found = run(folder, lines, tmp_path, "--max-tokens", "5", "--samples", "2")
    assert [(one["index"], one["sample"]) for one in found] == [
        (index, sample) for index in range(5) for sample in (0, 1)
    ]
    assert found[0]["id"] == "a"
    assert found[0]["tokens"] == 5
    assert found[0]["log_prob"] < 0
    assert found[0]["text"] != found[1]["text"]
    assert [one.get("error", "")[:30] for one in found[4::2]] == [
        "the prompt has no tokens. Give", "prompt id 257: the model's voc", "the prompt has 64 tokens, and "
    ]  # fmt: skip
    said = capsys.readouterr()
    assert '6 prompts refused: see "error"' in said.err + said.out
    assert "4 texts with 20 tokens" in said.out
    assert found == run(folder, lines, tmp_path, "--max-tokens", "5", "--samples", "2", "--rows", "1")


def test_refused_lines_of_a_result_can_be_tried_again(folder, tmp_path):
    first = run(folder, [{"prompt": ""}, {"prompt": "warp"}], tmp_path, "--max-tokens", "3")
    assert "error" in first[0]
    again = run(folder, [{**first[0], "prompt": "weft"}, first[1]], tmp_path, "--max-tokens", "3")
    assert all("error" not in one and one["tokens"] == 3 for one in again)


def test_a_model_without_a_longest_text_needs_a_limit(folders, tmp_path, capsys):
    shutil.copytree(folders["mamba"], tmp_path / "mamba")
    config = json.loads((tmp_path / "mamba" / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "mamba" / "config.json").write_text(json.dumps(config))
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}')
    words = ["--prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "o.jsonl"), "--device", "cpu"]
    assert main.run(["generate", str(tmp_path / "mamba"), *words, "--max-tokens", "1000000000"]) == 2
    assert "this model reads texts of any length, so nothing else may end one" in capsys.readouterr().err


def test_command_stops_at_a_text(folder, tmp_path):
    free = run(folder, [{"prompt": "warp"}], tmp_path, "--max-tokens", "20", "--temperature", "0")[0]["text"]
    end = free[3:5]
    found = run(folder, [{"prompt": "warp"}], tmp_path, "--max-tokens", "20", "--temperature", "0", "--stop", end)[0]
    assert found["text"] == free[: free.index(end)]
    assert found["reason"] == "stop"
    assert found["tokens"] < 20


def test_an_unfinished_result_is_continued(folder, tmp_path, monkeypatch, capsys):
    from weft.inference import generate as module

    lines = [{"prompt": f"warp {number}"} for number in range(6)]
    whole = run(folder, lines, tmp_path, "--max-tokens", "4", "--rows", "1")
    monkeypatch.setattr(module, "_CHUNK_ROUNDS", 2)
    calls, real = [], module.generate_batch

    def dies_at_the_second(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "generate_batch", dies_at_the_second)
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(AssertionError):  # the command is interrupted
        run(folder, lines, tmp_path, "--max-tokens", "4", "--rows", "1")
    assert not (tmp_path / "out.jsonl").exists()
    assert run(folder, lines, tmp_path, "--max-tokens", "4", "--rows", "1") == whole
    assert "2 texts of an earlier, unfinished call kept." in "".join(capsys.readouterr())
    assert len(calls) == 4  # two chunks, and the two that were missing
    other = run(folder, lines, tmp_path, "--max-tokens", "3", "--rows", "1")
    assert [one["tokens"] for one in other] == [3] * 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "in.jsonl:1: not JSON"),
        ("[1]", "in.jsonl:1: not an object"),
        ("{}", "in.jsonl:1: it has no prompt"),
        ('{"prompt": "a", "messages": []}', "in.jsonl:1: it has prompt and messages"),
        ('{"prompt": 3}', "in.jsonl:1: prompt is int, not text"),
        ('{"prompt_ids": [true]}', "in.jsonl:1: prompt_ids is not a list of whole numbers"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "End with a question"),
        ('{"prompt": "\\ud800"}', "in.jsonl:1: it has half of a surrogate pair"),
        ('{"prompt": "a", "note": ["\\udfff"]}', "in.jsonl:1: it has half of a surrogate pair"),
        ("", "it has no lines"),
    ],
)
def test_bad_files_are_refused(text, said, folder, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(text)
    words = ["--prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"), "--device", "cpu"]
    assert main.run(["generate", folder, *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--plan", "tp=2"], "--plan: it belongs to a file of prompts"),
        (["--top-p", "0.5"], "--top-p: it belongs to a file of prompts"),
        (["--prompts", "in.jsonl"], "the texts need a file. Add --out"),
        (["--prompts", "in.jsonl", "--out", "no/such/out.jsonl"], "its folder does not exist"),
        (["--prompts", "in.jsonl", "--out", "o", "--chat"], "the file has the prompts"),
        (["--prompts", "missing.jsonl", "--out", "o"], "--prompts=missing.jsonl: it cannot be read"),
        (["--prompts", "in.jsonl", "--out", "o", "--temperature", "nan"], "greater than or equal to 0"),
        (["--prompts", "in.jsonl", "--out", "o", "--top-p", "2"], "top_p=2.0: it must be"),
        (["--prompts", "in.jsonl", "--out", "o", "--plan", "cp=2"], "cp=2: inference does not"),
        (["--prompts", "in.jsonl", "--out", "o", "--dtype", "int8"], "int8"),
        (["--prompts", "in.jsonl", "--out", "./in.jsonl"], "this is the file of prompts"),
        (["--prompts", "in.jsonl", "--out", "o", "--stop", ""], "an empty text would end each result"),
        (["--memory", "1GiB"], "--memory: it belongs to a file of prompts"),
        (["--prompts", "in.jsonl", "--out", "o", "--memory", "1GiB", "--plan", "tp=2"], "each rank streams"),
        (["--prompts", "in.jsonl", "--out", "o", "--memory", "much"], "much"),
        (["--prompts", "in.jsonl", "--out", "o", "--memory", "1KiB"], "memory"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(options, said, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    assert main.run(["generate", folder, *options, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_command_with_streamed_weights(folder, tmp_path, capsys):
    lines = [{"prompt": f"warp {number}"} for number in range(5)]
    whole = run(folder, lines, tmp_path, "--max-tokens", "6")
    capsys.readouterr()
    assert run(folder, lines, tmp_path, "--max-tokens", "6", "--memory", "1MiB") == whole
    assert "streamed: " in "".join(capsys.readouterr())


@pytest.mark.full
def test_command_under_a_plan(folder, tmp_path):
    lines = [{"prompt": f"warp {number}"} for number in range(5)]
    words = ("--max-tokens", "6", "--dtype", "fp64", "--rows", "2")
    assert run(folder, lines, tmp_path, *words) == run(folder, lines, tmp_path, *words, "--plan", "tp=2")


def test_messages_and_system_need_a_chat_template(folder, tmp_path):
    lines = [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "warp"}]
    found = run(folder, lines, tmp_path, "--max-tokens", "2")
    assert found[0]["error"].startswith("the tokenizer has no chat template")
    assert found[1]["tokens"] == 2
    found = run(folder, lines, tmp_path, "--max-tokens", "2", "--system", "Be brief.")
    assert all(one["error"].startswith("the tokenizer has no chat template") for one in found)


def test_an_unfinished_result_of_another_checkpoint_is_not_continued(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    job = GenerateJob("runs/x", tmp_path / "in.jsonl", tmp_path / "out.jsonl", Sampling())
    assert job.digest(10) == job.digest(10) != job.digest(20)
