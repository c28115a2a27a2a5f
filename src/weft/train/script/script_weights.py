"""Export, texts, averages and evaluation of weights in a custom script: a base class of `weft.Run`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.errors import ModelError
from weft.generation.requests import Completion, Request, Sampling
from weft.parallel.replicas.local_sgd import anchored
from weft.parallel.state.gradients import data_parallel, is_attached
from weft.train.batches.microbatches import ForwardFn, call_model
from weft.train.generating import complete, limits_of
from weft.train.losses import LossFn
from weft.train.script.script_export import Ema, export_adapter, export_keras, export_pretrained, moving_average
from weft.train.states.whole_copy import full_tensors
from weft.train.step.evaluation import mean_loss


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Result of `run.evaluate`.

    Attributes:
        loss: mean loss.
        number: number of tokens or samples in the mean.
    """

    loss: float
    number: int


class ScriptWeights:
    """Reads the weights of models that this run parallelized. All ranks call every method."""

    mesh: Mesh
    seed: int
    #: True if the caller of `shard` skips placeholder batches.
    _leaves_out: bool

    def full_state_dict(self, model: nn.Module, *, everywhere: bool = False) -> dict[str, torch.Tensor]:
        """Return the full tensors on the CPU, with the names and shapes of the plain model's state_dict.

        Rank 0 gets them and the others an empty dict, unless `everywhere` is set. Trained weights are the masters:
        float32 under bf16 and fp16. With local SGD, they are the weights of the last outer step. All ranks call it.
        """
        return full_tensors(self.mesh, own_model(self.mesh, model), everywhere=everywhere)

    def generate(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 200,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        stop_ids: Iterable[int] = (),
        rows: int = 32,
    ) -> list[Completion]:
        """Continue prompts with the current weights, on the ranks that train. Training continues with the same numbers.

        The texts depend on weights, prompts and these settings, not on the plan. All ranks call it with the same
        arguments, and get all completions, in the order of the prompts.

        Args:
            model: the result of `parallelize`: a causal language model of transformers or a Weft decoder.
            prompts: token ids of each prompt. The random numbers of a text depend on its index here.
            max_tokens, temperature, top_k, top_p, seed, stop_ids: see `weft.generation.requests.Sampling`.
            rows: number of texts that a rank generates at once.

        Raises:
            ConfigError: if a setting is out of range.
            ModelError: if the model cannot generate in batches, or belongs to another run.
        """
        sampling = Sampling(max_tokens, temperature, top_k, top_p, seed, frozenset(stop_ids))
        requests = [Request(index, tuple(prompt)) for index, prompt in enumerate(prompts)]
        own = own_model(self.mesh, model)
        return complete(own, self.mesh, requests, sampling, limits_of(own, rows))

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
            ModelError: if the model has no save_pretrained, or belongs to another run.
        """
        export_pretrained(self.mesh, own_model(self.mesh, model), folder, dtype, options)

    def save_keras(self, model: nn.Module, path: str | Path, **options: Any) -> None:
        """Write the file that `model.save` of Keras would write on one process. All ranks call it, and rank 0 writes.

        Args:
            model: the result of `parallelize`: a Keras model.
            path: output file, such as model.keras, which `keras.saving.load_model` reads.
            **options: options of the model's own save.

        Raises:
            ModelError: if the model is not from Keras, or belongs to another run.
        """
        export_keras(self.mesh, own_model(self.mesh, model), path, options)

    def save_adapter(self, model: nn.Module, folder: str | Path, *, base: str | None = None) -> None:
        """Write the model's adapter in peft's format. All ranks call it, and rank 0 writes.

        Args:
            model: the result of `parallelize`, with an adapter.
            folder: output folder of adapter_config.json and adapter_model.safetensors.
            base: name or folder of the model without the adapter, for loading it.

        Raises:
            ModelError: if the model has no adapter, trains other parameters too, or belongs to another run.
        """
        export_adapter(self.mesh, own_model(self.mesh, model), folder, base)

    def ema(self, model: nn.Module, decay: float = 0.999) -> Ema:
        """Return an exponential moving average of the trained weights. Call this method after building the optimizer.

        Call `update()` of the result after each step, and evaluate inside `with ema.swapped():`. Pass the result to
        `save` and `load`.

        Raises:
            ModelError: with local SGD, because each replica would average different weights; under gather=diff4; or if
                `decay` is not in [0, 1).
        """
        return moving_average(self.mesh.plan, own_model(self.mesh, model), decay)

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
        with anchored(own := own_model(self.mesh, model)):
            return Evaluated(*mean_loss(own, batches, self.mesh, loss_fn, forward or call_model, self.seed))


def own_model(mesh: Mesh, model: nn.Module) -> nn.Module:
    """Return the module that `parallelize` registered. Raise ModelError if the run of `mesh` did not parallelize it."""
    found: Any = getattr(model, "_orig_mod", model)  # the module inside torch.compile's wrapper
    if not isinstance(found, nn.Module) or not is_attached(found):
        raise ModelError(
            f"model of type {type(model).__name__}: this run did not parallelize it. Give the model that "
            f"run.parallelize(model) returned, not a copy or a wrapper of it."
        )
    if data_parallel(found).axes.mesh.whole is not mesh:
        raise ModelError(
            f"model of type {type(model).__name__}: another run parallelized it. Use the run whose "
            f"run.parallelize(model) returned it."
        )
    return found
