"""Reward functions in processes: values, errors, hangs, and functions with several turns."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from tests.rl.cases import recorded
from weft.comm.mesh import build_mesh
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.data.text.tokenizer import save_bytes_tokenizer
from weft.errors import StepRefused
from weft.generation.requests import Completion
from weft.rl.objective import group_advantages
from weft.rl.prompt_data import PromptRecord
from weft.rl.rewards import RewardFunctions
from weft.rl.rollout import Dialogues
from weft.rl.scored import score
from weft.train.step.evaluation import RankForwards

FUNCTIONS = """
import os, subprocess, time
import numpy as np

def length(completions):
    print("to stderr, not into the answer")
    return [len(one) for one in completions]

def column(prompts, completions, completion_ids, letter):
    return np.array([text.count(one) + len(ids) / 100 for text, one, ids in zip(completions, letter, completion_ids)])

def some(completions, **columns):
    return [None, float("nan"), True, 3, *[0.5] * (len(completions) - 4)]

def reads(completions):
    import sys
    return [10**400, *[float(len(sys.stdin.read())) for _ in completions[1:]]]

def raises(completions):
    return [1 / len(one) for one in ["", *completions]]

def few(completions):
    return [1.0]

def text(completions):
    return "good"

def words(completions):
    return ["good"] * len(completions)

def dies(completions):
    os._exit(7)

def hangs(completions):
    subprocess.Popen(["sleep", "1000"])
    open("pid.txt", "w").write(str(os.getpid()))
    time.sleep(1000)
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(FUNCTIONS)
    made: list[RewardFunctions] = []

    def make(*names: str, limit_s: float = 30.0) -> RewardFunctions:
        made.append(RewardFunctions([f"own.py:{name}" for name in names], limit_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


VALUES = {"completions": ["aa", "b", "", "abc"], "completion_ids": [[1], [2], [], [3, 4]], "prompts": ["?"] * 4,
          "letter": ["a", "a", "b", "c"]}  # fmt: skip


def test_functions_get_lists_by_name_and_may_be_called_again(functions):
    both = functions("length", "column")
    for _ in range(2):
        first, second = both.call(VALUES)
        assert first.values == [2, 1, 0, 3]
        assert second.values == pytest.approx([2.01, 0.01, 0, 1.02])
        assert first.error == second.error == ""


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raises", "it raised ZeroDivisionError at own.py:20 (division by zero)"),
        ("few", "it returned 1 values for 4 completions"),
        ("text", "it returned str, and a list of 4 numbers is needed"),
        ("words", "it returned a str, and a number is needed"),
        ("dies", "its process ended with exit code 7"),
    ],
)
def test_a_failed_call_has_one_reason_and_no_rewards(functions, name, error):
    (found,) = functions(name).call(VALUES)
    assert found.error == error
    assert all(map(math.isnan, found.values))


def test_completions_without_a_reward_are_named(functions):
    (found,) = functions("some").call(VALUES)
    assert found.error == "completion 0 has no finite reward"
    assert [math.isnan(one) for one in found.values] == [True, True, False, False]
    assert found.values[2:] == [1.0, 3.0]


def test_a_function_that_reads_its_input_gets_nothing(functions):
    """Otherwise it would wait for the next call, or take it. The first value is an int beyond floats."""
    both = functions("reads")
    for _ in range(2):
        (found,) = both.call(VALUES)
        assert found.error == "completion 0 has no finite reward"
        assert found.values[1:] == [0.0] * 3


def test_a_function_that_hangs_is_killed_with_its_children(functions):
    both = functions("hangs", "length", limit_s=3.0)
    began = time.monotonic()
    found, other = both.call(VALUES)
    assert time.monotonic() - began < 10
    assert found.error == "it took more than 3 s and was killed"
    assert other.error == ""
    group = int(Path("pid.txt").read_text())
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("a process of the function is still there")


def scored_by(functions, tmp_path, *more: str):
    save_bytes_tokenizer(tmp_path / "bytes")
    from weft.data.text.tokenizer import Tokenizer

    config = load_config(None, ["task=grpo", "grpo.reward=own.py:f", "grpo.completions=6", *more]).config
    prompts, samples, _ = recorded(0)
    mesh = build_mesh(Plan())
    forwards = RankForwards(None, mesh, None)
    return score(forwards, functions, Tokenizer.load(tmp_path / "bytes"), config.grpo, prompts, samples)


