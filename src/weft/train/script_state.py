"""Checkpoints of a script: background saves from a copy, one at a time. A failure is raised at the next call."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.folders import RankGroup, folder_name
from weft.checkpoint.load import Checkpoint, Found, load_checkpoint, newest_checkpoint, verify_checkpoint
from weft.checkpoint.object_store import Location, located
from weft.checkpoint.prune import prune_checkpoints
from weft.checkpoint.save import SavedSlice, save_slices
from weft.comm.mesh import Mesh
from weft.comm.store import StoreChannel
from weft.errors import CheckpointError, ModelError, WeftWarning
from weft.memory.offload import HostCopies
from weft.models.adapters import adapted, merged_tensors
from weft.models.peft_files import save_adapter
from weft.parallel.dropout.by_position import drops_of
from weft.parallel.local_sgd import anchored
from weft.parallel.state.gradients import data_parallel, is_attached, originals
from weft.train.checkpointer import Save
from weft.train.losses import LossFn
from weft.train.microbatches import call_model
from weft.train.model_state import adapter_state, capture_model, copied, pieces, resume, written
from weft.train.script_export import Ema, write_pretrained
from weft.train.script_json import group_settings, restore_scheduler, restore_settings, scheduler_state
from weft.train.state_io import on_each, on_first, rank_group
from weft.train.step.evaluation import mean_loss
from weft.train.step.train_step import ForwardFn, TrainStep


class SavesBehind:
    """Background saves of one rank, with memory for a copy of its part. All ranks construct one."""

    def __init__(self, mesh: Mesh):
        self._copies = HostCopies(mesh.device)
        self._joint_parts = RankGroup()
        if mesh.world_size > 1:
            talk = StoreChannel(mesh.rank, mesh.world_size)
            self._joint_parts = RankGroup(mesh.rank, mesh.world_size, talk.on_first, talk.gather)
        self._save: Save | None = None

    def begin(
        self, step: int, own: Iterable[SavedSlice], write: Callable[[Iterable[SavedSlice], RankGroup], Location]
    ) -> None:
        """Copy this rank's slices and write them in a thread. If the copy does not fit, warn and write them now."""
        found = list(own)
        try:
            found, has_room = copied(found, self._copies), True
        except CheckpointError as error:
            has_room = False
            said = str(error).replace("checkpoint.background=true", "background=True").partition(". Use")[0]
            warnings.warn(f"{said}. This rank waits until it has written its part.", WeftWarning, stacklevel=3)
        self._save = Save(step, lambda: write(found, self._joint_parts))
        if has_room:
            self._save.start()
        else:
            self._save.run()

    def wait(self) -> Location | None:
        """Wait for the running save and return its path, or None. Raise its error once."""
        save, self._save = self._save, None
        if save is None:
            return None
        save.wait()
        return save.end().path

    def leave(self, error: BaseException) -> None:
        """Wait briefly for the running save after an error, because other ranks may never write their part."""
        if self._save is not None:
            self._save.leave(error)


