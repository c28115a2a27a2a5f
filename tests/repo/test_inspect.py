"""`models.inspect` reads models and changes none of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "weft"
ROOM = SOURCE / "models" / "inspect"
FILES = sorted(ROOM.rglob("*.py"))
#: Changes of a module. Hooks and a replaced forward are set for one run, and removed in the same function.
CHANGES = re.compile(
    r"__class__\s*=|setattr\(|delattr\(|\._modules\[[^\]]*\]\s*=|\._parameters\[[^\]]*\]\s*=|register_(?:parameter|buffer|module)\("
    r"|(?<!self)\.forward\s*=|\.(?:eval|train)\(|__dict__\.|\.data\s*=|requires_grad_?\s*[=(]\s*(?:True|False)|register_\w*hook\("
)
EXCEPTIONS = {
    "dry_run.py": "`_unchanged` puts back all attributes that a forward in evaluation changed",
    "hugging_face.py": "`experts_at_once` puts back how the experts of a config are multiplied",
    "blocks.py": "the one place where a module's class is replaced, for rooms that change models",
    "describe.py": "`Layers.watched` puts the forward back, and removes its hooks",
    "layout_trace.py": "`_Trace.run` removes its hooks",
    "token_trace.py": "`TokenTrace.follow` removes its hooks",
}


def test_inspect_changes_no_model():
    for path in FILES:
        found = CHANGES.findall(path.read_text())
        assert bool(found) == (path.name in EXCEPTIONS), f"{path.name}: {found}"


def test_hooks_are_removed():
    for path in FILES:
        text = path.read_text()
        if re.search(r"register_\w*hook\(", text):
            assert "finally:" in text, path.name
            assert ".remove()" in text, path.name


def test_only_two_modules_replace_classes():
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "type" and len(node.args) == 3)
    }
    assert found == {"models/inspect/blocks.py", "models/keras_model.py"}


def test_only_two_modules_use_transformers_config_names():
    names = ("num_hidden_layers", "num_key_value_heads", "n_routed_experts", "max_position_embeddings")
    knowing = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(f'"{name}"' in path.read_text() for name in names)
    }
    assert knowing == {"config/shapes/hugging_face_config.py", "models/inspect/layers.py"}