def test_a_failed_function_pauses_the_run_or_is_counted(functions, tmp_path):
    with pytest.raises(
        StepRefused, match=r"^grpo\.reward=own\.py:f: it returned 1 values for 12 completions\. Correct"
    ):
        scored_by(functions("few"), tmp_path)
    assert scored_by(functions("few"), tmp_path, "grpo.reward_errors=count").advantages == [0.0] * 12
    counted = scored_by(functions("some"), tmp_path, "grpo.reward_errors=count")
    assert [one != 0 for one in counted.advantages] == [False, False, True, True, True, True, *[False] * 6]


def test_advantages_of_a_group():
    import torch

    rewards = torch.tensor([[1.0, 2.0, 3.0, 6.0], [5.0, 5.0, 5.0, 5.0], [1.0, math.nan, math.nan, math.nan]])
    assert group_advantages(rewards, "dr_grpo")[0].tolist() == [-2, -1, 0, 3]
    assert group_advantages(rewards, "rloo")[0].tolist() == pytest.approx([1 - 11 / 3, 2 - 10 / 3, 0, 6 - 2])
    std = (14 / 3) ** 0.5
    assert group_advantages(rewards, "grpo")[0].tolist() == pytest.approx(
        [one / (std + 1e-4) for one in (-2, -1, 0, 3)]
    )
    for method in ("grpo", "dr_grpo", "rloo"):
        assert group_advantages(rewards, method)[1:].abs().max() == 0


class FakeSampler:
    """Answers with the next ids after the last one."""

    def __init__(self):
        self.keys: list[list[int]] = []

    def complete(self, requests):
        self.keys.append([one.key for one in requests])
        return [Completion(one.key, (one.prompt_ids[-1] + 1, 99), (-0.5, -0.25), "stop") for one in requests]


def dialogues(function, tmp_path, limit_s=20.0, longest=20):
    from weft.data.text.tokenizer import Tokenizer

    save_bytes_tokenizer(tmp_path / "bytes")
    made = Dialogues("own.py:turns", function, Tokenizer.load(tmp_path / "bytes"), limit_s, longest, 4)
    prompts = [
        PromptRecord((65, 66), {"prompt": "AB", "ask": True}),
        PromptRecord((67,), {"prompt": "C", "ask": False}),
    ]
    sampler = FakeSampler()
    return made.sample(RankForwards(None, build_mesh(Plan()), None), sampler, prompts, 2, 3), sampler


def test_turns_of_tools_are_not_trained(tmp_path):
    def turns(prompt, sample):
        first = sample(prompt.ids)
        if not prompt.record["ask"]:
            return [first]
        tool = prompt.encode("=7")
        return [first, tool, sample([*prompt.ids, *first.ids, *tool])]

    found, sampler = dialogues(turns, tmp_path)
    assert [len(keys) for keys in sampler.keys] == [4, 2]
    assert len({key for keys in sampler.keys for key in keys}) == 6
    assert found[0].ids == (67, 99, 61, 55, 56, 99)
    assert found[0].trained == (True, True, False, False, True, True)
    assert found[0].log_probs == (-0.5, -0.25, 0, 0, -0.5, -0.25)
    assert found[2].ids == (68, 99)
    assert found == dialogues(turns, tmp_path)[0]


def test_turns_that_do_not_fit_are_refused(tmp_path):
    def edits(prompt, sample):
        return [sample(prompt.ids), sample(prompt.ids)]

    def raises(prompt, sample):
        raise KeyError("x")

    def hangs(prompt, sample):
        time.sleep(3)

    def nothing(prompt, sample):
        return ["text"]

    def too_long(prompt, sample):
        return [sample([65] * 17)]

    def outside(prompt, sample):
        return [sample(prompt.ids), [10**6]]

    def no_list(prompt, sample):
        return [sample(prompt.ids), 5]

    for function, reason in (
        (outside, "a turn has the id 1000000, and the tokenizer has 260 entries"),
        (no_list, "'int' object is not iterable"),
        (edits, "a sampled turn was not sampled after exactly the prompt and the turns before it"),
        (raises, r"it raised KeyError \('x'\)"),
        (nothing, "it returned no sampled turn"),
        (too_long, "it asks for a sample after 17 tokens, and train.seq_len and grpo.max_tokens leave 16"),
    ):
        with pytest.raises(StepRefused, match=rf"^grpo\.rollout=own\.py:turns: {reason}"):
            dialogues(function, tmp_path)
    with pytest.raises(StepRefused, match=r"it took more than 0\.5 s without a sample"):
        dialogues(hangs, tmp_path, limit_s=0.5)
