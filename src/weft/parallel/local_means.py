"""Warnings about means over one rank's samples that a single device would compute over all samples.

Weft sums over ranks and divides once. Means that the model itself computes depend on the number of ranks: the
statistics of batch norm, and the loss that a Hugging Face model computes from labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.errors import ModelError, WeftWarning
from weft.models.initialize import BATCH_NORMS
from weft.models.inspect import hugging_face
from weft.parallel.state.gradients import is_attached

_SHOWN = 3  # names of modules in a warning
_OWN_LOSS = "_weft_own_loss"


def watch_local_means(model: nn.Module, mesh: Mesh, *, groups_norms: bool) -> None:
    """Warn of means over a part of the global batch: of batch norm now, and of a Hugging Face model's loss later.

    The second warning comes in the first backward of a custom training loop through the loss that the model computed,
    if there are several data ranks. Only rank 0 warns.

    groups_norms: True if batch norms use statistics of sample groups, which are equal under every plan, so that the
    first warning is left out.
    """
    if not groups_norms:
        _warn_of_batch_norm(model, mesh)
    foreign = any(hugging_face.is_hugging_face(module) for module in model.modules())
    if mesh.rank == 0 and mesh.batch.size > 1 and foreign:
        hook = _OwnLoss(mesh.batch.size)
        model.register_forward_hook(hook)
        setattr(model, _OWN_LOSS, hook)


def trust_loss(model: nn.Module) -> None:
    """Trust that the model's loss is weighted correctly, and suppress the warning about it."""
    if (hook := getattr(model, _OWN_LOSS, None)) is not None:
        hook.is_trusted = True


def global_mean(loss_sum: torch.Tensor, num_tokens: torch.Tensor | int, mesh: Mesh) -> torch.Tensor:
    """Return the mean over all ranks' tokens from each rank's sum and count. 0-d, equal on all ranks.

    Its gradient is scaled so that the mean over ranks, which becomes `.grad`, is the gradient of the global mean.
    Collective of two numbers, which does not wait for the device. If no rank has tokens, the sum is divided by 1.

    loss_sum: sum over this rank's tokens, 0-d. num_tokens: number of this rank's tokens; 0-d if it is a tensor.
    """
    exact = {"dtype": torch.float64, "device": mesh.device}
    sums = torch.stack([loss_sum.detach().to(**exact), torch.as_tensor(num_tokens).to(**exact)])
    total, count = all_reduce(sums, mesh.batch).unbind()
    count = count.clamp(min=1.0)
    ours = loss_sum * (mesh.batch.size / count).to(loss_sum.dtype)
    return ours + ((total / count).to(loss_sum.dtype) - ours).detach()


def train_mode(model: nn.Module) -> Callable[[], object]:
    """Return a function like `model.train` that keeps batch norms in eval mode if the user froze them.

    A batch norm counts as frozen if it is in eval mode while the model is in training mode. `model.eval()` freezes
    none.
    """
    norms, frozen = list(_batch_norms(model).values()), list[nn.Module]()
    if not norms:
        return model.train

    def find_frozen() -> None:
        if model.training:
            frozen[:] = [module for module in norms if not module.training]

    def enter() -> None:
        find_frozen()
        model.train()
        for module in frozen:
            module.eval()

    find_frozen()
    return enter


def _batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)}


def frequency_refusal(what: str) -> str:
    """Return the error text for scale_grad_by_freq=True. what: path of the module, or name of the function."""
    return (
        f"scale_grad_by_freq=True: {what} divides gradients by how often an index is in one microbatch on one rank, "
        "which depends on the plan. Use scale_grad_by_freq=False, or one rank with accumulation=1."
    )


