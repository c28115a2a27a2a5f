"""The plans that `weft verify` tries, in order, and the model that it trains.

The plan rules read shapes, not modules: only parallelizing a model shows that it has no layers for tensor parallelism,
or that its tokens interact outside attention. Each technique is tried first in the plan with the fewest other
techniques. If the model does not support it there, all plans that use at least the same techniques are dropped, so that
only plans that can run are selected.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from weft.config.fields.layout import Layout
from weft.config.files import load_config
from weft.config.plan import PLAN_FIELDS, Plan
from weft.config.rules.rule import Facts
from weft.config.run_config import RunConfig
from weft.config.sections import OptimizerSection
from weft.config.shapes.decoder_shape import DecoderSpec, shape_problems
from weft.config.shapes.hugging_face_config import decoder_shape
from weft.config.shapes.model_spec import decoder_spec, model_names, resolve_decoder
from weft.config.table_section import TableSection
from weft.errors import ConfigError, ModelError
from weft.hub import downloaded_folder, is_hub_text
from weft.models.initialize import BATCH_NORMS
from weft.models.inspect import hugging_face
from weft.models.inspect.dry_run import call_function
from weft.models.registry import build_decoder
from weft.train.batches.microbatches import call_model
from weft.train.folder import RunFolder
from weft.train.states.hub_names import download_all, resolved_config
from weft.train.tasks.base import Task
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.train.tasks.registry import find_task
from weft.train.weights.published_weights import fill_full
from weft.train.weights.run_adapter import with_adapter
from weft.verify.case_data import DTYPES, CaseData, Settings
from weft.verify.foreign_config import (
    has_inputs,
    read_config,
)
from weft.verify.matrix import covering, row_of, sample
from weft.verify.plain_tables import optimizer_with_tables

#: Techniques that are first tried alone.
_PROBED = frozenset(name for name, field in PLAN_FIELDS.items() if field.probed)


def techniques_of(plan: Plan) -> frozenset[str]:
    """Return the techniques of a plan that the model must support: "tp", "cp_mode=ring", "zero=3", "recompute=full"."""
    asked = {name: field for name, field in PLAN_FIELDS.items() if field.asks and getattr(plan, name) != field.default}
    return frozenset(name if field.asks == "use" else f"{name}={getattr(plan, name)}" for name, field in asked.items())


def covering_plans(plans: Sequence[Plan]) -> list[Plan]:
    """Choose a small subset of the plans that covers every layout and every pair of settings."""
    return [plans[index] for index in covering([row_of(plan) for plan in plans])]


@dataclass
class Sweep:
    """Iterates over the plans to try. Call `refuse` if the last plan cannot be applied to the model.

    Attributes:
        every: all legal plans.
        choose: selects plans to try from the allowed ones.
        limit: maximum number of chosen plans that are not refused, sampled with `seed`. None for all.
        refused: unsupported sets of techniques, each with the reason.
        num_refused: number of refused plans.
    """

    every: Sequence[Plan]
    choose: Callable[[Sequence[Plan]], list[Plan]] = covering_plans
    limit: int | None = None
    seed: int = 0
    refused: dict[frozenset[str], str] = field(default_factory=dict)
    num_refused: int = 0

    def refuse(self, plan: Plan, reason: str) -> None:
        """Drop all plans that need at least the techniques of this one, which the model does not support."""
        self.num_refused += 1
        if asked := techniques_of(plan):
            self.refused.setdefault(asked, reason)

    def is_refused(self, plan: Plan) -> bool:
        """Return True if the plan uses all techniques of an unsupported set."""
        asked = techniques_of(plan)
        return any(other <= asked for other in self.refused)

    def reasons(self) -> dict[str, str]:
        """Return the reason for each minimal set of unsupported techniques."""
        least = [asked for asked in self.refused if not any(other < asked for other in self.refused)]
        return {" ".join(sorted(asked)): self.refused[asked] for asked in least}

    def allowed(self) -> list[Plan]:
        """Return the legal plans without unsupported techniques."""
        return [plan for plan in self.every if not self.is_refused(plan)]

    def plans(self) -> Iterator[Plan]:
        """Yield, for each technique, the plan with the fewest other techniques. Then yield the chosen plans.

        If a plan cannot be applied, call `refuse` before requesting the next one.
        """
        done: dict[Plan, None] = {}
        for plan in self._probes():
            done[plan] = None
            yield plan
        left = self.limit
        while rest := self._rest(done):
            for plan in rest:
                if left == 0:
                    return
                if not self.is_refused(plan):
                    done[plan] = None
                    yield plan
                    left = left if left is None or self.is_refused(plan) else left - 1

    def part(self, number: int, count: int) -> Iterator[Plan]:
        """Yield the same first plans as `plans`, then part `number` (from 1) of `count` parts of the chosen plans.

        A model rejects the same techniques in every part, so all parts together are the full selection.
        """
        done = set[Plan]()
        for plan in self._probes():
            done.add(plan)
            yield plan
        chosen = [plan for plan in self.choose(self.allowed()) if plan not in done]
        chosen = chosen if self.limit is None else sample(chosen, self.limit, self.seed)
        for plan in chosen[number - 1 :: count]:
            if not self.is_refused(plan):
                yield plan

    def _rest(self, done: Mapping[Plan, None]) -> list[Plan]:
        rest = [plan for plan in self.choose(self.allowed()) if plan not in done]
        if self.limit is not None:
            random.Random(self.seed).shuffle(rest)
        return rest

    def _probes(self) -> Iterator[Plan]:
        """Yield, for each technique, the plan with the fewest other techniques."""
        asked = {plan: techniques_of(plan) for plan in self.every}
        seen: set[str] = set()
        for plan in sorted(self.every, key=lambda plan: len(asked[plan])):
            new = {word for word in asked[plan] if word.partition("=")[0] in _PROBED and word != "zero=1"} - seen
            if new and not self.is_refused(plan):
                seen |= new
                yield plan


# The model that `weft verify` trains: the user's model from any source, as a case with data, loss and optimizer.

#: AdamW's eps if no config sets the optimizer. Softmax does not depend on a key bias, so the bias's gradient is only
#: rounding (1e-18 instead of 1e-2), which differs between plans. With the usual eps of 1e-8, AdamW turns it into
#: weights that differ by 4e-10.
EPS = 1e-6

#: Modules that draw random numbers in training, at a rate `p`.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Subject:
    """A description of the model, from which each process can build it.

    Attributes:
        source: the user's text: a model name, a path, or package.module:function.
        kind: "decoder", "task", "hf" or "function".
        shape: shape of the decoder; None for models without one.
        plan, layout: plan and layout of the config file, if there is one.
        config: a task's config.
        folder: a task's run folder with prepared data.
    """

    source: str
    kind: str
    settings: Settings
    shape: DecoderSpec | None = None
    optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(eps=EPS))
    plan: str = ""
    layout: Layout | None = None
    config: RunConfig | None = None
    folder: str = ""

    def prepared(self, folder: Path) -> Subject:
        """Return a copy whose task data is prepared, with the files that ranks read in `folder`."""
        if self.config is None:
            return self
        run = RunFolder(folder / "run")
        task = find_task(self.config)
        task.prepare(run, None)
        run.path.mkdir(parents=True, exist_ok=True)
        for name, text in task.keep(run, ()).items():
            (run.path / name).write_text(text)
        return replace(self, folder=str(run.path))

    def facts(self, world_size: int | None = None) -> Facts:
        """Return the properties of the model and the run that plan rules check."""
        if self.config is not None and world_size is not None:
            return find_task(self.config).facts(world_size)
        return Facts(
            model=self.shape, global_batch=self.even_batch, seq_len=self.settings.seq_len, world_size=world_size
        )

    @property
    def even_batch(self) -> int | None:
        """Global batch size if ranks must divide it evenly, as in `weft train`; None if they may differ."""
        return self.settings.global_batch if self.kind in ("decoder", "task") else None

    def build(self) -> BuiltCase:
        """Return the model with its data and loss. Raises ModelError if it cannot be built."""
        torch.manual_seed(self.settings.seed)
        dtype = DTYPES[self.settings.dtype]
        if self.kind == "decoder":
            assert self.shape is not None
            model = build_decoder(self.shape, dtype=dtype, seed=self.settings.seed)
            return BuiltCase(self, model, forward=model_forward, vocab_size=self.shape.vocab_size)
        if self.kind == "task":
            return self._build_task(dtype)
        if self.kind == "hf":
            return BuiltCase(self, hugging_face.model_of_config(_config(self.source, self.settings)).to(dtype))
        model, rest = call_function(self.source)
        self._check_parameters(model)
        data, loss_fn = (*rest, None, None)[:2]
        vocab_size = getattr(getattr(model, "spec", None), "vocab_size", None)
        if data is None and vocab_size is None and not has_inputs(model):
            raise ModelError(
                f"model={self.source}: its inputs are unknown. Return (model, loader) with a DataLoader, or (model, "
                "batch_fn), where batch_fn(step, size) gives {'x': tensor, 'labels': tensor}."
            )
        return BuiltCase(self, model.to(dtype), data=data, loss_fn=loss_fn, vocab_size=vocab_size)

    def _check_parameters(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            if is_lazy(param):
                rule = f"parameter {name!r} has no shape yet. Run one batch through the model before you return it"
            elif param.is_complex():
                rule = f"parameter {name!r} is complex. Keep it as torch.view_as_real of it"
            else:
                continue
            raise ModelError(f"model={self.source}: {rule}.")

    def _build_task(self, dtype: torch.dtype) -> BuiltCase:
        """Build the task's model with its initial weights, its training batches, forward and loss."""
        assert self.config is not None
        task = find_task(self.config)
        if self.folder:
            task.open(RunFolder(Path(self.folder)))
        model = task.initial_model(Plan())
        weights = task.initial_weights(model)
        if weights is not None:  # a rank would read its slices into meta tensors; here one process reads all
            model = task.build()
            fill_full(model, weights)
        model = with_adapter(model, self.config).to(dtype)
        return BuiltCase(self, model, forward=task.forward, task=task, loss_fn=task.loss)


