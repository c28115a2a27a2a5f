"""What torch, its allocator and NCCL are told before a rank computes on a GPU. What the user has set stays."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from weft import env
from weft.errors import PlanError, WeftWarning

#: The first compute capability with TF32.
_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class GpuVariable:
    """A variable that a library reads when it first uses the GPU. or_name: another that says the same."""

    name: str
    value: str
    or_name: str = ""

    def setting(self) -> str:
        """Return the variable as it is set now, or as `prepare_gpu` will set it."""
        for name in (self.name, self.or_name):
            if name and (found := env.get(name)):
                return f"{name}={found}"
        return f"{self.name}={self.value}"


VARIABLES = (
    # Segments of the allocator grow, so that less memory is lost between tensors of many sizes.
    GpuVariable("PYTORCH_ALLOC_CONF", "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF"),
    # Collectives are started before kernels that wait beside them: they are short for the device and long for others.
    GpuVariable("TORCH_NCCL_HIGH_PRIORITY", "1"),
)


def prepare_gpu() -> None:
    """Set what libraries read, before this process first uses its GPU.

    Sums inside of products of bf16 and fp16 stay in fp32, also where a kernel splits a product: by default torch lets
    them be rounded in between.
    """
    for one in VARIABLES:
        if not (one.or_name and env.get(one.or_name)):
            env.default_for_libraries(**{one.name: one.value})
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False


def multiply_as_planned(precision: str, device: torch.device) -> None:
    """Have torch multiply fp32 numbers on a GPU as the plan says: exactly under fp32, rounded to TF32 under tf32.

    Its flags are the process's, so the newest mesh decides; other precisions leave them. Torch by itself rounds what
    convolutions and recurrent layers read. The flags have two generations of names: both are set, since torch refuses
    to read one where they disagree, as its compiler does.

    Raises:
        PlanError: under tf32, for a device without TF32.
    """
    if precision == "tf32" and (why := _without_tf32(device)):
        raise PlanError(f"precision=tf32: {why}. Use precision=fp32.")
    if precision not in ("fp32", "tf32") or device.type != "cuda":
        return
    backends: Any = torch.backends  # torch's types know only some of the flags
    products, rounds = backends.cuda.matmul, precision == "tf32"
    if not rounds and products.fp32_precision == "tf32":
        warnings.warn(
            "precision=fp32: torch was told to round products of fp32 to TF32, by this script or an earlier plan, and "
            "multiplies exactly from here on. Use precision=tf32 to have them rounded.",
            WeftWarning,
            stacklevel=3,
        )
    products.allow_tf32 = backends.cudnn.allow_tf32 = rounds
    word = "tf32" if rounds else "ieee"
    for one in (products, backends.cudnn.conv, backends.cudnn.rnn):
        one.fp32_precision = word


def _without_tf32(device: torch.device) -> str:
    """Why a device does not round to TF32; "" where it does."""
    if device.type != "cuda":
        return f"the {device.type} has no TF32, which is a format of NVIDIA's GPUs"
    if torch.version.hip:
        return "this GPU is AMD's, and TF32 is a format of NVIDIA's"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no TF32, which came with Ampere (compute capability 8.0)"
    return ""


def library_settings() -> list[str]:
    """Return what holds for a rank on a GPU that this process starts, one line each."""
    why = _without_tf32(torch.device("cuda", 0)) if torch.cuda.is_available() else ""
    rounded = f"precision=tf32 is refused: {why}" if why else "in TF32 under precision=tf32"
    enabled = [name for name, is_on in _attention().items() if is_on]
    guesses = "measured for every shape" if torch.backends.cudnn.benchmark else "as kernels.convolutions says"
    return [
        *(one.setting() for one in VARIABLES),
        f"products of fp32 exact under precision=fp32, {rounded}",
        f"cuDNN's algorithms {guesses}",
        f"attention by {', '.join(enabled)}, in torch's order or as kernels.attention says",
    ]


def _attention() -> dict[str, bool]:
    """Which kernels torch may take for attention, by the names that `kernels.attention` has for them."""
    told = torch.backends.cuda
    return {
        "flash": told.flash_sdp_enabled(),
        "efficient": told.mem_efficient_sdp_enabled(),
        "cudnn": told.cudnn_sdp_enabled(),
        "math": told.math_sdp_enabled(),
    }


def pick_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of this rank. kind: "auto" (a GPU where there is one), "cpu" or "cuda".

    Raises:
        PlanError: where the machine has no GPU, or none for this rank.
    """
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise PlanError("launch.device=cuda: torch sees no GPU here. Use launch.device=cpu, or see `weft doctor`.")
        if local_rank >= torch.cuda.device_count():
            raise PlanError(
                f"launch.device={kind}: this is local rank {local_rank}, and there are {torch.cuda.device_count()} "
                f"GPUs. Start at most {torch.cuda.device_count()} ranks on this machine."
            )
        device = torch.device("cuda", local_rank)
        prepare_gpu()
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
