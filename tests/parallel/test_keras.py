"""Keras 3 models under plans: equal to a loop without Weft, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel import keras_cases
from tests.parallel.keras_cases import needs_keras
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError, PlanError
from weft.parallel.parallelize import parallelize

#: Keras' variables have an __array__ without numpy 2's argument `copy`.
pytestmark = [needs_keras, pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")]

EXACT = ("dense", "convolution", "attention", "recurrent", "frozen", "nested", "subclass", "two_inputs", "dropout")
PLANS = {
    "": (*EXACT[:-1], "batch_norm", "spectral"),  # dropout differs from torch's own numbers
    "dp_replicate=2": ("dense", "convolution", "dropout"),
    "dp_shard=2 zero=1": ("attention", "spectral"),
    "dp_shard=2 zero=2 accumulation=2": ("dense", "recurrent"),
    "dp_shard=2 zero=3": EXACT,
    "tp=2": ("dense", "attention", "nested", "batch_norm", "dropout"),
}
STRATEGIES = {  # of docs/how-to/from_tensorflow.md
    "MirroredStrategy": "dp_replicate=2",
    "MultiWorkerMirroredStrategy": "dp_replicate=2",
    "CentralStorageStrategy": "dp_shard=2 zero=2",
    "TPUStrategy": "dp_replicate=2",
    "jit_compile=True": "dp_replicate=2 compile=on",
}


def refusals() -> dict[str, str]:
    """Return the error text of each plan, model or call that is refused on two data ranks."""
    keras, found = keras_cases.load_keras(), {}
    mesh = build_mesh(Plan.parse("dp_replicate=2 precision=fp64"))
    layers, inputs = keras.layers, keras.Input((4,))
    constrained = layers.Dense(2, kernel_constraint="max_norm", name="limited")
    models = {
        "batch norm": keras.Sequential([inputs, layers.BatchNormalization(name="norm")]),
        "noise": keras.Sequential([inputs, layers.GaussianNoise(0.5, name="noise")]),
        "seed": keras.Sequential([inputs, layers.Dropout(0.5, seed=1, name="seeded")]),
        "constraint": keras.Sequential([inputs, constrained], name="box"),
        "unbuilt": keras.Sequential([layers.Dense(2, name="late")], name="net"),
    }
    for name, model in models.items():
        try:
            parallelize(model, mesh)
        except ModelError as error:
            found[name] = str(error)
    return found


def check(case: tuple[str, str], found, expected) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-10), case
    assert found[1] == expected[1], case
    if found[2]:
        assert len(found[2]) == len(expected[2]), case
    for (path, wanted), value in zip(expected[2].items(), found[2].values(), strict=False):
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-11, msg=f"{case} {path}")


@pytest.fixture(scope="module")
def expected():
    found = {name: keras_cases.plain(name) for name in (*EXACT, "batch_norm", "spectral")}
    found["dropout"] = keras_cases.trained("", "dropout")  # torch's own dropout draws other numbers
    return found


def test_plans_train_and_save_keras_models_like_one_process(ranks2, expected):
    for case in [(plan, name) for plan, names in PLANS.items() for name in names if plan]:
        check(case, ranks2.run(keras_cases.trained, *case)[0], expected[case[1]])


@pytest.mark.parametrize("style", ["rows", "host"])
def test_embedding_layers_are_sharded_as_tables(style, ranks2, expected):
    """This is the guide's row ParameterServerStrategy."""
    layout = f"keras_layers.embedding={style}"
    for plan in ("dp_replicate=2", "dp_shard=2 zero=2 accumulation=2"):
        check((plan, layout), ranks2.run(keras_cases.trained, plan, "attention", layout)[0], expected["attention"])


def test_one_process_trains_like_a_plain_loop(expected):
    for name in PLANS[""]:
        check(("", name), keras_cases.trained("", name), expected[name])


