"""A small random Whisper with its feature extractor and a tokenizer of letters."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.train.tuned_folders import save_tokenizer

#: Length of the model's audio input in seconds.
SECONDS = 1


def save_whisper(folder: Path, dropout: float = 0.0, **sizes: int) -> Path:
    import transformers

    shape: dict[str, int] = {
        "vocab_size": save_tokenizer(folder, "whisper"), "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_target_positions": 64,
    }  # fmt: skip
    config = transformers.WhisperConfig(
        num_mel_bins=16, encoder_attention_heads=4, decoder_attention_heads=4, max_source_positions=50 * SECONDS,
        dropout=dropout, pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2, suppress_tokens=None,
        begin_suppress_tokens=None, **{**shape, **sizes},
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.WhisperForConditionalGeneration(config)
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS).save_pretrained(folder)
    return folder
