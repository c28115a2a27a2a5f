"""`weft ab`: two settings compared by pairs of runs with the same seed, data order and initial weights."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from weft.config.files import format_config, leaves
from weft.config.parsing import as_toml, dotted
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, LaunchError, TrainingHalted
from weft.experiments.run_log import Axis, Measure, RunLog
from weft.experiments.statistics import FEWEST_EQUAL, Estimate, fixed, sequential
from weft.monitor.terminal import busy
from weft.train.folder import run_lock

#: Distance between the seeds of A and B for `--aa`, so that no pair shares a seed with another.
_OTHER_SEEDS = 100_000
_POLL_S = 0.5
_UNITS: dict[Axis, str] = {"tokens": "tokens", "steps": "steps", "time": "s", "energy": "J"}
#: Settings of a single run, which a comparison sets or ignores.
_PER_RUN = ("run.", "seed", "log.", "sample.")
#: Settings that may differ under any metric, because the metric means the same.
_FREE = (
    "plan", "layout", "optimizer.", "schedule.", "model.", "memory.", "kernels.", "launch.", "monitor.",
    "checkpoint.", "alerts", "alert", "channel", "sink", "energy.", "eval.every", "data.batching",
    "data.microbatch_cost", "data.workers", "data.cache", "data.stream", "data.check", "data.max_untrained",
    "data.max_cut", "data.max_bad_fraction", "train.steps",
    "train.epochs", "train.global_batch", "train.global_cost", "train.max_bad_steps", "train.on_bad",
    "train.collect_every", "train.compress_after", "train.outer_", "train.deterministic", "train.profile",
    "train.check_batch", "train.bf16_layers", "train.fp8_recipe",
)  # fmt: skip
#: Further settings that may differ if the metric comes from evaluations: they change only how the model is trained.
_FREE_IN_TRAINING = (
    "adapter.", "grpo.", "train.norm_group", "train.neftune_alpha", "data.train", "data.holdout", "eval.batches",
)  # fmt: skip
#: Settings that choose the held-out documents, if `data.eval` is empty.
_HELD_OUT = ("data.train", "data.holdout")
#: The metric that does not depend on the tokenizer.
_PER_BYTE = "eval.bits_per_byte"


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """The question of a comparison.

    Attributes:
        a, b: the configs.
        measure: the metric that decides.
        axis: the amount at which runs are compared.
        pairs: number of pairs, or the largest one with `until`.
        until: stop as soon as the interval excludes 0 or is within +-`until`; None: run all pairs.
        other_seeds: B has other seeds than A in each pair, to measure the noise of seeds.
    """

    a: RunConfig
    b: RunConfig
    measure: Measure
    axis: Axis
    pairs: int
    until: float | None
    other_seeds: bool

    def config(self, side: str, pair: int) -> RunConfig:
        """Return the config of one run; `side` is "a" or "b", pairs count from 0."""
        config = self.a if side == "a" else self.b
        seed = config.seed + pair + (_OTHER_SEEDS if side == "b" and self.other_seeds else 0)
        return config.model_copy(update={"seed": seed})

    def runs(self, pair: int) -> Iterator[str]:
        """Yield the sides of a pair in the order of their runs: A B, then B A, and so on."""
        yield from ("a", "b") if pair % 2 == 0 else ("b", "a")

    def differences(self) -> list[tuple[str, str, str]]:
        """Return (setting, value of A, value of B) for settings that differ."""
        return differing(self.a, self.b)


def differing(a: RunConfig, b: RunConfig) -> list[tuple[str, str, str]]:
    """Return (setting, value in a, value in b) as TOML for settings that differ, without names and seeds of runs."""
    ours, theirs = ({dotted(path): as_toml(value) for path, value in leaves(one)} for one in (a, b))
    keys = dict.fromkeys((*ours, *theirs))
    return [
        (key, ours.get(key, "-"), theirs.get(key, "-"))
        for key in keys
        if ours.get(key) != theirs.get(key) and not key.startswith(_PER_RUN)
    ]


def refuse_incomparable(comparison: PairedComparison) -> None:
    """Check that the metric means the same in both configs, and that runs end by their number of steps.

    Raises:
        ConfigError: with the first reason why runs cannot be compared.
    """
    name, keys = comparison.measure.name, [key for key, *_ in comparison.differences()]
    if comparison.a.seed != comparison.b.seed:
        raise ConfigError(
            f"seed={comparison.a.seed} in A and {comparison.b.seed} in B: the runs of a pair share their seed. Give "
            "both the same; --aa compares seeds."
        )
    if not keys and not comparison.other_seeds:
        raise ConfigError("A and B have the same settings. Give settings that differ, or --aa to measure the noise.")
    for config, side in ((comparison.a, "A"), (comparison.b, "B")):
        ends = (config.train.max_time, config.train.early_stop.patience, config.train.stop_at)
        if any(end is not None for end in ends):
            raise ConfigError(
                f"{side} has train.max_time, train.early_stop.patience or train.stop_at: a run that ends early cannot "
                "be compared. Remove them, and set train.steps."
            )
        if config.checkpoint.dir is not None:
            raise ConfigError(
                f"{side} has checkpoint.dir={config.checkpoint.dir}: `weft ab` deletes checkpoints of finished runs. "
                "Remove it; the checkpoints are then in the run folders."
            )
    is_of_evaluations = name.startswith("eval.")
    if not is_of_evaluations and name != "loss":
        return  # speed and memory can be compared between any runs
    for key in keys:
        if reason := why_incomparable(key, name, has_eval_data=bool(comparison.a.data.eval)):
            raise ConfigError(f"{key} differs between A and B, {reason}")
    read = [one.eval.batches * one.train.global_batch for one in (comparison.a, comparison.b)]
    if is_of_evaluations and read[0] != read[1]:
        raise ConfigError(
            f"an evaluation of A reads {read[0]} samples and one of B {read[1]} (eval.batches x train.global_batch), "
            f"so {name} would not measure the same. Set eval.batches so that the products are equal."
        )


def why_incomparable(key: str, metric: str, *, has_eval_data: bool) -> str:
    """Return why a metric of runs that differ in a setting does not measure the same, or "".

    Args:
        key: the setting.
        metric: "loss" of training, or "eval.NAME".
        has_eval_data: both runs have the same data.eval, so that held-out documents do not come from data.train.
    """
    is_of_evaluations = metric.startswith("eval.")
    if is_of_evaluations and not has_eval_data and key.startswith(_HELD_OUT):
        return "and data.eval is empty, so their held-out documents differ. Set the same data.eval in both."
    free = _FREE + _FREE_IN_TRAINING * is_of_evaluations + ("tokenizer.",) * (metric == _PER_BYTE)
    if key.startswith(free):
        return ""
    remedy = f"Use --metric {_PER_BYTE}" if key.startswith("tokenizer.") else "Make it equal"
    return f"so {metric} would not measure the same. {remedy}."


# Running the pairs.


@dataclass(frozen=True, slots=True)
class PairResult:
    """Measures of a pair, (A, B) each.

    Attributes:
        value: the measure at the same amount of the axis.
        step_s: median seconds of a step.
        energy_j: joules of the productive steps, or None without complete readings of both.
        energy_label: "measured", "estimated", or "mixed".
    """

    value: tuple[float, float]
    step_s: tuple[float, float]
    energy_j: tuple[float, float] | None = None
    energy_label: str = "measured"

    @property
    def difference(self) -> float:
        """B - A."""
        return self.value[1] - self.value[0]


class Runner:
    """Runs the pairs of a comparison in a folder, each run by a separate process of `weft train`.

    Finished runs are read from the folder, and an unfinished one resumes, so the same comparison continues after a
    kill at any time.

    Args:
        folder: contains a.toml, b.toml, ab.json and a run folder per run.
        keep: do not delete the checkpoints of finished runs.
        report: receives one line per finished run.
    """

    def __init__(self, comparison: PairedComparison, folder: Path, keep: bool, report: Callable[[str], None]):
        self.comparison = comparison
        self.folder = folder
        self._keep = keep
        self._report = report

    def results(self) -> Iterator[PairResult]:
        """Run pair after pair, and yield the measures of each.

        Raises:
            TrainingHalted: if a run fails, or is stopped.
            ConfigError: if the folder belongs to other settings.
        """
        self._claim_folder()
        self.refuse_more_pairs()
        for pair in range(self.comparison.pairs):
            logs = {side: self._finished_run(pair, side) for side in self.comparison.runs(pair)}
            if pair == 0:
                self._refuse_other_tokenizers()
            yield self._measured(logs["a"], logs["b"])

    def refuse_more_pairs(self) -> None:
        """Check that the number of pairs is the one of the folder's verdict.

        Raises:
            ConfigError: without `until`, if the folder has a verdict of another number of pairs.
        """
        path = self.folder / "ab.json"
        if self.comparison.until is not None or not path.is_file():
            return
        try:
            found = json.loads(path.read_text())
            looks, planned = found["looks"], found.get("planned_pairs", len(found["pairs"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: it is damaged. Delete it; the same command writes it again.") from error
        if looks == "one" and planned == self.comparison.pairs:
            return
        began = f"--pairs {planned}" if looks == "one" else "--until"
        raise ConfigError(
            f"--pairs {self.comparison.pairs}: {self.folder} has a verdict of {began}, and the interval of a fixed "
            "number of pairs is wrong if the number changes after a look. Add --until, or give another --folder."
        )

    def run_name(self, pair: int, side: str) -> str:
        """Return the name of a run folder, such as "pair-01-a"."""
        return f"pair-{pair + 1:02}-{side}"

    def _claim_folder(self) -> None:
        texts = {f"{side}.toml": format_config(self.comparison.config(side, 0)) for side in ("a", "b")}
        for name, text in texts.items():
            path = self.folder / name
            if path.is_file() and path.read_text() != text:
                raise ConfigError(
                    f"--folder {self.folder}: it has a comparison of other settings ({name} differs). Give another "
                    "--folder, or delete this one."
                )
        for name, text in texts.items():
            temporary = self.folder / f".{name}.{os.getpid()}"
            temporary.write_text(text)
            temporary.replace(self.folder / name)

    def _refuse_other_tokenizers(self) -> None:
        """Check that the first pair's metric does not depend on its tokenizers, which may come from model.path."""
        name = self.comparison.measure.name
        folders = [self.folder / self.run_name(0, side) for side in ("a", "b")]
        paths = [folder / "tokenizer" / "tokenizer.json" for folder in folders]
        if len({path.read_bytes() for path in paths if path.is_file()}) < 2 or not name.startswith(("loss", "eval.")):
            return
        if name != _PER_BYTE:
            raise ConfigError(
                f"A and B have different tokenizers, so {name} would not measure the same. Use --metric {_PER_BYTE}."
            )
        for folder in folders:
            stored = json.loads((folder / "data.json").read_text())["eval"]
            held_out = sum(one["counts"]["num_tokens"] for one in stored)
            evaluated = RunLog.read(folder).evals[-1].get("tokens", 0)
            if evaluated < 0.99 * held_out:
                raise ConfigError(
                    f"{folder} evaluated {evaluated:,} of {held_out:,} held-out tokens, and with another tokenizer "
                    "these are other texts. Increase eval.batches until an evaluation reads all of them."
                )

    def _finished_run(self, pair: int, side: str) -> RunLog:
        name = self.run_name(pair, side)
        folder = self.folder / name
        log = RunLog.read(folder)
        if log.end != "finished":
            self._wait_until_free(folder)
            self._train(pair, side, folder)
            log = RunLog.read(folder)
        if log.end != "finished":
            raise TrainingHalted(
                f"{folder}: the run ended before its last step ({log.end or 'no end recorded'}). The same command "
                "continues."
            )
        if not self._keep:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        self._report(f"{name}  {log.steps[-1]['step']:,} steps  {log.value(_STEP_S, 'steps', math.inf):.4g} s/step")
        return log

    def _wait_until_free(self, folder: Path) -> None:
        """Wait for the end of a run whose `weft ab` command was killed."""
        is_reported = False
        while True:
            try:
                with run_lock(folder):
                    return
            except LaunchError:
                if not is_reported:
                    self._report(f"{folder.name}  waiting for its running process, which an earlier command started")
                    is_reported = True
                time.sleep(_POLL_S)

    def _train(self, pair: int, side: str, folder: Path) -> None:
        config = self.comparison.config(side, pair)
        run = config.run.model_copy(update={"name": folder.name, "dir": str(self.folder)})
        text = format_config(config.model_copy(update={"run": run}))
        path = self.folder / f"{folder.name}.toml"
        path.write_text(text)
        with open(self.folder / f"{folder.name}.log", "ab") as out:
            command = [sys.executable, "-m", "weft", "train", str(path)]
            with busy(sys.stderr, f"{folder.name} of {self.comparison.pairs} pairs"):
                code = _run_to_its_end(command, out)
        if code:
            lines = (self.folder / f"{folder.name}.log").read_text(errors="replace").strip().splitlines()
            said = next((line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "")
            raise TrainingHalted(
                f"{folder}: training of {side.upper()} in pair {pair + 1} failed with exit code {code} ({said[:300]}). "
                f"Its output is in {self.folder / folder.name}.log; the same command continues."
            )

    def _measured(self, a: RunLog, b: RunLog) -> PairResult:
        axis, measure = self.comparison.axis, self.comparison.measure
        if axis == "tokens" and a.unit != b.unit:
            raise ConfigError(f"A counts {a.unit} and B counts {b.unit}: use --at steps or --at time.")
        limit = min(a.total(axis), b.total(axis))
        values = a.value(measure, axis, limit), b.value(measure, axis, limit)
        for value, log in zip(values, (a, b), strict=True):
            if not math.isfinite(value):
                raise ConfigError(
                    f"--metric {measure.name}: {log.folder} has no finite value of it at {limit:,.0f} {_UNITS[axis]}. "
                    "Use another --metric, or evaluate more often (eval.every)."
                )
        steps = tuple(log.value(_STEP_S, "steps", math.inf) for log in (a, b))
        joules = (a.energy_j, b.energy_j) if a.energy_j and b.energy_j else None
        label = a.energy_label if a.energy_label == b.energy_label else "mixed"
        return PairResult(values, (steps[0], steps[1]), joules, label)


def _run_to_its_end(command: Sequence[str], out: BinaryIO) -> int:
    """Run a command and return its exit code. If this process is interrupted, stop the command and wait for it."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


_STEP_S = Measure("step_s", "s", lower_is_better=True)


def is_decided(comparison: PairedComparison, estimate: Estimate) -> bool:
    """Return True if no further pair is needed for `until`."""
    if comparison.until is None or (estimate.is_constant and estimate.num_pairs < FEWEST_EQUAL):
        return False
    return estimate.is_different or abs(estimate.mean) + estimate.half_width <= comparison.until


def estimate_of(comparison: PairedComparison, results: Sequence[PairResult]) -> Estimate:
    """Return the difference B - A with its interval: one for the fixed number of pairs, or one for repeated looks."""
    differences = [one.difference for one in results]
    return fixed(differences) if comparison.until is None else sequential(differences)


# The answer.


def verdict(comparison: PairedComparison, results: Sequence[PairResult]) -> str:
    """Return the answer in a sentence, such as "B is better by 0.021 ± 0.006 nats (95 %, 5 pairs); 4 % slower."."""
    estimate, measure = estimate_of(comparison, results), comparison.measure
    unit = f" {measure.unit}" if measure.unit else ""
    pairs = f"{estimate.num_pairs} pairs"
    reach = f"± {_digits(estimate.half_width, 2)}{unit}"
    size = f"{_digits(abs(estimate.mean), 3)} {reach} of {measure.name} (95 %, {pairs})"
    if estimate.is_constant and estimate.mean == 0:
        text = f"A and B have the same {measure.name} in each of {pairs}"
    elif estimate.is_constant and not estimate.is_different:
        sign, value = "-" if estimate.mean < 0 else "+", _digits(abs(estimate.mean), 3)
        text = (
            f"undecided: B - A is {sign}{value}{unit} of {measure.name} in each of {pairs}, and equal differences "
            f"decide from {FEWEST_EQUAL} pairs on"
        )
    elif estimate.is_different:
        b_is_better = (estimate.mean < 0) == measure.lower_is_better
        text = f"{'B' if b_is_better else 'A'} is better by {size}"
    else:
        sign, value = "-" if estimate.mean < 0 else "+", _digits(abs(estimate.mean), 3)
        text = f"no difference found: B - A is {sign}{value} {reach} (95 %, {pairs})"
    return f"{text}; {_speed(results)}."


def _digits(value: float, digits: int) -> str:
    """Return a number with some significant digits, and without an exponent up to 1e15."""
    if not 10**digits <= value < 1e15:
        return f"{value:.{digits}g}"
    return f"{float(f'{value:.{digits}g}'):,.0f}"


def _speed(results: Sequence[PairResult]) -> str:
    speed = _ratio([one.step_s for one in results], "slower", "faster", "speed")
    joules = [one.energy_j for one in results if one.energy_j is not None]
    speed = f"B is {speed}" if speed[0].isdigit() else speed
    if not joules:
        return speed
    if len(joules) < len(results):
        return f"{speed}; energy unmeasured in {len(results) - len(joules)} of {len(results)} pairs"
    labels = {one.energy_label for one in results}
    label = "" if labels == {"measured"} else " (estimated)" if labels == {"estimated"} else " (partly estimated)"
    return f"{speed}; {_ratio(joules, 'more energy', 'less energy', 'energy')}{label}"


def _ratio(values: Sequence[tuple[float, float]], more: str, less: str, what: str) -> str:
    """Return "4 % slower" for the ratio of B to A in pairs, or that no difference was found."""
    estimate = fixed([math.log(b / a) for a, b in values])
    half_width = 0.0 if estimate.is_constant else min(estimate.half_width, 5.0)
    percent, reach = 100 * math.expm1(estimate.mean), 100 * math.expm1(half_width)
    if abs(estimate.mean) > half_width and abs(percent) >= 0.05:
        return f"{_digits(abs(percent), 2)} % {more if percent > 0 else less}"
    if reach > 50:
        return f"{what} varies too much to be compared in {len(values)} pairs"
    return f"no difference in {what} found ({percent:+.1f} ± {reach:.1f} %)"


def tests(comparison: PairedComparison, results: Sequence[PairResult]) -> str:
    """Return the p values of the two tests in a sentence."""
    estimate = estimate_of(comparison, results)
    text = f"p = {estimate.p_t:.2g} (paired t), {estimate.p_sign:.2g} (sign flips)"
    if estimate.is_constant:
        text = f"p = {estimate.p_sign:.2g} (sign flips); equal differences have no t test"
    if estimate.num_pairs < 6:
        return f"{text}; below 6 pairs the sign-flip test cannot reach 0.05"
    return text


def as_json(comparison: PairedComparison, results: Sequence[PairResult]) -> dict[str, Any]:
    """Return the whole result for ab.json."""
    estimate = estimate_of(comparison, results)
    return {
        "verdict": verdict(comparison, results),
        "metric": comparison.measure.name,
        "at": comparison.axis,
        "level": 0.95,
        "planned_pairs": comparison.pairs,
        "looks": "one" if comparison.until is None else "after each pair",
        "estimate": asdict(estimate),
        "settings": [{"key": key, "a": a, "b": b} for key, a, b in comparison.differences()],
        "pairs": [asdict(one) for one in results],
    }


def write_result(folder: Path, comparison: PairedComparison, results: Sequence[PairResult]) -> None:
    """Write ab.json. It is replaced atomically.

    Raises:
        LaunchError: if the folder cannot be written.
    """
    temporary = folder / f".ab.json.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(as_json(comparison, results), indent=1, allow_nan=True))
        temporary.replace(folder / "ab.json")
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise LaunchError(f"{folder}: the result cannot be written ({error.strerror}). Free space there.") from error
