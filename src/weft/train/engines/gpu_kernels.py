"""Selection of torch's attention and convolution kernels on a GPU, from `[kernels]` of the config.

Torch's flags are global to the process. They affect all models in the process, compiled blocks (whose kernels are
chosen during tracing), and recomputation in backward. Closing the engine restores the previous flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.compiler.config
from torch import nn
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.devices import access
from weft.env import default_for_libraries
from weft.errors import ConfigError
from weft.private_torch import tree_leaves

_FLASH, _EFFICIENT, _MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
#: Attention kernels in order of preference. cuDNN is excluded unless it is configured, because torch on Hopper would
#: prefer it in the first call.
_ORDERS = {
    "flash": [_FLASH, _EFFICIENT, _MATH],
    "efficient": [_EFFICIENT, _MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, _FLASH, _EFFICIENT, _MATH],
}
#: Packages whose kernels replace flash attention, and the major compute capabilities that they support.
_PACKAGES = {
    "fa3": ("FlashAttention 3", "flash_attn_interface", (9,)),
    "fa4": ("FlashAttention 4", "flash_attn.cute", (9, 10)),
}
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip
#: Maximum number of batch shapes for which cuDNN benchmarks its algorithms. Each shape causes one slow step.
MOST_SHAPES = 8


class GpuKernels:
    """Sets torch's kernel flags in this process, and restores them on `close`.

    Raises:
        ConfigError: if the device, the installation or the plan cannot use the configured kernels.
    """

    def __init__(self, config: RunConfig, plan: Plan, device: torch.device):
        self._attention, self._convolutions = config.kernels.attention, config.kernels.convolutions
        self._plan, self._device, self._before = plan, device, ExitStack()
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._measures = False
        self._chosen = ""
        if config.train.deterministic:
            self._set_deterministic()
        if self._attention != "auto":
            _check_attention(self._attention, plan, device)
            self._set_attention()
        if self._convolutions == "measured":
            _check_measured(plan, device)

    def _set_deterministic(self) -> None:
        default_for_libraries(CUBLAS_WORKSPACE_CONFIG=":4096:8")  # cuBLAS needs it; torch checks it
        self._before.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True)
        cudnn = torch.backends.cudnn
        self._before.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
        cudnn.deterministic = True

    def _set_attention(self) -> None:
        name = self._attention
        if name in _PACKAGES:
            title, package, _ = _PACKAGES[name]
            try:
                activate_flash_attention_impl(name.upper())
            except (ImportError, RuntimeError) as error:
                raise ConfigError(
                    f"kernels.attention={name}: {title} cannot be loaded here: {error}. Install the package "
                    f"that has {package}, or use kernels.attention=auto."
                ) from error
            self._before.callback(restore_flash_attention_impl)
        self._before.enter_context(sdpa_kernel(_ORDERS.get(name, _ORDERS["flash"]), set_priority=True))
        if self._plan.compile:
            # Use a separate compile cache per kernel choice, because torch's cache keys do not contain the flags.
            known = torch.compiler.config.cache_key_tag
            torch.compiler.config.cache_key_tag = f"{known} attention={self._attention}".strip()
            torch.compiler.reset()
            self._before.callback(torch.compiler.reset)
            self._before.callback(setattr, torch.compiler.config, "cache_key_tag", known)

    def choose_convolutions(self, model: nn.Module) -> None:
        """Choose how cuDNN selects algorithms for this model's convolutions, on a GPU. Call it before the first step.

        Sets `torch.backends.cudnn.benchmark` to False; `before` sets it to True for single steps. With
        kernels.convolutions=auto, a value of True that the user has set is kept for all steps.
        """
        if not access.has_cuda_kernels(self._device):
            return
        cudnn = torch.backends.cudnn
        has_any = any(isinstance(module, _CONVOLUTIONS) for module in model.modules())
        if self._convolutions != "auto":
            self._measures = self._convolutions == "measured"
            self._chosen = "measured" if self._measures else "guessed"
        elif cudnn.benchmark:
            self._chosen = "measured for every shape, as set in torch" if has_any else ""
            return
        elif has_any:
            told = torch.are_deterministic_algorithms_enabled() or cudnn.deterministic
            self._measures = not told and self._plan.tp == 1
            reason = " (torch is set to be deterministic)" if told else " (tp has copies of them on several ranks)"
            self._chosen = "measured" if self._measures else f"guessed{reason}"
        if self._measures:
            self._chosen += f" for the first {MOST_SHAPES} shapes of batches"
        self._before.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        cudnn.benchmark = False

    def before(self, batches: Sequence[Any]) -> None:
        """Enable cuDNN benchmarking for a step if all its batch shapes are among the first `MOST_SHAPES`, else disable.

        Does nothing if `choose_convolutions` did not choose benchmarking.
        """
        if not self._measures:
            return
        found = {tuple(leaf.shape for leaf in tree_leaves(one) if isinstance(leaf, torch.Tensor)) for one in batches}
        if len(self._shapes | found) <= MOST_SHAPES:
            self._shapes |= found
        torch.backends.cudnn.benchmark = found <= self._shapes

    def before_evaluation(self) -> None:
        """Make cuDNN use heuristics during evaluation, whose batches may have any shape."""
        if self._measures:
            torch.backends.cudnn.benchmark = False

    def lines(self) -> list[str]:
        """Return lines with the active settings for the start of a run; empty if torch's defaults apply."""
        chosen = [] if self._attention == "auto" else [f"attention by {self._attention} if possible"]
        chosen += [f"convolutions {self._chosen}"] if self._chosen else []
        chosen += ["deterministic"] if torch.are_deterministic_algorithms_enabled() else []
        return [f"kernels {'; '.join(chosen)}"] if chosen else []

    def close(self) -> None:
        """Restore torch's previous flags."""
        self._before.close()


