"""Exact reference results for tests on any device: counts of compiled graphs, recorded operators, compressed sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._dynamo import utils
from torch.nn.functional import pad

from weft.comm.wire.coder import chance_key
from weft.comm.wire.wire_format import State, find_wire
from weft.memory.graph_recorder import Recording, cannot_record
from weft.private_torch import TorchDispatchMode, tree_leaves, tree_map_only
from weft.verify.private_torch import changes_arguments, name_of


@dataclass(slots=True)
class Graphs:
    """Counts of torch.compile: distinct graphs, graph breaks by reason, and the reason for each recompilation."""

    graphs: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    recompiles: list[str] = field(default_factory=list)


@contextmanager
def counted_graphs() -> Iterator[Graphs]:
    """Reset torch.compile, and count compilations inside the block. The counts are set when the block ends.

    Code that would run uncompiled after too many recompilations raises FailOnRecompileLimitHit.
    """
    found = Graphs()
    limit = torch._dynamo.config.fail_on_recompile_limit_hit
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    try:
        yield found
    finally:
        torch._dynamo.config.fail_on_recompile_limit_hit = limit
        found.graphs = utils.counters["stats"]["unique_graphs"]
        found.breaks = dict(utils.counters["graph_break"])
        reasons = [one.recompile_reason for one in utils.get_compilation_metrics()]
        found.recompiles = [reason for reason in reasons if reason]


# Stand-in for CUDA graphs on a CPU: it records operators and replays them on the same tensors.

T = TypeVar("T")

#: Operators that make the host wait, with the reason.
_WAITS = {
    "aten::_local_scalar_dense": "the host reads a value",
    "aten::equal": "the host reads a value",
    "aten::is_nonzero": "the host reads a value",
    "aten::nonzero": "a size follows from values",
    "aten::masked_select": "a size follows from values",
    "aten::unique_dim": "a size follows from values",
    "aten::_unique2": "a size follows from values",
    "aten::bincount": "a size follows from values",
    "aten::lift_fresh": "numbers of the host are sent",
}


class OpRecorder:
    """Stand-in for `weft.memory.graph_recorder.Recorder` that records operators.

    Attributes:
        num_ops: number of operators of each recording, in order.
        num_replays: replays of all recordings. First runs do not count.
    """

    def __init__(self) -> None:
        self.num_ops: list[int] = []
        self.num_replays = 0

    def record(self, act: Callable[[], T], what: str, *, apart: bool = False) -> Recording[T]:
        """Run a function and record its operators.

        Args:
            act: the function to run.
            what: name for errors.
            apart: ignored: replays of other recordings never change the results.

        Raises:
            ModelError: if an operator would make the host wait for a device.
        """
        del apart  # all memory stays allocated
        mode, before = _Ops(), torch.get_rng_state()
        try:
            with mode:
                result = act()
        except _HostWaits as error:
            raise cannot_record(what, error) from error
        self.num_ops.append(len(mode.calls))

        def replay() -> None:
            self.num_replays += 1
            mode.replay()

        return Recording(result, replay, not torch.equal(before, torch.get_rng_state()))


class _HostWaits(RuntimeError):
    """Raised if a recorded operator makes the host wait."""


class _Ops(TorchDispatchMode):
    """Executes and records operators. It is an infra mode: Weft disables modes that only observe, but not this one."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        #: Per operator: its arguments, and those of its results that are in new memory.
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in _WAITS or _indexes_by_mask(name, args):
            raise _HostWaits(f"{name}: {_WAITS.get(name, 'a size follows from values')}")
        given = tree_map_only(Tensor, torch.Tensor.detach, (args, kwargs))
        out = func(*args, **kwargs)
        known = {one.untyped_storage().data_ptr() for one in tree_leaves(given) if isinstance(one, Tensor)}
        new = [one.detach() for one in tree_leaves(out) if isinstance(one, Tensor)]
        new = [one for one in new if one.untyped_storage().data_ptr() not in known or not one.numel()]
        if new or changes_arguments(func):
            self.calls.append((func, *given, new))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, new in self.calls:
            found = func(*args, **kwargs)
            if new:
                fresh = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
                for mine, other in zip(new, fresh, strict=True):
                    mine.copy_(other)


def _indexes_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    if not name.startswith("aten::index") or len(args) < 2 or not isinstance(args[1], list | tuple):
        return False
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])


# Expected sums over ranks for a wire format: the same codec, in one process, without a collective.


class WireOracle:
    """Computes the expected sums over ranks with one wire format, step by step. Call `commit` after each step.

    It has the error feedback of every rank. name: name of the wire format. The methods' `key` identifies the tensor
    whose error feedback is used.
    """

    def __init__(self, name: str):
        self._wire = find_wire(name)
        self._states: dict[tuple[object, ...], State] = {}
        self.turn = 0
        self.calls = 0
        self._calls: dict[tuple[object, int], int] = {}

    def commit(self) -> None:
        self.turn, self.calls, self._calls = self.turn + 1, 0, {}

    def reduce_scatter(self, flats: Sequence[torch.Tensor], key: object) -> list[torch.Tensor]:
        """Return each rank's part of the sum of all ranks' flat tensors, each (numel,) of one floating-point dtype."""
        if (added_in := self._wire.added_in(flats[0].dtype)) is not None:
            return list(_add(flats, added_in).chunk(len(flats)))
        parts = [self._as_sent(flat.view(len(flats), -1), (key, rank), "summands") for rank, flat in enumerate(flats)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return list(total)

    def all_reduce(self, flats: Sequence[torch.Tensor], key: object) -> torch.Tensor:
        """Return the sum of all ranks' flat tensors, each (numel,) of one floating-point dtype."""
        if (added_in := self._wire.added_in(flats[0].dtype)) is not None:
            return _add(flats, added_in)
        numel, size = flats[0].numel(), len(flats)
        if size == 2:
            one, other = (self._as_sent(flat[None], (key, rank), "summands") for rank, flat in enumerate(flats))
            return (one + other).view(-1)
        sums = self.reduce_scatter([pad(flat, (0, -numel % size)) for flat in flats], key)
        gathered = [self._as_sent(part[None], (key, rank), "sums") for rank, part in enumerate(sums)]
        return torch.cat(gathered, 1).view(-1)[:numel]

    def _as_sent(self, rows_RN: torch.Tensor, key: tuple[object, int], role: str) -> torch.Tensor:
        name, rank = key
        calls = self._calls.get((name, rank), 0)
        wire = self._wire.at(chance_key(self.turn, self.calls + calls, str(name), role, rank))
        self._calls[name, rank] = calls + 1
        codes, state = wire.encode(rows_RN, self._states.get((*key, role)))
        if state is not None:
            self._states[*key, role] = state
        return self._wire.decode(codes, rows_RN.shape[1], rows_RN.dtype)


def _add(flats: Sequence[torch.Tensor], added_in: torch.dtype) -> torch.Tensor:
    """Sum tensors of ranks in a tree. Inputs and sum are rounded to `added_in`; additions use at least float32."""
    wide = torch.promote_types(added_in, torch.float32)
    level = [flat.to(added_in).to(wide) for flat in flats]
    while len(level) > 1:
        pairs = [level[at : at + 2] for at in range(0, len(level), 2)]
        level = [pair[0] if len(pair) == 1 else pair[0] + pair[1] for pair in pairs]
    return level[0].to(added_in).to(flats[0].dtype)
