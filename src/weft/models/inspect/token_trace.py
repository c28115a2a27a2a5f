"""Trace the tokens through one forward of a model, and check the operations on them outside sharded layers.

A tensor has tokens if one of its dims has an element for each token. Its mark (`TokenDim`) is that dim. Where tokens
are sharded, a rank has only its part of the dim. Some modules get all tokens: they are gathered before the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from weft.models.inspect import hugging_face
from weft.models.inspect.counted_sizes import CONSTANTS, counted_in
from weft.models.inspect.dry_run import call_traced, is_named
from weft.models.inspect.layers import is_linear
from weft.models.inspect.token_modes import TokenOperations, TokenWatch
from weft.models.inspect.token_regions import FullModule, TokenDivision, TokenRegions, TokensAt, tokens_at
from weft.models.inspect.token_rules import TokenDim, TokensMixed, TokenStep
from weft.private_torch import named_modules, tree_flatten, tree_leaves, tree_unflatten

#: Dim of the tokens in the blocks' inputs, (batch, tokens, features).
TOKENS = 1
#: Operations with a constant result if their inputs are constant or absent.
_UNIFORM = frozenset((
    "clone", "_to_copy", "zeros_like", "ones_like", "full_like", "empty_like", "scalar_tensor", "empty_strided",
    *CONSTANTS,
))  # fmt: skip


class TensorMarks:
    """Positions of tokens in tensors, constant tensors, and base tensors of views, by tensor identity."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []  # keeps tensors alive so that ids stay unique
        self._tokens: dict[int, TokenDim] = {}
        self._uniform: set[int] = set()
        self._bases: dict[int, torch.Tensor] = {}

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep tensors alive."""
        self._kept += tensors

    def of(self, value: Any) -> TokenDim | None:
        """Return the position of the tokens in a tensor, or None."""
        return self._tokens.get(id(value)) if isinstance(value, torch.Tensor) else None

    def put(self, tensor: torch.Tensor, tokens: TokenDim) -> None:
        """Record the position of the tokens in a tensor."""
        self._kept.append(tensor)
        self._tokens[id(tensor)] = tokens

    @property
    def count(self) -> int | None:
        """Number of tokens in the tensors, or None without tokens."""
        return next((one.count for one in self._tokens.values()), None)

    def is_uniform(self, tensor: Any) -> bool:
        """Return True if all values of a tensor are equal."""
        return isinstance(tensor, torch.Tensor) and id(tensor) in self._uniform

    def is_identical(self, tensor: torch.Tensor, from_end: int) -> bool:
        """Return True if values are certainly equal along a dim, counted from the end, or if there is no such dim."""
        if from_end > tensor.dim() or id(tensor) in self._uniform:
            return True
        return tensor.shape[-from_end] == 1 or tensor.stride()[-from_end] == 0

    def accepts(self, target: torch.Tensor, tokens: TokenDim, is_uniform: bool) -> bool:
        """Return True if tokens may be written into a tensor. If it is a view of an unmarked tensor, mark the latter.

        is_uniform: True if all values of the tensor are equal.
        """
        before, base = self.of(target), self._bases.get(id(target))
        if before is not None:
            return before == tokens
        if base is not None and self.of(base) is None:
            same = base.dim() == target.dim() and base.shape[tokens.dim] == target.shape[tokens.dim]
            if not same or tokens.inner != 1 or not is_uniform:
                return False
            self.put(base, tokens)
        return is_uniform

    def propagate_views(self, func: Any, args: Any, outputs: list[torch.Tensor]) -> None:
        """Record the base tensor of each view."""
        if not func.is_view or not args or not isinstance(args[0], torch.Tensor):
            return
        first: torch.Tensor = args[0]
        base = self._bases.get(id(first), first)
        for output in outputs:
            self._bases[id(output)] = base
            self._kept += [output, base]

    def propagate_uniform(self, name: str, func: Any, args: Any, given: list[torch.Tensor], outputs: Any) -> None:
        """Record which results of an operation are constant, and which tensors an in-place write makes non-constant."""
        if outputs and args and outputs[0] is args[0]:
            # All tensors that share the written memory may no longer be constant.
            base = self._bases.get(id(outputs[0]))
            if base is not None or name not in ("fill_", "zero_"):
                base = outputs[0] if base is None else base
                self._uniform -= {id(base), *(key for key, owner in self._bases.items() if owner is base)}
        elif all(id(leaf) in self._uniform for leaf in given):
            operation = str(func.overloadpacket).rpartition(".")[2]
            if (given and func.is_view) or operation in _UNIFORM:
                self._uniform |= {id(output) for output in outputs}


class Owners:
    """Identities of the tensors and parameters of blocks, and of the parameters of modules that get all tokens."""

    def __init__(self) -> None:
        self._blocks, self._full = set[int](), set[int]()
        self._running: list[set[int]] = []
        #: Tensors that blocks created.
        self.made: set[int] = set()

    def find(self, model: nn.Module, units: Iterable[str], full: Iterable[str]) -> None:
        """Record the parameters of blocks (paths `units`) and of modules that get all tokens (paths `full`)."""
        named = dict(named_modules(model))
        self._blocks = {id(param) for unit in units for param in named[unit].parameters()}
        self._full = {id(param) for path in full for param in named[path].parameters()}

    def enter(self, block: nn.Module) -> None:
        """Record the start of a block."""
        self._running.append({id(param) for param in block.parameters()})

    def leave(self) -> None:
        """Record the end of the running block."""
        self._running.pop()

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Return True for a parameter of the running block."""
        return bool(self._running) and id(tensor) in self._running[-1]

    def of_blocks(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return True if any of the tensors is a trained parameter of a block."""
        return any(one.requires_grad and id(one) in self._blocks for one in tensors)

    def of_full(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return True if any of the tensors is a trained parameter of a module that gets all tokens."""
        return any(one.requires_grad and id(one) in self._full for one in tensors)


@dataclass
class FullRegion:
    """The running module that gets all tokens and computes them on every rank.

    inputs: its arguments with tokens. made: its tensors and parameters.
    """

    path: str
    inputs: tuple[TokensAt, ...]
    made: set[int]

    def reads_outside(self, given: Iterable[torch.Tensor], marks: TensorMarks) -> bool:
        """Return True if any of the tensors has tokens, or requires a gradient and was not made in the module."""
        return any(marks.of(one) is not None or (one.requires_grad and id(one) not in self.made) for one in given)


class TokenTrace:
    """Trace of the tokens in forwards of a model.

    Attributes:
        marks: positions of tokens in tensors.
        problem: the first reason why the tokens cannot be sharded, or None.
        failed: paths of the modules in the block that were running then, outermost first.
        called: paths of modules that ran.
        summed, full: see `TokenRegions`.

    Args:
        model: the model to trace.
        regions: the regions to check.
        division: how the parallelism technique shards tokens.
    """

    def __init__(self, model: nn.Module, regions: TokenRegions, division: TokenDivision):
        self.problem: str | None = None
        self.failed: tuple[str, ...] = ()
        self.full: dict[str, FullModule] = {}
        self.called: set[str] = set()
        self.summed: dict[str, frozenset[int]] = {}
        self._model, self._division = model, division
        self._first = dict[str, str](regions.runs)
        self._units = frozenset(regions.units)
        self._operations = TokenOperations(self)
        self._reset()

    def _reset(self) -> None:
        self._stack: list[str] = []
        self._depth = 0  # number of running modules that gather tokens
        self._region: FullRegion | None = None
        self._open: str | None = None  # tokens are gathered after this module
        self._unit: list[str] = []
        self._trusted: list[str] = []
        self.marks, self._owners = TensorMarks(), Owners()

    def trace(self, example: Any, training: bool) -> None:
        """Trace one forward of the model. training: False to set all modules to evaluation mode."""
        handles: list[RemovableHandle] = []
        for path, module in named_modules(self._model):
            handles.append(module.register_forward_pre_hook(self._unseen(self._enter(path)), with_kwargs=True))
            handles.append(module.register_forward_hook(self._unseen(self._leave(path))))
        try:
            output = call_traced(self._model, example, self._watched, training=training)
            self._outside(tree_leaves(dict(output) if is_named(output) else output), "its output")
            if missing := [path for path in self._first if path not in self.called]:
                self._fail(f"{missing[0]} ({self._kind(missing[0])}) is never called as a module.")
        finally:
            for handle in handles:
                handle.remove()
            self._operations.is_over = True
            self._operations = TokenOperations(self)

    @contextmanager
    def _watched(self, inputs: Any) -> Generator[None]:
        del inputs
        self._reset()
        with ExitStack() as stack:
            stack.enter_context(TokenWatch(self._operations))
            stack.enter_context(self._operations)
            yield

    def _kind(self, path: str) -> str:
        return type(self._model.get_submodule(path)).__name__

    def _fail(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem
            inside = self._stack.index(self._unit[-1]) + 1 if self._unit else len(self._stack)
            self.failed = tuple(self._stack[inside:])

    @property
    def module_name(self) -> str:
        """Path and class of the running module, for messages."""
        path = self._stack[-1] if self._stack else ""
        return f"{path} ({self._kind(path)})" if path else type(self._model).__name__

    def record_mixing(self, operation: str, outputs: Sequence[torch.Tensor] = ()) -> None:
        """Record that an operation mixes tokens outside modules that get all of them.

        Nothing is recorded if all outputs have shapes of weights: the gradient of a weight is a sum over tokens.
        """
        if outputs and all(output.shape in self._operations.weight_shapes for output in outputs):
            return
        self._fail(
            f"{self.module_name} calls `{operation}` outside sharded layers, which mixes tokens or is not known to "
            "keep them separate, and tokens are sharded there."
        )

    def misuse(self, operation: str) -> None:
        """Record that code depends on the number of tokens. operation: description, with `{}` for that number."""
        self._fail(
            f"{self.module_name} {operation.format('the number of tokens')}, and outside sharded layers that is the "
            "number of a rank's tokens, not of all."
        )

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        self._operations.follow(tensor)
        return tensor.view_as(tensor)

    def _full_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias without a mark, which represents the tokens of all ranks."""
        mark = self.marks.of(tensor)
        assert mark is not None
        if mark.inner > 1 or (mark.dim != TOKENS and (mark.dim or tensor.dim() != 2)):
            self._fail(f"{self.module_name} is given tokens in another dim than that of (batch, tokens, features).")
        found = self._alias(tensor)
        self.note([found])
        return found

    def _unseen(self, hook: Any) -> Any:
        """Return a hook whose own operations are not traced."""

        def called(*args: Any) -> Any:
            with self._operations.paused():
                return hook(*args)

        return called

    def _enter(self, path: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._stack.append(path)
            self.called.add(path)
            if not path:
                self._owners.find(module, self._units, self._division.full)
            if self._region is not None:
                return None
            if path in self._units:
                args, kwargs = self._enter_unit(path, module, args, kwargs) or (args, kwargs)
            if hugging_face.computes_tokens_separately(module) and self._unit and not self._depth:
                self._operations.pauses += 1
                self._trusted.append(path)
            if path in self._division.full:
                return self._enter_full(path, module, args, kwargs)
            if self._division.gathers(path):
                if not self._unit and any(path.startswith(f"{unit}.") for unit in self._units):
                    self._fail(f"{path} ({self._kind(path)}) is called outside its block.")
                if self._unit:
                    if self._depth == 0:
                        self._check_arguments(args, kwargs)
                    args, kwargs = self._gather(path, module, args, kwargs)
                self._depth += 1
            return args, kwargs

        return before

    def _gather(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return a module's arguments with gathered tokens. Numbers computed from the number of tokens are problems."""
        if (counted := next(counted_in((args, kwargs)), None)) is not None:
            counted.misuse("gives {} to a module that gets all of them")
        width, style = self._division.entries.get(path), self._division.style_of(path)
        if width is not None:
            values = [*args, *kwargs.values()]
            names = [*inspect.signature(module.forward).parameters][: len(args)]
            states = [name in ("encoder_hidden_states", "key_value_states") for name in (*names, *kwargs)]
            for at, value in enumerate(values):
                if self.marks.of(value) is not None and (
                    value.shape[-1] == width or (self._division.reading and states[at])
                ):
                    values[at] = self._full_alias(value)
                    width = None if value.shape[-1] == width else width
            return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
        leaves, tree = tree_flatten((args, kwargs))
        divided = [at for at, leaf in enumerate(leaves) if self.marks.of(leaf) is not None]
        if path in self._division.gathering:
            stream = hidden_index(leaves, self._division.width)
            if divided and stream is None and self._division.width:
                self._fail(
                    f"{self.module_name} mixes tokens and is given no hidden states of (batch, tokens, features)."
                )
            divided = [at for at in divided if stream is None or leaves[at].shape == leaves[stream].shape]
        elif divided and (style == "rowwise" or self._depth or not is_linear(module)):
            self._fail(f"{self.module_name} is given tokens of one rank in code with those of all ranks.")
        for at in divided:
            leaves[at] = self._full_alias(leaves[at])
        return tree_unflatten(leaves, tree)

    def _enter_full(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin the `FullRegion` of a module that gets all tokens, and return its arguments without marks."""
        if not self._unit:
            self._fail(f"{path} ({self._kind(path)}) is called outside its block.")
        leaves, tree = tree_flatten((args, kwargs))
        if next(counted_in((args, kwargs)), None) is not None:
            self._fail(f"{self.module_name} is given a number that was computed from the number of tokens.")
        inputs: list[TokensAt] = []
        for at, leaf in enumerate(leaves):
            if (mark := self.marks.of(leaf)) is not None:
                if mark.inner > 1 or (mark.dim > 0) != (leaf.shape[mark.dim] == mark.count):
                    self._fail(
                        f"{self.module_name} is given tokens that are joined with features, or in front of the samples."
                    )
                inputs.append(TokensAt(at, mark.dim, leaf.shape[mark.dim] // mark.count, mark.count))
                leaves[at] = self._alias(leaf)
            elif isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self._fail(f"{self.module_name} is given a tensor with a gradient that has no tokens.")
        if not inputs:
            self._fail(f"{self.module_name} is given no tokens.")
        made = {id(leaf) for leaf in leaves} | {id(param) for param in module.parameters()}
        self._region = FullRegion(path, tuple(inputs), made)
        self.marks.keep([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return tree_unflatten(leaves, tree)

    def _leave_full(self, region: FullRegion, output: Any) -> Any:
        """Finish a module that runs on unsharded tokens: find the token dimension of its output, and track it."""
        path, inputs, self._region = region.path, region.inputs, None
        leaves, tree = tree_flatten(output)
        floats = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        floats = [at for at in floats if leaves[at].requires_grad] or floats
        places = [found for at in floats if inputs and (found := tokens_at(leaves[at], at, inputs)) is not None]
        if len(places) != 1:
            self._fail(f"{path} ({self._kind(path)}) returns {len(places)} tensors with tokens, and one is supported.")
            return None
        [place] = places
        leaves[place.position] = self._alias(leaves[place.position])
        self.marks.put(leaves[place.position], TokenDim(place.dim, place.tokens))
        self.note([leaves[place.position]])
        found = FullModule(inputs, place)
        if self.full.setdefault(path, found) != found:
            self._fail(f"{path} ({self._kind(path)}) is given tokens in other arguments in another call.")
        return tree_unflatten(leaves, tree)

    def _enter_unit(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        place = hidden_index(leaves, self._division.width)
        self._unit.append(path)
        self._owners.enter(module)
        if path in self._first and self._open is None:
            self._open = self._first[path]
            if place is None:
                width = self._division.width
                self._fail(f"{self.module_name} gets no hidden states of (batch, tokens, {width} features).")
                return None
            leaves[place] = self._alias(leaves[place])
            self.marks.put(leaves[place], _stream(leaves[place]))
        elif self._open is None or path in self._first:
            self._fail(
                f"{self.module_name} is called where tokens are {'all there' if self._open is None else 'divided'}: "
                "blocks run in another order than they are registered in, or several times."
            )
        found: set[int] = set()
        for at, leaf in enumerate(leaves):
            if self._is_outside(leaf) and self.marks.of(leaf) is None:
                if at != place and self._is_read(path, leaf, kwargs, args):
                    leaves[at] = self._alias(leaf)
                    self.marks.put(leaves[at], _stream(leaf))
                    continue
                leaves[at] = self._alias(leaf)
                self.marks.keep([leaves[at]])
                self._owners.made.add(id(leaves[at]))
                found.add(at)
        if self.summed.setdefault(path, frozenset(found)) != frozenset(found):
            self._fail(f"{self.module_name} gets other tensors from outside in another call.")
        return tree_unflatten(leaves, tree)

    def _is_read(self, path: str, leaf: torch.Tensor, kwargs: Any, args: Any) -> bool:
        if path not in self._division.reading:
            return False
        names = list(inspect.signature(self._model.get_submodule(path).forward).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        return given.get("encoder_hidden_states") is leaf

    def _is_outside(self, leaf: Any) -> bool:
        if self._division.has_own_loss or not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return False
        return id(leaf) not in self._owners.made

    def _check_arguments(self, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if self._is_outside(leaf) and self.marks.of(leaf) is None and not self._owners.is_own(leaf):
                self._fail(
                    f"{self.module_name} gets a tensor from outside its block that is not an argument of the block."
                )

    def _leave(self, path: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            self._stack.pop()
            if (region := self._region) is not None:
                return self._leave_full(region, output) if path == region.path else None
            if not path:
                self._check_stored(module)
            if self._trusted and self._trusted[-1] == path:
                self._trust(args, output)
            if self._division.gathers(path):
                self._depth -= 1
                is_row = self._division.style_of(path) == "rowwise"
                if self._unit and (is_row or path in self._division.gathering):
                    self._mark_hidden(output, None if is_row else self._division.width)
            if self._unit and self._unit[-1] == path:
                self._unit.pop()
                self._owners.leave()
                if path == self._open:
                    self._open = None
                    return self._gathered(path, output)
            return None

        return after

    def _trust(self, args: Any, output: Any) -> None:
        """Mark the output of transformers' experts, which compute each token separately."""
        self._trusted.pop()
        self._operations.pauses -= 1
        mark = next((mark for leaf in args if (mark := self.marks.of(leaf)) is not None), None)
        for leaf in tree_leaves(output):
            if mark is not None and isinstance(leaf, torch.Tensor) and leaf.shape[mark.dim] == args[0].shape[mark.dim]:
                self.marks.put(leaf, mark)
            self.note([leaf])

    def _check_stored(self, model: nn.Module) -> None:
        """Check that blocks store no numbers with a gradient, such as a loss.

        Such a number would be computed from only a part of the tokens.
        """
        for path, module in named_modules(model):
            for name, value in module.__dict__.items():
                for leaf in tree_leaves(value) if isinstance(value, torch.Tensor | list | tuple) else ():
                    is_number = isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.requires_grad
                    if is_number and id(leaf) in self._owners.made and not self._division.has_own_loss:
                        self._fail(
                            f"{path} ({self._kind(path)}) keeps a number with a gradient in {name}, and a rank "
                            "computes it from a part of the tokens."
                        )

    def _mark_hidden(self, output: Any, width: int | None) -> None:
        """Mark the first float tensor of an output (with `width` features unless None) as sharded by tokens."""
        for leaf in tree_leaves(output):
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                continue
            if width is None or leaf.shape[-1:] == (width,):
                if leaf.dim() >= 3:
                    self.marks.put(leaf, _stream(leaf))
                elif leaf.dim() == 2:
                    self.marks.put(leaf, TokenDim(0, self.marks.count or leaf.shape[0]))
                return

    def _gathered(self, path: str, output: Any) -> Any:
        leaves, tree = tree_flatten(output)
        place = hidden_index(leaves, self._division.width)
        if place is None or self.marks.of(leaves[place]) != _stream(leaves[place]):
            self._fail(f"{path} ({self._kind(path)}) returns no hidden states of (batch, tokens, features).")
            return None
        leaves[place] = self._alias(leaves[place])
        return tree_unflatten(leaves, tree)

    def step(self, name: str, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Trace one operation. name: the function that the model called."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if (region := self._region) is not None:
            if region.reads_outside(given, self.marks):
                self._fail(f"{self.module_name} reads a tensor from outside {region.path} in `{name}`.")
            region.made |= {id(output) for output in outputs}
            self.marks.keep(outputs)
            return
        self._check_sources(name, given)
        is_uniform = bool(args) and self.marks.is_uniform(args[0])
        self.marks.propagate_views(func, args, outputs)
        if all(self.marks.of(leaf) is None for leaf in given):
            self.marks.propagate_uniform(name, func, args, given, outputs)
        elif not outputs:
            self.record_mixing(name)
        else:
            self._check_foreign(name, given)
            self._propagate_tokens(
                name, TokenStep(func, args, kwargs, outputs, self.marks.of, self.marks.is_identical), is_uniform
            )
        self.note(outputs)

    def _check_sources(self, name: str, given: list[torch.Tensor]) -> None:
        """Check that code outside blocks uses no tensors or parameters of blocks, and the reverse."""
        if self._owners.of_full(given):
            self._fail(
                f"{self.module_name} reads a parameter of a module that gets all tokens outside it, in `{name}`."
            )
        if self._open is None:
            self._outside(given, f"`{name}`")
        if self._unit and self._open is not None:
            self._check_foreign(name, given)
        elif not self._division.has_own_loss and self._owners.of_blocks(given):
            self._fail(
                f"{self.module_name} reads a parameter of a block outside it, in `{name}`, where its gradient is no "
                "sum over the ranks."
            )

    def _propagate_tokens(self, name: str, step: TokenStep, is_uniform: bool) -> None:
        try:
            made = step.marks()
        except (TokensMixed, IndexError, TypeError):  # a rule does not support these arguments
            self.record_mixing(name, step.outputs)
            return
        for tensor, tokens in made:
            if tensor is step.args[0] and not self.marks.accepts(tensor, tokens, is_uniform):
                self.record_mixing(name)
                return
            self.marks.put(tensor, tokens)

    def _check_foreign(self, name: str, given: list[torch.Tensor]) -> None:
        for leaf in given:
            if self.marks.of(leaf) is None and self._is_outside(leaf) and not self._owners.is_own(leaf):
                what = (
                    "reads a tensor made outside the block that is no argument of it"
                    if self._unit
                    else ("reads a parameter or a tensor with a gradient between its blocks")
                )
                self._fail(
                    f"{self.module_name} {what}, in `{name}`: its gradient would cover only a part of the tokens."
                )

    def note(self, outputs: Sequence[torch.Tensor]) -> None:
        """Record tensors that blocks created."""
        self.marks.keep(outputs)
        if self._unit:
            self._owners.made |= {id(output) for output in outputs}

    def _outside(self, leaves: Sequence[Any], operation: str) -> None:
        """Check that code with all tokens does not read values that blocks computed for a part of them."""
        if self._division.has_own_loss and not self._division.has_full_output and operation == "its output":
            return
        for leaf in leaves:
            if self.marks.of(leaf) is not None:
                self._fail(f"{self.module_name} reads a value for each token that a block keeps, in {operation}.")
            elif self._division.has_own_loss or not isinstance(leaf, torch.Tensor) or id(leaf) not in self._owners.made:
                continue
            elif leaf.requires_grad:
                self._fail(f"{self.module_name} reads a value with a gradient that a block computed, in {operation}.")


def hidden_index(leaves: Sequence[Any], width: int) -> int | None:
    """Return the index of the hidden states, (batch, tokens, ..., width), among the values of a call, or None."""
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() >= 3 and leaf.shape[-1] == width:
            return place
    return None


def _stream(hidden: torch.Tensor) -> TokenDim:
    return TokenDim(TOKENS, hidden.shape[TOKENS])
