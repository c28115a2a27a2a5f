"""The command line: start-up, unknown commands, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft.cli import app as main
from weft.cli.launch.launch import Stopped
from weft.errors import CommError, ConfigError, Problem, TrainingHalted, WeftError

#: Modules that commands such as --help must not import.
HEAVY = ("torch", "numpy", "pyarrow", "tokenizers", "matplotlib", "transformers", "psutil", "pynvml")


def modules_after(program: str) -> set[str]:
    """Return the top-level modules that a new interpreter has loaded after `program`."""
    code = f"import sys\n{program}\nprint('|'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split("|")}


@pytest.mark.parametrize(
    "program",
    [
        "import weft",
        "from weft.cli.app import run; run(['--help'])",
        "from weft.cli.app import run; run(['version'])",
    ],
)
def test_help_and_version_import_no_heavy_module(program):
    assert modules_after(program).isdisjoint(HEAVY)


def test_help_does_not_build_config_models():
    assert "pydantic" not in modules_after("import weft; from weft.cli.app import run; run(['--help'])")


def test_help_names_every_verb(capsys):
    assert main.run(["--help"]) == 0
    out = capsys.readouterr().out
    for name, verb in main.VERBS.items():
        assert f"{name} " in out
        assert verb.help.split()[0] in out


@pytest.mark.parametrize("words", [[], ["config"], ["data"]])
def test_no_arguments_show_help(capsys, words):
    assert main.run(words) == 0
    captured = capsys.readouterr()
    assert "Usage: weft" in captured.out
    assert "Commands:" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("words", [["version"], ["--version"]])
def test_version(capsys, words):
    import weft

    assert main.run(words) == 0
    assert capsys.readouterr().out == f"{weft.__version__}\n"


def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "weft", "trian"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "error: unknown command 'trian'. Did you mean 'train'?"


@pytest.mark.parametrize(
    "words, line",
    [
        (["trian"], "error: unknown command 'trian'. Did you mean 'train'?"),
        (["xyzzy"], f"error: unknown command 'xyzzy'. Known: {', '.join(main.VERBS)}."),
        (["generate", "--promt", "x", "runs/a"], "error: unknown option '--promt'. Did you mean '--prompt'?"),
        (["generate"], "error: Missing argument 'RUN'."),
        (
            ["train", "--lr", "3"],
            "error: unknown option '--lr'. Write settings without dashes: optimizer.lr=... or tables.lr=...",
        ),
        (
            ["train", "--train.steps", "3"],
            "error: unknown option '--train.steps'. Write settings without dashes: train.steps=...",
        ),
    ],
)
def test_unknown_commands_are_one_line_with_exit_code_2(capsys, words, line):
    assert main.run(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == line
    assert "Traceback" not in captured.err
    assert "--help` for usage." in captured.err


def fail_with(monkeypatch, error: BaseException) -> None:
    def version() -> None:
        """Raise `error`."""
        raise error

    monkeypatch.setattr("weft.cli.app.version", version)


@pytest.mark.parametrize(
    "error, code, text",
    [
        (WeftError("lr=0: must be more. Use 1e-3."), 2, "error: lr=0: must be more. Use 1e-3.\n"),
        (CommError("rank 1 is gone."), 1, "error: rank 1 is gone.\n"),
        (TrainingHalted("loss is NaN."), 3, "error: loss is NaN.\n"),
        (
            ConfigError([Problem("a", "a=1: no.", "x.toml:3"), Problem("b", "b=2: no.", "command line")]),
            2,
            "error: x.toml:3: a=1: no.\nerror: command line: b=2: no.\n",
        ),
        (Stopped(15, "stopped by SIGTERM."), 143, "weft: stopped by SIGTERM.\n"),
        (KeyboardInterrupt(), 130, "weft: interrupted.\n"),
    ],
)
def test_weft_errors_have_no_traceback(monkeypatch, capsys, error, code, text):
    fail_with(monkeypatch, error)
    assert main.run(["version"]) == code
    assert capsys.readouterr().err == text


def test_internal_error_keeps_its_traceback(monkeypatch):
    fail_with(monkeypatch, ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        main.run(["version"])


def test_closed_pipe_is_no_error():
    command = (
        f"{sys.executable} -c \"import sys; from weft.cli.app import main; sys.argv[1:] = ['--help']; main()\" | true"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == ""
