"""The run folder's lock: one holder, nothing left behind by who is refused or fails early."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from weft.errors import ConfigError, LaunchError
from weft.train.run import run_lock


def test_a_folder_has_one_holder_and_names_it(tmp_path):
    folder = tmp_path / "runs" / "a"
    with run_lock(folder):
        (folder / "config.toml").touch()
        before = (folder / ".lock").read_bytes()
        with pytest.raises(LaunchError) as caught, run_lock(folder):
            pass
        assert (folder / ".lock").read_bytes() == before
    assert str(caught.value) == (
        f"run.name=a: process {os.getpid()} is training in '{folder}' right now. Wait for it, or use another run.name."
    )
    with run_lock(folder):
        pass


def test_an_early_error_takes_a_new_folder_away_and_leaves_an_old_one(tmp_path):
    (tmp_path / "old").mkdir()
    for name in ("runs/new", "old"):
        with pytest.raises(KeyboardInterrupt), run_lock(tmp_path / name):
            raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    with pytest.raises(FileExistsError), run_lock(tmp_path / "begun"):
        write_and_fail(tmp_path / "begun" / "config.toml")
    assert (tmp_path / "begun" / "config.toml").exists()


def write_and_fail(file: Path) -> None:
    file.touch()
    file.touch(exist_ok=False)


def test_a_copy_of_the_open_file_keeps_the_folder_held(tmp_path):
    with run_lock(tmp_path / "a") as lock:
        passed_on = os.dup(lock)
    with pytest.raises(LaunchError), run_lock(tmp_path / "a"):
        pass
    os.close(passed_on)
    with run_lock(tmp_path / "a"):
        pass


def compete(folder: Path, start: object, winners: object) -> None:
    start.wait()
    for _ in range(50):
        try:
            with run_lock(folder):
                (folder / "mine").touch(exist_ok=False)  # FileExistsError: two hold the folder
                (folder / "mine").unlink()
                winners.put(True)
                raise KeyError  # so that the folder is taken away under the other's hands
        except (LaunchError, KeyError):
            pass
        except Exception as error:
            winners.put(repr(error))


def test_two_that_come_at_the_same_moment_are_never_both_let_in(tmp_path):
    spawn = multiprocessing.get_context("fork")
    start, winners = spawn.Barrier(2), spawn.SimpleQueue()
    rivals = [spawn.Process(target=compete, args=(tmp_path / "a", start, winners)) for _ in range(2)]
    for rival in rivals:
        rival.start()
    seen = []
    while any(rival.is_alive() for rival in rivals) or not winners.empty():
        if not winners.empty():
            seen.append(winners.get())
    assert seen
    assert set(seen) == {True}


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    told = r"run.dir=.*/file: cannot write '.*/file/a' \(Not a directory\). Use another run.dir."
    with pytest.raises(ConfigError, match=told), run_lock(tmp_path / "file" / "a"):
        pass
