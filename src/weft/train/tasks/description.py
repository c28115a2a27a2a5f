"""A task's access to its sharded model (`Forwards`), and descriptions of models for the planner."""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.config.shapes.hugging_face_config import number
from weft.config.shapes.traced_model import Limit, TracedModel
from weft.errors import LayoutError, ModelError, WeftError
from weft.models.adapters import adapted, add_adapter
from weft.models.inspect import dry_run, hugging_face, layers
from weft.models.inspect.blocks import repeated_blocks
from weft.models.inspect.chain import find_chain
from weft.models.inspect.describe import Outline, trace_model
from weft.models.inspect.dry_run import call_function
from weft.models.inspect.find_layout import explain_layout
from weft.parallel.state.precision import Precision, cast_inputs, formats
from weft.parallel.tensor.read_layout import check_layout
from weft.planner.search.model_source import PlannedModel, UnknownFamily, read_model
from weft.train.weights.run_adapter import adapter_size

if TYPE_CHECKING:
    from torch import Tensor

    from weft.config.run_config import RunConfig
    from weft.train.batches.data_share import MapDataset

#: Which weights to use: the model, the model without its adapter, or the second model.
Which = Literal["model", "base", "second"]


class Forwards(Protocol):
    """A task's access to its sharded model: forwards in evaluation mode, and sums over ranks.

    All ranks call the same methods in the same order.
    """

    @property
    def model(self) -> nn.Module:
        """Return the sharded model."""
        ...

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the ranks."""
        ...

    @property
    def plan(self) -> Plan:
        """Return the plan that the model is sharded by."""
        ...

    @property
    def device(self) -> torch.device:
        """Return this rank's device."""
        ...

    @property
    def rank(self) -> int:
        """Return this rank's global rank."""
        ...

    @property
    def size(self) -> int:
        """Return the world size."""
        ...

    def wait(self) -> None:
        """Wait for all ranks."""

    @property
    def is_counted(self) -> bool:
        """True if this rank's losses are summed. Of the cp ranks of a sequence, only the first one's are."""
        ...

    @property
    def data_rank(self) -> int:
        """Return this rank's index among the ranks that read different samples."""
        ...

    @property
    def data_size(self) -> int:
        """Return the number of ranks that read different samples."""
        ...

    def rows(self, batches: Sequence[Any], each: Callable[[Any, Any], Tensor], *, of: Which = "model") -> list[Tensor]:
        """Run the model in evaluation mode, and return `each(output, batch)` per batch: a value per row of labels.

        Values are summed over the cp ranks of a sequence. On ranks without output, such as ranks of the first pipeline
        stages, they are 0. Results are float64.

        Args:
            batches: the same number on each rank.
            each: called with the output for this rank's part of the sequences and that part of the batch; returns a
                value per row, (R,).
            of: which weights to use.
        """
        ...

    def second(self, call: Callable[[Any], Any]) -> Any:
        """Return call(model) without gradients, for the model of `Task.second_model`, such as a teacher.

        Batches in the call must already be sharded for this rank. Only for tasks with such a model.
        """
        ...

    def total(self, values: Tensor) -> Tensor:
        """Sum results of `rows` over ranks with different samples. All ranks get the same sum."""
        ...

    def along_sequence(self, values: Tensor) -> Tensor:
        """Return the sum of values over the cp ranks of a sequence. Gradients flow through the sum."""
        ...

    def on_first(self, act: Callable[[], Any]) -> Any:
        """Run `act` on the first rank, and return its result on all ranks. The result must be a JSON value."""
        ...

    def record(self, event: Mapping[str, object], /) -> None:
        """Write an event to events.jsonl while training. Does nothing on ranks other than the first."""
        ...


# Descriptions of any module for the planner: costs from a trace, and the plans that the model supports.

_STYLES = {"colwise": "columns", "rowwise": "rows", "vocab": "vocab"}


def trace(source: str) -> TracedModel:
    """Return the description of the model that `package.module:function` returns, for `weft.search` and `weft plan`.

    The function is called without arguments, with meta as the default device. It returns a model, or a model and an
    example: the arguments of its forward (a tensor, a tuple, or a dict), batch_fn(step, size) as in `weft verify`, or a
    DataLoader. Without an example, the model's first layer determines if the input is ids, an image or features.

    Raises:
        ModelError: if the function cannot be imported or called or returns no model, or the model cannot be traced on
            the meta device.
    """
    with torch.device("meta"):
        model, rest = call_function(source)
    try:
        return replace(describe_by_tracing(model, rest[0] if rest else None), name=source)
    except ModelError as error:
        raise ModelError(f"model={source}: {str(error).rstrip('.')}.") from error


