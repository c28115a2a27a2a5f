"""Scripts of docs/how-to run as pasted, on one process and on two ranks: save_and_load.md, adapters.md, from_*.md."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.tools.warm_python import FORKS
from weft import env
from weft.cli.app import run as weft
from weft.config.files import load_config

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
        env=env.child_env(
            OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", CI="true", ACCELERATE_USE_CPU="true", **{FORKS: "1"}
        ),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


#: On two ranks the gate runs the README's script: tests/test_examples.py.
@pytest.mark.parametrize(
    ("pages", "on_ranks"),
    [(("save_and_load",), False), pytest.param(("save_and_load", "adapters"), True, marks=pytest.mark.full)],
    ids=["one process", "all pages, and on two ranks"],
)
def test_page_scripts_run_on_one_process_and_on_two_ranks(pages, on_ranks, tmp_path):
    blocks = [block for page in pages for block in blocks_of(page, "python")]
    driver, scripts = written(blocks, tmp_path)
    alone = run(driver, *scripts, *scripts[:2], home=tmp_path)
    assert alone[0] == "step 24, started anew"
    assert alone[-1] == "step 24, resumed"
    assert len(alone) == len(blocks) + 1
    if not on_ranks:
        return
    together = run(*TORCHRUN, driver, *scripts, home=tmp_path)
    assert together == ["step 24, resumed", *alone[1:-1]]


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.M | re.S)


def written(blocks: list[str], folder: Path) -> tuple[str, list[str]]:
    """Write a driver and the scripts. Return the driver's path, and a port and a path for each script."""
    (folder / "all.py").write_text(ALL)
    for index, block in enumerate(blocks):
        (folder / f"script_{index}.py").write_text(block)
    words = [(str(free_port()), str(folder / f"script_{index}.py")) for index in range(len(blocks))]
    return str(folder / "all.py"), [word for pair in words for word in pair]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


#: Pages with a script of another library and one of Weft with the same result.
JOBS = ("from_fsdp", "from_lightning", "from_accelerate", "from_torchrec", "from_jax")
KERAS_JOBS = ("from_tensorflow",) if importlib.util.find_spec("keras") else ()


def test_scripts_for_switchers_run_on_one_process(tmp_path):
    blocks = [blocks_of(page, "python") for page in (*JOBS, *KERAS_JOBS)]
    for before, _ in blocks:
        compile(before, "before", "exec")
    driver, scripts = written([after for _, after in blocks], tmp_path)
    results = run(driver, *scripts, home=tmp_path)
    assert [line.split()[0] for line in results] == [
        "weights",
        "loss",
        "weights",
        "loss",
        "loss",
        *["loss" for _ in KERAS_JOBS],
    ]


@pytest.mark.full
def test_scripts_for_switchers_equal_those_of_the_other_library_on_two_ranks(tmp_path):
    pages = ["from_fsdp"] + ["from_accelerate"] * (importlib.util.find_spec("accelerate") is not None)
    blocks = [blocks_of(page, "python") for page in pages]
    # Accelerate's script is last, because its process group stays open.
    driver, scripts = written([after for _, after in blocks] + [before for before, _ in blocks], tmp_path)
    results = run(*TORCHRUN, driver, *scripts, home=tmp_path)
    assert results[: len(blocks)] == results[len(blocks) :]


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_jax_script_equals_that_of_weft(tmp_path):
    before, after = blocks_of("from_jax", "python")
    (tmp_path / "before.py").write_text(before)  # a process of its own, with two devices
    driver, script = written([after], tmp_path)
    assert run(*TORCHRUN, driver, *script, home=tmp_path) == run("before.py", home=tmp_path)


def test_config_for_megatron_is_valid(tmp_path):
    (tmp_path / "gpt.toml").write_text(blocks_of("from_megatron", "toml")[0])
    config = load_config(tmp_path / "gpt.toml").config
    assert (config.run.name, config.train.steps, len(config.data.train)) == ("gpt", 20, 2)


@pytest.mark.parametrize(("page", "name"), [("from_axolotl", "chats"), ("from_llamafactory", "alpaca")])
def test_imported_configs_equal_those_of_the_page(tmp_path, monkeypatch, capsys, page, name):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("imported").mkdir()
    Path("data/dataset_info.json").write_text('{"alpaca_en_demo": {"file_name": "alpaca_en_demo.json"}}')
    Path(f"{name}.yaml").write_text(blocks_of(page, "yaml")[0])
    assert weft(["config", "import", f"{name}.yaml", "--world-size", "4", "--out", f"imported/{name}.toml"]) == 0
    Path(f"{name}.toml").write_text(blocks_of(page, "toml")[0])
    assert "not supported" not in capsys.readouterr().out
    assert load_config(f"imported/{name}.toml").config == load_config(f"{name}.toml").config


@pytest.mark.full
def test_commands_for_switchers_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    texts = [f"line {number}: the warp crosses the weft {number * 7919} times" for number in range(400)]
    for name in ("books", "web", "c4"):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {text}"}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    Path("tokenizer").mkdir()
    tokenizer.save("tokenizer/tokenizer.json")
    Path("gpt.toml").write_text(blocks_of("from_megatron", "toml")[0])
    (command,) = [block for block in blocks_of("from_fsdp", "sh") if block.startswith("weft ")]
    for words in (["train", "gpt.toml"], shlex.split(command)[1:]):
        assert weft(words) == 0, capsys.readouterr()
