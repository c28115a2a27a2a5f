"""Config files: reading, checking, printing and round trips."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.files import LoadedConfig, format_config, load_config
from weft.config.run_config import RunConfig, SourceSection
from weft.errors import ConfigError

MANY = b"""plan = "dp_shrad=4 zero=9"
sed = 3
learning_rate = 3
[optimizer]
lr = "0.1"
bettas = 3
betas = [0.9]
[train]
seq_len = 5000
global_batch = 0
[launch]
ranks = "al"
[optimiser]
lr = 3
[[data.train]]
pth = "x"
[data]
holdout = nan
""".replace(b"[data]\nholdout", b"[eval]\nevery")
MANY_LINES = """\
FILE:1: unknown plan field 'dp_shrad'. Did you mean 'dp_shard'?
FILE:1: plan.zero=9: ZeRO has stages 0 to 3. Use zero=0, 1, 2 or 3.
FILE:2: unknown key 'sed'. Did you mean 'seed'?
FILE:3: unknown key 'learning_rate'. Did you mean 'optimizer.lr'?
FILE:5: optimizer.lr="0.1": a number above 0 is needed. Write it without quotes: lr = 0.1.
FILE:6: unknown key 'optimizer.bettas'. Did you mean 'optimizer.betas'?
FILE:7: optimizer.betas=[0.9]: a list of 2 values, each a number from 0 and below 1, is needed. \
Use e.g. optimizer.betas=[0.9, 0.95].
FILE:9: train.seq_len=5000: the model reads at most 1024 tokens (model.max_seq_len). Use train.seq_len=1024 or less.
FILE:10: train.global_batch=0: a whole number from 1 to 1000000000 is needed. Use e.g. train.global_batch=8.
FILE:12: launch.ranks=al: all or a whole number from 1 to 1000000 is needed. Did you mean 'all'?
FILE:13: unknown key 'optimiser'. Did you mean 'optimizer'?
FILE:15: data.train.0.path: this key is missing. Add e.g. path = "data/*.txt".
FILE:16: unknown key 'data.train.0.pth'. Did you mean 'data.train.0.path'?
FILE:18: eval.every=nan: a whole number from 0 to 2**63 - 1 is needed. Use a finite number, e.g. eval.every=50.
command line: override 'foo': an override is key=value. Write e.g. optimizer.lr=1e-4.
command line: log.every=0: a whole number from 1 to 2**63 - 1 is needed. Use e.g. log.every=10."""


@pytest.fixture
def write(tmp_path):
    def write(data: bytes | str):
        path = tmp_path / "train.toml"
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return write


def problems_of(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(str(path), "FILE")


def test_all_mistakes_are_reported_in_line_order(write):
    assert problems_of(write(MANY), ["foo", "log.every=0"]) == MANY_LINES


def test_command_line_overrides_file_and_defaults(write):
    path = write("seed = 1\n[train]\nsteps = 50\nseq_len = 64\n")
    loaded = load_config(path, ["train.steps=60"])
    assert (loaded.config.seed, loaded.config.train.steps, loaded.config.train.seq_len) == (1, 60, 64)
    assert loaded.config.train.global_batch == RunConfig().train.global_batch
    assert loaded.origins["seed"] == f"{path}:1"
    assert loaded.origins["train.steps"] == "command line"
    assert loaded.origins["train.seq_len"] == f"{path}:4"
    assert loaded.origins["train.global_batch"] == "default"


def test_no_file_gives_the_defaults():
    assert load_config(None).config == RunConfig()
    assert set(load_config(None).origins.values()) == {"default"}


def test_origins_of_values_are_shown(write):
    path = write('plan = "compile=on"\n[optimizer]\nbetas = [\n  0.8,\n  0.9,\n]\n[[data.train]]\npath = "a \\"b\\""\n')
    rows = {key: (value, origin) for key, value, origin in load_config(path, ["optimizer.betas.1=0.99"]).rows()}
    assert rows["plan"] == ('"compile=on"', f"{path}:1")
    assert rows["optimizer.betas"] == ("[0.8, 0.99]", f"{path}:3")
    assert rows["data.train.0.path"] == ('"a \\"b\\""', f"{path}:8")
    assert rows["data.train.0.schema"] == ('"auto"', "default")
    assert rows["eval.every"] == ("50", "default")
    for key, (value, _) in rows.items():
        assert tomllib.loads(f"{key} = {value}")


def test_plan_table_is_converted_to_text(write):
    path = write('[plan]\ndp_replicate = "*"\naccumulation = 2\ncompile = true\n')
    loaded = load_config(path)
    assert loaded.config.plan == "dp_replicate=* accumulation=2 compile=on"
    assert loaded.origins["plan"] == f"{path}:1"
    assert problems_of(write("[plan]\ntp = 2\n\nzero = 9\n")) == (
        "FILE:4: plan.zero=9: ZeRO has stages 0 to 3. Use zero=0, 1, 2 or 3."
    )
    assert problems_of(write("[plan]\ndp_replicate = 2\n\nsp = true\n")) == (
        "FILE:4: plan.sp=on: sequence parallelism needs tp of at least 2, and tp is 1. Use sp=off, or tp=2 or more."
    )


@pytest.mark.parametrize("data", [b"\xef\xbb\xbfseed = 3\n", b"seed = 3\r\n[train]\r\nsteps = 50\r\n"])
def test_byte_order_mark_and_crlf_are_accepted(write, data):
    assert load_config(write(data)).config.seed == 3


def test_line_numbers_are_right_with_crlf(write):
    assert problems_of(write(b"seed = 3\r\n[train]\r\nsteps = -5\r\n")).startswith("FILE:3: train.steps=-5: ")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"[optimizer]\nlr = = 3\n", "FILE:2: this is not TOML: invalid value in 'lr = = 3'. "),
        (b"seed = 1\n\nseed = 2\n", "FILE:3: this is not TOML: cannot overwrite a value in 'seed = 2'. Keep one of"),
        (b"seed = 1\nname = 'x\nlog = 3\n", "FILE:2: this is not TOML: expected \"'\" in"),
        (b"a = 1\n\xc3(", "FILE:2: byte 0xc3 is not valid UTF-8. Save the file as UTF-8."),
        (b"x = " + b"[" * 9000, "FILE:1: arrays or tables are nested too deeply. Flatten them."),
        (b"a = 1\nx = " + b"7" * 9000, "FILE:2: this is not TOML: a number has too many digits in"),
    ],
)  # fmt: skip
def test_unreadable_files_raise_with_a_line(write, data, expected):
    assert problems_of(write(data)).startswith(expected)


def test_missing_files_raise_with_a_suggestion(tmp_path):
    (tmp_path / "quickstart.toml").write_text("")
    assert problems_of(tmp_path / "quikstart.toml").endswith("there is no such file. Did you mean 'quickstart.toml'?")
    assert "this is a folder. Name a TOML file in it." in problems_of(tmp_path)
    for name in ("a\nb.toml", "nul\0.toml", "x" * 5000):
        assert len(problems_of(tmp_path / name).splitlines()) == 1


UNKNOWN = {
    "lerning_rate = 1": "unknown key 'lerning_rate'. Did you mean 'optimizer.lr'?",
    "global_batch = 1": "unknown key 'global_batch'. Did you mean 'train.global_batch'?",
    "[train]\nbatch_size = 1": "unknown key 'train.batch_size'. Did you mean 'train.global_batch'?",
    "[log]\nxyzzy = 1": "unknown key 'log.xyzzy'. [log] has every.",
    "[train.early_stop]\nmindelta = 1": (
        "unknown key 'train.early_stop.mindelta'. Did you mean 'train.early_stop.min_delta'?"
    ),
    '[[data.train]]\npath = "x"\ncolumns = {txt = "body"}': (
        "unknown key 'data.train.0.columns.txt'. Did you mean 'data.train.0.columns.text'?"
    ),
    '[[data.train]]\npath = "x"\nschema_ = "text"': (
        "unknown key 'data.train.0.schema_'. Did you mean 'data.train.0.schema'?"
    ),
    '"two words" = 1': "unknown key '\"two words\"'. A config has plan, balance, layout, seed, run, task, model, "
    "adapter, grpo, tokenizer, data, optimizer, tables, privacy, schedule, train, eval, checkpoint, resume, memory, "
    "kernels, sample, log, launch, monitor, energy, alerts, alert, channel, sink.",
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_unknown_keys_are_rejected_with_suggestions(write, text):
    line = text.count("\n") + 1
    assert problems_of(write(text)) == f"FILE:{line}: {UNKNOWN[text]}"


_texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)
_sources = st.builds(
    SourceSection,
    path=_texts,
    weight=st.none() | st.floats(1e-9, 1e9),
    schema=st.sampled_from(["auto", "text", "messages", "ids"]),
    columns=st.dictionaries(st.sampled_from(["text", "messages", "role"]), _texts),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_sources, min_size=1, max_size=3), _texts, st.floats(1e-12, 1e12), st.integers(0, 2**63 - 1))
def test_printed_config_loads_equal(tmp_path_factory, sources, prompt, lr, seed):
    base = RunConfig()
    config = base.model_copy(
        update={
            "seed": seed,
            "data": base.data.model_copy(update={"train": tuple(sources), "eval": tuple(sources[:1])}),
            "sample": base.sample.model_copy(update={"prompt": prompt}),
            "optimizer": base.optimizer.model_copy(update={"lr": lr}),
        }
    )
    path = tmp_path_factory.getbasetemp() / "again.toml"
    for only_changes in (False, True):
        path.write_text(format_config(config, only_changes=only_changes), encoding="utf-8", newline="")
        assert load_config(path, [f"run.name={config.run.name}"]).config == config
    assert isinstance(load_config(path), LoadedConfig)


def test_changed_values_alone_are_written():
    config = load_config(None, ["optimizer.lr=0.25", "data.packing=fit"]).config
    assert format_config(config, only_changes=True) == '[data]\npacking = "fit"\n\n[optimizer]\nlr = 0.25\n'
    assert format_config(RunConfig(), only_changes=True) == ""


@pytest.mark.parametrize(
    "file, name", [("mine.toml", "mine"), ("my run (2).toml", "my_run_2"), ("___.toml", "quickstart")]
)
def test_run_is_named_after_its_file(tmp_path, file, name):
    path = tmp_path / file
    path.write_text("seed = 1\n")
    loaded = load_config(path)
    assert loaded.config.run.name == name
    assert load_config(path, ["run.name=other"]).config.run.name == "other"
    path.write_text('run.name = "typed"\n')
    assert load_config(path).config.run.name == "typed"
    assert load_config(None).config.run.name == "quickstart"


def test_origin_of_the_run_name_is_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("seed = 1\n")
    assert load_config(path).origins["run.name"] == str(path)


def test_integers_may_be_written_with_an_exponent(tmp_path):
    (tmp_path / "a.toml").write_text("[train]\nglobal_batch = 16.0\n")
    config = load_config(tmp_path / "a.toml", ["train.steps=1e3", "optimizer.lr=1"]).config
    assert (config.train.steps, config.train.global_batch, config.optimizer.lr) == (1000, 16, 1.0)
    with pytest.raises(ConfigError, match=r"train.steps=1000.5: a whole number from 1"):
        load_config(None, ["train.steps=1000.5"])


def test_command_line_steps_or_epochs_win_and_both_are_rejected(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[train]\nsteps = 5\n")
    assert load_config(file, ["train.epochs=2"]).config.train.epochs == 2
    file.write_text("[train]\nepochs = 2\n")
    config = load_config(file, ["train.steps=7"]).config
    assert (config.train.epochs, config.train.steps) == (None, 7)
    file.write_text("[train]\nsteps = 5\nepochs = 2\n")
    with pytest.raises(
        ConfigError, match=r"a.toml:3: train.epochs=2: train.steps=5 is given too. Keep one of the two."
    ):
        load_config(file)


def test_rules_ignore_default_steps_if_epochs_are_set():
    assert load_config(None, ["train.epochs=9", "schedule.warmup_steps=500"]).config.train.epochs == 9


def test_yaml_file_is_rejected(tmp_path):
    (tmp_path / "run.yaml").write_text("train:\n  steps: 3\n")
    with pytest.raises(
        ConfigError, match=r"run\.yaml: only TOML is read\. Write its settings as key = value .* run\.toml"
    ):
        load_config(tmp_path / "run.yaml")
