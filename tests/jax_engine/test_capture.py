"""Refusals of the capture: all operators without a JAX form at once, with their lines."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("jax")

import jax
import torch
from torch import nn

from weft.errors import ModelError
from weft.jax_engine.capture import capture, to_array


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.linalg.svdvals(self.layer(x))
        return torch.special.bessel_j0(y) + torch.dropout(y, 0.5, True)


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y[y.sum(1) > 0]


class Branches(Chooses):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else x


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class OwnBackward(Chooses):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Doubled.apply(self.layer(x))


def refusal(model: nn.Module) -> str:
    def loss(model: nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch["x"]).sum(), torch.tensor(3)

    with pytest.raises(ModelError) as error:
        capture(model, loss, {"x": torch.rand(3, 4)}, "mine")
    return str(error.value)


def test_all_operators_at_once() -> None:
    text = refusal(Odd())
    assert text.startswith("model=mine: ")
    assert "operators have no JAX form" in text
    for name in ("_linalg_svd", "special_bessel_j0", "native_dropout"):
        assert f"{name} (the model, jax_engine/test_capture.py:" in text
    assert text.endswith("Use launch.engine=torch, or write these lines with other operators.")


def test_data_dependent_shapes() -> None:
    assert "with a data-dependent shape (the model, jax_engine/test_capture.py:" in refusal(Chooses())


def test_branches_on_values() -> None:
    text = refusal(Branches())
    assert text.startswith("model=mine: torch.export cannot capture it at jax_engine/test_capture.py:")
    assert "return self.layer(x) if x.sum() > 0 else x" in text


def test_own_backward() -> None:
    assert "_Doubled (an autograd function with its own backward)" in refusal(OwnBackward())


class Uncommon(nn.Module):
    """Operators with arguments that few models use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.max() + y.min() + torch.linalg.vector_norm(y, 0) + torch.rsub(y, 1.0, alpha=2).square().sum()


def test_uncommon_arguments() -> None:
    torch.manual_seed(0)
    jax.config.update("jax_enable_x64", True)
    model, x = Uncommon().double(), torch.rand(3, 4, dtype=torch.float64)

    def loss(model: nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch["x"]), torch.tensor(3)

    captured = capture(model, loss, {"x": x})
    arrays = {name: to_array(param) for name, param in model.named_parameters()}
    (found, _), _ = captured(arrays, {}, captured.inputs({"x": x}, {}))
    assert float(found) == pytest.approx(model(x).item(), rel=1e-12)


class RoundsUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(self.layer(x), 2, ceil_mode=True).mean()


def test_arguments_without_a_form_are_refused() -> None:
    model, batch = RoundsUp(), {"x": torch.rand(1, 1, 7, 7)}
    captured = capture(model, lambda model, batch: (model(batch["x"]), torch.tensor(1)), batch)
    arrays = {name: to_array(param) for name, param in model.named_parameters()}
    with pytest.raises(
        ModelError, match=r"aten\.max_pool2d_with_indices \(jax_engine/test_capture\.py:\d+\): its JAX "
    ):
        captured(arrays, {}, captured.inputs(batch, {}))


def test_weft_does_not_import_jax() -> None:
    code = "import sys, weft, weft.train, weft.verify, weft.train.rank_run; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
