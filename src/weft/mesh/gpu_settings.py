"""What torch, its allocator and NCCL are told before a rank computes on a GPU. What the user has set stays."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

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
    products, rounds = torch.backends.cuda.matmul, precision == "tf32"
    if not rounds and products.fp32_precision == "tf32":
        warnings.warn(
            "precision=fp32: torch was told to round products of fp32 to TF32, and this plan multiplies exactly from "
            "here on. Use precision=tf32 to have them rounded.",
            WeftWarning,
            stacklevel=3,
        )
    products.allow_tf32 = torch.backends.cudnn.allow_tf32 = rounds
    word = "tf32" if rounds else "ieee"
    for one in (products, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
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
    format_name = {"tf32": "TF32", "none": "fp32", "ieee": "fp32"}
    products = str(torch.backends.cuda.matmul.fp32_precision)
    return [*(one.setting() for one in VARIABLES), f"products of fp32 in {format_name.get(products, products)}"]


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
