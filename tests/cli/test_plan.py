"""`weft plan`: printed output, written files, and refused arguments."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.choice import todays
from tests.data.image_records import add, labelled
from weft.cli.app import run
from weft.cli.launch.launch import count_ranks
from weft.cli.planning.plan import NOTHING_FITS
from weft.config.cluster import device
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.planner.report.write_config import learning_rate

SMALL = ["plan", "small", "4xa100", "--seq-len", "1024", "--global-batch", "48"]


def plan_text(capsys, *words: str) -> str:
    assert run([*SMALL, *words]) == 0
    return capsys.readouterr().out


def test_table_and_details_of_the_best_plan(capsys):
    text = plan_text(capsys, "--top", "3")
    lines = text.splitlines()
    assert lines[0] == "small, 27.3 M parameters, on 4xa100: 48 sequences of 1024 tokens a step"
    assert " break a rule, " in lines[1]
    ranked = [line for line in lines if line.startswith(("1 ", "2 ", "3 ", "4 "))]
    assert len(ranked) == 3
    best = next(line for line in lines if line.startswith("plan    ")).removeprefix("plan    ")
    assert Plan.parse(best).world_size == 4
    for part in ("speed ", "MFU ", "cost ", "trust ", "step ", "memory "):
        assert any(line.startswith(part) for line in lines), part


def test_reasons_have_a_count_and_an_example(capsys):
    text = plan_text(capsys, "--reasons")
    assert "refused" in text
    assert "offload-params-needs-zero-3" in text


def test_why_not_with_compare_and_what_if(capsys):
    text = plan_text(
        capsys, "--why-not", "tp=3", "--compare", "dp_replicate=4", "dp_shard=4 zero=3", "--what-if", "gpus=8"
    )
    assert "why not world_size=4: the plan needs 3 ranks (tp=3), but 4 were started." in text
    assert "B takes " in text
    assert "gpus=8 " in text
    assert "(unchanged)" in text


def test_json_has_all_sections(capsys):
    words = ["--why-not", "dp_replicate=4", "--compare", "dp_replicate=4", "dp_shard=4 zero=3", "--what-if", "nic=2x"]
    table = json.loads(plan_text(capsys, *words, "--json", "--top", "2"))
    assert {"question", "plans", "pareto", "refused", "why_not", "compare", "what_if"} <= set(table)
    assert len(table["plans"]) == 2
    first = table["plans"][0]
    assert sum(first["terms_s"].values()) == pytest.approx(first["step_s"])
    assert sum(first["time_by_rung"].values()) == pytest.approx(1)
    assert sum(each["count"] for each in table["refused"]) + table["num_fit"] == table["num_plans"]


def test_written_config_can_be_trained_unchanged(capsys, tmp_path):
    path = tmp_path / "plan.toml"
    plan_text(capsys, "--out", str(path))
    config = load_config(path).config
    assert (config.model.name, config.train.seq_len, config.train.global_batch) == ("small", 1024, 48)
    assert count_ranks(config, gpus=4, cores=8) == 4
    assert path.read_text().startswith("# Chosen by `weft plan` for small on 4xa100. Expected: ")


def test_config_is_unchanged_except_for_its_plan(capsys, tmp_path):
    source, path = tmp_path / "mine.toml", tmp_path / "plan.toml"
    source.write_text('plan = "auto"\nseed = 7\n[run]\nname = "mine"\n[model]\nname = "small"\n')
    assert run(["plan", str(source), "2xa100", "--out", str(path)]) == 0
    config = load_config(path).config
    assert (config.seed, config.run.name, config.train.global_batch) == (7, "mine", 8)
    assert Plan.parse(config.plan).world_size == 2


RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize(
    # `weft plan --tables` plans sharded tables, which recommend.toml has.
    "recipe",
    todays([path for path in RECIPES if path.stem != "recommend"], parts=3),
    ids=lambda path: path.stem,
)
def test_shipped_recipes_get_a_valid_plan(capsys, tmp_path, monkeypatch, recipe):
    """Recipes for images and audio name data that users provide. Here it is replaced by colored images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    with tarfile.open(tmp_path / "captions.tar", "w") as tar:
        for place, (data, name) in enumerate(labelled(96)):
            add(tar, f"{place}.png", data)
            add(tar, f"{place}.txt", f"a {name} picture".encode())
            folder = tmp_path / "pictures" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{place}.png").write_bytes(data)
    shutil.copy(tmp_path / "captions.tar", tmp_path / "samples.tar")
    path = tmp_path / "plan.toml"
    assert run(["plan", str(recipe), "4xa100", "--out", str(path)]) == 0
    load_config(path).check(world_size=4, device=device("a100"))


