"""AdamW with moments in bf16 or one-byte floats that need no scale.

Block-wise 8-bit optimizers (Dettmers et al. 2022, arXiv 2110.02861; bitsandbytes and torchao) store a scale per block
of elements. Plans shard parameters through such blocks, so results would differ between plans. Here each element is
encoded separately: an exponent wide enough for every moment and one mantissa bit, with stochastic rounding, which is
unbiased over many steps. `exp_avg` is signed and ranges from 2^-48 to 2^15 (int8). `exp_avg_sq` ranges from 2^-96 to
2^31 (uint8), so its root has the same lower limit. Smaller values become zero, larger values the largest code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from weft.devices import access
from weft.optim.one_pass import AdamRule, Lane, step_lane
from weft.optim.step_decision import DecidedOptimizer, StepDecision

#: Bits of fp32 that are dropped: all mantissa bits but one.
_CUT = 22
#: Exponent and mantissa bit of fp32 just below the smallest value: the value of code 0 if it were not zero.
_ZERO = {torch.int8: (127 - 48) * 2 - 1, torch.uint8: (127 - 96) * 2 - 1}
_MAGNITUDE = 2**31 - 1
#: Value to use as noise for rounding to nearest.
HALF = 1 << 15


def encode_bytes(x: Tensor, noise: Tensor | int, dtype: torch.dtype) -> Tensor:
    """Return x as codes of its shape, rounded stochastically: away from zero with the dropped fraction as probability.

    Args:
        x: any float dtype; not negative for uint8.
        noise: 16 random bits per element, int32, or `HALF` to round to nearest.
        dtype: int8 for signed values, uint8 for values of at least 0.
    """
    bits = x.float().view(torch.int32) & _MAGNITUDE
    code = ((bits + (noise << (_CUT - 16))) >> _CUT) - _ZERO[dtype]
    code = code.clamp_(0, torch.iinfo(dtype).max)
    return (torch.where(x < 0, -code, code) if dtype == torch.int8 else code).to(dtype)


def exact_moment(state: Tensor) -> Tensor:
    """Return a moment as floats: decoded if it holds codes, else unchanged."""
    if state.dtype not in _ZERO:
        return state
    magnitude = state.to(torch.int32).abs_()  # the values of codes are exact in bf16 too
    found = torch.where(magnitude > 0, (magnitude + _ZERO[state.dtype]) << _CUT, 0).view(torch.float32)
    return torch.where(state < 0, -found, found) if state.dtype == torch.int8 else found


# AdamW with stochastically rounded moments in bf16 or one-byte floats: less memory than fp32 moments, without drift.

#: Elements per tile: on a CPU tiles stay in its caches, on a GPU they bound temporary memory.
_TILE, _GPU_TILE = 2**17, 2**24
#: Odd constants of the hash. Constants above 2^31 are written as negative numbers, as torch stores them.
_FIRST, _SECOND, _HIGH = 0x7FEB352D, 0x846CA68B - 2**32, 0x9E3779B1 - 2**32
_LOW_16 = (1 << 16) - 1
#: Dtypes of the states, by the value of `optimizer.states`.
_FORMATS = {
    "bf16": {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
    "fp8": {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8},
}


class Placed(Protocol):
    """Position of a local part of a parameter in the full parameter."""

    @property
    def name(self) -> str:
        """Name of the parameter."""
        ...

    def positions(self, first: int, last: int) -> Tensor:
        """Return the positions in the full parameter of the local elements `first` to `last` (exclusive), int64.

        They are in the memory order of the full parameter.
        """
        ...


class RoundedAdamW(DecidedOptimizer):
    """AdamW whose `exp_avg` and `exp_avg_sq` are bf16, or one-byte codes under states="fp8".

    `places` maps a sharded or named parameter to its name and its position in the full parameter, on which the random
    numbers depend. The code that shards the parameters fills it. All other parameters are full, and named by their
    order. Arithmetic uses the parameter's dtype.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        seed: int = 0,
        states: Literal["bf16", "fp8"] = "bf16",
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.seed = seed
        self._formats = _FORMATS[states]
        self.places: dict[nn.Parameter, Placed] = {}
        self._last: StepDecision | None = None  # decision of a counted step, which the device may have skipped

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient, and return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finalize()
        number = 0
        for group in self.param_groups:
            for param in group["params"]:
                number += 1
                if param.grad is not None and param.numel():
                    self._update(param, param.grad, group, self.places.get(param) or _Unsharded(str(number), param))
        self._last = self.decision
        return loss

    def finalize(self) -> None:
        """Decrement the step counts if the device skipped the last step. Waits for the device's decision."""
        last, self._last = self._last, None
        if last is not None and not last.was_taken:
            for state in self.state.values():
                state["step"] -= 1

    def _update(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any], place: Placed) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
        for key, dtype in self._formats.items():
            if key not in state:
                state[key] = torch.zeros_like(param, dtype=dtype)
            elif state[key].dtype != dtype:  # loaded from a checkpoint with another dtype
                state[key] = _stored(exact_moment(state[key]), HALF, dtype)
        state["step"] = state["step"].cpu() + 1
        count = int(state["step"])
        if grad.stride() != param.stride():
            grad = torch.empty_like(param).copy_(grad)
        beta1, beta2 = group["betas"]
        rule = AdamRule(count, group["lr"], beta1, beta2, group["eps"], group["weight_decay"], decoupled=True)
        key = _key_of(self.seed, count, place.name)
        size = _GPU_TILE if access.is_accelerator(param.device) else _TILE
        lane = Lane(param, grad, (state["exp_avg"], state["exp_avg_sq"]))
        factor: float | Tensor = 1.0
        if self.decision is not None:
            factor = torch.where(self.decision.is_taken, 1.0, torch.nan).to(param.dtype)
        for index, one in enumerate(lane.tiles(size)):
            exact = tuple(exact_moment(moment).to(one.master.dtype) for moment in one.states)
            step_lane(Lane(one.master, one.grad, exact), rule, factor)
            first = index * size
            noise = noise_at(place.positions(first, first + one.master.numel()).to(param.device), key)
            # A skipped step does not change moments: values that are exact in a format are not rounded again.
            for state_line, moment, bits in zip(one.states, exact, (noise, noise >> 16), strict=True):
                state_line.copy_(_stored(moment, bits & _LOW_16, state_line.dtype))

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict, with one-byte codes converted exactly to bf16, so that any AdamW can load it."""
        self.finalize()
        found = super().state_dict()
        found["state"] = {
            index: {
                key: exact_moment(value).bfloat16() if isinstance(value, Tensor) and key in self._formats else value
                for key, value in state.items()
            }
            for index, state in found["state"].items()
        }
        return found


def noise_at(positions: Tensor, key: tuple[int, int]) -> Tensor:
    """Return 32 random bits per position, int32: the hash "lowbias32" (Wellons 2018) of position and key."""
    x = _mixed(positions.to(torch.int32) ^ key[0])
    return _mixed(x ^ ((positions >> 32).to(torch.int32) * _HIGH) ^ key[1])


def rounded(x: Tensor, noise: Tensor | int) -> Tensor:
    """Round x stochastically to bf16. `noise` holds 16 random bits per element, int32."""
    bits = (x.float().view(torch.int32) + noise) & ~_LOW_16
    return bits.view(torch.float32).bfloat16()


def _stored(x: Tensor, noise: Tensor | int, dtype: torch.dtype) -> Tensor:
    return rounded(x, noise) if dtype == torch.bfloat16 else encode_bytes(x, noise, dtype)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 16)) * _FIRST
    x = (x ^ _shifted(x, 15)) * _SECOND
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _key_of(seed: int, step: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}\0{step}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


class _Unsharded:
    """Position of a parameter that is not sharded: all elements from 0."""

    def __init__(self, name: str, param: Tensor):
        self.name, self._device = name, param.device

    def positions(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self._device)
