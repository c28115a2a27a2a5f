"""Layers of transformers with a recurrent state: state spaces, linear attention and short convolutions (mixers).

They separate packed documents by running each document as a separate row. Documents of similar lengths form a batch,
in which rows are padded at the end. The state of a row depends only on its earlier tokens, so padding changes nothing.

B rows, T tokens of a row, D features, G documents of a group, L tokens of its longest document.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from weft.data.batches import host_values
from weft.errors import ModelError
from weft.models.inspect import hugging_face
from weft.models.inspect.blocks import class_before, repeated_blocks, replace_class

#: Short convolutions: their output depends only on the hidden states of the last few tokens.
CONVOLUTIONS = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"})
#: Classes whose output depends only on the hidden states of the same and earlier tokens of the row.
MIXERS = CONVOLUTIONS | {
    "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "OlmoHybridGatedDeltaNet",
    "LaraMiniGatedDeltaNet", "KimiLinearDeltaAttention", "BailingHybridDeltaAttention",
    "Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer",
    "Zamba2MambaMixer",
    "MambaMixer", "FalconMambaMixer", "JambaMambaMixer",
}  # fmt: skip
#: Arguments by which transformers' kernels separate documents. The fallbacks without kernels refuse them.
OF_KERNELS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_ATTRIBUTE, _ARGUMENT = "_weft_rows", "_weft_documents"


def state_mixers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside a module whose classes are in `MIXERS`, by path."""
    return {path: one for path, one in module.named_modules() if mixer_name(one) in MIXERS}


def mixer_name(module: nn.Module) -> str:
    """Return the class name of a module that transformers defines, or ""."""
    kind = class_before(module)
    return kind.__name__ if kind.__module__.startswith("transformers.models.") else ""


