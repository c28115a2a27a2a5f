"""Arguments of a trainer and a plan: which of them Weft takes over, and which exclude each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft import env
from weft.config.fields.plan_text import is_auto
from weft.config.plan import PLAN_FIELDS, Plan
from weft.errors import ConfigError, PlanError

#: Optimizers that update weights during backward, before gradients are reduced.
_IN_BACKWARD = ("lomo", "adalomo")
_DTYPES = {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_arguments(args: Any) -> None:
    """Raise ConfigError for arguments that contradict a plan."""
    config, optimizer = args.accelerator_config, str(getattr(args.optim, "value", args.optim))
    problems = {
        "deepspeed": (args.deepspeed or args.deepspeed_plugin, "the plan shards the states", "Leave it out"),
        "fsdp": (args.fsdp or args.fsdp_plugin_args, "the plan shards the model", "Leave it out, and use zero=3"),
        "parallelism_config": (args.parallelism_config, "the plan has the sizes of all axes", "Leave it out"),
        "torch_compile": (args.torch_compile, "the plan compiles blocks", "Leave it out, and use compile=on in plan"),
        "auto_find_batch_size": (
            args.auto_find_batch_size, "after an error of one rank the others wait for it", "Give the batch size",
        ),
        "split_batches": (config.split_batches, "batch sizes are those of one rank", "Leave it out"),
        "dispatch_batches": (config.dispatch_batches, "each rank reads its own samples", "Leave it out"),
        "train_sampling_strategy": (
            "rebalance" in str(args.train_sampling_strategy).lower(), "it divides samples among ranks itself",
            "Use group_by_length",
        ),
        "fp16_full_eval": (args.fp16_full_eval, "it converts the weights that train", "Leave it out"),
        "bf16_full_eval": (args.bf16_full_eval, "it converts the weights that train", "Leave it out"),
        "optim": (
            optimizer in _IN_BACKWARD or "layerwise" in optimizer,
            "it updates weights during backward, before the ranks' gradients are added", "Use adamw_torch",
        ),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha, "its noise would depend on the plan",
            "Leave it out, or use train.neftune_alpha of weft train",
        ),
        "save_only_model": (
            args.save_only_model and args.load_best_model_at_end,
            "load_best_model_at_end reads the states that it leaves out", "Use save_only_model=False",
        ),
    }  # fmt: skip
    for name, (value, reason, remedy) in problems.items():
        if value:
            shown = optimizer if name == "optim" else getattr(args, name, True)
            raise ConfigError(f"{name}={shown}: with plan= {reason}. {remedy}.")


def plan_of(requested: str | Plan, args: Any, model: nn.Module | None) -> Plan:
    """Return the plan, with microbatches, precision and recomputation of the arguments that it leaves open.

    Activation checkpointing is switched off in `args`, since the plan then has it. Raises PlanError if plan and
    arguments contradict each other, or trainers do not support the plan.
    """
    place = env.rank_env()
    if isinstance(requested, str) and is_auto(requested):
        raise PlanError("plan=auto: a trainer has no sequence length for the planner. Give the plan of `weft plan`.")
    plan = Plan.parse(requested, place.world_size if place else 1) if isinstance(requested, str) else requested
    stated = isinstance(requested, Plan) or "precision=" in requested
    plan = _with_precision(plan, args, model, is_stated=stated)
    number, field = args.gradient_accumulation_steps, "microbatches" if plan.pp > 1 else "accumulation"
    if getattr(plan, field) not in (1, number):
        raise PlanError(
            f"{field}={getattr(plan, field)}: gradient_accumulation_steps={number} is the number of microbatches of a "
            f"step. Leave {field} out of the plan, or set gradient_accumulation_steps={getattr(plan, field)}."
        )
    plan = plan.replace(**{field: number})
    if plan.shares:
        written = PLAN_FIELDS["shares"].kind.write(plan.shares)
        raise PlanError(f"shares={written}: a trainer divides its batches evenly. Leave shares out.")
    if plan.sync != "step" or plan.graphs:
        name, value = ("graphs", "on") if plan.graphs else ("sync", plan.sync)
        other = "off" if plan.graphs else "step"
        reason = "batches of a trainer differ in shape" if plan.graphs else "a trainer evaluates and saves one model"
        raise PlanError(f"{name}={value}: {reason}. Use {name}={other}.")
    if args.activation_checkpointing:
        args.activation_checkpointing = args.gradient_checkpointing = False
        plan = plan if plan.recompute != "none" else plan.replace(recompute="full")
    return plan


def check_shards(args: Any, plan: Plan) -> None:
    """Raise ConfigError if the plan shards the model and an argument needs full weights or independent forwards."""
    shards = plan.world_size != plan.dp_size or (plan.zero == 3 and plan.dp_shard > 1)
    waits = "ranks wait for each other in every forward, and generate different numbers of tokens"
    needs = {
        "predict_with_generate": waits,
        "num_generations": waits,
        "sync_ref_model": "it copies full weights into the reference model",
        "use_liger_kernel": "its loss reads the full weight of the head",
    }
    for name, reason in needs.items():
        if shards and getattr(args, name, None):
            raise ConfigError(
                f"{name}={getattr(args, name)}: under plan={plan} {reason}. Use data parallelism with zero=0 to 2."
            )


def _with_precision(plan: Plan, args: Any, model: nn.Module | None, *, is_stated: bool) -> Plan:
    requested = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    if is_stated:
        if requested is not None and plan.precision not in (requested, "fp8"):
            raise PlanError(
                f"precision={plan.precision}: {requested}=True asks for another precision. Leave precision out of the "
                f"plan, or set {requested}=False."
            )
        return plan
    dtypes = {one.dtype for one in model.parameters()} if model is not None else set()
    trained = next((name for dtype, name in _DTYPES.items() if dtype in dtypes), "tf32" if args.tf32 else "fp32")
    return plan.replace(precision=requested or trained)


def check_model(trainer: Any, plan: Plan) -> None:
    """Raise ConfigError if the plan does not support the loss of the trainer."""
    config: Any = getattr(trainer.model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    divided = plan.dp_size * plan.cp * plan.pp > 1
    if divided and getattr(text, "output_router_logits", False) and getattr(text, "router_aux_loss_coef", 0.0):
        raise ConfigError(
            "output_router_logits=True: the auxiliary loss compares all tokens of a batch, and the plan divides it, so "
            "it would depend on the plan. Set output_router_logits=False (in TRL router_aux_loss_coef=0)."
        )
    if plan.pp == plan.cp == 1:
        return
    field = f"pp={plan.pp}" if plan.pp > 1 else f"cp={plan.cp}"
    part = "a rank has only its own blocks" if plan.pp > 1 else "a rank has only its part of each sequence"
    problem, remedy = None, "Use data parallelism, zero=1 to 3 or tp"
    if not trainer.uses_model_loss:
        problem = f"{type(trainer).__name__} computes its loss by calls of the model"
    elif not trainer.shifts_labels:
        problem = f"{type(trainer.model).__name__} is no causal language model"
    elif plan.cp > 1 and (trainer.label_smoother is not None or trainer.compute_loss_func is not None):
        name = "compute_loss_func" if trainer.compute_loss_func is not None else "label_smoothing_factor"
        problem, remedy = f"{name} shifts labels of full sequences", "Leave it out, or use cp=1"
    if problem is not None:
        raise ConfigError(f"{field}: {problem}, and {part}. {remedy}.")
