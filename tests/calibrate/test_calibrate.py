"""`weft calibrate` on this machine, in a few seconds, and the resulting estimate of `weft plan`."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.calibrate.compute import PROBES
from weft.calibrate.links import COLLECTIVES
from weft.calibrate.run import calibrate, typical
from weft.cli.app import run
from weft.errors import ConfigError
from weft.planner.measured.machine_profile import Measurement, load_profile
from weft.planner.measured.profile_tables import this_host
from weft.planner.search.question import Question


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure a profile of this machine with the command."""
    file = tmp_path_factory.mktemp("profile") / "here.json"
    assert (
        run(
            ["calibrate", "--budget", "3s", "--ranks", "1,2", "--dtypes", "fp32", "--device", "cpu", "--out", str(file)]
        )
        == 0
    )
    return file


@pytest.mark.full
def test_all_operations_are_measured(path: Path) -> None:
    found = load_profile(path)
    assert found.machine == this_host()
    assert found.ranks == (1, 2)
    fp32 = {(sample.op, sample.ranks) for sample in found.samples if sample.dtype == "fp32"}
    assert fp32 >= {(op, count) for op in PROBES for count in (1, 2)}
    assert fp32 >= {(op, 2) for op in COLLECTIVES}


@pytest.mark.full
def test_planner_uses_the_profile(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "tiny", "2xhere", "--profile", str(path), "--seq-len", "128", "--global-batch", "8", "--top", "1"]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert "measurements of this machine" in text
    assert "the profile of" in text
    asked = Question.of("tiny", "here", profile=path, seq_len=128, global_batch=8)
    assert asked.tables.rungs["gemm_ceiling"] == "here"
    assert asked.cluster.device.memory_bytes == this_host().memory_bytes // asked.cluster.num_devices


def test_unmeasurable_requests_are_rejected() -> None:
    for words, message in (
        ({"budget_s": 0.1}, "from 1 s to 10 min"),
        ({"ranks": (3,)}, "powers of two"),
        ({"dtypes": ("fp7",)}, "dtypes=fp7: not one of fp32, bf16"),
        ({"ranks": (1 << 12,)}, "powers of two"),
    ):
        with pytest.raises(ConfigError, match=message):
            calibrate(device="cpu", **words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "soon"], "budget=soon: a time is needed"),
        (["--ranks", "two"], "ranks=two: numbers with commas"),
        (["--device", "tpu"], "device=tpu: not one of auto, cpu, cuda"),
        (
            ["--device", "cuda"],
            "device=cuda: torch sees no GPU on this machine. Use --device cpu, or run `weft doctor`",
        ),
    ],
)
def test_invalid_arguments_are_reported(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["calibrate", *words]) == 2
    assert message in capsys.readouterr().err


def test_error_for_missing_profile_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    assert run(["plan", "tiny", "here"]) == 2
    assert "Measure it first: weft calibrate" in capsys.readouterr().err


def test_repeated_measurements_use_the_median() -> None:
    one, two, three = (Measurement(op="add", size=(1, 2), seconds=seconds) for seconds in (3.0, 2.0, 9.0))
    other = Measurement(op="add", size=(4, 4), seconds=9.0)
    assert [each.seconds for each in typical([one, other, two, three])] == [3.0, 9.0]
