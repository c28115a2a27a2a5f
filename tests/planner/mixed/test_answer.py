"""`weft plan` on clusters of several kinds: unequal shares and splits, and roles of kinds that are too slow."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from weft.cli.app import app
from weft.config.cluster import ClusterSpec
from weft.config.rules.plan_rules import check
from weft.planner.mixed.answer import mixed_answer
from weft.planner.search.best_plans import answer
from weft.planner.search.question import Question


def asked(cluster: str, **fixed) -> Question:
    return Question.of("llama3-8b", cluster, seq_len=4096, global_batch=128, fixed=fixed)


def test_mixed_cluster_is_faster_than_its_slowest_device():
    question = asked("4xh100+4xa100")
    found = mixed_answer(question, answer(question).ranked)
    assert found.best is not None
    assert not found.roles
    assert found.best.plan.world_size == 8
    assert not check(found.best.plan, question.facts)
    assert found.best.plan.shares or found.best.plan.split
    assert found.best.is_exact
    # An H100 is about 2.5 times as fast as an A100, so both together are at most 1.75 times as fast as 8 A100.
    assert 1.3 < found.best.even_s / found.best.step_s < 1.9
    assert sorted(dict(found.best.placement).items()) == [("a100", 4), ("h100", 4)]


def test_faster_devices_get_more_samples():
    question = asked("4xh100+4xa100", pp=1, tp=1, cp=1, ep=1)
    best = mixed_answer(question, answer(question).ranked).best
    assert best is not None
    kinds = [kind for kind, count in best.placement for _ in range(count)]
    by_kind = {
        kind: {share for own, share in zip(kinds, best.plan.shares, strict=True) if own == kind} for kind in kinds
    }
    assert min(by_kind["h100"]) > max(by_kind["a100"])


def test_given_shares_are_placed_on_the_devices_that_suit_them():
    shares, mesh = (1, 3, 1, 3, 1, 3, 1, 3), {"pp": 1, "tp": 1, "cp": 1, "ep": 1, "dp_replicate": 1, "dp_shard": 8}
    question, free = asked("4xh100+4xa100", shares=shares, **mesh), asked("4xh100+4xa100", **mesh)
    given, best = (mixed_answer(each, answer(each).ranked).best for each in (question, free))
    assert given is not None
    assert best is not None
    assert given.plan.shares == shares
    assert given.placement == (("a100", 1), ("h100", 1)) * 4
    assert best.step_s <= given.step_s < given.even_s


def test_given_split_is_kept():
    question = asked("4xh100+4xa100", pp=2, split=(10, 22))
    best = mixed_answer(question, answer(question).ranked).best
    assert best is not None
    assert best.plan.split == (10, 22)
    assert best.placement == (("a100", 4), ("h100", 4))


def test_equal_kinds_written_twice_are_one_kind():
    assert ClusterSpec.parse("8xh100+8xh100").kinds == ()
    changed = ClusterSpec.parse("8xh100 memory=40GiB + 8xa100")
    assert [spec.memory_bytes // 2**30 for spec in changed.specs] == [40, 80]


def test_kind_that_is_too_slow_gets_a_role():
    question = asked("4xh100+4xt4")
    found = mixed_answer(question, answer(question).ranked)
    assert found.best is not None
    assert found.best.placement == (("h100", 4),)
    (role,) = found.roles
    assert (role.kind, role.count) == ("t4", 4)
    assert role.with_s > found.best.step_s * 0.98
    assert "4 x t4: too slow to be ranks" in role.lines()[0]
    assert "decode data" in role.lines()[1]


def test_command_prints_the_mixed_plan():
    options = ["--seq-len", "4096", "--global-batch", "128", "--fix", "pp=1 tp=1 cp=1 ep=1"]
    shown = CliRunner().invoke(app, ["plan", "llama3-8b", "4xh100+4xa100", *options])
    assert "\nmixed     dp_" in shown.output
    assert "ranks in order: " in shown.output
    told = json.loads(CliRunner().invoke(app, ["plan", "llama3-8b", "4xh100+4xa100", *options, "--json"]).output)
    assert told["mixed"]["step_s"] < told["mixed"]["even_s"]
    assert sum(one["ranks"] for one in told["mixed"]["placement"]) == 8
    assert "mixed" not in json.loads(
        CliRunner().invoke(app, ["plan", "llama3-8b", "8xh100", *options, "--json"]).output
    )


@pytest.mark.full
def test_large_mixed_cluster_is_annealed():
    question = asked("16x8xh100+16x8xa100")
    best = mixed_answer(question, answer(question).ranked).best
    assert best is not None
    assert not best.is_exact
    assert best.even_s / best.step_s > 1.1
