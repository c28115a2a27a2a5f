"""Capture of a PyTorch model with its loss by torch.export, as a JAX function of its parameters and a batch.

The graph is captured in training mode at the batch's shapes. Its forward is read operator by operator; gradients are
JAX's own, so that they check torch's.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node

from weft.errors import ModelError
from weft.jax_engine.operators import DTYPES, FORMS
from weft.jax_engine.private_torch import (
    OVERLOAD,
    choose_experts,
    has_experts,
    is_operator,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

Arrays = dict[str, Any]
#: Operators that stay undivided, because JAX has one function for each.
_KEPT = (
    "linear", "matmul", "scaled_dot_product_attention", "layer_norm", "rms_norm", "silu", "gelu", "masked_fill",
)  # fmt: skip
#: Autograd functions whose backward is the derivative of their forward.
_SAME_GRADIENT = ("weft.models.experts._ScatterRows", "weft.models.experts._Combine", "weft.models.experts._Permute")
_ATTACH, _LOOP = "weft.models.experts._Attach", "weft.models.experts._Loop"


# Operators that keep stopped and added gradients in a graph of ATen operators, which has neither.


@torch.library.custom_op("weft_jax::stop_gradient", mutates_args=())
def stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """Return x without a gradient, as `detach` does."""
    return x.clone()


@stop_gradient.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("weft_jax::attach", mutates_args=())
def attach(weights: torch.Tensor, aux: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return `weights`. In backward, `scale` is the gradient of the auxiliary loss."""
    return weights.clone()


