"""Layouts from a model's published plan or from tracing, and rejected layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.parallel.tensor_cases import LLAMA, build
from tests.parity.families import FamilyCase
from tests.train.gradient_kinds import function_of
from weft.config.fields.layout import Layout
from weft.errors import LayoutError, PlanError
from weft.models.inspect import hugging_face
from weft.models.inspect.counted_sizes import track_reshape
from weft.models.inspect.find_layout import explain_layout, find_layout
from weft.models.inspect.layout_trace import trace_layout
from weft.models.registry import build_decoder
from weft.parallel.tensor.read_layout import check_layout, read_own

FOUND = {
    "gpt2": "transformer.wte=vocab transformer.h.*.attn.c_attn=colwise:3 transformer.h.*.attn.c_proj=rowwise "
    "transformer.h.*.mlp.c_fc=colwise transformer.h.*.mlp.c_proj=rowwise lm_head=vocab",
    "bert": "bert.embeddings.word_embeddings=vocab bert.encoder.layer.*.attention.self.{query,key,value}=colwise "
    "bert.encoder.layer.*.attention.output.dense=rowwise bert.encoder.layer.*.intermediate.dense=colwise "
    "bert.encoder.layer.*.output.dense=rowwise cls.predictions.decoder=vocab",
    "vit": "vit.layers.*.attention.{q_proj,k_proj,v_proj}=colwise vit.layers.*.attention.o_proj=rowwise "
    "vit.layers.*.mlp.fc1=colwise vit.layers.*.mlp.fc2=rowwise",
}


@pytest.mark.parametrize("name", FOUND)
def test_models_without_a_published_plan_are_traced(name):
    assert find_layout(build(name)).format() == FOUND[name]


def test_encoder_decoder_is_traced_with_both_inputs():
    whisper = pytest.importorskip("transformers").WhisperConfig(
        vocab_size=64, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=20,
        architectures=["WhisperForConditionalGeneration"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    text = find_layout(hugging_face.model_of_config(whisper)).format()
    for half, attention in (("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "encoder_attn")):
        assert f"model.{half}.layers.*.{attention}.{{k_proj,v_proj,q_proj}}=colwise" in text
        assert f"model.{half}.layers.*.{attention}.out_proj=rowwise" in text
    assert "model.decoder.embed_tokens=vocab" in text
    assert "proj_out=vocab" in text


@pytest.mark.parametrize(
    ("name", "styles"),
    [
        ("deepseek_v3", "model.layers.*.self_attn.{q_a_proj,q_a_layernorm,kv_a_proj_with_mqa,kv_a_layernorm}=partial "
         "model.layers.*.self_attn.{q_b_proj,kv_b_proj}=colwise"),
        ("gpt_oss", "model.layers.*.self_attn.{q_proj,k_proj,v_proj,sinks}=colwise"),
        ("glm", "model.layers.*.self_attn.{q_proj,k_proj,v_proj}=colwise"),
        ("olmo2", "model.layers.*.self_attn.{q_proj,k_proj,v_proj,q_norm,k_norm}=colwise"),
    ],
)  # fmt: skip
def test_attention_is_sharded_with_shared_and_per_head_parts(name, styles):
    model = FamilyCase(name).model() if name == "olmo2" else build(name)
    found = find_layout(model).format()
    assert f"{styles} model.layers.*.self_attn.o_proj=rowwise" in found


def test_attention_with_biases_of_all_heads_is_replicated():
    assert "self_attention" not in find_layout(build("bloom")).format()


def test_both_towers_of_clip_are_sharded():
    part = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    clip = pytest.importorskip("transformers").CLIPConfig(
        text_config=part | {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        vision_config=part | {"image_size": 8, "patch_size": 4}, architectures=["CLIPModel"],
    )  # fmt: skip
    text = find_layout(hugging_face.model_of_config(clip)).format()
    for tower in ("text_model", "vision_model"):
        assert f"{tower}.encoder.layers.*.self_attn.{{k_proj,v_proj,q_proj}}=colwise" in text
        assert f"{tower}.encoder.layers.*.mlp.fc2=rowwise" in text


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "phi", "gemma"])
def test_traced_layout_matches_the_published_plan(name):
    model = build(name)
    paths = [path for path, _ in model.named_modules()]
    published, traced = find_layout(model), trace_layout(model).layout
    assert explain_layout(model).source == "the model's own base_model_tp_plan"
    assert {path: published.match(path) for path in paths} == {path: traced.match(path) for path in paths}


def test_traced_layout_matches_the_named_layout():
    model = build_decoder(LLAMA, device="meta")
    traced, own = trace_layout(model).layout, Layout.named("llama")
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            assert traced.match(path) == own.match(path), path


class Pair(nn.Module):
    """Two linear layers with an operation between."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(6, 12), nn.Linear(12, 6), between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


