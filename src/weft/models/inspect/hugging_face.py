"""Properties specific to transformers models: config, attention, documents. transformers is imported lazily.

Config keys and their aliases are in `weft.config.shapes.hugging_face_config`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from weft.config.shapes.hugging_face_config import image_shape, number
from weft.errors import DataError, MissingExtra, ModelError
from weft.hub import needed_code
from weft.models.inspect.private_torch import forward_hooks
from weft.private_torch import named_modules

#: Config values by which models change their logits after the head.
_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale", "lm_head_multiplier")

#: Files that hold the vocabulary of a tokenizer.
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")

#: Inputs of token ids.
TOKENS = ("input_ids", "decoder_input_ids")

#: Types of arguments that are never caches.
_NO_CACHES = (torch.Tensor, bool, int, float, str, tuple, list, dict)

#: Module of the transformers hooks that record the outputs of layers.
_CAPTURES = "transformers.utils.output_capturing"

#: Config attribute of transformers that selects the implementation of experts.
_EXPERTS = "_experts_implementation_internal"


#: Arguments of forwards with images, videos or audio.
MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")


def takes_media(model: nn.Module) -> bool:
    """Return True if the forward of a transformers model takes images, videos or audio."""
    return any(name in inspect.signature(model.forward).parameters for name in MEDIA)


def is_hugging_face(model: nn.Module) -> bool:
    """Return True for a transformers model, without importing transformers."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def load_model_config(path: Path) -> Any:
    """Return the config of a folder, or of its config.json. It downloads nothing and runs no code of the folder.

    It sets HF_HUB_OFFLINE=1 for this process and its children.

    Raises:
        ModelError: if there is no config.json, if it requires code of the folder, or if transformers cannot read it.
        MissingExtra: if transformers is not installed.
    """
    try:
        transformers: Any = importlib.import_module("transformers")  # its types are incomplete
    except ImportError:
        raise MissingExtra("transformers", "hf", "a Hugging Face model") from None
    folder = path.parent if path.is_file() else path
    if not (folder / "config.json").is_file():  # else transformers reads the path as a model name on the hub
        what = "it has no config.json" if folder.is_dir() else "there is no such folder"
        raise ModelError(f"model={path}: {what}. Give the folder of a Hugging Face model, or package.module:function.")
    if rule := needed_code((folder / "config.json").read_bytes()):
        raise ModelError(f"model={path}: {rule}")
    try:
        with _offline():  # some configs read that of a backbone by its name on the hub
            return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the error type depends on the file
        # Some errors name the failed check in the first line and the cause in the second.
        first = " ".join(line.strip() for line in str(error).strip().splitlines()[:2]) or type(error).__name__
        raise ModelError(
            f"model={path}: transformers cannot read its config.json ({first.rstrip('.')}). "
            f"Check the file, or use package.module:function."
        ) from None


@contextlib.contextmanager
def _offline() -> Generator[None]:
    """Keep huggingface_hub, and thus transformers, from using the network inside the context."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def model_of_config(config: Any) -> nn.Module:
    """Return the model that the config names, or the causal one of its family, with random weights."""
    transformers: Any = importlib.import_module("transformers")
    names = getattr(config, "architectures", None) or ()
    kind = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    with _offline():
        return kind(config) if kind else transformers.AutoModelForCausalLM.from_config(config)


def input_shapes(model: nn.Module, seq_len: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one sample of each supported input of a model, by name. Inputs of token ids are at the end.

    For a model that replaces tokens by images (LLaVA), only the tokens are returned, since it also accepts text alone.
    The result is empty if no input is known.
    """
    config: Any = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    mels = getattr(config, "num_mel_bins", None)
    stride: Any = getattr(config, "conv_stride", None)
    positions = getattr(config, "max_source_positions", None)
    samples = None
    if stride and not isinstance(stride, int):  # in other families it is an int with another meaning
        samples = (seq_len * math.prod(stride) + sum(config.conv_kernel),)
    known: dict[str, Any] = {
        "pixel_values": None if reads_images_as_tokens(model) else image_shape(config),
        "input_features": mels and (mels, 2 * positions if positions else 4 * seq_len),
        "input_values": samples,
        "input_ids": vocab_size(config) and (seq_len,),
        "decoder_input_ids": (seq_len,) if getattr(config, "is_encoder_decoder", False) else None,
    }
    return {name: shape for name, shape in known.items() if shape and name in takes}


def reads_images_as_tokens(model: Any) -> bool:
    """Return True if image features replace tokens of the text."""
    takes = inspect.signature(model.forward).parameters
    has_images = {"pixel_values", "input_ids"} <= takes.keys() and hasattr(model, "get_image_features")
    return has_images and image_token(getattr(model, "config", None)) is not None


def image_token(config: Any) -> int | None:
    """Return the id of the token that image features replace, or None."""
    found = getattr(config, "image_token_id", None)
    return getattr(config, "image_token_index", None) if found is None else found


def audio_token(config: Any) -> int | None:
    """Return the id of the token that features of audio clips replace, or None."""
    found = getattr(config, "audio_token_id", None)
    return getattr(config, "audio_token_index", None) if found is None else found