class _Called(Exception):
    """Raised by a replaced forward to return its arguments."""


class BuiltCase(CaseData):
    """A `Case` for a built model. `model()` returns the same object each time, so a case is trained only once.

    data: samples of a loader, or batch_fn(step, size). task: the task that provides each rank's batches, as in a run.
    """

    def __init__(
        self,
        subject: Subject,
        model: nn.Module,
        *,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        data: Callable[[int, int], Any] | None = None,
        task: Task | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        vocab_size: int | None = None,
    ):
        self.notes = _quieten(model)
        super().__init__(subject.settings, subject.kind, model, data, task, vocab_size)
        if self.text_alone:
            self.notes.append(f"the model trains on text alone: {self.text_alone}")
        self.num_steps, self.max_grad_norm = subject.settings.num_steps, 1.0
        self.source, self.layout = subject.source, subject.layout
        self._forward, self._loss_fn, self._optimizer = forward, loss_fn, subject.optimizer
        self._tables = subject.config.tables if subject.config is not None else TableSection()
        has_norms = any(isinstance(module, BATCH_NORMS) for module in model.modules())
        self.norm_group = subject.settings.global_batch if has_norms else 0
        if subject.settings.dtype == "float64":
            # transformers then loops over experts: its default grouped matmul does not support float64.
            choices = (getattr(module, "set_experts_implementation", None) for module in model.modules())
            if (choose := next(filter(None, choices), None)) is not None:
                choose("eager")  # also in submodels
        # Use the same loss object as a run, with the attributes that plans read.
        own = token_cross_entropy if subject.kind == "decoder" else None if task is None else task.loss
        self.loss = self._loss if own is None else own

    def model(self) -> nn.Module:
        return self._model

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_with_tables(model, self._optimizer, self._tables, self.layout)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return self._forward(model, batch) if self._forward else call_model(model, batch)

    def example(self, model: nn.Module) -> Any:
        """Return example arguments of forward: a tuple or a dict, or None if the call uses both or neither."""

        def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
            raise _Called(args, kwargs)

        handle = model.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.forward(model, self.batch(0))
        except _Called as called:
            args, kwargs = called.args
            return None if args and kwargs else args or kwargs
        finally:
            handle.remove()
        return None

    def _loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
        if self._loss_fn is not None:
            return self._loss_fn(output, batch)
        output = _first_tensor(output)
        labels = batch.get("labels") if isinstance(batch, dict) else None
        if self.kind == "hf" and labels is not None and len(output) % len(labels):
            raise ModelError(
                f"model of type {self.source}: its output has {len(output)} rows for {len(labels)} samples, so a loss "
                "of each sample is unknown. Return (model, loader, loss) from package.module:function."
            )
        if labels is None or labels.is_floating_point():
            target = 0.5 if labels is None else labels
            return (output - target).square().sum(), len(output)
        if output.ndim == 3 and labels.shape == output.shape[:2]:
            return token_cross_entropy(output, batch)
        if self.kind == "hf" and (output.ndim != 2 or labels.ndim != 1):  # boxes, features, classes of a sequence
            return (output - 0.5).square().sum(), len(output)
        logits = output if output.dtype == torch.float64 else output.float()
        return F.cross_entropy(logits, labels, reduction="sum"), len(output)


