"""Small forwards for the check of the first batch: some samples together and in halves, from the same model state.

Under a pipeline all ranks run each small forward stage after stage. After each stage they exchange a status, so that no
rank waits for one that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from weft.comm.collectives import all_reduce, gather_json
from weft.comm.mesh import Mesh
from weft.data.batches import map_tensors
from weft.errors import ModelError
from weft.parallel.local_means import frequency_refusal
from weft.parallel.pipeline.inner_gradients import PartialGradient
from weft.parallel.pipeline.runtime import Pipeline
from weft.parallel.random.streams import SampleNumbers
from weft.private_torch import tree_leaves
from weft.train.batches.microbatches import samples_in, split_rows
from weft.train.step.pure_forward import ForwardState, changed_attributes

#: Number of samples that run together; each half also runs separately.
_SAMPLES = 4

_DRAWING = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.normal, torch.bernoulli, torch.multinomial, torch.poisson, torch.dropout, torch.feature_dropout,
    torch.alpha_dropout, torch.rrelu, Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_,
    Tensor.random_, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_, Tensor.multinomial, Tensor.bernoulli,
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
}  # fmt: skip
_DROPPING = {
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d,
    F.alpha_dropout, F.feature_alpha_dropout,
}  # fmt: skip
#: Functions whose gradient may depend on other samples, and the error messages for them.
_BY_FREQUENCY = (F.embedding, F.embedding_bag)
_REFUSALS = tuple(frequency_refusal(f"F.{function.__name__}") for function in _BY_FREQUENCY)


@dataclass(slots=True)
class Probed:
    """A model, and how the check of the first batch runs it on a few samples.

    Attributes:
        model: the model, in training mode.
        forward: forward(model, batch) -> output.
        loss_fn: (output, batch) -> (loss sum, count); None to skip the loss.
        inside: takes sample numbers, and returns the context manager in which the forward of these samples runs.
        limit: relative difference that counts as rounding.
        parts: number of parts into which the plan divides a batch.
        forwards: number of forwards per step on one rank.
        mesh: the ranks that run the same forwards; None for this process alone.
        pipeline: runs the model's stages; None if the model is not divided into stages.
        stage_forward: `forward` of all stages except the last one.
        has_gradients: run forwards with gradients, for a model that needs them in forward.
    """

    model: nn.Module
    forward: Callable[[nn.Module, Any], Any]
    loss_fn: Callable[[Any, Any], Any] | None
    inside: Callable[[SampleNumbers], AbstractContextManager[Any]] = lambda _: nullcontext()
    limit: float = 1e-9
    parts: int = 2
    forwards: int = 2
    mesh: Mesh | None = None
    pipeline: Pipeline | None = None
    stage_forward: Callable[[nn.Module, Any], Any] | None = None
    has_gradients: bool = False

    def results(self, batch: Any) -> tuple[Any, Any]:
        """Return this rank's output for a batch, and the loss function's result or None."""
        if self.pipeline is None:
            made = output = self.forward(self.model, batch)
        else:
            made = self.pipeline.run_in_turn(batch, self.stage_forward or self.forward, self.forward, self.agree)
            output = made[-1] if made and self.pipeline.has_last else None
            if output is None:
                return made, None
        return made, None if self.loss_fn is None else self.loss_fn(output, batch)

    def agree(self, error: Exception | None) -> None:
        """Raise on all ranks if a forward failed on one. All ranks must call it.

        Raises:
            RefusedGradient: on all ranks, if one rank has this error or a PartialGradient.
            ForwardFailed: for other errors.
            ModelError: in a single process, if `error` is a ModelError: the error itself.
        """
        is_refused = isinstance(error, RefusedGradient | PartialGradient)
        worst = 0 if error is None else 1 + is_refused
        if self.mesh is not None and self.mesh.world_size > 1:
            worst = int(all_reduce(torch.tensor(float(worst), device=self.mesh.device), self.mesh.world, "max"))
            if worst > 1:
                texts = gather_json(str(error) if is_refused else "", self.mesh.world, self.mesh.device)
                raise RefusedGradient(next(filter(None, texts)))
        elif isinstance(error, ModelError):
            raise error
        if worst:
            raise ForwardFailed from error


class RefusedGradient(ModelError):
    """Raised if a gradient depends on how often an index is in the microbatch, or on another pipeline stage."""


class ForwardFailed(Exception):
    """Raised if a small forward failed on some rank. The step itself reports failures of the full batch."""


@dataclass(slots=True)
class Ran:
    """Result of a small forward: tensors of the output, the loss, and inputs and outputs of modules if recorded.

    number: the loss function's count. drawn: names of the random functions that forward called. tensors: buffers and
    parameters that forward changed. attributes: other attributes that it changed.
    """

    samples: int
    outputs: list[Tensor] = field(default_factory=list)
    loss: float | None = None
    number: float | None = None
    drawn: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Small:
    """Some samples of a microbatch, and their indices in the global batch."""

    batch: Any
    samples: SampleNumbers


def small_batches(batch: Any, samples: SampleNumbers) -> list[Small] | None:
    """Return some samples together, and both halves of them; None if the rows of the batch are not its samples.

    If there are too few samples, variants with shifted contents are added, because batch statistics need two per half.
    """
    count = len(samples.numbers)
    if not count or samples.rows or samples_in(batch) != count:
        return None
    numbers: Sequence[int] = samples.numbers[:_SAMPLES]
    try:
        # For a microbatch of one sample, use only two samples: they need less memory than its backward.
        every = _SAMPLES if count > 1 else 2
        if count < every:
            batch, numbers = _longer(batch, count), range(numbers[0], numbers[0] + every)
        runs = [range(every), range(every // 2), range(every // 2, every)]
        batches = split_rows(batch, runs)
    except ModelError:
        return None
    return [Small(part, SampleNumbers(numbers[run.start : run.stop])) for part, run in zip(batches, runs, strict=True)]


def _longer(batch: Any, count: int) -> Any:
    """Return the samples, followed by variants of them with shifted contents."""

    def longer(one: Tensor) -> Tensor:
        if not one.ndim or len(one) != count:
            return one
        return torch.cat([one, one.flip(-1)])

    return map_tensors(longer, batch)


def run_each(
    probed: Probed, small: Sequence[Small], state: ForwardState, seeds: Sequence[int], **how: Any
) -> list[Ran] | None:
    """Run each small batch and return the results. All ranks must call it.

    Returns None if the model cannot run so few samples on some rank. Raises `RefusedGradient` as `Probed.agree` does.

    Args:
        probed: the model.
        small: the batches.
        state: the model's state, from which each run starts.
        seeds: seed of each run.
        how: options of `_run`.
    """
    found: list[Ran] = []
    pairs = list(zip(small, seeds, strict=True))
    size = len(pairs) if probed.pipeline is None else 1  # the next run of a stage needs all ranks
    for start in range(0, len(pairs), size):
        error: Exception | None = None
        try:
            found += [_run(probed, one, state, seed, **how) for one, seed in pairs[start : start + size]]
        except Exception as caught:  # the model's own code, with fewer samples than it was written for
            error = caught
        try:
            probed.agree(error)
        except ForwardFailed:
            return None
    return found


def _run(
    probed: Probed,
    small: Small,
    state: ForwardState,
    seed: int,
    *,
    still: bool = False,
    records: bool = False,
    advanced: bool = False,
) -> Ran:
    """Run one small batch from the saved state.

    Args:
        still: make random functions return constants.
        records: record inputs and outputs of modules.
        advanced: keep the current values of attributes.
    """
    state.restore(attributes=not advanced)
    state.seed(seed)
    before = state.attributes()
    ran, calls = Ran(len(small.samples.numbers)), _Calls(still, state)
    handles = _record(probed.model, ran) if records else []
    try:
        with probed.inside(small.samples), calls, torch.set_grad_enabled(probed.has_gradients):
            made, returned = probed.results(small.batch)
            ran.outputs = [one.detach().clone() for one in tree_leaves(made) if isinstance(one, Tensor)]
            if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], Tensor):
                ran.loss, ran.number = float(returned[0]), float(returned[1])
    finally:
        for handle in handles:
            handle.remove()
    ran.drawn = calls.drawn
    ran.tensors, ran.attributes = state.changed_tensors(), changed_attributes(before, state.attributes())
    return ran


def _record(model: nn.Module, ran: Ran) -> list[Any]:
    """Register hooks that append inputs and outputs of every module to `ran.calls`, in order of return.

    Return the handles of the hooks.
    """

    def hook_of(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            taken = [one.detach().clone() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            given = [one.detach().clone() for one in tree_leaves(output) if isinstance(one, Tensor)]
            ran.calls.append((path, taken, given))

        return hook

    return [
        module.register_forward_hook(hook_of(path), with_kwargs=True) for path, module in model.named_modules() if path
    ]


class _Calls(TorchFunctionMode):
    """Watches the functions of a forward.

    It records functions that use random numbers, copies parameters before a function writes to them, and rejects
    gradients that depend on index frequency. still: random functions return constants.
    """

    def __init__(self, still: bool, state: ForwardState):
        super().__init__()
        self.drawn: list[str] = []
        self._still, self._state = still, state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func in _BY_FREQUENCY:
            position = 5 if func is F.embedding else 6
            if kwargs.get("scale_grad_by_freq", args[position] if len(args) > position else False):
                raise RefusedGradient(_REFUSALS[_BY_FREQUENCY.index(func)])
        if name.endswith("_") or "out" in kwargs:  # in place, such as add_, __iadd__ and __setitem__
            for tensor in tree_leaves((args[:1], kwargs.get("out"))):
                self._state.before_write(tensor)
        if func not in _DRAWING or not self._drops(func, args, kwargs):
            return func(*args, **kwargs)
        self.drawn.append(f"Tensor.{name}" if name.endswith("_") else f"torch.{name}")
        return _constant(func, args, kwargs) if self._still else func(*args, **kwargs)

    @staticmethod
    def _drops(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return True if a dropout call has a rate above 0. Other random functions always count."""
        if func not in _DROPPING:
            return True
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else func is not F.dropout))
        return bool(training) and float(kwargs.get("p", args[1] if len(args) > 1 else 0.5)) > 0


def _constant(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of a random function, with a constant instead of random values."""
    if func in _DROPPING:
        return args[0] if args else kwargs["input"]
    drawn = func(*args, **kwargs)
    if func is torch.randperm:
        return torch.arange(len(drawn), dtype=drawn.dtype, device=drawn.device)
    if func in (torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_):
        return drawn.fill_(1.0)
    return drawn.fill_(0.5) if drawn.is_floating_point() else drawn.zero_()
