"""Check in the first step for Python code in backward that is not linear in the gradient, or that mixes samples.

Weft multiplies the loss by a power of two before backward, divides the gradients afterwards, and adds the gradients of
ranks and microbatches. That equals one device if the gradient is proportional to the loss, and if the gradient of some
samples is the sum of the gradients of their parts. torch's operations have both properties. Custom autograd functions
and hooks may lack them: they may clip, normalize or round a gradient, or add noise to it.

The first step records custom functions and hooks. If there are any, a few samples run forward and backward several
times: with different scales of the loss, and in two halves.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.comm.collectives import all_reduce, gather_json
from weft.comm.mesh import Mesh
from weft.errors import ModelError, WeftError, WeftWarning
from weft.parallel.random.streams import SampleNumbers
from weft.parallel.state.stale_references import hook_refusal
from weft.private_torch import backward_calls, hooks_of_parameter, named_modules
from weft.train.batches.microbatches import Microbatches
from weft.train.step.batch_check import MAX_COPIED_BYTES, agree, limit_of
from weft.train.step.pure_forward import ForwardState, owner_of_hook, traceless
from weft.train.step.small_forwards import Small, small_batches

#: Factors of the loss. They are powers of two, so that rounding does not change, and large enough to reach limits such
#: as clipping.
_FACTORS = (2.0**-20, 2.0**20)
#: Factors of the loss under fp16, whose gradients have a small range.
_HALF_FACTORS = (2.0**-4,)
#: Larger models are not run on two samples if a microbatch has one, because activations need twice the memory.
_MOST_PARAMETERS = 10**8
#: Elements of a gradient that each sum combines, and the number of sums with random weights.
_CHUNK, _SUMS = 4096, 4
#: Chunks of a gradient that are converted to float64 at a time.
_CHUNKS = 2**10
#: Modules whose autograd functions are known to be linear and to keep samples separate.
_TRUSTED = ("torch.", "weft.")
#: Methods of graph nodes that add hooks. Their calls cannot be recorded, so the code is searched for these names.
_NODE_HOOKS = {"register_prehook", "register_multi_grad_hook"}


class BackwardCode:
    """Finds the custom autograd functions and the hooks that run in backward. Run the step inside `recording()`.

    Attributes:
        found: descriptions of the functions and hooks, in the order in which they were found.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self.found: dict[str, None] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record custom functions whose backward runs, and hooks that are registered on tensors."""
        kind: Any = Tensor
        register = kind.register_hook

        def recorded(tensor: Tensor, hook: Any) -> Any:
            if _is_untrusted(hook):
                self.found.setdefault(f"the hook {_name_of(hook)} of a tensor")
            return register(tensor, hook)

        kind.register_hook = recorded
        try:
            with backward_calls(self._add):
                yield
        finally:
            kind.register_hook = register
        for path, module in named_modules(self._model):
            hooks = [*vars(module)["_backward_hooks"].values(), *vars(module)["_backward_pre_hooks"].values()]
            if any(map(_is_untrusted, hooks)):
                self.found.setdefault(f"a backward hook of {path or 'the model'}")
            elif _NODE_HOOKS & _names_in_code(type(module)):
                self.found.setdefault(f"a hook that {path or 'the model'} registers")
        for name, param in self._model.named_parameters():
            if any(map(_is_untrusted, hooks_of_parameter(param)[0])):
                self.found.setdefault(f"a hook of the parameter {name}")

    def _add(self, function: type) -> None:
        # Operators of torch.library have a class of torch._library, in whichever package they are defined.
        is_operator = function.__module__.startswith("torch._library")
        name = function.__name__.removeprefix("GeneratedBackwardFor_")
        if not _is_weft_operator(name) if is_operator else not function.__module__.startswith(_TRUSTED):
            self.found.setdefault(f"the backward of {name}")

    def __str__(self) -> str:
        names = list(self.found)
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass(frozen=True, slots=True)
class GradientProbe:
    """The model whose gradients are checked, and the function that computes them.

    Attributes:
        model: the model, in training mode.
        mesh: the ranks.
        compute: (microbatches, factor of the loss, seed of random numbers in backward) -> loss sum over all ranks and
            this rank's gradients. All ranks must call it.
        adds_up: False if the loss of a batch is not the sum of the losses of its parts.
        runs_few: False if a few samples may fail on only one pipeline stage, for which other stages would wait.
    """

    model: nn.Module
    mesh: Mesh
    compute: Callable[[Microbatches, float, int], tuple[float, list[Tensor]]]
    adds_up: bool = True
    runs_few: bool = True

    def run(self, small: Small, factor: float, seed: int) -> tuple[float, Tensor]:
        """Run forward and backward with the loss multiplied by `factor`, and restore the model's state afterwards.

        Return the loss sum, and the gradients as `_sums`, divided by `factor`. All ranks must call it.
        """
        count = self.mesh.plan.microbatches_per_step
        batches = Microbatches([small.batch] * count, [small.samples.numbers] * count)
        eager = torch.compiler.set_stance("force_eager") if self.mesh.plan.compile else nullcontext()
        with eager, traceless(self.model, runs_hooks=True), torch.enable_grad():
            loss_sum, grads = self.compute(batches, factor, seed)
            return loss_sum, _sums(grads) / factor


def needs_check(mesh: Mesh, code: BackwardCode) -> bool:
    """Return True if the gradients of the first step must be checked. All ranks must call it.

    Args:
        mesh: the ranks.
        code: the functions and hooks that the first step ran.
    """
    if mesh.plan.compress != "none":  # rounds gradients more than this check tolerates
        return False
    # Compiled code does not call custom functions: only a run without compilation finds them.
    return mesh.plan.compile or agree(mesh, bool(code.found), "max")


def check_gradients(probe: GradientProbe, code: BackwardCode, batch: Any, samples: SampleNumbers) -> None:
    """Warn once, on one rank, if custom functions or hooks make gradients depend on the plan. All ranks must call it.

    Call it if `needs_check` is True.

    Args:
        probe: the model and its gradients.
        code: the functions and hooks that the first step ran.
        batch: the first microbatch.
        samples: indices of its samples.
    """
    mesh, plan = probe.mesh, probe.mesh.plan
    is_small = ForwardState.copied_bytes(probe.model) <= MAX_COPIED_BYTES
    if not agree(mesh, is_small and not samples.is_empty, "min"):
        return
    small = small_batches(batch, samples) if probe.runs_few else None
    if len(samples.numbers) == 1 and sum(p.numel() for p in probe.model.parameters()) > _MOST_PARAMETERS:
        small = None
    if not agree(mesh, small is not None, "min") or small is None:
        small = [Small(batch, samples)]
    with code.recording() if plan.compile else nullcontext():
        first = _try(probe, small[0])
    if not agree(mesh, first is not None, "min"):
        small, first = [Small(batch, samples)], None
    if plan.compile and not agree(mesh, bool(code.found), "max"):
        return
    # Name the code of all ranks, because gradients do not show which stage changed them.
    names = ", ".join(dict.fromkeys(filter(None, gather_json(str(code), mesh["pp"], mesh.device))))
    cause = _cause(probe, small, names, first or probe.run(small[0], 1.0, 1))
    # The first rank that ran such code warns.
    mine = torch.tensor(mesh.rank if cause and names else 2**40, dtype=torch.float64, device=mesh.device)
    if cause and mesh.rank == int(all_reduce(mine, mesh.world, "min") if mesh.world_size > 1 else mine):
        warnings.warn(cause, WeftWarning, stacklevel=6)


def _try(probe: GradientProbe, small: Small) -> tuple[float, Tensor] | None:
    """Return the loss sum and sums of gradients, or None if the model cannot run so few samples."""
    try:
        return probe.run(small, 1.0, 1)
    except WeftError:
        raise
    except Exception:
        return None


def _cause(probe: GradientProbe, small: Sequence[Small], names: str, first: tuple[float, Tensor]) -> str:
    """Return the reason why gradients depend on the plan, or "". All ranks must call it.

    Args:
        probe: the model and its gradients.
        small: some samples and both halves of them, or one microbatch.
        names: functions and hooks in backward.
        first: loss sum and sums of gradients of `small[0]`.
    """
    mesh = probe.mesh
    limit = limit_of(mesh) * (4 if mesh.plan.precision == "fp8" else 1)
    loss_sum, sums = first
    if not agree(mesh, bool(sums.isfinite().all()), "min"):
        return ""  # the run reports gradients that are not finite
    for factor in _HALF_FACTORS if mesh.plan.precision == "fp16" else _FACTORS:
        if agree(mesh, _differ(sums, probe.run(small[0], factor, 2)[1], limit), "max"):
            return (
                f"backward: {names} returns gradients that are not proportional to its input, or draws random "
                "numbers. Weft scales the loss before backward and divides gradients afterwards, so results are not "
                "those of plain PyTorch. Return gradients that are linear in the input, and use max_grad_norm or the "
                "optimizer to clip or normalize gradients."
            )
    if len(small) < 3 or not probe.adds_up:
        return ""
    (one_loss, one), (other_loss, other) = (probe.run(half, 1.0, 1) for half in small[1:])
    if abs(loss_sum - one_loss - other_loss) > 10 * limit * max(abs(loss_sum), abs(one_loss), abs(other_loss)):
        return ""  # forward mixes samples or draws random numbers: the check of forwards has warned
    if not agree(mesh, _differ(sums, one + other, limit), "max"):
        return ""
    parts = mesh.data.size * mesh.plan.microbatches_per_step
    return (
        f"backward: {names} combines the gradients of several samples, so the gradient of a batch is not the sum of "
        f"the gradients of its parts, and the plan divides a batch into {parts} parts. Compute the gradient of each "
        "sample by itself, or use a plan with one part."
    ) * (parts > 1)


def refuse_hooks(model: nn.Module, mesh: Mesh) -> None:
    """Raise an error for parameter hooks that the plan skips, or runs on partial gradients. All ranks must call it.

    Raises:
        ModelError: on all pipeline stages. The message names the parameter.
    """
    found = ""
    for name, param in model.named_parameters():
        before, after = hooks_of_parameter(param)
        if isinstance(param, DTensor) and any(map(_is_untrusted, (*before, *after))):
            found = hook_refusal(name)
        elif any(map(_is_untrusted, after)) and mesh.data.size * mesh.plan.microbatches_per_step > 1:
            found = (
                f"parameter {name}: its register_post_accumulate_grad_hook runs before the gradients "
                "of ranks and microbatches are added. Use register_hook to multiply a gradient, and an optimizer to "
                "apply it."
            )
    if mesh.plan.pp > 1 and agree(mesh, bool(found), "max"):  # stages have different parameters
        found = next(filter(None, gather_json(found, mesh.world, mesh.device)), found)
    if found:
        raise ModelError(found)


def _is_weft_operator(name: str) -> bool:
    """Return True for `weft_<operator>_<overload>`, the function name that torch derives for Weft's operators."""
    # A user's namespace may also begin with "weft_".
    return name.startswith("weft_") and hasattr(torch.ops.weft, name.removeprefix("weft_").rpartition("_")[0])


