"""`task=chat`: batches equal those of transformers' processors; unusable folders and records get one sentence."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.choice import gate_runs
from tests.train.chat_folders import (
    BOTH,
    IMAGES,
    SINGLE,
    data_of,
    save_folder,
    use_without_videos,
    write_all,
    write_chats,
)
from weft.cli.app import run as weft_run
from weft.config.run_config import RunConfig
from weft.data.media import folder_processor
from weft.data.media.chat_records import ChatColumns
from weft.data.media.mixed_samples import UnusableSample
from weft.errors import ConfigError, DataError, MissingExtra, ModelError, WeftError
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank
from weft.train.tasks.registry import find_task

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("chats")
    write_all(found)
    return found


def config(root: Path, family: str, **options: Any) -> RunConfig:
    options = {"data": str(root / data_of(family)), "holdout": 0.3, **options}
    settings = {
        name: options.pop(name) for name in ("seq_len", "adapter", "max_bad", "reasoning", "packing") if name in options
    }
    return RunConfig.model_validate({
        "plan": "dp_replicate=1", "task": {"name": "chat", "options": options}, "model": {"path": str(root / family)},
        "run": {"name": family, "dir": str(root / "runs")}, "adapter": settings.get("adapter", {}),
        "train": {"steps": 2, "global_batch": 4, "seq_len": settings.get("seq_len", 256)},
        "data": {"cache_dir": str(root / "cache"), "workers": 0, "reasoning": settings.get("reasoning", "keep"),
                 "packing": settings.get("packing"),
                 "max_bad_fraction": settings.get("max_bad", 0.6 if family in SINGLE else 0.01)},
        "eval": {"every": 0, "batches": 1}, "checkpoint": {"every": 0}, "launch": {"device": "cpu"},
    })  # fmt: skip


def moved_to(folder: Path, made: RunConfig) -> RunConfig:
    """Return a config with a model and runs in another folder."""
    changes = {"model": {"path": str(folder / "llava")}, "run": {"dir": str(folder / "runs")}}
    return made.model_copy(
        update={part: getattr(made, part).model_copy(update=fields) for part, fields in changes.items()}
    )


def messages_of(record: dict[str, Any], root: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a record in transformers' form, with its media in order."""
    given = [*record.get("images", ()), *record.get("audios", ())]
    names, messages = list(given), []
    for turn in record.get("messages", record.get("conversations")):
        role = {"human": "user", "gpt": "assistant"}.get(turn.get("from"), turn.get("role"))
        content, parts = turn.get("content", turn.get("value")), []
        pieces = re.split("(<image>|<audio>)", content) if isinstance(content, str) else content
        for piece in pieces:
            if isinstance(piece, dict):
                names += [piece["path"]] if "path" in piece else []
                parts.append({key: value for key, value in piece.items() if key != "path"})
            elif piece in ("<image>", "<audio>"):
                parts.append({"type": piece[1:-1]})
            elif piece:
                parts.append({"type": "text", "text": piece})
        messages.append({"role": role, "content": parts})
    return messages, [str(root / name) for name in names]


def wanted(processor: Any, record: dict[str, Any], root: Path) -> dict[str, np.ndarray]:
    """Return what transformers makes of a record."""
    import soundfile
    import soxr
    from PIL import Image
    from transformers.processing_utils import ProcessorMixin

    def heard(name: str) -> np.ndarray:
        wave, rate = soundfile.read(name, dtype="float32")
        return wave if rate == 16_000 else soxr.resample(wave, rate, 16_000, quality="HQ")

    messages, names = messages_of(record, root)
    given: dict[str, Any] = {}
    if hasattr(processor, "image_seq_length") and "PaliGemma" in type(processor).__bases__[0].__name__:
        if messages[0]["role"] == "system":
            messages[1]["content"].insert(0, {"type": "text", "text": messages.pop(0)["content"][0]["text"] + "\n\n"})
        text = "".join(part.get("text", "<image>") for part in messages[0]["content"])
        given["suffix"] = [messages[1]["content"][0]["text"]]
    else:  # the base class's method: SmolVLM's needs its video processor
        text = ProcessorMixin.apply_chat_template(processor, messages, tokenize=False)
    if sounds := [heard(name) for name in names if name.endswith(".wav")]:
        given |= {"audio": sounds, "sampling_rate": 16_000}
    if images := [Image.open(name) for name in names if not name.endswith(".wav")]:
        given["images"] = [images]
    return dict(processor(text=[text], **given, return_tensors="np"))


