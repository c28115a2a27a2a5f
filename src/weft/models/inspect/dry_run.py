"""One forward of a model on the meta device, with shapes but without values."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset

from weft.errors import LayoutError, ModelError
from weft.lazy import named_object
from weft.models.inspect import hugging_face
from weft.models.inspect.blocks import Site, has_params, is_never_called, join_path
from weft.models.inspect.counted_sizes import watched_loops
from weft.models.inspect.function_caches import cleared_caches
from weft.models.inspect.layers import is_linear, weight_of
from weft.models.inspect.private_torch import children
from weft.models.keras_model import keras_device, keras_example
from weft.private_torch import tree_leaves, tree_map

#: Tokens of the shortest sequence for which `Inputs` are made.
SHORTEST = 8


def call_without_numbers(
    model: nn.Module, moved: Any, mode: AbstractContextManager[Any], dtype: torch.dtype | None = None
) -> Any:
    """Return the model's output on the meta device, in evaluation mode and under `mode`. The model is not changed.

    Args:
        model: any model.
        moved: arguments from `without_numbers`.
        mode: the torch mode, or another context manager around the forward.
        dtype: dtype of all floating-point parameters and buffers; None keeps their dtypes.

    Raises:
        ModelError: if the forward reads values or fails.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    meta = {name: _on_meta(tensor.detach(), dtype or tensor.dtype) for name, tensor in named}
    args, kwargs = as_arguments(moved)
    try:
        with (
            _unchanged(model), hugging_face.experts_at_once(model), torch.no_grad(), torch.device("meta"),
            _layer_by_layer(), keras_device(model, "meta"), mode,
        ):  # fmt: skip
            model.eval()
            return torch.func.functional_call(model, meta, args, kwargs, tie_weights=True)
    except Exception as error:  # the model's code may raise anything for these inputs
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise ModelError(f"{type(model).__name__} cannot be traced on the meta device: {first}.") from error


def call_traced(
    model: nn.Module, example: Any, watch: Callable[[Any], AbstractContextManager[Any]], *, training: bool = False
) -> Any:
    """Return the output of one observed forward, with the autograd graph. The model is not changed.

    The forward runs on the meta device, in the model's dtype or else in bfloat16. If that fails, for example because of
    branches that depend on values, it runs with values, unless the model is on the meta device.

    Args:
        model: any model.
        example: arguments of the forward.
        watch: builds the context manager that observes one forward, from its inputs.
        training: True to keep the modules' training mode; otherwise all are set to evaluation.

    Raises:
        ModelError: if the forward fails in each of these ways.
    """
    first: ModelError | None = None
    for dtype, on_meta in ((None, True), (torch.bfloat16, True), (None, False)):
        if not on_meta and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            continue
        try:
            return _call_once(model, example, watch, dtype, on_meta, training)
        except ModelError as error:
            first = first or error
    assert first is not None
    raise first


def _call_once(
    model: nn.Module, example: Any, watch: Callable[[Any], AbstractContextManager[Any]], dtype: torch.dtype | None,
    on_meta: bool, training: bool,
) -> Any:  # fmt: skip
    device = "meta" if on_meta else next((str(param.device) for param in model.parameters()), "cpu")
    wanted = dtype or next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)

    def moved(leaf: Any) -> Any:
        return leaf.to(device, wanted if leaf.is_floating_point() else None) if isinstance(leaf, torch.Tensor) else leaf

    inputs = tree_map(moved, example)
    args, kwargs = as_arguments(inputs)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        copied = tensor.detach().to(device, dtype if dtype and tensor.is_floating_point() else tensor.dtype)
        is_buffer = not isinstance(tensor, nn.Parameter)
        copied = copied.clone() if is_buffer and not on_meta else copied
        state[name] = copied.detach().requires_grad_(tensor.requires_grad)
    try:
        with (
            _same_draws(), _unchanged(model), hugging_face.experts_at_once(model),
            torch.enable_grad(), torch.device(device), _layer_by_layer(), keras_device(model, device),
            watched_loops(model), watch(inputs),
        ):  # fmt: skip
            if not training:
                model.eval()
            return torch.func.functional_call(model, state, args, kwargs, tie_weights=True)
    except Exception as error:  # the model's code may raise anything for these inputs
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise ModelError(f"{type(model).__name__} cannot be traced: {first}.") from error