# Saving, loading and export for a custom script, equal under every plan: a base class of `weft.Run`.


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


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Result of `run.evaluate`.

    Attributes:
        loss: mean loss.
        number: number of tokens or samples in the mean.
    """

    loss: float
    number: int


class ScriptState:
    """Saving, loading, export and evaluation of models that this run parallelized. All ranks call every method."""

    mesh: Mesh
    seed: int
    #: True if the consumer of `shard` leaves out batches that are stand-ins for empty ones.
    _leaves_out: bool = False
    _behind: SavesBehind | None = None

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
        """Commit a checkpoint, `folder/step_00000120`, and return its path. All ranks call it.

        Args:
            folder: folder of all checkpoints of the run, accessible to every rank; or a URL such as s3://bucket/prefix.
            step: optimizer steps done.
            model: the result of `parallelize`.
            optimizer: a torch optimizer, or the result of `train_step`, whose loss scale is saved too.
            loader: the result of `shard`.
            scheduler: a scheduler of torch.optim.lr_scheduler.
            ema: the result of `ema`.
            extra: your own JSON values.
            keep: number of newest checkpoints to keep in the folder; None for all.
            background: return after copying the values, and write in the background. `wait_saved`, the next `save` and
                `load`, and the end of the run wait for it.

        Raises:
            CheckpointError: on all ranks, if it cannot be written, or if an earlier save in the background failed.
            ModelError: if the model is of another run.
        """
        self.wait_saved()
        model, torch_optimizer = self._own(model), _torch_optimizer(optimizer)
        state = self._state(model, optimizer, loader, scheduler, ema, extra)
        own, groups = pieces(model, torch_optimizer), ["model", "optimizer"]
        if ema is not None:
            own = chain(own, written("ema", ema.stretches(), data_parallel(model)))
            groups.append("ema")
        root = located(folder)

        def write(own: Iterable[SavedSlice], ranks: RankGroup) -> Location:
            path = save_slices(root, step, own, state, ranks, groups)
            if keep is not None:
                ranks.on_first(functools.partial(_prune, root, keep, step))
            return path

        if not background:
            return write(own, rank_group(self.mesh))
        state = copy.deepcopy(state)
        self._behind = self._behind or SavesBehind(self.mesh)
        self._behind.begin(step, own, write)
        return root / folder_name(step)

    def wait_saved(self) -> Location | None:
        """Wait for the save in the background and return its path, or None without one. All ranks call it.

        Raises:
            CheckpointError: if it could not be written. Earlier checkpoints are unchanged.
        """
        return self._behind.wait() if self._behind else None

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
            CheckpointError: if all are damaged, it is of another model, or it lacks the state of an argument.
            ModelError: if the model is of another run.
        """
        self.wait_saved()
        model, torch_optimizer = self._own(model), _torch_optimizer(optimizer)
        found = _find(located(folder), step, rank_group(self.mesh))
        if found is None:
            return None
        path = found.path

        def read() -> Checkpoint:
            checkpoint = load_checkpoint(path, lazily=True)
            _check_model(checkpoint, model)
            given = {"loader": loader, "scheduler": scheduler, "ema": ema}
            for name in [name for name, value in given.items() if value is not None]:
                if checkpoint.state.get(name) is None:
                    raise CheckpointError(f"{name}: {path.name} was saved without it. Leave {name}= out.")
            return checkpoint

        checkpoint = on_each(self.mesh, read)
        state = checkpoint.state
        left_out = resume(model, torch_optimizer, checkpoint, ema)
        for line in left_out if self.mesh.rank == 0 else ():
            warnings.warn(f"{path.name}: {line}", WeftWarning, stacklevel=2)
        if "settings" in state:
            restore_settings(torch_optimizer, state["settings"])
        if isinstance(optimizer, TrainStep) and state.get("loss_scale"):
            optimizer.loss_scale.restore(state["loss_scale"])
        if loader is not None:
            loader.load_state_dict(state["loader"])
        if scheduler is not None:
            restore_scheduler(scheduler, state["scheduler"])
        if (drops := drops_of(model)) is not None:
            drops.num_keys = int(state.get("dropout_keys", 0))
        passed_over = tuple(map(str, found.passed_over))
        return Loaded(checkpoint.step, state.get("extra"), path, state.get("plan", ""), passed_over)

    def full_state_dict(self, model: nn.Module, *, everywhere: bool = False) -> dict[str, torch.Tensor]:
        """Return the full tensors on the CPU, with the names and shapes of the plain model's state_dict.

        Rank 0 gets them and the others an empty dict, unless `everywhere` is set. Trained weights are the masters:
        float32 under bf16 and fp16. With local SGD, they are the weights of the last outer step. All ranks call it.
        """
        model = self._own(model)
        keeps = everywhere or self.mesh.rank == 0
        with anchored(model):
            found = capture_model(model, keep=keeps)
            # Copy each tensor, because captured ones may be live or views of a larger tensor.
            own = {name: tensor.clone() for name, tensor in found.items()}
        if not keeps:
            return {}
        return {name: own[one.first] for name, one in originals(model).items()}

    def save_pretrained(
        self, model: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        """Write the files that `model.save_pretrained` would write on one process, with transformers or peft.

        An adapter from `add_adapter` is merged into the weights. All ranks call it, and rank 0 writes.

        Args:
            model: the result of `parallelize`.
            folder: output folder.
            dtype: dtype of floating tensors in the files; None for the dtype in which the model was loaded.
            **options: options of the model's own save_pretrained.

        Raises:
            ModelError: if the model has no save_pretrained, or is of another run.
        """
        model = self._own(model)
        if not callable(getattr(model, "save_pretrained", None)):
            raise ModelError(
                f"model of type {type(model).__name__}: it has no save_pretrained. "
                f"Use run.full_state_dict(model) and save its result."
            )
        whole, known = self.full_state_dict(model), originals(model)
        if whole and adapted(model) is not None:
            whole = merged_tensors(model, whole)
            known = {name: one for name, one in known.items() if name in whole}
        on_first(self.mesh, lambda: write_pretrained(model, folder, whole, known, dtype, options))

    def save_adapter(self, model: nn.Module, folder: str | Path, *, base: str | None = None) -> None:
        """Write the model's adapter in peft's format. All ranks call it, and rank 0 writes.

        Args:
            model: the result of `parallelize`, with an adapter.
            folder: output folder of adapter_config.json and adapter_model.safetensors.
            base: name or folder of the model without the adapter, for loading it.

        Raises:
            ModelError: if the model has no adapter, trains other parameters too, or is of another run.
        """
        model = self._own(model)
        with anchored(model):
            whole = dict(data_parallel(model).weights())  # only of trained parameters, without the base
            on_first(self.mesh, lambda: save_adapter(model, folder, whole, base=base))

    def ema(self, model: nn.Module, decay: float = 0.999) -> Ema:
        """Return an exponential moving average of the trained weights. Build it after the optimizer.

        Call `update()` after each step, and evaluate inside of `with ema.swapped():`. Pass it to `save` and `load`.

        Raises:
            ModelError: with local SGD, because each replica would average different weights, and under gather=diff4.
        """
        if self.mesh.plan.gather == "diff4":
            raise ModelError(
                "gather=diff4: averages would be encoded as differences each time that they change places with the "
                "weights, and change the training. Leave run.ema out, or gather."
            )
        if self.mesh.plan.sync != "step":
            raise ModelError(
                f"sync={self.mesh.plan.sync}: an average of weights would be another one on each replica. Leave "
                "run.ema out, or use sync=step."
            )
        return Ema(self._own(model), decay)

    def evaluate(
        self, model: nn.Module, batches: Iterable[Any], loss_fn: LossFn, *, forward: ForwardFn | None = None
    ) -> Evaluated:
        """Return the mean loss over batches in evaluation mode, equal under every plan. All ranks call it.

        Args:
            model: the result of `parallelize`.
            batches: this rank's batches, such as from `shard`.
            loss_fn: as for `train_step`.
            forward: as for `train_step`.
        """
        self._leaves_out = True
        with anchored(own := self._own(model)):
            return Evaluated(*mean_loss(own, batches, self.mesh, loss_fn, forward or call_model, self.seed))

    def _own(self, model: nn.Module) -> nn.Module:
        """Return the module that `parallelize` registered. Raise ModelError if this run did not parallelize it."""
        found: Any = getattr(model, "_orig_mod", model)  # the module inside torch.compile's wrapper
        if not isinstance(found, nn.Module) or not is_attached(found):
            raise ModelError(
                f"model of type {type(model).__name__}: this run did not parallelize it. Give the model that "
                f"run.parallelize(model) returned, not a copy or a wrapper of it."
            )
        if data_parallel(found).axes.mesh.whole is not self.mesh:
            raise ModelError(
                f"model of type {type(model).__name__}: another run parallelized it. Use the run whose "
                f"run.parallelize(model) returned it."
            )
        return found

    def _state(
        self, model: nn.Module, optimizer: Any, loader: Any, scheduler: Any, ema: Ema | None, extra: Any
    ) -> dict[str, Any]:
        """Return the checkpoint's state except tensors."""
        if loader is not None and not hasattr(loader, "state_dict"):
            raise CheckpointError(
                f"loader={type(loader).__name__}: it has no state_dict. Give what run.shard(loader) returned."
            )
        drops = drops_of(model)
        return {
            "plan": str(self.mesh.plan),
            "settings": group_settings(_torch_optimizer(optimizer)),
            "loss_scale": optimizer.loss_scale.state() if isinstance(optimizer, TrainStep) else None,
            "loader": None if loader is None else loader.state_dict(),
            "scheduler": None if scheduler is None else scheduler_state(scheduler),
            "ema": None if ema is None else {"decay": ema.decay, "num_updates": ema.num_updates},
            "adapter": adapter_state(model),
            "dropout_keys": 0 if drops is None else drops.num_keys,
            "extra": extra,
        }


def _torch_optimizer(optimizer: torch.optim.Optimizer | TrainStep) -> torch.optim.Optimizer:
    found = optimizer.optimizer if isinstance(optimizer, TrainStep) else optimizer
    if not isinstance(found, torch.optim.Optimizer):
        raise ModelError(
            f"optimizer of type {type(optimizer).__name__}: it is not a torch optimizer. Give the optimizer, or what "
            f"run.train_step returned."
        )
    return found


def _prune(root: Location, keep: int, step: int) -> None:
    prune_checkpoints(root, keep, whole=step)


def _find(folder: Location, step: int | None, ranks: RankGroup) -> Found | None:
    """Find the checkpoint to load, verified by all ranks, and the newer ones that are damaged."""
    if step is None:
        return newest_checkpoint(folder, together=ranks)
    path = folder / folder_name(step)
    if problems := verify_checkpoint(path, together=ranks):
        raise CheckpointError(f"{path}: {'; '.join(problems)}. Use another checkpoint.")
    return Found(path, step)


def _check_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise CheckpointError if the checkpoint is of another model. A pipeline stage checks only its own tensors."""
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
