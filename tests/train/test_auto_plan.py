"""plan=auto: chosen for this machine, recorded, kept on resume, and rejected if no plan can be chosen."""

from __future__ import annotations

import json

import pytest

import weft
from weft.cli.app import run
from weft.config.cluster import ClusterSpec
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.errors import ConfigError, PlanError
from weft.planner.search.model_source import read_model
from weft.train.planned import CHOSEN, choose_plan, chosen_line, record_choice, resolve_plan, this_cluster

WORDS = ["launch.device=cpu", "model.name=small", "train.seq_len=128", "train.global_batch=8"]


def config(*words: str):
    return load_config(None, [*WORDS, *words]).config


def test_explicit_plan_is_unchanged():
    asked = config("plan=dp_replicate=*")
    assert resolve_plan(asked, 2, 2) == (asked, None)


def test_auto_resolves_for_the_ranks_and_respects_fields_after_it(tmp_path):
    for words, ranks in (("auto", 1), ("auto", 2), ("auto zero=2", 2), ("auto recompute=full", 4)):
        resolved, best = resolve_plan(config(f"plan={words}", f"run.dir={tmp_path}"), ranks, ranks)
        plan = Plan.parse(resolved.plan)
        assert plan == best.plan
        assert plan.world_size == ranks
        assert plan.precision == "fp32"  # the table has no other arithmetic for CPUs
        assert set(words.split()[1:]) <= set(resolved.plan.split())
        assert not plan.compile


def test_existing_run_keeps_its_plan(tmp_path):
    asked = config("plan=auto", f"run.dir={tmp_path}", "run.name=mine")
    resolved, best = resolve_plan(asked, 2, 2)
    folder = tmp_path / "mine"
    folder.mkdir()
    record_choice(folder, "auto", best)
    table = json.loads((folder / CHOSEN).read_text())
    assert (table["asked"], table["world_size"]) == ("auto", 2)
    table["plan"] = "dp_replicate=2 accumulation=2"
    (folder / CHOSEN).write_text(json.dumps(table))
    assert resolve_plan(asked, 2, 2)[0].plan == "dp_replicate=2 accumulation=2"
    other, _ = resolve_plan(asked, 1, 1)
    assert Plan.parse(other.plan).world_size == 1
    (folder / CHOSEN).write_text("{")
    assert resolve_plan(asked, 2, 2)[0].plan == resolved.plan


def test_cluster_of_this_host_is_described_for_the_planner():
    machines = this_cluster(4, 2, "cpu")
    assert (machines.nodes, machines.devices_per_node, machines.device.name) == (2, 2, "cpu")
    assert machines.device.memory_bytes > 2**28
    with pytest.raises(PlanError, match="5 ranks do not fill machines of 2"):
        this_cluster(5, 2, "cpu")


def test_error_without_fitting_plan_gives_numbers():
    with pytest.raises(PlanError) as caught:
        choose_plan(read_model("llama3-70b"), ClusterSpec.parse("rtx4090"), {}, seq_len=4096, global_batch=8)
    assert "plan=auto: no plan fits llama3-70b on 1xrtx4090; the smallest plan needs " in str(caught.value)


def test_choice_is_reported_in_one_line(tmp_path):
    _, best = resolve_plan(config("plan=auto", f"run.dir={tmp_path}"), 2, 2)
    assert chosen_line(best).startswith(f"plan=auto chose {best.plan}: ")
    assert "\n" not in chosen_line(best)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("auto tp=0", "tp=0: a whole number"),
        ("auto zero", "plan field 'zero'"),
        ("auto dp=2", "unknown plan field 'dp'"),
    ],
)
def test_invalid_fields_after_auto_are_rejected(plan, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"plan={plan}"])
    assert message in str(caught.value)


def test_init_with_auto_requires_the_model():
    with pytest.raises(PlanError, match="the planner needs model, seq_len and global_batch"):
        weft.init("auto", device="cpu")


def test_init_with_auto_chooses_a_plan(capsys):
    with weft.init("auto", device="cpu", model="tiny", seq_len=64, global_batch=4) as adopted:
        assert adopted.plan.world_size == 1
    assert "plan=auto chose" in capsys.readouterr().out


def test_command_line_run_records_its_choice(tmp_path, capsys):
    words = [f"run.dir={tmp_path}", "run.name=auto", "plan=auto", "train.steps=1", "eval.every=0", "sample.prompt=",
             "tokenizer.kind=bytes", "data.holdout=0", "train.seq_len=32", "launch.device=cpu",
             "launch.ranks=1"]  # fmt: skip
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 200)
    assert run(["train", f"data.train={text}", *words]) == 0
    assert "weft: plan=auto chose " in capsys.readouterr().err
    folder = tmp_path / "auto"
    table = json.loads((folder / CHOSEN).read_text())
    assert Plan.parse((folder / "plan.txt").read_text().strip()).world_size == 1
    assert table["step_s"] > 0
    assert "auto" not in load_config(folder / "config.toml").config.plan