def _same_draws() -> AbstractContextManager[Any]:
    untyped: Any = torch.random
    return untyped.fork_rng(devices=[])


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Generator[None]:
    """Restore all attributes of the modules on exit, including caches of the forward and the training mode."""
    before = [(module, dict(module.__dict__), _contents(module)) for module in model.modules()]
    try:
        with cleared_caches(model):
            yield
    finally:
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for held, content in contents:
                if not _is_same(held, content):
                    held.clear()
                    held.update(content) if isinstance(held, dict) else held.extend(content)


def _contents(module: nn.Module) -> list[tuple[dict[Any, Any] | list[Any], Any]]:
    return [(held, held.copy()) for held in module.__dict__.values() if isinstance(held, dict | list)]


def _is_same(held: dict[Any, Any] | list[Any], content: Any) -> bool:
    """Return True if the container still holds the same objects, so that it need not be restored.

    Some dicts do not allow updates.
    """
    if len(held) != len(content):
        return False
    if isinstance(held, dict):
        return all(name in held and held[name] is value for name, value in content.items())
    return all(one is other for one, other in zip(held, content, strict=True))


@contextlib.contextmanager
def _layer_by_layer() -> Generator[None]:
    """Run every layer separately and eagerly inside the context.

    The fused kernel of torch's transformer layers hides their linear layers, and graphs that torch.compile makes for
    meta tensors would not be used again.
    """
    is_compiling = "torch._dynamo" in sys.modules  # loaded by the first torch.compile
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager") if is_compiling else contextlib.nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def without_numbers(example: Any, model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """Return the example on the meta device. dtype: dtype of its floating-point tensors; None for the model's."""
    if dtype is None:
        dtype = next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)
    wanted = dtype

    def moved(leaf: Any) -> Any:
        return _on_meta(leaf, wanted) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(moved, example)


