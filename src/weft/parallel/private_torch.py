"""Private names of torch in parallel/, each with its purpose. Checked against torch 2.11 and 2.13.

The internals of fully_shard and the order of its hooks are the most likely to change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.autograd.variable import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.optim.optimizer import _global_optimizer_pre_hooks

from weft.devices import access

#: Attention kernels that return the log-sum-exp, with which partial results over keys are combined.
#: F.scaled_dot_product_attention does not return it.
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
CUDA_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
CUDA_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward

#: Interface of fully_shard for custom collectives.
GatherBase, ReduceBase = AllGather, ReduceScatter

#: torch._dynamo flag: a recomputed forward skips its side effects when it runs again in backward. Some releases lack
#: it.
_NOTES_ONCE = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def leave_side_effects_to_forward(module: nn.Module) -> None:
    """Skip the side effects of a compiled module's recomputed forward when backward runs it again.

    Does nothing if the module is not compiled, or if this torch has no flag for it.

    torch reads the flag whenever it traces, at the first call and at later calls with other inputs. The flag is on only
    during the module's calls, so that code outside Weft is traced with its own setting.
    """
    call: Callable[..., Any] | None = module._compiled_call_impl
    flags: Any = torch._dynamo.config
    if call is None or not hasattr(flags, _NOTES_ONCE):
        return

    def noting_once(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(flags, _NOTES_ONCE):
            return call(*args, **kwargs)
        setattr(flags, _NOTES_ONCE, True)
        try:
            return call(*args, **kwargs)
        finally:
            setattr(flags, _NOTES_ONCE, False)

    module._compiled_call_impl = noting_once  # pyright: ignore[reportAttributeAccessIssue] - torch says None


def without_override(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function of torch.nn.functional without its `has_torch_function` check, which would call active modes.

    The copy runs the function's body, and modes intercept the functions that the body calls.
    """
    copied: Any = function
    names = {**copied.__globals__, **dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda _: False)}
    made: Any = FunctionType(copied.__code__, names, copied.__name__, copied.__defaults__, copied.__closure__)
    made.__kwdefaults__ = copied.__kwdefaults__
    return made


@functools.cache
def lean_partitioner(is_again: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return a partitioner of inductor's graphs that saves few tensors between forward and backward.

    torch saves the input of each matmul, even if element-wise operations compute it from other saved tensors: a norm's
    output, or the product in a gated layer. Backward runs these operations anyway, so recomputing their result costs
    one more write. torch never recomputes a collective.

    is_again: returns True for an operator that backward may run again to save memory.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
    from torch.utils.checkpoint import CheckpointPolicy

    class LeanPartitioner(CustomPartitionerFn):
        def __call__(
            self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
            for node in gm.graph.nodes:
                if node.op == "call_function" and is_again(node.target):
                    node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            with config.patch(ban_recompute_materialized_backward=False):
                return min_cut_rematerialization_partition(gm, joint_inputs, **{"compiler": "inductor", **kwargs})

        def __reduce__(self) -> tuple[Any, ...]:  # part of inductor's cache keys
            return lean_partitioner, (is_again,)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,), f"{is_again.__module__}.{is_again.__qualname__}")

    return LeanPartitioner()


