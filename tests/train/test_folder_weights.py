"""Folders whose weights contradict their config or are not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.tuned_folders import save_tokenizer
from weft.errors import CheckpointError
from weft.models.decoder import as_shapes
from weft.models.inspect import hugging_face
from weft.train.weights.published_weights import load_pretrained, pretrained_source

transformers = pytest.importorskip("transformers")


def folder_of(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    entries = save_tokenizer(folder, "llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=entries, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
        )
        model = transformers.T5ForConditionalGeneration(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=entries, **sizes, num_key_value_heads=2, tie_word_embeddings=kind == "tied"
        )
        model = transformers.LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(folder)
    return folder


def change(folder: Path, **tensors: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **{name.replace("__", "."): one for name, one in tensors.items()}},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip


def model_of(folder: Path):
    config = hugging_face.load_model_config(folder)
    with as_shapes(vectors=True):
        return hugging_face.headed_model(config, "Seq2SeqLM" if config.is_encoder_decoder else "CausalLM", "model")


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [
        ("tied", "model.embed_tokens.weight", "lm_head__weight"),
        ("t5", "shared.weight", "lm_head__weight"),
        ("t5", "shared.weight", "decoder__embed_tokens__weight"),
    ],
)
def test_tied_tensors_must_be_stored_with_one_value(tmp_path, kind, own, other):
    folder = folder_of(tmp_path, kind)
    table = load_file(folder / "model.safetensors")[own]
    change(folder, **{other: table.clone()})
    pretrained_source(model_of(folder), folder)
    table = table.clone()
    table[-1, -1] += 1
    change(folder, **{other: table})
    name = other.replace("__", ".")
    with pytest.raises(
        CheckpointError, match=r'config\.json ties .*, and their stored values differ\. Set "tie_word_emb'
    ) as e:
        pretrained_source(model_of(folder), folder)
    assert repr(name) in str(e.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_weights_are_named(tmp_path, dtype, value):
    folder = folder_of(tmp_path, "plain", dtype)
    name = "model.layers.0.mlp.up_proj.weight"
    weights = load_file(folder / "model.safetensors")
    model = model_of(folder).to_empty(device="cpu")
    load_pretrained(model, folder)
    weights[name][3, 5] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' of model\.safetensors has values that are not finite"):
        load_pretrained(model, folder)
