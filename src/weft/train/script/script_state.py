"""Saving and loading of checkpoints in a custom script: a base class of `weft.Run`."""

from __future__ import annotations

import copy
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.folders import RankGroup, folder_name
from weft.checkpoint.load import Checkpoint, load_checkpoint
from weft.checkpoint.object_store import Location, located
from weft.checkpoint.prune import prune_checkpoints
from weft.checkpoint.save import SavedSlice, save_slices
from weft.comm.mesh import Mesh
from weft.comm.store import StoreChannel
from weft.errors import CheckpointError, ModelError, WeftWarning
from weft.memory.offload import HostCopies
from weft.models.adapters import adapted
from weft.parallel.dropout.by_position import drops_of
from weft.parallel.state.gradients import data_parallel, originals
from weft.privacy.update import PrivateUpdate, restore_account
from weft.train.loop.checkpointer import Checkpointer, Save
from weft.train.script.script_export import Ema
from weft.train.script.script_weights import own_model
from weft.train.states.model_state import adapter_state, copied, resume, state_slices, written
from weft.train.states.state_io import on_each, rank_group
from weft.train.step.train_step import TrainStep


@dataclass(frozen=True, slots=True)
class ScriptObjects:
    """The objects of a script that a checkpoint stores. None skips an object."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | TrainStep
    loader: Any = None
    scheduler: Any = None
    ema: Ema | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.torch_optimizer, torch.optim.Optimizer):
            raise ModelError(
                f"optimizer of type {type(self.optimizer).__name__}: it is not a torch optimizer. Give the optimizer, "
                "or what run.train_step returned."
            )

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer, also if `optimizer` is a `TrainStep`."""
        return self.optimizer.optimizer if isinstance(self.optimizer, TrainStep) else self.optimizer

    def slices(self) -> tuple[Iterable[SavedSlice], list[str]]:
        """Return this rank's slices, and the names of the groups that the checkpoint has even if they are empty."""
        own = state_slices(self.model, self.torch_optimizer)
        if self.ema is None:
            return own, ["model", "optimizer"]
        averages = written("ema", self.ema.flat_slices(), data_parallel(self.model))
        return chain(own, averages), ["model", "optimizer", "ema"]

    def state(self) -> dict[str, Any]:
        """Return the checkpoint's state except tensors, as JSON values. All ranks call it.

        Raises CheckpointError if the loader or the scheduler has no state_dict, or JSON cannot represent the
        scheduler's state.
        """
        if self.loader is not None and not hasattr(self.loader, "state_dict"):
            raise CheckpointError(
                f"loader={type(self.loader).__name__}: it has no state_dict. Give what run.shard(loader) returned."
            )
        drops, ema = drops_of(self.model), self.ema
        return {
            "settings": group_settings(self.torch_optimizer),
            "loss_scale": self.optimizer.loss_scale.state() if isinstance(self.optimizer, TrainStep) else None,
            "loader": None if self.loader is None else self.loader.state_dict(),
            "scheduler": None if self.scheduler is None else scheduler_state(self.scheduler),
            "ema": None if ema is None else {"decay": ema.decay, "num_updates": ema.num_updates},
            "adapter": adapter_state(self.model),
            "dropout_keys": 0 if drops is None else drops.num_keys,
            "privacy": None if self._privacy is None else self._privacy.ledger.to_json(),
        }

    @property
    def _privacy(self) -> PrivateUpdate | None:
        return self.optimizer.privacy if isinstance(self.optimizer, TrainStep) else None

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if the checkpoint belongs to another model, or lacks the state of an object."""
        _check_model(checkpoint, self.model)
        objects = {"loader": self.loader, "scheduler": self.scheduler, "ema": self.ema}
        for name in [name for name, value in objects.items() if value is not None]:
            if checkpoint.state.get(name) is None:
                raise CheckpointError(f"{name}: {checkpoint.path.name} was saved without it. Leave {name}= out.")

    def restore(self, checkpoint: Checkpoint) -> list[str]:
        """Load a checkpoint that `check` accepts. Return messages about skipped parts. All ranks call it."""
        state = checkpoint.state
        left_out = resume(self.model, self.torch_optimizer, checkpoint, self.ema)
        if "settings" in state:
            restore_settings(self.torch_optimizer, state["settings"])
        if isinstance(self.optimizer, TrainStep) and state.get("loss_scale"):
            self.optimizer.loss_scale.restore(state["loss_scale"])
        restore_account(self._privacy, state.get("privacy"))
        if self.loader is not None:
            self.loader.load_state_dict(state["loader"])
        if self.scheduler is not None:
            restore_scheduler(self.scheduler, state["scheduler"])
        if (drops := drops_of(self.model)) is not None:
            drops.num_keys = int(state.get("dropout_keys", 0))
        return left_out


class ScriptCheckpointer(Checkpointer):
    """The checkpoints of a script. A background save writes a copy of the values; `wait` raises its error."""

    def __init__(self, mesh: Mesh):
        super().__init__(rank_group(mesh))
        self._mesh = mesh
        #: Host memory for a copy of this rank's part, and the rank group of the writing thread.
        self._background: tuple[HostCopies, RankGroup] | None = None

    def write(
        self, root: Location, step: int, objects: ScriptObjects, extra: Any, *, keep: int | None, in_background: bool
    ) -> Location:
        """Write a checkpoint and return its path. With `in_background`, copy the values to the host and start a thread.

        If the copies do not fit into host memory, this rank writes its part before it returns, with a warning.
        """
        state = {"plan": str(self._mesh.plan), **objects.state(), "extra": extra}
        (own, groups), ranks, fits = objects.slices(), self.ranks, False
        if in_background:
            copies, ranks = self._background = self._background or self._open_background()
            state, (own, fits) = copy.deepcopy(state), _copy_to_host(list(own), copies)

        def prune() -> None:
            if keep is not None:
                prune_checkpoints(root, keep, whole=step)

        def write() -> Location:
            path = save_slices(root, step, own, state, ranks, groups)
            ranks.on_first(prune)
            return path

        self.begin(Save(step, write), in_background=fits)
        return root / folder_name(step) if in_background else self.wait() or root / folder_name(step)

    def wait(self) -> Location | None:
        """Wait for the running save and return its path, or None. Raise its error once."""
        end = self.finish()
        return None if end is None else end.path

    def _open_background(self) -> tuple[HostCopies, RankGroup]:
        """Return host memory and rank group for background saves. All ranks call it at the first background save."""
        ranks, mesh = RankGroup(), self._mesh
        if mesh.world_size > 1:
            channel = StoreChannel(mesh.rank, mesh.world_size)
            ranks = RankGroup(mesh.rank, mesh.world_size, channel.on_first, channel.gather)
        return HostCopies(mesh.device), ranks


def _copy_to_host(own: list[SavedSlice], copies: HostCopies) -> tuple[list[SavedSlice], bool]:
    """Return copies of slices on the host and True, or, with a warning, the slices and False if memory is short."""
    try:
        return copied(own, copies), True
    except CheckpointError as error:
        text = str(error).replace("checkpoint.background=true", "background=True").partition(". Use")[0]
        warnings.warn(f"{text}. This rank waits until it has written its part.", WeftWarning, stacklevel=4)
        return own, False


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of `run.load`.

    Attributes:
        step: optimizer steps done.
        extra: the `extra` of `run.save`.
        path: location of the checkpoint.
        plan: plan under which it was saved.
        passed_over: newer checkpoints that were damaged, each with the reason.
    """

    step: int
    extra: Any
    path: Location
    plan: str
    passed_over: tuple[str, ...] = ()