def hooked(x, hook):
    y = x * 1.0
    y.register_hook(hook)
    return y


def written(x, index):
    y = x.clone()
    y[index(y)] = 0.0
    return y


class TwoInputs(torch.autograd.Function):
    """A gate. It saves its inputs and its output."""

    @staticmethod
    def forward(ctx, gate, x):
        y = gate.sigmoid() * x
        ctx.save_for_backward(gate, x, y)
        return y

    @staticmethod
    def backward(ctx, *grads):
        gate, x, y = ctx.saved_tensors
        return grads[0] * x * gate.sigmoid() * (1 - gate.sigmoid()), grads[0] * y / x


FEATURE_WISE = {
    "pointwise": lambda x: F.gelu(x) * x.sigmoid() + 1.0,
    "heads": lambda x: x.view(2, 8, -1, 3).softmax(-1).reshape(2, 8, -1),
    "transposed": lambda x: (x.view(2, 8, -1, 3).transpose(1, 2) * 2).transpose(1, 2).flatten(2),
    "turned by attribute": lambda x: (x.mT * 2).mT,
    "norm of each head": lambda x: F.rms_norm(x.view(2, 8, -1, 3), (3,)).view(2, 8, -1),
    "a backward of each feature": lambda x: function_of(lambda grad, x: grad * (x > 0)).apply(x),
    "a backward that mixes samples": lambda x: function_of(lambda grad, x: grad - grad.mean(0)).apply(x),
    "a backward by samples": lambda x: function_of(lambda grad, x: grad / len(grad)).apply(x),
    "a function of two inputs": lambda x: TwoInputs.apply(x, x),
    "a hook of each feature": lambda x: hooked(x, lambda grad: grad * 0.5),
    "each written": lambda x: written(x, lambda x: x < 0),
    "all written": lambda x: written(x, lambda x: (0, slice(2))),
}
FEATURE_MIXING = {
    "softmax over features": lambda x: x.softmax(-1),
    "norm of all": lambda x: F.layer_norm(x, (12,)),
    "a sum": lambda x: x - x.mean(-1, keepdim=True),
    "heads last": lambda x: x.view(2, 8, 3, 4).transpose(2, 3).reshape(2, 8, 12),
    "turned": lambda x: x.flip(-1),
    "a whole tensor": lambda x: x + torch.arange(12.0, device=x.device),
    "half of it": lambda x: torch.cat((x[..., 3:], x[..., :3]), -1),
    "one written": lambda x: written(x, lambda x: (..., 0)),
    "some written": lambda x: written(x, lambda x: (slice(None), slice(None), slice(3))),
    "a norm in backward": lambda x: function_of(lambda grad, x: grad / grad.norm()).apply(x),
    "a mean in backward": lambda x: function_of(lambda grad, x: grad - grad.mean(-1, keepdim=True)).apply(x),
    "a number of features in backward": lambda x: function_of(lambda grad, x: grad / x.shape[-1]).apply(x),
    "largest in backward": lambda x: function_of(lambda grad, x: grad * (grad >= grad.flatten().median())).apply(x),
    "numpy in backward": lambda x: function_of(lambda grad, x: torch.from_numpy(grad.numpy() * 2)).apply(x),
    "a norm in a hook": lambda x: hooked(x, lambda grad: grad / grad.norm(dim=-1, keepdim=True)),
}


@pytest.mark.parametrize("name", FEATURE_WISE)
def test_feature_wise_operations_allow_sharding(name):
    assert trace_layout(Pair(FEATURE_WISE[name])).layout.format() == "first=colwise second=rowwise"


