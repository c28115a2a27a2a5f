"""Tests that a change may affect, from the import graph."""

from __future__ import annotations

import pytest

from tools.touched_tests import ROOT, touched


def names(changed: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in touched({ROOT / changed})}


def test_low_level_module_affects_indirect_importers():
    found = names("src/weft/units.py")
    assert {"tests/test_units.py", "tests/cli/test_main.py", "tests/planner/search/test_model_source.py"} <= found


def test_module_with_few_importers_affects_few_tests():
    found = names("src/weft/monitor/plots.py")
    assert {"tests/repo/test_layout.py", "tests/cli/test_main.py"} <= found
    assert not [name for name in found if name.startswith(("tests/planner/", "tests/parity/", "tests/comm/"))]


def test_test_file_affects_itself():
    found = names("tests/test_units.py")
    assert "tests/test_units.py" in found
    assert all(name == "tests/test_units.py" or name.startswith("tests/repo/") for name in found)


@pytest.mark.full
def test_non_module_files_affect_their_folder():
    assert "tests/spec/test_conditions.py" in names("src/weft/config/devices.toml")
    assert "tests/watch/test_server.py" in names("src/weft/monitor/dashboard/static/js/page.js")
    assert "tests/parity/test_matrix.py" in names("tests/parity/conftest.py")
    everything = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert names("pyproject.toml") == everything
    assert all(name.startswith("tests/repo/") for name in names("docs/map.md"))
