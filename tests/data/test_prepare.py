from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from weft.config.run_config import EarlyStopSection, RunConfig
from weft.data.order.stream import SampleStream
from weft.data.store import prepared as cached
from weft.data.store.prepare import prepare_data
from weft.data.store.prepared import PreparedData, verify_data
from weft.errors import DataError


def config(tmp_path: Path, *paths: str | dict[str, Any], kind: str = "bytes", **data: Any) -> RunConfig:
    train = [{"path": path} if isinstance(path, str) else path for path in paths]
    return RunConfig.model_validate(
        {
            "data": {"train": train, "cache_dir": str(tmp_path / "cache"), "holdout": 0.1, **data},
            "tokenizer": {"kind": kind, "vocab_size": 300, "train_bytes": 20_000},
            "train": {"seq_len": 32},
        }
    )


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document number {n}"}) + "\n" for n in range(300)))
    return str(path)


def no_tokenising(stage: str, *_: int) -> None:
    raise AssertionError(stage)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_preparation_runs_once(tmp_path: Path, text: str, kind: str) -> None:
    stages: list[str] = []
    first = prepare_data(config(tmp_path, text, kind=kind), lambda stage, *_: stages.append(stage))
    assert f"tokenise {text}" in stages
    again = prepare_data(config(tmp_path, text, kind=kind), no_tokenising)
    assert again == first
    assert again.digest == first.digest
    assert PreparedData.from_json(first.to_json()) == first
    assert first.vocab_size == first.tokenizer.vocab_size
    assert sum(source.num_documents for source in (*first.train, *first.eval)) == 300
    assert verify_data(first) == []


def test_summary_has_tokenizer_schema_and_counts(tmp_path: Path, text: str) -> None:
    prepared = prepare_data(config(tmp_path, text))
    assert prepared.summary[0] == "tokenizer: bytes, 260 entries"
    assert prepared.summary[1].startswith(f"{text}: text, column 'text'; ")
    assert " documents, " in prepared.summary[1]
    assert "; kept for evaluation " in prepared.summary[1]


def test_reasoning_is_masked_or_dropped(tmp_path: Path, text: str) -> None:
    chats, pairs = tmp_path / "chats.jsonl", tmp_path / "pairs.jsonl"
    answers = [{"role": "assistant", "content": f"<think>abcd</think>{sign}"} for sign in "yn"]
    asked = [{"role": "user", "content": "?"}]
    chats.write_text(20 * (json.dumps({"messages": [*asked, answers[0]]}) + "\n"))
    pairs.write_text(20 * (json.dumps({"prompt": asked, "chosen": answers[:1], "rejected": answers[1:]}) + "\n"))
    for path, is_pair in ((chats, False), (pairs, True)):
        found = {
            how: prepare_data(
                config(tmp_path, str(path), reasoning=how, eval=[{"path": str(path)}]), preferences=is_pair
            )
            for how in ("keep", "mask", "drop")
        }
        [[keep], [mask], [drop]] = [one.train for one in found.values()]
        assert keep.num_tokens == mask.num_tokens == drop.num_tokens + 20 * (1 + is_pair) * len("<think>abcd</think>")
        assert keep.counts.num_trained == mask.counts.num_trained + 20 * (1 + is_pair) * len("abcd")
        assert len({one.digest for one in found.values()}) == 3
    with pytest.raises(
        DataError, match=r"data\.reasoning=mask: data\.train\.0 is text, column .text., and only conversations"
    ):
        prepare_data(config(tmp_path, text, reasoning="mask"))


def test_reasoning_that_chatml_does_not_render_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    asked, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "y"}
    chats = [[asked, answer], [asked, {**answer, "reasoning": "abcd"}]]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    found = prepare_data(config(tmp_path, str(path), holdout=0))
    assert "1 document with reasoning in a field" in "\n".join(found.summary)


