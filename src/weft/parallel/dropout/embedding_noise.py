"""NEFTune (Jain et al. 2023, arXiv 2310.05914): uniform noise on the embeddings of tokens, in training."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.parallel.random.draws import rand_like


def embedding_noise(model: nn.Module, alpha: float, seq_len: int) -> tuple[str, float] | None:
    """Return the path of the input embedding and the largest noise, alpha / sqrt(seq_len x width), or None for alpha 0.

    Raises:
        ConfigError: if the model has no input embedding.
    """
    if not alpha:
        return None
    get = getattr(model, "get_input_embeddings", None)
    found = get() if get is not None else getattr(model, "embed", None)
    path = next((path for path, module in model.named_modules() if module is found), "")
    if not path or not isinstance(found, nn.Embedding):
        rule = "the model has no embedding of tokens. Leave it out."
        raise ConfigError(f"train.neftune_alpha={alpha:g}: {rule}")
    return path, alpha / (seq_len * found.embedding_dim) ** 0.5


def add_embedding_noise(model: nn.Module, noise: tuple[str, float] | None) -> None:
    """Add noise to the output of the input embedding in training, by a hook, if this rank has the embedding.

    noise: result of `embedding_noise`; None does nothing.

    Call it before `drop_by_position`. The noise depends on seed, step and position, not on the plan.
    """
    embedding = dict(model.named_modules()).get(noise[0]) if noise else None
    if noise and embedding is not None:
        embedding.register_forward_hook(functools.partial(_add_noise, noise[1]))


def _add_noise(largest: float, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    if not module.training:
        return output
    line = getattr(module, "_weft_line", None)
    if line is not None and line.cuts_tokens:  # sp: this rank has a part of the tokens of its inputs
        count, rank = output.shape[1], line.axis.rank
        full = output.new_empty((len(output), count * line.axis.size, output.shape[2]), dtype=torch.float32)
        drawn = rand_like(full)[:, rank * count : (rank + 1) * count]
    else:
        drawn = rand_like(output, dtype=torch.float32)
    return output + (drawn * 2 - 1).to(output) * largest
