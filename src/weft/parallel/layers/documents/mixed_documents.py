"""Whether documents of one row see each other in a model of transformers.

Many things let them: a state or a convolution that runs along the row, positions that a model counts by itself, a mask
that knows nothing of documents. No list of families can be complete, so a small model of the same class and config is
tried: in a row of three documents the first and the last are the same, and must give the same as that document alone.

A model whose attention reads borders is not tried. Nothing else in it mixes tokens, and it takes its positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.parallel.layers.documents.packed_attention import attend_in_documents, call_in_documents, reads_documents
from weft.parallel.layers.documents.small_copy import small_copy
from weft.structure import hugging_face

#: Tokens of the document that comes twice, and of the one between. A window is shorter than either.
_TWICE, _BETWEEN, _WINDOW = 11, 13, 6
#: Of the logits' spread: rounding stays below 1e-5, and the weakest leak that was found is 8e-2.
_LIMIT = 1e-3


def why_documents_mix(model: Any) -> str:
    """Say why packed documents do not stay apart in this model of transformers; "" where they do.

    model: on any device, before anything is done to it. It stays as it is, and so do random numbers.
    """
    if not hugging_face.is_hugging_face(model) or reads_documents(model):
        return ""
    return why_kind_mixes(type(model), model.config)


def why_kind_mixes(model_class: type[nn.Module], config: Any) -> str:
    """Say the same of a class of transformers whose layers do not read borders, and a config of it."""
    kind = config.model_type
    try:
        with hugging_face.quiet():  # it would speak of the small model
            difference = _difference(small_copy(model_class, config, window=_WINDOW))
    except Exception as error:  # other people's code, with sizes that it may not expect
        first = next(iter(str(error).strip().splitlines()), "")[:120].rstrip(".")
        return (
            f"Weft cannot show that documents of one row stay apart in a {kind} model, since a small one fails "
            f"({type(error).__name__}: {first})"
        )
    if difference < _LIMIT:
        return ""
    return f"documents of one row see each other in a {kind} model"


def _difference(model: Any) -> float:
    """How far logits of a document are from those of that document alone, over their spread."""
    attend_in_documents(model)
    tokens = torch.randint(5, 50, (_TWICE + _BETWEEN,), generator=torch.Generator().manual_seed(1))
    twice, between = tokens[:_TWICE], tokens[_TWICE:]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the process may go on as forks, which threads do not survive
    try:
        with torch.no_grad():
            alone = model(input_ids=twice[None], use_cache=False).logits
            row = call_in_documents(model, _packed(twice, between, twice)).logits
    finally:
        torch.set_num_threads(num_threads)
    spread = alone.std().clamp(min=1e-6)
    both = (row[:, :_TWICE] - alone).abs().max(), (row[:, -_TWICE:] - alone).abs().max()
    found = float(torch.stack(both).max() / spread)
    return found if found == found else float("inf")


def _packed(*documents: Tensor) -> dict[str, Tensor]:
    """One row of documents, as the loader gives it."""
    lengths = torch.tensor([len(one) for one in documents])
    return {
        "input_ids": torch.cat(documents)[None],
        "positions": torch.cat([torch.arange(len(one)) for one in documents])[None],
        "document_ids": torch.repeat_interleave(torch.arange(len(documents)), lengths)[None],
        "document_starts": (lengths.cumsum(0) - lengths)[None],
    }
