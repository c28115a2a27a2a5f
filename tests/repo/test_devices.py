"""Facts about kinds of devices are in `weft.devices`: no other module asks for a kind by its name."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.repo.source import modules
from weft.devices.kinds import KINDS

ROOT = Path(__file__).parents[2]
#: Names of types and kinds that only `weft.devices` compares. The host's own is allowed: "cpu" is not a vendor.
NAMES = {name for kind in KINDS.values() for name in (kind.name, kind.torch_type)} - {"cpu"}
#: Modules about libraries of one vendor, with the attributes of torch that they use.
EXCEPTIONS = {
    "weft.cli.machines.doctor": "the lines about NVIDIA's driver, and NCCL's version",
    "weft.calibrate.compute": "profiles of NVIDIA's GPUs, and NCCL's version",
    "weft.memory.graph_recorder": "CUDA graphs",
    "weft.memory.offload": "pinning of existing host memory by the CUDA runtime",
    "weft.memory.private_torch": "the history of CUDA's allocator",
}


def strings_in(node: ast.expr) -> set[str]:
    """Return the string constants of an operand: itself, or the elements of a tuple, list or set."""
    elements = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {one.value for one in elements if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def vendor_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, use) of comparisons with a kind's name, and of the modules that torch has for a vendor."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                found = set().union(*map(strings_in, (node.left, *node.comparators))) & NAMES
                if found:
                    yield node.lineno, f"comparison with {', '.join(sorted(found))}"
            case ast.Call(func=ast.Attribute(attr="startswith"), args=[first, *_]) if strings_in(first) & NAMES:
                yield node.lineno, "startswith"
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in NAMES:
                yield node.lineno, f"torch.{name}"
            case ast.ImportFrom(module=str(name)) if name.startswith("torch.") and name.split(".")[1] in NAMES:
                yield node.lineno, name
            case ast.Attribute(attr="is_cuda" | "is_xpu" | "is_mps"):
                yield node.lineno, node.attr
            case _:
                pass


def test_only_the_device_package_asks_for_a_kind_by_name():
    found = {name: list(vendor_uses(tree)) for name, tree in modules().items() if not name.startswith("weft.devices")}
    unexpected = {name: uses for name, uses in found.items() if uses and name not in EXCEPTIONS}
    assert not unexpected, f"ask weft.devices.access for the fact that this depends on: {unexpected}"
    assert {name for name in EXCEPTIONS if not found[name]} == set(), "an exception is no longer needed"


def test_the_lint_finds_each_form():
    source = """
if device.type == "cuda": pass
if kind in ("cpu", "xpu"): pass
if str(device).startswith("cuda"): pass
torch.cuda.synchronize()
from torch.cuda import nccl
x.is_cuda
if device.type == "cpu": pass
"""
    assert sorted(line for line, _ in vendor_uses(ast.parse(source))) == [2, 3, 4, 5, 6, 7]


def test_page_has_the_table():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import generate
    finally:
        sys.path.remove(str(ROOT / "docs"))
    page = generate.DEVICES.read_text()
    assert page == generate.devices_page(page), "run: python docs/generate.py"
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert rows == list(KINDS)
