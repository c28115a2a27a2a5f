"""The table of device kinds, and what selects and describes a device."""

from __future__ import annotations

import pytest
import torch

from weft.comm.gpu_settings import pick_device
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.devices import access, checks
from weft.devices.kinds import KINDS, driver_files, noun, obstacle, other_kind
from weft.errors import PlanError

ON_CPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
CPU = torch.device("cpu")


def test_rows_are_complete():
    for name, kind in KINDS.items():
        assert kind.name == name
        assert kind.install, name
        assert set(kind.precisions) <= {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8"}, name
        assert kind.package == "torch" or kind.modules, name
        assert not kind.through_host or not kind.files  # `auto` looks for files of kinds that it may select


@ON_CPU
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cdua", "launch.device=cdua: torch has no such device. Use auto, cpu, cuda, rocm, xpu, npu, hpu, mps, tpu, "
                 "neuron, or the name of a device that a package registers with torch."),
        ("cuda", "launch.device=cuda: torch sees no GPU here. Use launch.device=cpu, or run `weft doctor`."),
        ("xpu", "launch.device=xpu: torch sees no xpu device here. Run: pip install torch --index-url "
                "https://download.pytorch.org/whl/xpu. Or use launch.device=cpu."),
        ("npu", "launch.device=npu: the package torch-npu cannot be imported (No module named 'torch_npu'). "
                "Run: pip install torch-npu. Or use launch.device=cpu."),
        ("hpu", "launch.device=hpu: the package habana-torch-plugin cannot be imported (No module named "
                "'habana_frameworks'). See: https://docs.habana.ai. Or use launch.device=cpu."),
        ("rocm", f"launch.device=rocm: torch {torch.__version__} is not built for ROCm. See: https://pytorch.org "
                 "(build for ROCm). Or use launch.device=cpu."),
    ],
)  # fmt: skip
def test_missing_device_is_refused_with_the_remedy(name, message):
    with pytest.raises(PlanError) as caught:
        pick_device(name, 0)
    assert str(caught.value) == message


@ON_CPU
def test_auto_selects_the_cpu_without_accelerators():
    assert pick_device("auto", 3) == pick_device("cpu", 1) == CPU
    assert access.count_devices() == access.count_devices("cpu") == 0


def test_more_ranks_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert access.find_device("auto", 1) == torch.device("cuda", 1)
    with pytest.raises(PlanError) as caught:
        access.find_device("cuda", 2)
    assert str(caught.value) == (
        "launch.device=cuda: this is local rank 2, and there are 2 GPUs. Start at most 2 ranks on this machine."
    )


def test_backends_of_a_process_group():
    assert access.group_backend(CPU) == "gloo"
    assert access.group_backend(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert access.group_backend(torch.device("xpu", 0)) == "cpu:gloo,xpu:xccl"
    assert access.group_backend(torch.device("mps")) == "gloo"
    assert access.grouped_types(torch.device("mps")) == {"cpu"}
    assert access.grouped_types(torch.device("xpu", 1)) == {"cpu", "xpu"}


def test_gpus_of_amd_are_a_kind_of_their_own(monkeypatch):
    monkeypatch.setattr(access, "_used", {})
    assert access.kind_of(torch.device("cuda")).name == "cuda"
    monkeypatch.setattr(access, "_used", {})
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert access.kind_of(torch.device("cuda")).name == "rocm"
    assert access.has_cuda_kernels(torch.device("cuda"))


def test_host_has_no_streams_and_nothing_to_wait_for():
    for device in (CPU, torch.device("meta")):
        assert access.kind_of(device).name == "cpu"
        assert access.new_stream(device) is None
        assert access.record_event(device) is None
        assert not access.is_accelerator(device)
        access.synchronize(device)
        with access.on_stream(access.new_stream(device)):
            pass
    assert (access.allocated_bytes(CPU), access.free_bytes(CPU), access.total_bytes(CPU)) == (None, None, 0)
    assert (access.capability(CPU), access.device_name(CPU), access.uuid_of(CPU)) == ((0, 0), "cpu", None)


def test_generators_are_restored():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with access.forked_generators(CPU, None):
        torch.rand(7)
    assert torch.equal(torch.rand(4), expected)


def test_what_a_kind_cannot_run():
    other = other_kind("dsp", "gloo", streams=False)
    assert other.through_host
    assert obstacle(other, "fp64", graphs=False, compiled=False) == ""
    assert "compile=on" in obstacle(other, "fp32", graphs=False, compiled=True)
    assert "graphs=on" in obstacle(other, "fp32", graphs=True, compiled=False)
    assert obstacle(KINDS["cuda"], "fp8", graphs=True, compiled=True) == ""


def test_mesh_refuses_what_its_device_cannot_run():
    with pytest.raises(PlanError) as caught:
        build_mesh(Plan(precision="fp64"), "mps")
    assert str(caught.value) == (
        "launch.device=mps: the plan has precision=fp64, and this kind computes in fp32, bf16, fp16. "
        "Use precision=fp32."
    )


def test_words_and_files_of_devices():
    assert (noun("auto"), noun("cuda"), noun("rocm"), noun("xpu")) == ("GPU", "GPU", "GPU", "xpu device")
    assert driver_files("cuda") == driver_files("rocm")  # launch.device=cuda selects AMD's GPUs too
    assert "/dev/kfd" in (driver_files("cuda") or ())
    assert "/dev/davinci*" in (driver_files("auto") or ())
    assert driver_files("npu") is driver_files("dsp") is None  # torch is asked


def test_operators_equal_the_cpu(monkeypatch):
    names = list(checks._CLASSES)
    assert list(checks.operator_checks(CPU)) == [(name, "") for name in names]
    assert set(checks.working_precisions(CPU)) == {"fp64", "fp32", "bf16", "fp16"}
    numbers = iter((1.0, 2.0))
    monkeypatch.setitem(checks._CLASSES, "matmul", lambda device: [torch.tensor([next(numbers)])])

    def absent(device: torch.device) -> list[torch.Tensor]:
        raise NotImplementedError("no kernel\nfor this device")

    monkeypatch.setitem(checks._CLASSES, "convolution", absent)
    found = dict(checks.operator_checks(CPU))
    assert (found["matmul"], found["convolution"]) == ("differs from the CPU by 50%", "no kernel")
    assert set(found) == set(names)
