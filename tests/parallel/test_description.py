"""Model descriptions by tracing match the formulas of supported families and the bytes that autograd saves."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import weft
from tests.parallel import traced_models
from weft.cli.app import run
from weft.config.cluster import ClusterSpec
from weft.config.plan import Plan
from weft.config.rules.plan_rules import check
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import decoder_spec
from weft.config.shapes.traced_model import TracedModel
from weft.errors import ModelError
from weft.memory.trace import trace_block
from weft.models.inspect.blocks import repeated_blocks
from weft.models.registry import build_decoder
from weft.planner.cost.machine import Tables
from weft.planner.cost.memory_terms import layer_bytes
from weft.planner.estimator import estimate
from weft.planner.report.explanation import search
from weft.planner.search.candidate import flops_per_token
from weft.planner.search.model_source import _from_hugging_face, read_model
from weft.planner.search.question import Question
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape, TracedShape
from weft.private_torch import tree_leaves
from weft.train.tasks.description import describe_by_tracing, describe_folder, trace

HERE = "tests.parallel.traced_models:"
SEQ = 512
SHARDINGS = [{}, {"tp": 2}, {"tp": 4, "sp": True}, {"compile": True}, {"cp": 2}]


@pytest.fixture(scope="module")
def known() -> dict[str, TracedModel]:
    """Return traced models of Weft's named sizes."""
    found = {}
    for name in ("llama3-8b", "gpt2-medium"):
        with torch.device("meta"):
            found[name] = describe_by_tracing(build_decoder(decoder_spec(name), device="meta"))
    return found


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-medium"])
def test_traced_family_matches_its_config(known, name):
    shape, found = Shape.of_decoder(decoder_spec(name)), known[name]
    assert (found.num_params, found.num_layers, found.vocab) == (shape.num_params, shape.layers, shape.vocab)
    assert (found.hidden, found.tied) == (shape.hidden, shape.tied)
    assert len(found.layers) == 1  # identical layers are traced once
    for causal in (True, False):
        own, formula = found.flops(2, SEQ, causal=causal) / (2 * SEQ), flops_per_token(shape, SEQ, causal=causal)
        assert own == pytest.approx(formula, rel=0.01)
    jobs = [Job(shape=each, seq_len=SEQ, global_batch=8) for each in (shape, TracedShape.of(found))]
    for sharding in SHARDINGS:
        columns = Columns.make(1, microbatch=2, **sharding)
        formula, traced = (layer_bytes(job, columns).kept[0] for job in jobs)
        assert traced == pytest.approx(formula, rel=0.02), sharding


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-medium"])
def test_estimates_of_traced_family_match_its_config(known, name):
    asked = [Question.of(model, "2x8xh100", seq_len=SEQ, global_batch=64) for model in (name, known[name])]
    plans = [Plan.parse(text) for text in (
        "dp_shard=16 zero=3 precision=bf16 compile=on", "dp_shard=4 zero=1 tp=4 sp=on precision=bf16 compile=on",
        "pp=4 dp_shard=4 zero=1 microbatches=4 precision=bf16 compile=on")]  # fmt: skip
    # A traced model's loss is unknown, so its logits are not chunked.
    known_job = replace(asked[0].job, stack=replace(asked[0].job.stack, cut_loss=False))
    jobs = [known_job, asked[1].job]
    formula, traced = (
        estimate(job, each.cluster, Columns.of(plans, job), each.tables) for job, each in zip(jobs, asked, strict=True)
    )
    assert traced.step_s == pytest.approx(formula.step_s, rel=0.1)
    assert traced.allocated_bytes == pytest.approx(formula.allocated_bytes, rel=0.03)


def test_traced_transformers_config_matches_formulas():
    found = trace(f"{HERE}llama")
    config = traced_models.llama().config.to_dict()
    shape = _from_hugging_face("llama", config).shape
    assert found.num_params == shape.num_params
    assert found.flops(1, 128) / 128 == pytest.approx(flops_per_token(shape, 128, causal=True), rel=0.01)
    job = Job(shape=shape, seq_len=128, global_batch=8)
    compiled = layer_bytes(job, Columns.make(1, microbatch=2, compile=True)).kept[0]
    assert found.layers[0].saved_bytes(2, 128, "compiled") == pytest.approx(compiled, rel=0.02)


