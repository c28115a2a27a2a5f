"""`task=classify_audio` and `transcribe`: runs learn, resume, reject invalid settings, and show their samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.data.audio_clips import as_tar, encoded, sound_folder, spoken, tones
from tests.data.image_folders import class_folder
from tests.data.image_records import write_lines
from tests.train.speech_folders import save_whisper
from weft.cli.app import app
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, DataError, ModelError
from weft.models.speech import build_speech_model
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank
from weft.train.tasks.captioning import edit_distance
from weft.train.tasks.registry import find_task


def config(folder: Path, task: str, path: str = "", steps: int = 3, **options: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "plan": "dp_replicate=1",
            "task": {"name": task, "options": options},
            "model": {"path": path} if path else {},
            "run": {"name": "run", "dir": str(folder)},
            "train": {"steps": steps, "global_batch": 4},
            "optimizer": {"lr": 3e-3},
            "data": {"cache_dir": str(folder / "cache"), "workers": 0},
            "eval": {"every": 0, "batches": 2},
            "checkpoint": {"every": 0},
            "launch": {"device": "cpu"},
        }
    )


def last_evaluation(folder: Any) -> dict[str, Any]:
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    return [event for event in events if event["event"] == "eval"][-1]


def test_network_ignores_padding() -> None:
    torch.manual_seed(0)
    model = build_speech_model("speech-tiny", 5, 20).double().eval()
    sizes = (7, 30, 18)
    alone = [torch.randn(1, 20, size, dtype=torch.float64) for size in sizes]
    filled = torch.full((3, 20, 48), 9.0, dtype=torch.float64)
    for row, one in zip(filled, alone, strict=True):
        row[:, : one.shape[2]] = one[0]
    together = model(filled, torch.tensor(sizes))
    assert torch.allclose(together, torch.cat([model(one) for one in alone]), rtol=1e-12, atol=1e-13)
    with pytest.raises(ModelError, match=r"^model=speech-tony: Weft has no network for audio of that name\. Did you"):
        build_speech_model("speech-tony", 5, 20)


def test_run_learns_tone_words_and_rejects_other_clips(tmp_path: Path) -> None:
    data = str(sound_folder(tmp_path / "folder", 8))
    made = config(tmp_path, "classify_audio", steps=45, data=data, mels=20, dropout=0.0, noise=0.1, holdout=0.34)
    folder = prepare_run(made, 1)
    assert run_rank(folder).reason == "finished"
    assert last_evaluation(folder)["accuracy"] == 1.0
    longer = made.model_copy(update={"train": made.train.model_copy(update={"steps": 46})})
    assert run_rank(prepare_run(longer, 1)).step == 46
    (tmp_path / "folder" / "ab" / "0.wav").write_bytes(encoded(tones("ab", 77)))
    with pytest.raises(DataError, match=r"the records are not those that the run in .* was started with\. Use run\."):
        prepare_run(longer, 1)


def transcribing(tmp_path: Path, steps: int) -> tuple[Any, dict[str, Any], str]:
    """Return a run's folder, its last evaluation, and its records."""
    whisper = str(save_whisper(tmp_path / "whisper", d_model=64))
    data = str(as_tar(tmp_path, spoken(30), "text"))
    more = {"data": data, "target_len": 8, "generate": 6, "holdout": 0.3, "gain": 3.0}
    folder = prepare_run(config(tmp_path, "transcribe", whisper, steps=steps, **more), 1)
    assert run_rank(folder).reason == "finished"
    return folder, last_evaluation(folder), data


@pytest.mark.full
def test_whisper_learns_to_transcribe(tmp_path: Path) -> None:
    _, found, _ = transcribing(tmp_path, 200)
    assert found["character_error_rate"] <= 0.1
    assert found["token_accuracy"] >= 0.9


def test_whisper_is_trained_and_evaluated(tmp_path: Path) -> None:
    folder, found, data = transcribing(tmp_path, 4)
    assert 0.0 < found["character_error_rate"] < 5.0
    assert 0.0 < found["token_accuracy"] < 1.0
    assert (folder.path / "base" / "preprocessor_config.json").is_file()
    task = find_task(folder.config())
    task.open(folder)
    where, said = task.sample_lines(0)[:2]
    assert where.startswith("epoch 0, number ")
    assert said.startswith(f"{data}, 00")
    assert ".flac, text '" in said


def letters(one: str, other: str) -> int:
    """Edit distance by the textbook's recursion."""
    if not one or not other:
        return len(one) + len(other)
    same = letters(one[1:], other[1:]) + (one[0] != other[0])
    return min(same, 1 + letters(one[1:], other), 1 + letters(one, other[1:]))


