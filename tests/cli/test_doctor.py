"""`weft doctor`: completes on any machine, and reveals no private data."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
import types

import pytest

from weft import env
from weft.cli.machines import doctor as doctor_verb
from weft.cli.machines import doctor as gpus
from weft.cli.machines import doctor as machine
from weft.cli.machines import doctor as network
from weft.cli.machines import doctor as software
from weft.cli.machines.doctor import CheckLine, examine, text


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """Run the command once, with a secret and a private folder in its environment."""
    home = tmp_path_factory.mktemp("home")
    variables = env.child_env(
        WEFT_HOME=str(home / "cache"), HF_TOKEN="hf_verysecret", NCCL_DEBUG="WARN", SLURM_JOB_USER="somebody", CI="true"
    )
    command = [sys.executable, "-m", "weft", "doctor", "--json"]
    return subprocess.run(command, env=variables, cwd=home, capture_output=True, text=True, timeout=60, check=False)


def lines_of(report) -> dict[str, dict[str, str]]:
    return {line["name"]: line for line in json.loads(report.stdout)["lines"]}


def test_this_machine_can_train(report):
    assert report.returncode == 0
    assert report.stderr == ""
    assert json.loads(report.stdout)["healthy"] is True
    for name in ("weft", "python", "torch", "backends", "cpu", "memory", "limits", "driver", "loopback", "interfaces"):
        assert name in lines_of(report)


def test_each_operator_class_runs_on_the_device(report):
    lines = [line for line in json.loads(report.stdout)["lines"] if line["section"] == "device"]
    assert [line["name"] for line in lines] == [
        *("kind", "precisions", "matmul", "convolution", "attention", "reductions", "embedding", "selection"),
        *("optimizer", "random numbers", "collective"),
    ]
    assert {line["status"] for line in lines} == {"ok"}
    assert all(line["text"] for line in lines)


def test_two_ranks_connect(report):
    assert lines_of(report)["two ranks"]["text"].startswith("gloo: connected in ")


def test_report_has_no_private_data(report):
    variables = lines_of(report)["variables"]["text"]
    assert "HF_TOKEN=[redacted]" in variables
    assert "NCCL_DEBUG=WARN" in variables
    assert "SLURM_JOB_USER is set" in variables
    assert "verysecret" not in report.stdout
    assert "somebody" not in report.stdout
    assert socket.gethostname() not in report.stdout
    if getpass.getuser() != "root":
        assert getpass.getuser() not in report.stdout


def test_no_files_remain(report):
    assert report.returncode == 0
    assert not list(machine.Path.cwd().glob(".weft-doctor-*"))


def test_failing_check_is_reported_as_a_line():
    def broken() -> list[CheckLine]:
        raise PermissionError("no /proc here")

    [line] = examine("machine", broken)
    assert (line.status, line.name) == ("warn", "broken")
    assert line.text == "could not be read (PermissionError: no /proc here)"


def test_text_has_no_markup_and_has_the_remedy():
    lines = [CheckLine("machine", "memory", "1 GiB", "fail", "Buy some."), CheckLine("gpus", "driver", "none")]
    assert text(lines).splitlines() == [
        "machine",
        "  fail  memory         1 GiB",
        "                       -> Buy some.",
        "gpus",
        "  ok    driver         none",
    ]


@pytest.mark.parametrize("status, code", [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_fail_sets_the_exit_code(monkeypatch, capsys, status, code):
    from weft.cli.app import run

    monkeypatch.setattr(doctor_verb, "report", lambda: [CheckLine("a", "b", "c", status)])
    assert run(["doctor"]) == code
    assert run(["doctor", "--markdown"]) == code
    assert capsys.readouterr().out.endswith("```\n")


def test_unwritable_disk_fails(monkeypatch, tmp_path):
    def refuse(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine, "_write_speed", refuse)
    [line, _] = machine.disks()
    assert line.status == "fail"
    assert "Permission denied" in line.text
    assert "WEFT_HOME" in line.remedy


def test_missing_package_fails(monkeypatch):
    from importlib import metadata

    def version(package):
        if package in ("tokenizers", "transformers"):
            raise metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(software.metadata, "version", version)
    lines = {line.name: line for line in software.versions()}
    assert lines["missing"].status == "fail"
    assert lines["missing"].remedy == "Run: pip install tokenizers"
    assert "transformers" in lines["not installed"].text
    assert lines["not installed"].status == "ok"


@pytest.mark.parametrize(
    "summary, whose", [("A substrate for agents", "another project"), ("One plan for training", "an old install")]
)
def test_other_distribution_named_weft_is_reported(monkeypatch, summary, whose):
    monkeypatch.setattr(software.metadata, "metadata", lambda name: {"Summary": summary, "Version": "0.9"})
    [line] = software.namesake()
    assert line.status == "warn"
    assert line.text.startswith(f"weft 0.9 is installed too: {whose}")
    assert line.remedy.startswith("Run: pip uninstall weft")


def test_no_other_distribution_is_no_clash(monkeypatch):
    def missing(name):
        raise software.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(software.metadata, "metadata", missing)
    assert not list(software.namesake())


class FakeNvml(types.ModuleType):
    """A fake pynvml with one GPU that supports some of the calls."""

    NVML_NVLINK_MAX_LINKS = 4

    class NVMLError(Exception):
        pass

    def __getattr__(self, name):
        answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlSystemGetDriverVersion": "570.1",
            "nvmlSystemGetCudaDriverVersion_v2": 12080,
            "nvmlDeviceGetHandleByIndex": 0,
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(free=2**37, total=2**37),
            "nvmlDeviceGetPowerManagementLimit": 700_000,
            "nvmlDeviceGetPciInfo": types.SimpleNamespace(busId=b"00000000:3B:00.0"),
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
        }

        def call(*args):
            if name == "nvmlDeviceGetNvLinkState" and args[1] < 3:
                return int(args[1] > 0)
            if name not in answers:
                raise self.NVMLError("not supported")
            return answers[name]

        return call


def test_gpu_invisible_to_torch_fails(monkeypatch):
    import torch

    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked: list[str] = []
    monkeypatch.setattr(gpus, "cores", lambda pci_ids: asked.extend(pci_ids) or [])
    lines = list(gpus.gpus())
    assert asked == ["0000:3b:00.0"]  # in the format of sysfs
    assert lines[0].text == "570.1, up to CUDA 12.8; 1 GPUs"
    assert lines[1].text == (
        "NVIDIA H200, 128 GiB free of 128 GiB, power limit 700 W, PCIe 5.0 x16 of x16, NVLink 2 up"
    )
    assert (lines[2].name, lines[2].status) == ("settings", "ok")
    assert (lines[3].name, lines[3].status) == ("torch", "fail")


def test_unusable_loopback_fails(monkeypatch):
    class NoSocket:
        def __init__(self):
            raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(network.socket, "socket", NoSocket)
    [line] = network.loopback()
    assert line.status == "fail"
    assert "Operation not permitted" in line.text
