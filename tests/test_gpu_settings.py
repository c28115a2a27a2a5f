"""What libraries are told on a GPU: Weft's choice where the user made none."""

from __future__ import annotations

import os

import pytest
import torch

from weft.mesh import library_settings
from weft.mesh.gpu_settings import VARIABLES, prepare_gpu

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_HIGH_PRIORITY")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    products = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(products, name) for name in names}  # behind __getattr__, where monkeypatch cannot put back
    for name in names:
        setattr(products, name, True)
    yield products
    for name, value in before.items():
        setattr(products, name, value)


def test_what_nobody_set_is_set_and_products_keep_their_sums(nothing_set):
    found = library_settings()
    assert found == [
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "TORCH_NCCL_HIGH_PRIORITY=1",
        "products of fp32 in fp32",
    ]
    prepare_gpu()
    assert [os.environ.get(name) for name in NAMES] == ["expandable_segments:True", None, "1"]
    assert not nothing_set.allow_bf16_reduced_precision_reduction
    assert not nothing_set.allow_fp16_reduced_precision_reduction
    assert library_settings() == found


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_set_stays_under_either_name(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512")
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    prepare_gpu()
    assert {one: os.environ.get(one) for one in NAMES[:2]} == {
        **dict.fromkeys(NAMES[:2]),
        name: "max_split_size_mb:512",
    }
    assert library_settings()[:2] == [f"{name}=max_split_size_mb:512", "TORCH_NCCL_HIGH_PRIORITY=0"]
    assert len(VARIABLES) == 2
