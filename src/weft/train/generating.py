"""Texts of a model in training, from its current weights and on the ranks that train it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.errors import ModelError
from weft.generation.batch import Limits, generate_batch
from weft.generation.ranks import MeshRanks
from weft.generation.requests import Completion, Request, Sampling
from weft.models.decoder import Decoder
from weft.models.inspect import hugging_face
from weft.parallel.replicas.local_sgd import anchored
from weft.parallel.state.gradients import data_parallel
from weft.train.states.state_io import gather
from weft.train.states.whole_copy import can_copy, whole_copy

#: Models whose logits with a cache were compared. Each whole copy is a new model.
_checked = weakref.WeakSet[nn.Module]()


def complete(
    model: nn.Module, mesh: Mesh, requests: Sequence[Request], sampling: Sampling, limits: Limits
) -> list[Completion]:
    """Continue prompts with the weights that an evaluation would use, and return all completions on all ranks.

    Under pp, cp, sp and zero=3, each rank generates a part with a whole copy of the weights, which is gathered once.
    Under other plans, and if the copy does not fit under zero=3, each data rank generates a part with the sharded
    model. Training continues with the same numbers. All ranks call it with the same requests.

    Args:
        model: a Decoder or a causal language model of transformers, parallelized.
        mesh: its mesh.
        requests: keys must differ.
        sampling: how tokens are sampled.
        limits: bounds of the model and the batch, such as `limits_of(model)`.

    Raises:
        ModelError: if the model cannot generate in batches, or a copy is needed and does not fit.
    """
    plan = mesh.plan
    data_parallel(model).wait_for_weights()
    is_new = model not in _checked
    training = {module: module.training for module in model.modules()}
    model.eval()
    # Compiled blocks would be compiled again for each length of a text.
    stance = torch.compiler.set_stance("force_eager") if plan.compile else nullcontext()
    try:
        with stance, anchored(model):
            found = _generated(model, mesh, requests, sampling, limits, is_new)
    finally:
        for module, was in training.items():
            module.training = was
    _checked.add(model)
    told = json.dumps([[one.key, one.ids, one.log_probs, one.reason, one.error] for one in found])
    every = {
        key: Completion(key, tuple(ids), tuple(log_probs), reason, error)
        for record in gather(mesh, told.encode())
        for key, ids, log_probs, reason, error in json.loads(record)
    }
    return [every[request.key] for request in requests]


def _generated(
    model: nn.Module, mesh: Mesh, requests: Sequence[Request], sampling: Sampling, limits: Limits, check: bool
) -> list[Completion]:
    """Return this rank's part of the completions."""
    plan = mesh.plan
    # sp cannot divide the one token of a text that a forward with a cache reads.
    if plan.pp > 1 or plan.cp > 1 or plan.sp or (plan.zero == 3 and can_copy(model, mesh)):
        with whole_copy(model, mesh) as plain:
            return generate_batch(plain, requests[mesh.rank :: mesh.world_size], sampling, limits, check=check)
    own, together = requests[mesh.data.rank :: mesh.data.size], MeshRanks(mesh)
    return generate_batch(model, own, sampling, limits, together=together, check=check)


def limits_of(model: nn.Module, rows: int = 32) -> Limits:
    """Return the bounds of a model's config.

    Raises:
        ModelError: for a model without a config of a vocabulary.
    """
    if isinstance(model, Decoder):
        return Limits(model.spec.vocab_size, model.spec.max_seq_len, rows)
    config = getattr(model, "config", None)
    size = hugging_face.vocab_size(config) if config is not None else None
    if size is None:
        raise ModelError(
            f"generation with {type(model).__name__}: its config has no vocabulary. Only decoders of Weft and causal "
            "language models of transformers can generate."
        )
    return Limits(size, hugging_face.longest_text(model) or 2**40, rows)
