"""GPU kernels that a run selects in torch: the `[kernels]` settings, their errors, and restoring torch's state."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import attention

from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.errors import ConfigError
from weft.train.engines import gpu_kernels
from weft.train.engines.gpu_kernels import MOST_SHAPES, GpuKernels

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BF16 = Plan(precision="bf16")


def config(**settings):
    return RunConfig.model_validate({"kernels": settings})


def enabled():
    told = torch.backends.cuda
    names = ("flash", "mem_efficient", "cudnn", "math")
    return {name for name in names if getattr(told, f"{name}_sdp_enabled")()}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Simulate a Hopper GPU and restore torch's settings after each test."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    before = enabled(), torch.backends.cudnn.benchmark, attention.current_flash_attention_impl()
    assert before == ({"flash", "mem_efficient", "cudnn", "math"}, False, None)
    yield monkeypatch
    assert before == (enabled(), torch.backends.cudnn.benchmark, attention.current_flash_attention_impl())


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("auto", {"flash", "mem_efficient", "cudnn", "math"}),
        ("flash", {"flash", "mem_efficient", "math"}),
        ("efficient", {"mem_efficient", "math"}),
        ("cudnn", {"flash", "mem_efficient", "cudnn", "math"}),
    ],
)
def test_requested_attention_kernels_are_enabled_until_close(name, on):
    chosen = GpuKernels(config(attention=name), BF16, GPU)
    assert enabled() == on
    assert chosen.lines() == ([] if name == "auto" else [f"kernels attention by {name} if possible"])
    chosen.close()


def test_requested_kernel_has_priority(gpu):
    asked = []

    def noted(order, **options):
        asked.append((order, options))
        return attention.sdpa_kernel(order, **options)

    gpu.setattr(gpu_kernels, "sdpa_kernel", noted)
    GpuKernels(config(attention="cudnn"), BF16, GPU).close()
    order, options = asked[0]
    assert (order[0], options) == (attention.SDPBackend.CUDNN_ATTENTION, {"set_priority": True})


def test_compile_cache_key_includes_the_kernels(gpu):
    """torch's compile cache key does not contain the attention kernels, so their name is added."""
    gpu.setattr(torch.compiler.config, "cache_key_tag", "mine")
    chosen = GpuKernels(config(attention="cudnn"), Plan(precision="bf16", compile=True), GPU)
    assert torch.compiler.config.cache_key_tag == "mine attention=cudnn"
    chosen.close()
    assert torch.compiler.config.cache_key_tag == "mine"


def test_package_replaces_flash_attention(gpu):
    """The package's kernels need CUDA, so this test uses a library that registers none."""
    taken = []
    gpu.setattr(gpu_kernels, "activate_flash_attention_impl", taken.append)
    gpu.setattr(gpu_kernels, "restore_flash_attention_impl", lambda: taken.append("restored"))
    chosen = GpuKernels(config(attention="fa3"), BF16, GPU)
    assert (taken, enabled()) == (["FA3"], {"flash", "mem_efficient", "math"})
    chosen.close()
    assert taken == ["FA3", "restored"]


@pytest.mark.parametrize(
    ("name", "precision", "device", "capability", "message"),
    [
        ("cudnn", "bf16", CPU, (9, 0), "it is a kernel of GPUs, and this run computes on the cpu. Use "),
        ("flash", "tf32", GPU, (9, 0),
         "it multiplies in bf16 or fp16, and the plan has precision=tf32. Use precision=bf16 in the plan, or "),
        ("efficient", "fp64", GPU, (9, 0),
         "it has no fp64, which is the plan's precision. Use precision=fp32 in the plan, or "),
        ("flash", "fp16", GPU, (7, 0), "it needs 8.0 or more, and Tesla V100 has compute capability 7.0. Use "),
        ("fa3", "bf16", GPU, (8, 0),
         "FlashAttention 3 needs 9.x, and Tesla V100 has compute capability 8.0. Use "),
        ("fa4", "bf16", GPU, (12, 0),
         "FlashAttention 4 needs 9.x or 10.x, and Tesla V100 has compute capability 12.0. Use "),
    ],
)  # fmt: skip
def test_unusable_kernels_are_rejected(gpu, name, precision, device, capability, message):
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError) as refused:
        GpuKernels(config(attention=name), Plan(precision=precision), device)
    assert str(refused.value) == f"kernels.attention={name}: {message}kernels.attention=auto."


