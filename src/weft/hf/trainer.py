"""`weft.hf.Trainer`: transformers' Trainer with a plan. Weft runs the steps; transformers runs everything else."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.comm.mesh import leave_unusable_group
from weft.config.plan import Plan
from weft.errors import CheckpointError, ConfigError, MissingExtra, ModelError, WeftWarning
from weft.parallel.state.gradients import is_attached
from weft.train.script.script_run import Run, init

try:
    import accelerate
    import transformers
except ImportError as error:
    raise MissingExtra(error.name or "transformers", "trainer", "weft.hf") from error

from weft.hf.accelerator import PlannedAccelerator
from weft.hf.arguments import check_arguments, check_model, check_shards, plan_of
from weft.hf.fused_head import replace_fused_head
from weft.hf.reference import precompute_reference
from weft.hf.stepping import StepOptimizer, TrainerBatches, TrainerStep, predict_in_pipeline

#: Methods of transformers' Trainer that the subclass replaces. Other releases have others.
_REPLACED = (
    "create_accelerator_and_postprocess", "_build_accelerator_args", "_move_model_to_device", "_wrap_model",
    "get_batch_samples", "_get_num_items_in_batch", "_prepare_for_training", "_clip_grad_norm", "_get_grad_norm",
    "_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model",
)  # fmt: skip


def check_release(trainer_class: type) -> None:
    """Raise ConfigError if transformers' Trainer lacks a method that the subclass replaces."""
    if lacks := [name for name in _REPLACED if not hasattr(trainer_class, name)]:
        raise ConfigError(
            f"transformers={transformers.__version__}, accelerate={accelerate.__version__}: weft.hf replaces "
            f"Trainer.{lacks[0]}, which this release does not have. Install transformers 5.24."
        )


check_release(transformers.Trainer)

#: Folder of Weft's states in a checkpoint of a trainer.
_STATES = "weft"


