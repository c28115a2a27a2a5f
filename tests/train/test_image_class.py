"""`task=classify_images`: class folders, networks by name, equal results under every plan."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.data.image_folders import class_folder
from tests.data.image_records import as_tars, labelled, write_tar
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, DataError, ModelError
from weft.models.vision import IMAGE_MODELS, build_image_model
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank
from weft.train.tasks.registry import find_task

#: Parameters of the published networks with 1000 classes.
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "vgg11": 132_863_336,
    "vgg11_bn": 132_868_840,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "vit-tiny": 5_717_416,
    "vit-base": 86_567_656,
}


def test_networks_match_published_parameter_counts():
    assert set(IMAGE_MODELS) == {*PUBLISHED}
    for name, count in PUBLISHED.items():
        with torch.device("meta"):
            model = build_image_model(name, 1000, 224)
        assert sum(param.numel() for param in model.parameters()) == count, name
        assert model(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 1000)
    with torch.device("meta"):
        names = dict(build_image_model("resnet50", 10, 32).named_parameters())
        plain = dict(build_image_model("vgg11", 10, 32).named_parameters())
    assert {"conv1.weight", "layer1.0.downsample.1.bias", "layer4.2.bn3.weight", "fc.bias"} <= names.keys()
    assert {"features.0.weight", "classifier.6.bias"} <= plain.keys()
    with pytest.raises(
        ModelError, match=r"^model=resnet19: Weft has no network of that name\. Did you mean 'resnet18'\?"
    ):
        build_image_model("resnet19", 10, 32)
    with pytest.raises(ModelError, match=r"^side=16: vgg16 halves an image 5 times\. Use 32 pixels or more\."):
        build_image_model("vgg16", 10, 16)


def config(folder: Path, **options) -> RunConfig:
    options = {"data": str(class_folder(folder / "pictures")), "side": 32, "model": "vgg11_bn"} | options
    return RunConfig.model_validate(
        {
            "plan": "dp_replicate=1",
            "task": {"name": "classify_images", "options": options},
            "run": {"name": "run", "dir": str(folder)},
            "train": {"steps": 3, "global_batch": 3, "norm_group": 3},
            "eval": {"every": 0, "batches": 1},
            "checkpoint": {"every": 0},
            "launch": {"device": "cpu"},
        }
    )


def test_samples_depend_on_seed_epoch_and_index(tmp_path: Path):
    task = find_task(config(tmp_path, holdout=0.2))
    train, held = task.samples("train"), task.samples("eval")
    assert (len(train), len(held)) == (14, 4)
    assert (train.in_epoch(0, 3)[0] == train[3][0]).all()
    assert any((train.in_epoch(0, index)[0] != train.in_epoch(1, index)[0]).any() for index in range(3))
    assert (held.in_epoch(0, 1)[0] == held.in_epoch(5, 1)[0]).all()  # evaluation samples do not change
    pixels, labels = task.collate([train[0], train[1]])
    assert pixels.shape == (2, 3, 32, 32)
    assert pixels.dtype == torch.float32
    assert labels.dtype == torch.int64
    batches = [task.batches(share(rank)).batches(2) for rank in range(2)]
    assert sum(len(labels) for rank in batches for _, labels in rank) == 3


def share(rank: int):
    from weft.train.batches.data_share import Share

    return Share(global_batch=3, rank=rank, size=2)


def test_published_weights_load_without_a_head_of_other_size(tmp_path: Path):
    torch.manual_seed(1)
    published = build_image_model("resnet18", 1000, 32).state_dict()
    save_file(published, tmp_path / "resnet18.safetensors")
    task = find_task(config(tmp_path, model="resnet18", side=32, weights=str(tmp_path / "resnet18.safetensors")))
    model = task.build()
    assert torch.equal(model.layer3[0].conv1.weight, published["layer3.0.conv1.weight"])
    assert model.fc.weight.shape == (3, 512)
    assert task.shapes().fc.weight.device.type == "meta"
    del published["layer1.0.conv1.weight"]
    save_file(published, tmp_path / "resnet18.safetensors")
    with pytest.raises(ModelError, match=r"layer1\.0\.conv1\.weight is missing\. Give the weights of the same network"):
        task.build()
    with pytest.raises(ModelError, match=r"weights=x\.pth: Weft reads safetensors alone\. Convert it"):
        find_task(config(tmp_path / "b", weights="x.pth")).build()


REFUSED = {
    "task.options.side=big: classify_images takes a whole number. Use such a value.": {"side": "big"},
    "task.options.zzz: classify_images has no such option. It takes data, eval": {"zzz": 1},
}


@pytest.mark.parametrize("text", REFUSED)
def test_invalid_option_is_rejected(tmp_path: Path, text: str):
    with pytest.raises(ConfigError) as caught:
        find_task(config(tmp_path, **REFUSED[text]))
    assert text in str(caught.value)


def test_two_folders_must_have_equal_classes(tmp_path: Path):
    other = class_folder(tmp_path / "held")
    (other / "red").rename(other / "rouge")
    task = find_task(config(tmp_path, eval=str(other)))
    with pytest.raises(DataError, match=r"eval=.*: class 'red' is in one of the two folders only\. Give both the same"):
        task.samples("eval")


def test_run_trains_evaluates_and_resumes_with_its_images(tmp_path: Path):
    made = config(tmp_path, holdout=0.2)
    folder = prepare_run(made, 1)
    result = run_rank(folder)
    assert result.reason == "finished"
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    [evaluated] = [event for event in events if event["event"] == "eval"]
    assert 0.0 <= evaluated["accuracy"] <= evaluated["top5"] == 1.0  # of three classes
    # An image added later is not part of this run.
    (tmp_path / "pictures" / "red" / "new.png").write_bytes((tmp_path / "pictures" / "red" / "0.png").read_bytes())
    longer = made.model_copy(update={"train": made.train.model_copy(update={"steps": 4})})
    again = prepare_run(longer, 1)
    assert "new.png" not in (again.path / "pictures.json").read_text()
    assert run_rank(again).step == 4
    moved = longer.model_copy(
        update={"task": longer.task.model_copy(update={"options": longer.task.options | {"data": str(tmp_path)}})}
    )
    with pytest.raises(ConfigError, match=r"task\.options"):
        prepare_run(moved, 1)


def test_run_trains_on_records_and_rejects_others(tmp_path: Path):
    data = tmp_path / "records"
    data.mkdir()
    as_tars(data, labelled(12))
    made = config(tmp_path, data=str(data), holdout=0.25)
    made = made.model_copy(update={"data": made.data.model_copy(update={"cache_dir": str(tmp_path / "cache")})})
    folder = prepare_run(made, 1)
    assert run_rank(folder).reason == "finished"
    longer = made.model_copy(update={"train": made.train.model_copy(update={"steps": 4})})
    assert run_rank(prepare_run(longer, 1)).step == 4
    task = find_task(made)
    task.open(folder)
    where, picture = task.sample_lines(0)[:2]
    assert where.startswith("epoch 0, number ")
    assert ".tar, a/" in picture
    assert ".png, class '" in picture
    write_tar(data / "2.tar", labelled(3))
    with pytest.raises(DataError, match=r"the records are not those that the run in .* was started with\. Use run\."):
        prepare_run(longer, 1)
    with pytest.raises(DataError, match=r"task\.options\.label=x: it names a column of records, and data=.* has no"):
        find_task(config(tmp_path / "b", label="x")).samples("train")


def test_batches_are_equal_for_any_workers_ranks_and_after_resume(tmp_path: Path):
    from weft.train.batches.data_share import Share

    def task(folder: str, workers: int):
        made = config(tmp_path / folder, colour=0.3, noise=2.0)
        return find_task(made.model_copy(update={"data": made.data.model_copy(update={"workers": workers})}))

    plain = task("a", 0)
    expected = [plain.batches(Share(5)).batches(step)[0] for step in range(5)]
    wide = task("b", 2)
    whole = wide.batches(Share(5))
    found = []
    with whole.iterate(0, 3) as batches:
        for [batch] in batches:
            found.append(batch)
            os.kill(whole._samples.pids()[0], signal.SIGKILL)
    assert not whole._samples.pids()
    for step in (3, 4):  # resumed on two ranks with two microbatches each
        ranks = []
        for rank in range(2):
            with wide.batches(Share(5, microbatches=2, rank=rank, size=2)).iterate(step, step + 1) as batches:
                ranks += list(batches)
        parts = [ranks[rank][number] for number in range(2) for rank in range(2)]
        found.append(tuple(torch.cat(column) for column in zip(*parts, strict=True)))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    evaluated = [list(each.eval_batches(Share(2))) for each in (plain, wide)]
    assert torch.equal(evaluated[0][0][0], evaluated[1][0][0])


def test_only_media_tasks_accept_workers():
    with pytest.raises(
        ConfigError, match=r"^data\.workers=2: only tasks on images and audio read it\. Leave it out\.$"
    ):
        find_task(RunConfig.model_validate({"data": {"workers": 2}}))