def refuse_frequencies(model: nn.Module, mesh: Mesh) -> None:
    """Raise ModelError for embeddings that depend on all indices of a microbatch.

    These are embeddings with scale_grad_by_freq, and on several ranks those with max_norm. All ranks get the full
    model, so all raise the error. Does nothing if a step is one microbatch on one rank.
    """
    if mesh.world_size * mesh.plan.microbatches_per_step == 1:
        return
    for path, module in model.named_modules():
        if getattr(module, "scale_grad_by_freq", False) is True:
            raise ModelError(frequency_refusal(path or "the model"))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None and mesh.world_size > 1:
            raise ModelError(
                f"max_norm={module.max_norm}: {path or 'the model'} scales rows of its weight in forward, on each "
                "rank by its own samples, so the ranks' weights diverge. Scale the weight after each step instead."
            )


def _warn_of_batch_norm(model: nn.Module, mesh: Mesh) -> None:
    # Batch norms in eval mode in a training model are frozen and cause no warning. A model in eval mode will train
    # later.
    found = {n: module for n, module in _batch_norms(model).items() if module.training or not model.training}
    num_ranks, num_micro = mesh.data.size, mesh.plan.microbatches_per_step
    if found and all(isinstance(module, nn.SyncBatchNorm) for module in found.values()):
        num_ranks = 1
    if mesh.rank or not found or num_ranks * num_micro == 1:
        return
    names = ", ".join([name or "the model" for name in found][:_SHOWN])
    names += f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    parts = [f"{num_ranks} ranks"] * (num_ranks > 1) + [f"{num_micro} microbatches"] * (num_micro > 1)
    remedy = (
        "Normalise a fixed number of samples together, under every plan:\n"
        "    run.parallelize(model, norm_group=32)  # train.norm_group=32 in a config\n"
        "or freeze the statistics of a pretrained model before run.parallelize: norm.eval() on each of them, or use "
        "GroupNorm"
    )
    warnings.warn(
        f"batch norm in {names}: each of {' x '.join(parts)} normalizes its own samples, so results differ from one "
        f"device with the full batch. {remedy}",
        WeftWarning,
        stacklevel=5,
    )


class _OwnLoss:
    """Forward hook that warns once if a custom training loop runs backward through the loss that the model computes."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.is_trusted = False

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.is_trusted or not is_hugging_face_output(output) or not is_attached(model):
            return
        loss = output.get("loss")
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            # Only a backward shows that the loop does not use run.global_mean.
            labels, logits = 'batch["labels"][:, 1:]' if _shifts(output) else 'batch["labels"]', output.get("logits")
            counted = f"len({labels})" if logits is not None and logits.ndim < 3 else f"({labels} != -100).sum()"
            loss.register_hook(lambda grad: self._warn(counted))

    def _warn(self, counted: str) -> None:
        if self.is_trusted:
            return
        self.is_trusted = True
        warnings.warn(
            f"loss: the model's own loss is a mean over this rank's tokens, and gradients are means over "
            f"{self.num_ranks} ranks: the result equals one device's only if all ranks have the same number of "
            "labels. "
            f"Before backward() write\n"
            f"    num_tokens = {counted}\n"
            f"    loss = run.global_mean(output.loss * num_tokens, num_tokens)",
            WeftWarning,
            stacklevel=2,
        )


def is_hugging_face_output(output: Any) -> bool:
    """Return True if `output` is the output of a transformers model. transformers need not be installed."""
    return isinstance(output, dict) and type(output).__module__.startswith("transformers.")


def sum_of_hugging_face(output: Any) -> str:
    """Return source code for users to copy: the body of a function that returns loss sum and token count."""
    logits = output.get("logits")
    if logits is not None and logits.ndim < 3:
        return '    return F.cross_entropy(output.logits, batch["labels"], reduction="sum"), len(batch["labels"])'
    labels, kept = ('batch["labels"][:, 1:]', "[:, :-1]") if _shifts(output) else ('batch["labels"]', "")
    return (
        f"    labels = {labels}.flatten()\n"
        f'    loss_sum = F.cross_entropy(output.logits{kept}.flatten(0, 1).float(), labels, reduction="sum")\n'
        f"    return loss_sum, (labels != -100).sum()"
    )


def _shifts(output: Any) -> bool:
    return "CausalLM" in type(output).__name__