@pytest.mark.parametrize("change", ["content", "holdout", "tokenizer"])
def test_changed_content_or_settings_make_new_data(tmp_path: Path, text: str, change: str) -> None:
    before = prepare_data(config(tmp_path, text))
    if change == "content":
        Path(text).write_text(Path(text).read_text().replace("document number 7", "document number x"))
        after = prepare_data(config(tmp_path, text))
    elif change == "holdout":
        after = prepare_data(config(tmp_path, text, holdout=0.2))
    else:
        after = prepare_data(config(tmp_path, text, kind="bpe"))
    assert before.digest != after.digest
    assert after.changes_from(before)[0].startswith(f"data.train.0: it is {text} (")
    assert after.changes_from(after) == []


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_touched_copied_and_moved_files_are_the_same_data(tmp_path: Path, text: str, kind: str) -> None:
    before = prepare_data(config(tmp_path, text, kind=kind))
    os.utime(text, ns=(1, 1))
    assert prepare_data(config(tmp_path, text, kind=kind), no_tokenising) == before
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "a.jsonl"
    Path(text).rename(moved)
    after = prepare_data(config(tmp_path, str(moved), kind=kind), no_tokenising)
    assert after.digest == before.digest
    assert after.changes_from(before) == []
    other = config(tmp_path, str(moved), kind=kind).model_copy(deep=True)
    elsewhere = other.model_copy(update={"data": other.data.model_copy(update={"cache_dir": str(tmp_path / "node2")})})
    assert prepare_data(elsewhere).digest == before.digest


def test_packing_plans_are_prepared_and_repaired(tmp_path: Path, text: str) -> None:
    prepared = prepare_data(config(tmp_path, text, packing="fit"))
    plan = prepared.train[0].folder / "fit-32-v1.npy"
    content = plan.read_bytes()
    plan.write_bytes(content[:-8] + b"\1" + content[-7:])
    prepared = prepare_data(config(tmp_path, text, packing="fit"))
    assert plan.read_bytes() == content
    stream = SampleStream(prepared.train, seed=0, seq_len=32, packing="fit", borders=True)
    assert prepared.tokenizer.decode(stream.sample(0).input_ids).startswith("document number")


def test_damaged_shards_are_made_again(tmp_path: Path, text: str) -> None:
    prepared = prepare_data(config(tmp_path, text))
    shard = prepared.train[0].folder / "tokens-00000.bin"
    content = shard.read_bytes()
    for damaged, reason in (
        (content[:-2], f"tokens-00000.bin has {len(content) - 2} bytes, and {len(content)} were written"),
        (content[:100] + bytes([content[100] ^ 1]) + content[101:], "tokens-00000.bin does not match its digest"),
    ):
        shard.write_bytes(damaged)
        again = prepare_data(config(tmp_path, text))
        assert again.digest == prepared.digest
        message = f"{text}: its stored tokens were damaged ({reason}), and Weft has written them again"
        assert again.summary[-1] == message
        assert shard.read_bytes() == content
    shard.write_bytes(content[:-2] + b"\1\1")
    assert verify_data(prepared) == [f"{shard.parent}: tokens-00000.bin does not match its digest"]
    (prepared.tokenizer_dir / "vocabulary.json").write_text("{}")
    assert prepare_data(config(tmp_path, text)).tokenizer.vocab_size == 260


def test_separate_evaluation_sources(tmp_path: Path, text: str) -> None:
    (tmp_path / "e.txt").write_text("evaluate this")
    prepared = prepare_data(config(tmp_path, text, eval=[{"path": str(tmp_path / "e.txt")}]))
    assert (prepared.train[0].num_documents, prepared.eval[0].num_documents) == (300, 1)
    assert prepare_data(config(tmp_path, text, holdout=0.0)).eval == ()


def test_digest_check_is_cached_for_a_day(tmp_path: Path, text: str, monkeypatch: Any) -> None:
    settings = config(tmp_path, text)
    for _ in range(2):
        prepare_data(settings)
    monkeypatch.setattr(cached, "verify_split", lambda *_: ["read again"])
    assert len(prepare_data(settings).summary) == 2
    later = time.time() + 25 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    assert "were damaged (read again), and Weft has written them again" in prepare_data(settings).summary[2]


def test_holdout_of_all_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    with pytest.raises(DataError, match=r"^data.holdout=0.9999: it holds out every document of "):
        prepare_data(config(tmp_path, str(tmp_path / "b.jsonl"), holdout=0.9999))


@pytest.mark.parametrize(
    ("texts", "held_out", "message"),
    [
        (
            [f"document {n}" for n in range(20)], 1,
            "data.holdout=1e-06 takes none of the 20 documents of {}, so one is kept aside",
        ),
        (
            [*(["copy"] * 12), "a", "b"], 0,
            "none; 12 of the 14 documents of {} are the same (data.eval=FILE gives others)",
        ),
        (["the same"] * 200, 0, "none; the 200 documents of {} are all the same, so none can be held out as a test"),
        (["x", "y"], 0, "none; {} is 2 documents, too few to hold one out (data.eval=FILE gives others)"),
        (["only"], 0, "none; {} is 1 document, too few to hold one out (data.eval=FILE gives others)"),
    ],
)  # fmt: skip
def test_few_documents_can_be_prepared(tmp_path: Path, texts: list[str], held_out: int, message: str) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepared = prepare_data(config(tmp_path, str(path), holdout=1e-6))
    assert sum(source.num_documents for source in prepared.eval) == held_out
    assert prepared.train[0].num_documents == len(texts) - held_out
    assert prepared.summary[-1] == f"evaluation: {message.format(path)}"