def test_edit_distance_matches_the_textbook() -> None:
    rng = np.random.default_rng(0)
    pairs = [tuple("".join(rng.choice(list("abcé"), rng.integers(0, 7))) for _ in range(2)) for _ in range(60)]
    assert [edit_distance(*pair) for pair in pairs] == [letters(*pair) for pair in pairs]
    assert edit_distance("kitten", "sitting") == 3


REFUSED = {
    "noise=-1.0: it is 0 to 10. Use a number between.": {"noise": -1.0},
    "holdout=2.0: it is a share of the recordings. Use a number between 0 and 1.": {"holdout": 2.0},
    "task.options.label=x: it names a column of records, and data=": {"label": "x"},
    "there is no such folder. Give one that has a folder of recordings for each class.": {"data": "nowhere"},
    "model=resnet18: Weft has no network for audio of that name. Use one of speech-tiny.": {"model": "resnet18"},
}


@pytest.mark.parametrize("text", REFUSED)
def test_invalid_option_is_one_message(tmp_path: Path, text: str) -> None:
    options = {"data": str(sound_folder(tmp_path / "folder", 3))} | REFUSED[text]
    with pytest.raises((ConfigError, DataError, ModelError)) as caught:
        find_task(config(tmp_path, "classify_audio", **options)).build()
    assert text in str(caught.value)


def test_mismatched_model_and_data_are_rejected(tmp_path: Path) -> None:
    whisper = str(save_whisper(tmp_path / "whisper"))
    lines = [{"audio": "a.wav", "text": "ab"}, {"audio": "long.wav", "text": "ab"}, {"audio": "a.wav", "text": "abcd "}]
    (tmp_path / "a.wav").write_bytes(encoded(tones("ab", 1)))
    (tmp_path / "long.wav").write_bytes(encoded(tones("abcd", 1, letter_s=1.0)))
    data = str(write_lines(tmp_path / "x.jsonl", [*lines, *[lines[0]] * 3]))

    def refusal(**changes: Any) -> str:
        model = changes.pop("model", whisper)
        with pytest.raises((ConfigError, DataError, ModelError)) as caught:
            prepare_run(config(tmp_path, "transcribe", model, **{"data": data, "target_len": 4, **changes}), 1)
        return str(caught.value)

    found = refusal()
    assert "2 of 6 recordings cannot be used, more than 1%" in found
    assert "long.wav: it lasts " in found
    assert " s, and the model hears 1 s. Split it." in found
    assert "a.wav: its text has 5 tokens, more than target_len=4" in found
    assert "target_len=99: the model writes at most 64 tokens. Use 64 or less." in refusal(target_len=99)
    assert "data=nowhere: it names no .tar, .jsonl or .parquet file" in refusal(data="nowhere")
    # Without a folder the task uses Weft's own small model, which has other options.
    assert "task.options.target_len: transcribe has no such option. Did you mean 'text_len'?" in refusal(model="")
    (tmp_path / "whisper" / "preprocessor_config.json").write_text(
        (tmp_path / "whisper" / "preprocessor_config.json")
        .read_text()
        .replace('"chunk_length": 1', '"chunk_length": 2')
    )
    assert "its feature extractor gives 16 x 200 numbers, and its model reads 16 x 100." in refusal()


def test_samples_are_shown_and_plotted(tmp_path: Path) -> None:
    sound, pictures = str(sound_folder(tmp_path / "sound", 4)), str(class_folder(tmp_path / "pictures"))
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    for name, data, option, shape in (
        ("classify_audio", sound, "mels=20", "float32, 20x"),
        ("classify_images", pictures, "side=24", "uint8, 3x24x24"),
    ):
        sheet = tmp_path / f"{name}.png"
        words = [f"task={name}", f"task.options.data={data}", f"task.options.{option}", cache]
        result = CliRunner().invoke(app, ["data", "preview", *words, "--num", "2", "--sheet", str(sheet)])
        assert result.exit_code == 0, result.output
        assert result.output.count("--- sample ") == 2
        assert result.output.count(shape) == 2
        assert "class '" in result.output
        assert sheet.read_bytes()[:4] == b"\x89PNG"
    refused = CliRunner().invoke(app, ["data", "preview", *words, "--sheet", "x.html"])
    assert "--sheet=x.html: a sheet is drawn into .png, .svg, .pdf. Give such a file." in str(refused.exception)
