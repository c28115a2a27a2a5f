"""compile=on with other backends than the one that generates code."""

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
    """While inside, plans that compile do so with this backend. "lean": `lean_backend`."""
    module = importlib.import_module("weft.parallel.parallelize")
    known: Callable[..., Any] = module.compile_blocks
    module.compile_blocks = functools.partial(known, backend=lean_backend() if backend == "lean" else backend)
    try:
        yield
    finally:
        module.compile_blocks = known


def lean_backend() -> Callable[..., Any]:
    """Cuts graphs into forward and backward as compile=on does; both then run as they were traced."""
    return aot_autograd(
        fw_compiler=_as_traced, partition_fn=lean_partitioner(is_join), decompositions=select_decomp_table()
    )


def _as_traced(graph: Any, inputs: Any) -> Any:
    del inputs
    from functorch.compile import make_boxed_func

    return make_boxed_func(graph.forward)