#: Model, its inputs, tokens per sample, and whether the first block's output is saved too (by a final ReLU).
REAL = {
    "own": (lambda: (torch.zeros(2, 64, dtype=torch.int64),), 64, False),
    "llama": (lambda: {"input_ids": torch.zeros(2, 64, dtype=torch.int64)}, 64, False),
    "vit": (lambda: {"pixel_values": torch.randn(2, 3, 32, 32).bfloat16()}, 1, False),
    "encoder": (lambda: (torch.randn(2, 16, 8).bfloat16(),), 16, False),
    "network": (lambda: (torch.randn(2, 3, 32, 32).bfloat16(),), 1, True),
}


@pytest.mark.parametrize("name", REAL)
def test_traced_saved_bytes_match_autograd(name):
    make, seq, keeps_output = REAL[name]
    spec = DecoderSpec(vocab_size=256, dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=352, max_seq_len=64)
    made = build_decoder(spec) if name == "own" else getattr(traced_models, name)()
    model = (made[0] if isinstance(made, tuple) else made).bfloat16()
    block = next(iter(repeated_blocks(model).values()))
    recorded = {}

    def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        recorded["full"] = sum(each.untyped_storage().nbytes() for each in given if each.requires_grad)
        # Rotary tables, which all layers share.
        shared = {each.untyped_storage()._cdata: each for each in given if not each.requires_grad}.values()
        recorded["shared"] = sum(each.untyped_storage().nbytes() for each in shared if each.is_floating_point())
        recorded["trace"] = trace_block(module, type(module).forward, args, kwargs)

    handles = [
        block.register_forward_pre_hook(record, with_kwargs=True),
        block.register_forward_hook(lambda module, args, output: recorded.update(output=output)),
    ]
    example = make()
    model.train()(**example) if isinstance(example, dict) else model.train()(*example)
    for handle in handles:
        handle.remove()
    assert recorded["trace"].keeps_output == keeps_output
    output = recorded["output"].untyped_storage().nbytes() if keeps_output else 0
    layer = describe_by_tracing(model, example).layers[0]
    assert layer.saved_bytes(2, seq, "full") == recorded["full"]
    kept = recorded["trace"].kept_bytes + recorded["full"] + output - recorded["shared"]
    assert layer.saved_bytes(2, seq) == pytest.approx(kept, rel=0.03)
    heavy = sum(operation.num_bytes for operation in recorded["trace"].heavy if operation)
    assert layer.saved_bytes(2, seq, "selective") == pytest.approx(heavy + recorded["full"], rel=0.03)


def test_perceptron_network_and_vision_transformer_have_plans():
    for name, num_layers in (("perceptron", 1), ("network", 4), ("vit", 2)):
        found = trace(f"{HERE}{name}")
        assert not found.reads_sequence
        assert found.num_layers == num_layers
        answer = search(found, "4xa100", global_batch=64)
        assert answer.best is not None
        for one in answer.ranked:
            assert not check(one.plan, answer.question.facts)
            assert one.plan.cp == 1
            assert not one.plan.sp
        refused = {each.name: each.message for each in answer.refused}
        assert "has no sequence dimension" in refused["model-allows-cp"]
        assert {one.plan.zero for one in answer.ranked} >= {0, 1, 3}


def test_convolution_flops_match_the_formula():
    layer = trace(f"{HERE}network").layers[0]
    # Two 3 x 3 convolutions from 16 to 16 channels at 16 x 16 positions, 2 FLOPs each.
    assert layer.flops(3, 1) == 3 * 2 * 2 * 16 * 16 * 9 * 16 * 16
    assert layer.flops(3, 1, backward=True) == 2 * layer.flops(3, 1)
    before = trace(f"{HERE}network").before
    assert before.flops(1, 1, backward=True) == before.flops(1, 1)  # images need no gradient