def vocab_size(config: Any) -> int | None:
    """Return the vocabulary size of the model or of its text part, or None."""
    return number(config, "vocab") or number(getattr(config, "text_config", None), "vocab")


def causal_model(config: Any) -> nn.Module:
    """Return the causal language model of a config, in float32. Within `as_shapes` it allocates no memory.

    Raises:
        ModelError: if the family has no such model, or the weights are stored quantized.
    """
    return headed_model(config, "CausalLM", "causal language model")


def headed_model(config: Any, head: str, words: str) -> nn.Module:
    """Return the model of a config's family with some head, in float32. Within `as_shapes` it allocates no memory.

    The dtype of the config is set to None.

    Args:
        config: a transformers config.
        head: suffix of transformers' AutoModelFor class, such as "MaskedLM"; "": the model without a head.
        words: description of the model in errors.

    Raises:
        ModelError: if the family has no such model, or the weights are stored quantized.
    """
    transformers: Any = importlib.import_module("transformers")
    family = getattr(config, "model_type", "?")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"model.path: the weights of this {family} are quantised. Give the folder of the model in bf16 or fp32."
        )
    config.update({"dtype" if hasattr(config, "dtype") else "torch_dtype": None})
    kind = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    try:
        with _offline():
            return kind.from_config(config, trust_remote_code=False)
    except Exception as error:  # the error type depends on the config
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        if isinstance(error, ImportError):
            raise ModelError(f"model.path: {first.partition('.')[0]}. Install it with pip.") from error
        raise ModelError(
            f"model.path: transformers has no {words} for model_type={family} ({first}). Give the folder of a {words}."
        ) from error


def decoder_start(model: Any) -> int | Literal["last"] | None:
    """Return the first token of the decoder inputs that a model creates from its labels.

    "last" means the last token of the labels, and None that the model creates no decoder inputs.
    """
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None) or getattr(model, "_shift_right", None)
    if shift is None:
        return None
    taken = {getattr(model.config, f"{name}_token_id", None) for name in ("pad", "eos", "bos", "decoder_start")}
    free = [token for token in range(vocab_size(model.config) or 64) if token not in taken][:4]
    try:
        starts = [int(shift(torch.tensor([labels]))[0, 0]) for labels in (free[:2], free[2:])]
    except (ValueError, AssertionError, TypeError):  # its config lacks the token
        return None
    if starts[0] == starts[1]:
        return starts[0]
    return "last" if starts == [free[1], free[3]] else None


def load_tokenizer(folder: Path, **options: Any) -> Any:
    """Return the fast tokenizer of a folder. It downloads nothing and runs no code of the folder.

    options: options of the tokenizer's class.

    Raises:
        DataError: if the folder has no tokenizer that transformers can read, or no fast one.
    """
    transformers: Any = importlib.import_module("transformers")
    if not any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):  # else transformers creates an empty one
        raise DataError(
            f"model.path={folder}: it has no tokenizer. Put tokenizer.json and tokenizer_config.json of the model into "
            "the folder."
        )
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # the error type depends on the files
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise DataError(
            f"model.path={folder}: transformers cannot read its tokenizer ({first}). Put tokenizer.json and "
            "tokenizer_config.json of the model into the folder."
        ) from error
    if not found.is_fast:
        raise DataError(
            f"model.path={folder}: its tokenizer has no tokenizer.json. Convert it with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    return found


def attention_heads(model: Any) -> tuple[int, int] | None:
    """Return the numbers of query heads and key-value heads of the config, or None if they are not single numbers."""
    config = model.config.get_text_config(decoder=True)
    heads = number(config, "heads")
    return None if heads is None else (heads, number(config, "kv_heads") or heads)


def attention_name(module: nn.Module) -> str | None:
    """Return the attention implementation in a module's config ("sdpa", "eager", ...), or None without one."""
    config: Any = getattr(module, "config", None)
    return (
        (config._attn_implementation_internal or "eager") if hasattr(config, "_attn_implementation_internal") else None
    )


def attention_function(module: nn.Module, name: str) -> Any:
    """Return the function that a module calls for an attention implementation (sdpa, eager, ...)."""
    known: Any = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    if name in known:
        return known[name]
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))


def looks_at_positions(model: Any, signature: inspect.Signature, given: dict[str, Any]) -> bool:
    """Return True if a call infers documents from the position ids, as causal models do without a key-value cache.

    signature, given: signature of the model's forward, and its arguments by name.
    """
    layers = [module for module in model.modules() if hasattr(module, "is_causal")]
    if layers and not any(layer.is_causal for layer in layers):
        return False
    if "use_cache" not in signature.parameters:
        return True
    wanted = given.get("use_cache")
    return not (getattr(model.config.get_text_config(decoder=True), "use_cache", True) if wanted is None else wanted)


@dataclass(frozen=True, slots=True)
class Capture:
    """A transformers hook that records a module's outputs.

    Attributes:
        module: the hooked module.
        key: name of the recorded output, such as hidden_states or attentions.
        hook: the forward hook.
    """

    module: nn.Module
    key: str
    hook: Any


