"""Model arguments: sizes, Hugging Face configs and Weft configs; and errors for everything else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers

from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import ModelSpec, decoder_spec
from weft.errors import ConfigError, WeftError
from weft.planner.cost.machine import Tables
from weft.planner.estimator import estimate
from weft.planner.search.model_source import _FAMILIES, default_batch, default_seq_len, read_model
from weft.planner.search.question import Question
from weft.planner.space.columns import Columns

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
         "tie_word_embeddings": False}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
QWEN_MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128,
            "moe_intermediate_size": 768, "hidden_size": 2048, "num_hidden_layers": 48}  # fmt: skip
DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
            "num_hidden_layers": 61, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "first_k_dense_replace": 3}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


def folder(tmp_path, table):
    (tmp_path / "config.json").write_text(table if isinstance(table, str) else json.dumps(table))
    return str(tmp_path)


def test_size_spec_and_hugging_face_config_are_equal(tmp_path):
    named = read_model("llama3-8b")
    assert named.shape.num_params == ModelSpec.named("llama3-8b").num_params
    assert read_model(decoder_spec("llama3-8b")).shape == named.shape
    assert read_model(ModelSpec.named("llama3-8b")).shape == named.shape
    found = read_model(folder(tmp_path, LLAMA))
    assert found.shape == named.shape
    assert found.spec.max_seq_len == 8192
    assert read_model(str(tmp_path / "config.json")).shape == named.shape


def test_gpt2_has_its_124_million_parameters(tmp_path):
    found = read_model(folder(tmp_path, GPT2))
    assert found.shape == read_model("gpt2").shape
    assert found.shape.num_params == pytest.approx(124.4e6, rel=0.001)


@pytest.mark.parametrize(("table", "billions"), [(MIXTRAL, 46.7), (QWEN_MOE, 30.5), (DEEPSEEK, 671)])
def test_mixtures_of_experts_have_their_published_size(tmp_path, table, billions):
    shape = read_model(folder(tmp_path, table)).shape
    assert shape.num_experts in (8, 128, 256)
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=0.02)


def test_windows_are_counted_by_layer(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 16
    table = {**LLAMA, "model_type": "mistral", "sliding_window": 4096, "layer_types": kinds}
    shape = read_model(folder(tmp_path, table)).shape
    assert (shape.window, shape.windowed_layers) == (4096, 16)
    off = {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    assert read_model(folder(tmp_path, off)).shape.window == 0


def test_config_defines_batch_and_optimizer(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "small"\n[train]\nseq_len = 512\nglobal_batch = 24\n[optimizer]\nname = "sgd"\n')
    question = Question.of(str(path), "8xh100")
    assert (question.job.seq_len, question.job.global_batch, question.job.optimizer) == (512, 24, "sgd")
    assert question.assumed == ()
    assert question.model.spec.vocab_size == 4096
    assert Question.of(str(path), "8xh100", seq_len=256).job.seq_len == 256


def test_defaults_are_assumed_and_reported():
    question = Question.of("llama3-405b", "2048x8xh100")
    assert (question.job.seq_len, question.job.global_batch) == (8192, 2048)
    assert question.assumed == ("--seq-len 8192", "--global-batch 2048")
    small = read_model("tiny")
    assert default_seq_len(small) == 1024
    assert default_batch(small, 1024, 48) == 512
    assert default_batch(read_model("llama3-70b"), 8192, 8) == 512


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", "config.json is not JSON"),
        ("[]", "is not a JSON object"),
        ({"model_type": "mamba"}, "model_type=mamba is not a family that the planner reads. Known: llama"),
        ({**LLAMA, "hidden_size": "big"}, "hidden_size='big' in its config.json: a whole number is needed."),
        ({"model_type": "llama", "hidden_size": 64}, "lacks vocab_size, num_hidden_layers, num_attention_heads."),
        ({**LLAMA, "num_attention_heads": 3}, "num_attention_heads=3: it must divide hidden_size=4096. Correct"),
    ],
)
def test_invalid_hugging_face_configs_are_rejected(tmp_path, table, message):
    with pytest.raises(WeftError) as caught:
        read_model(folder(tmp_path, table))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "cluster", "message"),
    [
        (
            "lama3-8b",
            "8xh100",
            "model=lama3-8b: neither a built-in size, nor a folder with a config.json, nor a",
        ),
        ("lama3-8b", "8xh100", "Did you mean 'llama3-8b'?"),
        ("my.models:build", "8xh100", "a model given as code must be traced first. Give weft.trace"),
        ("nothing.toml", "8xh100", "there is no such file"),
        ("tiny", "8xh10", "device=h10: unknown device."),
        ("tiny", "0xh100", "a cluster has at least one device."),
        ("tiny", "machines.toml", "the file cannot be read"),
    ],
)
def test_invalid_models_and_clusters_are_rejected(model, cluster, message):
    with pytest.raises(WeftError) as caught:
        Question.of(model, cluster)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_invalid_job_sizes_are_rejected():
    with pytest.raises(ConfigError, match="seq-len=0: a whole number from 1"):
        Question.of("tiny", "8xh100", seq_len=0)
    with pytest.raises(ConfigError, match="seq-len=2048: tiny reads at most 1024 tokens"):
        Question.of("tiny", "8xh100", seq_len=2048)
    with pytest.raises(ConfigError, match="global-batch=-1: a whole number from 1"):
        Question.of("tiny", "8xh100", global_batch=-1)


def test_description_without_a_shape_is_rejected():
    with pytest.raises(WeftError, match="not its shape"):
        read_model(ModelSpec(name="mine", layers=()))
    assert isinstance(read_model("tiny").spec, DecoderSpec)


@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_family_config_has_the_parameters_of_its_model(family, tmp_path):
    """Compare config.json with the family's defaults, as transformers writes it, with the model that it builds."""
    config = transformers.AutoConfig.for_model(family)
    for name in ("num_hidden_layers", "n_layer"):
        if hasattr(config, name):
            setattr(config, name, 3)
            break
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:3]
    if family == "deepseek_v2":
        config.num_experts_per_tok = 6  # none by default
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    found = read_model(str(tmp_path)).shape
    assert found.num_params == pytest.approx(sum(param.numel() for param in model.parameters()), rel=0.001)


