"""Document masking in transformers models, and a test of it on a small copy of the model."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.shapes.hugging_face_config import number, resize
from weft.data.batches import host_values
from weft.devices import access
from weft.errors import ModelError
from weft.models.attention import document_attention, find_starts, ids_of
from weft.models.inspect import hugging_face, token_flow
from weft.parallel.layers.state_mixers import packed_rows, separate_states

#: Sizes of the small copy. Heads times head dim equals the model width, which many configs assume.
_SIZES = {
    "vocab": 61, "hidden": 32, "heads": 4, "head_dim": 8, "rope_dim": 8, "q_rank": 8, "kv_rank": 8, "ffn": 32,
    "expert_ffn": 8, "num_experts": 4, "top_k": 2, "groups": 2, "top_groups": 1, "positions": 64, "dense_layers": 1,
    "expand": 1,
}  # fmt: skip
#: Token ids above this are ordinary tokens in all models.
_LAST_PADDING = 4
#: A list with more distinct values than this does not encode layer kinds.
_MOST_KINDS = 4


def small_copy(model_class: type[nn.Module], config: Any, *, window: int) -> nn.Module:
    """Build a small transformers model of the same class, with a smaller config and random weights in fp32.

    It contains at least one layer of each kind. Propagates the errors of transformers if the sizes do not fit. window:
    length in tokens of its attention windows and chunks, if it has any.
    """
    config = copy.deepcopy(config)
    for part in _parts(config):
        _make_small(part, window)
    return _filled(model_class, config)


def _parts(config: Any) -> list[Any]:
    inner = [part for name, part in vars(config).items() if name.endswith("_config")]
    return [config, *(part for part in inner if hasattr(part, "to_dict"))]


def _make_small(config: Any, window: int) -> None:
    num_layers = number(config, "layers") or 0
    kinds = _kinds(config, num_layers)
    few = max(2, 1 + max((rows.index(kind) for rows in kinds.values() for kind in rows), default=0))
    heads, kv_heads = number(config, "heads"), number(config, "kv_heads")
    # The latent of DeepSeek's attention gives each head separate keys.
    shared = kv_heads is not None and kv_heads != heads and number(config, "kv_rank") is None
    resize(config, **_SIZES, window=window, kv_heads=min(2, kv_heads or 1) if shared else _SIZES["heads"])
    for name, value in kinds.items():
        with contextlib.suppress(AttributeError, NotImplementedError):  # a derived property
            setattr(config, name, value[:few])
    resize(config, layers=min(few, num_layers) or few)
    if type(getattr(config, "qk_head_dim", None)) is int:
        with contextlib.suppress(AttributeError):
            config.qk_head_dim = _SIZES["head_dim"] + _SIZES["rope_dim"]
    if (getattr(config, "pad_token_id", None) or 0) > _LAST_PADDING:
        resize(config, padding=0)


def _kinds(config: Any, num_layers: int) -> dict[str, list[Any]]:
    """Return the config's lists that have an entry per layer and few distinct values, as lists of layer kinds do."""
    names = {*vars(config), "layer_types", "layers_block_type"}
    found = {name: getattr(config, name, None) for name in sorted(names)}
    return {
        name: list(value)
        for name, value in found.items()
        if isinstance(value, list | tuple) and len(value) == num_layers and len(set(map(str, value))) <= _MOST_KINDS
    }


def _filled(kind: type[nn.Module], config: Any) -> nn.Module:
    """Build the model, with weights large enough that tokens affect each other. The global RNG state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = kind(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.mul_(5.0)
                elif "bias" in name:
                    parameter.normal_(std=0.1)
    return model


# Attention of Hugging Face models within the documents of packed sequences, without a (T, T) mask.

#: transformers' name for torch's fused attention, and the name of its replacement.
_OWN, _NAME = "sdpa", "weft_sdpa_by_documents"
_READY = "_weft_reads_documents"
#: Attributes of a model: its first position, and a flag that is True while `call_in_documents` runs.
_FIRST, _TOLD = "_weft_first_position", "_weft_is_told_documents"
#: Dtypes by which masks with document boundaries are recognized: start positions, or document ids.
_PLACES, _IDS = torch.int64, torch.int32
#: Attention arguments of some models that are possible only with a (T, T) mask.
_BESIDE = ("softcap", "s_aux", "position_bias", "head_mask", "indices")


def reads_documents(model: nn.Module) -> bool:
    """Return True if `attend_in_documents` can make this model's layers use document boundaries."""
    return hugging_face.is_hugging_face(model) and _is_usual(model)


