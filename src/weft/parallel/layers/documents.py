"""A small model of the same family and form as one of transformers, to see how such models behave."""

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

from weft.config.hugging_face_config import number, resize
from weft.data.batches import host_values
from weft.errors import ModelError
from weft.models.attention import document_attention, find_starts, ids_of
from weft.models.inspect import hugging_face, token_flow

#: Sizes of the copy. Heads times their width are the width of the model, which many configs take for granted.
_SIZES = {
    "vocab": 61, "hidden": 32, "heads": 4, "head_dim": 8, "rope_dim": 8, "q_rank": 8, "kv_rank": 8, "ffn": 32,
    "expert_ffn": 8, "num_experts": 4, "top_k": 2, "groups": 2, "top_groups": 1, "positions": 64, "dense_layers": 1,
    "expand": 1,
}  # fmt: skip
#: Beyond it are tokens of texts.
_LAST_PADDING = 4
#: A list with more values than this does not say of which kind layers are.
_MOST_KINDS = 4


def small_copy(model_class: type[nn.Module], config: Any, *, window: int) -> nn.Module:
    """A model of transformers of the same class and config, made small, with random weights in fp32.

    It has as many layers as it takes for one of each kind. Raises what transformers does where sizes do not fit.

    Args:
        model_class: of the model.
        config: of the model; it stays as it is.
        window: tokens of its windows and chunks, where it has some.
    """
    config = copy.deepcopy(config)
    for part in _parts(config):
        _make_small(part, window)
    return _filled(model_class, config)


def _parts(config: Any) -> list[Any]:
    """The config, and those of the models within."""
    inner = [part for name, part in vars(config).items() if name.endswith("_config")]
    return [config, *(part for part in inner if hasattr(part, "to_dict"))]


def _make_small(config: Any, window: int) -> None:
    num_layers = number(config, "layers") or 0
    kinds = _kinds(config, num_layers)
    few = max(2, 1 + max((rows.index(kind) for rows in kinds.values() for kind in rows), default=0))
    heads, kv_heads = number(config, "heads"), number(config, "kv_heads")
    # The latent of DeepSeek's attention gives each head keys of its own.
    shared = kv_heads is not None and kv_heads != heads and number(config, "kv_rank") is None
    resize(config, **_SIZES, window=window, kv_heads=min(2, kv_heads or 1) if shared else _SIZES["heads"])
    for name, value in kinds.items():
        with contextlib.suppress(AttributeError, NotImplementedError):  # worked out from others
            setattr(config, name, value[:few])
    resize(config, layers=min(few, num_layers) or few)
    if type(getattr(config, "qk_head_dim", None)) is int:
        with contextlib.suppress(AttributeError):
            config.qk_head_dim = _SIZES["head_dim"] + _SIZES["rope_dim"]
    if (getattr(config, "pad_token_id", None) or 0) > _LAST_PADDING:
        resize(config, padding=0)


def _kinds(config: Any, num_layers: int) -> dict[str, list[Any]]:
    """Lists of a config with an entry for each layer, few of them different."""
    names = {*vars(config), "layer_types", "layers_block_type"}
    found = {name: getattr(config, name, None) for name in sorted(names)}
    return {
        name: list(value)
        for name, value in found.items()
        if isinstance(value, list | tuple) and len(value) == num_layers and len(set(map(str, value))) <= _MOST_KINDS
    }


def _filled(kind: type[nn.Module], config: Any) -> nn.Module:
    """Such a model, with weights far enough from zero that tokens change each other. Random numbers elsewhere stay."""
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


# Attention of Hugging Face models within the documents of packed sequences, without a mask over pairs of tokens.

#: transformers' name for torch's fused attention, whose place is taken, and ours.
_OWN, _NAME = "sdpa", "weft_sdpa_by_documents"
_READY = "_weft_reads_documents"
#: What a model remembers of its positions, and of the call under way.
_FIRST, _TOLD = "_weft_first_position", "_weft_is_told_documents"
#: Of borders as masks: of places where documents begin, and of ids.
_PLACES, _IDS = torch.int64, torch.int32
#: What some models ask of attention that reads a mask over pairs.
_BESIDE = ("softcap", "s_aux", "position_bias", "head_mask", "indices")