def apply_to_tensors(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change parameters, their gradients and buffers in place. Unlike `Module.to`, `change` can skip meta tensors."""
    model._apply(change)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass. fully_shard does the same."""
    Variable._execution_engine.queue_callback(call)


def optimizer_step_hooks() -> MutableMapping[int, Callable[..., Any]]:
    """Return the hooks of all optimizers' steps by key, so that hooks of freed engines can be removed.

    A handle's `remove` cannot be used: an engine may be freed at any time, even during a step.
    """
    return _global_optimizer_pre_hooks


def num_step_hooks(optimizer: torch.optim.Optimizer) -> int:
    """Count the hooks before and after an optimizer's step. torch has no public function for this."""
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def wrap_forward_hooks(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace each existing forward hook of a module with a wrapped one, in the same order."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = wrap(hook)


def base_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory that autograd does not treat as a view.

    fully_shard registers a hook on a unit's output, and an in-place operation on a view would lose it. torch warns of
    this.
    """
    return tensor if tensor._base is None else torch.ops.aten._unsafe_view(tensor, tensor.shape)


def fsdp_state(module: FSDPModule) -> Any:
    """Return fully_shard's state of a unit, after its lazy initialization."""
    state = module._get_fsdp_state()
    state._lazy_init()
    return state


def before_backward_of(module: FSDPModule, call: Callable[[], None]) -> None:
    """Make fully_shard call a function when backward reaches an output of a unit, before the unit is gathered."""
    state: Any = module._get_fsdp_state()
    original = state._pre_backward

    def called(grad: torch.Tensor) -> torch.Tensor:
        call()
        return original(grad)

    state._pre_backward = called


def forget_forward(root: Any) -> None:
    """Reset the FSDP state of the root module after a forward that was interrupted."""
    root._training_state = TrainingState.IDLE
    root._state_ctx.iter_forward_root = None


def end_backward(modules: Sequence[FSDPModule], root: Any) -> None:
    """Run fully_shard's actions at the end of a backward, as torch.distributed.pipelining does."""
    for module in modules:
        for group in _groups(module):
            group.post_backward()
    root._root_post_backward_final_callback()


def drop_unreduced_gradients(module: FSDPModule) -> None:
    """Drop gradients that backward left in a unit's gathered parameters. `zero_grad` resets only the shards."""
    for group in _groups(module):
        for param in group.fsdp_params:
            if not isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property):
                param.unsharded_accumulated_grad = None  # since 2.15 it is stored in the parameter's `grad`
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def gathered_parts(module: FSDPModule) -> list[list[tuple[torch.Size, torch.nn.Module, str]]]:
    """Return this rank's shards in each all-gather of a unit, in order: shape, module and name of the parameter.

    The last rows of a shard may be padding.
    """
    every = [[(param, param._module_info) for param in group.fsdp_params] for group in _groups(module)]
    return [[(one.padded_sharded_param_size, of.module, of.param_name) for one, of in group] for group in every]


def replaced_parameters(module: FSDPModule) -> list[tuple[torch.nn.Module, str]]:
    """Return the modules and names of a unit's parameters in whose place a module has another tensor now."""
    params = [param for group in _groups(module) for param in group.fsdp_params]
    names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    found: list[tuple[torch.nn.Module, str]] = []
    for param in params:
        of = param._module_info
        now = dict(of.module.named_parameters(recurse=False, remove_duplicate=False)).get(of.param_name)
        if now is not None and all(now is not getattr(param, name, None) for name in names):
            found.append((of.module, of.param_name))
    return found


def keep_second_shards(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Make a unit keep secondary shards (ZeRO++ hpZ) between forward and backward, over the last dim of a 2-D mesh.

    fully_shard's option takes a number of ranks, and would create a mesh, which needs all ranks of the world.
    """
    within = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in _groups(module):
        group.post_forward_mesh_info = within
        for param in group.fsdp_params:
            param.post_forward_mesh_info = within
            param._init_sharded_post_forward_param_metadata(torch.empty(param._orig_size, device="meta"))


def wrap_waits(
    module: FSDPModule, gathered: Callable[[Callable[[], None]], None], summed: Callable[[Callable[[], None]], None]
) -> None:
    """Replace the waits of the compute stream for a unit's collectives with wrapped ones.

    gathered: called with the wait for the all-gather, before each use. summed: called with the wait for gradient sums
    at the end of a backward; called once if a single wait covers all units.
    """
    for group in _groups(module):
        await_gather, await_sums, shared = group.wait_for_unshard, group.finalize_backward, group.comm_ctx

        def end_of_backward(await_sums: Callable[[], None] = await_sums, shared: Any = shared) -> None:
            if getattr(shared, "_last_post_reduce_events", True):  # torch below 2.13 lacks it: each group waits
                summed(await_sums)
            else:
                await_sums()

        group.wait_for_unshard = functools.partial(gathered, await_gather)
        group.finalize_backward = end_of_backward


def _groups(module: FSDPModule) -> Sequence[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch below 2.13
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def multiplies_float8(x: torch.Tensor) -> bool:
    """Return True if float8 matmuls with a scale per row can compute x: bf16 on Ada, Hopper or newer GPUs."""
    return x.dtype == torch.bfloat16 and access.capability(x.device) >= (8, 9)


def scaled_product(
    a_RK: torch.Tensor, b_CK: torch.Tensor, back_a: torch.Tensor, back_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute a b^T of row-major float8 matrices, each row multiplied by its scale.

    torch has no documented public name for it. It accumulates with fewer bits (`use_fast_accum`), because the kernels
    with fp32 accumulation are slower than bf16.

    Args:
        a_RK: left matrix; K is a multiple of 16.
        b_CK: right matrix; C is a multiple of 16.
        back_a: scale of each row of `a_RK`, (R, 1), or of all rows, (1, 1).
        back_b: scale of each row of `b_CK`, (C, 1), or of all rows, (1, 1).
        dtype: dtype of the result. Row scales support only bf16.
    """
    product = torch.ops.aten._scaled_mm
    return product(a_RK, b_CK.t(), back_a, back_b.t(), out_dtype=dtype, use_fast_accum=True)


def own_view(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor in another shape, not as a view for autograd, so that later operations may write to it."""
    return torch.ops.aten._unsafe_view(x, shape)


def without_memory(kind: type[torch.Tensor], shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Build a tensor of one of Weft's subclasses that has a shape but no memory."""
    make: Any = torch.Tensor._make_wrapper_subclass
    return make(kind, shape, dtype=like.dtype, device=like.device)


def plain_call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a torch function without the `__torch_function__` of its arguments' classes."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


#: Context in which tensor subclasses act as plain tensors.
without_overrides = torch._C.DisableTorchFunctionSubclass