def test_expert_flops_count_only_routed_tokens():
    found = trace(f"{HERE}mixtral")
    shape = _from_hugging_face("mixtral", traced_models.mixtral().config.to_dict()).shape
    assert found.flops(1, 64) / 64 == pytest.approx(flops_per_token(shape, 64, causal=True), rel=0.01)
    assert found.num_params == shape.num_params
    assert "config.json" in dict(found.limits)["ep"].reason


def test_encoder_output_is_counted_in_stage_boundaries():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=64, d_ff=128, num_layers=3, num_decoder_layers=4, num_heads=4, d_kv=16)
    with torch.device("meta"):
        found = describe_by_tracing(transformers.T5ForConditionalGeneration(config))
    # Of six stage boundaries, three are in the encoder or at its end, and three in the decoder.
    assert found.crossings == pytest.approx((3 + 2 * 3) / 6)
    job = Job(shape=TracedShape.of(found), seq_len=SEQ, global_batch=8)
    without_encoder_output = replace(job, shape=TracedShape.of(replace(found, crossings=1.0)))
    plan, cluster = Plan.parse("pp=2 microbatches=4 precision=bf16"), ClusterSpec.parse("2xh100")
    two, one = (
        estimate(each, cluster, Columns.of([plan], each), Tables.of(cluster.device, "tables")).terms["pp_p2p"][0]
        for each in (job, without_encoder_output)
    )
    assert one < two < 1.5 * one


def test_unsupported_axes_are_listed_with_reasons():
    limits = {name: limit.reason for name, limit in trace(f"{HERE}encoder").limits}
    assert "every rank would compute the attention of Sequential, a model of your own, for all tokens" in limits["cp"]
    limits = {name: limit.reason for name, limit in trace(f"{HERE}perceptron").limits}
    assert "it has no repeated modules that are called" in limits["pp"]
    assert "has no sequence dimension" in limits["sp"]


def test_saved_description_is_planned_without_torch(tmp_path):
    path = tmp_path / "model.json"
    found = trace(f"{HERE}llama")
    found.save(path)
    assert read_model(str(path)).traced == found
    code = (
        "import sys; from weft.planner.report.explanation import search; "
        f"best = search({str(path)!r}, '2xa100', global_batch=32).best; "
        "assert 'torch' not in sys.modules; print(best.plan)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == search(found, "2xa100", global_batch=32)[0].plan.format()
    table = json.loads(path.read_text()) | {"version": 99}
    path.write_text(json.dumps(table))
    with pytest.raises(ModelError, match="version=99"):
        read_model(str(path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("choosing", "aten._local_scalar_dense.default fails"),
        ("number", "it returned int, not an nn.Module. Return a model"),
        ("needs_one", "it raised TypeError"),
        ("NOT_A_FUNCTION", "is of type int and cannot be called"),
        ("nothing", "it cannot be imported"),
    ],
)
def test_unsupported_model_function_is_rejected_in_one_sentence(name, expected, capsys):
    assert run(["plan", f"{HERE}{name}", "8xh100"]) == 2
    text = capsys.readouterr().err
    assert expected in text
    assert text.startswith(f"error: model={HERE}{name}: ")
    assert "Traceback" not in text


def test_script_with_plan_auto_uses_the_planner(capsys):
    with weft.init("auto", model=f"{HERE}perceptron", seq_len=1, global_batch=8, device="cpu") as started:
        assert started.plan.world_size == 1
    assert "plan=auto chose" in capsys.readouterr().out


def test_model_with_two_towers_is_planned(tmp_path, capsys):
    config = {
        "model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 512,
        "text_config": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2,
                        "num_attention_heads": 8},
        "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 3,
                          "num_attention_heads": 12, "image_size": 224, "patch_size": 32},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = describe_folder(tmp_path)
    assert (found.traced.hidden, found.traced.num_layers, found.traced.max_seq_len) == (512, 5, 77)
    assert run(["plan", str(tmp_path), "4xh100", "--global-batch", "64", "--top", "1"]) == 0
    output = capsys.readouterr().out
    assert "64 sequences of 77 tokens a step" in output
    assert "no band: no model but decoders of text was ever measured" in output