class PlannedTrainer(transformers.Trainer):
    """transformers' Trainer under a plan.

    Loss, weights and metrics equal a Trainer's on one device whose batch size is `per_device_train_batch_size` times
    the number of data ranks. Evaluation has the same batches for any number of ranks.

    Args:
        plan: the plan's text, or a Plan. gradient_accumulation_steps, bf16, fp16 and gradient_checkpointing of the
            arguments set the plan's accumulation (or microbatches), precision and recompute, if it leaves them open.
        *args, **kwargs: arguments of transformers' Trainer.

    Raises:
        ConfigError: for arguments that contradict a plan.
        PlanError: if the plan breaks a rule, or does not fit the ranks or the arguments.
    """

    _weft_plan: str | Plan = "dp_replicate=*"
    _weft_run: Run | None = None
    _weft_step: TrainerStep | None = None

    def __init__(self, *args: Any, plan: str | Plan | None = None, **kwargs: Any):
        if plan is not None:
            self._weft_plan = plan
        self._weft_batches = TrainerBatches()
        self._weft_decayed: list[str] | None = None
        #: True while the loader of training data is made.
        self.weft_loads_training = False
        super().__init__(*args, **kwargs)
        if self.train_dataset is not None or self.eval_dataset is not None:
            check_model(self, self.weft_run.plan)

    # --- construction ---

    @property
    def weft_run(self) -> Run:
        """This rank's `Run`, as `weft.init` returns it."""
        assert self._weft_run is not None
        return self._weft_run

    @property
    def shifts_labels(self) -> bool:
        """True if the model computes the loss of a causal language model, divided by num_items_in_batch."""
        return bool(self._loss_shifts_labels and self.model_accepts_loss_kwargs)

    @property
    def uses_model_loss(self) -> bool:
        """True if the loss is the model's own, in one call to the model. TRL's SFTTrainer adds only metrics to it."""
        kind = type(self)
        is_own = kind.compute_loss is transformers.Trainer.compute_loss
        return (is_own and kind.prediction_step is PlannedTrainer.prediction_step) or self._adds_metrics()

    def _adds_metrics(self) -> bool:
        home = type(self).compute_loss.__module__
        return (
            home.startswith("trl.") and home.endswith(".sft_trainer") and getattr(self.args, "loss_type", "") == "nll"
        )

    def create_accelerator_and_postprocess(self) -> None:
        """Join the ranks under the plan, and create an accelerator that does not wrap the trained model.

        Raises:
            ConfigError: for arguments that contradict the plan.
            PlanError: if the plan breaks a rule, or does not fit the ranks or the arguments.
        """
        check_arguments(self.args)
        device, args = self.args.device, self.args
        args._n_gpu = min(args.n_gpu, 1)
        args.average_tokens_across_devices = False  # Weft adds up the tokens of the data ranks
        if self._weft_run is None:
            plan = plan_of(self._weft_plan, args, self.model)
            check_shards(args, plan)
            leave_unusable_group(device)  # accelerate's group has only nccl
            self._weft_run = init(plan, device=device.type, seed=args.seed)
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            name = "fsdp" if self.is_fsdp_enabled else "deepspeed"
            raise ConfigError(f"{name}: with plan= the plan shards the model. Start the ranks with torchrun or weft.")
        PlannedAccelerator(self, self.weft_run.mesh).install()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}  # the plan has the precision

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model to the device, unless the plan shards it and moves each rank's part later."""
        plan = self.weft_run.plan
        if plan.world_size == plan.dp_size and plan.zero < 3:
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    def _weft_parallelize(self) -> None:
        """Parallelize the model by the plan, unless that has been done. A user's optimizer gets the new parameters."""
        model: Any = self.model
        if is_attached(model):
            return
        plan = self.weft_run.plan
        check_model(self, plan)
        names = {id(one): name for name, one in model.named_parameters()} if self.optimizer is not None else {}
        self._weft_decayed = super().get_decay_parameter_names(model)
        uses_plain = (plan.pp > 1 or plan.cp > 1) and self._adds_metrics()
        if plan.tp > 1 or plan.zero == 3 or uses_plain:
            replace_fused_head(model, restores=uses_plain)
        if uses_plain:
            own: Any = self  # methods of this object, in place of those of its class
            own.compute_loss = functools.partial(transformers.Trainer.compute_loss, self)
            own.prediction_step = functools.partial(PlannedTrainer.prediction_step, self)
            if self.weft_run.is_first:
                text = f"plan={plan}: entropy and mean_token_accuracy are not logged, because no rank has all logits."
                warnings.warn(text, WeftWarning, stacklevel=2)
        self.weft_run.parallelize(model)
        self._weft_step = None
        if self.optimizer is not None:  # built by the user: it continues with the parameters of the sharded model
            now = dict(model.named_parameters())
            for group in self.optimizer.param_groups:
                group["params"] = [now[names[id(one)]] for one in group["params"] if names.get(id(one)) in now]

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of parameters with weight decay, from the model before the plan sharded it."""
        return super().get_decay_parameter_names(model) if self._weft_decayed is None else self._weft_decayed

    # --- data ---

    def get_train_dataloader(self) -> Any:
        """Return a loader of this rank's part of the training data."""
        self.weft_loads_training = True
        try:
            return super().get_train_dataloader()
        finally:
            self.weft_loads_training = False

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        args, size = self.args, self.args.per_device_train_batch_size
        args.per_device_train_batch_size *= self.weft_run.mesh.data.size  # the batch size of one device
        try:
            return super()._get_train_sampler(train_dataset)
        finally:
            args.per_device_train_batch_size = size

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples of a step, over all data ranks."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.weft_run.mesh.data.size

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return this rank's microbatches of a step, and the number of items in all ranks' microbatches."""
        batches, own = super().get_batch_samples(epoch_iterator, num_batches, device)
        return self._weft_batches.begin(self, batches, own, num_batches)

    # --- steps ---

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._weft_parallelize()
        if self._weft_step is None:
            model: Any = self.model
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # an evaluation leaves gathered parameters, and the optimizer needs the shards
            self.create_optimizer()
            assert self.optimizer is not None
            self._weft_step = TrainerStep(self, self.optimizer)
            self.optimizer = StepOptimizer(self.optimizer, self._weft_step)
        self.accelerator._optimizers = [self.optimizer]
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = self.model
        if resume_from_checkpoint is not None:
            self._load_states(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Add a microbatch, and return 0. At a step's last one, compute the gradients of all and return the loss."""
        assert self._weft_step is not None
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        return self._weft_step.add(self._prepare_inputs(inputs), num_items_in_batch)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        assert self._weft_step is not None
        return self._weft_step.metrics.grad_norm

    _clip_grad_norm = _get_grad_norm  # the step clips

    # --- evaluation ---

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the plan to the model if necessary, and evaluate it."""
        self._weft_parallelize()
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Return loss, logits and labels of a batch. In a pipeline, all stages get them from the last one."""
        if self.weft_run.plan.pp == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

        def predict(model: nn.Module, inputs: Any) -> Any:
            return super(PlannedTrainer, self).prediction_step(model, inputs, prediction_loss_only, ignore_keys)

        inputs = self._prepare_inputs(inputs)
        labels = tuple(inputs[name] for name in self.label_names if inputs.get(name) is not None)
        shown = None if prediction_loss_only or len(labels) < len(self.label_names) else labels
        shown = shown[0] if shown is not None and len(shown) == 1 else shown
        return predict_in_pipeline(model, inputs, shown, self.weft_run.mesh, predict)

    # --- checkpoints ---

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write model files that transformers reads. All ranks call it, and rank 0 writes."""
        folder: Any = output_dir if output_dir is not None else self.args.output_dir
        model: Any = self.model
        if not is_attached(model):
            super()._save(folder, state_dict)
            return
        self.weft_run.save_pretrained(model, folder)
        if not self.args.should_save:
            return
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None:
            processor.save_pretrained(folder)
        torch.save(self.args, Path(folder) / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._weft_step is not None
        model: Any = self.model
        self.weft_run.save(
            Path(output_dir) / _STATES, step=self.state.global_step, model=model, optimizer=self._weft_step.step,
            scheduler=self.lr_scheduler,
        )  # fmt: skip

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Raise CheckpointError unless Weft wrote the checkpoint. `_prepare_for_training` loads it later."""
        if not (Path(resume_from_checkpoint) / _STATES).is_dir():
            raise CheckpointError(
                f"resume_from_checkpoint={resume_from_checkpoint}: it has no states of Weft. Load its model with "
                "from_pretrained, and train without resume_from_checkpoint."
            )

    def _load_states(self, folder: str, *, schedules: bool = True) -> None:
        assert self._weft_step is not None
        scheduler = self.lr_scheduler if schedules else None
        model: Any = self.model
        found = self.weft_run.load(
            Path(folder) / _STATES, model=model, optimizer=self._weft_step.step, scheduler=scheduler
        )
        if found is None:
            raise CheckpointError(f"{folder}: its folder {_STATES} has no checkpoint. Give another checkpoint.")

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_states(self.state.best_model_checkpoint, schedules=False)


Trainer = PlannedTrainer  # the public name


def use(trainer_class: type[transformers.Trainer]) -> Any:
    """Return the trainer class with a `plan=` argument, such as `use(SFTTrainer)(model, args=args, plan="tp=2")`.

    Raises:
        ModelError: if the class is no subclass of transformers.Trainer.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, transformers.Trainer)):
        raise ModelError(
            f"trainer={trainer_class}: it is no subclass of transformers.Trainer. Use weft.init in its loop."
        )
    if issubclass(trainer_class, PlannedTrainer):
        return trainer_class
    if trainer_class is transformers.Trainer:
        return PlannedTrainer

    kind: Any = trainer_class

    @functools.wraps(kind, updated=())
    class Planned(kind, PlannedTrainer):  # methods of the class call Weft's through super()
        @functools.wraps(kind.__init__)
        def __init__(self, *args: Any, plan: str | Plan = "dp_replicate=*", **kwargs: Any):
            self._weft_plan = plan
            super().__init__(*args, **kwargs)

    planned: Any = Planned
    if hasattr(kind, "_precompute_ref_logps"):
        planned._precompute_ref_logps = functools.partialmethod(precompute_reference, kind._precompute_ref_logps)
    return planned
