"""Every mistake in a config gives one line with the key and its position in the file or command line."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.spec.broken import BASE, Case, broken_configs
from weft.config.files import load_config
from weft.errors import ConfigError

RAW_PYDANTIC = re.compile(
    r"Input should|validation error|pydantic|type=|Traceback|Field required|should be a valid", re.IGNORECASE
)


def write(case: Case, path) -> int | None:
    """Write the broken file. Return the line of its syntax error, if any."""
    lines = tomli_w.dumps(case.tables).splitlines()
    if case.text_break is None:
        path.write_text("\n".join(lines) + "\n")
        return None
    kind, index = case.text_break
    # Insert between statements: inside a list, a line may continue the previous one.
    positions = [at for at in range(len(lines) + 1) if at == len(lines) or re.match(r"\[[a-z]", lines[at])]
    at = positions[index % len(positions)]
    added = {"bytes": "# \udcff", "twice": "[late]\nx = 1\nx = 2", "section twice": "[late]\n[late]"}.get(kind, kind)
    lines[at:at] = added.split("\n")
    path.write_bytes(("\n".join(lines) + "\n").encode(errors="surrogateescape"))
    return at + len(added.split("\n"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("broken")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=broken_configs())
def test_broken_configs_raise_one_sentence_per_mistake(folder, case):
    path = folder / "broken.toml"
    line = write(case, path)
    with pytest.raises(ConfigError) as caught:
        load_config(path, case.overrides)
    text = str(caught.value)
    problems = caught.value.problems
    assert not RAW_PYDANTIC.search(text), text
    assert text.splitlines() == [str(problem) for problem in problems]
    assert all(problem.message.endswith((".", "?", "...")) for problem in problems), text
    assert all(len(str(problem)) < 500 for problem in problems), text
    if line is not None:
        # An open bracket is detected at the next statement.
        found = int(re.fullmatch(rf"{re.escape(str(path))}:(\d+)", problems[0].origin)[1])
        assert found >= line
        opened = case.text_break[0] == "z = [1, 2"
        assert found == line or opened, text
        return
    for name in case.names:
        assert name in text, (name, text)
    typed = path.read_text().splitlines()
    for problem in problems:
        file, _, number = problem.origin.rpartition(":")
        if problem.origin == "command line" or problem.field.split(".")[-1].isdigit():
            continue
        assert file == str(path), problem
        # The error's line has the key itself, a one-line plan, or the other key of the broken rule.
        keys = [*problem.field.split("."), "plan", "steps", "model"]
        assert any(key in typed[int(number) - 1] for key in keys), problem


def test_base_config_is_valid(tmp_path):
    path = tmp_path / "base.toml"
    path.write_text(tomli_w.dumps(BASE))
    load_config(path)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_load_or_raise_config_error(folder, data):
    path = folder / "any.toml"
    path.write_bytes(data)
    try:
        load_config(path)
    except ConfigError as error:
        problems = error.problems
    else:
        problems = ()
    assert all(len(str(problem).splitlines()) == 1 for problem in problems)


@settings(max_examples=60, deadline=None)
@given(overrides=st.lists(st.text(max_size=20) | st.sampled_from(["seed=", "plan.", "data.train."]), max_size=3))
def test_any_overrides_load_or_raise_config_error(overrides):
    joined = [*overrides, "".join(overrides)]
    try:
        load_config(None, joined)
    except ConfigError as error:
        problems = error.problems
    else:
        problems = ()
    assert all(len(str(problem).splitlines()) == 1 for problem in problems)


FILES = {
    b"[optimizer]\nlerning_rate = 1\n": ":2: unknown key 'optimizer.lerning_rate'. Did you mean 'optimizer.lr'?",
    b"seed = 1\nseed = 2\n": ":2: this is not TOML: cannot overwrite a value in 'seed = 2'. Keep one",
    b"seed = 1\n# \xff\n": ":2: byte 0xff is not valid UTF-8. Save the file as UTF-8.",
    b"plan = 'sp=on'\n": ":1: plan.sp=on: sequence parallelism needs tp of at least 2",
    b"": "command line: unknown key 'nonsense'.",
}


@pytest.mark.parametrize("data", FILES)
def test_cli_prints_the_errors_and_exits_with_2(tmp_path, data):
    path = tmp_path / "bad.toml"
    path.write_bytes(data)
    command = [sys.executable, "-m", "weft", "config", "show", str(path), "nonsense=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert FILES[data] in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
