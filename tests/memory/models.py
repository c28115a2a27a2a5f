"""Small float64 models of every kind, each with a function that calls it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder

LLAMA = DecoderSpec(
    vocab_size=61, dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=96, max_seq_len=64, tied=True
)
GPT2 = DecoderSpec(
    family="gpt2", vocab_size=61, dim=32, num_layers=3, num_heads=4, num_kv_heads=4, ffn_dim=128, max_seq_len=64
)

Call = Callable[[nn.Module], torch.Tensor]


def token_ids(num_rows: int = 2, num_tokens: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randint(61, (num_rows, num_tokens), generator=torch.Generator().manual_seed(seed))


def _decoder(spec: DecoderSpec) -> tuple[nn.Module, Call]:
    return build_decoder(spec, dtype=torch.float64, seed=0), lambda model: model(token_ids())


def _documents() -> tuple[nn.Module, Call]:
    documents_BT = (torch.arange(24) > 9).long()[None].expand(2, -1)
    model = build_decoder(LLAMA, dtype=torch.float64, seed=0)
    return model, lambda model: model(token_ids(), None, documents_BT)


def _hf_gpt2(attention: str = "sdpa", dropout: float = 0.1) -> tuple[nn.Module, Call]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_positions=64, n_embd=32, n_layer=3, n_head=4, attn_implementation=attention,
        resid_pdrop=dropout, attn_pdrop=dropout, embd_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double(), lambda model: model(token_ids()).logits


def _hf_qwen2() -> tuple[nn.Module, Call]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen2ForCausalLM(config).double(), lambda model: model(token_ids()).logits


class Residual(nn.Module):
    """Two convolutions with batch norms, added to the input."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.inner(x))


def _images() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _cnn() -> tuple[nn.Module, Call]:
    """Return a small residual network with blocks in a Sequential, and buffers that forward changes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(Residual(8), Residual(8)), nn.Sequential(Residual(8)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    return model.double(), lambda model: model(_images())


def _plain_cnn() -> tuple[nn.Module, Call]:
    """Return a model with dropout and without repeated blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 5),
    )  # fmt: skip
    return model.double(), lambda model: model(_images())


class Twice(nn.Module):
    """Runs its only block twice, with a keyword input, a frozen weight, and a tuple output."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 12)
            self.frozen = nn.Linear(12, 12).requires_grad_(False)
            self.down = nn.Linear(12, 6)

        def forward(self, x: torch.Tensor, *, gain: torch.Tensor) -> tuple[torch.Tensor, str]:
            return x + self.down(torch.tanh(self.frozen(self.up(x)))) * gain, "text"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer()])
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x, _text = self.layers[0](x, gain=self.gain)
        return x


def _twice() -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return Twice().double(), lambda model: model(x)


class Recurrent(nn.Module):
    """Blocks that modify products in place, as torch's recurrent layers do, and activations may."""

    class Layer(nn.Module):
        def __init__(self, kind: type[nn.RNNBase]) -> None:
            super().__init__()
            self.up, self.states = nn.Linear(6, 6), kind(6, 6, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            y.add_(x).tanh_()
            return x + self.states(y)[0]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(kind) for kind in (nn.GRU, nn.LSTM, nn.RNN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _recurrent() -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return Recurrent().double(), lambda model: model(x)


MODELS: dict[str, Callable[[], tuple[nn.Module, Call]]] = {
    "llama": lambda: _decoder(LLAMA),
    "llama-documents": _documents,
    "gpt2": lambda: _decoder(GPT2),
    "hf-gpt2": _hf_gpt2,
    "hf-gpt2-eager": lambda: _hf_gpt2("eager"),
    "hf-qwen2": _hf_qwen2,
    "cnn": _cnn,
    "plain-cnn": _plain_cnn,
    "twice": _twice,
    "recurrent": _recurrent,
}
HAVE_ATTENTION = {"llama", "llama-documents", "gpt2", "hf-gpt2", "hf-qwen2"}