@pytest.mark.parametrize("size", [40, 700, 6600, 20_000])
def test_small_text_file_can_be_prepared(tmp_path: Path, size: int) -> None:
    path = tmp_path / "my.txt"
    path.write_text("".join(f"line {n} of a small text\n" for n in range(2000))[:size])
    prepared = prepare_data(config(tmp_path, str(path), holdout=0.02))
    assert bool(prepared.eval) == (size > 3000)
    total = sum(source.num_tokens for source in (*prepared.train, *prepared.eval))
    assert size < total < size + 20


def test_early_stopping_requires_evaluation_data(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("short")
    settings = config(tmp_path, str(tmp_path / "my.txt"))
    early = settings.train.model_copy(update={"early_stop": EarlyStopSection(patience=3)})
    with pytest.raises(DataError, match=r"^train.early_stop.patience=3: the run has no evaluation data \("):
        prepare_data(settings.model_copy(update={"train": early}))


def test_chat_defaults_to_fit_packing_and_odd_answers_are_reported(tmp_path: Path) -> None:
    def chat(role: str, answer: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "why?"}, {"role": role, "content": answer}]}

    records = [chat("assistant", "because"), chat("bot", "so"), chat("assistant", " "), chat("assistant", "long " * 20)]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    prepared = prepare_data(config(tmp_path, str(path), holdout=0.0))
    assert prepared.train[0].packing == "fit"
    assert prepared.summary[1].endswith("; packing fit")
    assert prepared.summary[2:5] == [
        f"{path}: 1 document with role 'bot' read as assistant, kept for training",
        f"{path}: 1 document with an empty answer, kept for training",
        f"{path}: train.seq_len=32 cuts 1 of 4 documents into chunks; a chunk does not attend to the text before it",
    ]
    assert prepare_data(config(tmp_path, str(path), holdout=0.0, packing="concat")).train[0].packing == "concat"


def test_other_errors(tmp_path: Path, text: str) -> None:
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2]}\n')
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "blank.txt").write_text("")
    for paths, expected in (
        ([str(tmp_path / "ids.jsonl")], 'tokenizer.kind="bpe": the training data has only token ids'),
        ([{"path": text, "weight": 2.0}, text], f"data.train.1.weight: {text} has no weight while another source has."),
        (
            [text, str(tmp_path / "none.jsonl")],
            f"data.train.1.path={tmp_path}/none.jsonl: none.jsonl is empty.",
        ),
        ([text, str(tmp_path / "blank.txt")], f"data.train.1.path={tmp_path}/blank.txt: blank.txt is empty."),
    ):
        with pytest.raises(DataError) as caught:
            prepare_data(config(tmp_path, *paths, kind="bpe"))
        assert str(caught.value).startswith(expected)


def test_unusable_cache_folder_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(DataError, match=rf"^data.cache_dir={tmp_path}/cache: cannot be used \(File exists\)"):
        prepare_data(config(tmp_path, text))


def test_stricter_limit_applies_to_prepared_data(tmp_path: Path, text: str) -> None:
    with Path(text).open("a") as file:
        file.write("{oops\n")
    prepared = prepare_data(config(tmp_path, text))
    assert "1 of 301 records quarantined (1 invalid JSON): " in prepared.summary[2]
    assert Path(prepared.summary[2].rsplit(": ", 1)[1]).is_file()
    with pytest.raises(DataError, match=r"1 of 301 records are broken .* data\.max_bad_fraction=0\.001 allows"):
        prepare_data(config(tmp_path, text, max_bad_fraction=0.001))


def test_tokenizer_is_not_trained_on_evaluation_documents(tmp_path: Path) -> None:
    """Each document repeats one letter, so that the merges show whether it was read."""
    path = tmp_path / "a.jsonl"
    letters = "abcdefghijklmnopqrstuvwxyz"
    path.write_text("".join(json.dumps({"text": letter * 40}) + "\n" for letter in letters))
    prepared = prepare_data(config(tmp_path, str(path), kind="bpe", holdout=0.4))
    held_out = {
        prepared.tokenizer.decode(SampleStream(
            prepared.eval, seed=0, seq_len=64, packing="pad", borders=True, shuffle=False
        ).sample(n).input_ids)[0]
        for n in range(prepared.eval[0].num_documents)
    }  # fmt: skip
    assert 0 < len(held_out) < 26
    assert {letter for letter in letters if len(prepared.tokenizer.encode(letter * 2)) == 2} >= held_out
    assert any(len(prepared.tokenizer.encode(letter * 2)) == 1 for letter in set(letters) - held_out)