def test_missing_package_is_named(gpu):
    gpu.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ConfigError) as refused:
        GpuKernels(config(attention="fa3"), BF16, GPU)
    assert str(refused.value) == (
        "kernels.attention=fa3: FlashAttention 3 cannot be loaded here: import of flash_attn_interface halted; None in "
        "sys.modules. Install the package that has flash_attn_interface, or use kernels.attention=auto."
    )
    gpu.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))  # a module without the kernels
    with pytest.raises(ConfigError, match=r"does not expose FA3 .*kernels\. Install the package"):
        GpuKernels(config(attention="fa3"), BF16, GPU)


def measured(model, plan=BF16, **settings):
    chosen = GpuKernels(config(**settings), plan, GPU)
    chosen.choose_convolutions(model)
    return chosen


def batches(*widths):
    return [{"images": torch.empty(1, width), "labels": [torch.empty(2)]} for width in widths]


CONVOLUTIONAL = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(1, 1))


def test_first_batch_shapes_are_benchmarked_and_others_use_heuristics():
    chosen = measured(CONVOLUTIONAL)
    assert chosen.lines() == [f"kernels convolutions measured for the first {MOST_SHAPES} shapes of batches"]
    flag = torch.backends.cudnn
    for width in range(MOST_SHAPES - 1):
        chosen.before(batches(width, width))
        assert flag.benchmark
    chosen.before(batches(100, 101))  # one shape more than the limit: neither is benchmarked
    assert not flag.benchmark
    chosen.before(batches(100))
    assert flag.benchmark
    chosen.before_evaluation()
    assert not flag.benchmark
    chosen.before(batches(0, 100))
    assert flag.benchmark
    chosen.before(batches(102))
    assert not flag.benchmark
    chosen.close()


@pytest.mark.parametrize(
    ("model", "plan", "settings", "line"),
    [
        (nn.Linear(1, 1), BF16, {}, ""),
        (CONVOLUTIONAL, BF16, {"convolutions": "guessed"}, "guessed"),
        (CONVOLUTIONAL, Plan(tp=2), {}, "guessed (tp has copies of them on several ranks)"),
        (
            nn.Linear(1, 1),
            BF16,
            {"convolutions": "measured"},
            f"measured for the first {MOST_SHAPES} shapes of batches",
        ),
    ],
)
def test_auto_benchmarks_models_with_convolutions(model, plan, settings, line):
    chosen = measured(model, plan, **settings)
    assert chosen.lines() == ([f"kernels convolutions {line}"] if line else [])
    chosen.before(batches(1))
    assert torch.backends.cudnn.benchmark == line.startswith("measured")
    chosen.close()


def test_previous_torch_settings_are_restored():
    flag = torch.backends.cudnn
    flag.deterministic = True
    try:
        chosen = measured(CONVOLUTIONAL)
        assert chosen.lines() == ["kernels convolutions guessed (torch is set to be deterministic)"]
        chosen.close()
    finally:
        flag.deterministic = False
    flag.benchmark = True
    try:
        chosen = measured(CONVOLUTIONAL)
        for width in range(MOST_SHAPES + 2):
            chosen.before(batches(width))
            assert flag.benchmark
        assert chosen.lines() == ["kernels convolutions measured for every shape, as set in torch"]
        chosen.close()
        assert flag.benchmark
    finally:
        flag.benchmark = False


@pytest.mark.parametrize(
    ("device", "plan", "message"),
    [
        (CPU, BF16, "cuDNN runs on GPUs, and this run computes on the cpu. Use kernels.convolutions=auto."),
        (GPU, Plan(tp=2), "the ranks of tp=2 have copies of convolutions, which would diverge if one measures "
                          "another algorithm to be the fastest. Use kernels.convolutions=auto, or tp=1."),
    ],
)  # fmt: skip
def test_benchmarking_is_rejected_if_unsupported(device, plan, message):
    with pytest.raises(ConfigError) as refused:
        GpuKernels(config(convolutions="measured"), plan, device)
    assert str(refused.value) == f"kernels.convolutions=measured: {message}"