@pytest.mark.parametrize("family", gate_runs(list(IMAGES), 2, 3, 5, 6, 8, 13, 14))
def test_batch_equals_the_processors_output(family: str, root: Path) -> None:
    if family == "mistral3":
        pytest.importorskip("torchvision")
    use_without_videos()
    save_folder(root, family, weights=False)
    task = find_task(config(root, family))
    own, samples = task.processor, task.samples("train")
    records = [json.loads(line) for line in Path(task.data).read_text().splitlines()]
    shown = [*range(len(samples))]
    found = [samples[index] for index in shown]
    lines = [int(samples.items.records.file(index).rpartition(" ")[2]) for index in shown]
    left_out = {"paligemma": {3, 0}, "llava_onevision": {2}}.get(family, set())
    assert {line % 4 for line in lines} == {0, 1, 2, 3} - left_out  # all forms of records
    assert family not in BOTH or any({"pixel_values", "input_features"} <= one.keys() for one in found)
    processor: Any = folder_processor._loaded(str(root / family), folder_processor.processor_digest(root / family))
    if family in ("llava", "qwen2_audio"):  # whose processors have no part for videos
        processor = transformers.AutoProcessor.from_pretrained(root / family)
    for sample, line in zip(found, lines, strict=True):
        theirs, batch = wanted(processor, records[line - 1], root), own.collate([sample])
        length = len(sample["input_ids"])
        assert batch["attention_mask"].tolist()[0][:length] == [1] * length
        assert int(batch["attention_mask"].sum()) == length
        assert sample["input_ids"].tolist() == theirs["input_ids"][0].tolist()
        for name in set(batch) - {"input_ids", "attention_mask", "labels"}:
            ours = batch[name].numpy()
            if name not in own.survey.processor.types and name not in sample:
                continue  # a blank image, which attention does not see
            if name in own.survey.processor.types:
                kinds = theirs.get(name, np.zeros((1, length)))[0]
                assert ours[0, :length].tolist() == kinds.tolist()
            else:
                np.testing.assert_array_equal(ours, theirs[name], err_msg=name)
        answers = [turn["content"][0]["text"] for turn in messages_of(records[line - 1], root)[0]
                   if turn["role"] == "assistant"]  # fmt: skip
        labels = batch["labels"][0]
        assert own.survey.processor.tokenizer.decode(labels[labels >= 0]) == "".join(
            f"{one}<|im_end|>" for one in answers
        )
        at = int((labels >= 0).nonzero()[0])
        assert labels[at] == batch["input_ids"][0, at + 1]
    rows = own.collate(found)
    assert rows["input_ids"].shape == (len(found), rows["labels"].shape[1])
    for name in set(rows) & set(found[0] | found[1] | found[2]) - {"input_ids"}:
        parts = [one[name] for one in found if name in one]
        assert int(rows[name].count_nonzero()) == sum(int(np.count_nonzero(one)) for one in parts), name


def test_run_trains_evaluates_freezes_and_shows_samples(root: Path) -> None:
    save_folder(root, "llava")
    folder = prepare_run(config(root, "llava", freeze=["vision", "projector"], max_pixels=100), 1)
    assert run_rank(folder).reason == "finished"
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.jinja"):
        assert (folder.path / "base" / name).is_file()
    task = find_task(folder.config())
    task.open(folder)
    trained = {name for name, param in task.shapes().named_parameters() if param.requires_grad}
    assert trained
    assert all("language_model" in name or "lm_head" in name for name in trained)
    assert any("<|im_end|>" in line for line in task.sample_lines(0))
    entry = task.processor.preview(task.media("train"), "train", 0, 1)
    assert entry.picture is not None
    assert "".join(text for text, weight in entry.text if weight).endswith("<|im_end|>")
    with pytest.raises(ConfigError, match=r"^task\.options\.freeze=audio: the model has no such part\. Use some of "):
        find_task(config(root, "llava", freeze=["audio"])).shapes()
    with pytest.raises(ConfigError, match=r"an adapter freezes the model already\. Choose its layers with adapter"):
        find_task(config(root, "llava", freeze=["text"], adapter={"rank": 2})).shapes()


