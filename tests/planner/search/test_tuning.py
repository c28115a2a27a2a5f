"""Fine-tuning in the planner: trained and frozen parts, and which devices fit which method."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from weft import env
from weft.cli.app import run
from weft.config.files import load_config
from weft.config.sections import AdapterSection
from weft.config.shapes.model_spec import decoder_spec
from weft.errors import ModelError
from weft.planner.report.scenario import what_fits
from weft.planner.report.verdict import read_plan
from weft.planner.search.best_plans import answer
from weft.planner.search.model_source import read_model
from weft.planner.search.question import tuned_question
from weft.planner.search.refine import estimated
from weft.planner.space.shape import Shape
from weft.planner.space.trained_part import AdapterSize

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
FIXED = "precision=bf16 recompute=full compile=off"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path / "base")


@pytest.mark.parametrize("size", ["llama3-8b", "gpt2"])
def test_adapter_size_by_widths_equals_the_sum_over_layers(size):
    spec = decoder_spec(size)
    wanted = AdapterSize.of(spec, AdapterSection(rank=8))
    assert wanted is not None
    found = AdapterSize.of_shape(Shape.of_decoder(spec), 8)
    assert (found.params, found.products) == (wanted.params, wanted.products)


def test_adapter_products_of_latent_attention_and_stacked_experts():
    shape = Shape(
        vocab=100, hidden=64, layers=2, heads=4, kv_heads=4, head_dim=8, ffn=128, q_rank=24, kv_rank=16, rope_dim=4,
        num_experts=4, top_k=2, expert_ffn=32, shared_ffn=48, dense_layers=1,
    )  # fmt: skip
    size = AdapterSize.of_shape(shape, 2)
    attention = (64 + 24) + (24 + 4 * 12) + (64 + 20) + (16 + 2 * 32) + (32 + 64)
    assert size.products == 5 + 3
    assert size.width == attention + 3 * (64 + 128) / 2 + 3 * (64 + 48) / 2


def test_adapter_fits_if_full_training_does_not(folder):
    found = {(str(one.question.cluster), one.tune): one for one in what_fits(folder, "1xrtx4090,1xa100", fixed=FIXED)}
    assert found["1xrtx4090", "full"].answer.best is None
    full, lora = (found["1xa100", tune].smallest for tune in ("full", "lora"))
    # An 8B base in bf16 is 15 GiB; each trained weight adds its gradient and 12 bytes of master and moments.
    assert lora.memory["parameters"] == pytest.approx(2 * 8.03e9, rel=0.02)
    trained = 41.9e6
    assert lora.memory["optimizer"] == pytest.approx(12 * trained, rel=0.01)
    assert lora.memory["gradients"] <= 4 * trained * 1.01
    assert full is not None
    assert full.total_bytes > 3 * lora.total_bytes or full.plan != lora.plan
    asked = found["1xa100", "lora"].question
    assert (asked.job.seq_len, asked.job.global_batch) == (2048, 16)
    assert asked.assumed == ("--seq-len 2048", "--global-batch 16")


def test_larger_rank_trains_more_parameters(folder):
    sizes = [tuned_question(folder, "1xh100", tune).job.adapter.params for tune in ("lora", "lora=64")]
    assert sizes[1] == 4 * sizes[0]
    assert tuned_question(folder, "1xh100", "full").job.adapter is None


@pytest.mark.parametrize(
    "tune, message",
    [
        ("lroa", "it is full, lora, lora=RANK, qlora, qlora=RANK or all. Did you mean 'lora'? Use --tune lora."),
        ("full=3", "it is full, lora, lora=RANK, qlora, qlora=RANK or all. Did you mean 'full'? Use --tune lora."),
        ("lora=0", "an adapter's rank is a whole number from 1 to 65536. Use --tune lora=64."),
        ("qlora=x", "an adapter's rank is a whole number from 1 to 65536. Use --tune lora=64."),
    ],
)
def test_invalid_tune_value_is_rejected(folder, capsys, tune, message):
    assert run(["plan", folder, "1xh100", "--tune", tune]) == 2
    assert capsys.readouterr().err == f"error: tune={tune}: {message}\n"


def test_table_of_fitting_methods(folder, capsys):
    fixed = ["--fix", FIXED]
    assert run(["plan", folder, "1xrtx4090,1xa100", "--tune", "all", *fixed]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("base, 8.03 B parameters: 16 sequences of 2048 tokens a step (assumed: --seq-len 2048")
    rows = [line.split()[:2] for line in lines[2:] if line.startswith("1x")]
    assert rows == [[on, tune] for on in ("1xrtx4090", "1xa100") for tune in ("full", "lora", "qlora")]
    assert "does not fit; needs least:" in lines[2]
    assert run(["plan", folder, "1xa100-40", "--tune", "all", "--json", *fixed]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert [(one["tune"], one["fits"]) for one in tables] == [("full", False), ("lora", True), ("qlora", True)]
    assert tables[1]["num_trained"] == 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))


def test_four_bit_base_fits_if_a_stored_one_does_not(tmp_path, capsys):
    """A 20B model on a GPU of 24 GiB: 37 GiB of weights in bf16, 12 GiB in nf4."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 85, "vocab_size": 32000}))
    fixed = "precision=bf16 recompute=full compile=off offload=none"
    found = {one.tune: one for one in what_fits(str(folder), "1xrtx4090", fixed=fixed, global_batch=1, seq_len=512)}
    assert {name: one.answer.best is not None for name, one in found.items()} == {
        "full": False,
        "lora": False,
        "qlora": True,
    }
    out = tmp_path / "qlora.toml"
    sizes = ["--global-batch", "1", "--seq-len", "512", "--out", str(out)]
    assert run(["plan", str(folder), "1xrtx4090", "--tune", "qlora=8", "--fix", fixed, *sizes]) == 0
    written = load_config(out, []).config
    assert (written.adapter.rank, written.adapter.base, written.model.path) == (8, "nf4", str(folder))
    capsys.readouterr()