def reads_documents(model: nn.Module) -> bool:
    """Whether `attend_in_documents` lets this model's layers read borders."""
    return hugging_face.is_hugging_face(model) and _is_usual(model)


def attend_in_documents(model: nn.Module) -> None:
    """Let the layers of a causal model of transformers read what `borders_of` gives, in place."""
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
    """Return what tells a model where the documents of a batch of the loader begin, as arguments of its forward.

    Empty where the model does not read it: positions tell it then. In a batch without a border the mask is empty, so
    that transformers does not look for some.
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
    """Return the attention mask that says where documents begin: (B, 1, 1, M), or (B, 1, 1, T) of ids.

    Args:
        starts_BM: the places, of a fixed number; None: the device would have to be asked how many there are.
        ids_BT: then an id for each token, ascending.
    """
    if starts_BM is not None:
        return starts_BM[:, None, None]
    assert ids_BT is not None
    return ids_BT.to(_IDS)[:, None, None]


def reads_borders(model: nn.Module) -> bool:
    """Whether `attend_in_documents` has let this model's layers read borders."""
    return getattr(model, _READY, False)


def call_in_documents(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Call a causal model of transformers on a batch of the loader: tokens see only those of their own document.

    A model that does not read borders gets masks that keep to them, whether or not it tells transformers its positions.
    """
    if not hasattr(model, _FIRST):
        setattr(model, _FIRST, hugging_face.first_position(model))
    borders, ids_BT = borders_of(model, batch), batch.get("document_ids")
    places = {"input_ids": batch["input_ids"], "position_ids": batch["positions"] + getattr(model, _FIRST)}
    setattr(model, _TOLD, True)
    try:
        with within_documents(ids_BT) if ids_BT is not None and not borders else contextlib.nullcontext():
            return model(**places, use_cache=False, **borders)
    finally:
        setattr(model, _TOLD, False)


def is_told(model: nn.Module) -> bool:
    """Whether the call under way is one of `call_in_documents`, which says itself where documents begin."""
    return getattr(model, _TOLD, False)


@contextlib.contextmanager
def within_documents(ids_BT: torch.Tensor) -> Generator[None]:
    """Inside, every mask that transformers makes over these tokens stays among tokens of one id.

    Some of its models (OPT, gpt-oss) have positions, and do not tell them where they ask for a mask; others (BioGPT)
    ask with a mask of ones, beside which it does not look at positions.
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
    """Whether all layers look up torch's fused attention, are causal, and nothing else reads the mask."""
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
    """Whether a module takes the mask, and has no attention in it to hand it to: an indexer of sparse attention."""
    takes = "attention_mask" in inspect.signature(module.forward).parameters
    return takes and not any(hasattr(one, "is_causal") for one in module.modules())


def _attend(
    own: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """An attention function in the manner of transformers: (B, H, T, C) in, (B, T, H, C) out.

    own: the one in whose place it is called. Blocks are compiled with it: a name could not be looked up there.
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
    """What each token sees, bool (B, 1, T, T)."""
    if ids_BT is None:
        assert starts_BM is not None
        ids_BT = ids_of(starts_BM, num_tokens)
    place_T = torch.arange(num_tokens, device=ids_BT.device)
    seen = (ids_BT[:, :, None] == ids_BT[:, None, :]) & (place_T[:, None] >= place_T)
    if window is not None:
        seen = seen & (place_T[:, None] - place_T < window)
    return seen[:, None]


# Whether documents of one row see each other in a model of transformers.

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


# Documents that a script packs into rows, and tells the model by `position_ids` that begin anew within a row.

#: What holds the tokens before these: a document that goes on.
_CACHES = ("past_key_values", "cache", "cache_params", "state")


def separate_by_position_ids(model: nn.Module) -> None:
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
        self._expect_separate(given["position_ids"], ids_BT)
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

    def _expect_separate(self, positions_BT: Tensor, ids_BT: Tensor) -> None:
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
