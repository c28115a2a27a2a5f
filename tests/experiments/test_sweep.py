"""`weft sweep`: choice of values, halving, budgets, kill -9, refusals, and the report."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.choice import todays
from tests.experiments.fake_training import sweep
from weft import env
from weft.config.files import load_config
from weft.errors import ConfigError, MissingExtra
from weft.experiments.sweep import SweepResult, import_optuna
from weft.experiments.sweep_config import read_sweep
from weft.experiments.sweep_report import importance, rows_of, summary, write_report

ROOT = Path(__file__).parents[2]
SEARCH = '[search]\n"optimizer.lr" = {low = 1e-5, high = 1e-1, log = true}\n'
LENGTH = 'settings = ["train.steps=80"]\n'


def file_of(folder: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def values_of(result: SweepResult) -> list[dict]:
    return [trial.values for trial in result.trials]


def test_halving_saves_steps_and_keeps_the_best(tmp_path):
    full = sweep(file_of(tmp_path, LENGTH + "trials = 16\nbatch = 16\n" + SEARCH), tmp_path / "full")
    halved = sweep(file_of(tmp_path, LENGTH + "trials = 16\nbatch = 16\n[halving]\n" + SEARCH), tmp_path / "halved")
    assert values_of(full) == values_of(halved)
    assert full.num_steps == 16 * 80
    assert halved.num_steps <= 0.4 * full.num_steps
    assert halved.best.value <= 1.01 * full.best.value
    assert sorted(trial.step for trial in halved.trials) == [10] * 8 + [20] * 4 + [40] * 2 + [80] * 2
    assert [trial.state for trial in halved.ranked()] == ["complete"] * 2 + ["stopped"] * 14


@pytest.mark.parametrize("sampler", todays(["tpe", "random", "qmc"], parts=3))
def test_samplers_find_the_minimum_and_repeat_their_choices(sampler, tmp_path):
    text = LENGTH + f'trials = 18\nbatch = 6\nseed = 3\nsampler = "{sampler}"\n' + SEARCH
    result = sweep(file_of(tmp_path, text), tmp_path / "a")
    again = sweep(file_of(tmp_path, text), tmp_path / "b", "local:1")
    assert values_of(result) == values_of(again)
    assert len({trial.values["optimizer.lr"] for trial in result.trials}) == 18
    lowest = 2.0 + 3.0 * 2.718281828 ** (-80 / 40)
    assert result.best.value < 1.1 * lowest


def test_a_grid_visits_each_point_once(tmp_path):
    text = LENGTH + 'sampler = "grid"\ntrials = 12\nbatch = 5\n[search]\n"optimizer.lr" = [1e-4, 1e-3, 1e-2]\n'
    result = sweep(file_of(tmp_path, text + "seed = {low = 0, high = 6, step = 2}\n"), tmp_path / "out")
    points = [(values["optimizer.lr"], values["seed"]) for values in values_of(result)]
    assert sorted(points) == [(lr, seed) for lr in (1e-4, 1e-3, 1e-2) for seed in (0, 2, 4, 6)]
    assert result.best.values == {"optimizer.lr": 1e-3, "seed": 0}


def test_more_trials_continue_a_sweep(tmp_path):
    text = LENGTH + "trials = TRIALS\nbatch = 4\n[halving]\nrungs = 2\n" + SEARCH
    first = sweep(file_of(tmp_path, text.replace("TRIALS", "8")), tmp_path / "out")
    more = sweep(file_of(tmp_path, text.replace("TRIALS", "12")), tmp_path / "out")
    at_once = sweep(file_of(tmp_path, text.replace("TRIALS", "12")), tmp_path / "other")
    assert values_of(more)[:8] == values_of(first)
    assert values_of(more) == values_of(at_once)
    optuna = import_optuna()
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "out" / "study.journal"))
    study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
    assert len(study.trials) == 12
    assert study.best_value == more.best.value


def test_another_sweep_in_the_folder_is_refused(tmp_path):
    text = LENGTH + "trials = 2\n" + SEARCH
    sweep(file_of(tmp_path, text), tmp_path / "out")
    for changed, what in (("1e-1", "search"), ("=80", "the config of its trials"), ("trials = 2", "seed")):
        other = {"1e-1": "1e-2", "=80": "=81", "trials = 2": "trials = 2\nseed = 5"}[changed]
        with pytest.raises(ConfigError, match=f"its sweep began with another value of {what}. Restore it"):
            sweep(file_of(tmp_path, text.replace(changed, other)), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"it has other files, such as .*Give a new folder"):
        sweep(file_of(tmp_path, text), tmp_path)


def test_failed_trials(tmp_path):
    text = LENGTH + 'trials = 8\nbatch = 8\n[halving]\n[search]\n"schedule.kind" = ["cosine", "linear"]\n'
    result = sweep(file_of(tmp_path, text + "seed = {low = 0, high = 9}\n"), tmp_path / "out")
    failed = [trial for trial in result.trials if trial.state == "failed"]
    assert failed
    assert {trial.values["schedule.kind"] for trial in failed} == {"linear"}
    assert result.best.values["schedule.kind"] == "cosine"
    assert any("failed. Trial" in line for line in summary(result))
    with pytest.raises(ConfigError, match=r"no trial can be trained\. The first one: RuntimeError: crashed"):
        sweep(file_of(tmp_path, LENGTH + "trials = 4\n[search]\nseed = [700, 800]\n"), tmp_path / "crash")


@pytest.mark.parametrize(
    ("budget", "said", "number"),
    todays(
        [
            ("steps = 200", "budget.steps=200: 160 are done, and the next rung needs 80", 3),
            ('time = "9s"', "budget.time: the trials trained for 10 s", 6),
            ('money = 0.03\nprice = "3.6usd/h"', "budget.money: the trials cost 0.03 USD", None),
            ("kwh = 2", "budget.kwh=2: the trials used 2 kWh", None),
        ],
        parts=2,
    ),
)
def test_budgets(budget, said, number, tmp_path):
    text = LENGTH + f"trials = 40\nbatch = 1\n[budget]\n{budget}\n" + SEARCH
    result = sweep(file_of(tmp_path, text), tmp_path / "out")
    assert said in result.over_budget or number is None
    assert len(result.trials) < 40
    assert result.best is not None
    assert any(line.startswith("The sweep ended early. budget.") for line in summary(result))


REFUSED = {
    '[search]\n"optimizer.lrr" = [1e-3, 1e-4]': "Did you mean 'optimizer.lr'?",
    '[search]\n"optimizer.lr" = {low = 1e-2, high = 1e-5}': "low must be below high. Use {low = 1e-05, high = 0.01}.",
    '[search]\n"optimizer.lr" = {low = 0, high = 1e-2, log = true}': "a logarithmic range cannot reach 0 or less.",
    '[search]\n"optimizer.lr" = {low = 1e-4, high = 1e-2, stp = 1}': "a range has no 'stp'. Did you mean 'step'?",
    '[search]\n"optimizer.lr" = {low = 1e-4}': "it must be a range or choices. Use {low = 1e-5, high",
    '[search]\n"optimizer.lr" = [1e-4]': "choices must be at least two numbers, texts or booleans.",
    '[search]\n"optimizer.lr" = [1e-4, 1e-4]': "a choice occurs twice. Remove it.",
    '[search]\n"optimizer.lr" = {low = 1e-4, high = 1e-2, step = 1}': "step must be above 0 and at most high - low",
    '[search]\n"optimizer.lr" = {low = 1e-4, high = inf}': "low, high and step must be finite numbers.",
    '[search]\n"optimizer.lr" = {low = -1.0, high = 1.0}': "search.optimizer.lr: optimizer.lr=-1",
    '[search]\n"train.global_batch" = [8, 16]': "so trials would be evaluated on different ones.",
    '[search]\n"train.seq_len" = [32, 64]': "evaluations of trials that differ in it do not measure the same.",
    '[search]\n"run.name" = ["a", "b"]': "a sweep sets it itself, or compares trials at it. Search another setting.",
    '[search]\n"plan" = ["tp=2 zero=9", "tp=3"]': "search.plan: plan.tp=3: the model has 8 heads,",
    'sampler = "grid"\n[search]\n"seed" = {low = 0, high = 999_999_999}': "the grid has more than",
    'sampler = "grid"\n[search]\n"optimizer.lr" = {low = 1e-4, high = 1e-2}': "a grid needs choices or a step.",
    SEARCH + "optimizer.lr = [1e-4, 1e-3]\n": "search.optimizer.lr: search.optimizer.lr sets it, too. Remove one",
    '[search]\nplan = ["tp=2", "tp=1"]\nplan.tp = [1, 2]\n': "it is not TOML",
    '[search]\nplan = ["tp=2", "tp=1"]\n"plan.tp" = [1, 2]\n': "search.plan.tp: search.plan sets it, too.",
    "[budget]\nmoney = 5\nprice = 2.5\n" + SEARCH: "a price is a number, a currency and a time",
    'sampler = "tpee"\n' + SEARCH: "it must be tpe, random, grid, qmc. Did you mean 'tpe'?",
    "trails = 3\n" + SEARCH: "trails: a sweep has no such key. Did you mean 'trials'?",
    "trials = 0\n" + SEARCH: "trials=0: it must be a whole number from 1 to 10000. Use trials = 16.",
    "[halving]\nrung = 3\n" + SEARCH: "halving.rung: there is no such key. Did you mean 'rungs'?",
    "[budget]\nkwh = 0\n" + SEARCH: "budget.kwh=0: it must be a number above 0. Use kwh = 3.",
    "[budget]\nmoney = 3\n" + SEARCH: 'budget.money=3: it needs the price of a device. Add price = "2.5usd/h"',
    '[budget]\ntime = "soon"\n' + SEARCH: "budget.time=soon: 'soon' is not a duration.",
    'settings = ["train.epochs=1"]\n' + SEARCH: "a sweep compares trials at the same step. Use train.steps.",
    'config = "nothing.toml"\n' + SEARCH: "there is no such file.",
    "trials = 3": "search: it is missing.",
    "trials =": "it is not TOML",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_sweep(file_of(tmp_path, text))
    assert REFUSED[text] in str(caught.value)


def test_a_missing_file_and_a_missing_library(tmp_path, monkeypatch):
    file_of(tmp_path, SEARCH)
    with pytest.raises(ConfigError, match=r"Did you mean 'sweep\.toml'"):
        read_sweep(tmp_path / "swep.toml")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        MissingExtra, match=r'optuna is not installed: weft sweep needs it. .* pip install -e "\.\[sweep'
    ):
        import_optuna()


def test_report(tmp_path):
    text = LENGTH + "trials = 16\n[halving]\n" + SEARCH + "seed = [0, 1, 2]\n"
    result = sweep(file_of(tmp_path, text), tmp_path / "out")
    shares = importance(result)
    assert list(shares) == ["optimizer.lr", "seed"]
    assert shares["optimizer.lr"] > 0.8
    write_report(result)
    report = (tmp_path / "out" / "report.md").read_text()
    best = result.best
    assert f"Best: trial {best.number:04d} with loss {best.value:.5g} at step 80: optimizer.lr=" in report
    assert len(re.findall(r"^\| \d{4} ", report, re.M)) == 16
    assert (tmp_path / "out" / "report.png").read_bytes()[:4] == b"\x89PNG"
    config = load_config(tmp_path / "out" / "best.toml").config
    assert config.optimizer.lr == best.values["optimizer.lr"]
    assert config.train.steps == 80
    assert config.run.name == "out-best"
    assert rows_of(result, 3)[1][0] == f"{best.number:04d}"
    assert f"16 trials: {result.num_steps} steps, 31% of all in full" in report


def run_through_kills(folder: Path, num_kills: int, seed: int) -> None:
    """Kill the command at random moments until it ends by itself, and compare it with an undisturbed one."""
    file = file_of(folder, LENGTH + "trials = 24\nbatch = 8\n[halving]\n" + SEARCH)
    rng, kills = random.Random(seed), 0
    words = [sys.executable, "-m", "tests.experiments.fake_training", str(file)]
    variables = env.child_env(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")

    def start(name: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*words, str(folder / name)],
            cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    expected = start("undisturbed").communicate(timeout=120)[0]
    rounds = 0
    while kills < num_kills:
        process = start(f"killed_{rounds}")
        try:
            process.wait(rng.uniform(0.3, 4.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
            process.communicate()
            continue
        assert process.communicate()[0] == expected
        rounds += 1
    out, error = start(f"killed_{rounds}").communicate(timeout=120)
    assert out == expected, error


def test_a_killed_sweep_ends_like_an_undisturbed_one(tmp_path):
    run_through_kills(tmp_path, num_kills=2, seed=1)


@pytest.mark.full
def test_a_sweep_killed_often_ends_like_an_undisturbed_one(tmp_path):
    run_through_kills(tmp_path, num_kills=60, seed=2)


def test_the_command_prints_a_table_and_refuses_in_sentences(tmp_path, monkeypatch, capsys):
    from weft.cli.app import run

    monkeypatch.setattr("weft.experiments.sweep.TRAIN", "tests.experiments.fake_training:train")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    file = file_of(tmp_path, LENGTH + 'trials = 4\non = "local:2"\n[halving]\nrungs = 2\n' + SEARCH)
    assert run(["sweep", str(file), "--out", "out"]) == 0
    shown = capsys.readouterr()
    assert "4 trials to step 40 of 80: 0000, 0001, 0002, 0003" in shown.err
    assert shown.out.splitlines()[0].split() == ["trial", "loss", "step", "optimizer.lr", "state"]
    assert "Report: out/report.md   Config: out/best.toml" in shown.out
    assert run(["sweep", str(file), "--out", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[:5] == shown.out.splitlines()[:5]
    assert run(["sweep", str(file), "--out", "other", "--on", "lokal"]) == 2
    assert "on=lokal: it has no engine 'lokal'. Did you mean 'local'?" in capsys.readouterr().err


def test_a_grid_repeats_no_point_and_dotted_keys_need_no_quotes(tmp_path):
    text = 'settings = ["train.steps=8"]\nsampler = "grid"\nTRIALS[search]\noptimizer.lr = [1e-4, 1e-3]\n'
    text += "train.collect_every = {low = 8, high = 10}\n"
    for trials, number in (("", 6), ("trials = 99\n", 6), ("trials = 4\n", 4)):
        config = read_sweep(file_of(tmp_path, text.replace("TRIALS", trials)))
        assert [one.key for one in config.parameters] == ["optimizer.lr", "train.collect_every"]
        assert (config.trials, config.batch) == (number, number)


def test_a_budget_below_one_rung_is_refused(tmp_path):
    for budget in ("steps = 3", 'time = "0s"'):
        text = LENGTH + f"trials = 2\n[budget]\n{budget}\n" + SEARCH
        with pytest.raises(ConfigError, match=r"so no trial was trained\. Increase the budget\."):
            sweep(file_of(tmp_path, text), tmp_path / "out")
