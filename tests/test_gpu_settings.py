"""Settings of libraries on a GPU: Weft's choice unless the user made one."""

from __future__ import annotations

import os

import pytest
import torch

from weft.comm.gpu_settings import VARIABLES, library_settings, multiply_as_planned, prepare_gpu
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import PlanError, WeftWarning

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_HIGH_PRIORITY")


@pytest.fixture(autouse=True)
def no_library_settings(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    products = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(products, name) for name in names}  # behind __getattr__, which monkeypatch cannot restore
    for name in names:
        setattr(products, name, True)
    yield products
    for name, value in before.items():
        setattr(products, name, value)


def test_unset_variables_are_set_and_products_keep_fp32_sums(no_library_settings):
    found = library_settings()
    assert found == [
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "TORCH_NCCL_HIGH_PRIORITY=1",
        "products of fp32 exact under precision=fp32, in TF32 under precision=tf32",
        "cuDNN's algorithms as kernels.convolutions says",
        "attention by flash, efficient, cudnn, math, in torch's order or from kernels.attention",
    ]
    prepare_gpu()
    assert [os.environ.get(name) for name in NAMES] == ["expandable_segments:True", None, "1"]
    assert not no_library_settings.allow_bf16_reduced_precision_reduction
    assert not no_library_settings.allow_fp16_reduced_precision_reduction
    assert library_settings() == found


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_user_setting_is_unchanged_under_either_name(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512")
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    prepare_gpu()
    assert {one: os.environ.get(one) for one in NAMES[:2]} == {
        **dict.fromkeys(NAMES[:2]),
        name: "max_split_size_mb:512",
    }
    assert library_settings()[:2] == [f"{name}=max_split_size_mb:512", "TORCH_NCCL_HIGH_PRIORITY=0"]
    assert len(VARIABLES) == 2


CUDNN = torch.backends.cudnn
FLAGS = [torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn]
GPU = torch.device("cuda", 0)


@pytest.fixture
def flags(monkeypatch):
    """Reset torch's TF32 flags on a fake GPU of compute capability 8.0. Yield a function that returns the flags."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")

    def start():
        torch.backends.cuda.matmul.allow_tf32, CUDNN.allow_tf32 = False, True
        torch.backends.cuda.matmul.fp32_precision = "none"

    start()
    yield lambda: [one.fp32_precision for one in FLAGS]
    start()


def both_generations():
    """Return torch's TF32 state by all its names; torch raises if they disagree."""
    return torch.backends.cuda.matmul.allow_tf32, CUDNN.allow_tf32, torch.get_float32_matmul_precision()


def test_plan_determines_tf32_rounding(flags):
    multiply_as_planned("fp32", GPU)
    assert flags() == ["ieee"] * 3
    assert both_generations() == (False, False, "highest")
    multiply_as_planned("tf32", GPU)
    assert flags() == ["tf32"] * 3
    assert both_generations() == (True, True, "high")
    with pytest.warns(WeftWarning, match=r"set to round .* earlier plan\. .* Use precision=tf32"):
        multiply_as_planned("fp32", GPU)
    assert flags() == ["ieee"] * 3
    assert both_generations() == (False, False, "highest")


@pytest.mark.parametrize("asked", ["new", "old", "general"])
def test_script_setting_is_overridden_with_a_warning(flags, asked):
    match asked:
        case "new":
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        case "old":
            torch.backends.cuda.matmul.allow_tf32 = True
        case "general":
            torch.set_float32_matmul_precision("high")
    with pytest.warns(WeftWarning, match="precision=fp32: torch was set"):
        multiply_as_planned("fp32", GPU)
    assert flags() == ["ieee"] * 3
    torch.set_float32_matmul_precision("highest")
    assert both_generations() == (False, False, "highest")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp64", "fp8"])
def test_other_precisions_and_cpus_do_not_change_the_flags(flags, precision):
    before = flags()
    multiply_as_planned(precision, GPU)
    multiply_as_planned("fp32", torch.device("cpu"))
    assert flags() == before == ["none", "tf32", "tf32"]


def test_devices_without_tf32_are_refused_in_one_line(flags, monkeypatch):
    with pytest.raises(PlanError) as on_cpu:
        build_mesh(Plan(precision="tf32"))
    assert str(on_cpu.value) == (
        "precision=tf32: the cpu has no TF32, which is a format of NVIDIA's GPUs. Use precision=fp32."
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(PlanError) as on_volta:
        multiply_as_planned("tf32", GPU)
    assert str(on_volta.value) == (
        "precision=tf32: Tesla V100 has no TF32, which came with Ampere (compute capability 8.0). Use precision=fp32."
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(PlanError, match=r"this GPU is AMD's, and TF32 is a format of NVIDIA's\. Use precision=fp32"):
        multiply_as_planned("tf32", GPU)
    assert flags() == ["none", "tf32", "tf32"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert any("precision=tf32 is refused: this GPU is AMD's" in line for line in library_settings())
