"""Run folder lock: one owner, and no leftovers of rejected or failed starts."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from weft.errors import ConfigError, LaunchError
from weft.monitor.events import EventLog
from weft.train.folder import new_files_like, run_lock


def test_folder_has_one_owner_and_error_names_it(tmp_path):
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


def test_early_error_removes_a_new_folder_and_keeps_an_old_one(tmp_path):
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


def test_duplicated_file_descriptor_keeps_the_lock(tmp_path):
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
                (folder / "mine").touch(exist_ok=False)  # FileExistsError: two processes own the folder
                (folder / "mine").unlink()
                winners.put(True)
                raise KeyError  # the folder is removed while the other waits for it
        except (LaunchError, KeyError):
            pass
        except Exception as error:
            winners.put(repr(error))


def test_concurrent_starts_never_both_get_the_lock(tmp_path):
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


def test_uncreatable_folder_is_one_message(tmp_path):
    (tmp_path / "file").touch()
    message = r"run.dir=.*/file: cannot write '.*/file/a' \(Not a directory\). Use another run.dir."
    with pytest.raises(ConfigError, match=message), run_lock(tmp_path / "file" / "a"):
        pass


@pytest.mark.parametrize(("mode", "rights"), [("private", 0o700), ("group", 0o750), ("umask", 0o755)])
def test_new_run_folder_and_files_have_permissions_of_run_mode(tmp_path, mode, rights):
    old = os.umask(0o022)
    try:
        for path in (tmp_path / "runs" / "a", tmp_path / "runs" / "b" / "replica_1"):
            with run_lock(path, mode):
                assert stat.S_IMODE((path / ".lock").stat().st_mode) == rights & 0o666
                for folder in {path, *path.parents} - {tmp_path / "runs", *(tmp_path / "runs").parents}:
                    assert stat.S_IMODE(folder.stat().st_mode) == rights
                with new_files_like(path):
                    (path / "x").write_text("")
                    (path / "y").mkdir()
                EventLog(path / "events.jsonl")
            for name, wanted in (("x", rights & 0o666), ("y", rights), ("events.jsonl", rights & 0o644)):
                assert stat.S_IMODE((path / name).stat().st_mode) == wanted, name
        assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o755
        # An existing folder keeps its permissions, which a user may have changed.
        path = tmp_path / "runs" / "a"
        path.chmod(0o750)
        with run_lock(path, mode), new_files_like(path):
            (path / "z").write_text("")
        assert stat.S_IMODE(path.stat().st_mode) == 0o750
        assert stat.S_IMODE((path / "z").stat().st_mode) == 0o640
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(old)
