"""Reads models, and never changes them: each question about a module has its one answer here.

`surgery` is the one place where a module's class is replaced, for the rooms above that change models; `cost` and
`layouts` have doors of their own.
"""

from weft.structure import blocks, dry_run, hugging_face, layers, token_flow
from weft.structure.blocks import repeated_blocks
from weft.structure.chain import Chain, find_chain
from weft.structure.from_code import call_function
from weft.structure.heads import Heads
from weft.structure.layouts import explain_layout
from weft.structure.surgery import become, class_before, revert

__all__ = [
    "Chain", "Heads", "become", "blocks", "call_function", "class_before", "dry_run", "explain_layout",
    "find_chain", "hugging_face", "layers", "repeated_blocks", "revert", "token_flow",
]  # fmt: skip
