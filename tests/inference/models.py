"""Small models of Hugging Face families with a tokenizer of bytes, in folders as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.small_configs import SIZES

#: Families by model type, with sizes that their tensor parallelism divides. Two have states instead of attention.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4},
    "mixtral": {"num_local_experts": 4},
    "opt": {"do_layer_norm_before": True},
    "mamba": {"state_size": 4},
    "bloom": {},
}
VOCAB = 257


def library_tokenizer() -> Any:
    """Return a tokenizer of the tokenizers package whose tokens are bytes, and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    entries = {one: place for place, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    found = Tokenizer(models.BPE(vocab={**entries, "<|endoftext|>": 256}, merges=[]))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return found


def write_folder(folder: Path, family: str, seed: int = 3, **changes: Any) -> Path:
    """Write a small model with random weights and its tokenizer, and return the folder."""
    import transformers

    config: Any = transformers.AutoConfig.for_model(family)
    known = config.to_dict() | dict.fromkeys(config.attribute_map)
    sizes = {name: value for name, value in SIZES.items() if name in known}
    sizes |= {"vocab_size": VOCAB, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    sizes |= {"hidden_size": 32, "max_position_embeddings": 64} if family != "bloom" else {"hidden_size": 32}
    off = {name: 0.0 for name in known if name.endswith(("dropout", "pdrop"))}
    config = transformers.AutoConfig.for_model(family, **(sizes | off | FAMILIES.get(family, {}) | changes))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():  # the usual 0.02 gives almost equal probabilities
            if param.ndim > 1:
                param.mul_(4.0)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library_tokenizer(), eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    return folder


def plain_model(folder: Path) -> Any:
    """Return the folder's model as transformers loads it, in float64."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).double()
    model.set_experts_implementation("eager")
    return model.eval()