@attach.register_fake
def _(weights: torch.Tensor, aux: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return weights.clone()


@torch.library.custom_op("weft_jax::experts_linear", mutates_args=())
def experts_linear(x: torch.Tensor, weights: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Multiply the rows of each expert by its matrix (E, F, D). ends: cumulative row counts."""
    raise NotImplementedError


@experts_linear.register_fake
def _(x: torch.Tensor, weights: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    return x.new_empty(x.shape[0], weights.shape[1])


class _Context:
    """Stand-in for the context of an autograd function whose backward is not used."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Do nothing."""


@contextlib.contextmanager
def _known_functions(unknown: dict[str, str]) -> Iterator[None]:
    """Replace autograd functions by operators with JAX forms. `unknown` gets the names and lines of the others.

    Export records the forward of an autograd function only, so an unknown backward would be lost without notice.
    """
    patched: Any = torch.autograd.Function
    original = patched.__dict__["apply"]
    known = original.__func__

    def apply(cls: Any, *args: Any, **options: Any) -> Any:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name in _SAME_GRADIENT:
            return cls.forward(_Context(), *args)
        if name == _ATTACH:
            weights, aux, scale = args[:3]
            scale = scale if isinstance(scale, torch.Tensor) else torch.full_like(aux, scale)
            return attach(weights, aux, scale)
        if name == _LOOP:
            return experts_linear(*args)
        if not name.startswith("torch."):
            unknown.setdefault(name, f"{cls.__module__}.py")
        return known(cls, *args, **options)

    patched.apply = classmethod(apply)
    try:
        yield
    finally:
        patched.apply = original


class _WithLoss(nn.Module):
    """A model and a function of it as one module, which export accepts."""

    def __init__(self, model: nn.Module, function: Callable[..., Any], spec: Any):
        super().__init__()
        self.model, self._function, self._spec = model, function, spec

    def forward(self, *leaves: Any) -> Any:
        return self._function(self.model, tree_unflatten(list(leaves), self._spec))


@dataclass(slots=True)
class Captured:
    """A model and a function of it as a JAX function.

    Attributes:
        graph: the functional ATen graph.
        names: name of the parameter, buffer, constant or batch leaf of each placeholder, with its kind.
        outputs: names of the mutated buffers, for the outputs before the function's results.
        constants: arrays of the graph.
        blocks: paths of modules that are recomputed in backward.
        hint: function of (value, node), which may constrain a value's sharding.
        tables: values that torch computes from the batch.
        saves_products: recomputed blocks keep the results of products with weights. Attention is recomputed.
    """

    graph: GraphModule
    names: dict[str, tuple[str, str]]
    outputs: list[str]
    constants: Arrays
    blocks: tuple[str, ...] = ()
    hint: Callable[[Any, Node], Any] | None = None
    tables: list[Node] = field(default_factory=list)
    saves_products: bool = False

    def between(self, blocks: Sequence[str]) -> set[Node]:
        """Return the values that one block computes and another module uses."""

        def block_of(node: Node) -> str:
            path = _path(node)
            return next((one for one in blocks if path == one or path.startswith(f"{one}.")), "")

        lines = [node for node in self.graph.graph.nodes if node.op == "call_function"]
        return {node for node in lines if any(block_of(user) != block_of(node) for user in node.users)}

    def inputs(self, batch: Any, buffers: Mapping[str, Any]) -> list[Any]:
        """Return the arrays of a batch: its tensors, then the tables that torch computes from it.

        Args:
            batch: a tree with the structure and shapes of the captured batch.
            buffers: tensors or arrays by name.
        """
        leaves = tree_leaves(batch)
        if not self.tables:
            return [to_array(leaf) for leaf in leaves]
        groups = {
            "buffer": {name: to_tensor(one) for name, one in buffers.items()},
            "constant": {name: to_tensor(one) for name, one in self.constants.items()},
        }
        known: dict[Node, Any] = {}

        def value(node: Node) -> Any:
            if node not in known:
                if node.op == "placeholder":
                    kind, name = self.names[node.name]
                    known[node] = leaves[int(name)] if kind == "batch" else groups[kind][name]
                else:
                    for one in node.all_input_nodes:
                        value(one)
                    target: Any = node.target
                    known[node] = target(*_filled(node.args, known), **_filled(node.kwargs, known))
            return known[node]

        with torch.no_grad():
            return [to_array(leaf) for leaf in leaves] + [to_array(value(node)) for node in self.tables]

    def __call__(self, params: Arrays, buffers: Arrays, inputs: Sequence[Any]) -> tuple[Any, Arrays]:
        """Return the function's results, and the buffers that forward changed.

        Args:
            params, buffers: arrays by torch's names.
            inputs: arrays from `inputs`.
        """
        groups = {"param": params, "buffer": buffers, "constant": self.constants}
        nodes = list(self.graph.graph.nodes)
        values: dict[Node, Any] = dict(zip(self.tables, inputs[len(inputs) - len(self.tables) :], strict=True))
        for node in nodes:
            if node.op == "placeholder":
                kind, name = self.names[node.name]
                values[node] = inputs[int(name)] if kind == "batch" else groups[kind][name]
        results = self._run(nodes, values)
        moved = dict(zip(self.outputs, results, strict=False))
        return results[len(self.outputs) :], moved

    def _run(self, nodes: list[Node], values: dict[Node, Any]) -> Any:
        lines = [node for node in nodes if node.op == "call_function" and node not in values]
        start = 0
        for first, end in _regions(lines, self.blocks):
            self._compute(lines[start:first], values)
            self._recomputed(lines[first:end], values, set(lines[end:]) | {nodes[-1]})
            start = end
        self._compute(lines[start:], values)
        outputs: Any = nodes[-1].args[0]
        return tuple(values.get(one, one) for one in outputs)

    def _compute(self, lines: Sequence[Node], values: dict[Node, Any]) -> None:
        for node in lines:
            # Python's own operators, such as the choice of a result or arithmetic of sizes, have no other form.
            form: Any = FORMS.get(_name(node), node.target)
            try:
                found = form(*_filled(node.args, values), **_filled(node.kwargs, values))
                found = _as_torch(found, node.meta.get("val"))
            except (TypeError, ValueError, ArithmeticError, NotImplementedError) as error:
                raise ModelError(
                    f"{_name(node)} ({_line(node)}): its JAX form does not have these arguments ({error}). Use "
                    "launch.engine=torch, or write this line with other operators."
                ) from error
            values[node] = found if self.hint is None else self.hint(found, node)

    def _recomputed(self, lines: list[Node], values: dict[Node, Any], later: set[Node]) -> None:
        """Run a block so that backward computes it again."""
        inside = set(lines)
        needed = list(dict.fromkeys(one for node in lines for one in node.all_input_nodes if one not in inside))
        given = [one for one in needed if isinstance(values[one], jax.Array)]
        results = [node for node in lines if any(user in later for user in node.users)]

        def block(*arrays: Any) -> list[Any]:
            local = {**{one: values[one] for one in needed}, **dict(zip(given, arrays, strict=True))}
            self._compute(lines, local)
            return [local[node] for node in results]

        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if self.saves_products else None
        found = jax.checkpoint(block, policy=policy)(*(values[one] for one in given))
        values.update(zip(results, found, strict=True))


def _filled(args: Any, values: Mapping[Node, Any]) -> Any:
    if isinstance(args, Node):
        return values[args]
    if isinstance(args, dict):
        return {key: _filled(one, values) for key, one in args.items()}
    if isinstance(args, list | tuple):
        return type(args)(_filled(one, values) for one in args) if type(args) in (list, tuple) else [
            _filled(one, values) for one in args
        ]  # fmt: skip
    return args


def _as_torch(found: Any, expected: Any) -> Any:
    """Cast results to the dtypes that torch computes. Raises ValueError if a shape differs from torch's."""
    if isinstance(expected, list | tuple):
        return [_as_torch(one, other) for one, other in zip(found, expected, strict=False)]
    if not isinstance(expected, torch.Tensor) or found is None:
        return found
    found = jnp.asarray(found)
    found = found if found.dtype == DTYPES[expected.dtype] else found.astype(DTYPES[expected.dtype])
    if found.shape != tuple(expected.shape):
        raise ValueError(f"its result has the shape {found.shape} instead of {tuple(expected.shape)}")
    return found


def _regions(lines: Sequence[Node], blocks: Sequence[str]) -> list[tuple[int, int]]:
    """Return the ranges of nodes of each block, in order. They do not overlap."""
    found: list[tuple[int, int]] = []
    paths = [_path(node) for node in lines]
    for block in blocks:
        inside = [i for i, path in enumerate(paths) if path == block or path.startswith(f"{block}.")]
        if inside:
            first = max(inside[0], found[-1][1] if found else 0)
            found.append((first, max(first, inside[-1] + 1)))
    return found


def _name(node: Node) -> str:
    target: Any = node.target
    if not isinstance(target, OVERLOAD):
        return getattr(target, "__name__", str(target))
    return target.name().replace("::", ".").partition(".")[0] + "." + target.name().split("::")[1].split(".")[0]


def _path(node: Node) -> str:
    """Return the path of the innermost module that a node belongs to, in the captured model."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(list(stack.values())), ("", ""))[0]
    return re.sub(r"^(L\['self'\]\.?)?(model\.?)?", "", path, count=1)


def _line(node: Node) -> str:
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return "/".join(found[-1][0].split("/")[-2:]) + f":{found[-1][1]}" if found else "unknown line"


def capture(
    model: nn.Module, function: Callable[[nn.Module, Any], tuple[torch.Tensor, ...]], batch: Any, source: str = ""
) -> Captured:
    """Capture `function(model, batch)` in training mode, at the shapes of `batch`.

    Args:
        model: any module without active dropout.
        function: returns a tuple of tensors, such as (sum of losses, count).
        batch: a tree of tensors.
        source: the model's name in errors.

    Raises:
        ModelError: if export fails, or if operators have no JAX form; the message lists all of these.
    """
    leaves, spec = tree_flatten(batch)
    unknown: dict[str, str] = {}
    with _known_functions(unknown), _exportable(model), _silent():
        try:
            program = torch.export.export(_WithLoss(model, function, spec).train(), tuple(leaves), strict=False)
            _mark_stops(program.graph_module)
            program = program.run_decompositions(_decompositions())
        except Exception as error:
            raise ModelError(_refusal(source, error)) from error
    graph = program.graph_module
    problems = [f"{name} (an autograd function with its own backward)" for name in unknown]
    problems += _problems(graph)
    if problems:
        listed = "; ".join(problems)
        raise ModelError(
            f"model={source or type(model).__name__}: {len(problems)} operators have no JAX form: {listed}. "
            "Use launch.engine=torch, or write these lines with other operators."
        )
    return _bound(program, model)


def _bound(program: ExportedProgram, model: nn.Module) -> Captured:
    """Match the placeholders of the graph with the names of tensors."""
    first: dict[int, str] = {}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in every:
        first.setdefault(id(tensor), name)
    of_name = {name: first[id(tensor)] for name, tensor in every}
    names: dict[str, tuple[str, str]] = {}
    constants: Arrays = {}
    number = 0
    for spec in program.graph_signature.input_specs:
        target = (spec.target or "").removeprefix("model.")
        if spec.kind is InputKind.USER_INPUT:
            names[spec.arg.name] = ("batch", str(number))
            number += 1
        elif spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and target in of_name):
            kind = "param" if spec.kind is InputKind.PARAMETER else "buffer"
            names[spec.arg.name] = (kind, of_name[target])
        else:
            names[spec.arg.name] = ("constant", spec.target or "")
            tensor = program.constants.get(spec.target or "", program.state_dict.get(spec.target or ""))
            constants[spec.target or ""] = to_array(tensor)
    mutated = [
        of_name[(spec.target or "").removeprefix("model.")]
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.BUFFER_MUTATION
    ]
    tables = _float32_tables(program.graph_module, names)
    return Captured(program.graph_module, names, mutated, constants, tables=tables)


def _float32_tables(graph: GraphModule, names: Mapping[str, tuple[str, str]]) -> list[Node]:
    """Return the values of a float64 model that are computed in float32 from the batch alone, as rotary angles are.

    The last bits of a float32 cosine differ between libraries, which would limit the agreement of two engines to 1e-8.
    """
    fixed: set[Node] = set()
    single: set[Node] = set()
    uses_float64 = False
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        dtype = value.dtype if isinstance(value, torch.Tensor) else None
        if node.op == "placeholder":
            kind = names.get(node.name, ("", ""))[0]
            uses_float64 |= kind == "param" and dtype == torch.float64
            if kind != "param":
                fixed.add(node)
        elif node.op == "call_function" and all(one in fixed for one in node.all_input_nodes):
            fixed.add(node)
            if dtype == torch.float32 or any(one in single for one in node.all_input_nodes):
                single.add(node)
    if not uses_float64:
        return []
    used = [node for node in graph.graph.nodes if node in single and any(user not in fixed for user in node.users)]
    values = {node: node.meta.get("val") for node in used}
    return [node for node, one in values.items() if isinstance(one, torch.Tensor) and one.is_floating_point()]


def rounded(model: nn.Module) -> nn.Module:
    """Round the parameters to bfloat16, in which a forward with precision=bf16 computes, and return the model."""
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(torch.bfloat16)
    return model


def prepare_routers(model: nn.Module) -> None:
    """Make routers add the gradient of the loss sum. Raises ModelError for selection biases, which steps move."""
    for name, module in model.named_modules():
        if getattr(module, "bias_ppm", None) is not None:
            raise ModelError(f"model.balance=bias: engine=jax does not move the bias of {name}. Use balance=aux_loss.")
        if hasattr(module, "aux_scale"):
            setattr(module, "aux_scale", 1.0)  # noqa: B010 - not an attribute of every module


def to_array(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's values as a numpy array. bfloat16 uses the numpy dtype of JAX."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def to_tensor(array: Any) -> torch.Tensor:
    """Return an array's values as a tensor. A tensor is returned unchanged."""
    if isinstance(array, torch.Tensor):
        return array
    values = np.asarray(array)
    if values.dtype == jnp.bfloat16:
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(values.copy())


@contextlib.contextmanager
def _exportable(model: nn.Module) -> Iterator[None]:
    """Make transformers multiply experts as groups: its loop over chosen experts has data-dependent shapes."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    before = [(one, choose_experts(one, "grouped_mm")) for one in configs.values() if has_experts(one)]
    try:
        yield
    finally:
        for one, choice in before:
            choose_experts(one, choice)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hide export's warnings and its log of the graph, which errors repeat in one sentence."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.fx", "torch")]
    before = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)


def _decompositions() -> dict[Any, Any]:
    table: Any = torch.export.default_decompositions()
    for op in list(table):
        if op.name().partition("::")[2].partition(".")[0] in _KEPT:
            del table[op]
    return table


def _mark_stops(graph: GraphModule) -> None:
    """Insert operators that stop gradients, for `detach` and for results of torch.no_grad.

    Decomposition removes both.
    """
    for module in graph.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is torch.ops.aten.detach.default:
                node.target = torch.ops.weft_jax.stop_gradient.default
            elif str(node.target) == "wrap_with_set_grad_enabled" and node.args[0] is False:
                for user in list(node.users):
                    _stop_after(module, user)
        module.recompile()


def _stop_after(module: GraphModule, node: Node) -> None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return
    with module.graph.inserting_after(node):
        stop = module.graph.call_function(torch.ops.weft_jax.stop_gradient.default, (node,))
    stop.meta.update(node.meta)
    node.replace_all_uses_with(stop, delete_user_cb=lambda user: user is not stop)


def _problems(graph: GraphModule) -> list[str]:
    """Return the operators without a JAX form and the tensors whose shapes depend on data, each with its line."""
    found: dict[str, None] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        where = f"({_path(node) or 'the model'}, {_line(node)})"
        if is_operator(node.target) and _name(node) not in FORMS:
            found.setdefault(f"{_name(node)} {where}")
        elif any(_is_symbolic(one) for one in tree_leaves(node.meta.get("val"))):
            found.setdefault(f"{_name(node)} with a data-dependent shape {where}")
    return list(found)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _refusal(source: str, error: Exception) -> str:
    text = str(error)
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    lines = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(.+)', text)
    own = [one for one in lines if "/torch/" not in one[0]] or lines
    where = ""
    if own:
        path, number, code = own[-1]
        where = f" at {'/'.join(path.split('/')[-2:])}:{number} ({code.strip()})"
    return (
        f"model={source}: torch.export cannot capture it{where}: {type(error).__name__}: {first}. "
        "Use launch.engine=torch, or write this line without shapes or branches that depend on values."
    )
