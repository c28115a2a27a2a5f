"""A Hugging Face folder as one GGUF file, the format of llama.cpp, and a comparison of their greedy tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  transformers reads GGUF files through it
import gguf
import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from weft.errors import CheckpointError, ModelError
from weft.train.weights.gguf_tokenizer import add_tokenizer

_TYPES = {
    "fp32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "fp16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
#: Architecture of llama.cpp by `model_type` of transformers.
_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "gpt2": "gpt2",
}  # fmt: skip
_ACTIVATIONS = {"llama": "silu", "qwen2": "silu", "qwen3": "silu", "gpt2": "gelu_new"}
#: Beginnings of the names of tensors with a bias that llama.cpp reads, after ".attn_".
_BIASES = {"llama": ("",), "gpt2": ("",), "qwen2": ("q.", "k.", "v."), "qwen3": (), "gemma2": (), "gemma3": ()}
#: Layers of one period of sliding-window and full attention, and number of layers of the 27B model.
_GEMMA = {"gemma2": (2, 46), "gemma3": (6, 62)}
#: GPT-2's layers whose matrices are (inputs, outputs).
_TURNED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
_OTHER_TOOL = "Use weft export RUN FOLDER, and llama.cpp's convert_hf_to_gguf.py on the folder"
_CHECKED_TOKENS, _PROMPT_TOKENS = 32, 8


def expect_family(model_type: str) -> None:
    """Raise ModelError unless `model_type` of transformers is a key of `_ARCHITECTURES`."""
    if model_type not in _ARCHITECTURES:
        raise ModelError(
            f"--gguf: model_type={model_type!r} is not one of {', '.join(_ARCHITECTURES)}, whose layout in GGUF is "
            f"tested. {_OTHER_TOOL}."
        )


def write_gguf(folder: Path, out: Path, dtype: str, name: str) -> None:
    """Write a folder's weights, config and tokenizer as a GGUF file, one tensor at a time.

    Args:
        folder: a Hugging Face folder.
        out: output file.
        dtype: key of `_TYPES` for matrices. Vectors and learned positions are stored in fp32.
        name: model name in the metadata.

    Raises:
        ModelError: if llama.cpp would not compute the same as transformers.
    """
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    expect_family(config.model_type)
    arch = _ARCHITECTURES[config.model_type]
    _expect_same_function(config, arch)
    writer = gguf.GGUFWriter(out, arch)
    try:
        writer.add_name(name)
        writer.add_file_type(_TYPES[dtype][1])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_config(writer, config, arch)
        add_tokenizer(writer, folder, config.vocab_size)
        for key, shape, _ in _tensors(folder, config, arch, with_data=False):
            kind = _type_of(key, shape, dtype)
            is_packed = kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16)
            stored = gguf.quant_shape_to_byte_shape(shape, kind) if is_packed else shape
            item = np.dtype(np.uint8 if is_packed else np.float16 if kind.name == "F16" else np.float32)
            writer.add_tensor_info(key, stored, item, math.prod(stored) * item.itemsize, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, shape, values in _tensors(folder, config, arch, with_data=True):
            writer.write_tensor_data(gguf.quantize(values, _type_of(key, shape, dtype)))
    finally:
        writer.close()


def _type_of(key: str, shape: tuple[int, ...], dtype: str) -> gguf.GGMLQuantizationType:
    if len(shape) == 1 or key == "position_embd.weight":
        return gguf.GGMLQuantizationType.F32
    is_whole = dtype != "q8_0" or shape[-1] % gguf.GGML_QUANT_SIZES[_TYPES[dtype][0]][0] == 0
    return _TYPES[dtype if is_whole else "fp16"][0]


def _tensors(
    folder: Path, config: Any, arch: str, *, with_data: bool
) -> Iterator[tuple[str, tuple[int, ...], np.ndarray]]:
    """Yield the name in GGUF, shape and float32 values of each tensor, without values if not `with_data`."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    shapes: dict[str, tuple[int, ...]] = {}
    factors = _rope_factors(config)
    if factors is not None:
        yield "rope_freqs.weight", factors.shape, factors
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                if key == "lm_head.weight" and config.tie_word_embeddings:
                    raise ModelError(
                        f"--gguf: config.json ties the embeddings, and {file.name} has {key}. Remove one of the two."
                    )
                target = names.get_name(key, (".weight", ".bias"))
                if target is None or (
                    key.endswith(".bias") and not target.rpartition(".attn_")[2].startswith(_BIASES[arch])
                ):
                    raise ModelError(f"--gguf: llama.cpp's {arch} has no tensor for {key!r}. {_OTHER_TOOL}.")
                shape = tuple(opened.get_slice(key).get_shape())
                turned = arch == "gpt2" and key.endswith(_TURNED)
                shape = shape[::-1] if turned else shape
                shapes[target] = shape
                values = _in_gguf(opened.get_tensor(key), target, config, arch, turned) if with_data else np.empty(0)
                yield target, shape, values
    if "output.weight" not in shapes and not config.tie_word_embeddings:
        raise ModelError("--gguf: config.json does not tie the embeddings, and the files lack lm_head.weight.")