def losses_of(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads the old name
def test_adapter_is_exported_for_peft_and_merged(root: Path) -> None:
    peft = pytest.importorskip("peft")
    save_folder(root, "qwen3_vl")
    folder = prepare_run(config(root, "qwen3_vl", adapter={"rank": 2, "targets": ["language_model.*"]}), 1)
    assert run_rank(folder).reason == "finished"
    assert weft_run(["export", str(folder.path), str(root / "lora")]) == 0
    assert weft_run(["export", str(folder.path), str(root / "merged"), "--merge"]) == 0
    kind = transformers.Qwen3VLForConditionalGeneration
    theirs = peft.PeftModel.from_pretrained(kind.from_pretrained(root / "qwen3_vl"), root / "lora").merge_and_unload()
    merged, base = kind.from_pretrained(root / "merged").state_dict(), kind.from_pretrained(root / "qwen3_vl")
    for name, tensor in theirs.state_dict().items():
        assert merged[name].equal(tensor), name
    changed = {name for name, tensor in base.state_dict().items() if not merged[name].equal(tensor)}
    assert changed
    assert all("language_model" in name for name in changed)
    assert (root / "merged" / "preprocessor_config.json").is_file()


@pytest.mark.full
def test_command_trains_an_adapter_on_ranks_like_one_process(root: Path) -> None:
    save_folder(root, "qwen3_vl")
    found = {}
    for number, (plan, ranks) in enumerate((("dp_replicate=1", 1), ("dp_shard=2 zero=3", 2), ("tp=2", 2))):
        words = {
            "task": "chat", "model.path": root / "qwen3_vl", "task.options.data": root / "chats.jsonl",
            "adapter.rank": 2, "data.cache_dir": root / "cache", "data.batching": "cost",
            "data.workers": 1, "train.seq_len": 256,
            "train.global_batch": 4, "train.steps": 3, "eval.every": 0, "checkpoint.every": 0,
            "launch.device": "cpu", "launch.ranks": ranks, "run.dir": root / "cli", "run.name": f"run{number}",
            "plan": f"{plan} precision=fp64",
        }  # fmt: skip
        assert weft_run(["train", *(f"{name}={value}" for name, value in words.items())]) == 0
        found[plan] = losses_of(root / "cli" / f"run{number}")
    first = found.pop("dp_replicate=1")
    assert len(first) == 3
    for plan, losses in found.items():
        assert losses == pytest.approx(first, rel=1e-9), plan


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "ab"}], **more}


#: Records that cannot be used, with the reason.
UNUSABLE = {
    "there is no file 'gone.png' beside it": user("<image>", images=["gone.png"]),
    "it has 2 <image> marks and 1 picture": user("<image><image>", images=["0.png"]),
    "it has 1 <image> mark and 2 pictures": user("<image>", images=["0.png", "1.png"]),
    "it has a video, and images and audio clips are read. Use its frames as images": user("<video>", videos=["0.mp4"]),
    "a part of its chat is of type 'video', and text, image and audio are read": user([{"type": "video"}]),
    "it has an audio clip, which this model does not read": user("<audio>", audios=["0.wav"]),
    "its text has the text of a special token": user("<|im_end|> <image>", images=["0.png"]),
    "tokens, more than train.seq_len=64": user("x" * 80),
    "its messages are unusable: unknown role": {"messages": [{"role": "robot", "content": "a"}]},
    "it has no answer to train": {"messages": [{"role": "user", "content": "a"}]},
    "it has no messages in messages or conversations, and no prompt with an answer": {"image": "0.png"},
    "a turn has a weight other than 0 and 1": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]},
}  # fmt: skip
#: Records in other usual forms.
USABLE = [
    user("Where?", images=["0.png"]),  # without a placeholder, as TRL allows
    {"prompt": [{"role": "user", "content": "<image>?"}], "completion": [{"role": "assistant", "content": "b"}],
     "images": ["0.png"]},
    {"question": "<image>What?", "answer": "this", "image": "1.png"},
    user([{"type": "image_url", "image_url": {"url": "2.png"}}, {"type": "text", "text": "What?"}], system="Short."),
]  # fmt: skip


def test_unusable_records_are_left_out_with_the_reason(root: Path) -> None:
    save_folder(root, "qwen3_vl", weights=False)
    file = write_chats(root, [*UNUSABLE.values(), *USABLE], "mixed.jsonl")
    options = {"data": str(file), "seq_len": 64}
    with pytest.raises(DataError, match=r"12 of 16 conversations cannot be used, more than 1%\. The first: .*line 1: "):
        find_task(config(root, "qwen3_vl", **options)).media("train")
    task = find_task(config(root, "qwen3_vl", max_bad=0.9, **options))
    left_out = task.media("train").unreadable
    assert len(left_out) == len(UNUSABLE)
    for reason, text in zip(UNUSABLE, left_out, strict=True):
        assert reason in text
    kept = [task.samples(split)[index] for split in ("train", "eval") for index in range(len(task.media(split)))]
    assert len(kept) == len(USABLE)
    assert all("pixel_values" in one for one in kept)
    texts = [task.processor.survey.processor.tokenizer.decode(one["input_ids"].tolist()) for one in kept]
    assert sum(text.startswith("<|im_start|>system\nShort.<|im_end|>") for text in texts) == 1
    assert all("<|vision_start|><|image_pad|>" in text for text in texts)


