"""What XLA compiled: the collectives of a step, and the bytes that it needs on each device."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import IO, Any

import jax
import numpy as np
import torch
from jax.experimental import topologies

from weft import env
from weft.errors import MissingExtra, PlanError
from weft.jax_engine.operators import DTYPES
from weft.jax_engine.private_torch import tree_leaves
from weft.jax_engine.program import Program, use_platform

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_CALL = re.compile(rf"= (.+?) ({'|'.join(_COLLECTIVES)})(-start)?\(")
_SHAPE = re.compile(r"[a-z]+(\d+)\[([\d,]*)\]")
_WITH_OPERANDS = ("all-gather", "collective-permute")
#: Collectives of up to this many numbers are left out: norms, losses and indices.
_FEW = 64
#: The compiler's message about an array that it gathers on every device to change its sharding.
_GATHERED = "nvoluntary full rematerialization"
#: The sizes in libtpu's message about a program that does not fit: its need, and the memory of a chip.
_TOO_LARGE = re.compile(r"RESOURCE_EXHAUSTED.*?\b([\d.]+)([KMGT])\b.*?\b([\d.]+)([KMGT])\b", re.DOTALL)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Collective:
    """Calls of one kind of collective in a program's text.

    Attributes:
        calls: number of calls. Calls in a loop count once.
        num_bytes: bytes of their results on one device.
    """

    calls: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """The compiler's report on a step, in bytes on one device. None: the program does not fit, so there is no report.

    Attributes:
        state_bytes: parameters and optimizer states, without padding.
        argument_bytes: all arguments: states, buffers and the batch, as the compiler lays them out.
        output_bytes: results that do not replace an argument.
        temporary_bytes: activations, gradients and buffers of collectives.
        peak_bytes: the most that exists at the same time, or the need of a program that does not fit.
        usable_bytes: memory of a device by the compiler, if the program does not fit.
        collectives: calls by kind.
        num_gathered: arrays that the compiler gathers on every device to change their sharding.
        compile_s: time (s) of lowering and compiling.
    """

    state_bytes: int
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temporary_bytes: int | None = None
    peak_bytes: int
    usable_bytes: int | None = None
    collectives: Mapping[str, Collective]
    num_gathered: int
    compile_s: float


def traffic(program: str) -> dict[str, Collective]:
    """Return the collectives of a compiled program's text by kind. Those of a few numbers are left out."""
    calls, sizes = Counter[str](), Counter[str]()
    for shapes, kind, starts in _CALL.findall(program):
        found = [(math.prod(map(int, dims.split(",") if dims else ())), bits) for bits, dims in _SHAPE.findall(shapes)]
        if starts and kind in _WITH_OPERANDS:  # the type lists operands and results, and possibly two counters
            found = [one for one in found if one[0] > 1]
            found = found[len(found) // 2 :]
        if max((count for count, _ in found), default=0) > _FEW:
            calls[kind] += 1
            sizes[kind] += sum(count * int(bits) // 8 for count, bits in found)
    return {kind: Collective(calls[kind], sizes[kind]) for kind in calls}


def tpu_devices(topology: str) -> list[Any]:
    """Return the chips of a TPU slice, such as "v5p:2x2x2", to compile for. No TPU is needed.

    Raises:
        MissingExtra: if libtpu is not installed.
        PlanError: if libtpu does not support the topology.
    """
    if find_spec("libtpu") is None:
        raise MissingExtra("libtpu", "tpu", "weft plan --compile")
    # Without these, libtpu asks the metadata server of Google Cloud for the machine's TPU, and one process may load it.
    env.default_for_libraries(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    use_platform("cpu")
    with _messages():
        try:
            return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
        except jax.errors.JaxRuntimeError as error:
            raise PlanError(f"topology={topology}: libtpu refuses it ({error}). Use another slice.") from error


def compile_step(program: Program, batch: Any, buffers: Mapping[str, torch.Tensor]) -> CompiledStep:
    """Compile the step of a plan without arrays, and return the compiler's report.

    Args:
        program: on devices of this process, or of a topology.
        batch: a microbatch; only shapes and dtypes matter, so its tensors may be on the meta device.
        buffers: the model's buffers, which may be on the meta device.
    """
    params, states = program.abstract()
    leaves = [*tree_leaves(batch), *(node.meta["val"] for node in program.captured.tables)]
    steps, make, everywhere = program.plan.accumulation, jax.ShapeDtypeStruct, program.sharding.named()
    inputs = [make((steps, *leaf.shape), DTYPES[leaf.dtype]) for leaf in leaves]
    inputs = [one.update(sharding=where) for one, where in zip(inputs, program.sharding.batch(inputs), strict=True)]
    held = {name: make(one.shape, DTYPES[one.dtype], sharding=everywhere) for name, one in buffers.items()}
    numbers = [make((), dtype, sharding=everywhere) for dtype in (np.int64, np.float64)]
    state_bytes = sum(
        math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize for one in jax.tree.leaves((params, states))
    )
    start = time.perf_counter()
    try:
        step, num_gathered = _gathered(program.step.lower(params, held, states, inputs, *numbers))
    except jax.errors.JaxRuntimeError as error:
        if (sizes := _too_large(str(error))) is None:
            raise
        return CompiledStep(
            state_bytes=state_bytes, peak_bytes=sizes[0], usable_bytes=sizes[1], collectives={}, num_gathered=0,
            compile_s=time.perf_counter() - start,
        )  # fmt: skip
    memory = step.memory_analysis()
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = memory.argument_size_in_bytes, fresh, memory.temp_size_in_bytes
    return CompiledStep(
        state_bytes=state_bytes, argument_bytes=sizes[0], output_bytes=sizes[1], temporary_bytes=sizes[2],
        peak_bytes=sum(sizes), collectives=traffic(step.as_text()), num_gathered=num_gathered,
        compile_s=time.perf_counter() - start,
    )  # fmt: skip


def _gathered(lowered: Any) -> tuple[Any, int]:
    """Return the compiled program, and the number of arrays that the compiler gathers to change a sharding."""
    with _messages() as log:
        found = lowered.compile()
        log.seek(0)
        return found, log.read().decode(errors="replace").count(_GATHERED)


def _too_large(message: str) -> tuple[int, int] | None:
    """Return the bytes that a program needs and a chip has, if the compiler's message is about them."""
    found = _TOO_LARGE.search(message)
    return None if found is None else (_bytes(found[1], found[2]), _bytes(found[3], found[4]))


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


@contextlib.contextmanager
def _messages() -> Iterator[IO[bytes]]:
    """Collect what libraries write to the process's standard error during a block, instead of showing it."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def bytes_per_device(arrays: Any) -> int:
    """Return the bytes that a tree of arrays takes on the device with the most."""
    total: Counter[Any] = Counter()
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            total[shard.device] += shard.data.nbytes
    return max(total.values(), default=0)