WORKER = """
import sys
from weft.data.store import prepared as cached
from weft.data.store.prepare import prepare_data
from weft.config.run_config import RunConfig
work = []
prepared = prepare_data(RunConfig.model_validate_json(sys.argv[1]), lambda stage, *_: work.append(stage))
print(prepared.digest, any(stage.startswith("tokenise") for stage in work))
"""


def start(settings: RunConfig) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, settings.model_dump_json(by_alias=True)], stdout=subprocess.PIPE, text=True
    )


def test_one_of_several_processes_does_the_preparation(tmp_path: Path, text: str) -> None:
    with Path(text).open("a") as file:
        file.writelines(json.dumps({"text": f"more {n}"}) + "\n" for n in range(20_000))
    workers = [start(config(tmp_path, text)) for _ in range(3)]
    results = [worker.communicate(timeout=60)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert len({digest for digest, _ in results}) == 1
    assert sorted(did for _, did in results) == ["False", "False", "True"]
    assert not list((tmp_path / "cache").glob(".*partial*"))


def test_killed_writer_leaves_no_usable_data(tmp_path: Path, text: str) -> None:
    with Path(text).open("a") as file:
        file.writelines(json.dumps({"text": f"more {n}"}) + "\n" for n in range(80_000))
    settings = config(tmp_path, text)
    worker = start(settings)
    cache = tmp_path / "cache"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not list(cache.glob(".data-*.partial-*/train/tokens-00000.bin")):
        time.sleep(0.005)
    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate()
    assert len(list(cache.glob(".data-*.partial-*"))) == 1
    assert not list(cache.glob("data-*"))
    prepared = prepare_data(settings)
    assert sum(source.num_documents for source in (*prepared.train, *prepared.eval)) == 80_300
    assert not list(cache.glob(".data-*"))
    assert verify_data(prepared) == []


MEMORY = """
import gzip, json, resource, sys
from pathlib import Path
from weft.data.store import prepared as cached
from weft.data.store.prepare import prepare_data
from weft.config.run_config import RunConfig
folder = Path(sys.argv[1])
line = "some words that fill a line, number {0}, and a few more of them to make it long enough\\n"
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for name, num_lines in (("small", 30_000), ("large", 300_000)):
    with (folder / f"{name}.txt").open("w") as file:
        file.writelines(line.format(n) for n in range(num_lines))
    with gzip.open(folder / f"{name}.jsonl.gz", "wt", compresslevel=1) as file:
        file.writelines(json.dumps({"text": line.format(n) * 3}) + "\\n" for n in range(num_lines // 4))
    train = [{"path": str(folder / f"{name}.{suffix}")} for suffix in ("txt", "jsonl.gz")]
    prepared = prepare_data(RunConfig.model_validate({
        "data": {"train": train, "cache_dir": str(folder / "cache"), "holdout": 0.02}, "tokenizer": {"kind": "bytes"},
    }))
    print(name, sum(source.num_tokens for source in prepared.train), peak())
"""


@pytest.mark.full
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True)
    (_, _, before), (_, num_tokens, after) = (line.split() for line in result.stdout.splitlines())
    assert int(num_tokens) > 40_000_000
    assert int(after) - int(before) < 25 * 2**20


LONG_LINE = """
import json, resource, sys
from pathlib import Path
from weft.data.store import prepared as cached
from weft.data.store.prepare import prepare_data
from weft.config.run_config import RunConfig
def prepare(name, size):
    path = Path(sys.argv[1]) / name
    path.write_text(json.dumps({"text": "some words that fill a line and more " * (size // 37)}) + "\\n")
    prepare_data(RunConfig.model_validate({
        "data": {"train": [{"path": str(path)}], "cache_dir": str(path.parent / "cache"), "holdout": 0.02},
        "tokenizer": {"kind": "bytes"},
    }))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(prepare("small.jsonl", 3_000_000), prepare("large.jsonl", 23_000_000))
"""


def test_long_record_takes_a_few_times_its_size(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LONG_LINE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    before, after = map(int, result.stdout.split())
    # Twenty million characters more: the line, its text, and temporary copies.
    assert after - before < 6 * 20_000_000
