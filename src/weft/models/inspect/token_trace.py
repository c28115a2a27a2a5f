"""Trace the tokens through one forward of a model, and check the operations on them outside of sharded layers."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from weft.config.layout import Style
from weft.models.inspect import hugging_face
from weft.models.inspect.counted_sizes import CONSTANTS, RESHAPES, Counted, counted_in, counted_result, fits_parts
from weft.models.inspect.dry_run import call_traced, is_named
from weft.models.inspect.token_rules import TokenDim, TokensMeet, TokenStep
from weft.private_torch import TorchDispatchMode, named_modules, tree_flatten, tree_leaves, tree_unflatten

#: Dim of the tokens in the blocks' inputs, (batch, tokens, features).
TOKENS = 1
#: Attributes that Python code may read from tokens, because they do not depend on values.
_ASKED = frozenset((
    "dim", "ndim", "ndimension", "dtype", "device", "requires_grad", "is_floating_point", "is_complex", "is_contiguous",
    "is_cuda", "is_meta", "is_cpu", "layout", "is_leaf", "grad_fn", "element_size", "itemsize", "get_device", "type",
    "__repr__", "__format__", "__hash__", "grad", "is_sparse", "is_nested", "is_quantized", "names", "is_tensor",
    "_version", "is_mkldnn", "retains_grad", "__set__", "requires_grad_", "data_ptr", "is_inference", "stride",
    "__setitem__",
))  # fmt: skip
_SIZES = frozenset(("shape", "size", "numel", "nelement"))
#: Functions that read shapes and draw random numbers internally, but treat each token separately.
_DROPOUT = frozenset(("dropout", "alpha_dropout", "dropout1d"))
#: Operations with a constant result if their inputs are constant or absent.
_UNIFORM = frozenset((
    "clone", "_to_copy", "zeros_like", "ones_like", "full_like", "empty_like", "scalar_tensor", "empty_strided",
    *CONSTANTS,
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenRegions:
    """Regions of a forward in which tokens are divided. runs: the first and the last module of each region.

    units: the modules whose parameters read a part of the tokens. summed: for each unit, positions of outside tensors
    among its flattened arguments (positional, then keyword), whose gradients are sums over the ranks. why_apart: the
    reason why tokens are gathered after each unit, or "" if they stay divided from one to the next.
    """

    runs: tuple[tuple[str, str], ...]
    units: tuple[str, ...]
    summed: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    why_apart: str = ""


@dataclass(frozen=True, slots=True)
class TokenDivision:
    """Division of tokens by a technique.

    styles: styles of sharded layers. gathering: modules that get all tokens. width: features of the hidden states.
    where: the setting, for messages. remedy: the fix, for messages. has_own_loss: True if each rank computes the loss
    of its own tokens, so that all gradients are summed anyway. reading: modules that receive an encoder's states, which
    are divided too.
    """

    styles: Mapping[str, Style]
    gathering: Collection[str]
    width: int
    where: str = "sp=on"
    remedy: str = "Use sp=off."
    has_own_loss: bool = False
    reading: Collection[str] = ()

    def is_full(self, path: str) -> bool:
        """Return whether a module works on all tokens."""
        style = self.styles.get(path)
        return path in self.gathering or (style is not None and style.name in ("colwise", "rowwise"))


class TokenTrace:
    """Trace of the tokens in forwards of a model.

    problem: the first operation or use without a rule, or None. called: paths of modules that ran. summed: see
    `TokenRegions`.

    Args:
        model: the full model.
        regions: the regions to check.
        division: the division of tokens.
    """

    def __init__(self, model: nn.Module, regions: TokenRegions, division: TokenDivision):
        self.problem: str | None = None
        self.called: set[str] = set()
        self.summed: dict[str, frozenset[int]] = {}
        self._model, self._division = model, division
        self._first = dict[str, str](regions.runs)
        self._units = frozenset(regions.units)
        self._operations = _Operations(self)
        self._reset()

    def _reset(self) -> None:
        self._stack: list[str] = []
        self._depth = 0  # number of running modules that get all tokens
        self._open: str | None = None  # tokens are gathered after this module
        self._ends: list[str] = []
        self._unit: list[str] = []
        self._trusted: list[str] = []
        self._own: list[set[int]] = []
        self._kept: list[torch.Tensor] = []  # keeps tensors alive so that ids stay unique
        self._marks: dict[int, TokenDim] = {}
        self._uniform: set[int] = set()
        self._inner: set[int] = set()
        self._owned: set[int] = set()
        self._bases: dict[int, torch.Tensor] = {}

    def follow(self, example: Any, training: bool) -> None:
        """Trace one call of the model."""
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
            self._operations = _Operations(self)

    @contextmanager
    def _watched(self, inputs: Any) -> Generator[None]:
        del inputs
        self._reset()
        with ExitStack() as stack:
            stack.enter_context(_Watch(self._operations))
            stack.enter_context(self._operations)
            yield

    def _kind(self, path: str) -> str:
        return type(self._model.get_submodule(path)).__name__

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem

    @property
    def is_full(self) -> bool:
        """True if a module that gets all tokens is running."""
        return self._depth > 0

    @property
    def here(self) -> str:
        """The running module, for messages."""
        path = self._stack[-1] if self._stack else ""
        return f"{path} ({self._kind(path)})" if path else type(self._model).__name__

    def meet(self, operation: str) -> None:
        """Record that an operation mixes tokens outside of modules that get all of them."""
        self._fail(
            f"{self.here} calls `{operation}` outside of sharded layers, which mixes tokens or is not known to keep "
            "them separate, and tokens are sharded there."
        )

    def misuse(self, operation: str) -> None:
        """Record that code depends on the number of tokens."""
        if not self._depth:
            self._fail(
                f"{self.here} {operation.format('the number of tokens')}, and outside of sharded layers that is the "
                "number of a rank's tokens, not of all."
            )

    def of(self, value: Any) -> TokenDim | None:
        """Return the tokens of a tensor, or None."""
        return self._marks.get(id(value)) if isinstance(value, torch.Tensor) else None

    def mark(self, tensor: torch.Tensor, tokens: TokenDim) -> None:
        """Record the tokens of a tensor."""
        self._kept.append(tensor)
        self._marks[id(tensor)] = tokens

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

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
                named = dict(named_modules(module))
                self._owned = {id(param) for unit in self._units for param in named[unit].parameters()}
            replaced = self._enter_unit(path, module, args, kwargs) if path in self._units and not self._depth else None
            if hugging_face.keeps_tokens_apart(module) and self._unit and not self._depth:
                self._operations.pauses += 1
                self._trusted.append(path)
            if self._division.is_full(path):
                if not self._unit and any(path.startswith(f"{unit}.") for unit in self._units):
                    self._fail(f"{path} ({self._kind(path)}) is called outside of its block.")
                if self._depth == 0 and self._unit:
                    self._check_arguments(args, kwargs)
                self._depth += 1
            return replaced

        return before

    def _enter_unit(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        place = hidden_place(leaves, self._division.width)
        self._unit.append(path)
        self._own.append({id(param) for param in module.parameters()})
        if path in self._first and self._open is None:
            self._open = self._first[path]
            if place is None:
                width = self._division.width
                self._fail(f"{self.here} gets no hidden states of (batch, tokens, {width} features).")
                return None
            leaves[place] = self._alias(leaves[place])
            self.mark(leaves[place], _stream(leaves[place]))
        elif self._open is None or path in self._first:
            self._fail(
                f"{self.here} is called where tokens are {'all there' if self._open is None else 'divided'}: "
                "blocks run in another order than they are registered in, or several times."
            )
        found: set[int] = set()
        for at, leaf in enumerate(leaves):
            if self._is_outside(leaf) and self.of(leaf) is None:
                if at != place and self._is_read(path, leaf, kwargs, args):
                    leaves[at] = self._alias(leaf)
                    self.mark(leaves[at], _stream(leaf))
                    continue
                leaves[at] = self._alias(leaf)
                self._kept.append(leaves[at])
                self._inner.add(id(leaves[at]))
                found.add(at)
        if self.summed.setdefault(path, frozenset(found)) != frozenset(found):
            self._fail(f"{self.here} gets other tensors from outside in another call.")
        return tree_unflatten(leaves, tree)

    def _is_read(self, path: str, leaf: torch.Tensor, kwargs: Any, args: Any) -> bool:
        """Return True for an encoder's states, of which a block gets its part too."""
        if path not in self._division.reading:
            return False
        names = list(inspect.signature(self._model.get_submodule(path).forward).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        return given.get("encoder_hidden_states") is leaf

    def _is_outside(self, leaf: Any) -> bool:
        """Return True if a tensor with a gradient was made outside of the blocks."""
        if self._division.has_own_loss or not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return False
        return id(leaf) not in self._inner

    def _check_arguments(self, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if self._is_outside(leaf) and self.of(leaf) is None and not self._is_own(leaf):
                self._fail(f"{self.here} gets a tensor from outside of its block that is not an argument of the block.")

    def _is_own(self, leaf: torch.Tensor) -> bool:
        return bool(self._own) and id(leaf) in self._own[-1]

    def _leave(self, path: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            self._stack.pop()
            if not path:
                self._check_kept(module)
            if self._trusted and self._trusted[-1] == path:
                self._trusted.pop()
                self._operations.pauses -= 1
                mark = next((mark for leaf in args if (mark := self.of(leaf)) is not None), None)
                for leaf in tree_leaves(output):
                    if (
                        mark is not None
                        and isinstance(leaf, torch.Tensor)
                        and leaf.shape[mark.dim] == args[0].shape[mark.dim]
                    ):
                        self.mark(leaf, mark)
                    self.note([leaf])
            if self._division.is_full(path):
                self._depth -= 1
                style = self._division.styles.get(path)
                if (
                    self._depth == 0
                    and self._unit
                    and (path in self._division.gathering or (style and style.name == "rowwise"))
                ):
                    self._mark_hidden(output)
            if self._unit and self._unit[-1] == path and not self._depth:
                self._unit.pop()
                self._own.pop()
                if path == self._open:
                    self._open = None
                    return self._gathered(path, output)
            return None

        return after

    def _check_kept(self, model: nn.Module) -> None:
        """Check that blocks store no numbers with a gradient, such as a loss.

        Such a number would come from a part of the tokens.
        """
        for path, module in named_modules(model):
            for name, value in module.__dict__.items():
                for leaf in tree_leaves(value) if isinstance(value, torch.Tensor | list | tuple) else ():
                    is_number = isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.requires_grad
                    if is_number and id(leaf) in self._inner and not self._division.has_own_loss:
                        self._fail(
                            f"{path} ({self._kind(path)}) keeps a number with a gradient in {name}, and a rank "
                            "computes it from a part of the tokens."
                        )

    def _mark_hidden(self, output: Any) -> None:
        """Mark the output of row-parallel layers and of modules that get all tokens, since it is divided again."""
        width = self._division.width
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.shape[-1:] == (width,):
                if leaf.dim() >= 3:
                    self.mark(leaf, _stream(leaf))
                elif leaf.dim() == 2:
                    count = next((mark.count for mark in self._marks.values()), leaf.shape[0])
                    self.mark(leaf, TokenDim(0, count))
                return

    def _gathered(self, path: str, output: Any) -> Any:
        """Return the output with all tokens, as at the end of a run."""
        leaves, tree = tree_flatten(output)
        place = hidden_place(leaves, self._division.width)
        if place is None or self.of(leaves[place]) != _stream(leaves[place]):
            self._fail(f"{path} ({self._kind(path)}) returns no hidden states of (batch, tokens, features).")
            return None
        leaves[place] = self._alias(leaves[place])
        return tree_unflatten(leaves, tree)

    def step(self, name: str, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Trace one operation.

        Args:
            name: name of the function that the model called.
            func: the torch operation.
            args: positional arguments of the operation.
            kwargs: keyword arguments of the operation.
            outputs: the tensors that it returned.
        """
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._check_sources(name, given)
        is_uniform = bool(args) and isinstance(args[0], torch.Tensor) and id(args[0]) in self._uniform
        self._follow_bases(func, args, outputs)
        if not self._depth:
            if all(self.of(leaf) is None for leaf in given):
                self._follow_uniform(name, func, args, given, outputs)
            elif not outputs:
                self.meet(name)
            else:
                self._check_foreign(name, given)
                self._follow_tokens(name, TokenStep(func, args, kwargs, outputs, self.of, self._is_alike), is_uniform)
        self.note(outputs)

    def _check_sources(self, name: str, given: list[torch.Tensor]) -> None:
        """Check that code outside of blocks uses no tensors or parameters of blocks, and the reverse."""
        if self._open is None:
            self._outside(given, f"`{name}`")
        if self._unit and self._open is not None:
            self._check_foreign(name, given)
        elif not self._division.has_own_loss and any(id(leaf) in self._owned and leaf.requires_grad for leaf in given):
            self._fail(
                f"{self.here} reads a parameter of a block outside of it, in `{name}`, where its gradient is no sum "
                "over the ranks."
            )

    def _follow_tokens(self, name: str, step: TokenStep, is_uniform: bool) -> None:
        try:
            made = step.marks()
        except (TokensMeet, IndexError, TypeError):  # a rule does not support these arguments
            self.meet(name)
            return
        for tensor, tokens in made:
            if tensor is step.args[0] and not self._takes(tensor, tokens, is_uniform):
                self.meet(name)
                return
            self.mark(tensor, tokens)

    def _takes(self, target: torch.Tensor, tokens: TokenDim, is_uniform: bool) -> bool:
        """Return True if tokens may be written into a tensor. Mark the tensor that it is a view of."""
        before, base = self.of(target), self._bases.get(id(target))
        if before is not None:
            return before == tokens
        if base is not None and self.of(base) is None:
            same = base.dim() == target.dim() and base.shape[tokens.dim] == target.shape[tokens.dim]
            if not same or tokens.inner != 1 or not is_uniform:
                return False
            self.mark(base, tokens)
        return is_uniform

    def _follow_uniform(self, name: str, func: Any, args: Any, given: list[torch.Tensor], outputs: Any) -> None:
        """Record which tensors are constant."""
        if outputs and args and outputs[0] is args[0]:
            self._written(outputs[0], name)
        elif all(id(leaf) in self._uniform for leaf in given) and _keeps_uniform(func, given):
            self._uniform |= {id(output) for output in outputs}

    def _check_foreign(self, name: str, given: list[torch.Tensor]) -> None:
        """Check that no outside tensor with a gradient is combined with a part of the tokens."""
        for leaf in given:
            if self.of(leaf) is None and self._is_outside(leaf) and not self._is_own(leaf):
                what = (
                    "reads a tensor made outside of the block that is no argument of it"
                    if self._unit
                    else ("reads a parameter or a tensor with a gradient between its blocks")
                )
                self._fail(f"{self.here} {what}, in `{name}`: its gradient would cover only a part of the tokens.")

    def _written(self, tensor: torch.Tensor, name: str) -> None:
        """Record that a tensor and all tensors that share its memory may no longer be constant after a write."""
        base = self._bases.get(id(tensor))
        if base is None and name in ("fill_", "zero_"):
            return
        base = tensor if base is None else base
        self._uniform -= {id(base), *(key for key, owner in self._bases.items() if owner is base)}

    def note(self, outputs: Sequence[torch.Tensor]) -> None:
        """Record tensors that blocks made."""
        self._kept += outputs
        if self._unit:
            self._inner |= {id(output) for output in outputs}

    def _follow_bases(self, func: Any, args: Any, outputs: list[torch.Tensor]) -> None:
        """Record the base tensor of each view."""
        if not func.is_view or not args or not isinstance(args[0], torch.Tensor):
            return
        first: torch.Tensor = args[0]
        base = self._bases.get(id(first), first)
        for output in outputs:
            self._bases[id(output)] = base
            self._kept += [output, base]

    def _is_alike(self, tensor: torch.Tensor, from_end: int) -> bool:
        if from_end > tensor.dim() or id(tensor) in self._uniform:
            return True
        return tensor.shape[-from_end] == 1 or tensor.stride()[-from_end] == 0

    def _outside(self, leaves: Sequence[Any], operation: str) -> None:
        """Check that code with all tokens does not read values that blocks computed for a part of them."""
        if self._division.has_own_loss and operation == "its output":
            return
        for leaf in leaves:
            if self.of(leaf) is not None:
                self._fail(f"{self.here} reads a value for each token that a block keeps, in {operation}.")
            elif self._division.has_own_loss or not isinstance(leaf, torch.Tensor) or id(leaf) not in self._inner:
                continue
            elif leaf.requires_grad:
                self._fail(f"{self.here} reads a value with a gradient that a block computed, in {operation}.")


def _keeps_uniform(func: Any, given: list[torch.Tensor]) -> bool:
    name = str(func.overloadpacket).rpartition(".")[2]
    return (bool(given) and func.is_view) or name in _UNIFORM


def hidden_place(leaves: Sequence[Any], width: int) -> int | None:
    """Return the position of the hidden states, (batch, tokens, ..., width), among the values of a call."""
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() >= 3 and leaf.shape[-1] == width:
            return place
    return None


def _stream(hidden: torch.Tensor) -> TokenDim:
    return TokenDim(TOKENS, hidden.shape[TOKENS])


class _Operations(TorchFunctionMode):
    """Mode that records the names of the torch functions that a model calls, and their size queries."""

    def __init__(self, flow: TokenTrace):
        super().__init__()
        self.flow, self.name, self.pauses, self.is_over = flow, "", 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.pauses:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = getattr(func.__self__, "__name__", name)
        if name in ("__contains__", "__bool__") and args[0].is_meta:
            if self.flow.of(args[0]) is not None:
                self.flow.meet(name.strip("_"))
            return False  # "is there padding in these ids?" has no answer without numbers
        self.name = name.strip("_") if name.startswith("_") else name
        if name in _DROPOUT and args and self.flow.of(args[0]) is not None:
            return self._dropped(func, args, kwargs)
        result = func(*args, **kwargs)
        return result if self.is_over else self._look(name, args, kwargs, result)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause the trace inside the context."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def _dropped(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self.paused():
            result = func(*args, **kwargs)
        mark = self.flow.of(args[0])
        assert mark is not None
        self.flow.mark(result, mark)
        self.flow.note([result])
        return result

    def _misuse(self, what: str) -> None:
        if not self.is_over:
            self.flow.misuse(what)

    def _look(self, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        """Check a function's size queries and its use of sizes, and return its result."""
        flow = self.flow
        first = args[0] if args else None
        mark = flow.of(first)
        if mark is not None and not flow.is_full:
            assert isinstance(first, torch.Tensor)
            size = first.shape[mark.dim]
            if name in _SIZES and size > mark.inner:
                return counted_result(name, args, kwargs, result, mark.dim, size // mark.ranks, self._misuse)
            if name == "__len__" and mark.dim == 0:
                self._misuse("reads {} by len()")
            elif name in RESHAPES and isinstance(result, torch.Tensor):
                self._check_reshape(name, args, kwargs, mark, result)
            elif name not in _ASKED and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
                flow.meet(self.name)
        if next(counted_in((args, kwargs)), None) is not None:
            self._check_sizes(name, args, kwargs, result, is_marked=mark is not None)
        return result

    def _check_reshape(self, name: str, args: Any, kwargs: Any, mark: TokenDim, result: torch.Tensor) -> None:
        if (new := self.flow.of(result)) is None:
            return
        shape, made = [*args[0].shape], [*result.shape]
        shape[mark.dim] //= mark.ranks
        made[new.dim] //= mark.ranks
        if not fits_parts(name, args, kwargs, shape, made):
            self._misuse(f"writes {{}} down in `{name}`")

    def _check_sizes(self, name: str, args: Any, kwargs: Any, result: Any, is_marked: bool) -> None:
        """Check sizes of tokens among the arguments of a function."""
        if (is_marked and name in RESHAPES) or name in ("expand", "broadcast_to"):
            return
        dims: list[int] = []
        if name in (*CONSTANTS, "repeat") and isinstance(result, torch.Tensor):
            flat = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, int)]
            dims = [dim for dim, size in enumerate(flat) if isinstance(size, Counted) and dim < result.dim()]
        if len(dims) == len(list(counted_in((args, kwargs)))) == 1 and (name in CONSTANTS or not is_marked):
            self.flow.mark(result, TokenDim(dims[0], result.shape[dims[0]]))
        else:
            self._misuse(f"uses {{}} in `{self.name}`")


class _Watch(TorchDispatchMode):
    """Mode that traces the aten operations of torch functions."""

    def __init__(self, operations: _Operations):
        super().__init__()  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._operations.pauses:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            name = self._operations.name or str(func.overloadpacket).rpartition(".")[2]
            self._operations.flow.step(name, func, args, kwargs, outputs)
        return result