def _on_meta(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to("meta", dtype) if tensor.is_floating_point() else tensor.to("meta")


def is_named(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return True if the example is a dict of values by name."""
    return isinstance(value, dict)


class LoadedSamples:
    """The samples of a user's DataLoader in the order of its dataset, which is repeated without end.

    It may be called as a batch_fn(step, size).
    """

    def __init__(self, loader: DataLoader[Any]):
        self._dataset: Any = loader.dataset
        #: Makes a batch of a list of samples.
        self.collate = cast(Callable[[list[Any]], Any], loader.collate_fn)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped

    def samples(self, step: int, size: int) -> list[Any]:
        """Return the `size` samples of a step. Steps are counted from 0."""
        return [self._dataset[number % len(self._dataset)] for number in range(step * size, (step + 1) * size)]

    def __call__(self, step: int, size: int) -> Any:
        return self.collate(self.samples(step, size))


def is_placed(value: Any) -> TypeGuard[tuple[Any, ...]]:
    """Return True if the example is a tuple of positional values."""
    return isinstance(value, tuple)


def as_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an example (a tensor, a tuple, or a dict) as positional and keyword arguments of a forward."""
    if is_named(example):
        return (), example
    return example if is_placed(example) else (example,), {}


def example_of(model: nn.Module, batch: int = 2) -> Any:
    """Return inputs for the model: all inputs of a transformers model, else token ids, an image, audio or vectors.

    Raises LayoutError if no layer shows the kind of input.
    """
    if (declared := keras_example(model, batch)) is not None:
        return declared
    name = getattr(model, "main_input_name", None)
    ids = torch.zeros(batch, 8, dtype=torch.int64)
    if name is not None and name in (shapes := hugging_face.input_shapes(model, 8)):
        numbers = {each: torch.zeros(batch, *shape) for each, shape in shapes.items()}
        return {each: ids if each in hugging_face.TOKENS else zeros for each, zeros in numbers.items()}
    if name == "input_ids":
        return {"input_ids": ids}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return (ids,)
        if isinstance(module, nn.Conv2d):
            return (_image(model, module.in_channels, batch),)
        if isinstance(module, nn.Conv1d):
            return (torch.zeros(batch, module.in_channels, 4096),)
        if is_linear(module):
            return (torch.zeros(batch, 8, weight_of(module).shape[1]),)
    raise LayoutError(
        f"layout: {type(model).__name__} does not begin with an embedding, convolution or linear layer, so its input "
        "is unknown. Pass example=, the arguments of a forward."
    )


def _image(model: nn.Module, channels: int, batch: int) -> torch.Tensor:
    """Return an image of the first common size that the model accepts, or of 64 pixels."""
    named = (getattr(model, name, None) for name in ("image_size", "img_size"))
    sizes = [size for size in named if isinstance(size, int)]
    for size in (*sizes, 64, 32, 16, 224, 28, 8, 48, 96, 128, 256):
        image = torch.zeros(batch, channels, size, size)
        try:
            call_without_numbers(model, without_numbers(image, model), contextlib.nullcontext())
        except ModelError:
            continue
        return image
    return torch.zeros(batch, channels, 64, 64)


class Inputs:
    """Arguments of the model's forward, for any batch size and sequence length.

    Attributes:
        given: True if the caller passed an example.
        example: the example on the meta device.
        seq_len: tokens of a sequence in the example, or 0 if it has no sequences.

    Raises:
        ModelError: if the example has no tensor.
    """

    def __init__(self, model: nn.Module, example: Any):
        self.given = example is not None
        made = example_of(model) if example is None else example(0, 2) if callable(example) else example
        if callable(example):  # a batch_fn: use the model inputs of its batch
            first = made[0] if is_placed(made) else made
            made = {name: each for name, each in first.items() if name != "labels"} if is_named(first) else first
        self.example = tree_map(_to_meta, made)
        tensors = [leaf for leaf in tree_leaves(self.example) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not tensors:
            raise ModelError("its example has no tensor. Return (model, example), with the arguments of a forward")
        self._batch = tensors[0].shape[0]
        ids = [each for each in tensors if not each.is_floating_point() and each.dim() == 2]
        bands = {module.in_channels for module in model.modules() if isinstance(module, nn.Conv1d)}  # before frames
        features = [
            each for each in tensors if each.is_floating_point() and each.dim() == 3 and each.shape[1] not in bands
        ]
        self.seq_len = (ids or features)[0].shape[1] if ids or features else 0
        self._sure = bool(ids)

    def call(self, model: nn.Module, batch: int, seq: int) -> Any:
        """Run the model on the meta device on `batch` samples of `seq` tokens, and return its output."""
        with torch.device("meta"):
            made = tree_map(partial(self._sized, batch=batch, seq=seq), self.example)
            args, kwargs = as_arguments(made)
            return model(*args, **kwargs)

    def _sized(self, leaf: Any, batch: int, seq: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        shape = list(leaf.shape)
        shape[0] = batch if shape[0] == self._batch else shape[0]
        if seq and len(shape) > 1 and shape[1] == self.seq_len:
            shape[1] = seq
        return torch.zeros(shape, dtype=leaf.dtype, device="meta")

    def sequence_step(self, model: nn.Module, longest: int | None = None) -> int:
        """Return the length of the shortest sequence to trace, or 0 if the model reads no sequences.

        longest: maximum length that the model reads. A trace uses sequences of up to four times the shortest.
        """
        step = max(1, min(SHORTEST, (longest or 4 * SHORTEST) // 4))
        if not self.seq_len or self._sure:
            return step if self.seq_len else 0
        try:  # features with three dims may be a sequence, unless the model requires a fixed second dim
            with torch.no_grad():
                self.call(model, 2, self.seq_len + 1)
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return 0
        return step


#: Image sizes that are tried if the model rejects the usual example.
_SIDES = (224, 32, 28, 16, 8)


class CallOrder:
    """Order of module calls, and the modules whose weights were read outside their calls."""

    def __init__(self) -> None:
        self.calls: list[nn.Module] = []
        self._first: dict[nn.Module, int] = {}
        self._uses: set[tuple[nn.Module, tuple[nn.Module, ...]]] = set()

    def add(self, module: nn.Module) -> None:
        """Record the start of a call."""
        self._first.setdefault(module, len(self.calls))
        self.calls.append(module)

    def add_use(self, owner: nn.Module, running: tuple[nn.Module, ...]) -> None:
        """Record that a module was called, or its weight read, while the modules in `running` were running."""
        self._uses.add((owner, running))

    def is_read(self, module: nn.Module) -> bool:
        """Return True if a weight of a module, or of a part of it, was used outside the module's calls."""
        inside = set(module.modules())
        return any(owner in inside and module not in running for owner, running in self._uses)

    def is_called(self, module: nn.Module) -> bool:
        """Return True if the module was called, or if neither it nor a submodule was."""
        return module in self._first or not any(part in self._first for part in module.modules())

    def called(self, sites: list[Site]) -> list[Site]:
        """Return the sites, with uncalled containers replaced by their children.

        A container is replaced, recursively, if it is not called, one of its submodules is, and it has no parameters of
        its own. Children without parameters are dropped.
        """
        found: list[Site] = []
        for site in sites:
            inside = [
                Site(site.module, key, join_path(site.path, key))
                for key, child in children(site.module).items()
                if child is not None and has_params(child)
            ]
            is_opened = site.module not in self._first and any(part in self._first for part in site.module.modules())
            has_own = any(True for _ in site.module.named_parameters(recurse=False))
            found += self.called(inside) if is_opened and not has_own else [site]
        return found

    def sorted(self, sites: list[Site]) -> list[Site]:
        """Return the sites in the order of their first calls. Modules that are never called keep their position."""
        called = [site for site in sites if site.module in self._first]
        ordered = iter(sorted(called, key=lambda site: self._first[site.module]))
        return [next(ordered) if site.module in self._first else site for site in sites]

    def positions(self, site: Site, units: list[Site]) -> list[int]:
        """Return the number of blocks that ran before each call to a module, without duplicates."""
        modules = {unit.module for unit in units}
        seen: set[nn.Module] = set()
        found: dict[int, None] = {}
        for module in self.calls:
            if module in modules:
                seen.add(module)
            elif module is site.module:
                found.setdefault(sum(unit.module in seen for unit in units))
        return list(found)


def call_order(model: nn.Module) -> CallOrder | None:
    """Call a model on the meta device and return the order of calls, or None if that fails.

    The inputs are generated by `example_of`. The model is not changed.
    """
    try:
        example = example_of(model)
    except (LayoutError, ModelError):
        return None
    for attempt in (example, *_of_other_sizes(example), *_with_more(model, example)):
        order = CallOrder()
        watch = _Watch(model, order)
        hooks = watch.hooks()
        try:
            call_without_numbers(model, without_numbers(attempt, model), watch)
        except (LayoutError, ModelError):
            continue
        finally:
            for hook in hooks:
                hook.remove()
        return order
    return None


def _of_other_sizes(example: Any) -> list[Any]:
    image = _only(example)
    if image is None or image.dim() != 4:
        return []
    return [(torch.zeros(1, image.shape[1], side, side),) for side in _SIDES]


def _only(example: Any) -> torch.Tensor | None:
    found: list[Any] = list(example) if is_placed(example) else []
    return found[0] if len(found) == 1 and isinstance(found[0], torch.Tensor) else None


def _with_more(model: nn.Module, example: Any) -> list[Any]:
    """Return inputs with the missing required arguments added, as one number per sample (noise steps, classes)."""
    takes = inspect.signature(model.forward).parameters.values()
    required = sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in takes)
    given = _only(example)
    if given is None or not 1 < required <= 3:
        return []
    more = [torch.zeros(len(given), dtype=dtype) for dtype in (torch.int64, torch.float32)]
    others = itertools.product(more, repeat=required - 1)
    return [(*first, *rest) for rest in others for first in (example, *_of_other_sizes(example))]


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


class _Watch(TorchFunctionMode):
    """Records calls of modules and weights that are read outside calls. Checks of meta tensors' values return True."""

    def __init__(self, model: nn.Module, order: CallOrder):
        super().__init__()
        self._model, self._order = model, order
        self._running: list[nn.Module] = []
        self._owners: dict[int, list[nn.Module]] = {}

    def hooks(self) -> list[Any]:
        """Register the hooks that record calls, and return their handles."""
        modules = [module for module in self._model.modules() if not is_never_called(module)]
        before = [module.register_forward_pre_hook(self._enter) for module in modules]
        return before + [module.register_forward_hook(self._leave, always_call=True) for module in modules]

    def _enter(self, module: nn.Module, args: Any) -> None:
        del args
        if module is self._model:  # its parameters are replaced for this call
            self._owners = {}
            for part in module.modules():
                for each in part.parameters(recurse=False):
                    self._owners.setdefault(id(each), []).append(part)
        else:
            self._order.add(module)
            self._order.add_use(module, (*self._running, module))
        self._running.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.item, torch.Tensor.__bool__) and args[0].is_meta:
            return True
        for each in args:
            owners = self._owners.get(id(each), [])
            if not any(owner in self._running for owner in owners):
                for owner in owners:
                    self._order.add_use(owner, tuple(self._running))
        return func(*args, **(kwargs or {}))


# Models given as `package.module:function`: import and call the function, and report failures.


def call_function(source: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the model and the other results of a user's function, with a DataLoader as `LoadedSamples`.

    Modules of the current folder can be imported.

    Raises:
        ModelError: if the function cannot be imported or called, or does not return a model, or its loader's dataset
            has no samples by index.
    """
    try:
        function = named_object(source)
    except Exception as error:  # user code may raise anything
        rule = f"it cannot be imported ({error})"
        raise ModelError(
            f"model={source}: {rule}. Write package.module:function, importable from this folder."
        ) from None
    if not callable(function):
        rule = f"it is of type {type(function).__name__} and cannot be called"
        raise ModelError(f"model={source}: {rule}. Name a function without arguments that returns a model.")
    try:
        made = function()
    except Exception as error:
        rule = f"it raised {type(error).__name__} ({error})"
        raise ModelError(f"model={source}: {rule}. Call it in Python without arguments, to see where.") from error
    model, *rest = made if is_placed(made) else (made,)
    if not isinstance(model, nn.Module):
        rule = f"it returned {type(model).__name__}, not an nn.Module"
        raise ModelError(f"model={source}: {rule}. Return a model, or it and an example or a batch_fn.")
    if rest and isinstance(rest[0], DataLoader):
        rest[0] = _loaded(source, cast(DataLoader[Any], rest[0]))
    return model, tuple(rest)


def _loaded(source: str, loader: DataLoader[Any]) -> LoadedSamples:
    dataset = cast(Any, loader.dataset)
    if isinstance(dataset, IterableDataset) or not len(dataset):
        raise ModelError(
            f"model={source}: its loader's dataset has no samples that can be read by their number. "
            f"Return a DataLoader of a map-style dataset, or batch_fn(step, size)."
        )
    return LoadedSamples(loader)
