"""Trial step of a small model with and without tensor parallelism, on random inputs, before training.

Tracing can miss Python code that reads sizes, or a custom backward. Custom models are therefore run once if they are
small enough for a second copy.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.comm.collectives import all_gather, all_reduce, broadcast
from weft.comm.mesh import Axis
from weft.config.fields.layout import Layout
from weft.errors import LayoutError, PlanError, WeftError
from weft.models.inspect import dry_run, layers
from weft.parallel.state.placement import Placement
from weft.private_torch import tree_leaves, tree_map

#: Number of parameters of the largest model that is tried. Three float64 copies exist at the same time.
MOST_PARAMS = 20_000_000
#: Relative difference above which results count as different. Rounding in float64 stays below it.
_EQUAL = 1e-6
_RANDOM = ("rand", "randn", "randint", "bernoulli", "multinomial", "normal", "dropout", "uniform", "exponential")

Cut = Callable[[nn.Module], dict[str, Placement]]


def is_tried(model: nn.Module) -> bool:
    """Return True if a model is small, has materialized values, and does not come from Weft or transformers."""
    tensors = (*model.parameters(), *model.buffers())
    is_small = sum(tensor.numel() for tensor in tensors) <= MOST_PARAMS
    return is_small and not is_vetted(model) and not any(tensor.is_meta for tensor in tensors)


def is_vetted(model: nn.Module) -> bool:
    """Return True if a model comes from Weft or transformers."""
    return isinstance(model, layers.KnownModel) or hasattr(model, "base_model_prefix")


class TrialError(LayoutError):
    """A sharded copy fails, or its results differ from the unsharded copy's.

    path: path of the module that failed, or "" if it is unknown.
    """

    def __init__(self, message: str, path: str = ""):
        super().__init__(message)
        self.path = path


def try_numbers(model: nn.Module, axis: Axis, device: torch.device, cut: Cut, example: Any, where: str) -> None:
    """Compare float64 outputs and gradients of a copy that `cut` shards with an unsharded copy's.

    All ranks of the axis call it. The model is not changed. Does nothing if the unsharded copy cannot be made or run.
    Raises TrialError if results differ, or the sharded copy fails. A WeftError of the sharded copy is raised as it is,
    except that a PlanError for generated arguments is ignored.

    cut: shards a copy and returns the placements of its parameters. example: arguments of a forward, or None to
    generate them. where: plan fields for the error message.
    """
    is_invented = example is None
    try:
        full = copy.deepcopy(model).to(device, torch.float64)
    except Exception:  # user modules may not support copying
        return
    for tensor in (*full.parameters(), *full.buffers()):
        tensor.detach().copy_(broadcast(tensor.detach().contiguous(), axis))
    divided = copy.deepcopy(full)  # before a forward, which may leave tensors in modules that cannot be copied
    example = dry_run.example_of(model) if example is None else example
    inputs = tree_map(lambda leaf: _input(leaf, full, axis, device), example)
    training = model.training
    failure, expected, is_random = _step(full, inputs, training)
    if failure is None and is_random and training:
        training, full = False, copy.deepcopy(divided)  # the step may have changed its buffers
        failure, expected, _ = _step(full, inputs, training)
    if failure is not None:  # a generated example may not fit the model; tracing has reported it
        return
    trained = [param.grad for param in full.parameters() if param.requires_grad]
    if trained and not _scale(trained):
        raise TrialError(
            f"{where}: a trial step on small inputs gives no gradients, so sharded layers cannot be compared with one "
            f"process. {_remedy(where)}"
        )
    placements = cut(divided)
    failure, found, _ = _step(divided, inputs, training)
    failed = all_reduce(torch.tensor(float(failure is not None), device=device), axis)
    if float(failed):
        if is_invented and isinstance(failure, PlanError):
            return  # a real batch may have a number of tokens that fits the plan
        if isinstance(failure, WeftError):
            raise failure
        raise TrialError(f"{where}: {_why_failed(failure)}", _module_of(failure, divided))
    worst = _largest_difference(expected, found, full, divided, placements, axis)
    if worst is not None:
        name, difference = worst
        raise TrialError(
            f"{where}: a trial step on small inputs differs from one process ({name} differs by {difference:.1%} of "
            "its largest number), so the model computes with sizes or values that are sharded, which was not "
            f"detected. {_remedy(where)}"
        )


def _remedy(where: str) -> str:
    return "Use sp=off." if "sp" in where else "Use tp=1, or set a layout without these layers."


def _input(leaf: Any, model: nn.Module, axis: Axis, device: torch.device) -> Any:
    """Return a leaf of the example with equal values on all ranks.

    Float tensors get random values, because zeros could hide errors. So do int64 tensors that contain only zeros.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    generator = torch.Generator().manual_seed(leaf.numel())
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(device)
    if leaf.dtype == torch.int64 and not leaf.is_meta and not leaf.any():
        entries = min((part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)), default=1)
        return torch.randint(entries, leaf.shape, generator=generator).to(device)
    return broadcast(leaf.to(device).contiguous(), axis)


class _Draws(TorchFunctionMode):
    """Mode that records whether a forward draws random numbers."""

    is_random = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        self.is_random = self.is_random or (name.startswith(_RANDOM) and name != "normalize")
        return func(*args, **(kwargs or {}))


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    if not training:
        model.eval()
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        yield


