"""Keras models, trained under a plan and in a plain loop."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lean import compiled_by
from weft.comm.mesh import build_mesh
from weft.config.fields.layout import Layout
from weft.config.plan import Plan
from weft.errors import WeftWarning
from weft.parallel.parallelize import parallelize
from weft.train.batches.microbatches import Microbatches
from weft.train.script.script_export import export_keras
from weft.train.step.train_step import TrainStep

needs_keras = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")
CLASSES, ROWS = 4, 8


def load_keras() -> Any:
    """Return keras on its torch backend, with matrix products of float64 in float64."""
    os.environ["KERAS_BACKEND"] = "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import keras
        from absl import logging
        from keras.src.backend.common import dtypes

    # absl, which Keras imports, closes the stream of its handler when logging is configured again, unless it is one of
    # the interpreter's. Here it would be pytest's.
    logging.get_absl_handler().python_handler.stream = sys.__stderr__
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.config.set_floatx("float64")
    return keras


def dense(keras: Any, layers: Any) -> Any:
    widths = (layers.Dense(32, "relu", name="up"), layers.Dense(16, name="down"), layers.LayerNormalization())
    return keras.Sequential([keras.Input((16,)), *widths, layers.Dense(CLASSES, name="head")])


def convolution(keras: Any, layers: Any) -> Any:
    parts = (layers.Conv2D(8, 3, activation="gelu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(CLASSES))
    return keras.Sequential([keras.Input((8, 8, 3)), *parts])


def attention(keras: Any, layers: Any) -> Any:
    ids = keras.Input((6,), dtype="int64")
    x = layers.Embedding(20, 16)(ids)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 4)(x, x, use_causal_mask=True))
    x = x + layers.Dense(16)(layers.Dense(32, "gelu")(x))
    return keras.Model(ids, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def recurrent(keras: Any, layers: Any) -> Any:
    parts = (layers.GRU(8, return_sequences=True), layers.Bidirectional(layers.LSTM(8)), layers.Dense(CLASSES))
    return keras.Sequential([keras.Input((5, 6)), *parts])


def frozen(keras: Any, layers: Any) -> Any:
    model = dense(keras, layers)
    model.get_layer("down").trainable = False
    return model


def nested(keras: Any, layers: Any) -> Any:
    """A model in a model, and one layer in two places."""
    inner = keras.Sequential([keras.Input((16,)), layers.Dense(32, "relu"), layers.Dense(16)])
    again, inputs = layers.Dense(16), keras.Input((16,))
    return keras.Model(inputs, layers.Dense(CLASSES)(again(inner(again(inputs)))))


def subclass(keras: Any, layers: Any) -> Any:
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.out = layers.Dense(16, "tanh"), layers.Dense(CLASSES)
            self.steps = [layers.Dense(16) for _ in range(2)]
            self.scale = self.add_weight(shape=(16,), initializer="ones", name="scale")

        def call(self, x):
            x = self.first(x) * self.scale
            for step in self.steps:
                x = x + step(x)
            return self.out(x)

    model = Net()
    model(torch.zeros(1, 16, dtype=torch.float64))
    return model


def two_inputs(keras: Any, layers: Any) -> Any:
    whole = keras.Input((16,))
    first, second = keras.Input((8,), name="first"), keras.Input((8,), name="second")
    mixed = layers.Concatenate()([layers.Dense(16, "tanh")(first), layers.Dense(16)(second)])
    inner = keras.Model({"first": first, "second": second}, layers.Dense(16)(layers.Dense(32, "relu")(mixed)))
    return keras.Model(whole, layers.Dense(CLASSES)(inner({"first": whole[:, :8], "second": whole[:, 8:]})))


def spectral(keras: Any, layers: Any) -> Any:
    """A wrapper that holds the kernel of its layer, and writes to it in forward."""
    parts = (layers.SpectralNormalization(layers.Dense(16, "tanh"), name="spectral"), layers.Dense(CLASSES))
    return keras.Sequential([keras.Input((16,)), *parts])


def batch_norm(keras: Any, layers: Any) -> Any:
    parts = (layers.Dense(32, "relu"), layers.Dense(16), layers.BatchNormalization(), layers.Dense(CLASSES))
    return keras.Sequential([keras.Input((16,)), *parts])


def dropout(keras: Any, layers: Any) -> Any:
    parts = (layers.Dense(32, "relu"), layers.Dropout(0.5), layers.Dense(CLASSES))
    return keras.Sequential([keras.Input((16,)), *parts])


_ALL = (
    dense, convolution, attention, recurrent, frozen, nested, subclass, batch_norm, dropout, two_inputs, spectral,
)  # fmt: skip
FORMS = {one.__name__: one for one in _ALL}


def build(name: str) -> Any:
    """Return a model with the same values in every process."""
    keras = load_keras()
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = FORMS[name](keras, keras.layers)
    generator = torch.Generator().manual_seed(0)
    for variable in model.trainable_variables:
        variable.assign(variable.value + 0.1 * torch.randn(variable.shape, generator=generator, dtype=torch.float64))
    return model


def batch(name: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    if name == "attention":
        return torch.randint(20, (ROWS, 6), generator=generator), labels
    shape = {"convolution": (8, 8, 3), "recurrent": (5, 6)}.get(name, (16,))
    return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64), labels


def loss_fn(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    """Return the sum of Keras' own cross entropy."""
    losses = load_keras().losses.sparse_categorical_crossentropy(batch[1], output, from_logits=True)
    return losses.sum(), len(batch[1])


def traced(plan: str, name: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Train as `trained` does, with blocks that torch.compile traces and runs without generated code."""
    with compiled_by("lean"):
        return trained(plan, name)


def trained(plan: str, name: str, layout: str | None = None) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Return losses of 3 steps, Keras' accuracy of rank 0 in evaluation, and variables read from the saved file."""
    keras, mesh = load_keras(), build_mesh(Plan.parse(f"{plan} precision=fp64"))
    styles = None if layout is None else Layout.parse(layout)
    model: Any = parallelize(build(name), mesh, seed=0, layout=styles)
    trains = [param for param in model.parameters() if param.requires_grad]
    step, losses = TrainStep(model, torch.optim.SGD(trains, lr=0.2), loss_fn, mesh), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeftWarning)  # of batch norm under microbatches
        for number in range(3):
            losses.append(float(step(Microbatches.of_rows(batch(name, number), mesh.plan, mesh.data.rank)).loss))
    accuracy = accuracy_of(model.eval(), name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        export_keras(mesh, model, path, {})
        if mesh.rank or name == "subclass":  # Keras loads only classes that it can import
            return losses, accuracy, {}
        loaded = keras.saving.load_model(path)
    return losses, accuracy, values(loaded)


def plain(name: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Return the results of a loop without Weft."""
    model, losses = build(name), []
    optimizer = torch.optim.SGD([variable.value for variable in model.trainable_variables], lr=0.2)
    for number in range(3):
        one = batch(name, number)
        loss = loss_fn(model(one[0], training=True), one)[0] / ROWS
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, accuracy_of(model, name), values(model)


def accuracy_of(model: Any, name: str) -> float:
    metric = load_keras().metrics.SparseCategoricalAccuracy()
    inputs, labels = batch(name, 9)
    with torch.no_grad():
        metric.update_state(labels, model(inputs))
    return float(metric.result())


def values(model: Any) -> dict[str, torch.Tensor]:
    return {f"{place} {one.path}": one.value.detach().clone() for place, one in enumerate(model.weights)}
