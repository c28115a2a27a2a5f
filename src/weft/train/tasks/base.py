"""What a sample is made of, in lines for people: text as it is, numbers where they are few, else how large they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from weft.config.rule import Facts
from weft.config.run_config import RunConfig
from weft.train.batching_by_cost import StepBorders, cost_limits, costs_of, traced_costs
from weft.train.tasks.data_share import Batches, MapDataset, Share
from weft.train.tasks.description import Forwards
from weft.units import format_count

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.config.plan import Plan
    from weft.parallel.state.flat_slices import StateSource
    from weft.planner.search.model_source import PlannedModel
    from weft.train.folder import RunFolder

_MOST_VALUES, _MOST_TEXT = 16, 2000


def described(sample: Any, name: str = "") -> list[str]:
    """Return a line for each tensor, number and text of a sample.

    Of many values a digest says whether two samples are the same.

    Args:
        sample: nested in tuples, lists, mappings and dataclasses.
        name: what it is called.
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
    """A tensor, an array, or a long list of numbers, as an array of a format that numpy has."""
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


# The seam for kinds of training: what is trained, on what, and what is told of it.

#: (stage, done, total) while data is prepared.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that evaluations find beside the loss. name: its key in events.jsonl. unit: may be empty.

    help: what it means; the end of a run prints it below the numbers.
    """

    name: str
    unit: str
    help: str

    @property
    def label(self) -> str:
        """What stands beside its value on a line."""
        return self.unit or self.words

    @property
    def words(self) -> str:
        """Its name in words."""
        return self.name.replace("_", " ")


class Task:
    """One kind of training. A subclass writes `build`, `samples` and `loss`; the rest has a default.

    An instance is made with the options of the config's [task.options] as keyword arguments; then `config` is set.
    Weft makes one in the process that prepares a run, and one on each rank. What is wrong with options or data raises
    a WeftError (or ValueError in the constructor).
    """

    #: The run's settings. Weft sets it before anything is called.
    config: RunConfig

    #: What a loss is the mean over and throughput counts, in the plural.
    unit: ClassVar[str] = "samples"
    #: What a batch holds `train.global_batch` of, in the plural.
    sample_unit: ClassVar[str] = "samples"
    #: What evaluations find beside the loss; `sums` and `measure` compute it.
    metrics: tuple[Metric, ...] = ()
    #: Names of what `sums` gives.
    sum_names: tuple[str, ...] = ()
    #: Sections and settings of the decoder that this task reads too, such as "data" or "train.seq_len". Weft refuses
    #: the others where they are set, so that none is silently ignored.
    sections: ClassVar[tuple[str, ...]] = ()
    #: Of those, what decides the weights of a step: with another value a run does not go on.
    identity: ClassVar[tuple[str, ...]] = ()

    # --- what every task writes ---

    def build(self) -> nn.Module:
        """Build the model with its initial weights: plain PyTorch.

        Weft seeds torch before; under the meta device it makes shapes alone.
        """
        raise NotImplementedError(f"{type(self).__name__}.build: it returns the model")

    def samples(self, split: str) -> MapDataset | None:
        """Return the samples of "train" or "eval" by index; None of "eval": nothing is evaluated.

        Weft shuffles by `seed`, cuts global batches by samples, and calls `collate` for each part.
        """
        raise NotImplementedError(f"{type(self).__name__}.samples: it returns the samples of a split")

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return (sum of the losses, number of what they are of).

        Weft divides once, over all ranks and microbatches.
        """
        raise NotImplementedError(f"{type(self).__name__}.loss: it returns (sum, number)")

    # --- batches ---

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch of some samples. By default stacked as torch's DataLoader does: (x, y) gives a batch (x, y)."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    def batches(self, share: Share) -> Batches:
        """Return the training batches of one rank."""
        from weft.train.tasks.indexed import IndexedBatches

        costs = costs_of(self, share.rows, share.microbatches)
        samples = self.samples("train") or ()
        return IndexedBatches(samples, share, self.collate, seed=self.config.seed, costs=costs, places=self.places())

    def places(self) -> StepBorders:
        """Return which samples each step takes: train.global_batch of them, or those that train.global_cost allows.

        Asked after `prepare` or `open`.
        """
        from weft.train.tasks.indexed import epoch_order

        return StepBorders.of_task(self, lambda number, epoch: epoch_order(number, self.config.seed, epoch))

    def lengths(self) -> Sequence[int] | np.ndarray | None:
        """Return how long each training sample is, by its index; None: the task has no batches by cost.

        It is what `collate` fills samples up to, such as tokens. Asked after `prepare` or `open`.
        """
        return None

    def length_costs(self, lengths: np.ndarray) -> np.ndarray:
        """Return what samples of some lengths cost, in tokens: their FLOPs, divided by those of one token alone.

        By default from the trace of the model; where nothing in it is a sequence, their lengths.

        lengths: whole numbers; the result has their shape.
        """
        return traced_costs(self.describe().traced, lengths)

    #: Whether samples may be as long as train.seq_len; else the longest of `lengths` is the longest that there is.
    fills_seq_len: bool = True

    def costs_beside(self) -> np.ndarray | None:
        """Return what each training sample costs beside its length, in tokens too; None: nothing.

        Such as encoders of its pictures. float64 (samples,), by index.
        """
        return None

    def eval_batches(self, share: Share) -> Iterable[Any] | None:
        """Return the evaluation set of one rank, equally many batches on each; None where there is none.

        The whole set must not depend on the share: evaluations are then equal under every plan.
        """
        from weft.train.tasks.indexed import evaluation_batches

        return evaluation_batches(self.samples("eval"), share, self.collate, self.config.eval.batches)

    def nominal_count(self) -> int:
        """Return about how many of `unit` one global batch holds.

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
        """Return the model that a rank of `plan` starts from, the same weights on all."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            return self.build()

    def initial_weights(self, model: nn.Module) -> StateSource | None:
        """Return where a new run's weights are read from, each rank its slices; None: `initial_model` has them.

        With it, `initial_model` returns shapes: all parameters on the meta device. model: that model, before it is cut.
        """
        return None

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output for a batch.

        By default: model(x) of (x, y), and of a dict all but "labels" by name.
        """
        from weft.train.microbatches import call_model

        return call_model(model, batch)

    def second_model(self, plan: Plan) -> nn.Module | None:
        """Return a model that stands beside the trained one and never changes, such as a teacher; None: there is none.

        It lies on the ranks as the plan says; `Forwards` gives what it computes.
        """
        return None

    def second_weights(self, model: nn.Module) -> StateSource | None:
        """Return where the second model's weights are read from, as `initial_weights` does for the first one."""
        return None

    def begin(self, forwards: Forwards) -> None:
        """Take hold of the model on its ranks, once its first weights are there and before a checkpoint's are.

        forwards: asks it for numbers that no gradient goes through.
        """

    def before_step(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return the microbatches of a global batch as the step, or an evaluation, gets them.

        For what must be known of all of them first, or of weights that do not train.
        """
        return batches

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor | float]:
        """Return what `measure` needs of an evaluation batch, by `sum_names`: numbers that add up."""
        return {}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        """Return the metrics of a whole evaluation by name. sums: of `sums`, and "loss" and "count" of `loss`."""
        return {}

    def flops_per_count(self) -> float | None:
        """Return the FLOPs of forward and backward for one of `unit`; None: no utilisation is shown."""
        return None

    # --- preparing a run, in one process before the ranks start ---

    def facts(self, world_size: int) -> Facts:
        """Return what the rules of plans may know."""
        limits = cost_limits(self.config)
        return Facts(world_size=world_size, global_batch=self.config.train.global_batch, limits=limits)

    def changes(self, before: RunConfig) -> Sequence[tuple[str, Any, Any]]:
        """Return (setting, old, new) of what makes another run than the one begun with `before`, beside `identity`."""
        return ()

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Make the data ready. A `folder` that holds a run already must go on with the same data, or be refused."""

    def samples_per_epoch(self) -> int:
        """Return the number of samples of one pass over the training data, for train.epochs; asked after `prepare`."""
        return len(self.samples("train") or ())

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        """Return the contents of the task's own files in the run folder, by name.

        notes: lines for people of the data.
        """
        return {}

    def open(self, folder: RunFolder) -> None:
        """Open, on a rank and before anything else, what `keep` wrote."""

    # --- for the planner ---

    def describe(self) -> PlannedModel:
        """Describe the model in the planner's words; by default from tracing it with two of its samples."""
        from weft.train.tasks.description import describe_by_samples

        return describe_by_samples(self)

    # --- what people see ---

    def name(self) -> str:
        """Say what is trained, in a word or two."""
        return type(self).__name__

    def model_line(self) -> str:
        """Say the model's name and size."""
        return f"{self.name()}: {format_count(sum(p.numel() for p in self.shapes().parameters()))} parameters"

    def data_lines(self) -> Sequence[str]:
        """Describe the data, a line for each part of it."""
        return [f"{self.samples_per_epoch()} {self.sample_unit}"]

    def batch_line(self) -> str:
        """Say what a step and the whole run read."""
        batch, steps = self.config.train.global_batch, self.config.train.steps
        if (most := self.config.train.global_cost) is not None:
            return f"{self.sample_unit} that cost up to {most:g} tokens a step, {steps} steps"
        return f"{batch} {self.sample_unit} a step, {steps} steps, {format_count(batch * steps)} {self.sample_unit}"

    def show(self, folder: RunFolder, step: int) -> str:
        """Return what the trained model of a saved step makes, as text for the end of a run; "": nothing.

        Called on the first rank alone; `load_weights(model, folder, step)` reads the weights.
        """
        return ""

    #: What `show` leaves in the run folder, by name.
    leaves: ClassVar[tuple[str, ...]] = ()

    def sample_lines(self, place: int) -> Sequence[str]:
        """Show a training sample as the model sees it.

        By default: where it is among `samples("train")`, and what it is made of. After `open`; torch need not be there.

        place: in the order of training, from 0 and over all epochs: the first of step s has (s - 1) * global_batch.
        """
        from weft.train.tasks.indexed import sample_in_order

        where, sample = sample_in_order(self.samples("train"), self.config.seed, place)
        return [where, *described(sample)]

    def try_line(self, folder: RunFolder) -> str:
        """Return the command that tries the trained model; "": there is none."""
        return ""
