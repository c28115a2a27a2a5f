"""Profile files: round trip, and errors for damaged ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.measured.synthetic import profile
from weft.errors import ConfigError
from weft.planner.measured.machine_profile import Lesson, load_profile
from weft.planner.measured.profile_tables import cluster_of, local_profile, stale


def test_profile_round_trip(tmp_path: Path) -> None:
    lesson = Lesson(run="runs/a", plan="tp=2", model="tiny", steps=5, ratios=(("compute", 1.1),))
    written = profile((1, 2)).with_lesson(lesson)
    written.save(tmp_path / "here.json")
    assert replace(load_profile(tmp_path / "here.json"), path="") == written
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]  # no temporary file remains


def test_relearned_run_replaces_its_correction() -> None:
    lessons = [Lesson(run="a", plan="", model="tiny", steps=n, ratios=()) for n in (5, 6)]
    assert profile((1,)).with_lesson(lessons[0]).with_lesson(lessons[1]).learned == (lessons[1],)


def _broken(path: Path, **changes: object) -> str:
    table = json.loads(profile((1,)).to_text())
    path.write_text(json.dumps(table | changes))
    with pytest.raises(ConfigError) as error:
        load_profile(path)
    return str(error.value)


def test_invalid_profile_is_rejected_with_a_command(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    good = json.loads(profile((1,)).to_text())
    cases = [
        ({"weft_profile": 7}, "weft_profile=7: this Weft reads version 2"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"machine": good["machine"] | {"cores": 64}}, "does not match its machine"),
        ({"samples": [good["samples"][0] | {"seconds": -1.0}]}, "is not a time"),
        ({"samples": [good["samples"][0] | {"colour": 1}]}, "unknown key 'colour'"),
        ({"samples": [good["samples"][0] | {"seconds": "1"}]}, "seconds"),
    ]
    for changes, told in cases:
        text = _broken(path, **changes)
        assert told in text
        assert f"weft calibrate --out {path}" in text
    path.write_text("{")
    with pytest.raises(ConfigError, match="not JSON text"):
        load_profile(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "none.json")


def test_profile_of_another_machine_is_stale(tmp_path: Path) -> None:
    found = profile((1,))
    assert any(told.startswith("device loom, here ") for told in stale(found))
    found.save(tmp_path / "p.json")
    with pytest.raises(ConfigError, match=r"device loom, here .*Measure again: weft calibrate"):
        local_profile(tmp_path / "p.json")


def test_missing_profile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this machine has not been measured: .* Measure it first: weft calibrate"):
        local_profile(tmp_path / "none.json")


def test_ranks_share_the_machine() -> None:
    four, two = cluster_of(profile(), "4xhere"), cluster_of(profile(), "here")
    assert (four.num_devices, two.num_devices) == (4, 2)
    assert four.device.memory_bytes == two.device.memory_bytes // 2
    peak = four.device.peak_flops("fp32")
    assert peak is not None
    assert peak == pytest.approx((two.device.peak_flops("fp32") or 0) / 2)
    with pytest.raises(ConfigError, match="at most 16 ranks"):
        cluster_of(profile(), "17xhere")