def test_error_for_unknown_family_suggests_tracing(tmp_path):
    with pytest.raises(WeftError, match=r"model_type=t5 .* weft plan package.module:function"):
        read_model(folder(tmp_path, {"model_type": "t5", "d_model": 512}))
    with pytest.raises(WeftError, match="lacks num_experts_per_tok"):
        read_model(folder(tmp_path, {**LLAMA, "model_type": "deepseek_v2", "n_routed_experts": 64}))


def test_rounded_moments_take_less_memory(tmp_path):
    """Masters and moments take 12 bytes: 8 with bf16, 6 with one byte each."""
    found = []
    for states in ("fp32", "bf16", "fp8"):
        path = tmp_path / f"{states}.toml"
        path.write_text(f'[model]\nname = "tiny"\n[optimizer]\nstates = "{states}"\n')
        asked = Question.of(str(path), "8xh100")
        columns = Columns.of([Plan.parse("dp_shard=8 zero=1 precision=bf16")], asked.job)
        tables = Tables.of(asked.cluster.device)
        memory = estimate(asked.job, asked.cluster, columns, tables).memory
        found.append(float(memory["optimizer"][0]))
    assert found[1:] == pytest.approx([found[0] * 8 / 12, found[0] * 6 / 12])


def test_rowwise_scales_multiply_slower_than_tensorwise(tmp_path):
    step = {}
    for recipe in ("rowwise", "tensorwise"):
        path = tmp_path / f"{recipe}.toml"
        path.write_text(f'[model]\nname = "tiny"\n[train]\nfp8_recipe = "{recipe}"\n')
        asked = Question.of(str(path), "8xh100")
        plans = [Plan.parse(f"dp_shard=8 zero=1 precision={name} compile=on") for name in ("bf16", "fp8")]
        job = replace(asked.job, shape=read_model("llama3-8b").shape)
        found = estimate(job, asked.cluster, Columns.of(plans, job), Tables.of(asked.cluster.device))
        step[recipe] = found.step_s
    assert step["rowwise"][0] == step["tensorwise"][0]  # bf16 has no scales
    assert step["tensorwise"][1] < step["rowwise"][1] < step["rowwise"][0]