class ScriptState:
    """Saves and loads the training state of models that this run parallelized. All ranks call every method."""

    mesh: Mesh
    _checkpointer: ScriptCheckpointer | None = None

    def save(
        self,
        folder: str | Path,
        *,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | TrainStep,
        loader: Any = None,
        scheduler: Any = None,
        ema: Ema | None = None,
        extra: Any = None,
        keep: int | None = None,
        background: bool = False,
    ) -> Location:
        """Write a checkpoint to a folder such as `folder/step_00000120`, and return its path. All ranks call it.

        Args:
            folder: folder of all checkpoints of the run, accessible to every rank; or a URL such as s3://bucket/prefix.
            step: optimizer steps done.
            model: the result of `parallelize`.
            optimizer: a torch optimizer, or the result of `train_step`, whose loss scale is saved too.
            loader: the result of `shard` or `loader`.
            scheduler: a scheduler of torch.optim.lr_scheduler.
            ema: the result of `ema`.
            extra: your own JSON values.
            keep: number of newest checkpoints to keep in the folder; None for all.
            background: return after copying the values, and write in the background. `wait_saved`, the next `save` and
                `load`, and the end of the run wait for it.

        Raises:
            CheckpointError: on all ranks, if it cannot be written, or if an earlier save in the background failed.
            ModelError: if the model belongs to another run.
        """
        self.wait_saved()
        objects = ScriptObjects(own_model(self.mesh, model), optimizer, loader, scheduler, ema)
        self._checkpointer = self._checkpointer or ScriptCheckpointer(self.mesh)
        return self._checkpointer.write(located(folder), step, objects, extra, keep=keep, in_background=background)

    def wait_saved(self) -> Location | None:
        """Wait for the save in the background and return its path, or None without one. All ranks call it.

        Raises:
            CheckpointError: if it could not be written. Earlier checkpoints are unchanged.
        """
        return self._checkpointer.wait() if self._checkpointer else None

    def load(
        self,
        folder: str | Path,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | TrainStep,
        loader: Any = None,
        scheduler: Any = None,
        ema: Ema | None = None,
        step: int | None = None,
    ) -> Loaded | None:
        """Load the newest valid checkpoint of the folder, saved under any plan. Return None if the folder is empty.

        All ranks call it.

        Args:
            folder: folder of all checkpoints of the run, accessible to every rank.
            model, optimizer: as for `save`. Their weights and states are replaced.
            loader, scheduler, ema: objects whose state is restored; None to skip one.
            step: step of the checkpoint to load instead of the newest.

        Raises:
            CheckpointError: if the checkpoint of `step` is missing or damaged, or without `step`, if all are damaged;
                if it belongs to another model or lacks the state of an argument; or if an earlier background save
                failed.
            ModelError: if the model belongs to another run.
        """
        self.wait_saved()
        objects = ScriptObjects(own_model(self.mesh, model), optimizer, loader, scheduler, ema)
        self._checkpointer = self._checkpointer or ScriptCheckpointer(self.mesh)
        found = self._checkpointer.find(located(folder), step)
        if found is None:
            return None
        path = found.path

        def read() -> Checkpoint:
            checkpoint = load_checkpoint(path, lazily=True)
            objects.check(checkpoint)
            return checkpoint

        checkpoint = on_each(self.mesh, read)
        left_out = objects.restore(checkpoint)
        for line in left_out if self.mesh.rank == 0 else ():
            warnings.warn(f"{path.name}: {line}", WeftWarning, stacklevel=2)
        state, passed_over = checkpoint.state, tuple(map(str, found.passed_over))
        return Loaded(checkpoint.step, state.get("extra"), path, state.get("plan", ""), passed_over)


