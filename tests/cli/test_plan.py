"""`weft plan`: what is printed, what is written, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from weft.cli.app import run
from weft.cli.launcher.world import count_ranks
from weft.cli.planning.plan_verb import NOTHING_FITS
from weft.spec.cluster import device
from weft.spec.files.config_file import load_config
from weft.spec.plan import Plan

SMALL = ["plan", "small", "4xa100", "--seq-len", "1024", "--global-batch", "48"]


def told(capsys, *words: str) -> str:
    assert run([*SMALL, *words]) == 0
    return capsys.readouterr().out


def test_the_table_and_the_story_of_the_best(capsys):
    text = told(capsys, "--top", "3")
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
    text = told(capsys, "--reasons")
    assert "refused" in text
    assert "offload-params-needs-zero-3" in text


def test_verdicts_and_conditions_together(capsys):
    text = told(capsys, "--why-not", "tp=3", "--compare", "dp_replicate=4", "dp_shard=4 zero=3", "--what-if", "gpus=8")
    assert "why not world_size=4: the plan needs 3 ranks (tp=3), but 4 were started." in text
    assert "B takes " in text
    assert "gpus=8 " in text
    assert "(unchanged)" in text


def test_json_holds_all_of_it(capsys):
    words = ["--why-not", "dp_replicate=4", "--compare", "dp_replicate=4", "dp_shard=4 zero=3", "--what-if", "nic=2x"]
    table = json.loads(told(capsys, *words, "--json", "--top", "2"))
    assert {"question", "plans", "pareto", "refused", "why_not", "compare", "what_if"} <= set(table)
    assert len(table["plans"]) == 2
    first = table["plans"][0]
    assert sum(first["terms_s"].values()) == pytest.approx(first["step_s"])
    assert sum(first["time_by_rung"].values()) == pytest.approx(1)
    assert sum(each["count"] for each in table["refused"]) + table["num_fit"] == table["num_plans"]


def test_the_config_that_is_written_trains_unchanged(capsys, tmp_path):
    path = tmp_path / "plan.toml"
    told(capsys, "--out", str(path))
    config = load_config(path).config
    assert (config.model.name, config.train.seq_len, config.train.global_batch) == ("small", 1024, 48)
    assert count_ranks(config, gpus=4, cores=8) == 4
    assert path.read_text().startswith("# Chosen by `weft plan` for small on 4xa100. Expected: ")


def test_a_config_is_kept_but_for_its_plan(capsys, tmp_path):
    source, path = tmp_path / "mine.toml", tmp_path / "plan.toml"
    source.write_text('plan = "auto"\nseed = 7\n[run]\nname = "mine"\n[model]\nname = "small"\n')
    assert run(["plan", str(source), "2xa100", "--out", str(path)]) == 0
    config = load_config(path).config
    assert (config.seed, config.run.name, config.train.global_batch) == (7, "mine", 8)
    assert Plan.parse(config.plan).world_size == 2


@pytest.mark.parametrize(
    "recipe", sorted((Path(__file__).parents[2] / "configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_shipped_recipes_get_a_plan_that_the_rules_allow(capsys, tmp_path, recipe):
    path = tmp_path / "plan.toml"
    assert run(["plan", str(recipe), "4xa100", "--out", str(path)]) == 0
    load_config(path).check(world_size=4, device=device("a100"))


def test_a_hugging_face_model_that_weft_builds_is_written_field_by_field(capsys, tmp_path):
    table = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
             "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 5000,
             "max_position_embeddings": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(table))
    path = tmp_path / "plan.toml"
    assert run(["plan", str(tmp_path), "2xa100", "--out", str(path)]) == 0
    section = load_config(path).config.model
    assert (section.dim, section.ffn_dim, section.num_layers, section.vocab_size) == (256, 512, 3, 5000)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_pictures(capsys, tmp_path, suffix):
    names = ("pareto", "waterfall", "memory")
    paths = [tmp_path / f"{name}{suffix}" for name in names]
    words = [word for name, path in zip(names, paths, strict=True) for word in (f"--{name}", str(path))]
    told(capsys, *words)
    for path in paths:
        if suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_a_schedule_is_drawn(capsys, tmp_path):
    path = tmp_path / "schedule.svg"
    told(capsys, "--all-plans", "--fix", "pp=4 schedule=1f1b precision=bf16", "--draw", str(path))
    assert len(ElementTree.parse(path).getroot()) > 20


def test_a_clear_no_with_the_nearest_yes(capsys):
    assert run(["plan", "llama3-70b", "rtx4090"]) == NOTHING_FITS
    text = capsys.readouterr().out
    assert "No plan fits llama3-70b on 1xrtx4090." in text
    assert "The plan that needs the least memory: " in text
    assert "  cluster=" in text.partition("The nearest changes that fit:")[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "weft plan takes MODEL and CLUSTER. Write e.g. weft plan llama3-8b 8xh100."),
        (["tiny"], "weft plan takes MODEL and CLUSTER."),
        (["tinny", "8xh100"], "model=tinny: neither a size that Weft knows"),
        (["tiny", "8xh1000"], "device=h1000: not a device that Weft knows."),
        (["tiny", "2xh100", "--fix", "tp=two"], "tp=two: a whole number from 1 to"),
        (["tiny", "2xh100", "--why-not", "zero"], "plan word 'zero': a plan consists of name=value words."),
        (["tiny", "2xh100", "--compare", "tp=2", "dp=2"], "unknown plan field 'dp'."),
        (["tiny", "2xh100", "--what-if", "gpus=x"], "gpus=x: a whole number of devices above 0 is needed"),
        (["tiny", "2xh100", "--tier", "guess"], "tier=guess: not one of datasheet, tables."),
        (["tiny", "2xh100", "--out", "plan.yaml"], "out=plan.yaml: a config is a TOML file. Use plan.toml."),
        (["tiny", "2xh100", "--pareto", "p.gif"], "p.gif: pictures are .svg or .png files. Use p.svg."),
        (["tiny", "2xh100", "--fix", "dp_replicate=2", "--draw", "s.svg"], "pp=1: the plan has no pipeline to draw."),
        (["tiny", "2xh100", "--waterfall", "no/such/folder.svg"], "it cannot be written (No such file or directory)."),
        (["tiny", "2xh100", "--tops", "3"], "unknown option '--tops'. Did you mean '--top'?"),
    ],
)
def test_mistakes_are_sentences_with_exit_code_2(capsys, words, message):
    assert run(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_planning_needs_no_torch():
    code = (
        "import sys\nfrom weft.cli.app import run\n"
        "assert run(['plan', 'tiny', '2xh100', '--why-not', 'dp_replicate=2']) == 0\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
