"""Runs of the task: resumed, killed and paused ones, text under plans, refused settings, and a model that learns."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.rl.cases import write_prompts
from tests.train import conftest as train_fixtures
from tests.train.test_kill import family, kill_all, wait_for_step
from weft import env
from weft.config.files import load_config
from weft.data.text.tokenizer import Tokenizer, save_bytes_tokenizer
from weft.errors import ActionAsked, ConfigError, DataError
from weft.monitor.events import read_events
from weft.train.folder import RunFolder
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank

no_plots, plots = train_fixtures.no_plots, train_fixtures.plots
MODEL = ["model.dim=16", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_dim=24",
         "tokenizer.kind=bytes"]  # fmt: skip
SETTINGS = ["task=grpo", *MODEL, "grpo.reward=own.py:letter", "grpo.completions=4", "grpo.max_tokens=6",
            "train.seq_len=24", "train.global_batch=8", "schedule.kind=constant", "optimizer.lr=0.01",
            "log.every=2", "monitor.figures=false", "data.train=prompts.jsonl", "data.cache_dir=cache",
            "run.dir=runs", "launch.device=cpu"]  # fmt: skip
REWARD = """
import os
def letter(completions, letter):
    if os.path.exists("broken"):
        raise RuntimeError("out of order")
    return [text.count(one) + len(text) / 10 for text, one in zip(completions, letter)]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "own.py").write_text(REWARD)
    return tmp_path


def trained(name: str, *more: str) -> RunFolder:
    config = load_config(None, [*SETTINGS, f"run.name={name}", *more]).config
    found = prepare_run(config, world_size=1)
    run_rank(found.path, None, io.StringIO())
    return found


def same(one: RunFolder, other: RunFolder, step: int) -> None:
    files = [sorted(folder.checkpoint(step).glob("*.safetensors")) for folder in (one, other)]
    assert files[0]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


