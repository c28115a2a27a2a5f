"""Descriptions of tasks for the planner: texts per sample, references, teachers, adapters of traced models."""

from __future__ import annotations

import json

import pytest

from tests.train.tuned_folders import save_model
from weft.cli.app import run
from weft.config.run_config import RunConfig
from weft.planner.search.model_source import read_model
from weft.train.tasks.registry import find_task

TINY = {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 128, "max_seq_len": 64}


def described(task: str, model: dict, **more):
    options = {"task": {"name": task, "options": more.pop("options", {})}, "model": model, "plan": "auto", **more}
    return find_task(RunConfig.model_validate(options)).describe()


@pytest.mark.parametrize(
    "options, rank, texts, own, other",
    [
        ({"objective": "dpo", "reference": "cached"}, 0, 2, 0, 0),
        ({"objective": "simpo"}, 0, 2, 0, 0),
        ({"objective": "dpo", "reference": "frozen_copy"}, 0, 2, 0, 1),
        ({"objective": "dpo"}, 4, 2, 1, 0),
        ({"objective": "kto", "reference": "cached"}, 0, 1, 1, 0),
        ({"objective": "kto"}, 4, 1, 3, 0),
        ({"objective": "kto", "reference": "frozen_copy"}, 0, 1, 1, 2),
    ],
)
def test_preferences_count_two_rows_and_the_reference(options, rank, texts, own, other):
    found = described("prefer", {"name": "tiny", **TINY}, options=options, adapter={"rank": rank})
    work = found.frozen
    assert (found.texts, work.own if work else 0, work.other if work else 0) == (texts, own, other)
    assert (work is not None and work.shape is not None) == bool(other)
    assert found.sample_unit == "preferences"


def test_teacher_is_counted_and_excludes_pipelines(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **sizes}))
    found = described("distill", {"name": "tiny", **TINY}, options={"teacher": str(tmp_path)})
    assert found.frozen.shape.layers == 3
    assert found.frozen.other == 1
    assert found.frozen.whole_logits
    assert found.limits["pp"].values == (1,)


def test_traced_model_counts_its_adapter(tmp_path):
    pytest.importorskip("transformers")
    save_model(tmp_path / "bert", "bert")
    base = {"model": {"path": str(tmp_path / "bert")}}
    plain = described("masked_lm", **base)
    found = described("masked_lm", **base, adapter={"rank": 2, "base": "nf4"})
    assert plain.adapter is None
    assert found.traced is not None
    assert found.adapter.params * found.shape.layers == pytest.approx(
        2 * sum((inputs + outputs) * count for inputs, outputs, count in found.traced.linears)
    )
    assert found.adapter.packed_bytes > 0
    assert described("embed", **base, options={"negative": "other"}).texts == 3


def test_traced_model_of_a_task_is_saved_without_its_adapter(tmp_path, capsys):
    pytest.importorskip("transformers")
    save_model(tmp_path / "bert", "bert")
    config, saved = tmp_path / "run.toml", tmp_path / "bert.json"
    text = f'plan = "auto"\ntask = "masked_lm"\n[model]\npath = "{tmp_path / "bert"}"\n[train]\nseq_len = 16\n'
    config.write_text(text)
    words = ["plan", str(config), "1xh100", "--save-model", str(saved)]
    assert run(words) == 0
    assert f"wrote {saved}." in capsys.readouterr().err
    found, wanted = read_model(str(saved)), described("masked_lm", {"path": str(tmp_path / "bert")})
    assert (found.shape.layers, found.limits) == (wanted.shape.layers, wanted.limits)
    saved.unlink()
    config.write_text(f"{text}[adapter]\nrank = 2\n")
    assert run(words) == 2
    assert "the file has only the model, and the task adds an adapter" in capsys.readouterr().err
    assert not saved.exists()