def test_records_of_a_json_array_equal_those_of_lines(root: Path, tmp_path: Path) -> None:
    import base64

    save_folder(root, "qwen3_vl", weights=False)
    held = base64.b64encode((root / "0.png").read_bytes()).decode()
    records = [user("<image>\u00e4, ]", images=[{"bytes": held}]), user("\U0001f600<image>", images=[{"bytes": held}])]
    lines = write_chats(tmp_path, records, "lines.jsonl")
    (tmp_path / "array.json").write_bytes(
        b"\xef\xbb\xbf\n" + json.dumps(records, ensure_ascii=False, indent=1).encode()
    )
    found = []
    for file in (lines, tmp_path / "array.json"):
        task = find_task(config(root, "qwen3_vl", data=str(file), holdout=0.5))
        found.append([task.samples(split)[0] for split in ("train", "eval")])
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys() >= {"pixel_values"}
        assert all(np.array_equal(one[name], other[name]) for name in one)
    odd = {
        '{"messages": []}': "it is not an array of objects", "[{}, {]": "Expecting ",
        '[{"a": 1} 2]': "element 2 is damaged",
    }  # fmt: skip
    for text, reason in odd.items():
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(DataError, match=rf"odd\.json: {reason}.*\. Write its records as \.jsonl, one object per"):
            find_task(config(root, "qwen3_vl", data=str(tmp_path / "odd.json"))).media("train")


def test_reasoning_with_images_is_kept_masked_or_dropped(root: Path, tmp_path: Path) -> None:
    save_folder(root, "qwen3_vl", weights=False)
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "<think>so</think>ab"}]
    file = write_chats(tmp_path, [{"messages": turns, "images": [str(root / "0.png")]}] * 2)
    (tmp_path / "0.png").write_bytes((root / "0.png").read_bytes())
    file.write_text(file.read_text().replace(str(root / "0.png"), "0.png"))
    found = {}
    for reasoning in ("keep", "mask", "drop"):
        task = find_task(config(root, "qwen3_vl", data=str(file), holdout=0.5, reasoning=reasoning))
        sample, decode = task.samples("train")[0], task.processor.survey.processor.tokenizer.decode
        assert "pixel_values" in sample
        ids = sample["input_ids"]
        found[reasoning] = decode(ids.tolist()).count("so"), decode(ids[sample["learnt"] == 1].tolist())
    end = "ab<|im_end|>"
    answers = {"keep": (1, f"<think>so</think>{end}"), "mask": (1, f"<think></think>{end}"), "drop": (0, end)}
    assert found == answers


