"""Ranks are started once for the whole session: starting one costs seconds, running a case on it little."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from weft.checkpoint.object_store import StorePath
from weft.verify.rank_pool import RankPool

torch.set_num_threads(1)

#: Files that take half a minute and more. A worker that began one at the end would let the other one wait.
LONG = (
    "tools/gpu_sim/test_plans_on_paper",
    "parity/test_matrix",
    "parity/test_layouts",
    "parity/test_pipeline",
    "train/test_kill",
    "test_script_docs",
    "test_examples",
    "cli/test_launch",
    "parity/test_compile",
    "parity/test_adapters",
    "train/test_run",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-plans", action="store_true", help="parity: every legal plan, not a choice with all pairs")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Collected tests and imported modules stay: two million objects, and 2 s for each look of the garbage collector.

    A run in this process asks for one such look, and a test may run five of them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After each file: what its tests imported and cached stays too."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the workers `LONG` first, which takes `--no-loadscope-reorder`: xdist begins with the file of most tests."""
    place = {f"tests/{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


@pytest.fixture(scope="session")
def ranks2():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4():
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def s3():
    """moto's S3 server with an empty bucket, and the variables that lead there; the address of the bucket."""
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
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # those of another server
        fsspec.filesystem("s3").mkdir("bucket")
        yield StorePath("s3://bucket")
    finally:
        server.kill()
        server.wait()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def prepares_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft train`, called here, checks a run in this process, which has loaded what that takes: for refused runs."""

    def no_server(*words: object) -> None:
        raise OSError("no server of ranks in this test")

    monkeypatch.setattr("weft.cli.launch.fork_server.ForkServer", no_server)