def find_subject(source: str, settings: Settings) -> Subject:
    """Return the subject of `source`: a model name, a config file, a Hugging Face folder, or package.module:function.

    Raises ModelError if no model is found or its sizes cannot be changed. Raises ConfigError for an invalid config
    file.
    """
    path = Path(source)
    if path.suffix == ".toml":
        config = resolved_config(load_config(path).config)
        download_all(config)
        if config.task.name == "grpo":
            rule = "its steps sample completions, and weft verify repeats steps on given data. Verify the model with"
            raise ConfigError(f"task.name=grpo: {rule} the default task.")
        if config.task.name is not None or config.model.path:
            maker = f"the task {config.task.name}" if config.task.name else f"model.path={config.model.path}"
            _refuse_reduction(maker, settings)
            sizes = {"global_batch": settings.global_batch}
            if "train.seq_len" in find_task(config).sections:
                sizes["seq_len"] = settings.seq_len
            train = config.train.model_copy(update=sizes)
            config = config.model_copy(update={"seed": settings.seed, "train": train})
            return Subject(source, "task", settings, None, config.optimizer, config.plan, layout_of(config), config)
        shape = resolve_decoder(config.model, 1 if config.model.vocab_size else config.tokenizer.vocab_size)
        shape = reduced(shape, settings)
        return Subject(source, "decoder", settings, shape, config.optimizer, config.plan, layout_of(config))
    source = downloaded_folder(source, "model", weights=False) if ":" not in source or is_hub_text(source) else source
    path = Path(source)
    if path.is_dir() and source not in model_names():
        if not (path / "config.json").is_file():
            raise ModelError(f"model={source}: the folder has no config.json. Give the folder of a Hugging Face model.")
        return Subject(source, "hf", settings, decoder_shape(_config(source, settings)))
    if ":" in source:
        _refuse_reduction(f"the function {source}", settings)
        return Subject(source, "function", settings)
    try:
        return Subject(source, "decoder", settings, reduced(decoder_spec(source), settings))
    except ModelError as error:
        rule = str(error).removeprefix(f"model.name={source}: ")
        raise ModelError(
            f"model={source}: it names no file, folder or function, and {rule} Use a size, run.toml, a Hugging Face "
            "folder, or package.module:function."
        ) from None


