"""Adapters in one process: equality with peft, its files, merging, and errors."""

from __future__ import annotations

import copy
import json
import os
import weakref

import pytest
import torch
from torch import nn

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import CheckpointError, ModelError
from weft.models.adapters import adapted, add_adapter, merge_adapter, merged_tensors, without_adapter
from weft.models.initialize import initialise
from weft.models.inspect import layers
from weft.models.inspect.find_layout import find_layout
from weft.models.peft_files import adapter_values, load_adapter, save_adapter
from weft.models.registry import build_decoder

#: peft uses a name that transformers deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

KINDS = ("lora", "rslora", "dora")
TINY = DecoderSpec(vocab_size=61, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def net():
    torch.manual_seed(3)
    return Net().double()


def gpt2():
    """Model with Conv1D layers, whose weights are transposed. The head shares the embedding's weight."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    torch.manual_seed(4)
    config = transformers.GPT2Config(
        vocab_size=31, n_embd=8, n_layer=1, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def loss_of(model, kind):
    torch.manual_seed(5)
    if kind == "net":
        return model(torch.randn(6, 5, dtype=torch.float64)).square().sum()
    ids = torch.randint(31, (2, 8))
    return model(input_ids=ids, labels=ids).loss


def noised(model):
    """Set A and B away from their initial values, so that every term counts."""
    torch.manual_seed(9)
    for _, param in sorted(model.named_parameters()):
        if param.requires_grad:
            param.data += 0.1 * torch.randn(param.shape, dtype=param.dtype)
    return model


def in_peft(build, kind, **more):
    import peft

    settings = {"use_rslora": kind == "rslora", "use_dora": kind == "dora", "r": 3, "lora_alpha": 5, **more}
    return peft.get_peft_model(build(), peft.LoraConfig(**settings))


def our_name(theirs):
    """Map peft's name of a parameter to Weft's."""
    path = theirs.removeprefix("base_model.model.")
    path = path.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude")
    return path.replace(".default.weight", "").replace(".base_layer.", ".")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["net", "gpt2"])
def test_outputs_and_gradients_match_peft(name, kind):
    build = {"net": net, "gpt2": gpt2}[name]
    targets = {"net": ["up", "down"], "gpt2": ["c_attn", "c_proj", "c_fc"]}[name]
    theirs = noised(in_peft(build, kind, target_modules=targets, fan_in_fan_out=name == "gpt2"))
    ours = add_adapter(build(), rank=3, alpha=5, kind=kind, targets=targets)
    source = {our_name(key): value for key, value in theirs.state_dict().items()}
    assert ours.load_state_dict(source, strict=False).unexpected_keys == []
    pairs = {our_name(key): value for key, value in theirs.named_parameters() if value.requires_grad}
    own = {key: value for key, value in ours.named_parameters() if value.requires_grad}
    assert own.keys() == pairs.keys()
    steps = [torch.optim.AdamW(group.values(), lr=0.01, weight_decay=0.1) for group in (own, pairs)]
    for _ in range(3):
        losses = [loss_of(model, name) for model in (ours, theirs)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        for loss, optimizer in zip(losses, steps, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for key, param in own.items():
            scale = float(pairs[key].grad.abs().max())
            torch.testing.assert_close(param.grad, pairs[key].grad, rtol=1e-10, atol=1e-12 * scale, msg=key)
        for optimizer in steps:
            optimizer.step()
    for key, param in own.items():
        torch.testing.assert_close(param, pairs[key], rtol=1e-10, atol=1e-12, msg=key)


def test_dora_with_dropout_matches_peft():
    """The random masks differ, so the same mask is put into both."""
    theirs = noised(in_peft(net, "dora", target_modules=["up"], lora_dropout=0.5)).train()
    ours = add_adapter(net(), rank=3, alpha=5, kind="dora", targets=["up"], dropout=0.5).train()
    ours.load_state_dict({our_name(key): value for key, value in theirs.state_dict().items()}, strict=False)
    torch.manual_seed(1)
    x = torch.randn(4, 5, dtype=torch.float64)
    torch.manual_seed(2)
    wanted = theirs(x)
    torch.manual_seed(2)
    torch.testing.assert_close(ours(x), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_new_adapter_is_a_no_op_and_freezes_the_base(kind):
    plain, model = net(), add_adapter(net(), rank=2, kind=kind)
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-13, atol=1e-14)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} <= {"lora_A", "lora_B", "lora_magnitude"}
    assert {name.rpartition(".")[0] for name in trained} == {"up", "down"}
    assert model.state_dict().keys() >= plain.state_dict().keys()
    assert type(model.up).__name__ == "Linear"
    assert layers.is_linear(model.up)


def test_initial_values_depend_only_on_seed_and_name():
    first, again = (add_adapter(build_decoder(TINY), rank=2, kind="dora", seed=1) for _ in range(2))
    other = add_adapter(build_decoder(TINY), rank=2, kind="dora", seed=2)
    few = add_adapter(build_decoder(TINY), rank=2, targets=["attn.q"], seed=1)
    name = "blocks.1.attn.q.lora_A"
    values = [dict(model.named_parameters())[name] for model in (first, again, other, few)]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[3])
    assert not torch.equal(values[0], values[2])
    assert 0.2 < values[0].abs().max() <= 16**-0.5
    # Meta parameters are initialized later, to equal values.
    meta = add_adapter(build_decoder(TINY, device="meta"), rank=2, kind="dora", seed=1)
    meta.to_empty(device="cpu")
    initialise(meta, 1)
    wanted = add_adapter(build_decoder(TINY, seed=1), rank=2, kind="dora", seed=1)
    assert all(torch.equal(one, two) for one, two in zip(meta.parameters(), wanted.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["net", "gpt2"])
def test_merged_weights_give_equal_logits(name, kind):
    build = {"net": net, "gpt2": gpt2}[name]
    model = noised(add_adapter(build(), rank=3, kind=kind)).eval()
    plain = build().eval()
    x = torch.randn(6, 5, dtype=torch.float64) if name == "net" else torch.randint(31, (2, 8))
    wanted = model(x) if name == "net" else model(x).logits
    plain.load_state_dict(merged_tensors(model, model.state_dict()))
    merged = merge_adapter(model)
    assert adapted(merged) is None
    assert type(merged) is type(plain)
    assert merged.state_dict().keys() == plain.state_dict().keys()
    for one in (merged, plain):
        found = one(x) if name == "net" else one(x).logits
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_exchanged_with_peft(kind, tmp_path):
    import peft

    model = noised(add_adapter(gpt2(), rank=3, alpha=7, kind=kind, targets=["c_attn", "mlp.c_proj"])).eval()
    save_adapter(model, tmp_path / "ours")
    ids = torch.randint(31, (2, 8))
    theirs = peft.PeftModel.from_pretrained(gpt2(), str(tmp_path / "ours")).double().eval()
    torch.testing.assert_close(theirs(input_ids=ids).logits, model(ids).logits, rtol=0, atol=1e-12)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    back = load_adapter(gpt2(), tmp_path / "theirs").eval()
    assert adapted(back) == adapted(model)
    torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=0, atol=1e-12)


SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip


def of_family(family, **more):
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    torch.manual_seed(4)
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    config._experts_implementation = "eager"  # the default does not support float64
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


MORE = {
    "rows tied": (lambda: of_family("Llama", tie_word_embeddings=True), {"trainable_tokens": [30, 5]}),
    "rows untied": (lambda: of_family("Llama"), {"trainable_tokens": {"lm_head": [3], "embed_tokens": [30, 5]}}),
    "rows scaled": (lambda: of_family("Gemma3Text", head_dim=8), {"trainable_tokens": [7]}),
    "saved tied": (lambda: of_family("Llama", tie_word_embeddings=True), {"modules_to_save": ["embed_tokens"]}),
    "saved untied": (lambda: of_family("Llama"), {"modules_to_save": ["lm_head", "model.norm"]}),
    "mixtral": (lambda: of_family("Mixtral", num_local_experts=4),
                {"targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"], "kind": "rslora"}),
    "qwen3_moe": (lambda: of_family("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
                  {"targets": ["layers.1.mlp.experts.down_proj"]}),
    "gpt_oss": (lambda: of_family("GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2),
                {"targets": ["experts.gate_up_proj", "experts.down_proj"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_rows_modules_and_experts_are_exchanged_with_peft_and_merged(name, tmp_path):
    """Adapters that peft calls trainable_token_indices, modules_to_save and target_parameters."""
    import peft

    build, settings = MORE[name]
    model = noised(add_adapter(build(), rank=3, **{"targets": ["q_proj"], **settings})).eval()
    save_adapter(model, tmp_path / "ours")
    ids = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(1))
    ids[0, :5] = torch.tensor([3, 5, 7, 30, 5])
    wanted = model(input_ids=ids).logits
    assert (build()(input_ids=ids).logits - wanted).abs().max() > 1e-3
    theirs = peft.PeftModel.from_pretrained(build(), str(tmp_path / "ours")).double().eval()
    torch.testing.assert_close(theirs(input_ids=ids).logits, wanted, rtol=0, atol=1e-12)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    back = load_adapter(build(), tmp_path / "theirs").eval()
    assert adapted(back) == adapted(model)
    torch.testing.assert_close(back(input_ids=ids).logits, wanted, rtol=0, atol=1e-12)
    plain = build()
    plain.load_state_dict(merged_tensors(model, model.state_dict()))
    torch.testing.assert_close(plain(input_ids=ids).logits, wanted, rtol=0, atol=1e-12)
    if "modules_to_save" in settings:
        with pytest.raises(ModelError, match=r"modules_to_save=.*: training replaced its weights"):
            without_adapter(model).__enter__()
    else:
        with without_adapter(model):
            torch.testing.assert_close(model(input_ids=ids).logits, build()(input_ids=ids).logits, rtol=0, atol=0)
    merge_adapter(model)
    torch.testing.assert_close(model(input_ids=ids).logits, wanted, rtol=0, atol=1e-12)
    assert list(model.state_dict()) == list(build().state_dict())


@pytest.mark.parametrize("name", ["rows tied", "rows untied", "mixtral"])
def test_gradients_of_rows_and_experts_match_peft(name, tmp_path):
    import peft

    build, settings = MORE[name]
    model = noised(add_adapter(build(), rank=3, **{"targets": ["q_proj"], **settings}))
    save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(build(), str(tmp_path), is_trainable=True).double()
    ids = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(1))
    ids[0, :5] = torch.tensor([3, 5, 7, 30, 5])
    for one in (model, theirs):
        one(input_ids=ids, labels=ids).loss.backward()
    ours = {key: param for key, param in model.named_parameters() if param.requires_grad}
    pairs = [param for param in theirs.parameters() if param.requires_grad]
    assert sum(param.numel() for param in ours.values()) == sum(param.numel() for param in pairs)
    norms = [torch.stack([one.grad.norm() for one in some]).sort()[0] for some in (ours.values(), pairs)]
    torch.testing.assert_close(*norms, rtol=1e-10, atol=0)


def test_dora_of_experts_normalizes_each_output_and_has_no_peft_format(tmp_path):
    build = MORE["mixtral"][0]
    model = add_adapter(build(), rank=3, kind="dora", targets=["experts.down_proj"])
    ids = torch.arange(8)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, build()(input_ids=ids).logits, rtol=0, atol=1e-13)
    noised(model)
    experts, path = build().model.layers[0].mlp.experts, "model.layers.0.mlp.experts.down_proj"
    own = {end: model.get_parameter(f"{path}_lora_{end}") for end in ("A", "B", "magnitude")}
    for expert in range(4):
        weight = experts.down_proj[expert] + 2 * own["B"][expert] @ own["A"][expert]
        weight = weight * (own["magnitude"][expert] / weight.norm(dim=1))[:, None]
        merged = merged_tensors(model, model.state_dict())[path][expert]
        torch.testing.assert_close(merged, weight, rtol=1e-12, atol=0)
    with pytest.raises(ModelError, match="kind=dora: peft has no format for magnitudes of"):
        save_adapter(model, tmp_path)


def test_model_can_run_without_its_adapter():
    model, x = noised(add_adapter(net(), rank=2)), torch.randn(3, 5, dtype=torch.float64)
    with without_adapter(model):
        torch.testing.assert_close(model(x), net()(x))
    assert not torch.allclose(model(x), net()(x))


def test_layout_equals_that_of_the_base_model():
    assert find_layout(add_adapter(gpt2(), rank=2)) == find_layout(gpt2())


def test_deepcopy_keeps_the_adapter():
    model = noised(add_adapter(net(), rank=2))
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0: an adapter has a rank of at least 1. Use rank=16."),
        ({"rank": 2, "kind": "lra"}, "kind='lra': an adapter is one of lora, rslora, dora. Use kind='lora'."),
        ({"rank": 2, "alpha": 0}, "alpha=0: it must be above 0. Use alpha=4."),
        ({"rank": 2, "dropout": 1.0}, "dropout=1.0: the share dropped is at least 0 and below 1. Use dropout=0.05."),
        ({"rank": 2, "targets": ["norm1"]}, "targets=norm1: blocks.0.norm1 is a RMSNorm, and adapters fit linear"),
        (
            {"rank": 2, "targets": ["wq"]},
            "targets=wq: no module has such a path or ending. Use some of q, k, v, o, gate",
        ),
        ({"rank": 2, "targets": ["head"]}, "targets=head: head makes the logits, which Weft computes inside the"),
        (
            {"rank": 2, "modules_to_save": ["xx"]},
            "modules_to_save=xx: no module has such a path or ending. Use some of",
        ),
        (
            {"rank": 2, "targets": ["q"], "modules_to_save": ["attn"]},
            "targets=blocks.0.attn.q: modules_to_save trains this layer in full. Leave it out of one of them.",
        ),
        ({"rank": 2, "modules_to_save": ["blocks"]}, "modules_to_save=blocks: no layer is left for the adapter."),
        (
            {"rank": 2, "trainable_tokens": {"embed": [61]}},
            "trainable_tokens=61: embed has 61 rows, with ids from 0 to 60. Use one",
        ),
        (
            {"rank": 2, "trainable_tokens": {"embed": [-1]}},
            "trainable_tokens=-1: embed has 61 rows, with ids from 0 to 60. Use one",
        ),
        ({"rank": 2, "trainable_tokens": {"embed": [4, 4]}}, "trainable_tokens=4: the id is given twice. Give"),
        (
            {"rank": 2, "trainable_tokens": {"x": [4]}},
            "trainable_tokens=x: no module has such a path or ending. Use one",
        ),
        (
            {"rank": 2, "trainable_tokens": {"norm": [4]}},
            "trainable_tokens=norm: norm is a RMSNorm, and only embeddings",
        ),
        (
            {"rank": 2, "trainable_tokens": {"embed": [4]}, "modules_to_save": ["embed"]},
            "trainable_tokens=embed: modules_to_save trains all of embed. Use one of the two.",
        ),
    ],
)
def test_invalid_settings_are_rejected_with_one_message(settings, message):
    with pytest.raises(ModelError) as error:
        add_adapter(build_decoder(TINY), **settings)
    assert str(error.value).startswith(message)


def test_second_adapter_is_rejected():
    with pytest.raises(ModelError, match="it has an adapter already"):
        add_adapter(add_adapter(net(), rank=2), rank=2)
    for refused in (
        merge_adapter,
        lambda model: save_adapter(model, "x"),
        lambda model: without_adapter(model).__enter__(),
    ):
        with pytest.raises(ModelError, match="it has no adapter"):
            refused(net())


def test_stacked_experts_get_no_adapter():
    spec = DecoderSpec(
        vocab_size=61,
        dim=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        ffn_dim=24,
        max_seq_len=32,
        num_experts=4,
        top_k=2,
    )
    with pytest.raises(ModelError, match="experts is a Experts, and adapters fit linear layers alone"):
        add_adapter(build_decoder(spec), rank=2, targets=["experts"])
    with pytest.raises(ModelError, match=r"dropout=0.1: the adapter of blocks.0.mlp.experts.down is added to the"):
        add_adapter(build_decoder(spec), rank=2, targets=["experts.down"], dropout=0.1)
    assert set(adapted(add_adapter(build_decoder(spec), rank=2)).layers) == {f"blocks.0.attn.{name}" for name in "qkvo"}


def test_files_of_another_model_or_kind_are_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="it holds no adapter_config"):
        load_adapter(net(), tmp_path)
    save_adapter(add_adapter(net(), rank=2), tmp_path)
    with pytest.raises(CheckpointError, match="an adapter of another model: it adapts 'down'"):
        load_adapter(build_decoder(TINY), tmp_path)
    wider = net()
    wider.up = nn.Linear(5, 8).double()
    with pytest.raises(CheckpointError, match=r"up.lora_B.weight' has shape \(7, 2\), not \(8, 2\)"):
        load_adapter(wider, tmp_path)
    config = tmp_path / "adapter_config.json"
    for change, message in (
        ({"peft_type": "IA3"}, "an adapter of type IA3"),
        ({"rank_pattern": {"up": 4}}, "rank_pattern is set"),
        ({"bias": "all"}, "it trains biases"),
    ):
        before = config.read_text()
        config.write_text(json.dumps({**json.loads(before), **change}))
        with pytest.raises(CheckpointError, match=message):
            load_adapter(net(), tmp_path)
        config.write_text(before)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(CheckpointError, match="damaged"):
        load_adapter(net(), tmp_path)


@pytest.mark.parametrize("name", ["shape", "rows"])
def test_rejected_files_leave_the_model_unchanged(tmp_path, name):
    model = build_decoder(TINY)
    save_adapter(noised(add_adapter(build_decoder(TINY), rank=2, trainable_tokens={"embed": [5, 60]})), tmp_path)
    if name == "shape":
        model.blocks[1].mlp.up = nn.Linear(16, 25, bias=False)
    else:
        model.embed = nn.Embedding(60, 16)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises((CheckpointError, ModelError), match=r"not \(25, 2\)|embed has 60 rows"):
        load_adapter(model, tmp_path)
    after = dict(model.named_parameters())
    assert adapted(model) is None
    assert list(after) == list(before)
    assert all(param.requires_grad and param.equal(before[name]) for name, param in after.items())


def test_adapter_without_a_format_creates_no_folder(tmp_path):
    build, settings = MORE["mixtral"]
    model = add_adapter(build(), rank=2, **{**settings, "kind": "dora"})
    with pytest.raises(ModelError, match="peft has no format for magnitudes"):
        save_adapter(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_values_of_an_adapter_are_read_for_a_model_with_one_of_the_same_kind(tmp_path):
    build, settings = MORE["mixtral"]
    model = noised(add_adapter(build(), rank=3, **settings))
    save_adapter(model, tmp_path)
    other = add_adapter(build(), rank=3, **settings)
    found = adapter_values(other, tmp_path)
    own = dict(model.named_parameters())
    assert found.keys() == {name for name, param in own.items() if param.requires_grad}
    assert all(torch.equal(found[name], own[name]) for name in found)
    others = {
        r"its rank is 3, and 4 is set\. Use rank=3": {"rank": 4},
        r"is of a layer without an adapter\. Add the layer to targets": {"targets": ["q_proj"]},
        r"it has no .*lora_A.*Use the targets that it was trained on": {"targets": [*settings["targets"], "k_proj"]},
    }
    for text, changed in others.items():
        other = add_adapter(build(), **{"rank": 3, "alpha": 6, **settings, **changed})
        with pytest.raises(CheckpointError, match=text):
            adapter_values(other, tmp_path)


class OwnExperts(nn.Module):
    """Experts of code that Weft does not know. used: the weights of the last forward."""

    stacks_experts = True

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 70, dtype=torch.float64))
        self.used: weakref.ref[torch.Tensor] | None = None

    def forward(self, x):
        weights = self.up
        self.used = weakref.ref(weights)
        return torch.stack([(x @ weights[expert].T).tanh() @ weights[expert] for expert in range(3)]).sum(0)


class OwnMixture(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.experts = OwnExperts()

    def forward(self, x):
        return self.experts(x)


@pytest.mark.parametrize("kind, base", [("lora", "stored"), ("dora", "stored"), ("lora", "nf4"), ("rslora", "int8")])
def test_weights_of_experts_of_unknown_code_are_made_again_in_backward(kind, base):
    model, x = (
        noised(add_adapter(OwnMixture(), rank=2, kind=kind, base=base, targets=["experts.up"])),
        torch.randn(5, 70),
    )
    x = x.double().requires_grad_()
    loss = model(x).square().sum()
    assert model.experts.used() is None  # neither autograd nor the module keeps the weights
    loss.backward()
    own = {name: param for name, param in model.named_parameters() if param.requires_grad}
    merged = merged_tensors(model, model.state_dict())["experts.up"].double().requires_grad_()
    again = x.detach().clone().requires_grad_()
    outputs = [(again @ merged[expert].T).tanh() @ merged[expert] for expert in range(3)]
    torch.stack(outputs).sum(0).square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-9, atol=1e-9)
    if kind != "dora":
        a, b = own["experts.up_lora_A"], own["experts.up_lora_B"]
        scale = adapted(model).kind.scale
        torch.testing.assert_close(a.grad, scale * b.detach().mT @ merged.grad, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(b.grad, scale * merged.grad @ a.detach().mT, rtol=1e-9, atol=1e-9)
