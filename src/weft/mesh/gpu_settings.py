"""What torch, its allocator and NCCL are told before a rank computes on a GPU. What the user has set stays."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft import env


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


def library_settings() -> list[str]:
    """Return what holds for a rank on a GPU that this process starts, one line each."""
    format_name = {"tf32": "TF32", "none": "fp32", "ieee": "fp32"}
    products = str(torch.backends.cuda.matmul.fp32_precision)
    return [*(one.setting() for one in VARIABLES), f"products of fp32 in {format_name.get(products, products)}"]
