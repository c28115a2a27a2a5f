"""Models with several chains of blocks: encoder-decoder models, and a vision tower with a text decoder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

IGNORE = -100
_ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": 61, "d_model": 16, "encoder_layers": 3, "decoder_layers": 5, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_IMAGE = 60


@dataclass(frozen=True)
class ChainCase:
    """A transformers model with eight blocks in its chains, and padded sources and targets of different lengths.

    kind: t5, bart, whisper or llava. frozen: freeze the encoder or the vision tower. reads_encoder: the loss also
    reads the encoder's hidden states. dropout: rate for activations and attention, ignored by llava.
    """

    kind: str
    frozen: bool = False
    reads_encoder: bool = False
    dropout: float = 0.0
    num_steps: int = 2
    max_grad_norm: float = 1.0
    global_batch: int = 8

    def model(self) -> nn.Module:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers

        torch.manual_seed(5)
        rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), self.dropout)
        if self.kind == "t5":
            model: Any = transformers.T5ForConditionalGeneration(transformers.T5Config(
                vocab_size=61, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_decoder_layers=5, num_heads=4,
                dropout_rate=self.dropout, decoder_start_token_id=0, relative_attention_num_buckets=8,
            ))  # fmt: skip
        elif self.kind == "bart":
            model = transformers.BartForConditionalGeneration(transformers.BartConfig(**_ENCODER_DECODER, **rates))
        elif self.kind == "whisper":
            model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
                **_ENCODER_DECODER, **rates, num_mel_bins=8, max_source_positions=12, max_target_positions=16,
            ))  # fmt: skip
        else:
            model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
                vision_config={
                    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24,
                    "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
                },
                text_config={
                    "model_type": "llama", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24,
                    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "max_position_embeddings": 64,
                },
                image_token_id=_IMAGE, vision_feature_layer=-1,
            ))  # fmt: skip
        if self.frozen:
            part = model.model.vision_tower if self.kind == "llava" else model.get_encoder()
            part.requires_grad_(False)
        return model.double()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        rows, source, target = self.global_batch, 9 + step, 7 - step

        def random_ids(*shape: int) -> torch.Tensor:
            return torch.randint(3, _IMAGE, shape, generator=generator)

        ids, labels = random_ids(rows, source), random_ids(rows, target)
        lengths = torch.randint(1, target + 1, (rows, 1), generator=generator)
        labels[torch.arange(target) >= lengths] = IGNORE
        mask = (torch.arange(source) < torch.randint(5, source + 1, (rows, 1), generator=generator)).long()
        if self.kind == "whisper":
            sounds = torch.randn(rows, 8, 24, generator=generator, dtype=torch.float64)
            return {"input_features": sounds, "labels": labels}
        if self.kind == "llava":
            ids[:, 1:5] = _IMAGE
            labels = torch.where((mask > 0) & (ids != _IMAGE), ids, IGNORE)
            images = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
            return {"input_ids": ids, "attention_mask": mask, "pixel_values": images, "labels": labels}
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        inputs = {name: each for name, each in batch.items() if name != "labels"}
        if self.kind != "llava":
            inputs["decoder_input_ids"] = torch.nn.functional.pad(batch["labels"][:, :-1].clamp(min=0), (1, 0), value=2)
        return model(**inputs, use_cache=False)

    def loss(self, output: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits, labels = output.logits, batch["labels"]
        if self.kind == "llava":
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        if self.reads_encoder:
            loss = loss + output.encoder_last_hidden_state.square().sum()
        return loss, (labels != IGNORE).sum()


CASES = {
    **{kind: ChainCase(kind) for kind in ("t5", "bart", "whisper", "llava")},
    "t5-frozen": ChainCase("t5", frozen=True),
    "llava-frozen": ChainCase("llava", frozen=True),
    "bart-reads-encoder": ChainCase("bart", reads_encoder=True),
}
