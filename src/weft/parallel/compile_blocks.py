"""torch.compile of each repeated block of a model, with custom operators for code that cannot be traced."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.autograd import is_join
from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.errors import WeftWarning
from weft.memory.opaque import Handle, Opaque
from weft.memory.recompute import recompute_of
from weft.models.experts import MoE
from weft.models.inspect import hugging_face
from weft.models.inspect.blocks import repeated_blocks, replace_class
from weft.parallel.context.context import register_context_operators
from weft.parallel.dropout.by_position import FunctionalDropout, register_dropped_attention
from weft.parallel.expert import DistributedExperts
from weft.parallel.private_torch import lean_partitioner, leave_side_effects_to_forward
from weft.private_torch import without_modes


class OpaqueModule(nn.Module):
    """A module that a compiled graph calls as one operator, because its forward reads values on the host.

    Its output has the shape and dtype of its first argument. All of its arguments are tensors.
    """

    _weft_handle: Handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In a graph, selective recompute treats this call as one operation. The run that selects the saved tensors must
        # do the same.
        with without_modes() if not torch.compiler.is_compiling() else nullcontext():
            return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        handle = self._weft_handle
        if not torch.compiler.is_compiling() or not handle.is_open or torch.is_autocast_enabled(x.device.type):
            return super().forward(x, *others)
        return handle(x.shape, x.dtype, [x, *others, *self.parameters()])


def register_operators(model: nn.Module, plan: Plan) -> None:
    """Make attention over cp, attention with dropout, and experts custom operators. Modifies the model.

    Call it before the blocks are compiled. Experts under zero=3 with ep > 1 are not registered.
    """
    recomputes = plan.recompute_policy != "none"
    register_context_operators(model, recomputes)
    register_dropped_attention(model, recomputes)
    if _gathers_experts(plan):
        return
    opaque, within = Opaque(recomputes=recomputes), ""
    for path, module in model.named_modules():
        if isinstance(module, MoE | DistributedExperts) and not (within and path.startswith(within)):
            within = f"{path}."
            replace_class(module, OpaqueModule, handle=opaque.handle(_run_module, module))


def _gathers_experts(plan: Plan) -> bool:
    """Return True if experts are FSDP units inside their block.

    Then they cannot be an operator, because its arguments must be gathered parameters.
    """
    return plan.zero == 3 and plan.ep > 1


def _run_module(module: nn.Module, inputs: Sequence[Tensor], numbers: Sequence[float]) -> Tensor:
    """Run the module's forward on the first `inputs`; the last ones replace its parameters."""
    del numbers
    names = [f"module.{name}" for name, _ in module.named_parameters()]
    count = len(inputs) - len(names)
    given = dict(zip(names, inputs[count:], strict=True))
    return torch.func.functional_call(_OwnForward(module), given, tuple(inputs[:count]))


class CachelessBlock(nn.Module):
    """A compiled block that fills no key-value cache in training.

    Transformers models create a cache in each forward unless use_cache=False is passed. Each layer has its own entry in
    the cache, so torch.compile would build a graph per layer and leave all layers after the eighth uncompiled.
    transformers' hooks that capture layer outputs would break a graph, so they run outside the graph.
    """

    _weft_captures: list[hugging_face.Capture]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wanted = hugging_face.requested_captures()
        if not wanted:
            return self._uncached(*args, **kwargs)
        # transformers registers them just before, in the first forward that captures outputs.
        self._weft_captures += hugging_face.take_captures(self)
        inner = [one for one in self._weft_captures if one.module is not self and one.key in wanted]
        with _put_back(inner):
            output = self._uncached(*args, **kwargs)
        for one in self._weft_captures:
            if one.module is self:
                one.hook(self, args, output)
        return output

    def _uncached(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = tuple(map(_unless_empty, args)), {name: _unless_empty(one) for name, one in kwargs.items()}
            if "use_cache" in kwargs:
                kwargs["use_cache"] = False
        if any(map(hugging_face.is_cache, (*args, *kwargs.values()))) and not torch.compiler.is_compiling():
            # The cache is used for generation, in which shapes also grow with each token.
            with torch.compiler.set_stance("force_eager"):
                return super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)


@contextmanager
def _put_back(captures: Sequence[hugging_face.Capture]) -> Iterator[None]:
    """Register the hooks again within the context, and run code uncompiled. Does nothing without hooks."""
    if not captures:
        yield
        return
    handles = [one.module.register_forward_hook(one.hook) for one in captures]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _unless_empty(value: Any) -> Any:
    return None if hugging_face.is_cache(value) and not hugging_face.holds_tokens(value) else value


class _OwnForward(nn.Module):
    """Calls a module's original forward without its hooks, which already run in the graph."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        return self.module.forward(*args)


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each repeated block separately, or the model if it has no blocks.

    Blocks of one class share one graph, so compile time does not grow with depth. backend: the backend argument of
    torch.compile.
    """
    recompute = recompute_of(model)
    blocks = list(repeated_blocks(model).values())
    for block in blocks:
        replace_class(block, CachelessBlock, captures=hugging_face.take_captures(block))
    options = {"custom_partitioner_fn": lean_partitioner(is_join)} if backend == "inductor" else None
    for block in blocks or [model]:
        nn.Module.compile(block, backend=backend, options=options)  # models of Keras have another method of this name
        if recompute is not None and recompute.setting != "none":
            # In a recomputed block, layers and dropout change Python attributes in forward. Each forward resets them,
            # and the recomputation is already in the compiled graph, so torch.compile need not replay these effects.
            leave_side_effects_to_forward(block)


def warn_of_uncompiled(model: nn.Module, mesh: Mesh, *, stacklevel: int) -> None:
    """Warn on rank 0 if recomputed blocks contain code that cannot be compiled, and so run uncompiled as a whole."""
    plan = mesh.plan
    if plan.recompute_policy not in ("full", "selective") or mesh.rank:
        return
    kinds = {type(part) for block in repeated_blocks(model).values() for part in block.modules()}
    reasons = (
        (plan.cp > 1 and any(issubclass(kind, FunctionalDropout) for kind in kinds), "dropout in attention over cp"),
        (
            _gathers_experts(plan) and any(issubclass(kind, DistributedExperts) for kind in kinds),
            "experts under zero=3",
        ),
    )
    if (reason := next((words for holds, words in reasons if holds), None)) is not None:
        warnings.warn(
            f"compile=on: blocks with {reason} run uncompiled if they are recomputed. Use recompute=none to have "
            "them compiled in parts, or leave compile out.",
            WeftWarning,
            stacklevel=stacklevel + 1,
        )