def _step(model: nn.Module, inputs: Any, training: bool) -> tuple[Exception | None, list[torch.Tensor], bool]:
    """Run one forward and backward.

    Return the error or None, the floating-point outputs, and True if the forward drew random numbers.
    """
    args, kwargs = dry_run.as_arguments(inputs)
    draws = _Draws()
    model.zero_grad()
    try:
        with _in_mode(model, training):
            with draws:
                output = model(*args, **kwargs)
            plain = dict(output) if isinstance(output, dict) else output
            leaves = [
                leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            ]
            graph = [leaf for leaf in leaves if leaf.requires_grad]
            if graph:
                torch.autograd.backward(graph, [_weights(leaf) for leaf in graph])
    except Exception as error:  # the model's own code
        return error, [], draws.is_random
    return None, [leaf.detach() for leaf in leaves], draws.is_random


def _weights(leaf: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device) + 0.5


def _largest_difference(
    expected: list[torch.Tensor], found: list[torch.Tensor], full: nn.Module, divided: nn.Module,
    placements: dict[str, Placement], axis: Axis,
) -> tuple[str, float] | None:  # fmt: skip
    pairs: list[tuple[str, torch.Tensor, torch.Tensor | None]]
    pairs = [("its output", one, other) for one, other in zip(expected, found, strict=True)]
    grads = {name: param.grad for name, param in full.named_parameters() if param.requires_grad}
    scale = _scale(grads.values())
    for name, param in divided.named_parameters():
        if not param.requires_grad or name not in grads:
            continue
        placement = placements.get(name, Placement())
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        wanted = grads[name]
        pairs.append((f"the gradient of {name}", _full_gradient(grad, placement, axis, wanted), wanted))
    worst, where = 0.0, ""
    for name, one, other in pairs:
        other = torch.zeros_like(one) if other is None else other
        if one.shape != other.shape or not one.numel():
            difference = float(one.shape != other.shape)
        else:
            least = max(1e-4 * scale if "gradient" in name else 0.0, 1e-30)
            difference = float((one - other).abs().max()) / max(float(other.abs().max()), least)
        if not difference <= worst:
            worst, where = difference, name
    worst = worst if worst == worst else 1.0  # NaN
    everywhere = torch.tensor(worst, dtype=torch.float64, device=next(divided.parameters()).device)
    worst = float(all_reduce(everywhere, axis, "max"))
    return (where or "the result of another rank", worst) if worst > _EQUAL else None


def _scale(grads: Iterable[torch.Tensor | None]) -> float:
    """Return the largest number of all gradients."""
    return max((float(grad.abs().max()) for grad in grads if grad is not None and grad.numel()), default=0.0)


def _full_gradient(grad: torch.Tensor, placement: Placement, axis: Axis, wanted: torch.Tensor | None) -> torch.Tensor:
    if placement.index is not None and wanted is not None:
        full = torch.zeros_like(wanted)
        full.index_add_(placement.dim, torch.tensor(placement.index, device=grad.device), grad)
        return all_reduce(full, axis)
    if placement.cut:
        return placement.join(list(all_gather(grad.contiguous(), axis).view(axis.size, *grad.shape)))
    return all_reduce(grad.clone(), axis) if placement.partial else grad


def _why_failed(failure: Exception | None) -> str:
    lines = str(failure).strip().splitlines() or [""]
    reason = "another rank failed" if failure is None else f"{type(failure).__name__}: {lines[0]}"
    at = _line_of_user(failure)
    return (
        f"a trial step fails on a rank's part of the model ({reason}){at}. A number of heads or a width may be "
        "hard-coded there: use -1 instead, as in x.unflatten(-1, (-1, head_dim)). Otherwise use tp=1, or set a "
        "layout without this module."
    )


def _module_of(failure: Exception | None, model: nn.Module) -> str:
    """Return the path of the innermost module of the model in the error's traceback, or ""."""
    paths = {id(module): path for path, module in model.named_modules()}
    found, step = "", None if failure is None else failure.__traceback__
    while step is not None:
        found = paths.get(id(step.tb_frame.f_locals.get("self")), "") or found
        step = step.tb_next
    return found


def _line_of_user(failure: Exception | None) -> str:
    found, step = "", None if failure is None else failure.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/weft/" not in file:
            found = f" in {file}:{step.tb_lineno}"
        step = step.tb_next
    return found


def without_layers(layout: Layout, model: nn.Module, path: str) -> Layout | None:
    """Return a layout that leaves a module's layers unsharded.

    Modules whose paths differ only in numbers are left unsharded too. Return None if no other layer is sharded, or if
    `path` is not inside a module with layers that the layout names.

    path: path of the module, or of a layer in it.
    """
    modules = dict(model.named_modules())
    styles = {name: style for name in modules if (style := layout.match(name)) is not None}
    around = path
    while around and not any(name.startswith(f"{around}.") for name in styles):
        around = around.rpartition(".")[0]
    pattern = general_path(around)
    left = {name: style for name, style in styles.items() if not general_path(name).startswith(f"{pattern}.")}
    is_less = 0 < len(left) < len(styles) and around
    return Layout(tuple(left.items())) if is_less and any(_divides(style) for style in left.values()) else None


def divided_modules(layout: Layout, model: nn.Module) -> list[str]:
    """Return the paths of modules that directly contain row-sharded layers.

    Of paths that differ only in numbers, only the last is returned.
    """
    around = (name.rpartition(".")[0] for name, _ in model.named_modules() if layout.match(name) == "rowwise")
    return list({general_path(path): path for path in around if path}.values())


def _divides(style: str) -> bool:
    return style.partition(":")[0] in ("colwise", "rowwise", "vocab")


def general_path(path: str) -> str:
    """Return a path with its numbers replaced by `*`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
