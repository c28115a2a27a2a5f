"""The base class of tasks (`Task`), and a text description of a sample's contents (`described`)."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from weft.config.rules.rule import Facts
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, Problem, WeftWarning
from weft.train.batches.batching_by_cost import StepBorders, cost_limits, costs_of, traced_costs
from weft.train.batches.data_share import Batches, MapDataset, Share
from weft.units import format_count

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.comm.mesh import Axis
    from weft.config.plan import Plan
    from weft.parallel.state.flat_slices import StateSource
    from weft.planner.search.model_source import PlannedModel
    from weft.train.folder import RunFolder
    from weft.train.tasks.description import Forwards

_MOST_VALUES, _MOST_TEXT = 16, 2000


def described(sample: Any, name: str = "") -> list[str]:
    """Return lines that show each tensor, number and text of a sample.

    Up to 16 numbers are shown in full. Longer arrays are shown by dtype, shape, range, mean and a digest, so that two
    samples can be compared. Texts are cut after 2,000 characters.

    sample: a value, or values nested in tuples, lists, mappings and dataclasses. name: prefix of the lines.
    """
    parts = list(_parts(sample))
    if parts:
        return [line for key, part in parts for line in described(part, f"{name}{key}")]
    head = f"{name.lstrip('.')}: " if name else ""
    return [head + line for line in _words(sample)]


def _parts(sample: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(sample, Mapping):
        yield from ((f".{key}", part) for key, part in sample.items())
    elif isinstance(sample, tuple | list) and len(sample) <= _MOST_VALUES:
        yield from ((f"[{place}]", part) for place, part in enumerate(sample))
    elif is_dataclass(sample) and not isinstance(sample, type):
        yield from ((f".{field.name}", getattr(sample, field.name)) for field in fields(sample))


def _words(value: Any) -> list[str]:
    from weft.data.order.loader import visible

    if isinstance(value, str):
        cut = f" ... ({len(value)} characters)" if len(value) > _MOST_TEXT else ""
        return [visible(line) for line in f"{value[:_MOST_TEXT]}{cut}".split("\n")]
    if value is None or isinstance(value, bool | int | float | np.number):
        return [str(value)]
    array = _array(value)
    if array is None:
        return [visible(repr(value))[:_MOST_TEXT]]
    kind, shape = str(array.dtype), "x".join(map(str, array.shape)) or "one value"
    if array.dtype.kind not in "biuf":
        return [f"{kind}, {shape}"]
    if array.size <= _MOST_VALUES:
        return [f"{array.tolist()} ({kind})"]
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=6).hexdigest()
    finite = array[np.isfinite(array)]
    odd = f", {array.size - finite.size} of {array.size} values are not finite" if finite.size < array.size else ""
    if not finite.size:
        return [f"{kind}, {shape}{odd}; digest {digest}"]
    low, high, mean = finite.min(), finite.max(), finite.mean(dtype=np.float64)
    return [f"{kind}, {shape}: {low:.5g} to {high:.5g}, mean {mean:.5g}{odd}; digest {digest}"]


def _array(value: Any) -> np.ndarray | None:
    """Convert a tensor, array, list or tuple to a numpy array, bfloat16 to float32.

    Return None for other values, and for nested lists of unequal lengths.
    """
    if callable(getattr(value, "detach", None)):
        value = value.detach().cpu()
        try:
            return value.numpy()
        except TypeError:  # bfloat16 and the like
            return value.float().numpy()
    if not isinstance(value, np.ndarray | list | tuple):
        return None
    try:
        return np.asarray(value)
    except ValueError:
        return None


# The interface of a kind of training: its model, its data, and the text that users read about it.

#: Called with (stage, done, total) while data is prepared.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that evaluations compute in addition to the loss.

    Attributes:
        name: its key in events.jsonl.
        unit: its unit, which may be empty.
        help: its meaning, which is printed below the numbers at the end of a run.
    """

    name: str
    unit: str
    help: str

    @property
    def label(self) -> str:
        """The label after the value on a printed line."""
        return self.unit or self.words

    @property
    def words(self) -> str:
        """The name with spaces instead of underscores."""
        return self.name.replace("_", " ")


