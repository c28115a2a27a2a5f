"""Decoding processes: equal bits after failures of processes, and one error line if decoding cannot continue."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.image_folders import class_folder
from weft.data.media import decode_workers as pool_module
from weft.data.media import images
from weft.data.media.class_folder import find_pictures
from weft.data.media.decode_workers import DecodedAhead, usual_workers
from weft.data.media.image_source import Pictures
from weft.data.media.images import Look
from weft.errors import DataError

LOOK = Look(16, crops=True, mirrors=True, colour=0.4, noise=3.0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return Pictures(find_pictures(class_folder(tmp_path_factory.mktemp("pool") / "pictures", 8)), LOOK, 5)


@pytest.fixture
def ahead(pictures: Pictures) -> Iterator[DecodedAhead]:
    made = DecodedAhead(pictures, 2)
    yield made
    made.close()


def keys(step: int) -> list[tuple[int, int]]:
    return [divmod(place, 24) for place in range(step * 10, step * 10 + 10)]


def assert_same(found: list, pictures: Pictures, wanted: list[tuple[int, int]]) -> None:
    assert len(found) == len(wanted)
    for (pixels, label), key in zip(found, wanted, strict=True):
        expected, its = pictures.in_epoch(*key)
        assert label == its
        assert np.array_equal(pixels, expected), key


def test_bits_do_not_depend_on_processes_and_their_failures(pictures: Pictures, ahead: DecodedAhead) -> None:
    rng = np.random.default_rng(0)
    before = set[int]()
    for step in range(6):
        assert_same(ahead.many(keys(step), keys(step + 1)), pictures, keys(step))
        before |= {*ahead.pids()}
        if step in (1, 3):  # while they decode the next samples
            os.kill(int(rng.choice(ahead.pids())), signal.SIGKILL)
    assert len({*ahead.pids()} | before) == 4
    assert_same(ahead.many(keys(20)), pictures, keys(20))  # these were not announced
    assert_same(ahead.many([(0, 1), (0, 1)]), pictures, [(0, 1), (0, 1)])
    pids = ahead.pids()
    ahead.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert_same(ahead.many(keys(0)), pictures, keys(0))  # it starts again
    assert_same(DecodedAhead(pictures, 0).many(keys(0), keys(1)), pictures, keys(0))


def test_hanging_process_is_replaced(pictures: Pictures, ahead: DecodedAhead, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.many(keys(0))
    monkeypatch.setattr(pool_module, "_LONGEST_JOB_S", 0.5)
    os.kill(ahead.pids()[0], signal.SIGSTOP)
    assert_same(ahead.many(keys(1)), pictures, keys(1))


def test_slow_image_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = class_folder(tmp_path / "pictures")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (400, 400, 3), np.uint8)).save(root / "red" / "0.png")
    source = find_pictures(root)
    index = source.paths.index("red/0.png")
    text = r"red/0\.png: its decoding took more than {} s of processor time\. Save it smaller or in another format"
    with monkeypatch.context() as limits:
        limits.setattr(images, "_MAX_READ_S", 0.0)
        with pytest.raises(DataError, match=text.format(0)):
            DecodedAhead(Pictures(source, LOOK, 0), 0).many([(0, index)])
    ahead = DecodedAhead(Pictures(source, LOOK, 0), 1)
    assert len(ahead.many([(0, index)])) == 1
    with monkeypatch.context() as limits:
        limits.setattr(pool_module, "_MAX_DECODE_S", -1.0)
        os.kill(ahead.pids()[0], signal.SIGSTOP)  # it does not answer
        with pytest.raises(DataError, match=text.format("-1")):
            ahead.many([(1, index)])
    assert len(ahead.many([(0, index), (0, 2)])) == 2
    ahead.close()


def test_faulty_image_is_named_when_it_is_read(tmp_path: Path) -> None:
    root = class_folder(tmp_path / "pictures")
    source = find_pictures(root)
    bad = root / "red" / "0.png"
    bad.write_bytes(bad.read_bytes()[:60])
    index = source.paths.index("red/0.png")
    ahead = DecodedAhead(Pictures(source, LOOK, 0), 1)
    assert len(ahead.many([(0, 1)], [(0, index)])) == 1
    with pytest.raises(DataError, match=r"red/0\.png: its pixels cannot be decoded \(.*\)\. Repair it, or delete it\."):
        ahead.many([(0, index), (0, 2)])
    assert len(ahead.many([(0, 2), (0, 3)])) == 2
    ahead.close()


def test_image_that_crashes_processes_is_named(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ahead = DecodedAhead(pictures, 2)
    text = (
        r": 3 processes ended while they decoded it, the last with exit code 1\. Repair or delete it; if memory ran "
        r"out, use fewer data\.workers\.$"
    )
    # Of several images, the named one depends on which processes end at the same time.
    with pytest.raises(DataError, match=re.escape(str(pictures.source.file(17))) + text):
        ahead.many([(0, 17)])
    ahead.close()


def test_missing_shared_memory_is_one_error_line(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError) as caught:
        DecodedAhead(pictures, 2).many(keys(0))
    assert str(caught.value) == (
        "data.workers=2: the 13.5 KiB of memory that they share cannot be had (No space left on device). Use fewer "
        "data.workers, a smaller task.options.side, or data.workers=0."
    )


def test_default_number_of_processes_leaves_a_core_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(24)}, raising=False)
    assert [usual_workers(ranks) for ranks in (1, 2, 4, 8, 32)] == [8, 8, 5, 2, 1]
