"""Per-sample norms and weighted gradients against autograd on single samples, for each kind of layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import ModelError
from weft.models.adapters import add_adapter
from weft.models.decoder import Decoder
from weft.privacy.factors import Direct, Product, clip_weights
from weft.privacy.recorder import GradientRecord, GradientRecorder, Owner, UnknownUse

LIMIT = 1e-12


class Net(nn.Module):
    """Runs layers one after another; `tokens` are ids."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, ids):
        return F.linear(torch.tanh(self.mid(self.embed(ids))) * self.scale, self.embed.weight)


class Twice(nn.Module):
    """Calls one layer twice, and multiplies by a transposed weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return (
            torch.addmm(x.new_zeros(4), self.one(torch.tanh(self.one(x))).flatten(0, 1), self.other).view(
                *x.shape[:2], 4
            )
            + x @ self.other
        )


class Shift(nn.Module):
    """Reads its parameter in an operation that only vmap can handle."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return torch.einsum("btd,kd->btk", x, self.weight.cumsum(0))


def decoder(**options) -> nn.Module:
    spec = DecoderSpec(
        vocab_size=13, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=16, **options
    )
    return Decoder(spec)


def lora() -> nn.Module:
    model = decoder()
    add_adapter(model, rank=2, alpha=4.0)
    return model


def experts() -> nn.Module:
    return decoder(num_experts=4, top_k=2, expert_ffn_dim=12, balance="none")


IDS, ROWS, PICTURES = (5, 7), (5, 3, 6), (5, 4, 8, 8)
KINDS = {
    "linear": (lambda: Net(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4)), ROWS),
    "vectors": (lambda: Net(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), (5, 6)),
    "tied": (Tied, IDS),
    "twice": (Twice, ROWS),
    "norms": (lambda: Net(nn.LayerNorm(6), nn.Linear(6, 6), nn.RMSNorm(6), nn.Linear(6, 2)), ROWS),
    "pictures": (
        lambda: Net(
            nn.Conv2d(4, 8, 3, padding=1, stride=2), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 8, 3, groups=4),
            nn.Flatten(), nn.Linear(32, 3),
        ),
        PICTURES,
    ),
    "signals": (lambda: Net(nn.Conv1d(3, 5, 2, dilation=2), nn.Tanh(), nn.Conv1d(5, 2, 1, bias=False)), ROWS),
    "padding": (lambda: Net(nn.Embedding(11, 6, padding_idx=3), nn.Linear(6, 2)), IDS),
    "alone": (lambda: Net(nn.Linear(6, 6), Shift()), ROWS),
    "decoder": (decoder, IDS),
    "tied decoder": (lambda: decoder(tied=True), IDS),
    "gpt2": (lambda: decoder(family="gpt2"), IDS),
    "lora": (lora, IDS),
    "experts": (experts, IDS),
}  # fmt: skip


def made(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    model = make().double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param) * 0.4)
    is_ids = isinstance(next(iter(model.modules())), Decoder) or shape == IDS
    return model, torch.randint(0, 11, shape) if is_ids else torch.randn(*shape, dtype=torch.float64)


def losses(output: torch.Tensor) -> torch.Tensor:
    return output.sin().flatten(1).sum(1) + output.square().flatten(1).mean(1)


def plain(model: nn.Module, x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    found = []
    for index in range(len(x)):
        model.zero_grad()
        losses(model(x[index : index + 1])).sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    return found


def recorded(model: nn.Module, x: torch.Tensor, *, keeps: bool, alone=()) -> GradientRecord:
    names = {id(param): name for name, param in model.named_parameters()}
    record = GradientRecord(len(x), lambda param: Owner(names[id(param)]), keeps=keeps)
    with GradientRecorder(record, model, {path: model.get_submodule(path) for path in alone}).recording():
        total = losses(model(x)).sum()
    total.backward()
    assert all(param.grad is None for param in model.parameters())
    return record


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_sums_equal_single_samples(kind):
    model, x = made(kind)
    want = plain(model, x)
    norms = torch.stack([sum(grad.square().sum() for grad in one.values()) for one in want])
    alone = ["layers.1"] if kind == "alone" else []
    if alone:
        with pytest.raises(UnknownUse, match="cumsum"):
            recorded(model, x, keeps=True)
    assert torch.allclose(recorded(model, x, keeps=False, alone=alone).norms(x.device), norms, rtol=LIMIT)
    record = recorded(model, x, keeps=True, alone=alone)
    assert torch.allclose(record.norms(x.device), norms, rtol=LIMIT)
    weights = clip_weights(norms, float(norms.median().sqrt()))
    sums = dict(record.weighted(weights))
    for name, param in model.named_parameters():
        if param.requires_grad:
            total = sum(weight * one[name] for weight, one in zip(weights, want, strict=True))
            assert torch.allclose(sums[param], total, rtol=LIMIT, atol=LIMIT), name
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(want[0])


def test_both_forms_of_a_product_are_equal():
    x, grad = torch.randn(4, 6, 5).double(), torch.randn(4, 6, 7).double()
    wide_x, wide_grad = torch.randn(4, 2, 50).double(), torch.randn(4, 2, 70).double()
    for one in (Product(x, grad), Product(wide_x, wide_grad), Product(x, grad, is_transposed=True)):
        assert torch.allclose(one.norms(), Direct(one.per_sample()).norms(), rtol=LIMIT)
        weights = torch.rand(4).double()
        assert torch.allclose(one.weighted(weights), Direct(one.per_sample()).weighted(weights), rtol=LIMIT)


def test_samples_that_are_not_finite_get_no_weight():
    norms = torch.tensor([0.0, 1.0, 4.0, float("nan"), float("inf")]).double()
    assert clip_weights(norms, 1.0).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_rows_that_are_not_samples_are_refused():
    model = Net(nn.Linear(6, 2)).double()
    record = GradientRecord(4, lambda param: Owner("weight"), keeps=False)
    with (
        pytest.raises(ModelError, match=r"shape \(3, 5, 6\) in a microbatch of 4 samples, so its rows are not samples"),
        GradientRecorder(record, model, {}).recording(),
    ):
        model(torch.randn(3, 5, 6).double())


def transformers_model(kind: str) -> tuple[nn.Module, torch.Tensor]:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    text = {**sizes, "vocab_size": 50, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    if kind == "gpt2":
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1}
        config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=16, **drops)
        return transformers.GPT2LMHeadModel(config), torch.randint(0, 50, IDS)
    if kind == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**text, **off)), torch.randint(
            0, 50, IDS
        )
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**text)), torch.randint(0, 50, IDS)
    config = transformers.ViTConfig(**sizes, **off, image_size=16, patch_size=8)
    return transformers.ViTForImageClassification(config), torch.randn(5, 3, 16, 16, dtype=torch.float64)


class Logits(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "vit"])
def test_models_of_transformers(kind):
    model, x = transformers_model(kind)
    model = Logits(model).double()
    norms = torch.stack([sum(grad.square().sum() for grad in one.values()) for one in plain(model, x)])
    alone = ["model.vit.embeddings"] if kind == "vit" else []
    assert torch.allclose(recorded(model, x, keeps=True, alone=alone).norms(x.device), norms, rtol=LIMIT)
