"""Documents that a script packs into rows, and tells the model by `position_ids` that begin anew within a row.

transformers looks for those where it makes a mask, unless there is a cache, which is its default, or a mask of padding;
some of its models never tell it. So a hook reads the borders off the positions before the model is called: on the host,
where Weft moved them, else on their device. A model whose layers read borders gets them, another one gets masks that
keep to them, and one in which documents see each other all the same is refused.

B sequences, T tokens, M places.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from weft.data.batch import host_values
from weft.errors import ModelError
from weft.models.attention import find_starts
from weft.parallel.layers.documents.mixed_documents import why_kind_mixes
from weft.parallel.layers.documents.packed_attention import (
    as_borders,
    is_told,
    reads_borders,
    reads_documents,
    within_documents,
)
from weft.structure import hugging_face

#: What holds the tokens before these: a document that goes on.
_CACHES = ("past_key_values", "cache", "cache_params", "state")


def follow_position_ids(model: nn.Module) -> None:
    """Let documents of a model of transformers stay apart where `position_ids` of a call begin anew, in place.

    Call it before anything else is done to the model. Other models are left alone.
    """
    if not hugging_face.is_hugging_face(model):
        return
    follower = _Follower(model)
    model.register_forward_pre_hook(follower.enter, with_kwargs=True)
    model.register_forward_hook(follower.leave, always_call=True)


class _Follower:
    """What a model's hooks know of it. The model is tried when positions first need it: most scripts give none."""

    def __init__(self, model: Any):
        self._kind, self._config = type(model), copy.deepcopy(model.config)
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._why: str | None = "" if reads_documents(model) else None
        self._open: list[contextlib.ExitStack] = []

    def __deepcopy__(self, memo: dict[int, object]) -> _Follower:
        return self  # it changes with nothing that a copy of the model does

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": []}

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call begins; returns its arguments where they become others."""
        stack = contextlib.ExitStack()
        self._open.append(stack)
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        ids_BT = None if is_told(module) else _document_ids(given)
        if ids_BT is None:
            return None
        starts_BM, device = find_starts(ids_BT), given["position_ids"].device  # None on a device, which is not asked
        if starts_BM is not None and starts_BM.shape[1] == 1:
            return None
        self._expect_apart(given["position_ids"], ids_BT)
        if not reads_borders(module):
            stack.enter_context(within_documents(_moved(ids_BT, device)))
            return None
        place = self._parameters.index("attention_mask")
        borders = _moved(as_borders(starts_BM, ids_BT), device)
        if place < len(args):
            return (*args[:place], borders, *args[place + 1 :]), kwargs
        return args, kwargs | {"attention_mask": borders}

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """The call ends, by an exception or not."""
        if self._open:
            self._open.pop().close()

    def _expect_apart(self, positions_BT: Tensor, ids_BT: Tensor) -> None:
        """Refuse positions that begin anew in a model in which documents of a row see each other.

        Where only the device knows, such a model waits for the answer in each call; no other one does.
        """
        if self._why is None:
            self._why = why_kind_mixes(self._kind, self._config)
        if self._why and bool((ids_BT[:, -1] != ids_BT[:, 0]).any()):
            raise ModelError(
                f"position_ids of shape {tuple(positions_BT.shape)}: they begin anew within a row, and {self._why}. "
                f"Give each document a row of its own, with padding behind it, or leave position_ids out if documents "
                f"may see each other."
            )


def _document_ids(given: dict[str, Any]) -> Tensor | None:
    """An id for each token, int64 (B, T), ascending; None where the call says nothing of documents, or all of them.

    On the host, where that knows positions and mask; else on their device. A document begins where a position does not
    follow the one before it, and padding lies in documents of its own.
    """
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if not isinstance(positions, Tensor) or not isinstance(tokens, Tensor) or positions.dim() != 2:
        return None  # positions of three axes, as of pictures, follow another rule
    if any(given.get(name) is not None for name in _CACHES) or (mask is not None and mask.dim() != 2):
        return None  # a document that goes on; a mask over pairs, which says what sees what
    if positions.shape[1] != tokens.shape[1] or positions.shape[1] < 2:
        return None
    on_host, mask_on_host = host_values(positions), None if mask is None else host_values(mask)
    if on_host is not None and (mask is None or mask_on_host is not None):
        positions, mask = on_host, mask_on_host
    begins_BT = positions.diff(dim=1) != 1
    if type(positions) is Tensor and positions.device.type == "cpu" and not bool(begins_BT.any()):
        return None
    if mask is not None and mask.shape == tokens.shape[:2]:
        begins_BT = begins_BT | (mask.diff(dim=1) != 0)
    ids_BT = torch.nn.functional.pad(begins_BT, (1, 0)).cumsum(1)
    return ids_BT.expand(tokens.shape[0], -1)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on a device; the host does not wait for the copy."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
