"""One training step under a plan as one SPMD program: XLA derives the collectives from the shardings of its arrays.

Mesh axes are dp_replicate, dp_shard, ep and tp; ep divides dp_shard, and the three data axes share the samples. Layers
are sharded over tp and ep by the model's layout. ZeRO shards the optimizer's states (zero=1), gradients (2) and
parameters (3) over dp_shard and ep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.fx import Node

from weft.config.fields.layout import Layout
from weft.config.plan import Plan
from weft.errors import PlanError
from weft.jax_engine.capture import Arrays, Captured
from weft.jax_engine.rules import check
from weft.jax_engine.update import Optimizer

#: Axes whose ranks read different samples, and the axes that ZeRO shards states over.
DATA_AXES, ZERO_AXES = ("dp_replicate", "dp_shard", "ep"), ("dp_shard", "ep")
#: Virtual devices of a process on a CPU, so that several plans can run one after another.
LEAST_DEVICES = 8
_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}


def use_platform(platform: str) -> None:
    """Set up JAX for the engine. platform: as in `devices`."""
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_threefry_partitionable", True)
    if platform:
        jax.config.update("jax_platforms", platform)


def devices(number: int, platform: str = "") -> list[Any]:
    """Return the devices of a plan. On a CPU, they are virtual devices of this process.

    platform: "cpu", "cuda", or "" for what JAX chooses.

    Raises:
        PlanError: if JAX has fewer devices, or has already started with fewer.
    """
    use_platform(platform)
    with contextlib.suppress(RuntimeError):  # JAX has started, so its number of devices is fixed
        jax.config.update("jax_num_cpu_devices", max(number, LEAST_DEVICES))
    try:
        found = jax.devices()
    except RuntimeError as error:
        raise PlanError(
            f"launch.device={platform}: JAX has no such device ({error}). Use launch.device=cpu."
        ) from error
    if len(found) < number:
        raise PlanError(
            f"plan: it has {number} ranks, and JAX has {len(found)} devices here. Use a plan of {len(found)} ranks."
        )
    return found[:number]


def jax_version() -> str:
    """Return the version of JAX."""
    return jax.__version__


@dataclass(frozen=True, slots=True)
class Sharding:
    """Shardings of a plan's arrays on its mesh.

    Attributes:
        layout: styles of layers by module path, for tp and ep; None for plans without them.
    """

    plan: Plan
    mesh: Mesh
    layout: Layout | None = None

    @classmethod
    def of(cls, plan: Plan, layout: Layout | None = None, platform: str = "cpu", chips: Sequence[Any] = ()) -> Sharding:
        """Return the shardings of a plan.

        Args:
            plan, layout: the attributes.
            platform: platform of the devices.
            chips: devices to use instead, one for each rank.

        Raises:
            PlanError: if the engine cannot use the plan.
        """
        check(plan)
        shape = (plan.dp_replicate, plan.dp_shard // plan.ep, plan.ep, plan.tp)
        grid = np.array(chips or devices(plan.world_size, platform), dtype=object).reshape(shape)
        return cls(plan, Mesh(grid, ("dp_replicate", "dp_shard", "ep", "tp")), layout)

    def named(self, *axes: Any) -> NamedSharding:
        """Return the sharding of an array with these mesh axes for its dims."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def layer(self, name: str, shape: Sequence[int]) -> list[Any]:
        """Return the mesh axis of each dim of a parameter between ZeRO's gathers: tp and ep."""
        axes: list[Any] = [None] * len(shape)
        path, _, _ = name.rpartition(".")
        style = self.layout.style(path) if self.layout is not None else None
        if style is None or not shape:
            return axes
        if style.name == "expert":
            dims = {"ep": 0} if len(shape) == 3 else {}
        elif style.name == "rowwise":
            dims = {"tp": 1} if len(shape) == 2 else {}
        else:
            dims = {"tp": 0} if style.name in ("colwise", "vocab") and not style.segments else {}
        for axis, dim in dims.items():
            if shape[dim] % self.mesh.shape[axis] == 0:
                axes[dim] = axis
        return axes

    def state(self, name: str, shape: Sequence[int]) -> list[Any]:
        """Return the mesh axes of each dim of a state that ZeRO shards."""
        axes = self.layer(name, shape)
        each = self.mesh.shape["dp_shard"] * self.mesh.shape["ep"]
        if each == 1:
            return axes
        extra = tuple(axis for axis in ZERO_AXES if axis not in axes)
        parts = int(np.prod([self.mesh.shape[axis] for axis in extra]))
        for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim]):
            taken = () if axes[dim] is None else (axes[dim],)
            if shape[dim] % (parts * int(np.prod([self.mesh.shape[axis] for axis in taken] or [1]))) == 0:
                axes[dim] = (*taken, *extra) if taken else extra
                break
        return axes

    def of_kind(self, kind: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, NamedSharding]:
        """Return shardings by name of "layer" tensors between gathers, or of "param", "grad" or "state"."""
        least = {"state": 1, "grad": 2, "param": 3, "layer": 4}[kind]
        choose = self.state if self.plan.zero >= least else self.layer
        return {name: self.named(*choose(name, shape)) for name, shape in shapes.items()}

    def batch(self, inputs: Sequence[Any]) -> list[NamedSharding]:
        """Return the shardings of stacked microbatches (microbatch, row, ...). Tensors without rows are replicated."""
        rows = inputs[0].shape[1] if inputs and inputs[0].ndim > 1 else 0
        return [
            self.named(None, DATA_AXES) if one.ndim > 1 and one.shape[1] == rows else self.named() for one in inputs
        ]


