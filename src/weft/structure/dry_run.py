"""One forward of a model on the meta device: shapes without numbers, whatever its size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from weft.errors import LayoutError, ModelError
from weft.private_torch import tree_leaves, tree_map
from weft.structure import hugging_face
from weft.structure.layers import is_linear, weight_of

#: Tokens of the shortest sequence that `Inputs` are made for.
SHORTEST = 8
T = TypeVar("T")


def in_some_format(attempt: Callable[[torch.dtype | None], T]) -> T:
    """What `attempt` gives with the model's own format, or else with bfloat16, which some kernels insist on."""
    try:
        return attempt(None)
    except (LayoutError, ModelError) as error:
        try:
            return attempt(torch.bfloat16)
        except (LayoutError, ModelError):
            raise error from None


def call_without_numbers(
    model: nn.Module, moved: Any, mode: AbstractContextManager[Any], dtype: torch.dtype | None = None
) -> Any:
    """The model's output for what `without_numbers` gave, called under a mode and in evaluation. The model stays.

    dtype: of all floats; None: the model's own. Raises ModelError where forward asks for numbers, or fails.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    meta = {name: _on_meta(tensor.detach(), dtype or tensor.dtype) for name, tensor in named}
    args, kwargs = as_arguments(moved)
    try:
        with (
            _unchanged(model), hugging_face.experts_at_once(model), torch.no_grad(), torch.device("meta"),
            _layer_by_layer(), mode,
        ):  # fmt: skip
            model.eval()
            return torch.func.functional_call(model, meta, args, kwargs, tie_weights=True)
    except Exception as error:  # the model's own code, called with what it may not expect
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise ModelError(f"{type(model).__name__} cannot be traced on the meta device: {first}.") from error


def call_traced(
    model: nn.Module, example: Any, watch: Callable[[Any], AbstractContextManager[Any]], *, training: bool = False
) -> Any:
    """Return the output of one forward under a watch, with the gradients' graph. The model stays as it is.

    The forward runs on the meta device, in the model's format or else in bfloat16. If that fails, as with branches
    that depend on numbers, it runs with numbers.

    Args:
        model: any.
        example: arguments of the forward.
        watch: makes what observes one forward, from its inputs.
        training: whether modules keep their mode; otherwise all are in evaluation.

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
            torch.enable_grad(), torch.device(device), _layer_by_layer(), watch(inputs),
        ):  # fmt: skip
            if not training:
                model.eval()
            return torch.func.functional_call(model, state, args, kwargs, tie_weights=True)
    except Exception as error:  # the model's own code, called with what it may not expect
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise ModelError(f"{type(model).__name__} cannot be traced: {first}.") from error


def _same_draws() -> AbstractContextManager[Any]:
    """Inside, numbers may be drawn; afterwards the CPU draws what it would have drawn before."""
    untyped: Any = torch.random
    return untyped.fork_rng(devices=[])


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Generator[None]:
    """Afterwards modules have the attributes of before: what a forward keeps for the next one, and who is training."""
    before = [(module, dict(module.__dict__), _contents(module)) for module in model.modules()]
    try:
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
    """What lists and dicts of a module hold, its buffers among them."""
    return [(held, held.copy()) for held in module.__dict__.values() if isinstance(held, dict | list)]


def _is_same(held: dict[Any, Any] | list[Any], content: Any) -> bool:
    """Return whether nothing was exchanged, as in a dict that refuses it."""
    if len(held) != len(content):
        return False
    if isinstance(held, dict):
        return all(name in held and held[name] is value for name, value in content.items())
    return all(one is other for one, other in zip(held, content, strict=True))


@contextlib.contextmanager
def _layer_by_layer() -> Generator[None]:
    """Without the fused kernel that torch's transformer layers call in evaluation: it shows no linear layer."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def without_numbers(example: Any, model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """The example on the meta device. dtype: of its floats; None: the model's."""
    if dtype is None:
        dtype = next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)
    wanted = dtype

    def moved(leaf: Any) -> Any:
        return _on_meta(leaf, wanted) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(moved, example)


def _on_meta(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to("meta", dtype) if tensor.is_floating_point() else tensor.to("meta")


def is_named(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether these are values by name."""
    return isinstance(value, dict)


class LoadedSamples:
    """The samples of a user's DataLoader in the order of its dataset, from its start again when it is at its end.

    It may be called as a batch_fn(step, size).
    """

    def __init__(self, loader: DataLoader[Any]):
        self._dataset: Any = loader.dataset
        #: Makes a batch of a list of samples.
        self.collate = cast(Callable[[list[Any]], Any], loader.collate_fn)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped

    def samples(self, step: int, size: int) -> list[Any]:
        """Those of one step."""
        return [self._dataset[number % len(self._dataset)] for number in range(step * size, (step + 1) * size)]

    def __call__(self, step: int, size: int) -> Any:
        return self.collate(self.samples(step, size))


def is_placed(value: Any) -> TypeGuard[tuple[Any, ...]]:
    """Whether these are values in order."""
    return isinstance(value, tuple)


def as_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example (a tensor, a tuple, or a dict) as what a forward is called with."""
    if is_named(example):
        return (), example
    return example if is_placed(example) else (example,), {}


def example_of(model: nn.Module, batch: int = 2) -> Any:
    """Arguments that fit the model: every input of one of transformers, else ids, an image, sound or features."""
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
        f"layout: {type(model).__name__} does not begin with an embedding, convolution or linear layer, so Weft "
        "cannot tell what its input is. Give example=, the arguments of a forward."
    )


def _image(model: nn.Module, channels: int, batch: int) -> torch.Tensor:
    """An image of the first common size that the model takes, or of 64 pixels."""
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
    """What the model is called with, for any batch and sequence."""

    def __init__(self, model: nn.Module, example: Any):
        self.given = example is not None
        made = example_of(model) if example is None else example(0, 2) if callable(example) else example
        if callable(example):  # as the training step calls a model with its batch
            made = _model_inputs(made)
        self.example = tree_map(_to_meta, made)
        tensors = [leaf for leaf in tree_leaves(self.example) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not tensors:
            raise ModelError("its example holds no tensor. Return (model, example), with the arguments of a forward")
        self._batch = tensors[0].shape[0]
        ids = [each for each in tensors if not each.is_floating_point() and each.dim() == 2]
        bands = {module.in_channels for module in model.modules() if isinstance(module, nn.Conv1d)}  # before frames
        features = [
            each for each in tensors if each.is_floating_point() and each.dim() == 3 and each.shape[1] not in bands
        ]
        self.seq_len = (ids or features)[0].shape[1] if ids or features else 0
        self._sure = bool(ids)

    def call(self, model: nn.Module, batch: int, seq: int) -> Any:
        """Run the model on so many samples of so many tokens."""
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
        """Tokens of the shortest sequence to trace; 0 where the model reads none.

        longest: that it reads; a trace takes sequences of four times the shortest.
        """
        step = max(1, min(SHORTEST, (longest or 4 * SHORTEST) // 4))
        if not self.seq_len or self._sure:
            return step if self.seq_len else 0
        try:  # three dims of features may be a sequence; a model that has a fixed second dim takes no other
            with torch.no_grad():
                self.call(model, 2, self.seq_len + 1)
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return 0
        return step


def _model_inputs(made: Any) -> Any:
    """What of a batch a training step calls the model with."""
    first = made[0] if is_placed(made) else made
    return {name: each for name, each in first.items() if name != "labels"} if is_named(first) else first


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf
