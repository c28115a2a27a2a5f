"""Error classes: messages, problems, and copies that keep their attributes."""

from __future__ import annotations

import copy
import pickle

import pytest

from weft import errors
from weft.errors import ConfigError, MissingExtra, PlanError, Problem, WeftError, did_you_mean, nearest_name


def test_every_error_is_a_weft_error_and_most_are_usage_errors():
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    kinds = [kind for kind in found if not issubclass(kind, Warning)]
    assert len(kinds) >= 11
    assert all(issubclass(kind, WeftError) for kind in kinds)
    assert {kind.__name__: kind.exit_code for kind in kinds if kind.exit_code != 2} == {
        "CommError": 1,
        "TrainingHalted": 3,
        "StepRefused": 3,
        "OutOfMemory": 4,
        "TasksFailed": 1,
    }


@pytest.mark.parametrize("kind", [ConfigError, PlanError])
def test_listed_error_has_one_line_for_each_problem(kind):
    error = kind([Problem("a.b", "a.b=1: no", "x.toml:3"), Problem("c", "c=2: no")])
    assert str(error) == "x.toml:3: a.b=1: no\nc=2: no"
    assert [problem.field for problem in error.problems] == ["a.b", "c"]
    assert isinstance(error, ValueError)


def test_plain_message_is_one_problem():
    assert PlanError("tp=0: no.").problems == (Problem("", "tp=0: no."),)


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_keep_their_problems(copied):
    error = ConfigError([Problem("a", "one", "f:1"), Problem("b", "two")])
    assert copied(error).problems == error.problems
    missing = copied(MissingExtra("transformers", "hf", "reading a checkpoint"))
    assert str(missing).endswith('In a checkout of Weft, run: pip install -e ".[hf]".')


def test_did_you_mean():
    assert did_you_mean("dp_shrad", ["tp", "dp_shard"]) == " Did you mean 'dp_shard'?"
    assert did_you_mean("zzz", ["tp", "dp_shard"]) == ""
    assert nearest_name("optimzer", iter(["model", "optimizer"])) == "optimizer"