def _is_untrusted(hook: Any) -> bool:
    return not owner_of_hook(hook).startswith(_TRUSTED)


def _name_of(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    name, code = getattr(hook, "__name__", type(hook).__name__), getattr(hook, "__code__", None)
    return name if code is None or name != "<lambda>" else f"{name} of {code.co_filename}:{code.co_firstlineno}"


@functools.cache
def _names_in_code(kind: type) -> frozenset[str]:
    """Return the names that the code of a module's classes uses, except code of torch and Weft."""
    own = [one for one in kind.__mro__ if not f"{one.__module__}.".startswith((*_TRUSTED, "builtins."))]
    methods = [getattr(value, "__func__", value) for one in own for value in vars(one).values()]
    return frozenset(name for one in methods if isinstance(one, types.FunctionType) for name in one.__code__.co_names)


def _sums(grads: Sequence[Tensor]) -> Tensor:
    """Return sums with random weights over chunks of the gradients, and their norms: float64 (chunks, sums + 1).

    The sums are linear in the gradients, and need little memory.
    """
    found = [torch.zeros(0, _SUMS + 1, dtype=torch.float64)]
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(_SUMS, _CHUNK, generator=generator, dtype=torch.float64)
    for grad in grads:
        local = grad.detach().reshape(-1)
        local = torch.view_as_real(local).reshape(-1) if local.is_complex() else local
        for piece in local.split(_CHUNK * _CHUNKS):
            rows = torch.nn.functional.pad(piece.double(), (0, -len(piece) % _CHUNK)).view(-1, _CHUNK)
            sums = [(rows * one).sum(1) for one in weights.to(rows.device)]
            found.append(torch.stack([*sums, rows.norm(dim=1)], 1).cpu())
    return torch.cat(found)


def _differ(one: Tensor, other: Tensor, limit: float) -> bool:
    """Return True if gradients differ by more than rounding, according to their `_sums`.

    Return False if the sums have different shapes or are empty, because they cannot be compared.
    """
    if one.shape != other.shape or not len(one):
        return False
    norms = torch.maximum(one[:, -1], other[:, -1].abs())
    differences = (one - other)[:, :-1].abs().amax(1)
    # A gradient that should be zero consists of the rounding errors of larger terms.
    return not bool((differences <= limit * (norms + 0.1 * norms.max())).all())