class Documents:
    """Documents of packed rows. borders: for each row the starts of its documents, and its length."""

    def __init__(self, borders: Sequence[Sequence[int]]):
        self.shape = (len(borders), borders[0][-1])
        self._borders = borders
        self._ranges: dict[tuple[int, int], Documents] = {}
        lengths = [(row * self.shape[1] + begin, end - begin)
                   for row, cuts in enumerate(borders) for begin, end in pairwise(cuts)]  # fmt: skip
        self._spans = sorted(lengths, key=lambda span: -span[1])
        self._indices: dict[torch.device, tuple[list[Tensor], Tensor]] = {}

    def indices(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Return (G, L) indices into (B * T) for each group of documents, and each token's index in the joined groups.

        A group's longest document has less than twice the tokens of its shortest.
        """
        if device not in self._indices:
            groups: list[Tensor] = []
            back, offset = torch.empty(self.shape[0] * self.shape[1], dtype=torch.int64), 0
            for _, members in groupby(self._spans, key=lambda span: span[1].bit_length()):
                starts_G, lengths_G = torch.tensor(list(members)).unbind(1)
                token_L = torch.arange(int(lengths_G[0]))
                take_GL = starts_G[:, None] + token_L.minimum(lengths_G[:, None] - 1)
                is_real_GL = token_L < lengths_G[:, None]
                back[take_GL[is_real_GL]] = offset + is_real_GL.flatten().nonzero().squeeze(1)
                groups.append(take_GL)
                offset += take_GL.numel()
            self._indices[device] = [take_GL.to(device) for take_GL in groups], back.to(device)
        return self._indices[device]

    def run_apart(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Return the output, (B, T, ...), of a function that gets each document as a separate row, (G, L, ...).

        rows: arguments of the function, (B, T, ...).
        """
        flat, (groups, back) = [x.flatten(0, 1) for x in rows], self.indices(rows[0].device)
        outputs = [function(*(x[take_GL] for x in flat)).flatten(0, 1) for take_GL in groups]
        return torch.cat(outputs)[back].unflatten(0, self.shape)

    def between(self, begin: int, end: int) -> Documents:
        """Return the documents of the tokens from `begin` to `end`. Tokens before the row, if any, are a document."""
        if (begin, end) not in self._ranges:
            inside = [[cut - begin for cut in cuts if begin < cut < end] for cuts in self._borders]
            self._ranges[begin, end] = Documents([[0, *cuts, end - begin] for cuts in inside])
        return self._ranges[begin, end]


def documents_of(ids_BT: Tensor) -> Documents | None:
    """Return the documents of rows from an id per token, or None if each row is one document.

    Raises ModelError if a document continues after another one.
    """
    known = host_values(ids_BT)
    ids_BT = ids_BT.detach().cpu() if known is None else known
    changes_BT = ids_BT.diff(dim=1) != 0
    if not bool(changes_BT.any()):
        return None
    borders: list[list[int]] = []
    for ids_T, changes_T in zip(ids_BT, changes_BT, strict=True):
        starts = [0, *(changes_T.nonzero().squeeze(1) + 1).tolist()]
        real = [one for one in ids_T[starts].tolist() if one >= 0]  # several ranges of padding may have the id -1
        if len(set(real)) < len(real):
            raise ModelError(
                "document_ids: a document continues after another one has begun, and states are carried from token to "
                "token. Use another id for each part."
            )
        borders.append([*starts, ids_BT.shape[1]])
    return Documents(borders)


class PackedRows:
    """The documents of the rows of a model's current call. `documents` is None if each row is one document."""

    def __init__(self, is_compiled: bool):
        self.documents: Documents | None = None
        self._is_compiled = is_compiled

    def begin(self, model: Any, ids_BT: Tensor) -> None:
        """Set the documents of a call of the model.

        Raises ModelError if a document continues after another one, or if rows have several documents and the model is
        compiled or uses gradient checkpointing of transformers.
        """
        documents = documents_of(ids_BT)
        if documents is not None and self._is_compiled:
            raise ModelError(
                f"compile=on: {type(model).__name__} separates the documents of a row by code that depends on their "
                "lengths, and a compiled graph does not. Use compile=off, or one document per row."
            )
        recomputes = model.training and any(getattr(one, "gradient_checkpointing", False) for one in model.modules())
        if documents is not None and recomputes:
            raise ModelError(
                f"gradient_checkpointing: {type(model).__name__} separates the documents of a row, and this "
                "recomputation does not repeat that. Use recompute=full of the plan instead."
            )
        self.documents = documents


def separate_states(model: nn.Module, *, is_compiled: bool = False) -> None:
    """Make the mixers of a transformers model separate the documents of `packed_rows(model)`. Modifies the model.

    Does nothing if the model has no mixers, if some are outside repeated blocks, or if it was called before.
    """
    mixers = state_mixers(model) if hugging_face.is_hugging_face(model) else {}
    blocks = [block for block in repeated_blocks(model).values() if state_mixers(block)]
    inside = {mixer for block in blocks for mixer in state_mixers(block).values()}
    if not mixers or not inside.issuperset(mixers.values()) or packed_rows(model) is not None:
        return
    rows = PackedRows(is_compiled)
    for mixer in mixers.values():
        replace_class(mixer, _DocumentMixer, _mixer_members, documents=None)
    for block in blocks:
        # The hook runs outside recomputation, and the recomputed forward gets its argument again.
        block.register_forward_pre_hook(_PassDocuments(rows), with_kwargs=True)
        replace_class(block, _DocumentBlock, _block_members)
    setattr(model, _ATTRIBUTE, rows)


def packed_rows(model: nn.Module) -> PackedRows | None:
    """Return the state that `separate_states` attached to this model, or None."""
    return getattr(model, _ATTRIBUTE, None)


def documents_in(mixer: nn.Module) -> Documents | None:
    """Return the documents of the rows that a mixer gets in the current call, or None if each row is one document."""
    return getattr(mixer, _ARGUMENT, None)


class _PassDocuments:
    def __init__(self, rows: PackedRows):
        self._rows = rows

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        documents = self._rows.documents
        return None if documents is None else (args, {**kwargs, _ARGUMENT: documents})


class _DocumentBlock(nn.Module):
    """Base class of blocks that pass documents to their mixers."""


class _DocumentMixer(nn.Module):
    """Base class of mixers that separate documents."""

    _weft_documents: Documents | None


def _block_members(kind: type) -> dict[str, Any]:
    plain: Callable[..., Any] = kind.forward  # pyright: ignore[reportAttributeAccessIssue] - a module class

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (documents := kwargs.pop(_ARGUMENT, None)) is None:
            return plain(self, *args, **kwargs)
        mixers = [one for one in self.modules() if isinstance(one, _DocumentMixer)]
        for mixer in mixers:
            mixer._weft_documents = documents
        try:
            return plain(self, *args, **kwargs)
        finally:
            for mixer in mixers:
                mixer._weft_documents = None

    return {"forward": forward}


def _mixer_members(kind: type) -> dict[str, Any]:
    plain: Callable[..., Tensor] = kind.forward  # pyright: ignore[reportAttributeAccessIssue] - a module class

    @functools.wraps(plain)
    def forward(
        self: _DocumentMixer, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        documents = self._weft_documents
        if documents is None:
            return plain(self, hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)
        if hidden_states.shape[:2] != documents.shape:
            raise ModelError(
                f"document_ids of shape {documents.shape}: {type(self).__name__} gets hidden states of shape "
                f"{tuple(hidden_states.shape)}. Use one document per row."
            )
        others = {name: value for name, value in kwargs.items() if name not in OF_KERNELS}

        def run(x_GLD: Tensor, mask_GL: Tensor | None = None) -> Tensor:
            return plain(self, x_GLD, cache=None, attention_mask=mask_GL, **others)

        return documents.run_apart(run, *(hidden_states, *(() if attention_mask is None else (attention_mask,))))

    return {"forward": forward}