def test_hugging_face_model_is_written_as_config_fields(capsys, tmp_path):
    table = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
             "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 5000,
             "max_position_embeddings": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(table))
    path = tmp_path / "plan.toml"
    assert run(["plan", str(tmp_path), "2xa100", "--out", str(path)]) == 0
    section = load_config(path).config.model
    assert (section.dim, section.ffn_dim, section.num_layers, section.vocab_size) == (256, 512, 3, 5000)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_charts_are_written(capsys, tmp_path, suffix):
    names = ("pareto", "waterfall", "memory")
    paths = [tmp_path / f"{name}{suffix}" for name in names]
    words = [word for name, path in zip(names, paths, strict=True) for word in (f"--{name}", str(path))]
    plan_text(capsys, *words)
    for path in paths:
        if suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_html_page_is_self_contained(capsys, tmp_path):
    path = tmp_path / "plan.html"
    plan_text(capsys, "--html", str(path), "--fix", "pp=2 precision=bf16")
    text = path.read_text()
    best = next(
        line for line in plan_text(capsys, "--fix", "pp=2 precision=bf16").splitlines() if line.startswith("plan ")
    )
    assert f"<code>{best.removeprefix('plan').strip()}</code>" in text
    assert text.count("<svg ") == 4
    assert not {"<script", "src=", "<link", "@import", "url("} & set(
        re.findall(r"<script|src=|<link|@import|url\(", text)
    )
    for svg in re.findall(r"<svg .*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    assert "Why all other plans are out" in text


def test_schedule_chart_is_written(capsys, tmp_path):
    path = tmp_path / "schedule.svg"
    plan_text(capsys, "--all-plans", "--fix", "pp=4 schedule=1f1b precision=bf16", "--draw", str(path))
    assert len(ElementTree.parse(path).getroot()) > 20


def test_custom_device_description(capsys):
    words = ["--seq-len", "1024", "--global-batch", "48"]
    described = "mine memory=24GiB bf16=120TFLOPS bandwidth=800GB/s link=25GB/s"
    assert run(["plan", "small", "2x4xmine", "--device", described, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "on 2x4xmine: 48 sequences of 1024 tokens a step (assumed: nic=12.5GB/s)" in lines[0]
    assert run(["plan", "small", f"4x{described}", *words]) == 0
    assert "(assumed" not in capsys.readouterr().out.splitlines()[0]
    assert run(["plan", "small", "4xh100", "--device", described]) == 2
    assert "cluster=4xh100: --device describes mine. Write e.g. '8xmine'." in capsys.readouterr().err


def test_impossible_constraints_are_named_with_alternatives(capsys):
    assert run(["plan", "llama3-8b", "6xh100", "--fix", "tp=3"]) == NOTHING_FITS
    text = capsys.readouterr().out
    assert "Every plan breaks a rule for llama3-8b on 6xh100:\n  tp=3: the model has 32 heads" in text
    assert "Use tp=1 or 2." in text
    assert "The nearest changes that fit:\n  without tp=3 " in text


def test_json_of_no_fit_has_the_nearest_changes(capsys):
    assert run(["plan", "llama3-8b", "rtx4090", "--json"]) == NOTHING_FITS
    table = json.loads(capsys.readouterr().out)
    assert table["nearest_changes"][0]["what_if"] == "adapter=16"
    assert table["nearest_changes"][0]["best"]["fits_probability"] >= 0.9


def test_no_fit_is_reported_with_the_nearest_changes(capsys):
    assert run(["plan", "llama3-70b", "rtx4090"]) == NOTHING_FITS
    text = capsys.readouterr().out
    assert "No plan fits llama3-70b on 1xrtx4090." in text
    assert "The plan that needs the least memory: " in text
    assert "  cluster=" in text.partition("The nearest changes that fit:")[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "weft plan needs MODEL and CLUSTER. Write e.g. weft plan llama3-8b 8xh100."),
        (["tiny"], "weft plan needs MODEL and CLUSTER."),
        (["tinny", "8xh100"], "model=tinny: neither a built-in size"),
        (["tiny", "8xh1000"], "device=h1000: unknown device."),
        (["tiny", "2xh100", "--fix", "tp=two"], "tp=two: a whole number from 1 to"),
        (["tiny", "2xh100", "--why-not", "zero"], "plan field 'zero': a plan consists of name=value fields."),
        (["tiny", "2xh100", "--compare", "tp=2", "dp=2"], "unknown plan field 'dp'."),
        (["tiny", "2xh100", "--what-if", "gpus=x"], "gpus=x: a whole number of devices above 0 is needed"),
        (["tiny", "2xh100", "--tier", "guess"], "tier=guess: not one of datasheet, tables."),
        (["tiny", "2xh100", "--out", "plan.yaml"], "out=plan.yaml: a config is a TOML file. Use plan.toml."),
        (["tiny", "2xh100", "--html", "p.pdf"], "html=p.pdf: a page is an HTML file. Use p.html."),
        (["tiny", "2xh100", "--pareto", "p.gif"], "p.gif: pictures are .svg or .png files. Use p.svg."),
        (["tiny", "2xh100", "--fix", "dp_replicate=2", "--draw", "s.svg"], "pp=1: the plan has no pipeline to draw."),
        (["tiny", "2xh100", "--waterfall", "no/such/folder.svg"], "it cannot be written (No such file or directory)."),
        (
            ["tiny", "2xh100", "3xh100"],
            "3xh100: weft plan takes MODEL and CLUSTER; separate several clusters by commas",
        ),
        (
            ["tiny", "8xh100", "--compile"],
            "cluster=8xh100: --compile compiles for TPU slices. Use a slice such as v5p-16, v5e-16 or v6e-16.",
        ),
        (
            ["tiny", "v6e-12", "--compile"],
            "cluster=12xtpu-v6e: --compile compiles for one slice of a known arrangement. Use v5p-8, v5p-16, v5p-32,",
        ),
        (["tiny", "v4-8", "--compile"], "cluster=4xtpu-v4: --compile compiles for one slice of a known arrangement."),
        (
            ["tiny", "v5p-16", "--compile", "--fix", "pp=2 compile=on"],
            "pp=2: under engine=jax, one SPMD program has no pipeline stages. Use pp=1, with tp or zero=3.",
        ),
        (
            ["tiny", "v5p-16", "--compile", "--fix", "precision=fp64"],
            "precision=fp64: a TPU has no fp64 arithmetic. Use precision=fp32 or precision=bf16.",
        ),
        (["moe-tiny", "v5p-16", "--compile"], "model=moe-tiny: --compile does not build experts. Use a model without"),
        (
            ["tiny", "v5p-16", "--compile", "--tune", "lora"],
            "--tune: --compile compiles the fastest plan that trains all weights on whole sequences. Leave out one of",
        ),
        (["tiny", "2xh100", "--budget", "50"], "unknown option '--budget'. Write --run budget=5000usd."),
        (["tiny", "2xh100", "--tops", "3"], "unknown option '--tops'. Did you mean '--top'?"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(capsys, words, message):
    assert run(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_planning_needs_neither_torch_nor_jax():
    code = (
        "import sys\nfrom weft.cli.app import run\n"
        "assert run(['plan', 'tiny', '2xh100', '--why-not', 'dp_replicate=2']) == 0\n"
        "print([name for name in ('torch', 'jax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_simple_question_loads_no_pydantic_and_no_masked_arrays():
    """Importing either takes as long as answering a simple question."""
    code = (
        "import sys\nfrom weft.cli.app import run\nassert run(['plan', 'tiny', '2xh100']) == 0\n"
        "print([name for name in ('pydantic', 'numpy.ma', 'importlib.metadata') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_written_config_suits_the_model_and_lists_missing_values(capsys, tmp_path):
    """The learning rate decreases with the model size. Values to fill in are listed in the file and on the terminal."""
    path = tmp_path / "plan.toml"
    assert run(["plan", "llama3-8b", "8xh100", "--fix", "zero=3 precision=bf16 compile=on", "--out", str(path)]) == 0
    config, warnings = load_config(path).config, capsys.readouterr().err
    assert (config.optimizer.lr, config.tokenizer.vocab_size) == (pytest.approx(3e-4, rel=0.05), 128_256)
    notes = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# fill in: ")]
    assert [note.split()[2].partition("=")[0] for note in notes] == [
        "data.train",
        "optimizer.lr",
        "train.steps",
        "tokenizer:",
    ]
    assert all(note in warnings for note in notes)


@pytest.mark.parametrize(("billions", "published"), [(8.03, 3e-4), (70.6, 1.5e-4), (405.9, 8e-5)])
def test_learning_rates_match_published_models(billions, published):
    assert learning_rate(billions * 1e9, is_adapter=False) == pytest.approx(published, rel=0.05)
    assert learning_rate(2.7e7, is_adapter=False) == 1e-3


def test_config_of_an_adapter_has_adapter_settings(capsys, tmp_path):
    path = tmp_path / "plan.toml"
    assert run(["plan", "llama3-8b", "1xh100", "--tune", "lora=8", "--out", str(path)]) == 0
    config = load_config(path).config
    assert (config.adapter.rank, config.optimizer.lr) == (8, 2e-4)
    assert "fill in: model.path is empty, and an adapter needs a model to adapt." in capsys.readouterr().err


def test_tokenizer_of_the_model_folder_is_used(capsys, tmp_path):
    table = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
             "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 5000,
             "max_position_embeddings": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(table))
    (tmp_path / "tokenizer.json").write_text("{}")
    path = tmp_path / "plan.toml"
    assert run(["plan", str(tmp_path), "2xa100", "--out", str(path)]) == 0
    section = load_config(path).config.tokenizer
    assert (section.kind, section.path) == ("file", str(tmp_path))
    assert "tokenizer:" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "field"), [(["--seq-len", "x"], "seq-len"), (["--top", "x"], "top"), (["--nope"], "nope")]
)
def test_usage_errors_are_json_too(capsys, words, field):
    assert run([*SMALL[:3], *words, "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["field"] == field
    assert words[0] in error["message"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fix", "precision=fp4"],
         "precision=fp4: the planner estimates published runs in it, and Weft does not run it yet: "
         "fp32, bf16, fp16, fp64, fp8, tf32. Use precision=bf16."),
        (["--fix", "tp=3"], "fix=tp=3: 4 devices are no multiple of 3. Use a divisor: 1, 2, 4."),
        (["--fix", "dp=4"], "unknown plan field 'dp'. Write dp_shard=N (states are shared out) or dp_replicate=N "
         "(copies)."),
        (["--global-batch", "0"], "global-batch=0: a whole number from 1 to 10**9 is needed. "
         "Use e.g. --global-batch 128."),
    ],
)  # fmt: skip
def test_common_mistakes_have_remedies(capsys, words, message):
    assert run([*SMALL, *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