def requested_captures() -> frozenset[str]:
    """Return the keys of the outputs that the running transformers model records; usually empty."""
    collector: Any = getattr(sys.modules.get(_CAPTURES), "_active_collector", None)
    return frozenset((collector and collector.get()) or ())


def take_captures(module: nn.Module) -> list[Capture]:
    """Remove the transformers capture hooks from a module and all its submodules, and return them."""
    found: list[Capture] = []
    for part in module.modules():
        hooks = forward_hooks(part)
        for place in [place for place, hook in hooks.items() if getattr(hook, "__module__", "") == _CAPTURES]:
            hook = hooks.pop(place)
            found.append(Capture(part, inspect.getclosurevars(hook).nonlocals["key"], hook))
    return found


def is_cache(value: Any) -> bool:
    """Return True if an argument of a block is a key-value cache of transformers."""
    # The plain types come first: torch 2.11 breaks the graph at the name of a bool's type.
    return value is not None and not isinstance(value, _NO_CACHES) and type(value).__name__.endswith("Cache")


def holds_tokens(cache: Any) -> bool:
    """Return True if a key-value cache holds tokens, or has no method `get_seq_length`."""
    count = getattr(cache, "get_seq_length", None)
    return count is None or count() > 0


def cache_name(model: Any) -> str:
    """Return the name of the model's key-value cache argument, which transformers changed in 2026."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def attention_chunk(module: nn.Module) -> int:
    """Return the chunk size that a module's attention is limited to (Llama 4), or 0 for full attention."""
    config = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    is_chunked = kinds is None or index is None or kinds[index] == "chunked_attention"
    return getattr(config, "attention_chunk_size", None) or 0 if is_chunked else 0


def scales_logits(model: nn.Module) -> bool:
    """Return True if the config has a value by which the model changes its logits after the head."""
    config = getattr(model, "config", None)
    return any(isinstance(getattr(config, name, None), int | float) for name in _SCALES)


def longest_sequence(model: nn.Module) -> int | None:
    """Return the maximum number of tokens of the model, or None if its config has no limit."""
    return number(getattr(model, "config", None) or getattr(model, "spec", None), "positions")


def longest_text(model: nn.Module) -> int | None:
    """Return the maximum number of tokens of a text, or None if positions are unlimited or the config has no limit.

    Position tables whose first rows are for padding (RoBERTa) hold fewer tokens than the config's limit.
    """
    if (table := _table_past_padding(model)) is not None:
        return table.num_embeddings - first_position(model)
    if hasattr(getattr(model, "config", None), "relative_attention_num_buckets"):
        return None
    return longest_sequence(model)


def first_position(model: nn.Module) -> int:
    """Return the position of a text's first token: 0, or the one after the padding row in RoBERTa-like tables."""
    table = _table_past_padding(model)
    return 0 if table is None or table.padding_idx is None else table.padding_idx + 1


def _table_past_padding(model: nn.Module) -> nn.Embedding | None:
    for name, module in named_modules(model):
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module
    return None


def has_gated_experts(experts: nn.Module) -> bool:
    """Return True if a transformers module has experts of the form down(gate(x)), with or without biases.

    Weights may be stored as (outputs, inputs) or transposed. A norm after the experts is not supported.
    """
    said = {"has_gate": (True,), "has_post_expert_norm": (False,)}
    said |= dict.fromkeys(("has_bias", "is_transposed"), (True, False))
    return callable(getattr(experts, "_apply_gate", None)) and all(
        getattr(experts, name, None) in values for name, values in said.items()
    )


def computes_tokens_separately(module: nn.Module) -> bool:
    """Return True if a module is the experts of a transformers model, which compute each token separately."""
    kind = type(module)
    return kind.__module__.startswith("transformers.") and kind.__name__.endswith("Experts")


def is_router(module: Any) -> bool:
    """Return True for a router in the style of transformers 5."""
    return isinstance(module, nn.Module) and hasattr(module, "top_k") and isinstance(module.weight, nn.Parameter)


@contextlib.contextmanager
def one_document() -> Generator[None]:
    """Treat each sample as one document inside the context. Otherwise transformers infers documents from positions."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    look = getattr(masks, "find_packed_sequence_indices", None)
    if masks is None or look is None:
        yield
        return

    def none_found(*args: Any, **kwargs: Any) -> None:
        del args, kwargs

    masks.find_packed_sequence_indices = none_found
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = look


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Hide log messages of transformers below errors inside the context."""
    logs: Any = importlib.import_module("transformers").logging
    before = logs.get_verbosity()
    logs.set_verbosity_error()
    try:
        yield
    finally:
        logs.set_verbosity(before)


@contextlib.contextmanager
def experts_at_once(model: nn.Module) -> Generator[None]:
    """Compute transformers' experts with one batched matmul inside the context.

    The shapes in their default loop depend on values.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    before = [(one, one.__dict__[_EXPERTS]) for one in configs.values() if _EXPERTS in getattr(one, "__dict__", ())]
    try:
        for config, _ in before:
            setattr(config, _EXPERTS, "batched_mm")
        yield
    finally:
        for config, chosen in before:
            setattr(config, _EXPERTS, chosen)