@pytest.mark.parametrize("name", FEATURE_MIXING)
def test_feature_mixing_operations_prevent_sharding(name):
    with pytest.raises(LayoutError, match=r"nothing in Pair can be sharded.*\(first: \w"):
        trace_layout(Pair(FEATURE_MIXING[name]))


@pytest.mark.parametrize("computed", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_layers_whose_weight_is_computed_are_not_cut(computed):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), computed(nn.Linear(8, 6)), Pair(torch.relu))
    assert trace_layout(model).layout.format() == "*.first=colwise *.second=rowwise"


class Encoder(nn.Module):
    """torch's transformer layers, which check if their mask is causal and call a fused kernel in evaluation."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embed, self.encoder = nn.Embedding(11, 8), nn.TransformerEncoder(layer, 2)

    def forward(self, ids):
        return self.encoder(self.embed(ids), mask=nn.Transformer.generate_square_subsequent_mask(ids.shape[1]))


def test_torch_transformer_layers_are_traced():
    found = trace_layout(Encoder()).layout.format()
    assert found == "embed=vocab encoder.layers.*.linear1=colwise encoder.layers.*.linear2=rowwise"
    assert torch.backends.mha.get_fastpath_enabled()


class ImageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.up, self.down = nn.Conv2d(3, 4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def get_input_embeddings(self):
        raise NotImplementedError

    def forward(self, x):
        return self.down(self.up(self.patch(x).flatten(2).mT).relu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_example_inputs_have_the_model_dtype(dtype):
    assert trace_layout(ImageModel().to(dtype)).layout.format() == "up=colwise down=rowwise"


class CachesTables(Pair):
    """Caches tables between forwards, in buffers, attributes, dicts and lists."""

    def __init__(self):
        super().__init__(self.scaled)
        self.register_buffer("table", None, persistent=False)
        self.tables, self.plain, self.rows = {}, None, []

    def scaled(self, x):
        if self.table is None:
            self.table = torch.ones(8, 1)
            self.plain = self.tables[8] = torch.ones(8, 1)
            self.rows.append(self.plain)
        return x * self.table * self.plain * self.tables[8] * self.rows[0]


def test_tracing_leaves_no_cached_tensors_in_the_model():
    model = CachesTables()
    model.second.eval()  # like a frozen part
    assert trace_layout(model).layout.format() == "first=colwise second=rowwise"
    assert (model.table, model.tables, model.plain, model.rows) == (None, {}, None, [])
    assert (model.training, model.first.training, model.second.training) == (True, True, False)
    assert not model(torch.zeros(2, 8, 6)).is_meta


class BFloat16Only(Pair):
    """A kernel that supports only bfloat16."""

    def forward(self, x):
        if x.dtype != torch.bfloat16:
            raise RuntimeError("expected BFloat16")
        return super().forward(x)


def test_model_with_bf16_kernels_is_traced_in_bf16():
    assert trace_layout(BFloat16Only(F.gelu)).layout.format() == "first=colwise second=rowwise"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_track_reshape_matches_reshape(sizes, data):
    """Check that sharding before a reshape equals sharding the returned dim after it."""
    full = torch.arange(int(torch.tensor(sizes).prod())).reshape(sizes)
    flat = full.numel()
    divisors = [d for d in range(1, flat + 1) if flat % d == 0]
    head = data.draw(st.sampled_from(divisors))
    new = (head, flat // head)
    dim = data.draw(st.integers(0, len(sizes) - 1))
    new_dim = track_reshape(tuple(sizes), new, dim)
    for parts in (2, 3, 4):
        if new_dim is None or sizes[dim] % parts or new[new_dim] % parts:
            continue
        sharded = [
            part.reshape([n // parts if i == new_dim else n for i, n in enumerate(new)])
            for part in full.chunk(parts, dim)
        ]
        assert torch.equal(torch.cat(sharded, new_dim), full.reshape(new))


GOLDEN = [
    (6, "tp=6: blocks.0.attn.q has 4 heads, and 4 is not a multiple of 6. Use tp=1, 2 or 4."),
    (3, "tp=3: blocks.0.attn.q has 4 heads, and 4 is not a multiple of 3. Use tp=1, 2 or 4."),
]


@pytest.mark.parametrize(("tp", "text"), GOLDEN)
def test_invalid_tp_is_rejected_with_legal_values(tp, text):
    with pytest.raises(PlanError) as caught:
        check_layout(build_decoder(LLAMA, device="meta"), Layout.named("llama"), tp)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("blocks.*.attn.query=colwise", "layout pattern 'blocks.*.attn.query': the model has no such module."),
        (
            "blocks.*.norm1=colwise",
            "blocks.0.norm1=colwise: an embedding or a linear layer is needed, and this is a RMSNorm.",
        ),
        ("norm=replicate", "tp=2: the layout shards nothing of this model. Use tp=1, or set a layout."),
        ("blocks.*.mlp.up=colwise:7", "colwise:7: the layer has 24 outputs. Give segments that add up to that."),
    ],
)
def test_layouts_that_do_not_match_the_model_are_rejected(layout, text):
    with pytest.raises(LayoutError) as caught:
        check_layout(build_decoder(LLAMA, device="meta"), Layout.parse(layout), 2)
    assert text in str(caught.value)


@pytest.mark.parametrize("style", ["rowwise", "vocab", "colwise:2"])
def test_parameter_style_must_be_colwise_partial_or_replicate(style):
    model, layout = build("gpt_oss"), f"model.layers.*.self_attn.q_proj=colwise model.layers.*.self_attn.sinks={style}"
    with pytest.raises(LayoutError) as caught:
        read_own(Layout.parse(layout), dict(model.named_modules()))
    assert str(caught.value) == (
        f"model.layers.0.self_attn.sinks={style}: a parameter is colwise, partial or replicate. Use one."
    )


def test_published_plan_without_head_norms_is_not_used():
    """GLM-4's plan lists q_proj and o_proj, but not the head norms between them, which a config may enable."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 32, "moe_intermediate_size": 8,
             "n_routed_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
    for uses_norm, accepts_plan in ((False, True), (True, False)):
        config = transformers.Glm4MoeConfig(**sizes, use_qk_norm=uses_norm)
        model = transformers.Glm4MoeForCausalLM(config)
        try:
            layout = find_layout(model)
        except LayoutError:
            assert not accepts_plan  # tracing may reject a family, but found layouts must be right
            continue
        norm = layout.match("model.layers.1.self_attn.q_norm")
        assert norm == ("partial" if uses_norm else None)


