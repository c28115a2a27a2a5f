"""`weft.pool`: results in order, failures of functions and workers, folders, and engines of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

import weft
from tests.pools import work
from weft import env
from weft.errors import ConfigError, PoolError, TasksFailed
from weft.pools import engines
from weft.pools.supervisor import KEPT_OUTPUT_BYTES, Output

ROOT = Path(__file__).parents[2]


def test_results_are_in_order_and_workers_stay_warm():
    with weft.pool("local:3") as pool:
        assert pool.map(work.square, range(20)) == [x * x for x in range(20)]
        began = time.monotonic()
        assert pool.map("tests.pools.work:square", iter([3])) == [9]
        assert time.monotonic() - began < 5
        assert pool.map(work.square, []) == []


@pytest.mark.parametrize(
    "executor",
    [lambda: ThreadPoolExecutor(2), lambda: ProcessPoolExecutor(2, get_context("spawn"))],
    ids=["threads", "processes"],
)
def test_any_executor_serves_and_stays_open(executor):
    with executor() as own:
        with weft.pool(own, timeout=30) as pool:
            assert pool.map(work.square, range(5)) == [0, 1, 4, 9, 16]
        assert own.submit(work.square, 3).result() == 9


def test_failures_leave_other_tasks_alone(tmp_path):
    kinds = [
        "ok",
        "raise",
        "exit",
        "die",
        "hang",
        "fork",
        "set",
        "nan",
        "keys",
        "deep",
        "long",
        "close",
        "print",
        "after",
    ]
    with weft.pool("local:3", timeout=2, retries=1) as pool, pytest.raises(TasksFailed) as caught:
        pool.map(work.misbehave, kinds, tmp_path)
    by_kind = {kinds[index]: text for index, text in caught.value.errors.items()}
    assert by_kind == {
        "raise": "ValueError: no good",
        "exit": "SystemExit: bye",
        "die": "its worker ended with exit code 3",
        "hang": "it took more than 2 s and was killed",
        "set": "result is a set, which JSON lacks. Return numbers, texts, lists and dicts with text keys.",
        "nan": "result[0] is nan, which JSON lacks. Return numbers, texts, lists and dicts with text keys.",
        "keys": "result['a'] has the key 1 of type int, which JSON lacks. "
        "Return numbers, texts, lists and dicts with text keys.",
        "deep": "result is nested too deep or contains itself, which JSON lacks. "
        "Return numbers, texts, lists and dicts with text keys.",
        "long": "result is an integer of 16,610 bits, which JSON lacks. "
        "Return numbers, texts, lists and dicts with text keys.",
    }
    expected = [None if kind in by_kind else kind for kind in kinds]
    assert caught.value.results == expected
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line.get("result") for line in lines] == expected
    assert [line["attempts"] for line in lines][3:5] == [2, 2]
    assert 'raise ValueError("no good")' in lines[1]["traceback"]
    assert "weft" not in lines[1]["traceback"]
    log = (tmp_path / "logs" / f"{kinds.index('print')}.log").read_text()
    assert len(log) < 3 * KEPT_OUTPUT_BYTES
    assert log.endswith("the end\n")
    assert "bytes left out" in log


def test_a_task_whose_worker_died_is_tried_again(tmp_path):
    with weft.pool("local:2") as pool:
        assert pool.map(work.fail_once, [str(tmp_path / name) for name in "ab"]) == ["second"] * 2
    with weft.pool("local:1", retries=0) as pool, pytest.raises(TasksFailed):
        pool.map(work.fail_once, [str(tmp_path / "c")])


def test_output_keeps_its_start_and_end():
    output = Output()
    for n in range(30):
        output.add(bytes([65 + n % 26]) * 5000)
    text = output.text()
    assert text.startswith("A" * 5000 + "B" * 5000)
    assert text.endswith("D" * 5000)
    assert f"[{30 * 5000 - 2 * KEPT_OUTPUT_BYTES} bytes left out]" in text


def test_a_folder_does_only_the_missing_tasks(tmp_path):
    with weft.pool("local:2", timeout=1, retries=0) as pool:
        with pytest.raises(TasksFailed):
            pool.map(work.misbehave, ["a", "raise", "b"], tmp_path)
        first = (tmp_path / "journal.jsonl").read_text().splitlines()
        with pytest.raises(TasksFailed):
            pool.map(work.misbehave, ["a", "raise", "b"], tmp_path)
        second = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert len(first) == 3
    assert [json.loads(line[9:])["item"] for line in second[3:]] == [1]


def test_folders_of_other_maps_are_refused(tmp_path):
    home = tmp_path / "map"
    with weft.pool("local:1") as pool:
        pool.map(work.square, [1, 2], home)
        with pytest.raises(ConfigError, match=r"has results of tests.pools.work:square, not of tests.pools.work:slow_"):
            pool.map(work.slow_square, [1, 2], home)
        with pytest.raises(ConfigError, match=r"has results of 2 other items\. Give another folder"):
            pool.map(work.square, [1, 3], home)
        (tmp_path / "photo.jpg").touch()
        with pytest.raises(ConfigError, match=r"it has other files, such as photo.jpg. Give a new folder"):
            pool.map(work.square, [1], tmp_path)
        (home / "map.json").write_text("{")
        with pytest.raises(ConfigError, match="it is damaged"):
            pool.map(work.square, [1, 2], home)


def test_a_damaged_journal_loses_only_its_bad_lines(tmp_path):
    with weft.pool("local:1") as pool:
        pool.map(work.square, range(5), tmp_path)
        path = tmp_path / "journal.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(lines[0] + lines[1].replace(b'"result"', b'"resulT"') + lines[2] + lines[3] + lines[4][:-9])
        assert pool.map(work.square, range(5), tmp_path) == [0, 1, 4, 9, 16]
        assert len(path.read_bytes().splitlines()) == 6  # four kept, and the two that ran again


def test_two_commands_on_one_folder(tmp_path):
    with weft.pool("local:1") as pool:
        thread = threading.Thread(target=lambda: pool.map(work.slow_square, range(40), tmp_path))
        thread.start()
        while not (tmp_path / "map.json").exists():
            time.sleep(0.01)
        with weft.pool("local:1") as other, pytest.raises(ConfigError, match="another command is working in it"):
            other.map(work.slow_square, range(40), tmp_path)
        thread.join()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.pools.work:sqare", "tests.pools.work has no 'sqare'. Did you mean 'square'?"),
        ("tests.pools.wrk:square", "there is no module 'tests.pools.wrk'. Did you mean 'tests.pools.work'?"),
        ("nowhere_at_all:f", "there is no module 'nowhere_at_all'. Run the command in the folder that has it, or write "
         "path/to/file.py:function."),
        ("nowhere.py:f", "there is no file 'nowhere.py'. Check the path."),
        ("tests.pools.work:number", "it has the type int. Name a function of one argument."),
        ("tests.pools.work:two", "its parameters are (a, b), and it is called with one argument, the item. "
         "Write two(item)."),
    ],
)  # fmt: skip
def test_functions_that_cannot_be_called(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with weft.pool("local:1") as pool, pytest.raises(ConfigError) as caught:
        pool.map(name, [1], tmp_path / "map")
    assert str(caught.value) == f"function={name}: {said}"
    assert not (tmp_path / "map").exists()


def test_functions_without_a_name_are_refused():
    with weft.pool("local:1") as pool:
        for function in (lambda x: x, test_two_commands_on_one_folder.__call__, type("C", (), {"f": work.square})().f):
            with pytest.raises(ConfigError, match="Define it with def at the top of a module or script"):
                pool.map(function, [1])
        endless: list[object] = []
        endless.append(endless)
        for item, said in (
            ({2}, "it is a set"),
            (10**5000, "it is an integer of 16,610 bits"),
            (endless, "it is nested too deep"),
        ):
            with pytest.raises(ConfigError, match=rf"items\[1\]: {said}"):
                pool.map(work.square, [1, item])
        for name in ("tests.pools.work", "", ":f", "tests.pools.work:A.f"):
            with pytest.raises(ConfigError, match=r"it has no function's name. Write package.module:function"):
                pool.map(name, [1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"on": "lokal:2"}, "on=lokal:2: it has no engine 'lokal'. Did you mean 'local'? Write local:4"),
        ({"on": "local:x"}, "on=local:x: the number of workers must be from 1 to 9999"),
        ({"on": 4}, "on=4: it must be a text or an executor. Use on='local:4'."),
        ({"on": "local:64", "cores": 1000}, "cores=1000: 64 workers of 1000 cores do not fit"),
        ({"on": "local:1", "cores": 9999}, "of this machine. Use at most --cores "),
        ({"on": "local:1", "gpus": 2}, "gpus=2: 1 worker of 2 GPUs do not fit the 0 of this machine. Leave out --gpus"),
        ({"on": "slurm:gpu"}, "jobs of Slurm need a time limit. Add --timeout 1h"),
        ({"on": "slurm:", "timeout": "1h"}, "it needs a partition"),
        ({"on": "dask:here"}, "it needs a scheduler's host and port"),
        ({"on": "dask:h:8786", "cores": 2}, "a Dask worker gets its cores where it starts"),
        ({"timeout": "soon"}, "timeout=soon: 'soon' is not a duration"),
        ({"timeout": 0}, "timeout=0: it must be above 0"),
        ({"retries": -1}, "retries=-1: it must be a whole number from 0"),
        ({"cores": True}, "cores=True: it must be a whole number"),
    ],
)
def test_arguments_are_checked(arguments, said, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError) as caught, weft.pool(**arguments) as pool:
        pool.map(work.square, [1], tmp_path / "map")
    assert said in str(caught.value)


def test_cores_and_gpus_are_assigned(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    own = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-b,6")
    with weft.pool(f"local:{min(2, len(own))}", cores=1, gpus=1) as pool:
        found = pool.map(work.environment, range(20))
    assert {tuple(one[0]) for one in found} <= {(core,) for core in own[:2]}
    assert {one[1] for one in found} == {"1"}
    assert {(one[0][0], one[2]) for one in found} <= set(zip(own, ["4", "GPU-b"], strict=False))
    assert engines.visible_gpus() == ["4", "GPU-b", "6"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    fake = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, NVMLError=ValueError)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert engines.visible_gpus() == ["0", "1"]


def test_a_full_disk_is_named_and_finished_tasks_are_kept(tmp_path, monkeypatch):
    from weft.pools.task_folder import TaskFolder

    add = TaskFolder.add

    def full_after_two(self, index, outcome, log):
        if self.num_done == 2:
            self._journal.close()
            self._journal = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        add(self, index, outcome, log)

    with monkeypatch.context() as patched:
        patched.setattr(TaskFolder, "add", full_after_two)
        with weft.pool("local:1") as pool, pytest.raises(PoolError, match=r"the disk is full .*run the same command"):
            pool.map(work.square, range(5), tmp_path)
    with weft.pool("local:1") as pool:
        assert pool.map(work.square, range(5), tmp_path) == [0, 1, 4, 9, 16]
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 5


def test_the_commands_import_no_torch():
    modules = "weft.cli.inference.map, weft.pools.engines, weft.experiments.sweep_report"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def run_script(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    words = [sys.executable, str(path)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=path.parent, env=env.child_env())


def test_functions_of_scripts(tmp_path):
    script = "import weft\ndef f(x):\n    return x + 1\n"
    done = run_script(tmp_path / "a.py", script + "if __name__ == '__main__':\n    print(weft.pool().map(f, [1, 2]))\n")
    assert (done.stdout, done.stderr) == ("[2, 3]\n", "")
    done = run_script(tmp_path / "b.py", script + "print(weft.pool('local:1').map(f, [1, 2]))\n")
    assert 'which starts a pool again. Put the call under: if __name__ == "__main__":' in done.stderr
