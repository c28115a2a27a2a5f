"""data.stream: files that are tokenised while they are trained on, in an order that no plan and no resume changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from weft import env
from weft.config.files import load_config
from weft.config.run_config import RunConfig
from weft.data.order.loader import Loader
from weft.data.store.prepare import prepare_data
from weft.data.store.prepared import PreparedData
from weft.data.store.streamed import StreamedFiles, StreamedSequences
from weft.errors import ConfigError, DataError
from weft.train.tasks.registry import find_task

FILES = 6


def write_files(folder: Path, count: int = FILES) -> None:
    folder.mkdir()
    for number in range(count):
        lines = [json.dumps({"text": f"file {number} line {line} " + "x" * (line % 5)}) for line in range(4 + number)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")


def config_of(folder: Path, *words: str) -> RunConfig:
    return load_config(None, [
        f"data.train={folder}/*.jsonl", "data.stream=true", f"data.cache_dir={folder.parent}/cache", "data.holdout=0",
        "tokenizer.kind=bytes", "train.seq_len=32", "train.global_batch=4", "data.packing=pad", *words,
    ]).config  # fmt: skip


def stream_of(config: RunConfig, data: PreparedData | None = None) -> StreamedSequences:
    data = prepare_data(config) if data is None else data
    return StreamedSequences(PreparedData.from_json(data.to_json()), config, Path(config.data.cache_dir))


def texts(config: RunConfig, which: range, stream: StreamedSequences | None = None) -> list[str]:
    stream = stream_of(config) if stream is None else stream
    samples = [stream.sample(index) for index in which]
    return [bytes(token for token in one.input_ids.tolist() if token < 256).decode(errors="replace") for one in samples]


@pytest.fixture(autouse=True)
def no_threads_are_left():
    yield
    for thread in threading.enumerate():
        if thread.name == "weft-tokenise":
            thread.join(20)
            assert not thread.is_alive()


def test_each_part_reads_its_files_once_before_any_again(tmp_path):
    write_files(tmp_path / "data")
    config = config_of(tmp_path / "data")
    stream = stream_of(config)
    assert stream._num_parts == 2
    found = texts(config, range(200), stream)
    for part in range(2):
        # Samples 2 part and 2 part + 1 of each batch of 4 are those of the part.
        own = [text for index, text in enumerate(found) if index % 4 // 2 == part]
        lines = Counter(f"{number} {line}" for number in range(part, FILES, 2) for line in range(4 + number))
        size = lines.total()
        for epoch in range(2):
            read = Counter(" ".join(text.split()[1::2][:2]) for text in own[epoch * size : (epoch + 1) * size])
            assert read == lines, (part, epoch)
        files = [text.split()[1] for text in own[:size]]
        runs = [one for one, before in zip(files, [None, *files], strict=False) if one != before]
        assert sorted(runs) == sorted(set(files))  # one file after the other
        assert own[:size] != own[size : 2 * size]


@pytest.mark.parametrize("packing", ["concat", *(pytest.param(one, marks=pytest.mark.full) for one in ("fit", "pad"))])
def test_batches_do_not_depend_on_ranks_and_microbatches(tmp_path, packing):
    write_files(tmp_path / "data")
    config = config_of(tmp_path / "data", f"data.packing={packing}")
    data = prepare_data(config)

    def rows(size: int, accumulation: int) -> list[list[Any]]:
        loaders = [
            Loader(stream_of(config, data), global_batch=4, accumulation=accumulation, dp_rank=rank, dp_size=size)
            for rank in range(size)
        ]
        found = []
        for step in range(20):
            batches = [batch for loader in loaders for batch in loader.batches(step)]
            found.append(sorted([*row.tolist(), *labels.tolist()] for batch in batches
                                for row, labels in zip(batch["input_ids"], batch["labels"], strict=True)))  # fmt: skip
        return found

    expected = rows(1, 1)
    for size, accumulation in ((2, 1), (2, 2), (4, 1), (1, 4)):
        assert rows(size, accumulation) == expected, (size, accumulation)


def test_a_rank_tokenises_only_its_files_and_deletes_them(tmp_path):
    write_files(tmp_path / "data", 12)
    config = config_of(tmp_path / "data")
    stream = stream_of(config)
    assert stream._num_parts == 4
    read = set()
    for step in range(60):
        read |= {text.split()[1] for text in texts(config, range(4 * step, 4 * step + 1), stream)}  # rank 0 of 4
        tokens = list((tmp_path / "cache" / "streamed").glob("*/data-*"))
        assert len(tokens) <= 4  # the one in use, the one before it, the next one, and one that is being written
    assert read == {"0", "2", "6"}  # of the sorted names 0, 1, 10, 11, 2, ...


def test_resuming_reads_the_same_samples_with_and_without_the_cache(tmp_path, monkeypatch):
    write_files(tmp_path / "data")
    config = config_of(tmp_path / "data")
    expected = texts(config, range(120))
    data = prepare_data(config)
    opened: list[int] = []
    monkeypatch.setattr(
        StreamedFiles, "_ready",
        lambda self, number, report=None, ready=StreamedFiles._ready: (
            opened.append(number) if report is None else None, ready(self, number, report)
        )[1],
    )  # fmt: skip
    for index in (1, 17, 63, 118):
        opened.clear()
        assert texts(config, range(index, index + 1), stream_of(config, data)) == expected[index : index + 1]
        assert len(opened) == 1  # the numbers of sequences of earlier files are known
    for thread in threading.enumerate():
        thread.join(20) if thread.name == "weft-tokenise" else None
    shutil.rmtree(tmp_path / "cache" / "streamed")
    assert texts(config, range(63, 70), stream_of(config, data)) == expected[63:70]


def test_held_out_documents_are_not_trained_on(tmp_path):
    write_files(tmp_path / "data", 4)
    config = config_of(tmp_path / "data", "data.holdout=0.3")
    data = prepare_data(config)
    assert data.train[0].streamed is not None
    assert len(data.train[0].streamed["files"]) == 4
    assert any("a stream of 4 files" in line for line in data.summary)
    stream, holdout = stream_of(config, data), data.train[0].streamed["holdout"]
    found = {" ".join(one.split()[1::2][:2]) for one in texts(config, range(200), stream)}
    number = sum(4 + file for file in range(4))
    assert (len(found) < number) is (holdout > 0)


def test_changed_files_are_refused(tmp_path):
    write_files(tmp_path / "data")
    config = config_of(tmp_path / "data")
    data = prepare_data(config)
    texts(config, range(4), stream_of(config, data))
    (tmp_path / "data" / "6.jsonl").write_text('{"text": "more"}\n')
    (problem,) = prepare_data(config).changes_from(data)
    assert "data.train.0: it is" in problem
    (tmp_path / "data" / "6.jsonl").unlink()
    assert prepare_data(config).changes_from(data) == []
    last = tmp_path / "data" / "5.jsonl"
    last.write_text(last.read_text() + '{"text": "more"}\n')
    with pytest.raises(DataError, match=r"5\.jsonl has changed since the run started, and the order of samples"):
        texts(config, range(200), stream_of(config, data))
    last.unlink()
    with pytest.raises(DataError, match="no file matches"):
        texts(config, range(200), stream_of(config, data))


def test_a_file_with_the_same_size_and_other_records_is_refused(tmp_path):
    write_files(tmp_path / "data")
    config = config_of(tmp_path / "data")
    data = prepare_data(config)
    texts(config, range(100), stream_of(config, data))
    for thread in threading.enumerate():
        thread.join(20) if thread.name == "weft-tokenise" else None
    file = tmp_path / "data" / "5.jsonl"
    stat, text = file.stat(), file.read_text().splitlines()
    size = len(text[-2]) + len(text[-1]) + 1 - len('{"text": "y", "other": ""}')
    joined = [*text[:-2], json.dumps({"text": "y", "other": "z" * size})]
    file.write_text("\n".join(joined) + "\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    shutil.rmtree(tmp_path / "cache" / "contents")
    for folder in (tmp_path / "cache" / "streamed").glob("*/*"):
        shutil.rmtree(folder) if folder.is_dir() else None
    with pytest.raises(DataError, match=r"5\.jsonl has changed since the run started"):
        texts(config, range(100), stream_of(config, data))


def test_refusals(tmp_path):
    write_files(tmp_path / "data")
    folder = tmp_path / "data"
    for words, text in (
        (("train.epochs=1",), "data.stream=true: train.epochs=1 needs the number of samples"),
        ((f'data.train=["{folder}/0.jsonl", "{folder}/1.jsonl"]',), "data.stream=true: data.train has 2 sources"),
    ):
        with pytest.raises(ConfigError, match=text):
            config_of(folder, *words)
    with pytest.raises(ConfigError, match=r"data\.stream=true: task\.name=prefer reads all of its data"):
        find_task(config_of(folder, "task.name=prefer"))
    (folder / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"data\.stream=true: the files of .* are texts"):
        prepare_data(config_of(folder, f"data.train={folder}/a.txt"))
    for number in range(FILES):
        (folder / f"{number}.jsonl").write_text('{"text": "held out"}\n' if number == 0 else "")
    with pytest.raises(DataError, match="have no document to train on"):
        texts(config_of(folder), range(9))


@pytest.mark.full
def test_losses_of_runs_are_equal_under_plans_and_after_a_resume(tmp_path):
    write_files(tmp_path / "data")
    words = [f"data.train={tmp_path}/data/*.jsonl", "data.stream=true", "tokenizer.kind=bytes", "train.seq_len=32",
             "train.global_batch=4", "eval.every=5", "checkpoint.every=5", "launch.device=cpu", "sample.prompt=",
             "model.dim=16", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=2",
             "schedule.kind=constant", "schedule.warmup_steps=1", f"run.dir={tmp_path}/runs"]  # fmt: skip

    def losses(name: str, *more: str) -> dict[tuple[str, int], float]:
        line = [sys.executable, "-m", "weft", "train", *words, f"run.name={name}", *more]
        ended = subprocess.run(
            line, env=env.child_env(WEFT_HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1"), capture_output=True,
            text=True, timeout=300, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        events = map(json.loads, (tmp_path / "runs" / name / "events.jsonl").read_text().splitlines())
        return {(one["event"], one["step"]): one["loss"] for one in events if "loss" in one}

    expected = losses("one", "train.steps=15", "plan=dp_replicate=1 precision=fp64", "launch.ranks=1")
    losses("two", "train.steps=5", "plan=dp_shard=2 zero=3 precision=fp64", "launch.ranks=2")
    shutil.rmtree(tmp_path / "home")  # another machine
    found = losses("two", "train.steps=15", "plan=dp_replicate=2 precision=fp64", "launch.ranks=2")
    assert len(expected) >= 15
    assert found == pytest.approx(expected, rel=1e-10)
