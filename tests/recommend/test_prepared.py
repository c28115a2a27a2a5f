"""Preparation of a recommender's records: equal from all formats, split as stated, refused with the record."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.recommend.cases import EVENTS, ITEMS, MODELS, USERS, events, settings, write_csv, write_jsonl
from weft.config.files import load_config
from weft.data.store.row_table import RowTable
from weft.errors import ConfigError, DataError
from weft.recommend.prepared import read_vocabulary
from weft.recommend.record_batches import RowNumber
from weft.recommend.task import RecommendTask
from weft.train.folder import RunFolder
from weft.train.tasks.registry import find_task

STYLES = "tables.user=rows tables.*=replicate"


def prepared(name: str, data: Path, folder: Path, *more: str) -> RecommendTask:
    task = find_task(load_config(None, settings(name, data, folder, STYLES, *more)).config)
    assert isinstance(task, RecommendTask)
    task.read_tables(None)
    return task


def rows_of(task: RecommendTask) -> list[Any]:
    return [{name: one.tolist() for name, one in table[row].items()} for table in (task.tables.train, task.tables.eval)
            if table is not None for row in range(len(table))]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "events.jsonl")


def test_rows_of_all_formats_are_equal(data, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(events()), tmp_path / "events.parquet")
    write_csv(tmp_path / "events.csv")
    found = [prepared("deepfm", tmp_path / f"events.{suffix}", tmp_path) for suffix in ("jsonl", "csv", "parquet")]
    first, *others = map(rows_of, found)
    assert len(first) == EVENTS
    assert all(other == first for other in others)


def test_vocabulary_has_the_ids_of_the_training_records(data, tmp_path):
    task = prepared("deepfm", data, tmp_path)
    vocabulary = read_vocabulary(Path(task.tables.found["vocabularies"]["user"]))
    assert set(vocabulary) == {f"u{user}" for user in range(USERS)}
    assert sorted(vocabulary.values()) == list(range(1, USERS + 1))
    counts = RowTable(Path(task.tables.found["vocabularies"]["item"])).column("count")
    assert counts.sum() == len(task.tables.train)
    again = prepared("dlrm", data, tmp_path)  # another split, the same ids in the same order
    assert read_vocabulary(Path(again.tables.found["vocabularies"]["user"])) == vocabulary


def test_split_by_time_holds_out_the_latest_records(data, tmp_path):
    task = prepared("deepfm", data, tmp_path)
    kept = task.tables.eval
    assert kept is not None
    assert EVENTS * 0.2 <= len(kept) < EVENTS * 0.3  # records of equal time stay together
    assert task.tables.train.column("time").max() < kept.column("time").min()


def test_random_split_depends_on_the_records_only(data, tmp_path):
    one = prepared("dlrm", data, tmp_path)
    moved = write_jsonl(tmp_path / "moved.jsonl", events()[::-1])
    other = prepared("dlrm", moved, tmp_path, "seed=5")
    held = [sorted(map(str, rows_of(task)[len(task.tables.train) :])) for task in (one, other)]
    assert held[0] == held[1]


def test_numbers_have_mean_zero_and_variance_one(data, tmp_path):
    task = prepared("dlrm", data, tmp_path)
    batch = task.collate([RowNumber("train", 0, row) for row in range(len(task.tables.train))])
    assert float(batch["numbers"].mean()) == pytest.approx(0, abs=1e-6)
    assert float(batch["numbers"].std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_large_numbers_keep_their_differences(tmp_path):
    """float32 has steps of 131 s for times of today in milliseconds."""
    rows = [{**row, "age": 1.7e12 + number} for number, row in enumerate(events())]
    task = prepared("dlrm", write_jsonl(tmp_path / "times.jsonl", rows), tmp_path)
    batch = task.collate([RowNumber("train", 0, row) for row in range(len(task.tables.train))])
    assert len(batch["numbers"].unique()) == len(task.tables.train)


def test_sequences_have_each_users_items_in_order_of_time(data, tmp_path):
    task = prepared("sasrec", data, tmp_path)
    vocabulary = {
        index: text for text, index in read_vocabulary(Path(task.tables.found["vocabularies"]["item"])).items()
    }
    expected, last = [], []
    for user in {row["user"] for row in events()}:
        own = [str(row["item"]) for row in sorted(events(), key=lambda row: row["at"]) if row["user"] == user]
        expected += list(pairwise(own[:-1]))
        last.append(([*own[-7:-1]], own[-1]))
    found = []
    for row in task.tables.train:
        assert 2 <= len(row["items"]) <= 7
        own = [vocabulary[index] for index in row["items"].tolist()]
        found += list(pairwise(own))
    assert sorted(found) == sorted(expected)
    table = task.tables.eval
    assert table is not None
    held = [([vocabulary[one] for one in row["items"].tolist()], vocabulary[int(row["target"][0])]) for row in table]
    assert sorted(held) == sorted(last)


def test_negative_items_are_other_items_and_depend_on_the_epoch(data, tmp_path):
    task = prepared("sampled", data, tmp_path)
    batches = [task.collate([RowNumber("train", epoch, 0)]) for epoch in (0, 0, 1)]
    first, again, other = (batch["candidates"] for batch in batches)
    assert first.equal(again)
    assert not first.equal(other)
    labels = batches[0]["labels"]
    counts = labels >= 0
    assert first[..., 0][counts].equal(labels[counts])
    assert (first[counts][:, 1:] != labels[counts][:, None]).all()
    assert first[counts].min() >= 1
    assert first.max() <= ITEMS
    assert not first[~counts].any()


def test_pairs_have_positive_records_only_and_items_their_frequency(data, tmp_path):
    task = prepared("two_tower", data, tmp_path)
    assert set(task.tables.train.column("label").tolist()) == {1.0}
    batch = task.collate([RowNumber("train", 0, row) for row in range(len(task.tables.train))])
    items = batch["item"].numpy()
    shares = np.bincount(items)[items] / len(items)
    assert np.exp(batch["log_q"].numpy()) == pytest.approx(shares, rel=1e-6)


def test_padding_of_the_last_batch_is_not_counted(data, tmp_path):
    for name, key in (("dlrm", "labels"), ("two_tower", "item"), ("sasrec", "target")):
        task = prepared(name, data, tmp_path)
        samples, table = task.samples("eval"), task.tables.eval
        assert samples is not None
        assert table is not None
        assert not len(samples) % 12
        batch = task.collate([samples[row] for row in range(len(samples))])
        counts = batch[key].isfinite() if name == "dlrm" else batch[key] >= 0
        assert int(counts.sum()) == len(table)


def test_vocabulary_that_was_deleted_is_made_again(data, tmp_path):
    import shutil

    task = prepared("dlrm", data, tmp_path)
    shutil.rmtree(task.tables.found["vocabularies"]["user"])
    assert prepared("dlrm", data, tmp_path).tables.digests == task.tables.digests


@pytest.mark.parametrize("row, more, error", [
    ({"rating": "x"}, [], "column 'rating' holds \"x\", and a number is needed."),
    ({"user": True}, [], "column 'user' holds true, and an id is text or a whole number."),
    ({"item": 20}, ['task.options.columns=["item=id size=11", "rating=label>=4"]'],
     "column 'item' holds the id '20', and its ids are 0 to 10. Use a larger size, or add unknown=map to the column."),
])  # fmt: skip
def test_bad_value_is_refused_with_its_record(row, more, error, tmp_path):
    data = write_jsonl(tmp_path / "bad.jsonl", [*events()[:40], {**events()[40], **row}])
    with pytest.raises(DataError) as caught:
        prepared("dlrm", data, tmp_path, *more)
    assert str(caught.value) == f"{data}, record 41: {error}"


def test_broken_records_are_left_out_up_to_the_limit(tmp_path):
    data = tmp_path / "broken.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in events()) + "{broken\n")
    assert len(rows_of(prepared("dlrm", data, tmp_path))) == EVENTS
    with pytest.raises(DataError, match=r"data.max_bad_fraction=0: 1 of 301 records cannot be read; the first is"):
        prepared("dlrm", data, tmp_path, "data.max_bad_fraction=0")


def test_other_data_does_not_resume(data, tmp_path):
    task = prepared("dlrm", data, tmp_path)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    for name, text in task.keep(run, ()).items():
        (run.path / name).write_text(text)
    task.prepare(run, None)
    other = write_jsonl(tmp_path / "other.jsonl", events()[:200])
    with pytest.raises(DataError, match="data: the rows are not those that the run in"):
        prepared("dlrm", other, tmp_path).prepare(run, None)


@pytest.mark.parametrize("name, more, error", [
    ("dlrm", ["model=dlmr"], "model=dlmr: there is no such model. Did you mean 'dlrm'?"),
    ("dlrm", ["split=last"], "split=last: dlrm is evaluated on split=random or time. Use that."),
    ("dlrm", ['user=["user"]'], "user=user: dlrm reads all columns together. Leave it out."),
    ("dlrm", ["dropout=1.5"], "dropout=1.5: it is 0 to 0.99. Use a number between."),
    ("dlrm", ['columns=["user=id"]'], "columns=user=id: dlrm needs a label. Add a column such as "
     "rating=label>=4."),
    ("deepfm", ['columns=["user=id", "rating=label>=4"]'],
     "split=time: it needs the time of records. Add a column such as timestamp=time."),
    ("two_tower", ["k=[]"], "k=[]: at least one value of k is needed. Write e.g. [10]."),
    ("two_tower", ['item=["tags", "item"]'], "item=tags: the first column is the item's id, with a learned vocabulary, "
     "and not tags=ids. Write tags=id in columns."),
    ("two_tower", ['user=["user"]'], "columns=age: the column is neither in user nor in item. Name it in one, or leave "
     "it out."),
    ("sasrec", ["user=[]"], "user=: sasrec needs the columns of the user. Write e.g. user=[\"user_id\"]."),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(name, more, error, data, tmp_path):
    with pytest.raises(ConfigError) as caught:
        prepared(name, data, tmp_path, *(f"task.options.{one}" for one in more))
    assert f"task.options.{error}" in str(caught.value)


def test_every_model_has_a_case():
    from weft.recommend.options import MODELS as ALL

    assert {one.removeprefix("model=") for options in MODELS.values() for one in options if "model=" in one} == set(ALL)


@pytest.mark.parametrize("name", list(MODELS))
def test_planner_describes_every_model(name, data, tmp_path):
    task = prepared(name, data, tmp_path)
    found = task.describe()
    assert found.traced is not None
    assert found.traced.name == task.model
    assert set(found.task_limits) == {"tp", "pp", "cp"}