def _check_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise CheckpointError if the checkpoint belongs to another model. With an adapter, `resume` checks it instead."""
    saved = checkpoint.entries("model")
    if checkpoint.state.get("adapter") is not None or adapted(model) is not None:
        return  # loading checks adapter and base in detail
    wanted = {name for name, one in originals(model).items() if one.first == name}
    missing, extra = sorted(wanted - saved.keys()), sorted(saved.keys() - wanted)
    if missing or extra:
        lacks = f"it lacks {_listed(missing)}" if missing else ""
        has = f"it has {_listed(extra)}, which the model does not have" if extra else ""
        raise CheckpointError(
            f"{checkpoint.path}: a checkpoint of another model: {' and '.join(filter(None, (lacks, has)))}. "
            f"Load it into the model it was saved from, or save this one to another folder."
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# Conversion of scheduler states and optimizer settings to JSON values, and back.

#: Key of an object that represents a dict with keys that are not text, such as the milestones of MultiStepLR.
_TAG = "$pairs"
#: Entries of a parameter group that are not saved: tensors, their names, and options that select an implementation.
_LEFT_OUT = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "maximize", "elementwise"}
)


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's `state_dict` as JSON values. Raise CheckpointError if JSON cannot represent it."""
    kind = type(scheduler).__name__
    if not hasattr(scheduler, "state_dict") or not hasattr(scheduler, "load_state_dict"):
        raise CheckpointError(f"scheduler={kind}: it has no state_dict. Give one of torch.optim.lr_scheduler.")
    return {key: _plain(value, f"scheduler {kind}", key) for key, value in scheduler.state_dict().items()}


def restore_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Restore a scheduler of the same kind from the result of `scheduler_state`."""
    scheduler.load_state_dict({key: _back(value) for key, value in state.items()})


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, such as learning rate and weight decay, that JSON can represent."""
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        found.append({})
        for key, value in group.items():
            try:
                if key not in _LEFT_OUT:
                    found[-1][key] = _plain(value, "optimizer", key)
            except CheckpointError:
                continue
    return found


def restore_settings(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Restore each group from `group_settings`. Raise CheckpointError if the number of groups differs."""
    if len(settings) != len(optimizer.param_groups):
        raise CheckpointError(
            f"optimizer: it has {len(optimizer.param_groups)} parameter groups, and {len(settings)} were saved. "
            f"Build it with the groups that it was saved with."
        )
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        for key, value in saved.items():
            now, value = group.get(key), _back(value)
            if isinstance(now, torch.Tensor):
                now.fill_(value)  # the learning rate of a compiled step is a tensor
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value


def _plain(value: Any, owner: str, key: str) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    if isinstance(value, dict) and all(type(name) is str for name in value):
        return {name: _plain(one, owner, f"{key}.{name}") for name, one in value.items()}
    if isinstance(value, dict):
        pairs = [[_plain(name, owner, key), _plain(one, owner, key)] for name, one in value.items()]
        return {_TAG: pairs, "counts": isinstance(value, Counter)}
    if isinstance(value, list | tuple | deque):
        return [_plain(one, owner, key) for one in value]
    raise CheckpointError(
        f"{owner}: its state has a {type(value).__name__} under {key!r}, which JSON cannot store. Leave scheduler= "
        "out, and pass its state as extra=."
    )


def _back(value: Any) -> Any:
    if isinstance(value, list):
        return [_back(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _TAG in value:
        pairs = {_back(name): _back(one) for name, one in value[_TAG]}
        return Counter(pairs) if value["counts"] else pairs
    return {name: _back(one) for name, one in value.items()}
