"""Weft's errors in a user's script: one message, no traceback, and the exit code of the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.tools.warm_python import FORKS
from weft import env
from weft.errors import DataError, ModelError
from weft.train.script.other_trainers import refuse_other_trainers
from weft.train.script.script_errors import report_user_errors

SCRIPT = """
import torch, weft
run = weft.init("dp_replicate=*", device="cpu")
run.parallelize(torch.nn.Linear(2, 2).double())
"""


@pytest.fixture
def plain_hook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.delenv("WEFT_TRACEBACK", raising=False)


def raised(error):
    try:
        raise error
    except Exception as caught:
        return type(caught), caught, caught.__traceback__


def test_two_ranks_print_one_message(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=env.child_env(OMP_NUM_THREADS="1", **{FORKS: "1"}),
        check=False,
    )
    assert ended.stderr.count("weft: error: precision=fp32: parameter 'weight' is float64") == 1
    assert f"(ModelError at {script}:4; WEFT_TRACEBACK=1 prints the traceback)" in ended.stderr
    assert "parallelize.py" not in ended.stderr
    assert "exitcode  : 2" in ended.stderr


@pytest.mark.usefixtures("plain_hook")
def test_error_prints_its_message_and_sets_the_exit_code(capsys):
    report_user_errors()
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(*raised(DataError("data.train=x: no such file. Name one.")))
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("weft: error: data.train=x: no such file. Name one.\n  (DataError at ")
    assert "Traceback" not in message


@pytest.mark.usefixtures("plain_hook")
def test_other_errors_keep_their_traceback(capsys):
    report_user_errors()
    sys.excepthook(*raised(KeyError("own")))
    assert "KeyError: 'own'" in capsys.readouterr().err


@pytest.mark.usefixtures("plain_hook")
def test_excepthooks_of_others_are_not_replaced(monkeypatch):
    def own(*args):
        pass

    monkeypatch.setattr(sys, "excepthook", own)
    report_user_errors()
    assert sys.excepthook is own
    # torch.distributed wraps an existing hook.
    wrapped: dict[str, object] = {"__name__": "torch.distributed.distributed_c10d"}
    exec("def wrap(old):\n    def hook(*args):\n        old(*args)\n    return hook", wrapped)
    for inside, is_taken in ((own, False), (sys.__excepthook__, True)):
        monkeypatch.setattr(sys, "excepthook", wrapped["wrap"](inside))
        before = sys.excepthook
        report_user_errors()
        assert (sys.excepthook is not before) == is_taken


@pytest.mark.usefixtures("plain_hook")
def test_traceback_is_printed_on_request(monkeypatch):
    monkeypatch.setenv("WEFT_TRACEBACK", "1")
    report_user_errors()
    assert sys.excepthook is sys.__excepthook__


@pytest.mark.parametrize(
    ("module", "name"), [("transformers.trainer", "transformers.Trainer"), ("lightning.pytorch.loops", "Lightning")]
)
def test_trainers_of_other_libraries_are_rejected(module, name):
    library: dict[str, object] = {"__name__": module}
    exec("def run(model, x):\n    return model(x)", library)
    model = nn.Linear(2, 2)
    refuse_other_trainers(model)
    with pytest.raises(ModelError, match=rf"^model of type Linear: {name} runs it, .* leave {name} out\.$"):
        library["run"](model, torch.ones(1, 2))
    own = nn.Linear(2, 2)
    refuse_other_trainers(own)
    own(torch.ones(1, 2))
    library["run"](own, torch.ones(1, 2))  # checked only once
