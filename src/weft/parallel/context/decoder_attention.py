"""Context parallelism of the project's decoders: the core of each attention is another one.

B sequences, T tokens of this rank, H query heads, K key-value heads, C width of one head.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from weft.errors import ModelError
from weft.memory import Handle, Opaque
from weft.models import Decoder
from weft.models.attention import Attention, SdpaCore, Visible
from weft.parallel.context.context_mode import Context
from weft.parallel.context.kernel import Scoring
from weft.private_torch import uncompiled


class ContextCore(SdpaCore):
    """Attention over a cut sequence while that is in use, else the decoder's own."""

    def __init__(self, context: Context):
        super().__init__()
        self.context: Context | None = context
        self.handle = Handle()

    @property
    def takes_ids(self) -> bool:
        """While the sequence is cut: documents go on past this rank's tokens, so ids tell them and not places."""
        return self.context is not None and self.context.in_use

    def forward(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, visible: Visible) -> Tensor:
        """Mix the values; (B, H, T, C)."""
        if self.context is None or not self.context.in_use:
            return super().forward(q_BHTC, k_BKSC, v_BKSC, visible)
        ids_BT = visible.document_ids_BT
        if self.handle.is_open:
            inputs = [q_BHTC, k_BKSC, v_BKSC] if ids_BT is None else [q_BHTC, k_BKSC, v_BKSC, ids_BT]
            return self.handle(q_BHTC.shape, q_BHTC.dtype, inputs)
        return self.attend(q_BHTC, k_BKSC, v_BKSC, ids_BT)

    @uncompiled
    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, ids_BT: Tensor | None = None) -> Tensor:
        """Over the whole sequence; (B, H, T, C)."""
        assert self.context is not None
        return self.context.attend(q_BHTC, k_BKTC, v_BKTC, Scoring(q_BHTC.shape[-1] ** -0.5), ids_BT)


def replace_cores(model: nn.Module, context: Context) -> int:
    """Give each attention of the model a ContextCore; returns how many there were."""
    found = [module for module in model.modules() if isinstance(module, Attention)]
    for attention in found:
        attention.core = ContextCore(context)
    if isinstance(model, Decoder):
        model.register_forward_pre_hook(_Places(context, model), with_kwargs=True)
    return len(found)


def hold_cores(model: nn.Module, opaque: Opaque) -> None:
    """Let compiled blocks hold attention over a cut sequence as an operator."""
    for core in [module for module in model.modules() if isinstance(module, ContextCore)]:
        core.handle = opaque.handle(_attend, core)


def _attend(core: ContextCore, inputs: Sequence[Tensor], numbers: Sequence[float]) -> Tensor:
    del numbers
    return core.attend(*inputs)


class _Places:
    """Before each forward: positions that were not given are places in the whole sequence."""

    def __init__(self, context: Context, model: Decoder):
        self._context: Context | None = context
        self._signature = inspect.signature(model.forward)
        self._longest = model.spec.max_seq_len if model.pos_embed is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Places:
        copied = object.__new__(_Places)
        copied.__dict__ = {**self.__dict__, "_context": None}
        return copied

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        context = self._context
        if context is None or not context.in_use:
            return None
        given = self._signature.bind(*args, **kwargs).arguments
        if given.get("cache") is not None:
            raise ModelError("cache: a cut sequence has none. Generate outside of training steps.")
        ids_BT = given["input_ids_BT"]
        seq_len = ids_BT.shape[1] * context.axis.size
        if self._longest is not None and seq_len > self._longest:
            raise ModelError(
                f"sequence of {seq_len} tokens: the model has a table of {self._longest} positions. "
                f"Use at most {self._longest} tokens, or a larger model.max_seq_len."
            )
        if given.get("positions_BT") is None:
            given["positions_BT"] = context.places(ids_BT.shape[1], ids_BT.device)[None]
        context.divide(seq_len, given.get("document_ids_BT"))  # in front of the blocks, which may be compiled
        return (), given