def _check_attention(name: str, plan: Plan, device: torch.device) -> None:
    if not access.has_cuda_kernels(device):
        raise _refused(name, f"it is a kernel of GPUs, and this run computes on the {device.type}")
    if name != "efficient" and plan.precision not in ("bf16", "fp16", "fp8"):
        why = f"it multiplies in bf16 or fp16, and the plan has precision={plan.precision}"
        raise _refused(name, why, "precision=bf16 in the plan")
    if name == "efficient" and plan.precision == "fp64":
        raise _refused(name, "it has no fp64, which is the plan's precision", "precision=fp32 in the plan")
    if torch.version.hip:
        if name in ("flash", "efficient"):
            return
        raise _refused(name, "it is a kernel of NVIDIA's GPUs, and this one is AMD's")
    major, minor = access.capability(device)
    here = f"{access.device_name(device)} has compute capability {major}.{minor}"
    if name in _PACKAGES:
        title, _, majors = _PACKAGES[name]
        if major not in majors:
            raise _refused(name, f"{title} needs {' or '.join(f'{one}.x' for one in majors)}, and {here}")
    elif name != "efficient" and major < 8:
        raise _refused(name, f"it needs 8.0 or more, and {here}")


def _check_measured(plan: Plan, device: torch.device) -> None:
    if not access.has_cuda_kernels(device):
        raise ConfigError(
            f"kernels.convolutions=measured: cuDNN runs on GPUs, and this run computes on the {device.type}. "
            "Use kernels.convolutions=auto."
        )
    if plan.tp > 1:
        raise ConfigError(
            f"kernels.convolutions=measured: the ranks of tp={plan.tp} have copies of convolutions, which would "
            "diverge if one measures another algorithm to be the fastest. Use kernels.convolutions=auto, or tp=1."
        )


def _refused(name: str, why: str, other: str = "") -> ConfigError:
    remedy = f"{other}, or kernels.attention=auto" if other else "kernels.attention=auto"
    return ConfigError(f"kernels.attention={name}: {why}. Use {remedy}.")
