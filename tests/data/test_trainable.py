"""The check before the first step: data that cannot be learned is refused in one line, or reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.config.run_config import RunConfig
from weft.data.store.prepare import check_trainable, prepare_data
from weft.data.text.tokenizer import Tokenizer, save_bytes_tokenizer
from weft.errors import DataError


def checked(
    tmp_path: Path, rows: list[dict[str, Any]], *, preferences: bool = False, tokenizer=None, **data: Any
) -> list[str]:
    """Return the lines that the check adds."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = RunConfig.model_validate({
        "data": {"train": [{"path": str(path)}], "cache_dir": str(tmp_path / "c"), "holdout": 0.0, **data},
        "tokenizer": tokenizer or {"kind": "bytes"}, "train": {"seq_len": 32},
    })  # fmt: skip
    prepared = prepare_data(config, preferences=preferences)
    return check_trainable(prepared, config.data, 32).summary[len(prepared.summary) :]


def chat(answer: str, weight: float = 1.0) -> dict[str, Any]:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer, "weight": weight}]
    return {"messages": turns}


def test_valid_data_passes(tmp_path):
    assert checked(tmp_path, [chat("a")] * 5) == []
    assert checked(tmp_path, [{"text": "no mask at all"}]) == []
    assert checked(tmp_path, [{"prompt": "q", "completion": "a"}]) == []


def test_masks_without_a_stop_token_are_refused(tmp_path):
    rows = [{"input_ids": [65, 66, 67, 256], "loss_mask": [0, 1, 1, 0]}] * 3
    with pytest.raises(DataError) as caught:
        checked(tmp_path, rows)
    assert str(caught.value) == (
        "data.train: no answer ends with a trained stop token (<|endoftext|>, <|im_end|>), so the model would never "
        "learn to stop. Use the model's own chat template, or end completions and masks with the stop token. "
        "Or set data.check=warn to train all the same."
    )
    (message,) = checked(tmp_path, rows, check="warn")
    assert message.startswith("warning: data.train: no answer ends")
    assert checked(tmp_path, rows, check="off") == []


def test_documents_without_an_answer_are_refused(tmp_path):
    rows = [chat("a"), chat("b"), chat("c", 0.0)]
    with pytest.raises(DataError) as caught:
        checked(tmp_path, rows)
    assert str(caught.value) == (
        f"data.train.0.path={tmp_path}/rows.jsonl: 1 of 3 documents have no trained token, more than "
        "data.max_untrained=0.1 allows. Give them answers, leave them out, or set a larger data.max_untrained. "
        "Or set data.check=warn to train all the same."
    )
    assert checked(tmp_path, rows, max_untrained=0.4) == []


def test_truncated_answers_are_refused(tmp_path):
    rows = [chat("a" * 40), chat("b")]
    with pytest.raises(DataError) as caught:
        checked(tmp_path, rows)
    assert "train.seq_len=32 cuts answers of 1 of 2 documents, more than data.max_cut=0.25 allows" in str(caught.value)
    assert checked(tmp_path, rows, packing="concat") == []


def test_preferences_truncate_a_long_prompt_instead_of_answers(tmp_path):
    long_prompt = [{"prompt": "q" * 90, "chosen": "a", "rejected": "b"}]
    assert checked(tmp_path, long_prompt, preferences=True) == []
    long_answer = [{"prompt": "q", "chosen": "a" * 40, "rejected": "b"}]
    with pytest.raises(DataError, match="cuts answers of 1 of 2 documents"):
        checked(tmp_path, long_answer, preferences=True)


def test_template_must_end_turns_with_a_special_token(tmp_path):
    pytest.importorskip("transformers")
    save_bytes_tokenizer(tmp_path / "bytes")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(Tokenizer.load(tmp_path / "bytes").library_json())
    for end, problem in (
        ("<|im_end|>", ""),
        ("<|eot|>", "ends the assistant's turn with '<|eot|>', which is no special"),
    ):
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "\n{% endfor %}"
        settings = {"eos_token": "<|endoftext|>", "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        found = checked(
            tmp_path, [chat("a")], check="warn", tokenizer={"kind": "file", "path": str(folder), "template": True}
        )
        assert (problem in found[0]) if problem else not found