@pytest.mark.parametrize("updates", [1, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(folder, updates):
    more = (f"grpo.updates_per_rollout={updates}", "grpo.beta=0.1")
    whole = trained("whole", *more, "train.steps=5")
    trained("cut", *more, "train.steps=2")
    cut = trained("cut", *more, "train.steps=5")
    same(whole, cut, 5)
    assert (whole.path / "samples" / "step_00000001.jsonl").read_text().count("\n") == 4
    stored = sorted(path.name for path in cut.path.glob("rollouts/*"))
    # The file of step 1 remains, because the run could resume from step 2.
    assert stored == ([] if updates == 1 else ["step_00000000.json", "step_00000003.json"])
    if updates > 1:
        trained("lost", *more, "train.steps=2")
        (folder / "runs" / "lost" / "rollouts" / "step_00000000.json").write_text("damaged")
        with pytest.raises(ActionAsked, match=r"the completions of step 1 are not there"):
            trained("lost", *more, "train.steps=5")


def test_metrics_are_events_of_each_step(folder):
    events = read_events(trained("figures", "train.steps=2").events)
    found: dict[int, dict[str, float]] = {1: {}, 2: {}}
    for event in events:
        if event["event"] == "figures":
            found[event["step"]] |= event["figures"]
    for values in found.values():
        own = (
            "length",
            "length_max",
            "truncated",
            "reward_errors",
            "mismatch",
            "mismatch_max",
            "clipped",
            "kl",
            "entropy",
        )
        assert set(values) == {"rl.reward{letter}", "rl.reward_std{letter}", *(f"rl.{name}" for name in own)}
        assert 0 <= values["rl.mismatch"] <= values["rl.mismatch_max"] < 1e-5
        assert values["rl.entropy"] == pytest.approx(5.5, abs=0.2)
        assert values["rl.reward_errors"] == values["rl.clipped"] == 0


def test_log_probabilities_of_few_tokens_are_those_of_the_full_distribution(folder):
    run = trained("few", "train.steps=2", "grpo.top_k=3", "grpo.top_p=0.9", "grpo.temperature=0.7")
    figures = [event["figures"] for event in read_events(run.events) if event["event"] == "figures"]
    assert max(each.get("rl.mismatch_max", 0.0) for each in figures) < 1e-5
    # Three of 260 tokens, and the sampled ones have the probabilities of all 260.
    assert all(each["rl.entropy"] > 4.5 for each in figures if "rl.entropy" in each)


def test_a_run_pauses_when_a_reward_fails_and_goes_on_afterwards(folder):
    trained("paused", "train.steps=2")
    (folder / "broken").touch()
    with pytest.raises(ActionAsked) as caught:
        trained("paused", "train.steps=4")
    assert str(caught.value) == (
        "paused at step 2 (the task: grpo.reward=own.py:letter: it raised RuntimeError at own.py:5 (out of order). "
        "Correct the function, or set grpo.reward_errors=count to train on the other completions). To continue: weft "
        "runs resume runs/paused"
    )
    (folder / "broken").unlink()
    same(trained("paused", "train.steps=4"), trained("undisturbed", "train.steps=4"), 4)
    (folder / "broken").touch()
    trained("paused", "train.steps=5", "grpo.reward_errors=count")
    with pytest.raises(ConfigError, match=r"^grpo\.beta=0\.5: the run in"):
        trained("paused", "train.steps=5", "grpo.beta=0.5")


def test_a_run_pauses_in_its_first_step(folder, plots):
    (folder / "broken").touch()
    with pytest.raises(ActionAsked, match=r"^paused at step 0 \(the task: grpo\.reward=own\.py:letter: it raised"):
        trained("first", "train.steps=2")
    (folder / "broken").unlink()
    assert trained("first", "train.steps=2").checkpoint(2)


def train(name: str, *more: str, seconds: float = 200) -> RunFolder:
    process = begin(name, *more)
    shown, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, shown
    return RunFolder(Path("runs") / name)


def begin(name: str, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "weft", "train", *SETTINGS, f"run.name={name}", *more],
        env=env.child_env(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.full
@pytest.mark.parametrize("updates", [1, 3])
def test_a_killed_run_of_two_ranks_equals_an_undisturbed_one(folder, updates):
    more = ("plan=dp_shard=2 zero=3", "train.steps=16", "checkpoint.every=2", f"grpo.updates_per_rollout={updates}")
    whole = train("whole", *more)
    process = begin("killed", *more)
    wait_for_step(RunFolder(Path("runs/killed")), 1, 7, process)
    members = family(process)
    kill_all(process)
    process.communicate(timeout=60)
    assert process.returncode
    assert members
    same(whole, train("killed", *more), 16)


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    ["dp_shard=2 zero=3 accumulation=2", "tp=2", "dp_replicate=2", "dp_shard=2 zero=1", "pp=2 microbatches=2", "cp=2",
     "dp_shard=2 ep=2 zero=3"],
)  # fmt: skip
def test_text_and_losses_are_equal_under_every_plan(folder, plan):
    more = ("train.steps=4", "grpo.beta=0.1", "grpo.method=rloo", "log.every=1", "train.global_batch=12")
    more += ("model.num_experts=4", "model.balance=none") if "ep=" in plan else ()
    one = train("one", "plan=dp_replicate=1 precision=fp64", *more)
    two = train("two", f"plan={plan} precision=fp64", *more)
    for name in sorted(path.name for path in one.path.glob("samples/*")):
        rows, others = (
            [json.loads(line) for line in (each.path / "samples" / name).read_text().splitlines()]
            for each in (one, two)
        )
        assert [row["completion"] for row in rows] == [row["completion"] for row in others]
        assert [row["advantage"] for row in rows] == pytest.approx([row["advantage"] for row in others], rel=1e-9)
    steps = [[event for event in read_events(each.events) if event["event"] == "step"] for each in (one, two)]
    for mine, other in zip(*steps, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-8, abs=1e-10)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-8)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["train.global_batch=9"], "train.global_batch=9: it counts completions, 4 of each prompt. Use a "
         "multiple of 4."),
        (["grpo.completions=1"], "grpo.completions=1: grpo compares the completions of a prompt. Use 2 or more."),
        (["grpo.reward_weights=[1.0, 2.0]"], "grpo.reward_weights=[1.0, 2.0]: there are 1 reward functions. Give one "
         "weight for each."),
        (["grpo.teacher=x"], "grpo.teacher=x: method=distill needs a teacher, and other methods use none. Set both, or "
         "neither."),
        (["grpo.method=distill", "grpo.teacher=x", "grpo.ratio=sequence"], "grpo.ratio=sequence: the tokens of a "
         "completion have different advantages under method=distill. Use ratio=token."),
        (["grpo.engine=http://127.0.0.1:1", "grpo.engine_folder=x", "grpo.top_p=0.5"], "grpo.top_p=0.5: an engine's "
         "log probabilities are of the tokens that are left, and the loss's of all. Leave it out."),
        (["grpo.max_tokens=25"], "grpo.max_tokens=25: with its prompt, a completion has at most train.seq_len + 1 "
         "tokens. Use at most 24."),
        (["tokenizer.kind=bpe"], "tokenizer.kind=bpe: prompts are too few to train a tokenizer. Use file or bytes, or "
         "model.path."),
        (["grpo.reward=own.py:leter"], "grpo.reward=own.py:leter: it cannot be imported (AttributeError: own.py has no "
         "'leter'. Did you mean 'letter'?). Give a function as file.py:name."),
        (["grpo.reward=own.py:REWARDS"], "grpo.reward=own.py:REWARDS: it is a int. Give a function."),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(folder, more, message):
    (folder / "own.py").write_text(f"{REWARD}\nREWARDS = 1\n")
    with pytest.raises(ConfigError) as caught:
        prepare_run(load_config(None, [*SETTINGS, "run.name=refused", *more]).config, world_size=1)
    assert message in str(caught.value).splitlines()


