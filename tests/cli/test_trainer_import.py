"""Configs of axolotl, LLaMA-Factory and TRL as Weft configs: `weft config import`."""

from __future__ import annotations

import json
import math
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

from weft.cli import app
from weft.config.expected_values import node_at
from weft.config.files import format_config, load_config, parse_config
from weft.config.plan import PLAN_FIELDS, Plan
from weft.config.rules.config_rules import config_problems
from weft.errors import ConfigError
from weft.interop.trainer_keys import TOOLS, tools
from weft.interop.trainers import import_config, import_values

DOCS = Path(__file__).parents[2] / "docs"
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
strict: false
datasets:
  - path: mlabonne/FineTome-100k
    type: chat_template
    split: train[:20%]
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
  - path: data/own.jsonl
    type: alpaca
val_set_size: 0.1
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: 'model.layers.[\\d]+.(mlp|self_attn).(up|down|q|v)_proj'
loraplus_lr_ratio: 16
sequence_len: 4096
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: true
gradient_checkpointing: true
attn_implementation: flash_attention_2
warmup_ratio: 0.1
saves_per_epoch: 1
special_tokens: {pad_token: <|end|>}
fsdp_config: {fsdp_version: 2, offload_params: false, reshard_after_forward: true}
neftune_noise_alpha: 5
wandb_project: tunes
profiler_steps: 3
profiler_steps_start: 9
lora_modules_to_sav: [lm_head]
"""
LLAMAFACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj, v_proj
pref_beta: 0.2
pref_loss: orpo
dataset: pairs, lost
template: qwen3_nothink
cutoff_len: 2048
output_dir: saves/dpo
logging_steps: 10
save_steps: 500
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 20
bf16: true
deepspeed: ds.json
report_to: [tensorboard]
"""
TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: stanfordnlp/imdb
dataset_text_field: body
learning_rate: 0.0001
max_steps: 200
packing: true
optim: lion_32bit
per_device_train_batch_size: 4
use_peft: false
lora_r: 64
"""


def imported(tmp_path, text: str, world_size: int | None = None):
    (tmp_path / "theirs.yaml").write_text(text)
    return import_config(tmp_path / "theirs.yaml", world_size)


def lines(found) -> dict[str, str]:
    return {line.key: line.sentence for line in found.lines}


def test_axolotl(tmp_path):
    found = imported(tmp_path, AXOLOTL, 8)
    config, said = found.config(), lines(found)
    assert config.plan == "dp_shard=8 zero=3 accumulation=4 precision=bf16 recompute=full"
    assert config_problems(config, world_size=8) == []
    assert (config.model.path, config.train.seq_len, config.train.epochs) == ("NousResearch/Llama-3.2-1B", 4096, 3)
    assert config.train.global_batch == 2 * 4 * 8
    adapter = config.adapter
    assert (adapter.rank, adapter.alpha, adapter.base, adapter.lora_plus_ratio) == (32, 16, "nf4", 16)
    assert len(adapter.targets) == 8
    assert "model.layers.*.self_attn.q_proj" in adapter.targets
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.states, optimizer.lr, optimizer.betas) == ("adamw", "fp8", 2e-4, (0.9, 0.999))
    assert (optimizer.weight_decay, config.schedule.kind, config.schedule.final) == (0.0, "cosine", 0.0)
    assert (config.schedule.warmup_ratio, config.train.neftune_alpha, config.train.profile) == (0.1, 5, "10-12")
    first, second = config.data.train
    assert first.path == "hf://mlabonne/FineTome-100k?split=train"
    assert (first.schema_, first.columns) == (
        "messages",
        {"messages": "conversations", "role": "from", "content": "value"},
    )
    assert (second.path, second.schema_) == ("data/own.jsonl", "instruction")
    assert [(sink.kind, sink.project) for sink in config.sink] == [("wandb", "tunes")]
    assert said["saves_per_epoch"] == "not supported yet: count steps: set eval.every and checkpoint.every"
    assert said["datasets.0.split"] == "not supported yet: all of the split is read. Cut the data before"
    assert said["tf32"] == "has no effect in Weft: plan.precision is bf16"
    assert said["lora_modules_to_sav"] == "typo: no such key in axolotl. Did you mean 'lora_modules_to_save'?"
    assert [line.key for line in found.typos] == ["lora_modules_to_sav"]


def test_llamafactory_with_its_data_sets_and_deepspeed_config(tmp_path):
    (tmp_path / "data").mkdir()
    info = {"pairs": {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt",
                      "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"}}}  # fmt: skip
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')
    found = imported(tmp_path, LLAMAFACTORY, 2)
    config, said = found.config(), lines(found)
    assert Plan.parse(config.plan) == Plan.parse(
        "dp_shard=2 zero=3 accumulation=8 precision=bf16 recompute=full offload=optimizer"
    )
    assert config_problems(config, world_size=2) == []
    assert (config.task.name, config.task.options) == ("prefer", {"objective": "orpo", "beta": 0.2})
    (source,) = config.data.train
    assert source.path.endswith("data/pairs.json")
    assert source.columns == {"prompt": "talk", "chosen": "good", "rejected": "bad"}
    assert said["dataset"].endswith("lost: not in data/dataset_info.json. Set data.train to its file")
    assert (config.adapter.rank, config.adapter.targets) == (8, ("q_proj", "v_proj"))
    assert (config.schedule.warmup_steps, config.checkpoint.every, config.log.every) == (20, 500, 10)
    assert [sink.kind for sink in config.sink] == ["tensorboard"]
    assert config.data.packing is None


def test_llamafactory_with_images_becomes_the_task_chat(tmp_path):
    (tmp_path / "data").mkdir()
    info = {"shown": {"file_name": "shown.json", "formatting": "sharegpt",
                      "columns": {"messages": "talk", "images": "pictures"}}}  # fmt: skip
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    text = """
model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct
stage: sft
finetuning_type: {}
dataset: shown
template: qwen2_vl
val_size: 0.1
image_max_pixels: 262144
"""
    found = imported(tmp_path, text.format("lora"), 1)
    config, said = found.config(), lines(found)
    options = {"text": "talk", "picture": "pictures", "max_pixels": 262144, "holdout": 0.1}
    options["data"] = str(tmp_path / "data" / "shown.json")
    assert (config.task.name, config.task.options) == ("chat", options)
    assert config.adapter.targets == ("language_model.*",)
    assert said["dataset"].startswith("became task=chat, data=")
    assert config_problems(config, world_size=1) == []
    options = imported(tmp_path, text.format("full") + "freeze_multi_modal_projector: false\n", 1).config().task.options
    assert options["freeze"] == ("vision",)
    info["more"] = info["shown"]
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    said = lines(imported(tmp_path, text.format("lora").replace("shown", "shown,more"), 1))
    assert (
        said["dataset"] == "not supported yet: task=chat reads one local path. Put the records into one file or folder"
    )


def test_trl(tmp_path):
    found = imported(tmp_path, TRL)
    config, said = found.config(), lines(found)
    assert config.plan == "dp_replicate=* precision=bf16 recompute=full"
    assert found.open == ("train.global_batch",)
    assert (config.train.steps, config.train.global_batch, config.data.packing) == (200, 4, "fit")
    assert (config.optimizer.name, config.optimizer.lr) == ("weft.optim.lion:Lion", 1e-4)
    (source,) = config.data.train
    assert (source.path, source.schema_, source.columns) == (
        "hf://stanfordnlp/imdb?split=train",
        "text",
        {"text": "body"},
    )
    assert said["lora_r"] == "has no effect in Weft: the file trains no adapter"
    assert config.adapter.rank == 0
    assert any("It is read as trl sft" in note for note in found.notes)
    assert config_problems(config, world_size=2) == []


@pytest.mark.parametrize(
    "more, task",
    [
        ("beta: 0.5\nloss_type: [ipo]", ("prefer", {"objective": "ipo", "beta": 0.5})),
        ("loss_type: sigmoid\nlabel_smoothing: 0.1", ("prefer", {"objective": "dpo", "smoothing": 0.1})),
        ("desirable_weight: 2\nbeta: 0.1", ("prefer", {"objective": "kto", "wanted": 2.0, "beta": 0.1})),
        ("center_rewards_coefficient: 0.01", ("reward", {"center": 0.01})),
    ],
)
def test_task_of_trl_follows_from_its_keys(tmp_path, more, task):
    config = imported(tmp_path, f"model_name_or_path: m\nuse_peft: true\ndataset_name: d/p\n{more}\n").config()
    assert (config.task.name, config.task.options) == task


def test_intervals_are_read_apart(tmp_path):
    text = "base_model: m\nsequence_len: 64\nevaluation_strategy: no\nsave_strategy: steps\nsave_steps: 70\n"
    config = imported(tmp_path, text).config()
    assert (config.eval.every, config.checkpoint.every) == (0, 70)


def test_sizes_of_all_axes(tmp_path):
    text = "base_model: m\nsequence_len: 64\nmicro_batch_size: 1\ntensor_parallel_size: 2\ndp_shard_size: 2\n"
    assert imported(tmp_path, text, 8).plan == "dp_replicate=2 dp_shard=2 tp=2 zero=3 precision=bf16"
    with pytest.raises(ConfigError, match="--world-size: dp_replicate"):
        imported(tmp_path, text, 6)


def test_every_target_is_a_setting():
    options = {"beta", "smoothing", "margin", "wanted", "unwanted", "center", "objective", "reference"}
    for tool in tools().values():
        targets = {*tool.sets.values(), *tool.adapter.values(), *tool.fills}
        for entries in tool.words.values():
            targets |= {name for entry in entries.values() if isinstance(entry, dict) for name in entry}
        for target in targets - LATER:
            section, _, name = target.partition(".")
            if section == "plan":
                assert name in PLAN_FIELDS, target
            elif target.startswith("task.options."):
                assert name.removeprefix("options.") in options, target
            else:
                assert node_at(tuple(target.removesuffix(".0").removesuffix(".1").split("."))) is not None, target


#: Settings that another change adds.
LATER = {"adapter.modules_to_save"}
ODD = ["x", "2e-5", -1, 0, 1, 2.5, 10**30, math.inf, True, False, None, [], ["a", 1], {}, {"a": {"b": 1}}, [[1]], "no"]
NAMES = {"axolotl": "base_model", "llamafactory": "model_name_or_path", "trl": "model_name_or_path"}


@pytest.mark.parametrize("tool", TOOLS)
def test_no_value_of_any_key_breaks_the_import(tool):
    """Any value leads to a config that loads again, or to one error; never to another exception."""
    known = tools()[tool]
    alone = sorted({*known.code, *(key for key in (*known.sets, *known.adapter) if key != NAMES[tool])})
    every = sorted({*known.keys, "unknown"} - {NAMES[tool]})
    for number, value in enumerate(ODD):
        # Keys that interact are tried alone, each with a few values, and all keys together with each value.
        for keys in (*([key] for key in alone[number % 4 :: 4]), every):
            try:
                found = import_values({NAMES[tool]: "m", **dict.fromkeys(keys, value)}, tool)
            except ConfigError:
                continue
            assert {*keys} <= {line.key for line in found.lines}, (keys, value)
            assert found.config().model.path == "m"
        text = format_config(import_values({NAMES[tool]: "m"}, tool).config())
        parse_config(text, "theirs.toml")


@pytest.mark.parametrize(
    "text, message",
    [
        ("learning_rate: 1", "its keys do not show the tool"),
        ("base_model: m\nbase_model: [", "this is not YAML in line 2"),
        ("- 1", "a config has keys and values"),
        ("", "a config has keys and values"),
        ("sequence_len: 3\nmicro_batch_size: 1", "a config of axolotl names its model. Add base_model"),
    ],
)
def test_refused_files(tmp_path, capsys, text, message):
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    assert app.run(["config", "import", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_command_writes_a_config_and_lists_the_keys(tmp_path, capsys):
    file, out = tmp_path / "theirs.yaml", tmp_path / "ours.toml"
    file.write_text(AXOLOTL)
    assert app.run(["config", "import", str(file), "--out", str(out), "--world-size", "8"]) == 0
    said = capsys.readouterr()
    assert "# lora_modules_to_sav = [lm_head]: typo:" in said.out
    assert "1 key is unknown to axolotl and ignored: lora_modules_to_sav." in said.err
    config = load_config(out).config
    assert config.run.name == "ours"
    assert config.train.global_batch == 64
    assert app.run(["config", "import", str(file), "--from", "trl"]) == 2
    assert "a config of TRL names its model. Add model_name_or_path." in capsys.readouterr().err
    assert app.run(["config", "import", str(file), "--from", "xyz"]) == 2


def test_page_shows_the_importers_output_and_its_tables():
    page = (DOCS / "how-to" / "import_config.md").read_text()
    (config,) = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    report = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)[1]
    found = import_values(yaml.safe_load(config), "axolotl", world_size=8)
    assert report.splitlines() == [str(line) for line in found.lines]
    generate = runpy.run_path(str(DOCS / "generate.py"))
    assert generate["import_page"](page) == page, "run: python docs/generate.py"


def test_secrets_are_not_shown():
    found = import_values(
        {"model_name_or_path": "base", "dataset_name": "owner/texts", "hub_token": "hf_hidden",
         "xyz_api_key": "hidden2", "nested": {"token": "hidden3"}},
        "trl",
    )  # fmt: skip
    shown = repr(found)
    assert "[redacted]" in shown
    assert "hidden" not in shown


def test_betas_reach_the_options_of_an_optimizer_class():
    values = {"model_name_or_path": "base", "dataset_name": "owner/texts", "optim": "lion_32bit", "adam_beta2": 0.95}
    found = import_values(values, "trl")
    assert found.overrides["optimizer.options"] == {"betas": [0.9, 0.95]}
    assert "optimizer.betas" not in found.overrides


def test_defaults_of_the_tools_decide_packing_and_warmup(tmp_path):
    trl = imported(tmp_path, "model_name_or_path: m\ndataset_name: d.jsonl\n").config()
    assert trl.data.packing == "pad"
    lf = "model_name_or_path: m\ndataset: d\nstage: {}\n"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{"d": {"file_name": "d.json"}}')
    chats, texts = (imported(tmp_path, lf.format(stage)).config() for stage in ("sft", "pt"))
    assert (chats.data.packing, chats.data.borders) == ("pad", True)
    assert (texts.data.packing, texts.data.borders) == ("concat", False)
    axolotl = "base_model: m\ndatasets: [{path: d.jsonl, type: alpaca}]\n"
    assert imported(tmp_path, axolotl).config().schedule.warmup_ratio == 0.03
    given = imported(tmp_path, axolotl + "warmup_steps: 7\n").config().schedule
    assert (given.warmup_steps, given.warmup_ratio) == (7, None)


def test_tokens_and_adafactor(tmp_path):
    axolotl = imported(tmp_path, "base_model: m\ndatasets: [{path: d, type: alpaca}]\ntokens: [<a>, <b>]\n")
    assert axolotl.config().tokenizer.add_tokens == ("<a>", "<b>")
    lf = imported(tmp_path, "model_name_or_path: m\ndataset: d\nadd_tokens: <a>, <b>\noptim: adafactor\n")
    assert lf.config().tokenizer.add_tokens == ("<a>", "<b>")
    assert any("transformers' does not" in note for note in lf.notes)


def test_hostile_files(tmp_path, capsys):
    base = "base_model: m\ndatasets: [{path: d.jsonl, type: alpaca}]\n"
    bomb = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 10)}]\n" for i in range(9))
    with pytest.raises(ConfigError, match="at most 100000 values"):
        imported(tmp_path, base + bomb)
    with pytest.raises(ConfigError, match="at most 100000 values"):
        imported(tmp_path, "base_model: m\ndatasets: &d [*d]\n")
    with pytest.raises(ConfigError, match="lone surrogate"):
        imported(tmp_path, base + 'wandb_project: "\\ud800"\n')
    with pytest.raises(ConfigError, match="not a regular file"):
        import_config(Path("/dev/zero"))
    (tmp_path / "theirs.yaml").write_text(base + '"a\\nseed = 7 #": 1\n')
    assert app.run(["config", "import", str(tmp_path / "theirs.yaml")]) == 0
    assert tomllib.loads(capsys.readouterr().out)["seed"] == 42


@pytest.mark.parametrize(
    "source",
    ["{path: d, type: {field: 3}}", "{path: d, message_property_mappings: x}", "{path: [d]}", "{path: {d: 1}}"],
)
def test_sources_of_wrong_types_are_listed(tmp_path, source):
    found = imported(tmp_path, f"base_model: m\nsequence_len: 8\ndatasets: [{source}]\n")
    assert any(line.kind == "not built" and line.key.startswith("datasets") for line in found.lines)
    found.config()
