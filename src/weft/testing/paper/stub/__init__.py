"""A library in C++ that answers for CUDA where torch asks it, and how it is built."""

from __future__ import annotations

from weft.testing.paper.stub.stub_library import built_stub, load_stub, why_not

__all__ = ["built_stub", "load_stub", "why_not"]