def test_prompts_that_do_not_fit_are_refused(folder):
    for row, reason in (
        ({"prompt": "a" * 20}, "its prompt has 20 tokens, and train.seq_len and grpo.max_tokens leave 19."),
        ({"prompt": ""}, "its prompt has no tokens."),
        ({"prompt": 5}, "column 'prompt' holds 5, and a text or messages are needed."),
        (
            {"question": "a"},
            "it has no column 'prompt'; it has question. Give the column's name with grpo.prompt=NAME.",
        ),
        ({"prompt": [{"role": "user"}]}, "its messages cannot be used: a message lacks its role or content."),
    ):
        Path("prompts.jsonl").write_text(json.dumps(row))
        with pytest.raises(DataError) as caught:
            prepare_run(load_config(None, [*SETTINGS, "run.name=refused"]).config, world_size=1)
        assert f"record 1: {reason}" in str(caught.value)


def test_settings_of_another_task_are_refused(folder):
    with pytest.raises(ConfigError, match=r"^grpo: the text decoder does not read this section\. Set task\.name=grpo"):
        prepare_run(load_config(None, [*MODEL, "grpo.completions=4", "run.dir=runs"]).config, world_size=1)
    assert os.listdir(folder)


# A model that learns: examples/grpo, and a teacher.

ROOT = Path(__file__).parents[2]
LETTERS = ROOT / "examples" / "grpo" / "letters.toml"


def example(config: Path, folder: Path, name: str, *more: str) -> list[float]:
    """Train with a config from the repository's root, and return the mean reward of each step."""
    command = [sys.executable, "-m", "weft", "train", str(config), f"run.dir={folder}", f"run.name={name}",
               "launch.device=cpu", *more]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=env.child_env(OMP_NUM_THREADS="1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = [event["figures"] for event in read_events(folder / name / "events.jsonl") if event["event"] == "figures"]
    assert max(each.get("rl.mismatch", 0.0) for each in figures) < 1e-5
    return [each["rl.reward{share_of_letter}"] for each in figures if "rl.reward{share_of_letter}" in each]


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_replicate=1", "tp=2"])
def test_a_model_learns_to_write_letters(tmp_path, plan):
    rewards = example(LETTERS, tmp_path, "letters", f"plan={plan}", "train.steps=120")
    assert sum(rewards[:5]) / 5 < 0.02
    events = read_events(tmp_path / "letters" / "events.jsonl")
    assert not [event for event in events if event["event"] in ("warning", "trace")]
    assert sum(rewards[-5:]) / 5 > 0.9


@pytest.mark.full
def test_an_adapter_learns_under_zero3(tmp_path):
    example(LETTERS, tmp_path, "base", "plan=dp_replicate=1", "train.steps=75")
    done = subprocess.run([sys.executable, "-m", "weft", "export", str(tmp_path / "base"), str(tmp_path / "hf")],
                          env=env.child_env(), capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    toml = LETTERS.read_text()
    start, end = toml.index("[model]"), toml.index("[[data.train]]")
    (tmp_path / "adapter.toml").write_text(
        f'{toml[:start]}[model]\npath = "{tmp_path / "hf"}"\n[adapter]\nrank = 16\n{toml[end:]}'
    )
    more = ("plan=dp_shard=2 zero=3", "optimizer.lr=5e-3", "train.steps=60")
    rewards = example(tmp_path / "adapter.toml", tmp_path, "adapter", *more)
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 1.0


def folder_model(folder: Path, seed: int, layers: int) -> None:
    """Write a tiny Llama with a byte tokenizer, whose embedding has more rows than the tokenizer entries."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    shape = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
             "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(folder)
    save_bytes_tokenizer(folder / "bytes")
    (folder / "tokenizer.json").write_text(Tokenizer.load(folder / "bytes").library_json())


@pytest.mark.full
@pytest.mark.parametrize("base", ["stored", "nf4"])
def test_an_adapter_follows_a_teacher(folder, base):
    folder_model(folder / "student", 0, 2)
    folder_model(folder / "teacher", 1, 1)
    settings = [one for one in SETTINGS if not one.startswith(("model.", "tokenizer.", "grpo.reward"))]
    more = ["model.path=student", "grpo.method=distill", "grpo.teacher=teacher", "adapter.rank=8", "train.steps=60",
            f"adapter.base={base}", "grpo.updates_per_rollout=2", "run.name=taught",
            "train.global_batch=16"]  # fmt: skip
    found = prepare_run(load_config(None, [*settings, *more]).config, world_size=1)
    run_rank(found.path, None, io.StringIO())
    figures = [event["figures"] for event in read_events(found.events) if event["event"] == "figures"]
    divergences = [each["rl.kl"] for each in figures if "rl.kl" in each]
    assert sum(divergences[-10:]) < 0.8 * sum(divergences[:10])
    assert max(each["rl.mismatch"] for each in figures if "rl.mismatch" in each) < 1e-5