def layout_of(config: RunConfig) -> Layout | None:
    return Layout.read(config.layout) if config.layout else None


def _config(source: str, settings: Settings) -> Any:
    return read_config(Path(source), settings.num_layers, settings.dim, settings.vocab_size)


def _refuse_reduction(maker: str, settings: Settings) -> None:
    asked = (("layers", settings.num_layers), ("width", settings.dim), ("vocab", settings.vocab_size))
    for name, value in asked:
        if value is not None:
            raise ConfigError(f"{name}={value}: {maker} builds the model itself. Set the size there.")


def reduced(shape: DecoderSpec, settings: Settings) -> DecoderSpec:
    """Return the shape with the requested depth, width and vocabulary. The number of heads is kept if possible.

    `max_seq_len` is increased to `settings.seq_len` if it is smaller. Raises ConfigError if the shape is invalid.
    """
    changes: dict[str, int] = {"max_seq_len": max(shape.max_seq_len, settings.seq_len)}
    if settings.num_layers:
        changes["num_layers"] = settings.num_layers
    if settings.vocab_size:
        changes["vocab_size"] = settings.vocab_size
    if settings.dim:
        heads = next(n for n in range(shape.num_heads, 0, -1) if settings.dim % (2 * n) == 0 or n == 1)
        group = shape.num_heads // shape.num_kv_heads
        kv_heads = heads // group if heads % group == 0 else heads
        ffn_dim = max(heads, round(shape.ffn_dim * settings.dim / shape.dim / heads) * heads)
        changes |= {"dim": settings.dim, "num_heads": heads, "num_kv_heads": kv_heads, "ffn_dim": ffn_dim}
    found = replace(shape, **changes)
    if problems := shape_problems(found):
        raise ConfigError(problems)
    return found


def _quieten(model: nn.Module) -> list[str]:
    """Turn off the subject's dropout, and return notes about it and about how batch norms are compared."""
    notes = []
    dropouts = [module for module in model.modules() if isinstance(module, _DROPOUTS) and module.p]
    for module in dropouts:
        module.p = 0.0
    by_function = 0
    for module in model.modules() if hugging_face.is_hugging_face(model) else ():
        rates = [name for name, rate in vars(module).items() if "drop" in name and isinstance(rate, float) and rate]
        by_function += bool(rates)
        for name in rates:
            setattr(module, name, 0.0)
    if dropouts or by_function:
        number = len(dropouts) + by_function
        notes.append(f"dropout of {number} modules is off: plain PyTorch draws other random numbers")
    if any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        notes.append(
            "batch norms use the statistics of the full global batch, as PyTorch alone does; a plan with several "
            "microbatches cannot, and is refused"
        )
    return notes


def _first_tensor(output: Any) -> torch.Tensor:
    """Return the logits, the similarities of a two-tower model, or the first tensor of a model's output."""
    if isinstance(output, torch.Tensor):
        return output
    text = getattr(output, "text_embeds", None)
    others = (getattr(output, f"{kind}_embeds", None) for kind in ("image", "video", "audio"))
    if text is not None and (other := next((one for one in others if one is not None), None)) is not None:
        # The logits of such a model compare all samples of a batch, so they would depend on how a batch is divided.
        return (text * other).sum(-1, keepdim=True)
    if getattr(output, "logits", None) is not None:
        return output.logits
    values = output.values() if isinstance(output, dict) else output
    return next(value for value in values if isinstance(value, torch.Tensor))
