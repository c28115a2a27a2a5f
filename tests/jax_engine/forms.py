"""Model forms that both engines compute: a model in float64, a batch, and a function to a loss sum and a count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy

Form = tuple[nn.Module, Any, Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]]]
_SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
          "num_attention_heads": 2, "max_position_embeddings": 32}  # fmt: skip
_SMALL = {"vocab_size": 48, "dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 24, "max_seq_len": 16}


def tokens(**more: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(48, (4, 8))
    labels[-1, 3:] = -100
    positions = torch.arange(8).repeat(4, 1)
    return {"input_ids": torch.randint(48, (4, 8)), "labels": labels, "positions": positions, **more}


def own(batch: Any = None, **changes: Any) -> Form:
    """One of Weft's decoders."""
    spec = DecoderSpec(**{**_SMALL, "num_kv_heads": 1, **changes})
    model = build_decoder(spec, dtype=torch.float64)
    return model, batch or tokens(), lambda model, batch: token_cross_entropy(model_forward(model, batch), batch)


def documents() -> Form:
    ids = (torch.arange(8) >= 3).long().repeat(4, 1)
    return own(tokens(document_ids=ids, document_starts=torch.tensor([[0, 3]]).repeat(4, 1)))


def language(model: Any) -> Form:
    """A language model of transformers."""

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        options = {} if isinstance(model, hf.BertForMaskedLM) else {"use_cache": False}
        return token_cross_entropy(model(input_ids=batch["input_ids"], **options).logits, batch)

    return model.double(), tokens(), loss


def squares(model: nn.Module, *shape: int, pick: Callable[[Any], torch.Tensor] = lambda out: out) -> Form:
    """A model of one float tensor, with a sum of squares as its loss."""
    torch.manual_seed(2)
    x = torch.rand(*shape, dtype=torch.float64)

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = pick(model(batch["x"]))
        return (out - 0.3).square().sum(), torch.tensor(len(out))

    return model.double(), {"x": x}, loss


class Picture(nn.Module):
    """Wraps an image classifier of transformers."""

    def __init__(self) -> None:
        super().__init__()
        config = hf.ViTConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8,
            patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.vit = hf.ViTForImageClassification(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.vit(pixel_values=x).logits


class Tied(nn.Module):
    """An embedding that is also the head, in-place updates, and a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 16, padding_idx=0)
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-3)
        y = torch.zeros_like(x)
        y[:, 1:] += x[:, :-1]
        y.mul_(0.5).add_(x)
        return self.head(F.silu(y))


class Mixer(nn.Module):
    """Einsums, a detached branch, no_grad, cumulative sums, top-k and a gather."""

    def __init__(self) -> None:
        super().__init__()
        self.across, self.along = nn.Parameter(torch.rand(6, 6)), nn.Parameter(torch.rand(8, 8))
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(torch.einsum("btd,ts->bsd", x, self.across)) @ self.along
        with torch.no_grad():
            scale = y.abs().amax(-1, keepdim=True)
        y = y / scale + y.detach().cumsum(1)
        top = y.topk(3, -1)
        return torch.cat([top.values, y.gather(-1, top.indices).sigmoid(), y.roll(1, 1)], -1)


class Net(nn.Module):
    """An encoder and decoder of images: transposed convolution, upsampling, a skip connection, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.leaky_relu(self.down(x))
        y = torch.cat([self.up(y), F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="nearest")], 1)
        return self.out(F.softplus(y)).flatten(1)


def recurrent(kind: type[nn.Module]) -> Form:
    return squares(kind(4, 6, batch_first=True), 3, 5, 4, pick=lambda out: out[0])


def tied() -> Form:
    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return token_cross_entropy(model(batch["input_ids"]), batch)

    return Tied().double(), tokens(), loss


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2), nn.GroupNorm(2, 4), nn.GELU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 3), nn.LogSoftmax(-1),
    )  # fmt: skip


_GPT2 = {"vocab_size": 48, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
#: 20 forms by name.
FORMS: dict[str, Callable[[], Form]] = {
    "weft_llama": own,
    "weft_gpt2": lambda: own(family="gpt2", num_kv_heads=2, tied=True),
    "weft_documents": documents,
    "weft_experts": lambda: own(num_experts=4, expert_ffn_dim=8),
    "weft_shared_experts": lambda: own(num_experts=4, router="sigmoid", num_shared_experts=1, moe_every=2),
    "hf_llama": lambda: language(hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES, num_key_value_heads=1))),
    "hf_qwen3": lambda: language(hf.Qwen3ForCausalLM(hf.Qwen3Config(**_SIZES, num_key_value_heads=1, head_dim=8))),
    "hf_gpt2": lambda: language(hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2))),
    "hf_gemma2": lambda: language(
        hf.Gemma2ForCausalLM(hf.Gemma2Config(**_SIZES, num_key_value_heads=1, head_dim=8, sliding_window=3))
    ),
    "hf_mixtral": lambda: language(
        hf.MixtralForCausalLM(
            hf.MixtralConfig(**_SIZES, num_key_value_heads=1, num_local_experts=4, experts_implementation="eager")
        )
    ),
    "hf_bert": lambda: language(hf.BertForMaskedLM(hf.BertConfig(**_SIZES, **_BERT))),
    "hf_vit": lambda: squares(Picture(), 2, 3, 8, 8),
    "mlp": lambda: squares(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)), 5, 4),
    "convolutions": lambda: squares(convolutions(), 4, 2, 8, 8),
    "encoder_layer": lambda: squares(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 3, 5, 8),
    "gru": lambda: recurrent(nn.GRU),
    "lstm": lambda: recurrent(nn.LSTM),
    "tied": tied,
    "mixer": lambda: squares(Mixer(), 3, 6, 8),
    "images": lambda: squares(Net(), 3, 2, 8, 8),
}
