"""Where tokens of a sequence meet: as the class of a module says, and as one forward without numbers shows.

Sequence parallelism leaves each rank its own tokens, so blocks must not mix them outside of cut parts.

The hidden states that enter the blocks are marked with the dim of their tokens, and marks follow operations as those
of features do (`feature_flow.py`). Inside of cut parts tokens are whole, and may meet. An operation elsewhere that lets
them meet, such as a sum over tokens or a shift, is an error: each rank would do it with its own tokens, and nothing
would tell. An operation that is not known here ends the mark, without a word.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from weft.errors import LayoutError, ModelError
from weft.private_torch import named_modules, tree_leaves
from weft.spec import Style
from weft.structure import hugging_face
from weft.structure.blocks import has_params, repeated_blocks
from weft.structure.dry_run import call_without_numbers, example_of, in_some_format, without_numbers
from weft.structure.feature_flow import FeatureFlow, FlowStep, Mark, plain_name
from weft.structure.layers import KnownModel

_TOKENS = frozenset(("tokens",))
#: Operations along one dim: the place of `dim` among their arguments, and its default.
_ALONG: dict[str, tuple[int, int | None]] = {
    "cumsum": (1, None), "cumprod": (1, None), "logcumsumexp": (1, None), "cummax": (1, None), "cummin": (1, None),
    "argmax": (1, None), "argmin": (1, None),
    "max": (1, None), "min": (1, None), "median": (1, None), "std": (1, None), "prod": (1, None),
    "logsumexp": (1, None), "log_softmax": (1, -1), "normalize": (2, 1), "diff": (2, -1), "flip": (1, None),
    "roll": (2, None), "unfold": (1, None),
}  # fmt: skip
#: Of these, and of those along a dim, it is known that tokens meet where no mark comes out of them.
_MIXING = frozenset((
    *_ALONG, "mean", "sum", "var", "amax", "amin", "norm", "softmax", "layer_norm", "rms_norm", "linear", "matmul",
    "bmm", "pad", "conv1d", "split", "chunk", "getitem", "cat", "concat", "scaled_dot_product_attention",
    "multi_head_attention_forward",
))  # fmt: skip
#: What the names of classes say of tokens: attention lets them meet, and beside it states that go from token to token,
#: convolutions, and what reads several tokens at once.
_ATTENTION = ("attention", "attn")
_OTHERS = (
    "mamba", "ssm", "rnn", "lstm", "gru", "mixer", "shortconv", "deltanet", "recurrent", "rglru", "rwkv", "lightning",
    "fourier", "compressor",
)  # fmt: skip
#: Families carry such a word in the names of all their modules.
_NEVER = ("norm", "mlp", "embedding", "embeddings")

#: Blocks that are followed from the last new kind on: what passes from one to the next is seen, too.
_MORE = 3


def mixing(module: nn.Module) -> str:
    """By what a module with weights mixes the tokens of a sequence, as its class says: "attention", "convolution" over
    two dims or of a causal kernel, "other", or "" where it is none of those."""
    if isinstance(module, nn.Conv1d | nn.RNNBase):
        return "other"
    if not has_params(module):
        return ""
    kind = type(module).__name__.lower()
    if not kind.endswith(_NEVER):
        for what, words in (("other", _OTHERS), ("attention", _ATTENTION), ("convolution", ("conv1d",))):
            if any(word in kind for word in words):
                return what
    return "convolution" if isinstance(module, nn.Conv2d) else ""


def check_tokens(
    model: nn.Module, styles: Mapping[str, Style], gathering: Collection[str], width: int, where: str = "sp=on",
    remedy: str = "Use sp=off.", blocks: Mapping[str, nn.Module] | None = None,
) -> None:  # fmt: skip
    """Look for blocks of a foreign model that mix tokens outside of cut parts; warn where the model cannot be traced.

    Args:
        model: the whole one.
        styles: of its cut layers.
        gathering: modules whose inputs are brought together, and whose outputs are cut again, as the parts around cut
            layers are.
        width: features of the hidden states.
        where: the setting that cuts tokens, for messages.
        remedy: what helps.
        blocks: whose tokens are cut, by path; None: all of the model's.

    Raises:
        LayoutError: where a block mixes them.
    """
    if isinstance(model, KnownModel):
        return
    try:
        example = example_of(model, batch=1)
        flow = in_some_format(lambda dtype: _TokenFlow(model, styles, gathering, width, blocks).follow(example, dtype))
    except (LayoutError, ModelError) as error:
        warnings.warn(
            f"{where}: {str(error).removeprefix('layout: ').partition('. Give')[0].rstrip('.')}, so Weft cannot tell "
            "whether its blocks mix tokens between cut layers. Run `weft verify` on it.",
            stacklevel=2,
        )
        return
    for path, operation in flow.mixed.items():
        raise LayoutError(
            f"{where}: {path} ({type(model.get_submodule(path)).__name__}) mixes tokens by `{operation}` outside of "
            f"cut layers, so it would see only a part of them. {remedy}"
        )


class _Enough(BaseException):
    """All kinds of blocks have been seen. Not an Exception: models may catch those."""


def _first_of_each_kind(blocks: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The blocks up to the last whose modules are not those of one before it, and the next two."""
    kinds = [tuple((name, type(module)) for name, module in named_modules(block)) for block in blocks.values()]
    last = max(index for index, kind in enumerate(kinds) if kind not in kinds[:index])
    return tuple(blocks)[: last + _MORE]


