"""A run's model under a mesh, with its initial weights."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from weft.comm.mesh import Mesh
from weft.config.fields.layout import Layout
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.optim.build import freeze
from weft.parallel.parallelize import parallelize
from weft.parallel.state.flat_slices import StateSource
from weft.parallel.tables.host import TableSettings
from weft.parallel.zero.magnitudes import load_base
from weft.train.states.model_state import packed_source
from weft.train.weights.run_adapter import set_values, started_values, with_adapter


class StartsModel(Protocol):
    """The methods of a task that `built_model` calls."""

    def initial_model(self, plan: Plan) -> nn.Module: ...

    def initial_weights(self, model: nn.Module) -> StateSource | None: ...


def built_model(task: StartsModel, config: RunConfig, mesh: Mesh) -> nn.Module:
    """Return a new run's model, parallelized, with its adapter and initial weights. All ranks call it."""
    base = task.initial_model(mesh.plan)
    weights = task.initial_weights(base)
    model = with_adapter(base, config)
    weights = None if weights is None else packed_source(model, weights)
    freeze(model, config.optimizer)
    started = started_values(model, config)
    lay_out(config, mesh, model, weights)
    set_values(model, started)
    return model


def lay_out(
    config: RunConfig, mesh: Mesh, model: nn.Module, weights: StateSource | None, *, reads: bool = True,
    noise: tuple[str, float] | None = None,
) -> None:  # fmt: skip
    """Apply a config's settings and the plan to a model, and read its weights. All ranks call it.

    Args:
        weights: source of the weights, or None if the model has them.
        reads: read them.
        noise: as in `parallelize`.
    """
    parallelize(
        model,
        mesh,
        layout=Layout.read(config.layout) if config.layout else None,
        seed=config.seed,
        filled_later=weights is not None,
        pinned_limit=config.memory.pinned_limit,
        norm_group=config.train.norm_group,
        bf16_layers=config.train.bf16_layers,
        fp8_recipe=config.train.fp8_recipe,
        noise=noise,
        table_settings=TableSettings(config.tables.cache, config.tables.folder, config.tables.prefetch),
    )
    if weights is not None and reads:
        with mesh.pulse.doing("reads the pretrained weights"):
            load_base(model, weights)
