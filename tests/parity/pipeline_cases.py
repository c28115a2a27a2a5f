"""Models for pipelines: deep enough for eight stages, some with frozen or tied parts."""

from __future__ import annotations

import dataclasses
import itertools
import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from tests.parity.moe_cases import MoECase, moe_cases
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.verify.parity import Case, DecoderCase
from weft.verify.verifier import Float64Throughout

ONE_STAGE = ("gpipe", "1f1b", "zb_h1")
TWO_STAGES = ("interleaved", "zb_interleaved", "zb_v", "dualpipe_v")
#: Every schedule, as part of a plan.
SCHEDULES = [f"schedule={name}" for name in ONE_STAGE] + [f"schedule={name} virtual_stages=2" for name in TWO_STAGES]

TIED = DecoderSpec(
    vocab_size=61, dim=16, num_layers=8, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=32, tied=True
)
GPT2 = DecoderSpec(
    family="gpt2", vocab_size=61, dim=16, num_layers=8, num_heads=2, num_kv_heads=2, ffn_dim=64, max_seq_len=32
)


@dataclass(frozen=True)
class FrozenCase(DecoderCase):
    """A decoder with frozen embedding and first blocks: some stages have no backward, others send no gradient."""

    num_frozen: int = 3

    def model(self) -> nn.Module:
        model = super().model()
        for module in (model.embed, model.pos_embed, *model.blocks[: self.num_frozen]):
            if module is not None:
                module.requires_grad_(False)
        model.blocks[-2].attn.requires_grad_(False)
        return model

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        # A stage may have no trainable parameter. Its optimizer is then empty.
        trained = [param for param in model.parameters() if param.requires_grad]
        return torch.optim.AdamW([{"params": trained}], lr=3e-3, weight_decay=0.1)


@dataclass(frozen=True)
class FamilyCase(DecoderCase):
    """A Hugging Face decoder of eight tiny layers. kind: a model type of transformers."""

    kind: str = "qwen2"

    def model(self) -> nn.Module:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers

        torch.manual_seed(self.seed)
        vocab = self.spec.vocab_size
        if self.kind == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=vocab, n_embd=16, n_layer=8, n_head=2, n_positions=32,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )  # fmt: skip
            return transformers.GPT2LMHeadModel(config).double()
        if self.kind == "bloom":
            config = transformers.BloomConfig(
                vocab_size=vocab, hidden_size=16, n_layer=8, n_head=2, hidden_dropout=0.0, attention_dropout=0.0
            )
            return transformers.BloomForCausalLM(config).double()
        settings = {
            "vocab_size": vocab, "hidden_size": 16, "num_hidden_layers": 8, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32,
        }  # fmt: skip
        if self.kind == "gemma3_text":
            # Layers of two kinds, which depend on the index in the list.
            settings |= {"head_dim": 4, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 4}
        config = transformers.AutoConfig.for_model(self.kind, **settings)
        return transformers.AutoModelForCausalLM.from_config(config).double()

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> object:
        inputs = {"input_ids": batch["input_ids"], "use_cache": False}
        if self.kind != "bloom":
            inputs["position_ids"] = batch["positions"]
        # Gemma's norms sum their weight's gradient in float32, whose result depends on the microbatches.
        with Float64Throughout() if self.kind.startswith("gemma") else nullcontext():
            return model(**inputs).logits


@dataclass(frozen=True)
class SequentialCase:
    """A plain nn.Sequential whose layers change the width: shapes differ between stage boundaries."""

    num_steps: int = 2
    max_grad_norm: float = 1.0
    global_batch: int = 16

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        widths = [5, 9, 4, 12, 7, 7, 8, 6, 5]
        layers: list[nn.Module] = []
        for wide, narrow in itertools.pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.Tanh()]
        return nn.Sequential(*layers).double()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {"x": torch.randn(self.global_batch, 5, generator=generator, dtype=torch.float64)}

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"])

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return (output - batch["x"].roll(1, -1)).square().sum(), len(output)


def cases() -> dict[str, Case]:
    """Return one case of each kind by name."""
    return {
        "tied": DecoderCase(TIED, num_steps=2, global_batch=16, seq_len=8, documents=True),
        "gpt2": DecoderCase(GPT2, num_steps=2, global_batch=16, seq_len=8, optimizer="sgd"),
        "frozen": FrozenCase(GPT2, num_steps=2, global_batch=16, seq_len=8),
        "sequential": SequentialCase(),
    }


def families() -> dict[str, Case]:
    """Return Hugging Face decoders by name."""
    kinds = ("llama", "qwen2", "gpt2", "bloom", "gpt_neox", "gemma2", "gemma3_text")
    return {kind: FamilyCase(TIED, num_steps=2, global_batch=16, seq_len=8, kind=kind) for kind in kinds}


def expert_cases() -> dict[str, Case]:
    """Return decoders with experts, deep enough for four stages, with each balancing and dropping method."""
    return {
        name: dataclasses.replace(
            case, spec=dataclasses.replace(case.spec, num_layers=4), global_batch=16, seq_len=8, num_steps=2
        )
        for name, case in moe_cases().items()
        if isinstance(case, MoECase) and name != "plain"
    }