def describe_folder(folder: Path, build: Callable[[Any], nn.Module] = hugging_face.model_of_config) -> PlannedModel:
    """Return the planner's description of the model of a Hugging Face folder.

    It is read from config.json if the planner supports the family. Otherwise the model is traced.

    Args:
        folder: folder with config.json, or that file.
        build: builds the traced model from a transformers config, on the meta device.

    Raises:
        ModelError: if the model cannot be traced on the meta device.
    """
    try:
        return read_model(str(folder))
    except UnknownFamily:
        pass
    file = folder if folder.is_file() else folder / "config.json"
    with torch.device("meta"):
        model = build(hugging_face.load_model_config(folder))
    name = file.parent.name or str(file.parent.resolve())
    try:
        traced = describe_by_tracing(model)
    except ModelError as error:
        raise ModelError(f"model={folder}: {str(error).rstrip('.')}.") from error
    most = number(getattr(model.config, "text_config", model.config), "positions")
    if traced.reads_sequence and most is not None and most < traced.max_seq_len:
        traced = replace(traced, max_seq_len=most)
    return replace(read_model(replace(traced, name=name)), folder=file.parent)


def describe_by_tracing(model: nn.Module, example: Any = None) -> TracedModel:
    """Trace a model and return its description. The model is modified, and cannot be used afterwards.

    It is moved to the meta device and bf16, and gets an adapter on its linear layers.

    example: arguments of a forward, or batch_fn(step, size). If None, the model's first layer determines if the input
    is ids, an image or features.

    Raises:
        ModelError: if the model does not run on the meta device, or if it is one of Weft's decoders with experts.
    """
    inputs = dry_run.Inputs(model, example)
    model.to("meta").train()
    if isinstance(model, layers.KnownModel) and model.has_routers:
        raise ModelError(
            "how many tokens each expert gets depends on values, which a trace does not have. Give its "
            "size, or a config of Weft"
        )
    cut, styles, why_not = _tensor_parallel(model, inputs.example)
    by_vocabulary = [model.get_submodule(path) for path, style in styles.items() if style == "vocab"]
    head = layers.find_lm_head(model) or next((one for one in by_vocabulary if isinstance(one, nn.Linear)), None)
    table = next((one for one in by_vocabulary if isinstance(one, nn.Embedding)), None)
    outline = Outline(blocks=repeated_blocks(model), styles=styles, head=head, table=table if head else None)
    _halve(model)
    longest = hugging_face.longest_text(model)
    step = inputs.sequence_step(model, longest)
    with hugging_face.one_document():
        found = trace_model(model, outline, inputs.call, seq_step=step)
    limits = dict(_limits(model, found, cut, why_not))
    longest = (hugging_face.longest_sequence(model) or 2**20) if step else 1
    usual = inputs.seq_len if step and inputs.given else 0
    usual = usual or (0 if step else 1)
    return replace(
        found,
        limits=tuple(limits.items()),
        max_seq_len=longest,
        default_seq_len=usual,
        linears=_linears(model),
        crossings=_crossings(model),
    )


def _crossings(model: nn.Module) -> float:
    """Return the mean number of hidden state tensors that are passed from one block to the next.

    Within a decoder, this includes the encoder's output. Return 1 if the model has no chain of blocks.
    """
    try:
        chain = find_chain(model)
    except ModelError:
        return 1.0
    borders = len(chain.blocks) - 1
    return 1.0 + (borders - chain.joint) / borders if chain.joint and borders > 0 else 1.0


def _linears(model: nn.Module) -> tuple[tuple[int, int, int], ...]:
    """Return (inputs, outputs, number of layers) for each shape of linear layers that can have an adapter.

    Adds adapters to the model itself. Return () if no layer can have one.
    """
    try:
        record = adapted(add_adapter(model, rank=1))
    except ModelError:
        return ()
    weights = Counter(layers.weight_of(model.get_submodule(path)).shape for path in (record.layers if record else ()))
    return tuple((shape[1], shape[0], count) for shape, count in weights.items())


def _halve(model: nn.Module) -> None:
    precision = Precision.of(Plan(precision="bf16"))
    for param, dtype in formats(model, precision).items():
        param.data = param.data.to(dtype)
    cast_inputs(model, precision)
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "use_cache"):
        config.use_cache = False


