"""Benchmarks match the source: their imports exist, their calls have valid arguments, and each has a usage text."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.source import modules
from tools import record_benchmarks
from weft import env

ROOT = Path(__file__).parents[1]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("[!_]*.py"))
PROGRAMS = [*BENCHMARKS, ROOT / "tools" / "drill_campaign.py", ROOT / "tools" / "planner" / "score.py"]
Definition = ast.FunctionDef | ast.ClassDef


def definition(module: str, name: str) -> ast.AST | None:
    """Return the node that defines a name of a module, through re-exports, or None if the module has no such name."""
    if f"{module}.{name}" in modules():
        return modules()[f"{module}.{name}"]
    for node in ast.walk(modules().get(module, ast.Module([], []))):
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return node
        if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
            source = next(one.name for one in node.names if (one.asname or one.name) == name)
            inside = (node.module or "").startswith("weft")
            return definition(node.module or "", source) if inside else node
    return None


def wrong_calls(tree: ast.Module, name: str, found: ast.AST | None) -> Iterator[str]:
    """Yield calls by that name with arguments that the function, or the class's own `__init__`, does not take."""
    bound = 0
    if isinstance(found, ast.ClassDef):
        found = next((one for one in found.body if getattr(one, "name", "") == "__init__"), None)
        bound = 1
    if not isinstance(found, ast.FunctionDef) or found.args.kwarg is not None:
        return
    takes = [one.arg for one in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
    most = len(found.args.posonlyargs) + len(found.args.args) - bound
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != name:
            continue
        unknown = [one.arg for one in node.keywords if one.arg is not None and one.arg not in takes]
        if unknown or (found.args.vararg is None and len(node.args) > most):
            yield f"line {node.lineno}: {name} takes {', '.join(takes)}"


def out_of_date(text: str) -> Iterator[str]:
    """Yield names of Weft that a script uses and the source does not have."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names if one.name.partition(".")[0] == "weft"]
            yield from (f"line {node.lineno}: no module {name}" for name in names if name not in modules())
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "weft":
            for one in node.names:
                found = definition(node.module or "", one.name)
                if found is None:
                    yield f"line {node.lineno}: {node.module} has no {one.name}"
                yield from wrong_calls(tree, one.asname or one.name, found)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_benchmark_uses_existing_names(path: Path):
    assert not list(out_of_date(path.read_text()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import weft.nothing", "line 1: no module weft.nothing"),
        ("from weft.comm import Nothing", "line 1: weft.comm has no Nothing"),
        ("from weft.comm.mesh import build_mesh\nbuild_mesh(places=3)", "line 2: build_mesh takes plan, "),
        (
            "from weft.optim.step_decision import clip_factor\nclip_factor(1.0, 2.0, 3.0)",
            "line 2: clip_factor takes norm, max_norm",
        ),
    ],
)
def test_outdated_name_in_a_script_is_found(text: str, expected: str):
    assert [line.startswith(expected) for line in out_of_date(text)] == [True]


@pytest.mark.full
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_benchmark_has_a_usage_text(path: Path, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(path), "--help"], cwd=tmp_path, env=env.child_env(), capture_output=True, text=True,
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert path.name in done.stdout


def test_ratios_are_found_in_the_output_of_benchmarks():
    outputs = {
        "overhead": ('{"ratio_of_medians": 1.1, "median_of_pair_ratios": 1.02}', {"ratio": 1.02}),
        "data_parallel": ('{"variant": "weft-zero1", "steps": 3, "ratio": 0.94, "cpu_ms": 1}', {"weft-zero1": 0.94}),
        "tensor_parallel": ("torch             99.0 ms   1.00\nweft              56.0 ms   0.56", {"weft": 0.56}),
        "pipeline": ("1f1b               4    120.0    130.0      0.923", {"1f1b": 0.923}),
        "tables": ("DDP with dense gradients: step 2 s; Weft over it 0.034, 0.033, 0.033", {"ratio": 0.034}),
        "jax": ("small: engine / by hand 0.910", {"small": 0.91}),
    }
    for name, (output, expected) in outputs.items():
        assert record_benchmarks.ratios_in(output, record_benchmarks.BENCHMARKS[name].pattern) == expected
    assert [*record_benchmarks.moved({"a": 1.0, "b": 1.0}, {"a": 1.06, "b": 1.04, "c": 2.0})] == [
        "a: 1.000 before, 1.060 now (+6%)"
    ]


@pytest.mark.parametrize("name", record_benchmarks.BENCHMARKS)
def test_recorded_benchmarks_exist(name: str):
    assert (ROOT / record_benchmarks.BENCHMARKS[name].command.split()[0]).is_file()


def test_every_deliberate_fault_matches_the_sources_once():
    """A change of a line that benchmarks/mutations.py edits fails here."""
    faults = tomllib.loads((ROOT / "benchmarks" / "faults.toml").read_text())["fault"]
    counts = {fault["name"]: (ROOT / fault["file"]).read_text().count(fault["before"]) for fault in faults}
    assert not {name: count for name, count in counts.items() if count != 1}
