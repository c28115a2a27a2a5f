"""Recipes of configs/tune: each fits on the GPUs in its name; some train a narrow model of their family."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.models import small_config
from tests.planner.published import MODELS
from tests.train.chat_folders import save_folder, write_all
from tests.train.tuned_folders import save_model, write_tables
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.data.text.tokenizer import train_bpe
from weft.planner.search.model_source import read_model
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated
from weft.planner.space.trained_part import AdapterSize, FrozenWork
from weft.train.preparation import prepare_run
from weft.train.rank_run import Start, run_rank
from weft.train.tasks.export import write_tokenizer
from weft.train.tasks.registry import find_task

FILES = sorted((Path(__file__).parents[2] / "configs" / "tune").glob("*.toml"))
#: Families with objectives other than the next token: published config, class, table.
TASKS = {
    "bert_base": (("BertConfig", {}), "BertForMaskedLM", "texts.jsonl"),
    "t5_base": (
        ("T5Config", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12}),
        "T5ForConditionalGeneration",
        "reversed.jsonl",
    ),
}
_ROPE = {"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 5e6}
#: Vision-language models: published config, class, small family of tests/train/chat_folders.py.
CHATS = {
    "qwen25_vl_7b": (
        ("Qwen2_5_VLConfig", {
            "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
            "text_config": {
                "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                "num_key_value_heads": 4, "vocab_size": 152064, "rope_parameters": _ROPE}}),
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl",
    ),
    "qwen3_vl_4b": (
        ("Qwen3VLConfig", {
            "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560,
                              "deepstack_visual_indexes": [5, 11, 17]},
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
                "rope_parameters": _ROPE}}),
        "Qwen3VLForConditionalGeneration", "qwen3_vl",
    ),
    "gemma3_4b": (
        ("Gemma3Config", {
            "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                              "num_attention_heads": 16, "image_size": 896, "patch_size": 14},
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
                "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 1024}}),
        "Gemma3ForConditionalGeneration", "gemma3",
    ),
}  # fmt: skip
RECIPES = [file for file in FILES if file.stem.rsplit("_", 2)[0] not in {**TASKS, **CHATS}]
CHAT_RECIPES = [file for file in FILES if file.stem.rsplit("_", 2)[0] in CHATS]
TASK_RECIPES = [file for file in FILES if file not in (*RECIPES, *CHAT_RECIPES)]
CLASSES = {
    "llama3": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3": "Gemma3ForCausalLM",
    "mistral": "MistralForCausalLM", "phi4": "Phi3ForCausalLM", "olmo2": "Olmo2ForCausalLM",
    "gpt": "GptOssForCausalLM", "deepseek": "DeepseekV3ForCausalLM",
}  # fmt: skip
IDS = [file.stem for file in RECIPES]
#: Recipes of each family and method, whose task description and training are tested too.
TRAINED = ("llama3_8b_lora_a100-40", "llama3_8b_qlora_rtx4090", "qwen3_4b_lora_rtx4090", "gemma3_1b_full_rtx4090",
           "mistral_7b_lora_rtx4090", "phi4_mini_lora_rtx4090", "olmo2_7b_lora_a100-40", "gpt_oss_20b_lora_h100",
           "deepseek_v3_16b_lora_h100")  # fmt: skip
FAMILIES = [file for file in RECIPES if file.stem in TRAINED]
FAMILY_IDS = [file.stem for file in FAMILIES]


def parts_of(file: Path) -> tuple[str, str, str]:
    """Return (model, tuning method, devices) from a recipe's name."""
    model, tune, devices = file.stem.rsplit("_", 2)
    return model.removesuffix("_dpo"), tune, devices if devices[0].isdigit() else f"1x{devices}"


def asked(file: Path, folder: Path, counted: AdapterSize | None) -> Question:
    config = load_config(file, [f"model.path={folder}"]).config
    planned = replace(read_model(str(folder)), config=config, counted_adapter=counted)
    if config.task.name == "prefer":  # two answers, and a forward of the model without its adapter
        planned = replace(planned, texts=2, frozen=FrozenWork(own=1))
    return Question.of(planned, parts_of(file)[2])


def fits(question: Question, file: Path) -> bool:
    """Return whether a recipe's plan fits, with the confidence from which `weft plan` lists it."""
    (one,) = estimated([Plan.parse(load_config(file, []).config.plan)], question)
    return one.fits >= question.fits