def _tensor_parallel(model: nn.Module, example: Any) -> tuple[tuple[int, ...], dict[str, str], str]:
    """Return the possible values of tp, the styles of sharded modules by path, and why other values are impossible."""
    try:
        layout = explain_layout(model, example).layout
        legal = check_layout(model, layout)
    except (LayoutError, ModelError) as error:
        return (1,), {}, str(error).partition(". ")[0].removeprefix("layout: ").rstrip(".")
    shown = ", ".join(map(str, legal))
    found = {path: layout.style(path) for path, _ in model.named_modules()}
    styles = {path: _STYLES[one.name] for path, one in found.items() if one is not None and one.name in _STYLES}
    return tuple(legal), styles, f"its layers divide evenly over {shown} ranks"


def _limits(model: nn.Module, found: TracedModel, cut: tuple[int, ...], why_cut: str) -> list[tuple[str, Limit]]:
    limits = [("tp", Limit(cut, why_cut))]
    kind = type(model).__name__
    attention = found.attention
    if not found.reads_sequence:
        limits += [(name, Limit((value,), "the model's input has no sequence dimension to shard"))
                   for name, value in (("cp", 1), ("sp", 0))]  # fmt: skip
    elif not isinstance(model, layers.KnownModel) and not hugging_face.is_hugging_face(model):
        rule = f"every rank would compute the attention of {kind}, a model of your own, for all tokens"
        limits.append(("cp", Limit((1,), rule)))
    elif _has_towers(model):
        rule = f"every rank of cp would get full samples of {kind}, which takes media, and the planner prices only text"
        limits.append(("cp", Limit((1,), rule)))
    elif attention is None or not attention.causal:
        limits.append(("cp", Limit((1,), "its attention is not torch's fused one under a causal mask alone")))
    if any(each.batch.one > 1 for layer in found.layers for each in layer.matmuls):
        rule = "a trace does not show which modules are experts. To divide them, plan from the model's config.json"
        limits.append(("ep", Limit((1,), rule)))
    try:
        find_chain(model)
    except ModelError as error:
        rule = str(error).partition(". ")[0].partition(": ")[2] or str(error)
        limits.append(("pp", Limit((1,), rule.rstrip("."))))
    return limits


def _has_towers(model: nn.Module) -> bool:
    if not hugging_face.is_hugging_face(model) or not hugging_face.takes_media(model):
        return False
    return len({layers.parent_of(path) for path in repeated_blocks(model)}) > 1


# The default description of a task for the planner: its model, traced with the task's samples.

T = TypeVar("T")


class SampledTask(Protocol):
    """The members of a task that `describe_by_samples` uses."""

    config: RunConfig
    sample_unit: ClassVar[str]

    def name(self) -> str: ...
    def shapes(self) -> nn.Module: ...
    def samples(self, split: str) -> MapDataset | None: ...
    def collate(self, samples: list[Any]) -> Any: ...


def describe_by_samples(task: SampledTask) -> PlannedModel:
    """Return the planner's description of a task's model.

    The model is traced on the meta device, with a batch of the first two training samples.

    Raises:
        ModelError: if there are fewer than two samples, a method of the task fails, or the model cannot be traced.
    """
    field = f"task.name={task.config.task.name}"
    samples = _call(task, "samples", lambda: task.samples("train")) or ()
    if len(samples) < 2:
        raise ModelError(f"{field}: it has {len(samples)} training samples, and tracing takes 2. Add some.")
    batch = _call(task, "collate", lambda: task.collate([samples[0], samples[1]]))
    shapes = _call(task, "build", task.shapes)

    def example(step: int, size: int) -> Any:
        return tuple(batch) if isinstance(batch, list) else batch

    try:
        traced = describe_by_tracing(shapes, example)
    except ModelError as error:
        raise ModelError(f"{field}: {str(error).rstrip('.')}.") from error
    adapter = None
    if task.config.adapter.rank:
        adapter = adapter_size(_call(task, "build", task.shapes), task.config, traced.num_layers)
    found = read_model(replace(traced, name=task.name()))
    return replace(found, config=task.config, sample_unit=task.sample_unit, counted_adapter=adapter)


def _call(task: SampledTask, method: str, call: Callable[[], T]) -> T:
    """Call a user's method and return its result.

    Raises ModelError with the exception's message and position if it raises an exception that is no WeftError.
    """
    try:
        return call()
    except WeftError:
        raise
    except Exception as error:  # user code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        own = inspect.getfile(type(task))
        frame = next((each for each in reversed(frames) if each.filename == own), frames[-1])
        raise ModelError(
            f"task.name={task.config.task.name}: {method} raised {type(error).__name__} at "
            f"{Path(frame.filename).name}:{frame.lineno} ({error}). Correct it; `weft train` prints the traceback."
        ) from error
