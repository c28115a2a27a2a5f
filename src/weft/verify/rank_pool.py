"""A pool of gloo ranks on this machine, started once for many cases."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from weft import env
from weft.errors import CommError, WeftError

#: Kinds of failure, the most informative first: a rank raised an error, died, or did not finish in time.
_TELLING = ("error", "dead", "late")
#: Modules that are imported once, in a process from which gloo ranks are forked, because importing takes seconds.
_IMPORTED = ["torch._dynamo", "weft.verify.verifier"]
#: The same for models of transformers.
_HUGGING_FACE = ["transformers.modeling_utils", "transformers.models.auto.modeling_auto"]
#: Seconds that the other ranks may continue after one has failed.
_AFTER_FAILURE_S = 5.0


def start_imports(model: str | None = None) -> None:
    """Start the process from which gloo ranks are forked, so that it imports torch while this process does.

    model: start it only if this is a Hugging Face folder, and import transformers too.
    """
    if model is not None and not (Path(model) / "config.json").is_file():
        return
    forkserver.set_forkserver_preload(_IMPORTED + (_HUGGING_FACE if model else []))
    forkserver.ensure_running()


class RankError(CommError):
    """Raised if a rank failed, or did not respond.

    Attributes:
        said: message of the rank's WeftError, or "" for other errors.
        refusal: the same message, or "" for a CommError, which usually means that another rank failed.
    """

    def __init__(self, message: str, said: str = "", refusal: str = ""):
        super().__init__(message)
        self.said, self.refusal = said, refusal


class RankPool:
    """`num_ranks` processes in one gloo group; `run` calls a function on all of them.

    The first pool of a process costs seconds (torch is imported once for all ranks), so keep one pool for many cases:

        with RankPool(2) as pool:
            losses = pool.run(train_one_case, "dp_replicate=2")

    The function must be importable from its module, and its arguments and results picklable.

    Args:
        num_ranks: number of processes.
        timeout_s: seconds that a call may take.
        backend: backend of the process group, as in torch.distributed.
    """

    def __init__(self, num_ranks: int, timeout_s: float = 120.0, backend: str = "gloo"):
        self.num_ranks, self._timeout_s, self._backend = num_ranks, timeout_s, backend
        self._start()

    def _start(self) -> None:
        self._is_broken = False
        self._folder = tempfile.TemporaryDirectory(prefix="weft-ranks-")
        # Forked processes cannot use CUDA if an import in the parent initialized it, so only gloo ranks are forked.
        if self._backend == "gloo":
            context = multiprocessing.get_context("forkserver")
            start_imports()  # no effect if it has started
        else:
            context = multiprocessing.get_context("spawn")
        store = Path(self._folder.name) / "store"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.num_ranks, str(store), theirs, self._backend, env.child_env()),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank and return the results in order of rank.

        If a rank dies or does not answer in time, the next call starts new ranks. A rank's own WeftError is raised
        rather than errors that it causes on other ranks.

        Args:
            function: importable by its module and name on the ranks.
            *args: picklable.
            **kwargs: picklable.

        Raises:
            RankError: if a rank raises an error, with its traceback, or if a rank dies or does not answer in time.
        """
        if self._is_broken:
            # A rank that did not respond is dead, or still in the last call.
            self.close()
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = self._answers()
        failures = [(_TELLING.index(kind), rank, value) for rank, (kind, value) in enumerate(answers) if kind != "done"]
        self._is_broken = any(kind in ("late", "dead") for kind, _ in answers)
        if failures:
            _, rank, (text, *said) = min(failures, key=lambda one: (one[0], not one[2][2], one[1]))
            raise RankError(f"rank {rank} of {self.num_ranks} failed in {function.__name__}:\n{text}", *said)
        return [value for _, value in answers]

    def _answers(self) -> list[tuple[str, Any]]:
        """Return each rank's response: ("done", result), or (kind of failure, arguments of a `RankError`).

        The kinds are "error", "late" and "dead".
        """
        answers: dict[int, tuple[str, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        limit_s = left_s = self._timeout_s
        while waiting and left_s > 0:
            # Wait in short slices, so that time in which this process was suspended does not count against the ranks.
            slice_s = min(1.0, left_s)
            ready = cast("list[Connection]", wait(list(waiting), slice_s))
            left_s = left_s if ready else left_s - slice_s
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    answers[rank] = ("dead", ("the process ended without an answer", "", ""))
                if answers[rank][0] != "done" and limit_s == self._timeout_s:
                    # After a rank has failed, the others may wait for it forever: shorten their time limit.
                    limit_s = left_s = min(_AFTER_FAILURE_S, self._timeout_s)
        answers |= dict.fromkeys(waiting.values(), ("late", (f"no answer within {limit_s:.0f} s", "", "")))
        return [answers[rank] for rank in range(self.num_ranks)]

    def close(self) -> None:
        """End the ranks, cleanly if they still respond."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except (BrokenPipeError, OSError):
                continue
        for process in self._processes:
            process.join(0.5 if self._is_broken else 10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(
    rank: int, num_ranks: int, store: str, pipe: Connection, backend: str, environment: Mapping[str, str]
) -> None:
    """Run one rank: connect, handle calls until None arrives, disconnect."""
    env.take_over(environment)  # the forkserver's environment is older than the pool
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _send_tensors_inline()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    gc.freeze()  # imports, before the first call's collection would visit them
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            break
        if call is None:
            break
        function, args, kwargs = call
        try:
            # Send results before anything else can fail: gloo may abort a process that disconnects out of order.
            pipe.send(("done", function(*args, **kwargs)))
        except BaseException as error:
            said = str(error) if isinstance(error, WeftError) else ""
            pipe.send(("error", (traceback.format_exc(), said, "" if isinstance(error, CommError) else said)))
        # Free the objects of this call before the next one. The remaining objects are imports and caches, which gc can
        # skip.
        gc.collect()
        gc.freeze()
    if num_ranks > 1:
        # No barrier at the end, because another rank may have exited already.
        os._exit(0)


def _send_tensors_inline() -> None:
    """Send tensors in results as bytes. torch would open a file and a socket for each: 1 ms per tensor and rank."""
    import torch
    from torch import nn

    def reduce(tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return tensor.__reduce_ex__(2)
        plain = tensor.detach().cpu().contiguous()
        values = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return _rebuild, (values, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    ForkingPickler.register(torch.Tensor, reduce)
    ForkingPickler.register(nn.Parameter, reduce)


def _rebuild(values: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(values), dtype=kind).view(shape) if values else torch.empty(shape, dtype=kind)