def test_traced_family_supports_an_adapter(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, architectures=["BertForMaskedLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "bert")
    saved = tmp_path / "bert.json"
    words = ["plan", str(tmp_path / "bert"), "1xh100", "--tune", "lora=2", "--save-model", str(saved), "--json"]
    assert run([*words, "--seq-len", "16"]) == 0
    capsys.readouterr()
    model = read_model(str(saved))
    asked = tuned_question(model, "1xh100", "qlora=2", seq_len=16)
    adapter = asked.job.adapter
    layers = 3 * (4 * (32 + 32) + 2 * (32 + 64)) + (32 + 32)  # the last one is in the head, before the logits
    assert adapter.params * 3 == pytest.approx(2 * layers)
    assert adapter.packed * 3 == pytest.approx(3 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 32)
    assert model.adapter is None


def test_tuning_search_does_not_import_torch(folder):
    code = (
        "import sys; from weft.cli.app import run; "
        f"code = run(['plan', {folder!r}, '1xh100', '--tune', 'lora', '--fix', {FIXED!r}]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=env.child_env(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_gpt2_of_transformers_has_no_packed_base(tmp_path):
    """The runtime rejects it (models/adapters/packed_linear.py), so the planner does too."""
    numbers = {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    with pytest.raises(ModelError, match=r"base=nf4: .*Use --tune lora"):
        tuned_question(str(tmp_path), "1xa100", "qlora")
    found = what_fits(str(tmp_path), "1xa100", fixed="precision=bf16 compile=off")
    assert [one.tune for one in found] == ["full", "lora"]


def test_offloaded_frozen_base_is_read_twice_per_pass():
    """The largest model that fits is not priced as if its weights were on the device."""
    asked = tuned_question("llama3-70b", "a100", "lora")
    plans = [
        read_plan(f"zero=3 accumulation={passes} precision=bf16 offload=params compile=on", asked) for passes in (16, 1)
    ]
    often, once = estimated(plans, asked)
    read_s = 2 * 2 * asked.job.shape.num_params / asked.cluster.device.host_bytes_per_s
    assert often.step_s > 0.95 * 16 * read_s
    assert often.terms["offload"] > 10 * max(once.terms["offload"], 1.0)
    best = answer(asked).best
    assert best.plan.accumulation < 16
