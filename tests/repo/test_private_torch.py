"""Private names of torch: used in one file of each layer only, and all of them exist in this torch.

If a new release of torch fails the second test, its message names the moved names and the file to change.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "src" / "weft"
HOME = "private_torch.py"

#: Underscored names that are not torch's, or that torch documents.
ALLOWED = frozenset(
    {
        *("_exit", "_current_frames"),  # os, sys
        "ReadableBuffer",  # of _typeshed, which only type checkers have
        *("_replace", "_fields"),  # named tuples
        *("_live_render", "_shape"),  # rich
        *("_attn_implementation_internal", "_experts_implementation"),  # transformers
        *("Store", "PrefixStore", "TCPStore"),  # public in torch.distributed, but not exported to type checkers
        "_getitem",  # a method of one of Weft's classes that another one extends
    }
)
#: Files that consist of private names: checks of dynamo, the subclass of transformers' Trainer, the adapter of Keras.
LEFT_OUT = ("verify/oracles.py", "hf/", "models/keras_model.py")

#: By dotted name: the parameters that Weft passes, or None if there is no signature.
NAMES: dict[str, tuple[str, ...] | None] = {
    "torch.Tensor._backward_hooks": None,
    "torch.Tensor._base": None,
    "torch._ops.HigherOrderOperator": None,
    "torch._ops.OpOverload": None,
    "torch.Tensor._version": None,
    "torch.Tensor._make_wrapper_subclass": None,
    "torch.UntypedStorage._cdata": None,
    "torch.UntypedStorage._new_with_weak_ptr": None,
    "torch._C._autograd._get_sequence_nr": None,
    "torch._C._autograd._top_saved_tensors_default_hooks": None,
    "torch._C._current_autograd_node": None,
    "torch._C.DispatchKey": None,
    "torch._C.DispatchKeySet": None,
    "torch._C._ForceDispatchKeyGuard": None,
    "torch._C._dispatch_tls_local_exclude_set": None,
    "torch._C._dispatch_tls_local_include_set": None,
    "torch._foreach_lerp_": None,
    "torch.cuda.memory._record_memory_history": ("enabled",),
    "torch.cuda.memory._dump_snapshot": ("filename",),
    "torch._foreach_mul_": None,
    "torch._foreach_norm": None,
    "torch._C._current_graph_task_id": None,
    "torch._C._distributed_c10d.Backend.Options._timeout": None,
    "torch._C._TorchDispatchModeKey.FAKE": None,
    "torch.distributed.distributed_c10d._get_default_group": (),
    "torch._C._len_torch_dispatch_stack": None,
    "torch.ops.aten.add.Tensor._schema.is_mutable": None,
    "torch._dynamo.config": None,
    "torch._functorch.config.ban_recompute_materialized_backward": None,
    "torch._functorch.partitioners.min_cut_rematerialization_partition": ("joint_module",),
    "torch._inductor.config.custom_partitioner_fn": None,
    "torch._inductor.custom_graph_pass.CustomPartitionerFn": (),
    "torch._inductor.custom_graph_pass.get_hash_for_files": ("paths", "extra"),
    "torch.autograd.graph.Node._input_metadata": None,
    "torch.autograd.graph.Node._sequence_nr": None,
    "torch.autograd.graph._engine_run_backward": ("t_outputs",),
    "torch.autograd.variable.Variable._execution_engine.queue_callback": None,
    "torch.distributed.ProcessGroup._device_types": None,
    "torch.distributed.ProcessGroup._get_backend": None,
    "torch.distributed.distributed_c10d._get_default_store": (),
    "torch.distributed.distributed_c10d._hash_ranks_to_str": ("ranks",),
    "torch.distributed.distributed_c10d._world.pg_map": None,
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": ("self",),
    "torch.distributed.fsdp._fully_shard._fsdp_api.AllGather": (),
    "torch.distributed.fsdp._fully_shard._fsdp_api.AllGather.__call__": (
        *("self", "output_tensor", "input_tensor", "group", "async_op"),
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter.__call__": (
        *("self", "output_tensor", "input_tensor", "group", "op", "async_op"),
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_common.HSDPMeshInfo": None,
    "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState.IDLE": None,
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._init_sharded_post_forward_param_metadata": (
        *("self", "param"),
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward": ("self",),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init": ("self",),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_backward": ("self", "grad"),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback": ("self",),
    "torch.nn.Module._apply": ("self", "fn"),
    "torch.nn.Module._compiled_call_impl": None,
    "torch.optim.optimizer._global_optimizer_pre_hooks": None,
    "torch.utils._python_dispatch.TorchDispatchMode": None,
    "torch.utils._python_dispatch._disable_current_modes": (),
    "torch.utils._python_dispatch._get_current_dispatch_mode": (),
    "torch.utils._pytree.register_pytree_node": ("cls", "flatten_fn", "unflatten_fn"),
    "torch.utils._pytree.tree_flatten": ("tree",),
    "torch.utils._pytree.tree_leaves": ("tree",),
    "torch.utils._pytree.tree_map": ("func", "tree"),
    "torch.utils._pytree.tree_map_only": ("type_or_types_or_pred", "func", "tree"),
    "torch.utils._pytree.tree_unflatten": ("leaves", "treespec"),
    "torch.utils.checkpoint._VersionWrapper": ("val",),
    "torch.utils.checkpoint._VersionWrapper.get_val": ("self", "allow_cache_entry_mutation"),
}
#: By operator: the arguments that Weft passes by position.
OPERATORS = {
    "_foreach_copy_": ("self", "src"),
    "_grouped_mm": ("self", "mat2", "offs"),
    "_scaled_dot_product_flash_attention": ("query", "key", "value", "dropout_p", "is_causal", "return_debug_mask"),
    "_scaled_dot_product_flash_attention_backward": (
        *("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "philox_seed", "philox_offset"),
    ),
    "_scaled_dot_product_flash_attention_for_cpu": ("query", "key", "value", "dropout_p", "is_causal"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        *("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal"),
    ),
    "_scaled_mm": ("self", "mat2", "scale_a", "scale_b"),
    "_unsafe_view": ("self", "size"),
}
#: Attributes that only instances have, by the module whose source sets them.
SET_IN = {
    "torch._tensor": ("_post_accumulate_grad_hooks",),
    "torch.autograd.function": ("_forward_cls",),
    "torch.distributed.fsdp._fully_shard._fsdp_param": (
        *("_unsharded_param", "unsharded_accumulated_grad", "_orig_size", "_module_info"),
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": ("fsdp_params",),
    "torch.distributed.fsdp._fully_shard._fsdp_state": (
        *("_training_state", "_state_ctx", "iter_forward_root", "_fsdp_param_group"),
    ),
    "torch.optim.optimizer": ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    "torch.nn.modules.module": ("_forward_pre_hooks", "_forward_hooks", "_modules"),
}
#: Names with a fallback for releases or builds that lack them.
OPTIONAL = {
    "_RECOMPUTE": "selective recompute refuses blocks that change a product in place",
    "_dump_nccl_trace_json": "builds without NCCL",
    "_fsdp_param_groups": "torch below 2.13 has _fsdp_param_group",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_weft_")) and name != "_"


def own_names(tree: ast.Module) -> set[str]:
    """Return the private names that a file itself defines."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the private names of other modules that a file imports or reads, with their lines."""
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] != "weft":
            inside = any(is_private(part) for part in node.module.split("."))
            yield from ((node.lineno, alias.name) for alias in node.names if inside or is_private(alias.name))
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names if any(map(is_private, one.name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_own(node, own):
            yield node.lineno, node.attr


def _is_own(node: ast.Attribute, own: set[str]) -> bool:
    """Return whether the attribute is defined by the file, or read by an object from itself.

    Attributes of a base do not count.
    """
    base = node.value
    is_super = isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "super"
    return not is_super and (node.attr in own or _is_self(base))


def test_private_names_of_torch_are_only_in_their_files():
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != HOME and not path.relative_to(SOURCE).as_posix().startswith(LEFT_OUT)
        for line, name in foreign_names(ast.parse(path.read_text()))
        if name not in ALLOWED
    ]
    assert not found, f"put them behind a name of their floor's {HOME}, or use a public way"


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntask = torch._C._current_graph_task_id()",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch._dynamo",
        "def f(module):\n    return module._parameters",
    ],
)
def test_private_name_is_found(text):
    assert list(foreign_names(ast.parse(text)))


