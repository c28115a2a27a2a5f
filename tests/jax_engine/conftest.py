"""Tests of the JAX engine run in a process of their own, which `test_in_processes.py` starts.

A process that has imported jax may not fork, which other tests do, and its number of devices is fixed at its first use.
"""

from __future__ import annotations

import os
from pathlib import Path

#: Environment variable of the process that runs the files.
INSIDE = "WEFT_TEST_JAX"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_")
    is_starter = collection_path.name == "test_in_processes.py"
    return True if is_test and is_starter == (INSIDE in os.environ) else None
