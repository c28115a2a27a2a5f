"""Settings of torch on a GPU: TF32 or exact fp32 products, cuDNN's algorithms, attention kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from tests.gpu.cases import Case, Figures, Setting, relative, require
from tests.gpu.kinds import Pictures, steps_of
from tests.gpu.training import SMALL, decoder, train
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.train.engines.gpu_kernels import GpuKernels

#: Relative error of products of random numbers. TF32 has 10 bits of mantissa, fp32 has 23.
EXACT, ROUNDED = 2e-5, (5e-5, 2e-3)
#: Differences of losses and norms from fp32's. bf16, with 7 bits, has 2e-2.
NEAR = 2.5e-3
#: Error of attention in bf16, relative to fp64.
MOST = 2e-2


def products_in_tf32(setting: Setting) -> Figures:
    """Compare a product and a convolution with fp64, and losses with fp32's, also in compiled blocks."""
    setting.need_cuda("TF32")
    draw = torch.Generator().manual_seed(0)
    a, b, weight = (
        torch.randn(shape, generator=draw).double() for shape in ((1024, 1024), (1024, 1024), (64, 64, 3, 3))
    )
    picture = torch.randn(8, 64, 32, 32, generator=draw).double()
    figures: dict[str, float] = {}
    for precision in ("tf32", "fp32"):
        build_mesh(Plan(precision=precision), setting.device)
        here = [one.to(setting.device, torch.float32) for one in (a, b, picture, weight)]
        figures[f"product {precision}"] = relative((here[0] @ here[1]).cpu(), a @ b)
        convolved = F.conv2d(here[2], here[3], padding=1).cpu()
        figures[f"convolution {precision}"] = relative(convolved, F.conv2d(picture, weight, padding=1))
    for name in ("product", "convolution"):
        require(figures[f"{name} fp32"], EXACT, f"a {name} under precision=fp32 is rounded")
        require(figures[f"{name} tf32"], ROUNDED[1], f"a {name} under precision=tf32 is off")
        if figures[f"{name} tf32"] < ROUNDED[0]:
            raise AssertionError(f"a {name} under precision=tf32 is not rounded: {figures}")
    for rest in ("", " compile=on"):
        model = decoder(replace(SMALL, dim=64, ffn_dim=128))
        ours, theirs = (train(f"precision={name}{rest}", model, setting.device, vocab=101) for name in ("tf32", "fp32"))
        figures[f"losses{rest}"] = ours.distance(theirs)
        require(figures[f"losses{rest}"], NEAR, f"losses or norms of tf32{rest} are apart from fp32's")
        if not figures[f"losses{rest}"]:
            raise AssertionError(f"precision=tf32{rest} computes what fp32 does: nothing was rounded")
    return figures


def measured_convolutions(setting: Setting) -> Figures:
    """Train a residual network with the convolution algorithms that cuDNN measured as fastest."""
    setting.need_cuda("cuDNN")
    plan, model = Plan(precision="fp32"), Pictures().model()
    found = {}
    for how in ("guessed", "measured"):
        config = RunConfig.model_validate({"kernels": {"convolutions": how}})
        chosen = GpuKernels(config, plan, setting.device)
        chosen.choose_convolutions(model)
        chosen.before([Pictures().batch(0)])
        found[how] = steps_of(Pictures(), "precision=fp32", setting.device)
        chosen.close()
    apart = found["measured"].distance(found["guessed"])
    require(apart, 1e-3, "losses or norms apart from those of the algorithms that cuDNN guesses")
    return {"apart": apart}


def kernels_of_attention(setting: Setting) -> Figures:
    """Compare each attention kernel of this device and installation with fp64, forward and backward."""
    setting.need_cuda("kernels of attention")
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 8, 512, 64, generator=draw, dtype=torch.float64) for _ in range(4))
    exact = [one.clone().requires_grad_() for one in (q, k, v)]
    expected = F.scaled_dot_product_attention(*exact, is_causal=True)
    expected.backward(grad)
    figures: dict[str, float | str] = {}
    for name in ("flash", "efficient", "cudnn", "fa3", "fa4"):
        config = RunConfig.model_validate({"kernels": {"attention": name}})
        try:
            chosen = GpuKernels(config, Plan(precision="bf16"), setting.device)
        except ValueError as refused:
            figures[name] = str(refused)
            continue
        ours = [one.to(setting.device, torch.bfloat16).requires_grad_() for one in (q, k, v)]
        out = F.scaled_dot_product_attention(*ours, is_causal=True)
        out.backward(grad.to(setting.device, torch.bfloat16))
        chosen.close()
        pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
        apart = max(relative(a.detach().cpu(), b.detach()) for a, b in pairs if a is not None and b is not None)
        figures[name] = apart
        require(apart, MOST, f"attention by {name} or a gradient of it is off")
    return figures


CORRECT = [
    Case("correct", "products in TF32", products_in_tf32, 240),
    Case("correct", "convolutions that cuDNN measured", measured_convolutions),
    Case("correct", "kernels of attention", kernels_of_attention),
]