@pytest.fixture
def folder(request, tmp_path) -> Path:
    """Return a folder with the published model's config.json."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODELS[parts_of(request.param)[0]]))
    return tmp_path / "model"


def test_each_family_has_a_recipe():
    assert {parts_of(file)[0] for file in RECIPES} == {*MODELS}
    assert {parts_of(file)[0] for file in TASK_RECIPES} == {*TASKS}
    assert {parts_of(file)[0] for file in CHAT_RECIPES} == {*CHATS}


@pytest.mark.parametrize("file, folder", [(file, file) for file in RECIPES], ids=IDS, indirect=["folder"])
def test_recipe_fits_on_the_gpu_in_its_name(file, folder):
    config = load_config(file, []).config
    tune = parts_of(file)[1]
    is_adapter = tune in ("lora", "qlora")
    assert bool(config.adapter.rank) == is_adapter
    assert (config.adapter.base != "stored") == (tune == "qlora")
    shape, adapter = read_model(str(folder)).shape, config.adapter
    counted = AdapterSize.of_shape(shape, adapter.rank, adapter.base) if is_adapter else None
    assert fits(asked(file, folder, counted), file)
    if file in FAMILIES and is_adapter:  # full training would not fit
        sizes = {"seq_len": config.train.seq_len, "global_batch": config.train.global_batch}
        assert not fits(Question.of(str(folder), parts_of(file)[2], **sizes), file)


@pytest.mark.full
@pytest.mark.parametrize("file, folder", [(file, file) for file in FAMILIES], ids=FAMILY_IDS, indirect=["folder"])
def test_task_description_of_a_recipe_matches_its_widths(file, folder):
    """The linear layers that transformers names are those that the planner counts from the widths."""
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(
        json.dumps({**MODELS[parts_of(file)[0]], "architectures": [CLASSES[file.stem.split("_")[0]]]})
    )
    config = load_config(file, [f"model.path={folder}"]).config
    described = find_task(config).describe()
    assert fits(Question.of(described, parts_of(file)[2]), file)
    if config.adapter.rank and "phi4" not in file.stem:  # phi4 has fused projections
        by_widths = AdapterSize.of_shape(described.shape, config.adapter.rank, config.adapter.base)
        assert described.adapter.params == pytest.approx(by_widths.params, rel=1e-6)


GATE = {"llama3_8b_lora_a100-40"}


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=() if file.stem in GATE else pytest.mark.full) for file in FAMILIES],
    ids=FAMILY_IDS,
)
def test_recipe_trains_a_narrow_model_on_a_cpu(file, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, tune, _ = parts_of(file)
    config = small_config(MODELS[model]["model_type"], CLASSES[model.split("_")[0]])
    config.vocab_size, config.tie_word_embeddings = 300, MODELS[model]["tie_word_embeddings"]
    small = tmp_path / "small"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(small)
    train_bpe(tmp_path / "tokenizer", ["warp weft"] * 9, 300)
    write_tokenizer(tmp_path / "tokenizer", small)
    chat = [{"role": "user", "content": "warp?"}, {"role": "assistant", "content": "weft"}]
    lines = [json.dumps({"messages": [{**chat[0], "content": f"warp {one}?"}, chat[1]]}) for one in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    plan = f"dp_replicate=1 {load_config(file, []).config.plan}"
    folder = prepare_run(
        load_config(
            file,
            [
                f"model.path={small}", f"data.train={tmp_path / 'chats.jsonl'}", f"run.dir={tmp_path}",
                f"data.cache_dir={tmp_path / 'cache'}", f"plan={plan}", "train.steps=2", "train.seq_len=48",
                "schedule.warmup_steps=1", "eval.batches=1", "data.holdout=0.1", "launch.device=cpu",
            ],
        ).config,
        world_size=1,
    )  # fmt: skip
    shown = io.StringIO()
    result = run_rank(folder.path, None, shown, Start())
    assert "step 2/2" in shown.getvalue(), result
    assert ("adapter lora of rank" in shown.getvalue()) == (tune != "full")


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=pytest.mark.full if "bert" not in file.stem else ())
        for file in (*TASK_RECIPES, *CHAT_RECIPES)
    ],  # 24 layers and more are traced
    ids=[file.stem for file in (*TASK_RECIPES, *CHAT_RECIPES)],
)
def test_recipe_of_another_task_fits_on_the_gpu_in_its_name(file, tmp_path):
    transformers = pytest.importorskip("transformers")
    (kind, sizes), named, _ = {**TASKS, **CHATS}[parts_of(file)[0]]
    getattr(transformers, kind)(**sizes, architectures=[named]).save_pretrained(tmp_path / "model")
    described = find_task(load_config(file, [f"model.path={tmp_path / 'model'}"]).config).describe()
    assert fits(Question.of(described, parts_of(file)[2]), file)


@pytest.mark.full
@pytest.mark.parametrize("file", TASK_RECIPES, ids=[file.stem for file in TASK_RECIPES])
def test_recipe_of_another_task_trains_a_narrow_model_on_a_cpu(file, tmp_path):
    pytest.importorskip("transformers")
    model, _, _ = parts_of(file)
    save_model(tmp_path / "small", model.split("_")[0])
    write_tables(tmp_path)
    plan = f"dp_replicate=1 {load_config(file, []).config.plan}"
    words = [
        f"model.path={tmp_path / 'small'}", f"data.train={tmp_path / TASKS[model][2]}", f"run.dir={tmp_path}",
        f"data.cache_dir={tmp_path / 'cache'}", f"plan={plan}", "train.steps=2", "train.seq_len=32",
        "train.global_batch=8", "schedule.warmup_steps=1", "eval.batches=1", "data.holdout=0.2", "launch.device=cpu",
    ]  # fmt: skip
    folder = prepare_run(load_config(file, words).config, world_size=1)
    shown = io.StringIO()
    result = run_rank(folder.path, None, shown, Start())
    assert "step 2/2" in shown.getvalue(), result


@pytest.mark.full
@pytest.mark.parametrize("file", CHAT_RECIPES, ids=[file.stem for file in CHAT_RECIPES])
def test_recipe_of_chats_with_images_trains_a_narrow_model_on_a_cpu(file, tmp_path):
    pytest.importorskip("transformers")
    write_all(tmp_path)
    small = save_folder(tmp_path, CHATS[parts_of(file)[0]][2])
    plan = f"dp_replicate=1 {load_config(file, []).config.plan}"
    words = [
        f"model.path={small}", f"task.options.data={tmp_path / 'chats.jsonl'}", f"run.dir={tmp_path}",
        f"data.cache_dir={tmp_path / 'cache'}", f"plan={plan}", "train.steps=2", "train.seq_len=256",
        "schedule.warmup_steps=1", "eval.batches=1", "task.options.holdout=0.2", "launch.device=cpu",
    ]  # fmt: skip
    folder = prepare_run(load_config(file, words).config, world_size=1)
    shown = io.StringIO()
    result = run_rank(folder.path, None, shown, Start())
    assert "step 2/2" in shown.getvalue(), result
