"""Models with experts for the parity matrix: Weft's with every balancing method, and Hugging Face's."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import torch
from torch import nn

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.experts import routers
from weft.parallel.expert import balance_routers
from weft.verify.parity import Case, DecoderCase
from weft.verify.verifier import Float64Throughout

#: One dense layer and two with experts. The balancing loss has a large weight, so that errors in it are visible.
MOE = DecoderSpec(
    vocab_size=61, dim=16, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=32, tied=True,
    num_experts=8, top_k=2, expert_ffn_dim=12, num_shared_experts=1, first_moe_layer=1, balance_rate=0.05,
)  # fmt: skip


@dataclass(frozen=True)
class MoECase(DecoderCase):
    """A decoder with experts whose random router weights give the experts very different loads."""

    def model(self) -> nn.Module:
        model = super().model()
        for index, router in enumerate(routers(model)):
            generator = torch.Generator().manual_seed(index)
            with torch.no_grad():
                router.weight.copy_(torch.randn(router.weight.shape, generator=generator, dtype=torch.float64))
        return model


@dataclass(frozen=True)
class HuggingFaceMoECase(DecoderCase):
    """A Hugging Face decoder with experts. kind: "mixtral", "qwen2_moe" or "qwen3_moe"."""

    kind: str = "mixtral"
    balance_rate: float = 0.0

    def model(self) -> nn.Module:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers

        torch.manual_seed(self.seed)
        common = {
            "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32,
            "tie_word_embeddings": False, "num_experts_per_tok": 2, "initializer_range": 0.3,
        }  # fmt: skip
        if self.kind == "mixtral":
            config = transformers.MixtralConfig(**common, num_local_experts=4, sliding_window=None)
            model = transformers.MixtralForCausalLM(config)
        elif self.kind == "qwen2_moe":
            config = transformers.Qwen2MoeConfig(
                **common, num_experts=8, moe_intermediate_size=12, shared_expert_intermediate_size=20
            )
            model = transformers.Qwen2MoeForCausalLM(config)
        else:
            config = transformers.Qwen3MoeConfig(
                **common, num_experts=8, moe_intermediate_size=12, head_dim=8, norm_topk_prob=True,
                mlp_only_layers=[0],
            )  # fmt: skip
            model = transformers.Qwen3MoeForCausalLM(config)
        model.set_experts_implementation("eager")
        if self.balance_rate:
            balance_routers(model, self.balance_rate)
        return model.double()

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        # Routers take softmax in float32, which can amplify a last bit of float64 to one of float32.
        with Float64Throughout():
            return model(input_ids=batch["input_ids"], position_ids=batch["positions"], use_cache=False).logits


def moe_cases() -> dict[str, Case]:
    """Return cases by name with every balancing and dropping method, padding and packed documents."""
    of = dataclasses.replace
    return {
        "aux": MoECase(MOE, global_batch=8, num_steps=2),
        "bias": MoECase(of(MOE, balance="bias", router="sigmoid", balance_rate=0.02), global_batch=8, num_steps=3),
        "capacity": MoECase(of(MOE, capacity_factor=0.75, top_k=3, route_scale=2.5), global_batch=8, num_steps=2,
                            documents=True),
        "plain": MoECase(of(MOE, balance="none", normalise_top_k=False, num_shared_experts=0), global_batch=8,
                         num_steps=2, masked=0.0),
    }  # fmt: skip


def hugging_face_moe_cases() -> dict[str, Case]:
    return {
        kind: HuggingFaceMoECase(MOE, global_batch=8, num_steps=2, kind=kind, balance_rate=rate)
        for kind, rate in (("mixtral", 0.0), ("qwen2_moe", 0.5), ("qwen3_moe", 0.5))
    }
