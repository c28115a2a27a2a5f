"""AdamW and SGD as functions of arrays, with the states and names of torch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import torch
from torch import nn

from weft.errors import ConfigError

Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hyper:
    """Numbers of one parameter's group. lr is the peak; each step multiplies it by its factor."""

    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Optimizer:
    """AdamW or SGD.

    Attributes:
        kind: "adamw" or "sgd".
        hyper: numbers by the name of a parameter. Parameters that are not in it are frozen.
    """

    kind: str
    hyper: Mapping[str, Hyper]
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    nesterov: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of torch's states that have the shape of their parameter."""
        if self.kind == "adamw":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.momentum else ()

    def update(
        self, params: Arrays, grads: Arrays, states: dict[str, Arrays], step: Any, lr_factor: Any
    ) -> tuple[Arrays, dict[str, Arrays]]:
        """Return the new parameters and states.

        Args:
            params: arrays by name.
            grads: gradients, already clipped.
            states: arrays by parameter and state name.
            step: updates before this one, 0-d.
            lr_factor: factor of each peak learning rate, 0-d.
        """
        new: Arrays = {}
        after: dict[str, Arrays] = {}
        update = self._adamw if self.kind == "adamw" else self._sgd
        for name, param in params.items():
            hyper = self.hyper[name]
            new[name], after[name] = update(
                param, grads[name].astype(param.dtype), states[name], step, (hyper.lr * lr_factor).astype(param.dtype),
                hyper.weight_decay,
            )  # fmt: skip
        return new, after

    def _adamw(self, param: Any, grad: Any, state: Arrays, step: Any, lr: Any, decay: float) -> tuple[Any, Arrays]:
        beta1, beta2 = self.betas
        number = (step + 1).astype(param.dtype)
        param = param * (1 - lr * decay)
        first = state["exp_avg"] + (grad - state["exp_avg"]) * (1 - beta1)
        second = state["exp_avg_sq"] * beta2 + jnp.square(grad) * (1 - beta2)
        root = jnp.sqrt(second) / jnp.sqrt(1 - beta2**number) + self.eps
        param = param - lr / (1 - beta1**number) * first / root
        return param, {"exp_avg": first, "exp_avg_sq": second}

    def _sgd(self, param: Any, grad: Any, state: Arrays, step: Any, lr: Any, decay: float) -> tuple[Any, Arrays]:
        grad = grad + decay * param
        if not self.momentum:
            return param - lr * grad, {}
        # The buffer starts at zero, so torch's first step, which copies the gradient, is the same.
        buffer = state["momentum_buffer"] * self.momentum + grad
        grad = grad + self.momentum * buffer if self.nesterov else buffer
        return param - lr * grad, {"momentum_buffer": buffer}


def read_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> Optimizer:
    """Return the optimizer that computes what `optimizer` does.

    Raises:
        ConfigError: for other classes than torch's AdamW and SGD, or options that have no JAX form.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    groups = optimizer.param_groups
    hyper = {
        names[id(param)]: Hyper(float(group["lr"]), float(group["weight_decay"]))
        for group in groups
        for param in group["params"]
    }
    first = groups[0]
    odd = [name for name in ("amsgrad", "maximize") if any(group.get(name) for group in groups)]
    if type(optimizer) is torch.optim.AdamW and not odd:
        beta1, beta2 = map(float, first["betas"])
        return Optimizer("adamw", hyper, (beta1, beta2), float(first["eps"]))
    if type(optimizer) is torch.optim.SGD and not odd and not first["dampening"]:
        return Optimizer("sgd", hyper, momentum=float(first["momentum"]), nesterov=bool(first["nesterov"]))
    raise ConfigError(
        f"optimizer.name={type(optimizer).__name__.lower()}: the JAX engine computes adamw and sgd in full precision. "
        "Use optimizer.name=adamw, or launch.engine=torch."
    )
