"""`structure` reads models and changes none; what it says, nobody else finds out for himself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "weft"
ROOM = SOURCE / "structure"
FILES = sorted(ROOM.rglob("*.py"))
#: What changes a module. Hooks and a forward of its own are put on for one run, and taken away in the same function.
CHANGES = re.compile(
    r"__class__\s*=|setattr\(|delattr\(|\._modules\[[^\]]*\]\s*=|\._parameters\[[^\]]*\]\s*=|register_(?:parameter|buffer|module)\("
    r"|(?<!self)\.forward\s*=|\.(?:eval|train)\(|__dict__\.|\.data\s*=|requires_grad_?\s*[=(]\s*(?:True|False)|register_\w*hook\("
)
EXCEPTIONS = {
    "dry_run.py": "`_unchanged` puts back all attributes that a forward in evaluation changed",
    "hugging_face.py": "`experts_at_once` puts back how the experts of a config are multiplied",
    "surgery.py": "the one place where a module's class is replaced, for rooms that change models",
    "layer_runs.py": "`Layers.watched` puts the forward back, and removes its hooks",
    "layout_trace.py": "`_Trace.run` removes its hooks",
    "token_trace.py": "`TokenTrace.follow` removes its hooks",
}
MOST_ENTRIES, MOST_NAMES = 14, 14


def test_it_changes_no_model():
    for path in FILES:
        found = CHANGES.findall(path.read_text())
        assert bool(found) == (path.name in EXCEPTIONS), f"{path.name}: {found}"


def test_hooks_are_taken_away_again():
    for path in FILES:
        text = path.read_text()
        if re.search(r"register_\w*hook\(", text):
            assert "finally:" in text, path.name
            assert ".remove()" in text, path.name


def test_classes_are_replaced_in_one_place():
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "type" and len(node.args) == 3)
    }
    assert {one for one in found if not one.startswith("testing/paper/")} == {"structure/surgery.py"}


def test_other_rooms_use_its_doors():
    beside = [
        f"{path.relative_to(SOURCE)}: {found}"
        for path in SOURCE.rglob("*.py")
        if ROOM not in path.parents
        for found in re.findall(r"(?:from|import) weft\.structure\.[\w.]+", path.read_text())
        if found not in ("from weft.structure.cost", "from weft.structure.layouts")
    ]
    assert not beside


def test_room_and_doors_are_small():
    entries = [path for path in ROOM.iterdir() if path.name not in ("__pycache__", "private_torch.py")]
    assert len(entries) <= MOST_ENTRIES
    import weft.structure

    assert len(weft.structure.__all__) <= MOST_NAMES


def test_one_room_says_how_transformers_calls_the_numbers_of_a_config():
    names = ("num_hidden_layers", "num_key_value_heads", "n_routed_experts", "max_position_embeddings")
    knowing = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(f'"{name}"' in path.read_text() for name in names)
    }
    assert knowing == {"spec/model/hugging_face_config.py", "structure/heads.py"}
