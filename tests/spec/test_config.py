"""RunConfig: strict types, frozen, every key documented, and the shipped files agree with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from weft.config.files import config_schema, load_config
from weft.config.run_config import RunConfig
from weft.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configs_load(path):
    load_config(path)


def test_quickstart_config_equals_the_defaults():
    path = CONFIGS / "quickstart.toml"
    loaded = load_config(path)
    # The default prompt comes from the user's text, and the quickstart's data is Python.
    assert loaded.config == RunConfig.model_validate({"sample": {"prompt": "def "}})
    not_typed = {key for key, origin in loaded.origins.items() if origin == "default"}
    # Empty tables have no default to write out.
    assert not_typed == {
        "task.options", "data.train.0.columns", "optimizer.options", "optimizer.groups", "alert", "channel", "sink",
    }  # fmt: skip
    text = path.read_text()
    for section, field in RunConfig.model_fields.items():
        for name, inner in getattr(field.annotation, "model_fields", {}).items():
            # Keys without a default value are comments in the file.
            assert f"{inner.alias or name} = " in text or f"{section}.{name}]" in text, f"{section}.{name}"


@pytest.mark.parametrize(
    "values",
    [{"seed": "0"}, {"seed": True}, {"seed": 1.0}, {"train": {"steps": "9"}}, {"optimizer": {"lr": float("inf")}},
     {"sample": {"temperature": float("nan")}}, {"optimizer": {"betas": [0.9, "0.9"]}}, {"launch": {"ranks": True}},
     {"seed": 2**63}, {"train": {"seq_len": 10**10}}, {"unknown": 1}, {"run": {"name": "../up"}}],
)  # fmt: skip
def test_wrong_types_are_rejected(values):
    with pytest.raises(ValidationError):
        RunConfig.model_validate(values)


def test_config_is_frozen():
    config = RunConfig()
    with pytest.raises(ValidationError):
        config.seed = 3
    with pytest.raises(ValidationError):
        config.train.steps = 3


def test_schema_describes_keys_and_short_forms():
    schema = config_schema()
    train = schema["$defs"]["TrainSection"]["properties"]
    assert train["steps"]["description"] == "Optimizer steps of the whole run, including those before a resume."
    assert schema["$defs"]["TrainSection"]["additionalProperties"] is False
    kinds = [option["type"] for option in schema["properties"]["plan"]["anyOf"]]
    assert kinds == ["string", "object"]
    sources = schema["$defs"]["DataSection"]["properties"]["train"]["anyOf"]
    assert [option["type"] for option in sources] == ["array", "string"]
    assert config_schema() == schema


@pytest.mark.parametrize(
    "word, message",
    [
        ("adapter.targets=q_proj", r"each a string, is needed. Use e.g. adapter.targets=\[.q_proj.\]"),
        ("train.profile_ranks=0", r"each a whole number from 0 .* is needed. Use e.g. train.profile_ranks=\[0\]"),
        ("data.eval=[3]", r"data.eval.0=3: a table is needed. Write \[\[data.eval\]\]"),
        ("optimizer.name=Lion", r"Write optimizer.name=lion"),
    ],
)
def test_remedies_fit_the_kind_of_value(word, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [word])


def test_one_step_is_profiled_by_its_number():
    assert load_config(None, ["train.profile=10"]).config.train.profiled_steps == range(10, 11)
