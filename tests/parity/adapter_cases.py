"""Models with adapters on a frozen base: every kind of adapter, with and without dropout, on several architectures."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from tests.parity.cases import GPT2, LLAMA, cases
from tests.parity.families import FAMILIES, FamilyCase, shape_of
from tests.parity.moe_cases import MOE, MoECase, hugging_face_moe_cases
from tests.parity.plans import Subject
from weft.models.adapters import add_adapter
from weft.verify.parity import Case, DecoderCase


@dataclasses.dataclass(frozen=True)
class AdapterCase:
    """Another case of which only an adapter is trained. B starts nonzero, so that A has a gradient in step 1."""

    of: Case
    kind: str = "lora"
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    start_noise: float = 0.05
    base: str = "stored"
    saved: tuple[str, ...] = ()
    tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def model(self) -> nn.Module:
        model = self.of.model()
        settings = {"targets": self.targets, "kind": self.kind, "dropout": self.dropout, "base": self.base}
        more = {"modules_to_save": self.saved, "trainable_tokens": dict(self.tokens)}
        add_adapter(model, rank=2, alpha=3, seed=5, **settings, **more)
        generator = torch.Generator().manual_seed(11)
        for _, param in model.named_parameters():
            if param.requires_grad:
                param.data += self.start_noise * torch.randn(param.shape, dtype=param.dtype, generator=generator)
        return model

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.of, name)

    @property
    def num_steps(self) -> int:
        return 2


def adapter_subjects() -> dict[str, Subject]:
    """Return subjects by name that differ in sharding (heads, shared keys, transposed or fused weights, experts)."""
    chosen = cases()
    experts, latent = MoECase(MOE, num_steps=3), FAMILIES["deepseek-v3"]
    return {
        "decoder-lora": Subject(AdapterCase(chosen["decoder"]), LLAMA),
        "decoder-dora": Subject(AdapterCase(chosen["decoder"], kind="dora"), LLAMA),
        "hf-qwen2-dora": Subject(AdapterCase(chosen["hf-qwen2"], kind="dora"), LLAMA),
        "hf-gpt2-dora": Subject(AdapterCase(chosen["hf-gpt2"], kind="dora"), GPT2),
        "hf-gpt2-some": Subject(AdapterCase(chosen["hf-gpt2"], kind="rslora", targets=("c_attn", "h.1.mlp.*")), GPT2),
        "hf-latent-dora": Subject(AdapterCase(FamilyCase("deepseek-v3"), kind="dora"), shape_of(latent)),
        "experts": Subject(AdapterCase(experts, kind="rslora"), MOE),
    }


#: Wide enough that each of two ranks has full blocks of 64 inputs.
WIDE = dataclasses.replace(LLAMA, dim=128, ffn_dim=128, num_heads=2)
WIDE_MOE = dataclasses.replace(MOE, dim=128, ffn_dim=128, expert_ffn_dim=128, num_heads=2)


def packed_subjects() -> dict[str, Subject]:
    """Return subjects with a quantized base, with adapters on all quantized layers and stacks or on some."""
    wide, stacks = DecoderCase(WIDE), stack_subjects()
    return {
        "nf4": Subject(AdapterCase(wide, base="nf4"), WIDE),
        "int8": Subject(AdapterCase(wide, base="int8", targets=("attn.q", "mlp.down")), WIDE),
        "nf4-experts": Subject(AdapterCase(MoECase(WIDE_MOE, num_steps=3), base="nf4"), WIDE_MOE),
        **{
            f"{base}-{name}": dataclasses.replace(stacks[name], case=dataclasses.replace(stacks[name].case, base=base))
            for base, name in (("nf4", "stacks"), ("int8", "stacks-oss"), ("int8", "stacks-own"))
        },
    }


#: Ids on both sides of the border between two ranks that share a vocabulary of 61.
ROWS = (2, 30, 31, 60)


def extra_subjects() -> dict[str, Subject]:
    """Return subjects that also train rows of embeddings, or modules in full, with tied and untied embeddings."""
    chosen = cases()
    tied, untied = (
        dataclasses.replace(chosen["hf-qwen2"], kind="llama"),
        (("embed_tokens", ROWS), ("lm_head", (5, *ROWS))),
    )
    return {
        "rows-tied": Subject(AdapterCase(tied, tokens=(("embed_tokens", ROWS),)), LLAMA),
        "rows-untied": Subject(AdapterCase(chosen["hf-qwen2"], tokens=untied), LLAMA),
        "rows-gpt2": Subject(AdapterCase(chosen["hf-gpt2"], kind="dora", tokens=(("wte", ROWS),)), GPT2),
        "saved-tied": Subject(AdapterCase(chosen["decoder"], saved=("embed", "blocks.1.norm1")), LLAMA),
        "saved-untied": Subject(AdapterCase(chosen["hf-qwen2"], saved=("lm_head", "layers.1.mlp")), LLAMA),
    }


STACKS = ("experts.gate_up_proj", "experts.down_proj")


def stack_subjects() -> dict[str, Subject]:
    """Return subjects with adapters on stacked experts, of code that Weft knows, and of code that it does not."""
    mixtral, own = hugging_face_moe_cases()["mixtral"], MoECase(MOE, num_steps=3)
    return {
        "stacks": Subject(AdapterCase(mixtral, targets=("q_proj", *STACKS)), MOE),
        "stacks-dora": Subject(AdapterCase(mixtral, kind="dora", targets=STACKS), MOE),
        "stacks-oss": Subject(AdapterCase(FamilyCase("gpt-oss"), targets=STACKS), shape_of(FAMILIES["gpt-oss"])),
        "stacks-own": Subject(AdapterCase(own, targets=("experts.gate_up", "experts.down")), MOE),
    }


def dropping_subjects() -> dict[str, Subject]:
    """Return subjects whose adapters have dropout. Their reference is one process of Weft, which has the same masks."""
    chosen = cases()
    return {
        "drop-lora": Subject(AdapterCase(chosen["decoder"], dropout=0.3), LLAMA),
        "drop-dora": Subject(AdapterCase(chosen["hf-gpt2"], kind="dora", dropout=0.3), GPT2),
        "drop-latent": Subject(AdapterCase(FamilyCase("deepseek-v3"), dropout=0.3), shape_of(FAMILIES["deepseek-v3"])),
    }
