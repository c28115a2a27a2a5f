"""The run folder: everything one run needs and leaves behind.

runs/<name>/
  config.toml      the resolved config        plan.txt    the resolved plan, one line
  model.json       shape of the decoder       data.json   where the tokenised data lies
  tokenizer/       a copy, so that the folder can be moved
  events.jsonl     one line per step, evaluation, checkpoint
  logs/rank_N.log  output of each rank        loss.png    samples/step_N.txt
  checkpoints/     step_NNNNNNNN/ (safetensors + JSON)
  .lock            held by the command that trains here (run_lock.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.data import PreparedData, prepare_data
from weft.errors import CheckpointError, ConfigError, DataError, PlanError, Problem
from weft.spec.config import RunConfig
from weft.spec.decoder import DecoderSpec
from weft.spec.files.config_file import load_config, parse_config
from weft.spec.files.config_text import format_config
from weft.spec.files.expect import as_toml
from weft.spec.layout import Layout
from weft.spec.model import resolve_decoder
from weft.spec.plan import Plan
from weft.spec.rules import Facts, check
from weft.train.epochs import with_steps
from weft.train.run_lock import run_lock

#: Settings that decide what the weights of a step are: another value is another run. The rest may change on resume.
#: Of data and saved tokenizers the content counts, wherever they lie; `_refuse_other_data` asks for it.
IDENTITY = ("seed", "model", "tokenizer.kind", "tokenizer.vocab_size", "tokenizer.train_bytes", "data.holdout",
            "data.borders", "train.seq_len", "train.global_batch", "optimizer.name")  # fmt: skip

#: (stage, done, total) while data is prepared.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RunFolder:
    """Paths and contents of one run's folder.

    texts: contents of config.toml, plan.txt, model.json and data.json as `prepare_run` settled them. A rank gets them
    by value: what happens to the files afterwards does not reach a run under way. Empty: the files are read.
    """

    path: Path
    texts: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of one step; CheckpointError names the steps that were saved."""
        from weft.checkpoint import list_checkpoints

        saved = {
            int(path.name.split(".")[0].removeprefix("step_")): path for path in list_checkpoints(self.checkpoints)
        }
        if step not in saved:
            known = ", ".join(map(str, saved)) or "none"
            raise CheckpointError(f"step={step}: {str(self.path)!r} has no such checkpoint. Saved steps: {known}.")
        return saved[step]

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    def config(self) -> RunConfig:
        """The resolved config."""
        if "config.toml" in self.texts:
            return parse_config(self.texts["config.toml"], str(self.path / "config.toml")).config
        return load_config(self._needed("config.toml")).config

    def plan(self) -> Plan:
        """The resolved plan."""
        return Plan.parse(self._text("plan.txt").strip())

    def decoder(self) -> DecoderSpec:
        """Shape of the model."""
        return DecoderSpec(**json.loads(self._text("model.json")))

    def data(self) -> PreparedData:
        """The tokenised data."""
        try:
            return PreparedData.from_json(self._text("data.json"))
        except DataError as error:
            file = self.path / "data.json"
            raise DataError(
                f"{file}: {error}. Type rm {shlex.quote(str(file))} and repeat the weft train command, "
                "which writes it anew."
            ) from error

    def _text(self, name: str) -> str:
        return self.texts[name] if name in self.texts else self._needed(name).read_text(errors="replace")

    def _needed(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            raise ConfigError(
                f"run folder {str(self.path)!r}: it has no {name}, so it is not a run folder of Weft. "
                f"Give a folder that `weft train` made, such as runs/quickstart."
            )
        return file


def prepare_run(config: RunConfig, world_size: int, report: Report | None = None, *, locked: bool = False) -> RunFolder:
    """Check everything that can be checked before ranks start, tokenise, and write the run folder.

    Called by one process, before any process group exists. locked: whether the caller holds `run_lock`, as a command
    does for the whole of its run; else the folder is held while this function works.
    Raises the WeftError of what is wrong, LaunchError where another command trains in the folder; then nothing in an
    existing folder was changed.
    """
    folder = run_folder(config)
    with contextlib.nullcontext() if locked else run_lock(folder.path):
        return _prepare(folder, config, world_size, report)


def run_folder(config: RunConfig) -> RunFolder:
    """The folder of the config's run, which need not exist."""
    return RunFolder(Path(config.run.dir) / config.run.name)


def _prepare(folder: RunFolder, config: RunConfig, world_size: int, report: Report | None) -> RunFolder:
    plan = Plan.parse(config.plan, world_size)
    # Shapes are checked before data is tokenised: minutes of work must not end in a sentence about heads.
    expected_vocab = config.tokenizer.vocab_size if config.tokenizer.kind == "bpe" else 1
    expected = resolve_decoder(config.model, expected_vocab)
    _check_plan(plan, config, expected, world_size)
    # After the rules: a setting that no run can have must not be told as one that this run does not have.
    if (folder.path / "config.toml").exists():
        refuse_other_run(folder, config)
    config = _with_own_layout(config, expected, plan)
    _check_optimizer(config, expected)
    data = prepare_data(config, report)
    if (folder.path / "data.json").exists():
        _refuse_other_data(folder, data)
    config, data = with_steps(config, data)
    decoder = resolve_decoder(config.model, data.vocab_size)
    _check_plan(plan, config, decoder, world_size)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        if not folder.tokenizer.exists():
            _copy_tree(data.tokenizer_dir, folder.tokenizer)
        texts = {
            "plan.txt": plan.format() + "\n",
            "model.json": json.dumps(dataclasses.asdict(decoder), indent=2) + "\n",
            "data.json": data.to_json(),
            "config.toml": format_config(config),
        }
        for name, text in texts.items():
            _write(folder.path / name, text)
    except OSError as error:
        raise ConfigError(
            f"run.dir={config.run.dir}: cannot write {str(folder.path)!r} ({error.strerror}). Use another run.dir."
        ) from error
    return RunFolder(folder.path, texts)


def refuse_other_run(folder: RunFolder, config: RunConfig) -> None:
    """ConfigError when the folder was started with settings that make a different run; names each of them."""
    before, now = folder.config(), config
    changes = [change for key in IDENTITY for change in _differences(key, _pick(before, key), _pick(now, key))]
    # The weights of sources decide the order of samples; their paths do not, as long as the content is the same.
    weights = [[source.weight for source in settings.data.train] for settings in (before, now)]
    if len(weights[0]) == len(weights[1]):
        changes += [
            (f"data.train.{number}.weight", *pair)
            for number, pair in enumerate(zip(*weights, strict=True))
            if pair[0] != pair[1]
        ]
    problems = [
        Problem(
            name,
            f"{name}={'none' if new is None else new}: the run in {str(folder.path)!r} was started "
            f"{'without it' if old is None else f'with {old}'}, and cannot go on with another value. "
            f"Use {_free_name(folder)} for a new run, or {_as_typed(name, old)} to resume.",
        )
        for name, old, new in changes
    ]
    if problems:
        raise ConfigError(problems)


def _refuse_other_data(folder: RunFolder, data: PreparedData) -> None:
    """DataError when the tokens are not those that the run was started with; says which and how they differ."""
    changes = data.changes_from(folder.data())
    if changes:
        raise DataError(
            f"{'; '.join(changes)}. The run in {str(folder.path)!r} cannot go on with other data. "
            f"Use {_free_name(folder)} for a new run, or bring the old data back to resume."
        )


def _free_name(folder: RunFolder) -> str:
    """A setting that makes a new run, to be pasted on a command line."""
    base, number = folder.path.name, 2
    while (folder.path.parent / f"{base}-{number}").exists():
        number += 1
    return f"run.name={base}-{number}"


def _as_typed(name: str, value: Any) -> str:
    """What brings a setting back to its value: a word for the command line."""
    if value is None:
        return f"leave {name} out"
    return shlex.quote(f"{name}={value if isinstance(value, str) else as_toml(value)}")


def _pick(config: RunConfig, key: str) -> Any:
    value: Any = config.model_dump(mode="json", by_alias=True)
    for part in key.split("."):
        value = value[part]
    return value


def _differences(name: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            found
            for key in old.keys() | new.keys()
            for found in _differences(f"{name}.{key}", old.get(key), new.get(key))
        ]
    return [] if old == new else [(name, old, new)]


def _check_plan(plan: Plan, config: RunConfig, decoder: DecoderSpec, world_size: int) -> None:
    violations = check(
        plan,
        Facts(
            model=decoder,
            world_size=world_size,
            global_batch=config.train.global_batch,
            seq_len=config.train.seq_len,
        ),
    )
    if violations:
        raise PlanError("\n".join(violation.message for violation in violations))


def _with_own_layout(config: RunConfig, decoder: DecoderSpec, plan: Plan) -> RunConfig:
    """The config with the words of its layout in the place of their file: the folder needs nothing outside of it.

    Raises LayoutError or PlanError where the layout does not fit the model or the plan's tp.
    """
    if not config.layout:
        return config
    from weft.models import build_decoder
    from weft.parallel.tensor.cut_tensors import check_layout, expect_used

    layout = Layout.read(config.layout)
    model = build_decoder(decoder, device="meta")
    expect_used(layout, dict(model.named_modules()))
    if plan.tp > 1:
        check_layout(model, layout, plan.tp)
    return config.model_copy(update={"layout": layout.format()})


def _check_optimizer(config: RunConfig, decoder: DecoderSpec) -> None:
    """Refuse groups and classes that do not suit the model before data is tokenised. Raises ConfigError."""
    if config.optimizer.groups or config.optimizer.is_foreign:
        from weft.models import build_decoder
        from weft.optim import check_optimizer

        check_optimizer(build_decoder(decoder, device="meta"), config.optimizer)


def _write(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old text or the new, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)


def _copy_tree(source: Path, target: Path) -> None:
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copytree(source, draft, dirs_exist_ok=True)
    try:
        os.rename(draft, target)
    except OSError as error:
        # Another rank was first, with the same content.
        shutil.rmtree(draft)
        if not target.is_dir():
            raise DataError(f"tokenizer: cannot copy {str(source)!r} to {str(target)!r} ({error.strerror}).") from error
