from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli.launch.rank import typed_command
from weft.train.folder import RunFolder
from weft.train.loop.reporting import with_setting


@pytest.mark.parametrize(
    ("argv", "parent", "command"),
    [
        (["/x/bin/weft", "train", "a.toml"], ["bash"], "weft train a.toml"),
        (["/x/weft/__main__.py", "train"], [], "python -m weft train"),
        (
            ["/x/bin/weft", "train", "a.toml"],
            ["/x/bin/python", "/x/bin/torchrun", "--nproc-per-node=2", "-m", "weft", "train", "a.toml"],
            "torchrun --nproc-per-node=2 -m weft train a.toml",
        ),
        (
            ["/x/weft/__main__.py", "train"],
            ["python3", "-m", "torch.distributed.run", "--nnodes=1", "-m", "weft", "train"],
            "python -m torch.distributed.run --nnodes=1 -m weft train",
        ),
    ],
)
def test_typed_command_is_reconstructed(argv: list[str], parent: list[str], command: str) -> None:
    assert " ".join(typed_command(argv, parent)) == command


def test_one_setting_is_changed_and_the_rest_quoted() -> None:
    folder = RunFolder(Path("runs/my run"))
    words = ["weft", "train", "train.steps=40", "plan=dp_replicate=2 zero=1", "resume.step=20"]
    assert with_setting(words, folder, "train.steps", 80) == "weft train 'plan=dp_replicate=2 zero=1' train.steps=80"
    assert with_setting(["weft", "train", "train.epochs=2"], folder, "train.steps", 80) == "weft train train.steps=80"
    assert with_setting((), folder, "train.steps", 80) == "weft train 'runs/my run/config.toml' train.steps=80"