def _with(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _with_processor_of(folder: Path, family: str) -> None:
    config = (folder / "config.json").read_text()
    save_folder(folder.parent, family, weights=False).rename(folder.parent / "other")
    shutil.rmtree(folder)
    (folder.parent / "other").rename(folder)
    (folder / "config.json").write_text(config)


def _without(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


FOLDERS = {
    "it has no processor. Copy the processor_config.json or preprocessor_config.json of the model into it.":
        lambda folder: _without(folder, "processor_config.json", "preprocessor_config.json"),
    "it has no chat template. Put the chat_template.jinja of the model into it.":
        lambda folder: _without(folder, "chat_template.jinja"),
    "its chat template writes <image> 0 times for an image.":
        lambda folder: (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}"),
    "transformers cannot read its processor (": lambda folder: (folder / "preprocessor_config.json").write_text(
        '{"image_processor_type": "Lens"}'),
    "mistral-common alone reads its tekken.json, which task=chat does not use. Put the tokenizer.json of":
        lambda folder: (folder / "tokenizer.json").rename(folder / "tekken.json"),
    "its PixtralProcessor needs ": lambda folder: (folder / "processor_config.json").write_text(
        '{"processor_class": "PixtralProcessor"}'),
    "task=chat cannot use its Kosmos2Processor (": lambda folder: (folder / "processor_config.json").write_text(
        '{"processor_class": "Kosmos2Processor"}'),
    "its processor makes mm_token_type_ids, which its LlavaForConditionalGeneration does not read.":
        lambda folder: _with_processor_of(folder, "qwen2_vl"),
    "its config.json replaces token 7, which its processor does not write.":
        lambda folder: _with(folder, image_token_id=7, image_token_index=7),
}  # fmt: skip


@pytest.mark.parametrize("text", FOLDERS)
def test_unusable_folder_is_one_sentence(text: str, root: Path, tmp_path: Path) -> None:
    save_folder(tmp_path, "llava", weights=False)
    FOLDERS[text](tmp_path / "llava")
    made = moved_to(tmp_path, config(root, "llava"))
    with pytest.raises(WeftError) as caught:
        prepare_run(made, 1)
    assert str(caught.value).startswith(f"model.path={tmp_path / 'llava'}: {text}")
    assert "\n" not in str(caught.value)


def test_other_models_are_refused(root: Path, tmp_path: Path) -> None:
    save_folder(tmp_path, "llava", weights=False)
    made = moved_to(tmp_path, config(root, "llava"))
    _with(tmp_path / "llava", text_config={"model_type": "mixtral", "vocab_size": 400, "output_router_logits": True})
    with pytest.raises(DataError, match=r"does not compute the loss that balances its experts\. Set output_router_lo"):
        prepare_run(made, 1)
    (tmp_path / "llava" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="has no vision-language or audio-language model for model_type=llama"):
        prepare_run(made, 1)


@pytest.mark.parametrize(
    "name, why",
    [
        ("Idefics2Processor", "the tokens of an image depend on the text around it"),
        ("MllamaProcessor", "the mask of these layers belongs to a full conversation"),
        ("VoxtralProcessor", "only mistral-common renders its conversations"),
    ],
)
def test_processors_with_text_code_are_refused_by_name(name: str, why: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, "llava", weights=False)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name}))
    with pytest.raises(DataError, match=rf"task=chat cannot use its {name}, because .*{why}.*\. Use the folder"):
        folder_processor.FolderProcessor(folder)


def test_packing_is_refused_where_it_is_unknown(root: Path) -> None:
    for packing, family, text in (
        ("concat", "qwen3_vl", r"images cannot be cut\. Use data\.packing=pad, or fit"),
        ("fit", "gemma3", r"it is unknown whether conversations of one row affect each other in a gemma3 model\. Use "),
    ):
        save_folder(root, family, weights=False)
        task = find_task(config(root, family, packing=packing))
        with pytest.raises(ConfigError, match=rf"^data\.packing={packing}: {text}"):
            task.network.check_inputs(task.processor.survey.processor)


def test_photos_are_turned_and_scaled_before_the_processor(root: Path, tmp_path: Path) -> None:
    from PIL import Image

    from weft.data.media.images import Encoded, picture_size, read_upright

    save_folder(root, "qwen3_vl", weights=False)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.linear_gradient("L").resize((40, 16)).convert("RGB").save(tmp_path / "photo.jpg", exif=exif)
    photo = Encoded.of_file(tmp_path / "photo.jpg")
    assert (picture_size(photo), picture_size(photo, upright=True)) == ((40, 16), (16, 40))
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(Image.open(tmp_path / "photo.jpg"))
    np.testing.assert_array_equal(np.asarray(read_upright(photo)), np.asarray(turned))
    areas = []
    for most in (0, 100):
        processor = folder_processor.FolderProcessor(root / "qwen3_vl", most)
        made = processor.read(photo, False, (16, 40))
        [[_, height, width]] = made.inputs["image_grid_thw"].tolist()
        assert height > width
        areas.append(height * width)
        assert processor.blank(False, (16, 40)) == (made.text, len(folder_processor.pack(made.inputs)))
    assert areas[0] > areas[1]


def test_workers_make_equal_samples(root: Path) -> None:
    save_folder(root, "llava")
    task = find_task(config(root, "llava"))
    plain = task.samples("train")
    task.config = task.config.model_copy(update={"data": task.config.data.model_copy(update={"workers": 1})})
    samples = task.samples("train")
    try:
        for one, other in zip(samples.many([(0, 0), (0, 1), (0, 2)]), map(plain.__getitem__, range(3)), strict=True):
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[name], other[name]) for name in one)
        assert len(samples.pids()) == 1
    finally:
        samples.close()


def test_missing_pillow_is_one_sentence(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(root, "llava", weights=False)
    monkeypatch.setitem(sys.modules, "PIL", None)
    folder_processor._loaded.cache_clear()
    with pytest.raises(MissingExtra, match=r"Pillow"):
        folder_processor.FolderProcessor(root / "llava")


def test_placeholder_characters_in_texts_are_refused() -> None:
    with pytest.raises(UnusableSample, match=r"private use"):
        ChatColumns().parts(user("\U0010fffa"))