class EvaluationScorer(Protocol):
    """Computes metrics of one evaluation that are not functions of sums over samples, such as the area under a curve.

    All ranks call both methods the same number of times.
    """

    def add(self, output: Any, batch: Any, *, counts: bool) -> None:
        """Add a batch of this rank. counts: False for a placeholder without samples."""

    def finish(self) -> Mapping[str, float | None]:
        """Return metrics by name, over all ranks."""
        ...


class Task:
    """One kind of training. A subclass implements `build`, `samples` and `loss`; all other methods have a default.

    The constructor receives the options of the config's [task.options] as keyword arguments. `config` is set
    afterwards. Weft creates one instance in the process that prepares a run, and one per rank. For invalid options or
    data, methods should raise a WeftError, and the constructor a WeftError or a ValueError.
    """

    #: The run's settings. Weft sets it before anything is called.
    config: RunConfig

    #: Unit of throughput and of the mean loss, in the plural.
    unit: ClassVar[str] = "samples"
    #: Unit of `train.global_batch`, in the plural.
    sample_unit: ClassVar[str] = "samples"
    #: False if the loss has no level to compare with, as a policy loss. Its spikes are not reported then.
    has_loss_level: ClassVar[bool] = True
    #: Metrics of evaluations in addition to the loss. `sums` and `measure` compute them.
    metrics: tuple[Metric, ...] = ()
    #: Names of the values that `sums` returns.
    sum_names: tuple[str, ...] = ()
    #: Sections and settings of the text decoder that this task reads too, such as "data" or "train.seq_len". Setting
    #: any other one is an error, so that none is silently ignored.
    sections: ClassVar[tuple[str, ...]] = ()
    #: The settings in `sections` that affect the trained weights. A run cannot resume with a different value.
    identity: ClassVar[tuple[str, ...]] = ()

    # --- required methods ---

    def build(self) -> nn.Module:
        """Build the model with its initial weights, in plain PyTorch.

        `initial_model` seeds torch before the call. `shapes` calls it with the meta device as torch's default device.
        """
        raise NotImplementedError(f"{type(self).__name__}.build: it returns the model")

    def samples(self, split: str) -> MapDataset | None:
        """Return the samples of "train" or "eval" by index. None for "eval" disables evaluation.

        Weft shuffles the training samples by the config's `seed`, splits each global batch into microbatches, and calls
        `collate` on the samples of each microbatch.
        """
        raise NotImplementedError(f"{type(self).__name__}.samples: it returns the samples of a split")

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return (sum of the losses, number of losses).

        Weft adds both over all ranks and microbatches, and then divides the sum by the number.
        """
        raise NotImplementedError(f"{type(self).__name__}.loss: it returns (sum, number)")

    # --- batches ---

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch from a list of samples.

        The default stacks them like torch's DataLoader: (x, y) becomes a batch (x, y).
        """
        from torch.utils.data import default_collate

        return default_collate(samples)

    def batches(self, share: Share) -> Batches:
        """Return the training batches of one rank."""
        from weft.train.tasks import indexed

        costs = costs_of(self, share.most_rows, share.microbatches)
        samples = self.samples("train") or ()
        return indexed.IndexedBatches(
            samples, share, self.collate, seed=self.config.seed, costs=costs, places=self.step_borders()
        )

    def step_borders(self) -> StepBorders:
        """Return the boundaries between steps in the sequence of training samples.

        A step has train.global_batch samples, or as many as fit into train.global_cost if that is set. Called after
        `prepare` or `open`.
        """
        from weft.train.tasks import indexed

        return StepBorders.of_task(self, lambda number, epoch: indexed.epoch_order(number, self.config.seed, epoch))

    def lengths(self) -> Sequence[int] | np.ndarray | None:
        """Return the lengths of the training samples, or None if the task does not support batching by cost.

        They are in the unit that `collate` pads, such as tokens: (samples,), or (samples, columns) if several columns
        are padded separately. Called after `prepare` or `open`.
        """
        return None

    def length_costs(self, lengths: np.ndarray) -> np.ndarray:
        """Return the costs of samples of the given lengths: their FLOPs divided by the FLOPs of one token.

        The default uses the trace of the model. If the model has no sequence dimension, it returns the lengths.

        lengths: integers; the result has the same shape.
        """
        return traced_costs(self.describe().traced, lengths)

    #: True if samples may be as long as train.seq_len. False if no sample is longer than the maximum of `lengths`.
    fills_seq_len: bool = True

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "costs_beside" in vars(cls):
            warnings.warn(f"{cls.__name__}.costs_beside is now extra_costs. Rename it.", WeftWarning, stacklevel=2)
            setattr(cls, "extra_costs", vars(cls)["costs_beside"])  # noqa: B010

    def extra_costs(self) -> np.ndarray | None:
        """Return each training sample's cost in addition to `length_costs`, or None if there is no such cost.

        An example is the cost of image encoders. The result is float64 (samples,), in tokens.
        """
        return None

    def eval_batches(self, share: Share) -> Iterable[Any] | None:
        """Return the evaluation batches of one rank, the same number on each, or None without evaluation samples.

        All ranks' batches together must not depend on the number of ranks, so that evaluations are equal under every
        plan.
        """
        from weft.train.tasks import indexed

        return indexed.evaluation_batches(self.samples("eval"), share, self.collate, self.config.eval.batches)

    def nominal_count(self) -> int:
        """Return the approximate number of tokens or samples (`unit`) in a global batch.

        It keeps scaled losses in range and changes no result.
        """
        return self.config.train.global_batch

    # --- model and step ---

    def shapes(self) -> nn.Module:
        """Return the model on the meta device."""
        import torch

        with torch.device("meta"):
            return self.build()

    def initial_model(self, plan: Plan) -> nn.Module:
        """Return the unsharded model that a rank starts from under `plan`. All ranks return the same weights."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            return self.build()

    def initial_weights(self, model: nn.Module) -> StateSource | None:
        """Return an object from which a new run's weights are read, or None if `initial_model` already has them.

        If there is a source, each rank reads its slices from it, and `initial_model` returns parameters on the meta
        device.

        model: the result of `initial_model`, before it is sharded.
        """
        return None

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output for a batch.

        The default calls model(x) for (x, y). For a dict it passes all entries except "labels" by name.
        """
        from weft.train.batches.microbatches import call_model

        return call_model(model, batch)

    def second_model(self, plan: Plan) -> nn.Module | None:
        """Return a frozen model that runs next to the trained one, such as a teacher, or None.

        It is sharded by the same plan. `Forwards` runs it.
        """
        return None

    def second_weights(self, model: nn.Module) -> StateSource | None:
        """Return an object from which the second model's weights are read, or None. See `initial_weights`."""
        return None

    def begin(self, forwards: Forwards) -> None:
        """Begin training. Called once, after the initial weights are loaded and before a checkpoint is loaded.

        Override it to keep `forwards`, which runs the model without gradients.
        """

    def before_step(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return this rank's microbatches for a step or an evaluation. The default returns them unchanged.

        Override it to add values that depend on the full batch or on frozen weights, such as the log-probabilities of a
        reference model. If it raises a StepRefused on all ranks, the run saves and pauses.
        """
        return batches

    def after_step(self, step: int) -> None:
        """Note that a step is done, on all ranks. step: steps done.

        Override it to report values that the loss has computed. Reading them waits for the device.
        """

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor | float]:
        """Return sums over an evaluation batch, by `sum_names`. Their totals are passed to `measure`."""
        return {}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        """Return the metrics of a full evaluation by name.

        sums: totals of `sums` and of `loss`: "loss" (sum of the losses) and "count" (their number).
        """
        return {}

    def scorer(self, model: nn.Module, axis: Axis) -> EvaluationScorer | None:
        """Return an object that computes further `metrics` of an evaluation, or None.

        All ranks call it before an evaluation.

        Args:
            model: the sharded model, in evaluation mode.
            axis: ranks that read different samples.
        """
        return None

    def flops_per_count(self) -> float | None:
        """Return the FLOPs of forward and backward per token or sample (`unit`), or None to report no utilization."""
        return None

    # --- preparing a run, in one process before the ranks start ---

    def facts(self, world_size: int) -> Facts:
        """Return the facts that plan rules use."""
        limits = cost_limits(self.config)
        return Facts(world_size=world_size, global_batch=self.config.train.global_batch, limits=limits)

    def changes(self, before: RunConfig) -> Sequence[tuple[str, Any, Any]]:
        """Return (setting, old, new) for changes since `before` that prevent resuming, in addition to `identity`."""
        return ()

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Make the data ready. The default does nothing.

        If `folder` already contains a run with other data, an override should raise a WeftError.
        """

    def samples_per_epoch(self) -> int:
        """Return the number of samples of one pass over the training data, for train.epochs. Called after `prepare`."""
        return len(self.samples("train") or ())

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        """Return the contents of the task's files in the run folder, by file name.

        notes: lines of text about the data, for users.
        """
        return {}

    def open(self, folder: RunFolder) -> None:
        """Open the files that `keep` wrote. Called first on a rank."""

    # --- for the planner ---

    def describe(self) -> PlannedModel:
        """Describe the model for the planner. The default traces it with two of its samples."""
        from weft.train.tasks.description import describe_by_samples

        return describe_by_samples(self)

    # --- text for users ---

    def name(self) -> str:
        """Return a short name of the trained model."""
        return type(self).__name__

    def model_line(self) -> str:
        """Return the model's name and size."""
        return f"{self.name()}: {format_count(sum(p.numel() for p in self.shapes().parameters()))} parameters"

    def data_lines(self) -> Sequence[str]:
        """Return lines that describe the data, for users."""
        return [f"{self.samples_per_epoch()} {self.sample_unit}"]

    def batch_line(self) -> str:
        """Return a line about the size of a step's batch and of the run."""
        batch, steps = self.config.train.global_batch, self.config.train.steps
        if (most := self.config.train.global_cost) is not None:
            return f"{self.sample_unit} that cost up to {most:g} tokens a step, {steps} steps"
        return f"{batch} {self.sample_unit} a step, {steps} steps, {format_count(batch * steps)} {self.sample_unit}"

    def show(self, folder: RunFolder, step: int) -> str:
        """Return sample output of the trained model at a saved step, for the end of a run, or "".

        Called on the first rank only. `restore_model` of `weft.train.states.model_state` reads the weights.
        """
        return ""

    def sample(self, folder: RunFolder, step: int, forwards: Forwards) -> str:
        """Return sample output of the current weights on the first rank, or "".

        All ranks call it, every `sample.every` steps and at the end of a run. If it returns "" at the end, the run
        calls `show`.

        Args:
            folder: the run's folder.
            step: steps done.
            forwards: the sharded model.
        """
        return ""

    #: Names of files that `show` or `sample` write into the run folder.
    leaves: ClassVar[tuple[str, ...]] = ()

    def sample_lines(self, place: int) -> Sequence[str]:
        """Return lines that show a training sample as the model receives it. Called after `open`.

        The default shows the sample's position in `samples("train")` and its contents.

        place: position in training order, from 0 and across epochs. The first step begins at 0, and step s at
            `step_borders().first(s - 1)`.
        """
        from weft.train.tasks import indexed

        where, sample = indexed.sample_in_order(self.samples("train"), self.config.seed, place)
        return [where, *described(sample)]

    def try_line(self, folder: RunFolder) -> str:
        """Return the command that tries the trained model, or ""."""
        return ""


# Tasks whose model is a separate object.


class TaskModel(Protocol):
    """The model of a task, with the methods of `Task`.

    `initial` is `Task.initial_model`, `weights` is `initial_weights`, and `line` is `model_line`.
    """

    def build(self) -> nn.Module: ...
    def shapes(self) -> nn.Module: ...
    def initial(self, plan: Plan) -> nn.Module: ...
    def weights(self, model: nn.Module) -> StateSource | None: ...
    def name(self) -> str: ...
    def line(self) -> str: ...


class ModelTask(Task):
    """A task that takes its model from `network`."""

    @property
    def network(self) -> TaskModel:
        """The model that the config describes."""
        raise NotImplementedError

    def build(self) -> nn.Module:
        return self.network.build()

    def shapes(self) -> nn.Module:
        return self.network.shapes()

    def initial_model(self, plan: Plan) -> nn.Module:
        return self.network.initial(plan)

    def initial_weights(self, model: nn.Module) -> StateSource | None:
        return self.network.weights(model)

    def name(self) -> str:
        return self.network.name()

    def model_line(self) -> str:
        return self.network.line()


def setting_error(key: str, value: object, rule: str) -> ConfigError:
    """Return a ConfigError about one setting, with the text "key=value: rule"."""
    return ConfigError([Problem(key, f"{key}={value}: {rule}")])
