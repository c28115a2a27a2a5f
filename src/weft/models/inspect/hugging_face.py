"""What only models of transformers are asked: their config, attention, documents; transformers is imported late.

The numbers of a config have their names in `weft.config.hugging_face_config`.
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

from weft import env
from weft.config.hugging_face_config import image_shape, number
from weft.errors import DataError, MissingExtra, ModelError
from weft.models.inspect.private_torch import forward_hooks
from weft.private_torch import named_modules

#: Numbers by which models change their logits after the head.
_SCALES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier_scale",
    "lm_head_multiplier",
)

#: Files that hold the entries of a tokenizer.
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")

#: Inputs of token ids.
TOKENS = ("input_ids", "decoder_input_ids")

#: Arguments that are no caches, whatever their names end with.
_NO_CACHES = (torch.Tensor, bool, int, float, str, tuple, list, dict)

#: Where transformers keeps its hooks that record what layers give.
_CAPTURES = "transformers.utils.output_capturing"

#: Where a config of transformers keeps how its experts are multiplied.
_EXPERTS = "_experts_implementation_internal"


def is_hugging_face(model: nn.Module) -> bool:
    """Whether this is a model of transformers; without importing it."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def load_model_config(path: Path) -> Any:
    """The config of a folder, or of its config.json; nothing is downloaded, and no code of the folder is run.

    Raises ModelError where transformers cannot read it, MissingExtra without transformers.
    """
    env.set_for_children(HF_HUB_OFFLINE="1")
    try:
        transformers: Any = importlib.import_module("transformers")  # which has few types
    except ImportError:
        raise MissingExtra("transformers", "hf", "a Hugging Face model") from None
    folder = path.parent if path.is_file() else path
    if not (folder / "config.json").is_file():  # else transformers takes the path for the name of a download
        what = "it has no config.json" if folder.is_dir() else "there is no such folder"
        raise ModelError(f"model={path}: {what}. Give the folder of a Hugging Face model, or package.module:function.")
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what it raises depends on what the file holds
        # Some say in the first line which check it was, and in the second what is wrong.
        first = " ".join(line.strip() for line in str(error).strip().splitlines()[:2]) or type(error).__name__
        raise ModelError(
            f"model={path}: transformers cannot read its config.json ({first.rstrip('.')}). "
            f"Check the file, or use package.module:function."
        ) from None


def model_of_config(config: Any) -> nn.Module:
    """The model that the config names, or the causal one of its family, with random weights."""
    transformers: Any = importlib.import_module("transformers")
    names = getattr(config, "architectures", None) or ()
    kind = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    return kind(config) if kind else transformers.AutoModelForCausalLM.from_config(config)


def input_shapes(model: nn.Module, seq_len: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one sample of each input that the model cannot do without, by name, tokens last.

    Of a model that writes images over tokens (LLaVA), only the tokens: it reads text alone, too. Empty where no
    input is known.
    """
    config: Any = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    mels = getattr(config, "num_mel_bins", None)
    stride: Any = getattr(config, "conv_stride", None)
    positions = getattr(config, "max_source_positions", None)
    samples = None
    if stride and not isinstance(stride, int):  # in other families it is one number, of something else
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
    """Whether what the model sees of images takes the place of tokens of the text."""
    takes = inspect.signature(model.forward).parameters
    has_images = {"pixel_values", "input_ids"} <= takes.keys() and hasattr(model, "get_image_features")
    return has_images and image_token(getattr(model, "config", None)) is not None


def image_token(config: Any) -> int | None:
    """The token that images are written over."""
    found = getattr(config, "image_token_id", None)
    return getattr(config, "image_token_index", None) if found is None else found


def vocab_size(config: Any) -> int | None:
    """Entries of the vocabulary of the model or of its text part."""
    return number(config, "vocab") or number(getattr(config, "text_config", None), "vocab")


def causal_model(config: Any) -> nn.Module:
    """The causal language model of a config, in float32; within `as_shapes` without memory.

    Raises:
        ModelError: for a family without one, and for weights that are stored quantised.
    """
    return headed_model(config, "CausalLM", "causal language model")


def headed_model(config: Any, head: str, words: str) -> nn.Module:
    """The model of a config's family with some head, in float32; within `as_shapes` without memory.

    Args:
        config: of transformers.
        head: what transformers' AutoModelFor is followed by, such as "MaskedLM"; "": the model without a head.
        words: what that is called in errors.

    Raises:
        ModelError: for a family without one, and for weights that are stored quantised.
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
        return kind.from_config(config, trust_remote_code=False)
    except Exception as error:  # what it raises depends on what the config holds
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise ModelError(
            f"model.path: transformers has no {words} for model_type={family} ({first}). Give the folder of a {words}."
        ) from error


def decoder_start(model: Any) -> int | Literal["last"] | None:
    """Return the token that a model puts before its labels when it makes the decoder's inputs of them.

    "last" is the labels' own last token, and None a model that makes no such inputs.
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
    """The fast tokenizer of a folder; nothing is downloaded, and no code of the folder is run.

    Args:
        folder: of the model.
        options: that the tokenizer's class knows.

    Raises:
        DataError: where there is none that transformers can read.
    """
    transformers: Any = importlib.import_module("transformers")
    if not any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):  # else transformers makes an empty one
        raise DataError(
            f"model.path={folder}: it has no tokenizer. Put tokenizer.json and tokenizer_config.json of the model into "
            "the folder."
        )
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # what it raises depends on what the files hold
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
    """Numbers of query heads and key-value heads, from the config; None where there is no one number."""
    config = model.config.get_text_config(decoder=True)
    heads = number(config, "heads")
    return None if heads is None else (heads, number(config, "kv_heads") or heads)


def attention_name(module: nn.Module) -> str | None:
    """What a module's config calls its attention ("sdpa", "eager", ...); None for a module that looks none up."""
    config: Any = getattr(module, "config", None)
    return (
        (config._attn_implementation_internal or "eager") if hasattr(config, "_attn_implementation_internal") else None
    )


def attention_function(module: nn.Module, name: str) -> Any:
    """The function that a module calls for its attention when its config says `name` (sdpa, eager, ...)."""
    known: Any = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    if name in known:
        return known[name]
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))