def scaled(ff, h):
    return ff.down(h) / ff.up.weight.norm()


def tied(ff, h):
    return h @ ff.up.weight


def penalised(ff, h):
    return ff.down(h) + ff.down.weight.square().sum()


def shifted(ff, h):
    return ff.down(h + ff.up.bias)


class ReadsWeights(nn.Module):
    """Uses the weight of the embedding, or of one of two paired layers, outside its layer."""

    def __init__(self, operation=lambda ff, h: ff.down(h), head=lambda net, x: net.head(x)):
        super().__init__()
        self.embed, self.up, self.down, self.head = (
            nn.Embedding(8, 4), nn.Linear(4, 16), nn.Linear(16, 4), nn.Linear(4, 8),
        )  # fmt: skip
        self.operation, self.last = operation, head

    def forward(self, ids):
        x = self.embed(ids)
        return self.last(self, x + self.operation(self, self.up(x).relu()))


def test_weights_read_outside_their_layers_stay_unsharded():
    full = "embed=vocab up=colwise down=rowwise head=vocab"
    assert find_layout(ReadsWeights()).format() == full
    for operation in (scaled, tied, penalised, shifted):
        assert find_layout(ReadsWeights(operation)).format() == "embed=vocab head=vocab", operation.__name__
    assert find_layout(ReadsWeights(head=lambda net, x: net.head(x.to(net.head.weight)))).format() == full
    product = find_layout(ReadsWeights(head=lambda net, x: x @ net.embed.weight.t() + net.head(x)))
    assert product.format() == "up=colwise down=rowwise head=vocab"
    table = find_layout(ReadsWeights(head=lambda net, x: net.head(x) + net.head.weight.mean(1)))
    assert table.format() == "embed=vocab up=colwise down=rowwise"
