"""RMS norms are recognized by their arithmetic, and other modules are not."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from weft.models.inspect.rms_norm import RmsForm, rms_form

FORMS = {
    "olmo2.Olmo2RMSNorm": RmsForm(1e-6, from_one=False, rounds_first=False),
    "llama.LlamaRMSNorm": RmsForm(1e-6, from_one=False, rounds_first=True),
    "gemma2.Gemma2RMSNorm": RmsForm(1e-6, from_one=True, rounds_first=False),
}


def norm_of(name: str, device: str = "cpu") -> nn.Module:
    family, kind = name.split(".")
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with torch.device(device):
        return getattr(module, kind)(16)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", FORMS)
def test_each_familys_norm_is_recognized_by_its_arithmetic(name, device):
    assert rms_form(norm_of(name, device)) == FORMS[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_form_is_bitwise_equal_to_the_module(name, dtype):
    module, x = norm_of(name).to(dtype), torch.randn(4, 5, 16).to(dtype)
    with torch.no_grad():
        module.weight.normal_()
        form, mean_square = rms_form(module), x.float().pow(2).mean(-1, keepdim=True)
        assert form is not None
        assert torch.equal(form.scaled(x, mean_square, module.weight), module(x))


def test_recognition_changes_nothing():
    module = norm_of("olmo2.Olmo2RMSNorm")
    before = module.weight
    rms_form(module)
    assert module.weight is before
    assert torch.equal(before, torch.ones(16))


class Doubled(nn.RMSNorm):
    """A subclass of RMSNorm with other arithmetic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("module", [nn.LayerNorm(16), nn.GroupNorm(2, 16), Doubled(16, eps=1e-6), nn.Linear(16, 16)])
def test_other_modules_are_not_rms_norms(module):
    assert rms_form(module) is None


def test_torch_rms_norm_is_recognized():
    assert rms_form(nn.RMSNorm(16, eps=1e-5)) == RmsForm(1e-5, from_one=False, rounds_first=False)