def looks_at_positions(model: Any, signature: inspect.Signature, given: dict[str, Any]) -> bool:
    """Whether a call finds documents by the values of its positions: of causal layers that fill no cache.

    signature, given: of the model's forward, and its arguments by name.
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
    """A hook by which transformers keeps what a module gives. key: hidden_states, attentions and such."""

    module: nn.Module
    key: str
    hook: Any


def requested_captures() -> frozenset[str]:
    """Keys of what the model of transformers that is being called shall keep of its layers; mostly none."""
    collector: Any = getattr(sys.modules.get(_CAPTURES), "_active_collector", None)
    return frozenset((collector and collector.get()) or ())


def take_captures(module: nn.Module) -> list[Capture]:
    """Remove those hooks from a module and from all inside of it, and return them."""
    found: list[Capture] = []
    for part in module.modules():
        hooks = forward_hooks(part)
        for place in [place for place, hook in hooks.items() if getattr(hook, "__module__", "") == _CAPTURES]:
            hook = hooks.pop(place)
            found.append(Capture(part, inspect.getclosurevars(hook).nonlocals["key"], hook))
    return found


def is_cache(value: Any) -> bool:
    """Whether an argument of a block is a key-value cache of transformers."""
    # The plain types first: torch 2.11 breaks the graph at the name of a bool's type.
    return value is not None and not isinstance(value, _NO_CACHES) and type(value).__name__.endswith("Cache")


def holds_tokens(cache: Any) -> bool:
    """Whether a key-value cache holds tokens, or cannot say that it holds none."""
    count = getattr(cache, "get_seq_length", None)
    return count is None or count() > 0


def cache_name(model: Any) -> str:
    """What the model's forward calls the keys and values of tokens that it has read; it changed in 2026."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def attention_chunk(module: nn.Module) -> int:
    """Tokens of the chunks that a module attends within (Llama 4); 0 where it attends to all."""
    config = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    is_chunked = kinds is None or index is None or kinds[index] == "chunked_attention"
    return getattr(config, "attention_chunk_size", None) or 0 if is_chunked else 0


def scales_logits(model: nn.Module) -> bool:
    """Whether the model changes its logits after the head."""
    config = getattr(model, "config", None)
    return any(isinstance(getattr(config, name, None), int | float) for name in _SCALES)


def longest_sequence(model: nn.Module) -> int | None:
    """Tokens that the model reads at most; None where it does not say."""
    return number(getattr(model, "config", None) or getattr(model, "spec", None), "positions")


def longest_text(model: nn.Module) -> int | None:
    """Tokens that the model reads at most; None where positions have no end or the model does not say.

    Tables of positions whose first rows stand for padding (RoBERTa) are shorter than the config says.
    """
    if (table := _table_past_padding(model)) is not None:
        return table.num_embeddings - first_position(model)
    if hasattr(getattr(model, "config", None), "relative_attention_num_buckets"):
        return None
    return longest_sequence(model)


def first_position(model: nn.Module) -> int:
    """The position of a text's first token: 0, or behind the row for padding in tables of RoBERTa and its kin."""
    table = _table_past_padding(model)
    return 0 if table is None or table.padding_idx is None else table.padding_idx + 1


def _table_past_padding(model: nn.Module) -> nn.Embedding | None:
    for name, module in named_modules(model):
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module
    return None


def has_gated_experts(experts: nn.Module) -> bool:
    """Whether a module of transformers says: experts are down(gate(x)), (outputs, inputs) in each matrix, no biases."""
    said = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
    return callable(getattr(experts, "_apply_gate", None)) and all(
        getattr(experts, name, None) is value for name, value in said.items()
    )


def keeps_tokens_apart(module: nn.Module) -> bool:
    """Return whether a module is the experts of a model of transformers, which compute tokens one by one."""
    kind = type(module)
    return kind.__module__.startswith("transformers.") and kind.__name__.endswith("Experts")


def is_router(module: Any) -> bool:
    """Whether this chooses experts in the manner of transformers 5."""
    return isinstance(module, nn.Module) and hasattr(module, "top_k") and isinstance(module.weight, nn.Parameter)


@contextlib.contextmanager
def one_document() -> Generator[None]:
    """Inside, each sample is one document: models of transformers look at the values of positions for more."""
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
    """Inside, transformers logs nothing below errors."""
    logs: Any = importlib.import_module("transformers").logging
    before = logs.get_verbosity()
    logs.set_verbosity_error()
    try:
        yield
    finally:
        logs.set_verbosity(before)


@contextlib.contextmanager
def experts_at_once(model: nn.Module) -> Generator[None]:
    """Within, transformers' experts are one batched product: a loop over those that tokens chose has no shapes."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    before = [(one, one.__dict__[_EXPERTS]) for one in configs.values() if _EXPERTS in getattr(one, "__dict__", ())]
    try:
        for config, _ in before:
            setattr(config, _EXPERTS, "batched_mm")
        yield
    finally:
        for config, chosen in before:
            setattr(config, _EXPERTS, chosen)
