"""The record of a failing rank, and which of several failures is shown."""

from __future__ import annotations

import json
import signal

import pytest

from weft.cli.launch.failure import Failure, first_failure, write_failure
from weft.errors import CommError, DataError


@pytest.mark.parametrize(
    "failure, sentence",
    [
        (
            Failure(1, -9),
            "rank 1 was killed by signal 9 (SIGKILL). Is the machine out of memory? "
            "Look at `dmesg`; use a smaller train.global_batch or model.",
        ),
        (Failure(1, -63), "rank 1 was killed by signal 63 (unknown)."),
        (Failure(0, 4), "rank 0 exited with code 4 without reporting why."),
        (Failure(0, 5, kind="SystemExit", message="5"), "rank 0 exited with code 5: it called sys.exit."),
        (Failure(0, 1, kind="ValueError"), "rank 0 failed: ValueError"),
        (Failure(0, 1, kind="ValueError", message="\nboom\nmore", step=7), "rank 0 failed at step 7: ValueError: boom"),
        (Failure(0, 2, kind="DataError", message="data.train=x: no.", expected=True), "data.train=x: no."),
    ],
)
def test_failure_messages(failure, sentence):
    assert failure.sentence() == sentence


@pytest.mark.parametrize(
    "error, code",
    [(SystemExit(), 0), (SystemExit(None), 0), (SystemExit(7), 7), (SystemExit("bye"), 1), (KeyboardInterrupt(), 130),
     (ValueError(), 1), (CommError("x"), 1), (DataError("x"), 2)],
)  # fmt: skip
def test_exit_codes(error, code):
    assert Failure.from_exception(0, error).exit_code == code


def test_first_failure_is_the_earliest_original_one():
    lost = Failure.from_exception(0, RuntimeError("Connection reset by peer"))
    comm = Failure.from_exception(3, CommError("rank 2 is gone"))
    original = Failure.from_exception(1, DataError("data.train=x: no file."))
    ended = Failure(2, -signal.SIGTERM, when=1.0)
    aborted = Failure(4, -signal.SIGABRT, when=1.0)
    killed = Failure(5, -signal.SIGKILL, when=original.when + 1)
    assert first_failure([lost, comm, ended, aborted, original, killed]) is original
    assert first_failure([lost, killed]) is killed
    assert first_failure([lost, comm]) is lost


def test_record_is_next_to_the_log_and_unwritable_folder_is_ignored(tmp_path):
    error = ValueError("boom")
    error.step = 12  # type: ignore[attr-defined]
    failure = Failure.from_exception(3, error)
    assert failure.sentence() == "rank 3 failed at step 12: ValueError: boom"
    write_failure(tmp_path, failure)
    assert Failure(**json.loads((tmp_path / "rank_3.error.json").read_text())) == failure
    # A folder that cannot be written to is like a full disk: both raise an OSError.
    write_failure(tmp_path / "none", failure)
    assert [file.name for file in tmp_path.iterdir()] == ["rank_3.error.json"]
