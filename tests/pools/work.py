"""Functions that tests call on pools."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any


def square(x: int) -> int:
    return x * x


def slow_square(x: int) -> int:
    time.sleep(0.03)
    return x * x


def environment(x: int) -> list[Any]:
    return [sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS"), os.environ.get("CUDA_VISIBLE_DEVICES")]


def misbehave(kind: str) -> Any:
    """Misbehave in the way that `kind` selects, or return it."""
    if kind == "raise":
        raise ValueError("no good")
    if kind == "exit":
        sys.exit("bye")
    if kind == "die":
        os._exit(3)
    if kind == "hang":
        time.sleep(60)
    if kind == "orphans":
        subprocess.Popen(["sleep", "61.75"])
        time.sleep(60)
    if kind == "fork":
        os.fork()  # the child returns, too
    if kind == "print":
        line = "x" * 2**16
        for _ in range(1024):
            print(line)
        print("the end")
    if kind == "close":
        sys.stdout.close()
    odd = {"set": {1}, "nan": [float("nan")], "keys": {"a": {1: 2}}, "deep": _deep(), "long": 10**5000}
    return odd.get(kind, kind)


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def fail_once(path: str) -> str:
    """Die at the first call."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "second"
    os._exit(1)


def two(a: int, b: int) -> int:
    return a + b


number = 3


def kill_parent_once(path: str) -> str:
    """Kill the process that supervises this one, at the first call with a path of a folder that exists."""
    if "/" not in path:
        return "first"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "second"
    os.kill(os.getppid(), 9)
    time.sleep(60)
    return "never"
