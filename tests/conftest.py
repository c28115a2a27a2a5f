"""Shared fixtures. Ranks are started once per session: a start takes seconds, a case little time."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from tests.tools import warm_python
from weft.checkpoint.object_store import StorePath
from weft.verify.rank_pool import RankPool

torch.set_num_threads(1)

#: Modules of ranks: those of `RankPool`, and models of transformers.
IMPORTED_BY_RANKS = [
    "torch._dynamo", "weft.verify.verifier", "weft.train.script.script_run", "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.mixtral.modeling_mixtral", "transformers.models.bert.modeling_bert",
]  # fmt: skip
#: Seconds of each test file on two cores, from the last complete run with `--write-durations`.
DURATIONS = Path(__file__).with_name("durations.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-plans", action="store_true", help="parity: every legal plan, not a choice with all pairs")
    parser.addoption(
        "--write-durations", action="store_true", help="write tests/durations.json, which orders the files"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationWriter())


class DurationWriter:
    """Sum the seconds of each test file and write the files that take 5 s or more."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        found = {name: round(seconds) for name, seconds in self.seconds.most_common() if seconds >= 5}
        DURATIONS.write_text(json.dumps(found, indent=0) + "\n")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Freeze collected tests and imported modules: two million objects, and 2 s for each full garbage collection.

    A run in this process requests one such collection, and a test may make five runs.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After each file, freeze imported modules and cached objects."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            if (absl := sys.modules.get("absl.logging")) is not None:
                # dp_accounting imports absl, whose handler has pytest's stream of the moment. uvicorn closes handlers,
                # and absl closes its stream then, unless it is the process's own.
                absl.get_absl_handler().python_handler.stream = sys.__stderr__
            gc.collect()
            gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by duration, longest first, so that the workers end at the same time.

    This needs `--no-loadscope-reorder`: without it xdist starts with the file that has the most tests.
    """
    seconds: dict[str, int] = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))


@pytest.fixture(scope="session", autouse=True)
def forks_of_programs() -> None:
    """Let tests start programs as forks: see tests/tools/warm_python.py."""
    if sys.platform == "linux":
        warm_python.install()


@pytest.fixture
def forked_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start Weft's programs as forks in this test."""
    monkeypatch.setenv(warm_python.FORKS, "1")


@pytest.fixture(scope="session")
def imports_of_ranks() -> None:
    """Start the process that ranks are forked from, with the imports of most tests."""
    forkserver.set_forkserver_preload(IMPORTED_BY_RANKS)
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def ranks2(imports_of_ranks: None):
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4(imports_of_ranks: None):
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def s3():
    """Start moto's S3 server with an empty bucket, and set its variables. Yield the bucket's address."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("s3fs"), pytest.importorskip("moto")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "KEYNAME",
             "AWS_SECRET_ACCESS_KEY": "KEYWORD", "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
    before = dict(os.environ)
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        os.environ.update(names)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # instances of another server
        fsspec.filesystem("s3").mkdir("bucket")
        yield StorePath("s3://bucket")
    finally:
        server.kill()
        server.wait()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def prepares_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `weft train` check a run in this process, which has the modules loaded. For refused runs."""

    def no_server(*words: object) -> None:
        raise OSError("no server of ranks in this test")

    monkeypatch.setattr("weft.cli.launch.fork_server.ForkServer", no_server)