def _in_gguf(tensor: torch.Tensor, target: str, config: Any, arch: str, turned: bool) -> np.ndarray:
    """Return a tensor's values in llama.cpp's layout.

    llama.cpp's llama rotates adjacent pairs of a head's rows, and transformers rows that are half a head apart.
    llama.cpp's Gemma multiplies with the weights of norms, and transformers with 1 + weight.
    """
    values = tensor.float()
    if turned:
        values = values.T
    if arch == "llama" and (".attn_q." in target or ".attn_k." in target):
        heads = config.num_attention_heads if ".attn_q." in target else config.num_key_value_heads
        values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if arch in _GEMMA and target.endswith("norm.weight"):
        values = values + 1
    return np.ascontiguousarray(values.numpy())


def _rope(config: Any, layers: str = "full_attention") -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get(layers, rope)


def _rope_factors(config: Any) -> np.ndarray | None:
    """Return the divisors of Llama 3's rotary frequencies, or None for unscaled frequencies."""
    if _rope(config).get("rope_type") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, 2 * len(scaled), 2).float() / (2 * len(scaled))
    return (1 / _rope(config)["rope_theta"] ** exponents / scaled).numpy().astype(np.float32)


def _expect_same_function(config: Any, arch: str) -> None:
    """Raise ModelError if a config has what llama.cpp does not compute."""
    head_dim = _head_dim(config)
    rope = _rope(config).get("rope_type", "default")
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    allowed = {"llama": ("default", "linear", "llama3"), "gemma3": ("default", "linear")}.get(arch, ("default",))
    wanted: dict[str, tuple[Any, Any]] = {
        "quantization_config": (getattr(config, "quantization_config", None), None),
        "hidden_act": (
            config.activation_function if arch == "gpt2" else activation, _ACTIVATIONS.get(arch, "gelu_pytorch_tanh")
        ),
        "rope_type": (rope, rope if rope in allowed else " or ".join(allowed)),
        "partial_rotary_factor": (_rope(config).get("partial_rotary_factor", 1.0), 1.0),
    }  # fmt: skip
    if arch == "gpt2":
        wanted["scale_attn_weights"] = (config.scale_attn_weights, True)
        wanted["scale_attn_by_inverse_layer_idx"] = (config.scale_attn_by_inverse_layer_idx, False)
    if arch in _GEMMA:
        period, layers_27b = _GEMMA[arch]
        is_27b = config.num_hidden_layers == layers_27b
        scale = config.hidden_size // config.num_attention_heads if is_27b else head_dim
        pattern = ["full_attention", *["sliding_attention"] * (period - 1)]
        kinds = [pattern[(layer + 1) % period] for layer in range(config.num_hidden_layers)]
        wanted["query_pre_attn_scalar"] = (config.query_pre_attn_scalar, scale)
        wanted["layer_types"] = (list(config.layer_types), kinds)
        wanted["use_bidirectional_attention"] = (getattr(config, "use_bidirectional_attention", None) or False, False)
    if arch == "gemma2":
        caps = (config.attn_logit_softcapping, config.final_logit_softcapping)
        wanted["attn_logit_softcapping and final_logit_softcapping"] = (caps, caps if all(caps) else "both")
    if arch == "gemma3":
        wanted["final_logit_softcapping"] = (config.final_logit_softcapping, None)
        wanted["attn_logit_softcapping"] = (config.attn_logit_softcapping, None)
        local = _rope(config, "sliding_attention")
        wanted["rope_theta of sliding attention"] = (local.get("rope_theta"), 10_000.0)
        wanted["rope_type of sliding attention"] = (local.get("rope_type", "default"), "default")
    for field, (value, needed) in wanted.items():
        if value != needed:
            raise ModelError(f"--gguf: {field}={value}: llama.cpp's {arch} computes only {needed}. {_OTHER_TOOL}.")


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _context_length(config: Any) -> int:
    """Return the longest sequence for which llama.cpp computes the same: at most one window."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    has_window = window is not None and _ARCHITECTURES[config.model_type] not in _GEMMA
    return min(window, config.max_position_embeddings) if has_window else config.max_position_embeddings


def _add_config(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    """Write the shape of a model and its constants."""
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if arch == "gpt2":
        writer.add_context_length(config.n_positions)
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_context_length(_context_length(config))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    rope = _rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if arch in _GEMMA:
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


# The check: transformers reads the file back.


@torch.no_grad()
def compare_greedy(folder: Path, file: Path, dtype: str) -> tuple[int, int]:
    """Compare a GGUF file, as transformers reads it, with the folder that it was written from.

    Return how many of the greedy tokens of the folder's own weights are equal, and their number.

    Args:
        folder: a Hugging Face folder.
        file: GGUF file that `write_gguf` wrote from it.
        dtype: key of `_TYPES`, as in `write_gguf`.

    Raises:
        CheckpointError: if the file computes something else than the folder's weights rounded to `dtype`.
    """
    transformers.utils.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, local_files_only=True).eval()
    config = model.config
    total = min(_CHECKED_TOKENS, _context_length(config))
    if config.model_type == "mistral":  # within one window, the file's architecture is the same
        config = transformers.LlamaConfig(**{**config.to_dict(), "model_type": "llama", "architectures": None})
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, min(_PROMPT_TOKENS, total - 1)), generator=draws)
    prompt = ids.shape[1]
    while ids.shape[1] < total:
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            turned = type(module).__name__ == "Conv1D" and name == "weight"
            key = "position_embd.weight" if path.endswith("wpe") else name
            _round(param.T if turned else param, key, dtype)
    rounded = model(ids).logits
    del model
    read = load(file.parent, gguf_file=file.name, config=config, dtype=torch.float32).eval()
    logits = read(ids).logits
    worst, limit = (logits - rounded).abs().max().item(), 1e-4 * max(1.0, rounded.abs().max().item())
    if not worst <= limit:
        raise CheckpointError(
            f"--gguf: after export the logits differ by {worst:.2g} from those of the weights in {dtype}, more than "
            f"{limit:.2g}. No file was written. Please report this."
        )
    equal = (logits[:, prompt - 1 : -1].argmax(-1) == ids[:, prompt:]).sum()
    return int(equal), total - prompt


def _round(param: torch.Tensor | nn.Parameter, key: str, dtype: str) -> None:
    """Round the elements of a tensor to the format of its GGUF type, in-place."""
    kind = _type_of(key, tuple(param.shape), dtype)
    packed = gguf.quantize(np.ascontiguousarray(param.detach().numpy()), kind)
    param.copy_(torch.from_numpy(gguf.dequantize(packed, kind).copy()))
