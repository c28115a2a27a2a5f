"""Corrections learned from runs: ratios by part, shrunk by uncertainty, reported and saved with their source."""

import json
from pathlib import Path

import pytest

from tests.planner.measured.synthetic import profile
from weft.errors import ConfigError
from weft.planner.measured.corrections import RUN_FILE, learn, lesson_of, lesson_words, measured_parts, part_factors
from weft.planner.measured.machine_profile import Lesson


def run(folder: Path, **changes: object) -> Path:
    """Write a run folder with measured and expected times."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"compute": 1.2, "over tp": 0.4, "optimizer": 0.001, "data": 0.01}
    table = {
        "plan": "tp=2",
        "model": "tiny",
        "device": "cpu",
        "steps": 10,
        "measured": {"step_s": 1.611, "memory_bytes": 1, "parts": parts},
        "expected": {
            "step_s": 1.0,
            "terms": {"gemm": 0.8, "attention": 0.2, "tp": 0.5, "optimizer": 0.01, "bubble": 0.0},
            "factors": {},
        },
        "unknown": "",
    }
    (folder / RUN_FILE).write_text(json.dumps(table | changes))
    return folder


def test_ratios_exist_for_parts_in_both_measurement_and_estimate(tmp_path: Path) -> None:
    lesson = lesson_of(run(tmp_path / "a"))
    assert dict(lesson.ratios) == {"compute": 1.2, "over tp": 0.8}  # the optimizer is too small to give a ratio
    assert lesson.run == str((tmp_path / "a").resolve())


def test_earlier_corrections_are_not_applied_twice(tmp_path: Path) -> None:
    expected = {"step_s": 1.1, "terms": {"gemm": 1.1, "tp": 0.5}, "factors": {"gemm": 1.1}}
    assert dict(lesson_of(run(tmp_path, expected=expected)).ratios)["compute"] == pytest.approx(1.2)


def test_uncertainty_shrinks_corrections() -> None:
    lessons = [Lesson(run=str(n), plan="", model="", steps=1, ratios=(("compute", 1.44),)) for n in range(3)]
    assert part_factors(lessons[:1]) == {"compute": pytest.approx(1.2)}
    assert part_factors(lessons)["compute"] == pytest.approx(1.44**0.75)
    assert part_factors([]) == {}


def test_profile_reports_its_corrections(tmp_path: Path) -> None:
    taught = learn(run(tmp_path / "a"), profile())
    assert lesson_words(taught) == "compute x 1.10, over tp x 0.89 (learned from 1 run)"
    assert lesson_words(profile()) == ""
    assert learn(tmp_path / "a", taught).learned == taught.learned


def test_axes_of_a_time_book_map_to_parts() -> None:
    kinds = {"compute": 1.0, "over dp_replicate*dp_shard": 0.1, "over world": 0.2, "over pp": 0.3, "over tp": 0.4}
    assert measured_parts(kinds) == pytest.approx({"compute": 1.0, "over dp": 0.3, "stages": 0.3, "over tp": 0.4})


def test_run_without_usable_measurements_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*measured.json"):
        lesson_of(tmp_path / "none")
    unknown = run(tmp_path / "u", expected=None, unknown="nothing is known of this machine's processor")
    with pytest.raises(ConfigError, match="the run has no estimate to compare with"):
        lesson_of(unknown)
    with pytest.raises(ConfigError, match="it ran on cuda, and the profile is of cpu"):
        learn(run(tmp_path / "g", device="cuda"), profile())
    (tmp_path / "u" / RUN_FILE).write_text("{}")
    with pytest.raises(ConfigError, match="lacks 'expected'"):
        lesson_of(tmp_path / "u")
