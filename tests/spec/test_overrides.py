"""Overrides: parsing of values, and the keys that they can set."""

from __future__ import annotations

import pytest

from weft.config.expected_values import OTHER_NAMES, node_at
from weft.config.files import load_config, override_value
from weft.config.plan import PLAN_FIELDS
from weft.config.run_config import STDLIB_SOURCE, RunConfig
from weft.errors import ConfigError


def loaded(*overrides) -> RunConfig:
    return load_config(None, overrides).config


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        (("optimizer", "lr"), "1e-4", 1e-4),
        (("train", "steps"), "1_000", 1000),
        (("checkpoint", "keep_best"), "false", False),
        (("run", "name"), "2024", "2024"),
        (("run", "name"), "true", "true"),
        (("run", "name"), '"a b"', "a b"),
        (("sample", "prompt"), "1\nx = 2", "1\nx = 2"),
        (("sample", "prompt"), "", ""),
        (("train", "steps"), "1\nx = 2", "1\nx = 2"),
        (("launch", "ranks"), "all", "all"),
        (("launch", "ranks"), "2", 2),
        (("optimizer", "betas"), "[0.8, 0.9]", [0.8, 0.9]),
        (("plan",), "dp_replicate=2 compile=on", "dp_replicate=2 compile=on"),
        (("plan",), "{dp_replicate = 2}", {"dp_replicate": 2}),
    ],
)
def test_override_values_are_parsed_by_type(path, text, value):
    read = override_value(path, text)
    assert read == value
    assert type(read) is type(value)


def test_overrides_set_nested_keys():
    assert loaded("optimizer.lr=1e-4").optimizer.lr == 1e-4
    assert loaded("train={steps = 50, seq_len = 64}").train.seq_len == 64
    assert loaded("optimizer.betas.1=0.99").optimizer.betas == (0.9, 0.99)
    assert loaded("train.steps=50", "train.steps=60").train.steps == 60
    assert loaded("train.early_stop.patience=3").train.early_stop.patience == 3


def test_overrides_set_data_sources():
    assert [source.path for source in loaded("data.train=a.txt").data.train] == ["a.txt"]
    several = loaded('data.train=["a.txt", "b/*.jsonl", {path = "c", weight = 2}]').data.train
    assert [(source.path, source.weight) for source in several] == [("a.txt", None), ("b/*.jsonl", None), ("c", 2.0)]
    first = loaded("data.train.0.weight=2", "data.train.0.schema=text").data.train[0]
    assert (first.path, first.weight, first.schema_) == (STDLIB_SOURCE, 2.0, "text")
    assert [source.path for source in loaded("data.train.1.path=b.txt").data.train] == [STDLIB_SOURCE, "b.txt"]
    assert loaded("data.eval=e.txt", "data.eval.0.columns.text=body").data.eval[0].columns == {"text": "body"}


def test_overrides_set_plan_fields():
    assert loaded("plan.accumulation=2").plan == "dp_replicate=* accumulation=2"
    assert loaded("plan=dp_replicate=4", "plan.compile=true", "plan.precision=bf16").plan == (
        "dp_replicate=4 precision=bf16 compile=on"
    )
    assert loaded("plan={dp_replicate = 4, compile = true}").plan == "dp_replicate=4 compile=on"


GOLDEN = {
    "foo": "override 'foo': an override is key=value. Write e.g. optimizer.lr=1e-4.",
    "optimzer": "override 'optimzer': an override is key=value. Did you mean 'optimizer'?",
    "=3": "override '=3': an override is key=value. Write e.g. optimizer.lr=1e-4.",
    "a b=3": "override 'a b=3': an override is key=value. Write e.g. optimizer.lr=1e-4.",
    "seed.x=3": "seed.x=3: seed is a single value with no keys inside. Use seed=...",
    "optimizer.lr.x=3": "optimizer.lr.x=3: optimizer.lr is a single value with no keys inside. Use optimizer.lr=...",
    "data.train.3.path=x": (
        "data.train.3.path=x: data.train has 1 elements. Use an index up to 1; 1 itself adds an element."
    ),
    "data.train.path=x": (
        "data.train.path=x: data.train is a list; address its elements by number. Use e.g. data.train.0."
    ),
    "optimizer.lerning_rate=3": "unknown key 'optimizer.lerning_rate'. Did you mean 'optimizer.lr'?",
    "optimzer.lr=3": "unknown key 'optimzer'. Did you mean 'optimizer'?",
    "tp=2": "unknown key 'tp'. Did you mean 'plan.tp'?",
    "precision=fp64x": "unknown key 'precision'. Did you mean 'plan.precision'?",
    "lora_r=8": "unknown key 'lora_r'. Did you mean 'adapter.rank'?",
    "load_in_4bit=true": "unknown key 'load_in_4bit'. Write adapter.base=nf4.",
    "per_device_train_batch_size=4": (
        "unknown key 'per_device_train_batch_size'. "
        "Write train.global_batch=N: samples of one optimizer step over all ranks and accumulation."
    ),
    "optimizer.name=paged_adamw_8bit": (
        "optimizer.name=paged_adamw_8bit: one of adamw, sgd, muon or adamw_torch, adamw_torch_fused, adamw_8bit, "
        "adamw_bnb_8bit, lion, adafactor, schedule_free, schedule_free_adamw, soap, shampoo, came, adopt, or a "
        "class as package.module:Class is needed. Write optimizer.name=adamw_8bit."
    ),
    "plan.tpp=3": "unknown plan field 'tpp'. Did you mean 'tp'?",
    "train.steps=many": "train.steps=many: a whole number from 1 to 2**63 - 1 is needed. Use e.g. train.steps=300.",
    "optimizer.lr=": 'optimizer.lr="": a number above 0 is needed. Use e.g. optimizer.lr=0.001.',
    "optimizer.nesterov=True": (
        'optimizer.nesterov="True": true or false is needed. Write it without quotes: nesterov = true.'
    ),
}


@pytest.mark.parametrize("override", GOLDEN)
def test_override_errors(override):
    with pytest.raises(ConfigError) as caught:
        loaded(override)
    assert str(caught.value) == f"command line: {GOLDEN[override]}"


def test_override_inside_an_invalid_section_is_rejected(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("optimizer = 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["optimizer.lr=1"])
    assert [problem.origin for problem in caught.value.problems] == [f"{path}:1", "command line"]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_settings_of_other_tools_map_to_existing_keys(name):
    key, _, value = OTHER_NAMES[name].partition("=")
    if key.startswith("plan"):
        assert key == "plan" or key.removeprefix("plan.") in PLAN_FIELDS
        if value and " " not in value:
            loaded(f"{key}={value}")
    else:
        assert node_at(tuple(key.split("."))) is not None
