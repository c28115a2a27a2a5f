"""The optimizer and its schedule, as a config says them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.spec.config.section import Section
from weft.spec.config.setting_types import (
    CodeName,
    Count,
    Fraction,
    NonNegative,
    OptionValue,
    PositiveFloat,
    PositiveInt,
)


class OptimizerGroup(Section):
    """Parameters with a learning rate or weight decay of their own, chosen by name."""

    match: str = Field(min_length=1, examples=["embed.*"])
    """Pattern of parameter names, such as "embed.*"; `*` matches any text. The first matching group applies."""
    lr: NonNegative | None = None
    """Peak learning rate of these parameters; 0 freezes them. By default optimizer.lr."""
    weight_decay: NonNegative | None = None
    """Weight decay of these parameters, including vectors. By default optimizer.weight_decay for matrices and 0 for
    vectors."""


class OptimizerSection(Section):
    """The optimizer, its learning rate over the steps, and its groups of parameters."""

    name: Literal["adamw", "sgd", "muon"] | CodeName = "adamw"
    """Muon updates the matrices between embedding and head, AdamW all other parameters. Give any other optimizer class
    as package.module:Class."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    """AdamW: decay rates of the running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the denominator of the update."""
    states: Literal["fp32", "bf16", "fp8"] = "fp32"
    """AdamW: number format of its two running means. bf16 takes half the memory, fp8 (one-byte floats without scales) a
    quarter; both take more time. Rounding is stochastic, by seed, step and position in the parameter, so every plan
    rounds the same way."""
    weight_decay: NonNegative = 0.1
    """Weight decay of matrices. Norms and biases are not decayed."""
    momentum: Fraction | None = None
    """SGD (default 0.9) and Muon (default 0.95): momentum."""
    nesterov: bool = False
    """SGD: Nesterov momentum."""
    options: dict[str, OptionValue] = Field(default={})
    """Further arguments of a package.module:Class, such as {rho = 0.9}."""
    groups: tuple[OptimizerGroup, ...] = Field(default=(), strict=False)
    """Parameter groups with their own settings; a parameter belongs to the first group whose `match` fits."""
    max_grad_norm: NonNegative = 1.0
    """Clip gradients to this global norm; 0: no clipping."""

    @property
    def is_foreign(self) -> bool:
        """Whether the optimizer is a class that Weft does not know."""
        return ":" in self.name


class ScheduleSection(Section):
    """Learning rate as a factor of optimizer.lr, by step."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """linear and cosine fall to `final` at the last step; wsd: warm-up, stable, decay."""
    warmup_steps: Count | None = None
    """Steps over which the learning rate rises to its peak; by default 5 % of all steps, at most 1000."""
    decay_steps: PositiveInt | None = None
    """wsd: steps of the decay at the end; by default 20 % of all steps."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step, as a factor of optimizer.lr."""

    def warmup(self, num_steps: int) -> int:
        """Return the number of steps of the warm-up in a run of `num_steps`."""
        return min(1000, num_steps // 20) if self.warmup_steps is None else self.warmup_steps

    def decay(self, num_steps: int) -> int:
        """Return the number of steps of the wsd schedule's decay in a run of `num_steps`."""
        return self.decay_steps or max(1, num_steps // 5)