def test_rows_of_the_guide_from_tensorflow_train_like_one_process(ranks2, expected):
    guide = (Path(__file__).parents[2] / "docs/how-to/from_tensorflow.md").read_text()
    for strategy, plan in STRATEGIES.items():
        row = next(line for line in guide.splitlines() if line.startswith(f"| `{strategy}`"))
        assert f"`{plan.replace('=2', '=N', 1)}`" in row
    for plan in {*STRATEGIES.values()} - {*PLANS}:
        check((plan, "dense"), ranks2.run(keras_cases.traced, plan, "dense")[0], expected["dense"])


@pytest.mark.full
def test_compiled_models_train_like_one_process(ranks2, expected):
    for plan in ("dp_shard=2 zero=2", "dp_shard=2 zero=3", "tp=2"):
        for name in ("dense", "attention", "dropout"):
            found = ranks2.run(keras_cases.trained, f"{plan} compile=on", name)[0]
            check((plan, name), found, expected[name])


def test_models_that_would_train_differently_are_refused(ranks2):
    assert ranks2.run(refusals)[0] == {
        "batch norm": "model: layer norm would normalize by one rank's samples, and its moving averages would differ "
        "between ranks. Use GroupNormalization or LayerNormalization, trainable=False, or one data rank.",
        "noise": "model: layer noise draws from a seed of Keras, so every rank would draw the same numbers. "
        "Use keras.layers.Dropout without seed and noise_shape, or a rate of 0.",
        "seed": "model: layer seeded draws from a seed of Keras, so every rank would draw the same numbers. "
        "Use keras.layers.Dropout without seed and noise_shape, or a rate of 0.",
        "constraint": "model: variable box/limited/kernel has a constraint, which only the optimizers of Keras apply. "
        "Leave it out, or compute the constrained weight in the layer.",
        "unbuilt": "model: layer net of Sequential is not built. Call the model once with a batch, or give it "
        "an Input, before parallelize.",
    }


class Around(torch.nn.Module):
    """A Keras model in a torch module."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.out = layer, torch.nn.Linear(4, 4).double()

    def forward(self, x):
        return self.out(self.layer(x))


def refused_inside(name: str) -> str:
    mesh = build_mesh(Plan.parse("dp_shard=2 zero=3 precision=fp64"))
    keras_model = keras_cases.build(name)
    try:
        parallelize(Around(keras_model) if name == "dense" else keras_model, mesh)(keras_cases.batch(name, 0)[0])
    except ModelError as error:
        return str(error)
    return "accepted"


def test_kernels_written_in_forward_and_keras_layers_in_torch_modules_are_refused_under_zero_3(ranks2):
    assert ranks2.run(refused_inside, "dense")[0] == (
        "model: layer is a Keras layer in Around, and zero=3 needs a Keras model around it. Use zero=2 and tp=1, or "
        "put the torch modules into keras.layers.TorchModuleWrapper."
    )
    # Keras does not add the arguments of the layer to the message.
    assert ranks2.run(refused_inside, "spectral")[0].startswith(
        "parameter keras_layers.spectral._torch_params.kernel: forward writes to it, and zero=3"
    )


def test_fit_and_plans_without_support_are_refused(monkeypatch):
    keras_cases.load_keras()
    for field, value in (("sp", "on"), ("precision", "bf16")):
        with pytest.raises(PlanError, match=f"{field}={value}: Keras models do not support it"):
            parallelize(keras_cases.build("dense"), build_mesh(Plan.parse(f"{field}={value}")))
    model = parallelize(keras_cases.build("dense"), build_mesh(Plan.parse("precision=fp64")))
    with pytest.raises(ModelError, match=r"model.fit: it would train on one rank's data without the plan"):
        model.fit(torch.zeros(2, 16), torch.zeros(2))
    with pytest.raises(ModelError, match="variable extra was added after parallelize"):
        model.torch_params["extra"] = torch.zeros(1)
    from keras.src.backend.common import dtypes

    plain = keras_cases.build("dense")
    monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float32")
    with pytest.raises(PlanError, match="precision=fp64: Keras computes matrix products of float64 in float32"):
        parallelize(plain, build_mesh(Plan.parse("precision=fp64")))