def attend_in_documents(model: nn.Module) -> None:
    """Make attention layers of a causal transformers model use the boundaries that `borders_of` returns.

    Modifies the model. Its layers with a recurrent state are also changed to separate documents. Does nothing for other
    models.
    """
    separate_states(model)
    if not reads_documents(model):
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    ALL_ATTENTION_FUNCTIONS.register(_NAME, partial(_attend, ALL_ATTENTION_FUNCTIONS[_OWN]))
    masks.register(_NAME, masks[_OWN])
    copies: dict[int, Any] = {}
    for module in model.modules():
        if hugging_face.attention_name(module) is None:
            continue
        config: Any = module.config
        if id(config) not in copies:
            copies[id(config)] = copy.copy(config)
            copies[id(config)]._attn_implementation_internal = _NAME
        module.config = copies[id(config)]
    setattr(model, _READY, True)


def borders_of(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the forward arguments that pass the document boundaries of a loader's batch.

    Empty if the model's layers do not use boundaries, or if the batch has only document ids and `find_starts` cannot
    compute the boundaries. For a batch without document ids and starts, the result is a mask without elements, so that
    transformers does not search for boundaries.
    """
    if not reads_borders(model):
        return {}
    starts_BM, ids_BT = batch.get("document_starts"), batch.get("document_ids")
    if starts_BM is None and ids_BT is not None:
        starts_BM = find_starts(ids_BT)
        if starts_BM is None:
            return {}
    if starts_BM is None:
        starts_BM = torch.empty((1, 0), dtype=torch.int64, device=batch["input_ids"].device)
    return {"attention_mask": as_borders(starts_BM)}


def as_borders(starts_BM: Tensor | None, ids_BT: Tensor | None = None) -> Tensor:
    """Return an attention mask that encodes document boundaries: (B, 1, 1, M) of starts, or (B, 1, 1, T) of ids.

    starts_BM: start positions, padded with the row length to M columns, or None if counting them would need a device
    sync. ids_BT: ascending document id per token, used if `starts_BM` is None.
    """
    if starts_BM is not None:
        return starts_BM[:, None, None]
    assert ids_BT is not None
    return ids_BT.to(_IDS)[:, None, None]


def reads_borders(model: nn.Module) -> bool:
    """Return True if `attend_in_documents` has made this model's layers use document boundaries."""
    return getattr(model, _READY, False)


def call_in_documents(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Call a causal transformers model on a packed batch. Tokens attend only within their document.

    If `borders_of` returns no boundaries, the call runs inside `in_documents`.
    """
    if not hasattr(model, _FIRST):
        setattr(model, _FIRST, hugging_face.first_position(model))
    borders, ids_BT = borders_of(model, batch), batch.get("document_ids")
    places = {"input_ids": batch["input_ids"], "position_ids": batch["positions"] + getattr(model, _FIRST)}
    setattr(model, _TOLD, True)
    try:
        with in_documents(model, ids_BT) if ids_BT is not None and not borders else contextlib.nullcontext():
            return model(**places, use_cache=False, **borders)
    finally:
        setattr(model, _TOLD, False)


def has_documents(model: nn.Module) -> bool:
    """Return True while `call_in_documents` runs, which passes the document boundaries."""
    return getattr(model, _TOLD, False)


@contextlib.contextmanager
def in_documents(model: nn.Module, ids_BT: Tensor) -> Generator[None]:
    """Within the context, separate documents in the masks and recurrent states of a transformers model.

    Raises ModelError if the recurrent states cannot be separated.
    """
    rows = packed_rows(model)
    if rows is not None:
        rows.begin(model, ids_BT)
    try:
        with within_documents(ids_BT):
            yield
    finally:
        if rows is not None:
            rows.documents = None


@contextlib.contextmanager
def within_documents(ids_BT: torch.Tensor) -> Generator[None]:
    """Within the context, restrict every mask that transformers builds for rows of this length to documents.

    Some models (OPT, gpt-oss) have positions but do not pass them when they build a mask. Others (BioGPT) pass a mask
    of ones, and then transformers ignores positions.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    known: Any = getattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS", {})
    before = {name: known[name] for name in known}
    num_tokens = ids_BT.shape[1]

    def made(own: Any, **given: Any) -> Any:
        if given.get("q_length") != num_tokens or given.get("kv_length") != num_tokens:
            return own(**given)
        given["mask_function"] = masks.and_masks(given["mask_function"], masks.packed_sequence_mask_function(ids_BT))
        return own(**given | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    try:
        for name, own in before.items():
            known[name] = partial(made, own)
        yield
    finally:
        for name, own in before.items():
            known[name] = own


def _is_usual(model: Any) -> bool:
    """Return True if all layers are causal and use torch's fused attention, and nothing else reads the mask."""
    takes = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    layers = [module for module in model.modules() if hasattr(module, "is_causal")]
    return (
        "attention_mask" in takes
        and importlib.util.find_spec("transformers.masking_utils") is not None
        and {hugging_face.attention_name(module) for module in model.modules()} <= {None, _OWN}
        and bool(layers)
        and all(layer.is_causal and not hugging_face.attention_chunk(layer) for layer in layers)
        and not getattr(config, "output_router_logits", False)  # whose loss reads the mask
        and not any(map(_reads_mask, model.modules()))
        and not token_flow.why_fixed_attention(model)
    )


def _reads_mask(module: nn.Module) -> bool:
    """Return True if a module takes the mask but contains no attention, such as an indexer of sparse attention."""
    takes = "attention_mask" in inspect.signature(module.forward).parameters
    return takes and not any(hasattr(one, "is_causal") for one in module.modules())


def _attend(
    own: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention with the interface of transformers: (B, H, T, C) in, (B, T, H, C) out.

    `own` is the function that this one replaces. It is bound in advance because compiled blocks cannot look up a name.
    """
    how = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    if attention_mask is None or attention_mask.dtype not in (_PLACES, _IDS):
        return own(module, query, key, value, attention_mask, **how)
    num_tokens, window = query.shape[2], kwargs.get("sliding_window")
    window = None if window is None or window >= num_tokens else window
    starts_BM, ids_BT = attention_mask[:, 0, 0], None
    if attention_mask.dtype == _IDS:
        starts_BM, ids_BT = None, starts_BM
    elif starts_BM.shape[1] == 0 and window is None:
        return own(module, query, key, value, None, **how)
    if dropout or any(kwargs.get(name) is not None for name in _BESIDE):
        return own(module, query, key, value, _mask(starts_BM, ids_BT, num_tokens, window), **how)
    usual = query.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    return document_attention(query, key, value, starts_BM, ids_BT, window).transpose(1, 2).contiguous(), None


def _mask(starts_BM: Tensor | None, ids_BT: Tensor | None, num_tokens: int, window: int | None) -> Tensor:
    """Return the causal attention mask of documents and window, bool (B, 1, T, T). True: attend."""
    if ids_BT is None:
        assert starts_BM is not None
        ids_BT = ids_of(starts_BM, num_tokens)
    place_T = torch.arange(num_tokens, device=ids_BT.device)
    seen = (ids_BT[:, :, None] == ids_BT[:, None, :]) & (place_T[:, None] >= place_T)
    if window is not None:
        seen = seen & (place_T[:, None] - place_T < window)
    return seen[:, None]


# Test whether tokens attend to other documents of their row in a transformers model.

#: Lengths of a document that a row contains twice, and of the one between. The window is shorter than both.
_TWICE, _BETWEEN, _WINDOW = 11, 13, 6
#: Limit of the difference in standard deviations of the logits. Rounding is below 1e-5, the weakest leak found is 8e-2.
_LIMIT = 1e-3


def why_documents_mix(model: Any) -> str:
    """Return the reason why packed documents affect each other in this transformers model, or "" if they do not.

    Returns "" for models of other libraries. `model` may be on any device and must be unmodified. The model and the RNG
    state are not changed.
    """
    if not hugging_face.is_hugging_face(model) or reads_documents(model):
        return ""
    return why_kind_mixes(type(model), model.config)


def why_kind_mixes(model_class: type[nn.Module], config: Any) -> str:
    """Return the reason why packed documents affect each other in models of this class, or "".

    Compares a packed row with its documents alone, on a small random copy. Returns a reason if the copy fails.
    """
    kind = config.model_type
    try:
        with hugging_face.quiet():  # its messages would describe the small model
            difference = _difference(small_copy(model_class, config, window=_WINDOW))
    except Exception as error:  # third-party code, with sizes that it may not support
        first = next(iter(str(error).strip().splitlines()), "")[:120].rstrip(".")
        return (
            f"Weft cannot show that documents of one row stay apart in a {kind} model, since a small one fails "
            f"({type(error).__name__}: {first})"
        )
    if difference < _LIMIT:
        return ""
    return f"documents of one row see each other in a {kind} model"


def _difference(model: Any) -> float:
    """Return the largest difference between a document's logits in a packed row and alone, inf if there are NaNs.

    The unit is the standard deviation of the logits.
    """
    attend_in_documents(model)
    tokens = torch.randint(5, 50, (_TWICE + _BETWEEN,), generator=torch.Generator().manual_seed(1))
    twice, between = tokens[:_TWICE], tokens[_TWICE:]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the process may fork later, and threads do not survive a fork
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
    lengths = torch.tensor([len(one) for one in documents])
    return {
        "input_ids": torch.cat(documents)[None],
        "positions": torch.cat([torch.arange(len(one)) for one in documents])[None],
        "document_ids": torch.repeat_interleave(torch.arange(len(documents)), lengths)[None],
        "document_starts": (lengths.cumsum(0) - lengths)[None],
    }


# Documents that a training script packs into rows, with `position_ids` that restart at each document.

#: Arguments that hold earlier tokens. With them, the first document continues an earlier one.
_CACHES = ("past_key_values", "cache", "cache_params", "state")


def separate_by_position_ids(model: nn.Module) -> None:
    """Add hooks to a transformers model that separate packed documents if `position_ids` restart within a row.

    Call it before any other change to the model. Models of other libraries are not changed.
    """
    if not hugging_face.is_hugging_face(model):
        return
    follower = DocumentTracker(model)
    model.register_forward_pre_hook(follower.enter, with_kwargs=True)
    model.register_forward_hook(follower.leave, always_call=True)


class DocumentTracker:
    """Hooks of a model that separate documents where `position_ids` restart within a row.

    A model is tested for documents that affect each other when it first gets restarting positions.
    """

    def __init__(self, model: Any):
        self._kind, self._config = type(model), copy.deepcopy(model.config)
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._why: str | None = "" if reads_documents(model) else None
        self._open: list[contextlib.ExitStack] = []

    def __deepcopy__(self, memo: dict[int, object]) -> DocumentTracker:
        return self  # its state does not depend on the copy

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": []}

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a call to the model as `begin`, unless `call_in_documents` passes the documents."""
        if has_documents(module):
            self._open.append(contextlib.ExitStack())
            return None
        return self.begin(module, args, kwargs)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a call to the model, and separate documents where `position_ids` restart.

        Returns new arguments, or None if they do not change. Raises ModelError if documents would affect each other.
        """
        stack = contextlib.ExitStack()
        self._open.append(stack)
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        ids_BT = _document_ids(given)
        if ids_BT is None:
            return None
        starts_BM, device = find_starts(ids_BT), given["position_ids"].device  # None on a device, to avoid a sync
        if starts_BM is not None and starts_BM.shape[1] == 1:
            return None
        self._expect_separate(given["position_ids"], ids_BT)
        if not reads_borders(module):
            stack.enter_context(in_documents(module, _moved(ids_BT, device)))
            return None
        place = self._parameters.index("attention_mask")
        borders = _moved(as_borders(starts_BM, ids_BT), device)
        if place < len(args):
            return (*args[:place], borders, *args[place + 1 :]), kwargs
        return args, kwargs | {"attention_mask": borders}

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the call, also after an exception."""
        if self._open:
            self._open.pop().close()

    def _expect_separate(self, positions_BT: Tensor, ids_BT: Tensor) -> None:
        """Raise ModelError for restarting positions if documents of a row affect each other in this model.

        In a model in which they do, each call waits for the device if `position_ids` have no copy on the host.
        """
        if self._why is None:
            self._why = why_kind_mixes(self._kind, self._config)
        if self._why and bool((ids_BT[:, -1] != ids_BT[:, 0]).any()):
            raise ModelError(
                f"position_ids of shape {tuple(positions_BT.shape)}: they restart within a row, and {self._why}. Use "
                "one row per document with padding, or leave position_ids out if documents may attend to each other."
            )


def _document_ids(given: dict[str, Any]) -> Tensor | None:
    """Return an ascending document id per token, int64 (B, T), or None if the call need not separate documents.

    Computed on the host if the host has the values of positions and mask, else on their device. A document begins if a
    position is not its predecessor plus 1. Padding forms separate documents.
    """
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if not isinstance(positions, Tensor) or not isinstance(tokens, Tensor) or positions.dim() != 2:
        return None  # positions with three axes, as for images, follow another rule
    if any(given.get(name) is not None for name in _CACHES) or (mask is not None and mask.dim() != 2):
        return None  # a continued document, or a mask over pairs, which is explicit
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
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if access.pins_memory(device) else tensor).to(device, non_blocking=True)
