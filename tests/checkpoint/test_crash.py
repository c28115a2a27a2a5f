"""Writers that are killed, or whose disk is full, at every single file system call."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weft.checkpoint.load import list_checkpoints, load_checkpoint, newest_checkpoint, verify_checkpoint
from weft.checkpoint.prune import prune_checkpoints
from weft.checkpoint.save import save_checkpoint
from weft.errors import CheckpointError

from .faults import DONE, FAILED, content, die, disk_full, fault_at_call, in_fork, names, save


def assert_complete(path: Path) -> str:
    """Check that the checkpoint has exactly the saved content of its step; return its tag."""
    checkpoint = load_checkpoint(path, verify=True)
    tensors, state = content(checkpoint.step, checkpoint.state["tag"])
    assert checkpoint.state == state
    for group, members in tensors.items():
        loaded = checkpoint.tensors(group)
        assert set(loaded) == set(members)
        for name, tensor in members.items():
            torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)
    return checkpoint.state["tag"]


def at_every_call(tmp_path: Path, before: list[int], action: Callable[[Path], object], fault: Callable[[], None]):
    """Yield (root, exit status) for a fault at the 1st, 2nd, ... call, until the action completes without one."""
    for call in range(1, 500):
        root = tmp_path / f"at_{call}"
        root.mkdir()
        for step in before:
            save(root, step)
        status = in_fork(lambda root=root: action(root), fault_at_call(root, call, fault))
        yield root, status
        shutil.rmtree(root)
        if status == DONE:
            assert call > 10, "the faults did not reach the writer"
            return
    raise AssertionError("the action never ran through")


def test_kill_anywhere_while_saving_a_new_step(tmp_path):
    steps = []
    for root, status in at_every_call(tmp_path, [1, 2], lambda root: save(root, 3), die):
        assert status in (DONE, -signal.SIGKILL)
        found = newest_checkpoint(root)
        assert found is not None
        assert_complete(found.path)
        steps.append(found.step)
        assert assert_complete(save(root, 3)) == "first"
        assert names(root) == ["step_00000001", "step_00000002", "step_00000003"]
    assert steps == sorted(steps)  # Once the new step is valid, it stays valid.
    assert set(steps) == {2, 3}


@pytest.mark.full
def test_kill_anywhere_while_saving_the_first_step(tmp_path):
    seen = []
    for root, _ in at_every_call(tmp_path, [], lambda root: save(root, 1), die):
        found = newest_checkpoint(root)
        assert (found is None) == (list_checkpoints(root) == [])
        seen.append(found is not None)
        if found is not None:
            assert_complete(found.path)
    assert seen[0] is False
    assert seen[-1] is True


def test_kill_anywhere_while_saving_a_step_again(tmp_path):
    tags = []
    for root, _ in at_every_call(tmp_path, [1, 2], lambda root: save(root, 2, "second"), die):
        found = newest_checkpoint(root)
        assert found is not None
        assert found.step == 2  # A complete copy of the step exists at all times.
        tags.append(assert_complete(found.path))
        assert list_checkpoints(root)[-1] == found.path
        save(root, 3)  # The next save removes partial files.
        assert names(root) == ["step_00000001", "step_00000002", "step_00000003"]
        assert assert_complete(root / "step_00000002") == tags[-1]
    assert tags == sorted(tags)
    assert set(tags) == {"first", "second"}


@pytest.mark.full
def test_kill_anywhere_while_pruning(tmp_path):
    for root, _ in at_every_call(tmp_path, [1, 2, 3, 4], lambda root: prune_checkpoints(root, 2) and DONE, die):
        found = newest_checkpoint(root)
        assert found is not None
        assert found.step == 4
        for path in list_checkpoints(root):
            assert_complete(path)
        prune_checkpoints(root, 1)
        save(root, 5)
        assert names(root) == ["step_00000004", "step_00000005"]


def test_full_disk_anywhere_keeps_older_checkpoints_and_leaves_no_debris(tmp_path):
    def action(root: Path) -> int:
        try:
            save(root, 3)
        except CheckpointError:
            return FAILED
        return 1 if os.path.exists(root / "step_00000003" / "COMMIT") else 2

    # A fault may also hit the deletion of debris, which is harmless; then the save succeeds with status 1.
    statuses = []
    for call in range(1, 500):
        root = tmp_path / f"at_{call}"
        for step in (1, 2):
            save(root, step)
        status = in_fork(lambda root=root: action(root), fault_at_call(root, call, disk_full))
        statuses.append(status)
        assert status in (1, FAILED)
        found = newest_checkpoint(root)
        assert found is not None
        assert_complete(found.path)
        assert found.passed_over == ()
        assert found.step == (3 if status == 1 else 2)
        assert [name for name in names(root) if name.startswith((".tmp", "step_00000003"))] == (
            ["step_00000003"] if status == 1 else []
        )
        if statuses[-5:] == [1] * 5:
            break
    assert statuses.count(FAILED) > 15


def test_kill_at_random_times_while_writing_larger_files(tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(1_500_000)
    chance = random.Random(3)

    def write_forever(first: int) -> None:
        for step in range(first, first + 10_000):
            save_checkpoint(tmp_path, step, {"model": {"w": weight, "v": weight[:7]}}, {"step": step})
            prune_checkpoints(tmp_path, 2)

    newest = 0
    for _ in range(10):
        child = os.fork()
        if child == 0:
            try:
                write_forever(newest + 1)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.03, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = newest_checkpoint(tmp_path)
        if found is None:
            continue
        assert found.step >= newest
        newest = found.step
        loaded = load_checkpoint(found.path, verify=True)
        assert torch.equal(loaded.tensors("model")["w"], weight)
        assert loaded.state == {"step": newest}
    assert newest > 3


def test_file_size_limit_is_a_checkpoint_error(tmp_path):
    save(tmp_path, 1)
    large = {"model": {"w": torch.zeros(2_000_000)}}

    def action() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
        try:
            save_checkpoint(tmp_path, 2, large, {})
        except CheckpointError as error:
            return FAILED if "could not be written (File too large)" in str(error) else 5
        return 6

    assert in_fork(action) == FAILED
    assert names(tmp_path) == ["step_00000001"]
    assert_complete(tmp_path / "step_00000001")


def test_insufficient_disk_space_is_detected_before_writing(tmp_path, monkeypatch):
    save(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5_000_000))
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, 2, {"model": {"w": torch.zeros(1_000_000, dtype=torch.float64)}}, {})
    assert str(caught.value) == (
        f"run.dir={tmp_path}: the checkpoint needs 8.63 MiB (9049093 bytes), and 4.77 MiB (5000000 bytes) are free."
        " Free 3.86 MiB or choose another run.dir, and run the command again."
    )
    assert names(tmp_path) == ["step_00000001"]
    assert save_checkpoint(tmp_path, 2, {"model": {"w": torch.zeros(100)}}, {}).is_dir()


def test_two_concurrent_writers_exclude_each_other(tmp_path):
    save(tmp_path, 1)
    ready, go = os.pipe(), os.pipe()

    def take_lock() -> int:
        from weft.checkpoint import folders

        with folders.writer_lock(tmp_path):
            os.write(ready[1], b"x")
            os.read(go[0], 1)
        return DONE

    child = os.fork()
    if child == 0:
        try:
            take_lock()
        finally:
            os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(CheckpointError, match="another process is saving a checkpoint here"):
        save(tmp_path, 2)
    os.kill(child, signal.SIGKILL)  # The lock ends with its owner.
    os.waitpid(child, 0)
    assert verify_checkpoint(save(tmp_path, 2)) == []


def test_interrupt_leaves_no_debris(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.checkpoint.save._commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step_00000001"]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.passed_over) == (1, ())
