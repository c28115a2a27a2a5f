"""`weft verify`: correct plans pass, a wrong one is detected and named, and every plan is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.choice import todays
from weft.cli.app import run
from weft.cli.verify import describe
from weft.config.plan import Plan
from weft.config.shapes.model_spec import decoder_spec, size_hides
from weft.errors import WeftError
from weft.verify import verifier as verify
from weft.verify.case_data import Settings
from weft.verify.matrix import legal
from weft.verify.parity import train_plain
from weft.verify.subject import find_subject, reduced
from weft.verify.verifier import Float64Throughout, Verdict, Verifier

HERE = "tests.verify.subjects"
SMALL = Settings(num_steps=2, num_layers=2, dim=16, vocab_size=61, seq_len=8)
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 61, "hidden_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 64, "attention_dropout": 0.3,
}  # fmt: skip


@pytest.fixture
def shared_ranks(ranks2, monkeypatch):
    """Verify on the existing ranks."""

    class ExistingRanks:
        def __init__(self, num_ranks, timeout_s):
            assert num_ranks == 2

        def __enter__(self):
            return ranks2

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(verify, "RankPool", ExistingRanks)


def verdict_of(source: str, plan: str, settings: Settings | None = None):
    settings = settings or (Settings(num_steps=2) if source.startswith(HERE) else SMALL)
    with Verifier(find_subject(source, settings), 2) as verifier:
        return verifier.verify(Plan.parse(plan))


def test_layout_of_a_config_is_used(tmp_path):
    toml = tmp_path / "run.toml"
    toml.write_text("layout = 'embed=vocab head=vocab'\n[model]\nname = 'tiny'\n")
    built = find_subject(str(toml), SMALL).build()
    assert built.layout is not None
    assert built.layout.format() == "embed=vocab head=vocab"


@pytest.mark.parametrize("plan", ["dp_replicate=2 accumulation=2", "dp_shard=2 zero=3 recompute=full"])
def test_correct_plans_of_every_kind_of_model_pass(plan, shared_ranks, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    toml = tmp_path / "run.toml"
    toml.write_text("[model]\nname = 'tiny'\n[optimizer]\nname = 'sgd'\nlr = 0.1\n")
    for source in ("tiny", str(tmp_path), str(toml), f"{HERE}:net"):
        verdict = verdict_of(source, plan)
        assert verdict.passed, (source, verdict)
        assert verdict.max_rel_diff < 1e-10
        assert verdict.loss == pytest.approx(verdict.reference_loss, rel=1e-10)
        assert len(verdict.loss) == len(verdict.grad_norm) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_dtypes_pass_within_their_bounds(dtype, shared_ranks):
    verdict = verdict_of("tiny", "dp_shard=2 zero=2", Settings(2, dtype, 8, 8, 0, 2, 16, 61))
    assert verdict.passed, verdict
    assert verdict.max_rel_diff > 0


def test_differing_plan_is_reported_with_the_first_differing_module(shared_ranks):
    verdict = verdict_of(f"{HERE}:mixes", "dp_shard=2 zero=1")
    assert not verdict.passed
    assert verdict.max_rel_diff > 1e-3
    assert verdict.parts.startswith("output of blocks.1.0 in step 1")
    assert "DIFFERS" in describe(verdict)[-1]
    assert ["depends on the other samples" in cause for cause in verdict.causes] == [True]


def test_random_numbers_are_named_as_the_cause(shared_ranks):
    [cause] = verdict_of(f"{HERE}:noisy", "dp_shard=2 zero=1").causes
    assert cause.startswith("random numbers: ")
    assert "torch.randn_like" in cause


def test_differing_gradients_are_distinguished_from_outputs(shared_ranks):
    verdict = verdict_of(f"{HERE}:rounds", "dp_shard=2 zero=3")
    assert not verdict.passed
    assert verdict.parts.startswith("gradient of head.bias in step 1")
    assert "outputs agree" in verdict.parts


MIXTRAL = {**CONFIG, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}


def test_parameters_without_gradient_are_reported(shared_ranks):
    with Verifier(find_subject(f"{HERE}:leaves_out", Settings(num_steps=1)), 2) as verifier:
        assert verifier.verify(Plan.parse("dp_shard=2 zero=2")).passed
    assert "2 of 8 parameters have no gradient in the last step; the first is unused.weight" in verifier.notes


@pytest.mark.parametrize("balance", ["aux_loss", "bias"])
def test_experts_of_weft_pass(balance, shared_ranks, tmp_path):
    (tmp_path / "run.toml").write_text(f"[model]\nname = 'moe-tiny'\nbalance = '{balance}'\nbalance_rate = 0.1\n")
    verdict = verdict_of(
        str(tmp_path / "run.toml"), "dp_shard=2 ep=2 zero=1 recompute=selective", replace(SMALL, seq_len=16)
    )
    assert verdict.passed, verdict
    assert verdict.max_rel_diff < 1e-10


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_hugging_face_models_with_experts_pass(dtype, shared_ranks, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    verdict = verdict_of(str(tmp_path), "dp_shard=2 ep=2 zero=1", replace(SMALL, dtype=dtype))
    assert verdict.passed, verdict


SMALL_T5 = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 61, "d_model": 16, "d_kv": 4,
    "d_ff": 24, "num_layers": 2, "num_heads": 4,
}  # fmt: skip
SMALL_WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "vocab_size": 61, "d_model": 16,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_source_positions": 10, "max_target_positions": 64,
    "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
SMALL_CLIP = {
    "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 8,
    "text_config": {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "image_size": 16, "patch_size": 8},
}  # fmt: skip
SMALL_SIGLIP = {
    "architectures": ["SiglipModel"], "model_type": "siglip",
    "text_config": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2,
                    "pad_token_id": 0, "projection_size": 32},
    "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "image_size": 16, "patch_size": 8},
}  # fmt: skip
SMALL_TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
SMALL_LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 60,
    "vision_feature_layer": -1, "text_config": SMALL_TEXT | {"model_type": "llama"},
    "vision_config": SMALL_CLIP["vision_config"] | {"model_type": "clip_vision_model"},
}  # fmt: skip
SMALL_QWEN2_VL = {
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "image_token_id": 60,
    "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63,
    "text_config": SMALL_TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
                                 "model_type": "qwen2_vl_text", "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "mlp_ratio": 2, "patch_size": 2},
}  # fmt: skip
LATENT_ATTENTION = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 16,
    "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("config, plan", todays([
    (SMALL_T5, "dp_shard=2 zero=3"), (SMALL_T5, "tp=2"), (SMALL_WHISPER, "dp_shard=2 zero=2"),
    (SMALL_WHISPER, "tp=2"), (SMALL_CLIP, "accumulation=2 dp_replicate=2"), (SMALL_LLAVA, "dp_shard=2 zero=3"),
    (SMALL_QWEN2_VL, "dp_shard=2 zero=2 accumulation=2"),
    pytest.param(SMALL_CLIP, "tp=2", marks=pytest.mark.full), pytest.param(SMALL_LLAVA, "tp=2", marks=pytest.mark.full),
    pytest.param(SMALL_QWEN2_VL, "tp=2", marks=pytest.mark.full),
    (LATENT_ATTENTION, "cp=2 cp_mode=ring"), (LATENT_ATTENTION, "cp=2 ep=2 cp_mode=ulysses zero=3"),
], parts=3))  # fmt: skip
def test_models_with_special_inputs_and_widths_pass(config, plan, shared_ranks, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    verdict = verdict_of(str(tmp_path), plan, Settings(num_steps=2, seq_len=8))
    assert verdict.passed, verdict


def test_rounding_gradient_changes_no_weight_measurably(shared_ranks, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_SIGLIP))
    settings = Settings(num_steps=3, seq_len=16)
    with Float64Throughout():
        gradients = train_plain(find_subject(str(tmp_path), settings).build()).grads
    biases = [name for name in gradients if name.endswith("k_proj.bias")]
    assert len(biases) == 4
    assert all(gradients[name].abs().max() < 1e-16 for name in biases)
    verdict = verdict_of(str(tmp_path), "dp_shard=2 zero=2", settings)
    assert verdict.passed
    assert max(verdict.parameters[name] for name in biases) < 1e-11  # 4e-10 with eps=1e-8, 1e-10 with own scales


def test_samples_contain_one_or_two_images_and_their_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAVA))
    case = find_subject(str(tmp_path), Settings(num_steps=1, seq_len=8, global_batch=4)).build()
    own, other = (case.microbatches(0, Plan.parse("dp_replicate=2 accumulation=2"), rank) for rank in (0, 1))
    counts = [[len(batch["pixel_values"]) for batch in part] for part in (own, other)]
    marks = [[int((batch["input_ids"] == 60).sum()) for batch in part] for part in (own, other)]
    assert counts == [[1, 1], [2, 1]]
    assert marks == [[4, 4], [8, 4]]


def test_model_without_single_width_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_CLIP))
    with pytest.raises(WeftError, match="width=32: a model of type clip has no one width"):
        find_subject(str(tmp_path), Settings(dim=32))


def test_rules_use_the_experts_of_hugging_face_models(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    shape = find_subject(str(tmp_path), SMALL).shape
    assert shape is not None
    assert (shape.num_experts, shape.expert_ffn_dim) == (4, 24)
    assert {plan.ep for plan in legal(2, model=shape)} == {1, 2}


def test_model_is_reduced_as_requested():
    small = reduced(decoder_spec("llama3-8b"), Settings(num_layers=3, dim=64, vocab_size=100))
    assert (small.num_layers, small.dim, small.vocab_size) == (3, 64, 100)
    assert (small.num_heads, small.num_kv_heads, small.ffn_dim) == (32, 8, 224)


@pytest.mark.parametrize(
    "source, text",
    [
        ("tinny", "model=tinny: it names no file, folder or function, and no size has this name. Did you mean 'tiny'?"),
        (f"{HERE}:no_model", "it returned int, not an nn.Module. Return a model, or it and an example or a batch_fn."),
        (
            f"{HERE}:without_data",
            "its inputs are unknown. Return (model, loader) with a DataLoader, or (model, batch_fn)",
        ),
        (
            f"{HERE}:raises",
            "it raised ValueError (no weights here). Call it in Python without arguments, to see where.",
        ),
        (f"{HERE}:annotations", "and cannot be called. Name a function without arguments that returns a model."),
        (f"{HERE}:lazy", "parameter 'weight' has no shape yet. Run one batch through the model before you return it."),
        (f"{HERE}:complex_weight", "parameter 'weight' is complex. Keep it as torch.view_as_real of it."),
        (f"{HERE}:stream", "its loader's dataset has no samples that can be read by their number. Return a DataLoader"),
        (f"{HERE}:absent", "it cannot be imported (tests.verify.subjects has no 'absent')."),
        ("tests", "model=tests: the folder has no config.json. Give the folder of a Hugging Face model."),
    ],
)
def test_unavailable_models_are_rejected(source, text):
    with pytest.raises(WeftError) as caught:
        find_subject(source, Settings(num_steps=2)).build()
    assert text in str(caught.value)
    assert caught.value.exit_code == 2


def test_model_that_pytorch_cannot_train_is_rejected():
    with pytest.raises(WeftError, match=r"with_a_wrong_loss: PyTorch alone cannot train it: TypeError \(.*\)\. Fix"):
        Verifier(find_subject(f"{HERE}:with_a_wrong_loss", Settings(num_steps=1)), 2)


def test_reducing_a_function_model_is_rejected():
    with pytest.raises(WeftError, match=r"layers=2: the function .* builds the model itself"):
        find_subject(f"{HERE}:net", SMALL)


@pytest.mark.parametrize(
    "args, text",
    [
        (["--plan", "dp_shard=3 zero=1"], "train.global_batch=8: 3 data-parallel ranks"),
        (["--plan", "dp_shrad=2"], "unknown plan field 'dp_shrad'. Did you mean 'dp_shard'?"),
        (["--plan", "zero=1"], "zero=1: ZeRO shards over dp_shard"),
        (["--plan", "dp_shard=2 zero=1", "--dtype", "int8"], "dtype=int8: not one of float64"),
        (
            ["--plan", "dp_shard=2 zero=1", "--all", "2"],
            "all=2: the rules can list the legal plans of 1 to 64",
        ),
        (["--all", "2", "--part", "3/2"], "part=3/2: a part has the form NUMBER/COUNT. Use e.g. 2/10"),
        (
            ["--plan", "dp_shard=2 zero=1", "--part", "1/2"],
            "part=: it selects among the plans of --all.",
        ),
        (["--all", "0"], "all=0: the rules can list the legal plans of 1 to 64 ranks. Use 2, 4 or 8."),
        ([], "plan=: give --plan, or --all with a number of ranks."),
    ],
)
def test_invalid_input_is_one_message_and_exit_code_2(args, text, capsys):
    assert run(["verify", "--model", "tiny", *args]) == 2
    message = capsys.readouterr().err
    assert text in message
    assert "Traceback" not in message


def test_exit_codes_and_json_of_one_plan(shared_ranks, capsys):
    words = ["--plan", "dp_shard=2 zero=2", "--steps", "1", "--json"]
    assert run(["verify", "--model", f"{HERE}:net", *words]) == 0
    message = json.loads(capsys.readouterr().out)
    assert message["plan"] == "dp_shard=2 zero=2"
    assert message["passed"] is True
    assert message["max_rel_diff"] < 1e-10
    assert len(message["loss"]) == len(message["reference_loss"]) == 1
    assert run(["verify", "--model", f"{HERE}:mixes", *words]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_all_plans_share_one_start_of_the_ranks(shared_ranks, capsys):
    words = ["--all", "2", "--sample", "4", "--steps", "1", "--json"]
    assert run(["verify", "--model", f"{HERE}:net", *words]) == 0
    message = json.loads(capsys.readouterr().out)
    assert (message["verified"], message["passed"]) == (message["num_passed"] + message["num_refused"], True)
    # Two linear layers have no heads: the model rejects plans that need them, and others are sampled.
    assert 4 <= message["num_passed"] <= 12
    assert message["num_refused"] <= 8
    assert message["legal"] > 50
    assert len({plan["plan"] for plan in message["plans"]}) == message["verified"]


def test_inconclusive_run_is_reported(shared_ranks, capsys, monkeypatch):
    """The model rejects all plans."""
    monkeypatch.setattr(Verifier, "verify", lambda self, plan: Verdict(plan.format(), "float64", refused="no place"))
    assert run(["verify", "--model", f"{HERE}:net", "--all", "2", "--steps", "1"]) == 3
    message = capsys.readouterr().out
    assert message.splitlines()[-1] == "nothing was verified: the model refused every plan that was tried"
    assert "refused  tp: no place" in message


def test_command_starts_its_own_ranks():
    command = [sys.executable, "-m", "weft", "verify", "--model", f"{HERE}:net", "--plan", "dp_shard=2 zero=1"]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=200, cwd=root)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True


def test_folder_does_not_hide_a_size_of_the_same_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    assert find_subject("tiny", SMALL).kind == "decoder"
    assert find_subject("./tiny", SMALL).kind == "hf"
    assert size_hides("tiny") == "model=tiny: Weft uses the size of that name. Write ./tiny for the folder."
    assert not size_hides("./tiny")
    assert not size_hides("gpt2")
    assert run(["layout", "tiny"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Decoder: ")
    assert "Write ./tiny for the folder." in shown.err