class Program:
    """The compiled step of a captured model under a plan.

    Args:
        captured: function to (loss sum, count).
        optimizer: the update of the trained parameters.
        sharding: from the plan.
        max_grad_norm: the norm that gradients are clipped to; 0 disables clipping.
        shapes: shapes of all parameters by name.
        blocks: paths of the model's repeated blocks, in order.
        keeps_gradients: steps also return the clipped gradients.

    Raises:
        PlanError: if the plan recomputes blocks and the model has no repeated blocks.
    """

    def __init__(
        self,
        captured: Captured,
        optimizer: Optimizer,
        sharding: Sharding,
        *,
        max_grad_norm: float,
        shapes: Mapping[str, Sequence[int]],
        blocks: Sequence[str] = (),
        keeps_gradients: bool = False,
    ):
        self.captured, self.optimizer, self.sharding = captured, optimizer, sharding
        self.plan, self._limit, self._shapes = sharding.plan, max_grad_norm, shapes
        self._keeps_gradients = keeps_gradients
        self._of_batch: dict[tuple[Any, ...], list[NamedSharding]] = {}
        self._trained = [name for name in shapes if name in optimizer.hyper]
        self._compute = _DTYPES[self.plan.precision] if self.plan.precision == "bf16" else None
        if self.plan.recompute_policy != "none":
            if not blocks:
                raise PlanError(
                    f"recompute={self.plan.recompute}: the model has no repeated blocks. Use recompute=none."
                )
            number = self.plan.recompute_blocks or len(blocks)
            captured.blocks = tuple(blocks[:number])
            captured.saves_products = self.plan.recompute_policy == "selective"
        if self.plan.sp:
            captured.hint = partial(self._shard_tokens, captured.between(blocks))
        named = sharding.named
        params, states = sharding.of_kind("param", shapes), sharding.of_kind("state", shapes)
        state = {name: dict.fromkeys(optimizer.state_names, states[name]) for name in self._trained}
        self.shardings = (params, None, state)
        moved, grads = {name: named() for name in captured.outputs}, {}
        if keeps_gradients:
            grads = sharding.of_kind("grad", {name: shapes[name] for name in self._trained})
        self.step = jax.jit(
            self._step, out_shardings=(params, named(), state, moved, grads), donate_argnums=(0, 2)
        )  # fmt: skip

    def _shard_tokens(self, nodes: set[Node], value: Any, node: Node) -> Any:
        """Shard tokens between layers over tp, as sequence parallelism does."""
        if node not in nodes or value.ndim != 3 or value.shape[1] % self.plan.tp:
            return value
        return lax.with_sharding_constraint(value, self.sharding.named(DATA_AXES, "tp"))

    def place(self, params: Arrays, states: dict[str, Arrays] | None = None) -> tuple[Arrays, dict[str, Arrays]]:
        """Return parameters and optimizer states on the devices; without states, new ones start at zero."""
        where, _, of_state = self.shardings
        placed = {name: jax.device_put(one, where[name]) for name, one in params.items()}
        if states is None:
            states = {
                name: {key: np.zeros(params[name].shape, params[name].dtype) for key in self.optimizer.state_names}
                for name in self._trained
            }
        return placed, jax.device_put(states, of_state)

    def place_batch(self, microbatches: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the inputs of all microbatches on the devices, stacked.

        Raises:
            PlanError: if the data ranks do not divide the rows of a microbatch.
        """
        parts: list[list[Any]] = [list(each) for each in zip(*microbatches, strict=True)]
        stacked = [np.stack(each) if len(each) > 1 else np.asarray(each[0])[None] for each in parts]
        shapes = tuple(one.shape for one in stacked)
        if shapes not in self._of_batch:
            rows, ranks = stacked[0].shape[1], self.plan.dp_size
            if rows % ranks:
                raise PlanError(
                    f"plan={self.plan}: {ranks} data ranks must divide the {rows} samples of a microbatch under "
                    f"engine=jax. Use a global batch of {ranks * self.plan.accumulation * max(1, rows // ranks)}."
                )
            self._of_batch[shapes] = self.sharding.batch(stacked)
        return jax.device_put(stacked, self._of_batch[shapes])

    def abstract(self) -> tuple[Arrays, dict[str, Arrays]]:
        """Return shapes, dtypes and shardings of the parameters and the optimizer's states, without arrays."""
        where, _, of_state = self.shardings
        make = partial(jax.ShapeDtypeStruct, dtype=np.float64 if self.plan.precision == "fp64" else np.float32)
        params = {name: make(shape, sharding=where[name]) for name, shape in self._shapes.items()}
        states = {
            name: {key: make(self._shapes[name], sharding=one) for key, one in each.items()}
            for name, each in of_state.items()
        }
        return params, states

    def _loss(self, trained: Arrays, rest: Arrays, buffers: Arrays, inputs: Sequence[Any]) -> tuple[Any, Any]:
        params = {**trained, **rest}
        if self._compute:
            params = {name: _rounded(one, self._compute) for name, one in params.items()}
        if self.plan.zero == 3:
            where = self.sharding.of_kind("layer", self._shapes)
            params = {name: lax.with_sharding_constraint(one, where[name]) for name, one in params.items()}
        (loss, count), moved = self.captured(params, buffers, inputs)
        wide = jnp.promote_types(loss.dtype, jnp.float32)
        return loss.astype(wide), (jnp.asarray(count).astype(wide), moved)

    def _gradients(self, params: Arrays, buffers: Arrays, inputs: Sequence[Any]) -> tuple[Arrays, Any, Arrays]:
        """Return gradients of the mean loss, the numbers (loss sum, count), and changed buffers."""
        trained = {name: params[name] for name in self._trained}
        rest = {name: one for name, one in params.items() if name not in trained}
        shard = self.sharding.of_kind("grad", {name: self._shapes[name] for name in trained})

        def one_microbatch(total: Any, part: Sequence[Any]) -> tuple[Any, None]:
            grads, numbers, moved = total
            of_loss = jax.value_and_grad(self._loss, has_aux=True)
            (loss, (count, new)), found = of_loss(trained, rest, {**buffers, **moved}, part)
            found = {name: lax.with_sharding_constraint(one, shard[name]) for name, one in found.items()}
            return (jax.tree.map(jnp.add, grads, found), numbers + jnp.stack([loss, count]), new), None

        zeros = {name: jnp.zeros_like(one) for name, one in trained.items()}
        zeros = {name: lax.with_sharding_constraint(one, shard[name]) for name, one in zeros.items()}
        wide = jnp.float64 if self.plan.precision == "fp64" else jnp.float32
        start = (zeros, jnp.zeros(2, wide), {name: buffers[name] for name in self.captured.outputs})
        if self.plan.accumulation == 1:
            (grads, numbers, moved), _ = one_microbatch(start, [one[0] for one in inputs])
        else:
            (grads, numbers, moved), _ = lax.scan(one_microbatch, start, list(inputs))
        return {name: grad / numbers[1].astype(grad.dtype) for name, grad in grads.items()}, numbers, moved

    def _step(
        self, params: Arrays, buffers: Arrays, states: dict[str, Arrays], inputs: Sequence[Any], step: Any, lr: Any
    ) -> tuple[Arrays, Any, dict[str, Arrays], Arrays, Arrays]:
        grads, numbers, moved = self._gradients(params, buffers, inputs)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(grad.astype(numbers.dtype))) for grad in grads.values()))
        if self._limit > 0:
            clip = jnp.minimum(1.0, self._limit / (norm + 1e-6))
            grads = {name: grad * clip.astype(grad.dtype) for name, grad in grads.items()}
        trained = {name: params[name] for name in self._trained}
        new, after = self.optimizer.update(trained, grads, states, step, lr)
        report = jnp.stack([numbers[0] / numbers[1], norm, numbers[1]])
        # Steps with infinite numbers change nothing, as in the torch engine.
        is_finite = jnp.isfinite(report).all()
        keep = partial(jax.tree.map, lambda one, other: jnp.where(is_finite, one, other))
        kept = grads if self._keeps_gradients else {}
        return {**params, **keep(new, trained)}, report, keep(after, states), moved, kept


def _rounded(one: Any, dtype: str) -> Any:
    return one.astype(dtype) if jnp.issubdtype(one.dtype, jnp.floating) else one