def test_own_private_names_are_not_foreign():
    text = "class A:\n    def __init__(self):\n        self._x = 1\n    def same(self, other):\n        return other._x"
    assert not list(foreign_names(ast.parse(text)))


def resolve(name: str) -> Any:
    """Return the value of a dotted name: the longest module in it, and attributes from there."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def moved() -> Iterator[str]:
    """Yield the names that this torch does not have in the form that Weft uses."""
    for name, expected in NAMES.items():
        try:
            found = resolve(name)
        except AttributeError as error:
            yield f"{name}: {error}"
            continue
        if expected is None:
            continue
        has = tuple(inspect.signature(found).parameters)[: len(expected)]
        if has != expected:
            yield f"{name}: takes {has}, and Weft passes {expected}"
    for name, expected in OPERATORS.items():
        operator = getattr(torch.ops.aten, name, None)
        has = () if operator is None else tuple(one.name for one in operator.default._schema.arguments)
        if has[: len(expected)] != expected:
            yield f"aten::{name}: takes {has}, and Weft passes {expected}"
    for module, names in SET_IN.items():
        source = inspect.getsource(importlib.import_module(module))
        yield from (f"{module}: it does not mention {name}" for name in names if name not in source)


def test_torch_has_every_private_name_that_weft_uses():
    found = list(moved())
    assert not found, f"torch {torch.__version__} moved them: mend the {HOME} that uses each"


def test_every_private_name_is_checked():
    checked = {part for name in NAMES for part in name.split(".")} | OPERATORS.keys() | OPTIONAL.keys()
    checked |= {name for names in SET_IN.values() for name in names}
    for path in sorted(SOURCE.rglob(HOME)):
        used = {name for _, name in foreign_names(ast.parse(path.read_text()))}
        assert used - ALLOWED <= checked, f"{path.relative_to(SOURCE)}: add them to NAMES"


def test_every_private_file_documents_its_names():
    for path in sorted(SOURCE.rglob(HOME)):
        tree = ast.parse(path.read_text())
        assert "torch 2." in (ast.get_docstring(tree) or ""), f"{path}: say in which releases it was read"
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and is_private(node.name):
                continue
            if isinstance(node, ast.FunctionDef):
                assert ast.get_docstring(node), f"{path}: {node.name}"
