"""Packed base weights: codes, rounding error, and merging adapters into them."""

from __future__ import annotations

import itertools
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weft.checkpoint.read import Part
from weft.errors import ModelError
from weft.models.adapters import add_adapter, merge_adapter, merged_tensors
from weft.models.quantized_linear import BASE_FORMATS, NF4_CODES
from weft.train.states.model_state import PackedSource

FORMATS = list(BASE_FORMATS.values())
GAP = max(high - low for low, high in itertools.pairwise(NF4_CODES))


def test_nf4_codes_are_quantiles_of_the_normal_distribution():
    """As in the paper's appendix: 8 of one side, 7 of the other, and zero."""

    def side(number):
        return [NormalDist().inv_cdf(0.9677083 + (0.5 - 0.9677083) * i / number) for i in range(number)]

    made = sorted([*side(8), 0.0, *(-value for value in side(7))])
    assert [value / made[-1] for value in made] == pytest.approx(NF4_CODES, abs=2e-7)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 200), st.floats(-30, 30), st.integers(0, 2**31), st.sampled_from(FORMATS))
def test_weight_error_is_at_most_half_a_step(rows, width, power, seed, kept):
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    packed = kept.pack(weight)
    found = kept.unpack(packed, width, torch.float64)
    blocks = nn.functional.pad(weight.double(), (0, -width % 64)).view(rows, -1, 64)
    most = blocks.abs().amax(2, keepdim=True).expand_as(blocks).reshape(rows, -1)[:, :width]
    half = 1 / 254 if kept.name == "int8" else GAP / 2
    assert ((found - weight).abs() <= most * half * (1 + 1e-5)).all()
    assert packed.shape == (rows, kept.row_bytes(width))
    again = kept.unpack(kept.pack(found), width, torch.float64)
    assert torch.allclose(again, found, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kept", FORMATS, ids=lambda one: one.name)
def test_zeros_are_exact(kept):
    assert not kept.unpack(kept.pack(torch.zeros(2, 70)), 70, torch.float32).any()


class Stored:
    """Weight source of one bfloat16 matrix."""

    def __init__(self, weight):
        self.weight = weight
        self.most = 0

    @property
    def entries(self):
        return {"w": type("Entry", (), {"shape": tuple(self.weight.shape), "dtype": "BF16"})()}

    def read(self, name, part, start, out):
        rows = part.rows or ((0, part.shape[part.dim]),)
        line = torch.cat([self.weight.narrow(part.dim, low, high - low) for low, high in rows], part.dim).reshape(-1)
        out[:] = line[start : start + len(out) // 2].view(torch.uint8).numpy().data
        self.most = max(self.most, len(out))


@pytest.mark.parametrize("kept", FORMATS, ids=lambda one: one.name)
def test_slices_are_packed_like_the_full_tensor(kept, monkeypatch):
    weight = torch.randn(12, 256).bfloat16()
    source, whole = Stored(weight), kept.pack(weight)
    packed = PackedSource(source, ["w"], kept)
    monkeypatch.setattr("weft.train.states.model_state._AT_ONCE", 8)
    shape, half = tuple(whole.shape), whole.shape[1] // 2
    parts = [Part(shape), Part(shape, 0, ((2, 4), (8, 11))), Part(shape, 1, ((half, 2 * half),))]
    wanted = [whole, torch.cat([whole[2:4], whole[8:11]]), whole[:, half:]]
    for part, one in zip(parts, wanted, strict=True):
        line = one.reshape(-1)
        for start, end in ((0, len(line)), (37, len(line) - 5)):
            out = torch.empty(end - start, dtype=torch.uint8)
            packed.read("w", part, start, out.numpy().data)
            assert torch.equal(out, line[start:end])
    assert source.most <= 2 * 256 * 2  # two rows, never the full tensor


@pytest.mark.parametrize("base", BASE_FORMATS)
def test_adapter_is_merged_into_the_dequantized_base(base):
    model = nn.Sequential(nn.Linear(128, 70), nn.Tanh(), nn.Linear(70, 3)).double()
    add_adapter(model, rank=2, base=base)
    for name, param in model.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(param)
    x = torch.randn(5, 128, dtype=torch.float64, requires_grad=True)
    wanted = model(x)
    whole = merged_tensors(model, model.state_dict())
    merge_adapter(model)
    torch.testing.assert_close(model(x), wanted, rtol=1e-12, atol=1e-12)
    assert type(model[0]) is nn.Linear
    assert model.state_dict().keys() == whole.keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, whole[name])


@pytest.mark.parametrize("wrong", [{"base": "fp4"}, {"base": "nf4", "kind": "dora"}])
def test_unknown_base_is_rejected(wrong):
    with pytest.raises(ModelError, match=f"^base={wrong['base']}: "):
        add_adapter(nn.Sequential(nn.Linear(4, 4)), rank=1, **wrong)
