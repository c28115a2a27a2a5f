"""The description of any module for the planner: its work by tracing, and which plans the runtime can lay it over.

weft.search(weft.trace("package.module:function"), "8xh100")
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from weft.errors import LayoutError, ModelError
from weft.memory import repeated_blocks
from weft.models import Decoder, call_function
from weft.models.trace import Structure, trace_model
from weft.parallel.context.hugging_face import is_hugging_face
from weft.parallel.layout_find import explain_layout, find_lm_head
from weft.parallel.numberless import example_of
from weft.parallel.pipeline.chain import find_chain
from weft.parallel.placement.precision import Precision, cast_inputs, formats
from weft.parallel.tensor.cut_tensors import check_layout
from weft.spec import Layout, Limit, TracedModel

#: Tokens of the shortest sequence that is traced; the longest has three times as many.
_STEP = 8
_STYLES = {"colwise": "columns", "rowwise": "rows", "vocab": "vocab"}


def trace(source: str) -> TracedModel:
    """The description of the model that `package.module:function` returns, for `weft.search` and `weft plan`.

    The function is called with meta as the default device and without arguments. It returns a model; or a model and
    an example: the arguments of its forward (a tensor, a tuple, or a dict), or batch_fn(step, size) as `weft verify`
    takes it. Without an example the model is called with ids, an image or features, by how it begins.
    Raises ModelError where that gives no model, or the model does not run without numbers.
    """
    with torch.device("meta"):
        model, rest = call_function(source)
    try:
        return replace(describe_by_tracing(model, rest[0] if rest else None), name=source)
    except ModelError as error:
        raise ModelError(f"model={source}: {str(error).rstrip('.')}.") from error


def describe_by_tracing(model: nn.Module, example: Any = None) -> TracedModel:
    """Trace a model, which is brought to the meta device and half precision, in place.

    example: arguments of a forward, or batch_fn(step, size); None: ids, an image or features, by how it begins.
    """
    inputs = _Inputs(model, example)
    model.to("meta").train()
    if isinstance(model, Decoder) and model.spec.num_experts:
        raise ModelError("its experts take as many tokens as values say. Give its size, or a config of Weft")
    cut, styles, why_not = _tensor_parallel(model, inputs.example)
    head = find_lm_head(model) or _vocabulary_head(model, styles)
    structure = Structure(
        blocks=repeated_blocks(model), styles=styles, head=head, table=_input_table(model, styles) if head else None
    )
    _halve(model)
    step = inputs.sequence_step(model)
    with _one_document():
        found = trace_model(model, structure, inputs.call, seq_step=step)
    limits = dict(_limits(model, found, cut, why_not))
    longest = _longest(model) if step else 1
    usual = inputs.seq_len if step and inputs.given else 0
    return replace(
        found, limits=tuple(limits.items()), max_seq_len=longest, default_seq_len=usual or (0 if step else 1)
    )


class _Inputs:
    """What the model is called with, for any batch and sequence."""

    def __init__(self, model: nn.Module, example: Any):
        self.given = example is not None
        made = example_of(model) if example is None else example(0, 2) if callable(example) else example
        if callable(example):  # as the training step calls a model with its batch
            made = made[0] if isinstance(made, tuple) else made
            made = {name: each for name, each in made.items() if name != "labels"} if isinstance(made, dict) else made
        self.example = tree_map(_to_meta, made)
        tensors = [leaf for leaf in tree_leaves(self.example) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not tensors:
            raise ModelError("its example holds no tensor. Return (model, example), with the arguments of a forward")
        self._batch = tensors[0].shape[0]
        ids = [each for each in tensors if not each.is_floating_point() and each.dim() == 2]
        features = [each for each in tensors if each.is_floating_point() and each.dim() == 3]
        self.seq_len = (ids or features)[0].shape[1] if ids or features else 0
        self._sure = bool(ids)

    def call(self, model: nn.Module, batch: int, seq: int) -> Any:
        """Run the model on so many samples of so many tokens."""
        with torch.device("meta"):
            made = tree_map(lambda leaf: self._sized(leaf, batch, seq), self.example)
            args, kwargs = ((), made) if isinstance(made, dict) else (made if isinstance(made, tuple) else (made,), {})
            return model(*args, **kwargs)

    def _sized(self, leaf: Any, batch: int, seq: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        shape = list(leaf.shape)
        shape[0] = batch if shape[0] == self._batch else shape[0]
        if seq and len(shape) > 1 and shape[1] == self.seq_len:
            shape[1] = seq
        return torch.zeros(shape, dtype=leaf.dtype, device="meta")

    def sequence_step(self, model: nn.Module) -> int:
        """Tokens of the shortest sequence to trace; 0 where the model reads none."""
        if not self.seq_len or self._sure:
            return _STEP if self.seq_len else 0
        try:  # three dims of features may be a sequence; a model that has a fixed second dim takes no other
            with torch.no_grad():
                self.call(model, 2, self.seq_len + 1)
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return 0
        return _STEP


@contextlib.contextmanager
def _one_document() -> Iterator[None]:
    """Models of transformers look at the values of positions for where documents begin: here each sample is one."""
    masks = sys.modules.get("transformers.masking_utils")
    look = getattr(masks, "find_packed_sequence_indices", None)
    if masks is None or look is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda *args, **kwargs: None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = look  # pyright: ignore[reportAttributeAccessIssue]


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _halve(model: nn.Module) -> None:
    """The formats that a run in bf16 has."""
    precision = Precision(torch.bfloat16, torch.float32, torch.float32)
    for param, dtype in formats(model, precision).items():
        param.data = param.data.to(dtype)
    cast_inputs(model, precision)
    config = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False


def _tensor_parallel(model: nn.Module, example: Any) -> tuple[tuple[int, ...], dict[str, str], str]:
    """Legal values of tp, the style of each module that it cuts, and why there are no other values."""
    try:
        layout = explain_layout(model, example).layout
        legal = check_layout(model, layout)
    except (LayoutError, ModelError) as error:
        return (1,), {}, str(error).partition(". ")[0].removeprefix("layout: ").rstrip(".")
    shown = ", ".join(map(str, legal))
    return tuple(legal), _styles(model, layout), f"its layers can be shared evenly by {shown} ranks"


def _styles(model: nn.Module, layout: Layout) -> dict[str, str]:
    found = {path: layout.style(path) for path, _ in model.named_modules()}
    return {path: _STYLES[style.name] for path, style in found.items() if style is not None and style.name in _STYLES}


def _vocabulary_head(model: nn.Module, styles: Mapping[str, str]) -> nn.Module | None:
    modules = dict(model.named_modules())
    cut = [modules[path] for path, style in styles.items() if style == "vocab"]
    return next((each for each in cut if isinstance(each, nn.Linear)), None)


def _input_table(model: nn.Module, styles: Mapping[str, str]) -> nn.Module | None:
    modules = dict(model.named_modules())
    return next((modules[path] for path, style in styles.items()
                 if style == "vocab" and isinstance(modules[path], nn.Embedding)), None)  # fmt: skip


def _limits(model: nn.Module, found: TracedModel, cut: tuple[int, ...], why_cut: str) -> list[tuple[str, Limit]]:
    """The fields of a plan that this model narrows."""
    limits = [("tp", Limit(cut, why_cut))]
    kind = type(model).__name__
    attention = found.attention
    if not found.reads_sequence:
        limits += [(name, Limit((value,), "the model reads no sequence that could be cut"))
                   for name, value in (("cp", 1), ("sp", 0))]  # fmt: skip
    elif not isinstance(model, Decoder) and not is_hugging_face(model):
        rule = f"{kind} is neither one of Weft's decoders nor one of transformers, so its attention cannot be replaced"
        limits.append(("cp", Limit((1,), rule)))
    elif attention is None or not attention.causal:
        limits.append(("cp", Limit((1,), "its attention is not torch's fused one under a causal mask alone")))
    if any(each.batch.one > 1 for layer in found.layers for each in layer.matmuls):
        rule = "tracing does not tell which modules are experts. Plan it by its config.json to divide them"
        limits.append(("ep", Limit((1,), rule)))
    try:
        find_chain(model)
    except ModelError as error:
        rule = str(error).partition(". ")[0].partition(": ")[2] or str(error)
        limits.append(("pp", Limit((1,), rule.rstrip("."))))
    return limits


def _longest(model: nn.Module) -> int:
    """Tokens that the model reads at most, where it says so."""
    config = getattr(model, "config", None) or getattr(model, "spec", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2**20
