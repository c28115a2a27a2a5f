"""Full runs: goodput against simulated failures, consistent days and cost, and invalid text."""

from __future__ import annotations

import json
import random

import pytest

from weft.cli.app import run
from weft.errors import ConfigError
from weft.planner.report.full_run import full_runs, goodput, read_run

FIXED = "dp_shard=8 zero=3 precision=bf16 compile=on recompute=full"


@pytest.mark.parametrize(("failure_s", "save_s", "stall_s", "restart_s"), [(9000, 600, 20, 600), (2000, 900, 60, 300)])
def test_goodput_matches_simulated_failures(failure_s: float, save_s: float, stall_s: float, restart_s: float) -> None:
    """Simulate a run with random failures, also during saves and restarts."""
    draw, clock, segments = random.Random(0), 0.0, 4000

    def until_failure() -> float:
        return draw.expovariate(1 / failure_s)

    for _ in range(segments):
        need = save_s + stall_s
        while (left := until_failure()) < need:
            clock += left
            need = restart_s + save_s + stall_s
        clock += need
    assert goodput(failure_s, save_s, stall_s, restart_s) == pytest.approx(segments * save_s / clock, rel=0.03)


def test_budget_pays_for_its_tokens() -> None:
    """The tokens of a budget cost the budget; the loss of these tokens requires the same tokens."""
    ((_, bought),) = full_runs("llama3-8b", "8xh100", "budget=5000usd,grid=400", fixed=FIXED)
    assert bought is not None
    ((_, paid),) = full_runs("llama3-8b", "8xh100", f"tokens={round(bought.tokens)}", fixed=FIXED)
    ((_, aimed),) = full_runs("llama3-8b", "8xh100", f"loss={bought.loss}", fixed=FIXED)
    assert paid is not None
    assert aimed is not None
    assert paid.dollars == pytest.approx(5000)
    assert aimed.tokens == pytest.approx(bought.tokens, rel=1e-6)
    per_step = bought.candidate.question.job.global_batch * 8192
    assert bought.seconds == pytest.approx(bought.tokens / per_step * bought.candidate.step_s / bought.goodput)
    assert bought.co2_kg == pytest.approx(0.4 * (bought.kwh or 0.0))


def test_region_defines_its_grid() -> None:
    assert read_run("tokens=1T,grid=France").grid == 56
    with pytest.raises(ConfigError, match="grid=mars: a number above 0 or one of world, australia"):
        read_run("tokens=1T,grid=mars")


def test_slow_store_limits_the_checkpoint_interval() -> None:
    """8.03 B weights and their moments are 96 GB in fp32: at 10 MB/s 160 minutes, more than the best interval."""
    ((_, free),) = full_runs("llama3-8b", "8xh100", "tokens=1T", fixed=FIXED)
    ((_, fast),) = full_runs("llama3-8b", "8xh100", "tokens=1T,store=10GB/s", fixed=FIXED)
    ((_, slow),) = full_runs("llama3-8b", "8xh100", "tokens=1T,store=10MB/s", fixed=FIXED)
    assert free is not None
    assert fast is not None
    assert slow is not None
    assert fast.write_s == pytest.approx(9.6, rel=0.01)
    assert (fast.save_s, fast.goodput) == (free.save_s, free.goodput)
    assert slow.save_s == slow.write_s == pytest.approx(9636, rel=0.01)
    assert slow.goodput < free.goodput
    with pytest.raises(
        ConfigError, match=r"save=5:00: the store takes .* for the 89\.7 GiB of a checkpoint\. Save less"
    ):
        full_runs("llama3-8b", "8xh100", "tokens=1T,store=10MB/s,save=5m", fixed=FIXED)


def test_clusters_are_sorted_by_cost_per_token() -> None:
    """Clusters that fit the model come first, cheapest first."""
    fixed = "zero=3 precision=bf16 recompute=full"
    found = full_runs("llama3-8b", "1xrtx4090,8xa100,8xh100", "budget=1000usd", fixed=fixed)
    assert [str(reply.question.cluster) for reply, _ in found] == ["8xh100", "8xa100", "1xrtx4090"]
    assert found[-1][1] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mtfb=3h", "run=mtfb: not a field of a run. Did you mean 'mtbf'?"),
        ("tokens=0", "tokens=0: a number above 0 is needed. Write e.g. tokens=1T."),
        ("budget=inf", "budget=inf: a number above 0 is needed. Write e.g. budget=5000usd."),
        ("mtbf=9h", "run=mtbf=9h: its end is not set. Write one of them, e.g. --run tokens=1T."),
        ("tokens=1T,loss=2", "run=tokens=1T,loss=2: tokens, loss and budget each set its end. Write one of them, "
                             "e.g. --run tokens=1T."),
    ],
)  # fmt: skip
def test_invalid_text_is_rejected(text: str, message: str) -> None:
    """The message has the value, the rule and the remedy."""
    with pytest.raises(ConfigError) as caught:
        read_run(text)
    assert str(caught.value) == message


def test_command_reports_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints text and JSON, and rejects an unreachable loss."""
    words = ["plan", "llama3-8b", "8xh100", "--fix", FIXED, "--run"]
    assert run([*words, "tokens=1T"]) == 0
    text = capsys.readouterr().out
    assert "goodput 100.0%: a failure every" in text
    assert "loss    about" in text
    assert run([*words, "tokens=1T", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["run"]["tokens"] == 1e12
    assert run([*words, "loss=1.2"]) == 2
    assert "loss=1.2: llama3-8b never gets below 1.990" in capsys.readouterr().err
    assert run([*words, "tokens=1T,mtbf=1s"]) == 2
    assert capsys.readouterr().err == (
        "error: mtbf=1.00 s: 8 devices fail every 125 ms, and no step between two failures lasts. "
        "Use a longer mtbf, or a shorter save and restart.\n"
    )
    assert run(["plan", "llama3-8b", ",", "--run", "tokens=1T"]) == 2
    assert capsys.readouterr().err == "error: cluster=',': it names none. Use e.g. 8xh100, or 8xh100,8xa100.\n"
