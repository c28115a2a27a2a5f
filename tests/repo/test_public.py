"""`import weft`: few public names, loaded at first use, without torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import weft

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"


def in_fresh_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_weft_loads_nothing_heavy():
    heavy = ["torch", "jax", "numpy", "pydantic", "pyarrow", "rich", "typer", "matplotlib", "tokenizers"]
    code = f"import weft, sys; print([name for name in {heavy} if name in sys.modules])"
    assert in_fresh_python(code) == "[]"


def test_config_classes_need_no_torch():
    code = (
        "import weft, sys\n"
        "weft.Plan.parse('dp_shard=4 tp=2').format(); weft.ModelSpec.named('llama3-8b').num_params\n"
        "weft.ClusterSpec.parse('2x8xh100'); weft.RunConfig(); weft.Layout.named('llama')\n"
        "print('torch' in sys.modules)"
    )
    assert in_fresh_python(code) == "False"


def test_every_public_name_exists_and_is_documented():
    text = REFERENCE.read_text()
    for name in weft.__all__:
        assert getattr(weft, name) is not None
        assert f"`{name}" in text, f"{name} is not in docs/reference/api.md"


@pytest.mark.parametrize("package", ["weft", "weft.data", "weft.models", "weft.train", "weft.verify"])
def test_lazy_names_exist_and_are_cached(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        assert vars(module)[name] is value, f"{package}.{name} is looked up anew at each use"
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Plam'"):
        getattr(module, "Plam")  # noqa: B009 (a plain attribute would be a useless expression)
