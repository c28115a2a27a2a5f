"""compile=on with backends that generate no code."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from weft.comm.autograd import is_join
from weft.parallel.private_torch import lean_partitioner


@contextmanager
def compiled_by(backend: str | Callable[..., Any]) -> Generator[None]:
    """Compile plans with this backend in the context. "lean" selects `lean_backend`."""
    module = importlib.import_module("weft.parallel.parallelize")
    known: Callable[..., Any] = module.compile_blocks
    module.compile_blocks = functools.partial(known, backend=lean_backend() if backend == "lean" else backend)
    try:
        yield
    finally:
        module.compile_blocks = known


def lean_backend() -> Callable[..., Any]:
    """Return a backend that splits graphs into forward and backward like compile=on, and runs both as traced."""
    return aot_autograd(
        fw_compiler=_as_traced, partition_fn=lean_partitioner(is_join), decompositions=select_decomp_table()
    )


def _as_traced(graph: Any, inputs: Any) -> Any:
    del inputs
    from functorch.compile import make_boxed_func

    return make_boxed_func(graph.forward)
