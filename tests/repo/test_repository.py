"""Files of the repository around the package: workflows, templates, versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import weft

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps_of(workflow: Path) -> list[dict]:
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


def test_versions_agree():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == weft.__version__
    assert re.search(r"^## (\S+) ", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == weft.__version__


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_existing_targets_and_programs(workflow):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for step in steps_of(workflow):
        words = step.get("run", "").split()
        assert ("uses" in step) != bool(words)
        if words[:1] == ["make"]:
            assert words[1] in targets
        elif words[:1] == ["docker"] and "-f" in words:
            assert (ROOT / words[words.index("-f") + 1].partition("$")[0]).parent.is_dir()
        elif words and words[0] not in ("python", "docker"):
            assert (ROOT / words[0]).is_file()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_permissions_are_read_only_by_default(workflow):
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}


def test_issue_forms_use_existing_labels():
    labels = {label["name"] for label in yaml.safe_load((ROOT / ".github/labels.yml").read_text())}
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 3
    for form in forms:
        content = yaml.safe_load(form.read_text())
        assert set(content["labels"]) <= labels
        assert len({field["id"] for field in content["body"]}) == len(content["body"])


def test_pre_commit_runs_the_linter_of_the_constraints():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    ruff = next(one for one in hooks if one["repo"].endswith("ruff-pre-commit"))
    assert f"ruff=={ruff['rev'].removeprefix('v')}" in (ROOT / "constraints.txt").read_text().split()


def test_benchmarks_that_import_the_repository_run_from_any_folder():
    for path in (ROOT / "benchmarks").glob("*.py"):
        text = path.read_text()
        if found := re.search(r"^from (tools|tests|benchmarks)\b", text, re.M):
            assert "sys.path.insert(0, str(Path(__file__).parents[1]))" in text[: found.start()], path.name