class _TokenFlow(FeatureFlow):
    """Marks of tokens in one forward. mixed: where tokens met, by module, and in which operation."""

    def __init__(
        self, model: nn.Module, styles: Mapping[str, Style], gathering: Collection[str], width: int,
        blocks: Mapping[str, nn.Module] | None,
    ):  # fmt: skip
        super().__init__()
        self.mixed: dict[str, str] = {}
        self._model, self._styles, self._gathering, self._width = model, styles, gathering, width
        self._blocks = _first_of_each_kind(repeated_blocks(model) if blocks is None else blocks)
        self._stack: list[str] = []
        self._depth = 0  # of cut parts, in which tokens are whole
        self._is_between = False  # the first block and the last

    def follow(self, example: Any, dtype: torch.dtype | None) -> _TokenFlow:
        """Call the model under watch, as far as the blocks are new."""
        handles: list[RemovableHandle] = []
        for path, module in named_modules(self._model):
            handles.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(path)))
        try:
            call_without_numbers(self._model, without_numbers(example, self._model, dtype), self, dtype)
        except _Enough:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return self

    def _is_whole(self, path: str) -> bool:
        style = self._styles.get(path)
        return path in self._gathering or (style is not None and style.name in ("colwise", "rowwise"))

    def _enter(self, path: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            del module
            self._stack.append(path)
            if path == self._blocks[0]:
                self._is_between = True
            if path in self._blocks:
                self._mark_hidden((args, kwargs))
            self._depth += self._is_whole(path)

        return before

    def _leave(self, path: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            del module, args
            self._stack.pop()
            if self._is_whole(path):
                self._depth -= 1
                if self._depth == 0 and (path in self._gathering or self._styles[path].name == "rowwise"):
                    self._mark_hidden(output)
            if path == self._blocks[-1]:
                raise _Enough

        return after

    def _mark_hidden(self, values: Any) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.shape[-1:] == (self._width,):
                if leaf.dim() >= 2:
                    self.mark(leaf, Mark(_TOKENS, leaf.dim() - 2, leaf.shape[-2]))
                return

    def _pass_on(self, func: Any, args: Any, kwargs: Any, marked: list[Any], outputs: list[torch.Tensor]) -> None:
        if self._depth or not self._is_between:
            return
        marks = [mark for leaf in marked if (mark := self.of(leaf)) is not None]
        step = _TokenStep(self, plain_name(func), args, kwargs, marks, outputs)
        made = list(step.marks(marked))
        if not made and not step.is_unknown and step.name in _MIXING:
            self.mixed.setdefault(self._stack[-1], step.name)
        for tensor, mark in made:
            self.mark(tensor, mark)


class _TokenStep(FlowStep):
    """One operation on tensors whose tokens are marked. is_unknown: whether nobody knows what it does to them."""

    is_unknown = False

    def marks(self, marked: list[Any]) -> Iterator[tuple[torch.Tensor, Mark]]:
        """What each output carries; nothing where tokens meet, or nobody knows."""
        if self.name in _ALONG and not isinstance(self._argument(1, "other"), torch.Tensor):
            place, default = _ALONG[self.name]
            yield from self._along(self._argument(place, "dims" if self.name in ("flip", "roll") else "dim", default))
        elif self.name in ("min", "max"):  # of two tensors
            yield from self._pointwise(marked)
        else:
            yield from super().marks(marked)

    def _along(self, dims: Any) -> Iterator[tuple[torch.Tensor, Mark]]:
        rank = self.args[0].dim()
        if dims is None or isinstance(dims, torch.Tensor):
            return
        dims = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
        if self.first.dim not in dims:
            lost = rank - self.outputs[0].dim()
            yield from self._keep(self.first.dim - (lost and sum(dim < self.first.dim for dim in dims)))

    def _pointwise(self, marked: list[Any]) -> Iterator[tuple[torch.Tensor, Mark]]:
        yield from self._keep(self.first.dim + self.outputs[0].dim() - marked[0].dim())

    def _linear(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        if self.first.dim != self.args[0].dim() - 1:
            yield from self._keep(self.first.dim)

    def _pad(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        place = 2 * (self.args[0].dim() - 1 - self.first.dim)
        if not any(self._argument(1, "pad")[place : place + 2]):
            yield from self._keep(self.first.dim)

    def _conv1d(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        if self.first.dim != self.args[0].dim() - 1 or self._argument(1, "weight").shape[-1] == 1:
            yield from self._keep(self.first.dim)

    def _getitem(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        index = self.args[1] if isinstance(self.args[1], tuple) else (self.args[1],)
        self.is_unknown = any(isinstance(part, torch.Tensor | list) for part in index)
        yield from super()._getitem()

    def _split(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        if self._argument(2, "dim", 0) % self.args[0].dim() != self.first.dim:
            yield from self._keep(self.first.dim)

    _chunk = _split_with_sizes = _tensor_split = _split

    def _cat(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        if self._argument(1, "dim", 0) % self.outputs[0].dim() != self.first.dim:
            yield from self._keep(self.first.dim)

    _concat = _cat

    def _matmul(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        left, right = (self.flow.of(one) for one in self.args[:2])
        rank, (first, second) = self.outputs[0].dim(), (one.dim() for one in self.args[:2])
        if (left is not None and left.dim == first - 1) or (right is not None and right.dim == second - 2):
            return
        if left is not None:
            yield from self._keep(left.dim + rank - first)
        elif right is not None:
            yield from self._keep(right.dim + rank - second)

    _bmm = _matmul

    def _scaled_dot_product_attention(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        if all((mark := self.flow.of(one)) is None or mark.dim != one.dim() - 2 for one in self.args[:3]):
            yield from self._keep(self.first.dim)


def why_fixed_attention(model: Any) -> str:
    """Why calls of attention of this model of transformers cannot be replaced; "" where they can."""
    kind = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        return f"the attention of {kind} cannot be replaced from outside (_supports_attention_backend is not set)"
    if hugging_face.attention_heads(model) is None:
        return f"{kind} gives no single number of attention heads"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{kind} takes no position_ids"
    if getattr(getattr(model, "config", None), "trigram_input", False):
        return f"{kind} reads the embeddings of neighbouring tokens together (trigram_input)"
    for path, block in repeated_blocks(model).items():
        for name, module in named_modules(block):
            if mixing(module) == "other":
                place = f"{path}.{name}" if name else path
                return f"{place} ({type(module).__name__}) mixes tokens by something other than attention"
    return ""
