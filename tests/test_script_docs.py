"""The scripts of docs/how-to/save_and_load.md and adapters.md run as pasted, on one process and on two ranks."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from weft import env

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
#: Runs the scripts in one process: importing torch and transformers costs more than the scripts.
#: One start of torchrun has a store for one group, so each script has its own port.
ALL = """
import os, runpy, sys
for port, path in zip(*[iter(sys.argv[1:])] * 2):
    os.environ.update(MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")
    runpy.run_path(path, run_name="__main__")
"""


def run(*command: str, home: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command],
        env=env.child_env(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", CI="true"),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


#: On two ranks the gate runs the README's script: tests/test_examples.py.
@pytest.mark.parametrize(
    ("pages", "on_ranks"),
    [(("save_and_load",), False), pytest.param(("save_and_load", "adapters"), True, marks=pytest.mark.full)],
    ids=["one process", "all pages, and on two ranks"],
)
def test_page_scripts_run_on_one_process_and_on_two_ranks(pages, on_ranks, tmp_path):
    text = "\n".join((PAGES / f"{page}.md").read_text() for page in pages)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    paths = [tmp_path / f"script_{index}.py" for index in range(len(blocks))]
    for path, block in zip(paths, blocks, strict=True):
        path.write_text(block)
    driver = tmp_path / "all.py"
    driver.write_text(ALL)
    scripts = [word for path in paths for word in (str(free_port()), str(path))]
    alone = run(str(driver), *scripts, *scripts[:2], home=tmp_path)
    assert alone[0] == "step 24, started anew"
    assert alone[-1] == "step 24, resumed"
    assert len(alone) == len(blocks) + 1
    if not on_ranks:
        return
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    together = run(*torchrun, str(driver), *scripts, home=tmp_path)
    assert together == ["step 24, resumed", *alone[1:-1]]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
