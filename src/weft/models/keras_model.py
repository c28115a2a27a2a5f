"""Keras 3 models on Keras' torch backend as torch modules whose parameters can be replaced.

A Keras variable holds its tensor, and the torch module of a layer registers that tensor again, with the tensors of all
inner layers. Layers in Python lists, such as those of a Sequential, are not registered as modules.
`adopt_keras` registers each layer once, and each variable once, in the layer that owns it. Variables then read their
tensor from this module at each access, so that replaced, gathered and moved parameters are used.

Keras is never imported here: a model of it exists only if its user imported it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from weft.config.plan import Plan
from weft.errors import ModelError, PlanError, Problem, WeftError

_ADOPTED = "_weft_keras"
#: Names under which a layer's inner layers and its own variables are registered.
LAYERS, VARIABLES = "keras_layers", "_torch_params"
_RATES = ("rate", "dropout", "_dropout", "recurrent_dropout", "stddev", "factor")
#: Full tensors that variables read instead of their module's, by (id of the module, key).
_full: dict[tuple[int, str], Tensor] = {}
_bound: dict[type, type] = {}


class KerasVariables(nn.Module):
    """The variables of one layer: trainable ones as parameters, others as buffers."""

    def names(self) -> list[str]:
        """Return the names of the variables."""
        return [*self._parameters, *self._buffers]

    def __contains__(self, name: str) -> bool:
        return name in self._parameters or name in self._buffers

    def __setitem__(self, path: str, value: Tensor) -> NoReturn:
        raise ModelError(f"model: variable {path} was added after parallelize. Build all layers before it.")


class KerasConv1D(KerasVariables):
    """The matrix product of a Keras Dense layer, whose kernel is (inputs, outputs) as in the Conv1D of GPT-2."""

    nx: int
    nf: int
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight + bias."""
        rows = x.reshape(-1, x.shape[-1])
        bias: Any = self._parameters.get("bias")
        product = rows @ self.weight if bias is None else torch.addmm(bias, rows, self.weight)
        return product.view(*x.shape[:-1], product.shape[-1])


class KerasEmbedding(KerasVariables):
    """The table of a Keras Embedding layer, (num_embeddings, embedding_dim), with the attributes of an nn.Embedding."""

    weight: Tensor
    padding_idx = max_norm = None
    scale_grad_by_freq = False

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim


def is_keras(model: nn.Module) -> bool:
    """Return True for a layer or model of Keras 3."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, getattr(keras, "Layer", ()))


def refuse_other_models(model: Any) -> None:
    """Raise ModelError for a model that is no torch module, such as one of Keras on another backend."""
    if isinstance(model, nn.Module):
        return
    keras: Any = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Layer):
        raise ModelError(
            f"model: Keras runs on {keras.backend.backend()}. Set KERAS_BACKEND=torch before importing it."
        )
    raise ModelError(f"model of type {type(model).__name__}: it is not a torch.nn.Module. Give the model itself.")


def is_keras_dropout(module: Any) -> bool:
    """Return True for a Dropout layer of Keras that calls torch's dropout, which it does without a seed."""
    return (
        is_keras(module)
        and isinstance(module, sys.modules["keras"].layers.Dropout)
        and module.rate > 0
        and module.noise_shape is None
        and all(generator._initial_seed is None for generator in module._seed_generators)
    )


def adopt_keras(model: nn.Module, plan: Plan, device: torch.device, data_ranks: int = 1) -> None:
    """Let a Keras model's variables read their tensors from its modules. Other models are not changed.

    Parameter names become paths of layers, such as keras_layers.dense._torch_params.weight. Then `train()` and `eval()`
    set the argument `training` of the model's calls, and `fit` raises an error. Under tp, Dense layers do not check the
    number of their inputs, because a rank may have a part of them.

    plan: plan of the run. device: device of the run. data_ranks: ranks with different samples.

    Raises:
        PlanError: if the plan has a technique that does not support Keras models.
        ModelError: if the model is not built, or its results would differ from one process. These are seeds of Keras
            and batch norms on several data ranks, and constraints. Also if Keras uses another backend or device, or
            under zero=3 and tp, if a Keras layer is inside another model.
    """
    if not is_keras(model):
        _check_inner(model, plan, data_ranks)
        return
    if _ADOPTED in model.__dict__:
        return
    _keep_messages()
    _check_plan(plan)
    layers: list[Any] = list(_layers(model))
    _check_keras(plan, device)
    for layer in layers:
        _check_layer(layer, type(model).__name__, data_ranks)
    for layer in layers:
        layer._modules.pop(VARIABLES, None)
    owned: set[int] = set()
    for layer in layers:
        _adopt_layer(layer, owned, is_sharded=plan.tp > 1)
    _register_layers(model)
    every: Any = model
    missing = [variable.path for variable in every.variables if id(variable) not in owned]
    if missing:
        raise ModelError(f"model: no layer of {type(model).__name__} holds variable {missing[0]}. Add it to a layer.")
    for name in ("fit", "train_on_batch"):
        model.__dict__[name] = _refuse_fit
    model.register_forward_pre_hook(_set_training, with_kwargs=True)


def _adopt_layer(layer: Any, owned: set[int], *, is_sharded: bool) -> None:
    """Register the variables of one layer that no earlier layer owns, and add them to `owned`."""
    layer._modules[VARIABLES] = holder = _holder_of(layer, owned)
    trained = {id(variable) for variable in layer._trainable_variables}
    for variable in _own_variables(layer):
        if id(variable) not in owned:
            owned.add(id(variable))
            _bind(variable, holder, is_parameter=id(variable) in trained)
    if isinstance(holder, KerasConv1D):
        holder.nx, holder.nf = holder.weight.shape
        layer.__dict__["call"] = MethodType(_call_dense, layer)
        if is_sharded:
            layer.input_spec = None
    if isinstance(holder, KerasEmbedding):
        layer.__dict__["call"] = MethodType(_call_embedding, layer)
    layer.__dict__[_ADOPTED] = type(layer)


def _layers(model: Any) -> Iterator[Any]:
    """Yield the model and all layers inside it, each once."""
    seen: set[int] = set()
    for layer in model._flatten_layers(include_self=True, recursive=True):
        if id(layer) not in seen:
            seen.add(id(layer))
            yield layer


def _keep_messages() -> None:
    """Keep Keras from replacing Weft's errors by others that add the arguments of the layer to the message."""
    setattr(WeftError, "_keras_call_info_injected", True)  # noqa: B010 - Keras' mark of errors that it has replaced


def _check_inner(model: nn.Module, plan: Plan, data_ranks: int) -> None:
    """Check Keras layers inside a model that is not a Keras layer: their variables keep their own tensors."""
    for path, module in model.named_modules():
        if not is_keras(module):
            continue
        _keep_messages()
        if plan.zero == 3 or plan.tp > 1:
            field = "zero=3" if plan.zero == 3 else f"tp={plan.tp}"
            raise ModelError(
                f"model: {path} is a Keras layer in {type(model).__name__}, and {field} needs a Keras model around it. "
                "Use zero=2 and tp=1, or put the torch modules into keras.layers.TorchModuleWrapper."
            )
        _check_layer(module, type(model).__name__, data_ranks)


def _holder_of(layer: Any, owned: set[int]) -> KerasVariables:
    """Return an empty holder. owned: ids of variables of outer layers, such as the kernel in SpectralNormalization."""
    keras: Any = sys.modules["keras"]
    if type(layer).call is keras.layers.Embedding.call and [one.name for one in layer._trainable_variables] == [
        "embeddings"
    ]:
        return KerasEmbedding(layer.input_dim, layer.output_dim)
    is_plain = type(layer).call is keras.layers.Dense.call and len(layer._trainable_variables) == 1 + layer.use_bias
    is_plain = is_plain and not any(id(variable) in owned for variable in layer._trainable_variables)
    is_plain = is_plain and layer.compute_dtype == layer.variable_dtype and layer.quantization_mode is None
    return KerasConv1D() if is_plain else KerasVariables()


def _call_dense(layer: Any, inputs: Tensor, training: bool | None = None) -> Tensor:
    """Compute a Dense layer through its module, which tensor parallelism can shard."""
    out = layer._modules[VARIABLES](inputs)
    return out if layer.activation is None else layer.activation(out)


def _call_embedding(layer: Any, inputs: Tensor) -> Tensor:
    """Look up a sharded table through its module, and any other as Keras does."""
    holder = layer._modules[VARIABLES]
    if type(holder) is KerasEmbedding:
        return layer.__dict__[_ADOPTED].call(layer, inputs)
    return sys.modules["keras"].ops.cast(holder(inputs), layer.compute_dtype)


def _own_variables(layer: Any) -> Iterator[Any]:
    """Yield a layer's variables without inner layers, then the states of its seed generators."""
    yield from (*layer._trainable_variables, *layer._non_trainable_variables)
    yield from (generator.state for generator in layer._seed_generators)


def _check_plan(plan: Plan) -> None:
    values = {"pp": plan.pp > 1, "cp": plan.cp > 1, "ep": plan.ep > 1, "sp": plan.sp}
    values |= {"graphs": plan.graphs, "precision": plan.precision not in ("fp32", "fp64")}
    for field, is_set in values.items():
        if is_set:
            value = getattr(plan, field)
            value = "on" if value is True else value
            remedy = "a dtype policy of Keras for the precision, and " if field == "precision" else ""
            problem = (
                f"{field}={value}: Keras models do not support it. Use {remedy}dp_replicate, dp_shard, zero or tp."
            )
            raise PlanError([Problem(field, problem)])


def _check_keras(plan: Plan, device: torch.device) -> None:
    keras: Any = sys.modules["keras"]
    used = torch.device(keras.src.backend.torch.core.get_device()).type
    if used != device.type:
        raise ModelError(f"model: Keras uses {used}, and the run {device.type}. Set KERAS_TORCH_DEVICE={device.type}.")
    product = keras.backend.result_type("float64", "float64")
    if plan.precision == "fp64" and product != "float64":
        problem = f"precision=fp64: Keras computes matrix products of float64 in {product}. Use precision=fp32."
        raise PlanError([Problem("precision", problem)])


def _check_layer(layer: Any, model: str, data_ranks: int) -> None:
    """Raise ModelError if a layer is not built, or would train differently from one process."""
    keras: Any = sys.modules["keras"]
    if not layer.built:
        raise ModelError(
            f"model: layer {layer.name} of {model} is not built. Call the model once with a batch, or give it an "
            "Input, before parallelize."
        )
    for variable in _own_variables(layer):
        if variable.constraint is not None:
            raise ModelError(
                f"model: variable {variable.path} has a constraint, which only the optimizers of Keras apply. Leave it "
                "out, or compute the constrained weight in the layer."
            )
    if data_ranks > 1 and isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
        raise ModelError(
            f"model: layer {layer.name} would normalize by one rank's samples, and its moving averages would differ "
            "between ranks. Use GroupNormalization or LayerNormalization, trainable=False, or one data rank."
        )
    if data_ranks > 1 and _draws_from_seed(layer):
        raise ModelError(
            f"model: layer {layer.name} draws from a seed of Keras, so every rank would draw the same numbers. "
            "Use keras.layers.Dropout without seed and noise_shape, or a rate of 0."
        )


def _draws_from_seed(layer: Any) -> bool:
    """Return True if a layer draws random numbers from a state of Keras, and not from torch's generator."""
    if not layer._seed_generators or is_keras_dropout(layer):
        return False
    rates = [rate for name in _RATES if (rate := getattr(layer, name, None)) is not None]
    # Attention draws in its inner Dropout layer.
    attention = sys.modules["keras"].layers.MultiHeadAttention
    drops_inside = isinstance(layer, attention) and getattr(layer, "_dropout_layer", None) is not None
    return not (drops_inside or (rates and all(isinstance(rate, int | float) and rate == 0 for rate in rates)))


def _bind(variable: Any, holder: KerasVariables, *, is_parameter: bool) -> None:
    """Move a variable's tensor into a module, and let the variable read it there."""
    is_weight = (type(holder), variable.name) in ((KerasConv1D, "kernel"), (KerasEmbedding, "embeddings"))
    short: str = "weight" if is_weight else variable.name
    name = short = short.replace(".", "_")
    number = 1
    while hasattr(holder, name):
        number += 1
        name = f"{short}_{number}"
    tensor = variable.__dict__.pop("_value")
    if is_parameter:
        holder.register_parameter(name, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach()))
    else:
        holder.register_buffer(name, tensor.detach())
    variable.__dict__["_weft_place"] = (holder, name)
    kind = type(variable)
    if kind not in _bound:
        members = {"_value": property(_read, _write), "__module__": kind.__module__}
        _bound[kind] = type(kind.__name__, (kind,), members)
    variable.__class__ = _bound[kind]


def _read(variable: Any) -> Tensor:
    holder, name = variable._weft_place
    full = _full.get((id(holder), name))
    if full is not None:
        return full
    value = holder._parameters.get(name)
    value = holder._buffers[name] if value is None else value
    if hasattr(value, "_local_tensor") or tuple(value.shape) != tuple(variable.shape):
        raise ModelError(
            f"model: variable {variable.path} is sharded, and is read outside its layer's forward. "
            "Use run.save_keras(model, path) to save the model, or run.full_state_dict(model) to read values."
        )
    return value


def _write(variable: Any, value: Any) -> NoReturn:
    raise ModelError(
        f"model: variable {variable.path} was replaced after parallelize. Assign to it, or change it before."
    )


def _register_layers(model: nn.Module) -> None:
    """Register the layers that Keras holds in lists as modules, each once."""
    seen: set[int] = {id(model)}

    def register(layer: Any) -> None:
        # A Sequential has a second view of its layers, which stays an attribute.
        second = layer._modules.pop("_functional", None)
        if second is not None:
            layer.__dict__["_functional"] = second
            second.__dict__["__deepcopy__"] = MethodType(_copy, second)
        layer.__dict__["__deepcopy__"] = MethodType(_copy, layer)
        here = {id(child) for child in layer._modules.values()} | {id(second)}
        listed = [child for child in layer._layers if id(child) not in here | seen]
        if listed:
            layer._modules[LAYERS] = nn.ModuleDict(_named(listed))
        below = [child for child in (*layer._modules.values(), *listed) if is_keras(child) and id(child) not in seen]
        seen.update(map(id, below))
        for child in below:
            register(child)

    register(model)


def _named(layers: list[Any]) -> dict[str, nn.Module]:
    """Return the layers by name, with a number after names that occur again."""
    named: dict[str, nn.Module] = {}
    for layer in layers:
        name = short = layer.name.replace(".", "_")
        number = 1
        while name in named or hasattr(nn.ModuleDict, name):
            number += 1
            name = f"{short}_{number}"
        named[name] = layer
    return named


def _copy(layer: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy with its own tensors. Keras' own copies are saved and loaded, without the binding."""
    copied = object.__new__(type(layer))
    memo[id(layer)] = copied
    copied.__dict__.update({copy.deepcopy(key, memo): copy.deepcopy(value, memo) for key, value in vars(layer).items()})
    return copied


def _set_training(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass the module's mode as Keras' argument `training`, which inner layers inherit."""
    outer: Any = model
    outer._get_call_context().set_value("training", model.training)
    if outer._call_has_context_arg.get("training", False):
        kwargs = {**kwargs, "training": model.training}
    return args, kwargs


def _refuse_fit(*args: Any, **kwargs: Any) -> NoReturn:
    raise ModelError(
        "model.fit: it would train on one rank's data without the plan. Use run.train_step with a loss function, "
        "which may call losses and metrics of Keras."
    )


@contextmanager
def with_full(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a model be saved within the context: variables read full tensors, and layers have their own classes.

    state: tensors by the model's parameter and buffer names.
    """
    named = dict(model.named_modules())
    holders = {name: module for name, module in named.items() if isinstance(module, KerasVariables)}
    places = {(id(holder), key): state[f"{path}.{key}"] for path, holder in holders.items() for key in holder.names()}
    classes = {module: type(module) for module in named.values() if is_keras(module)}
    _full.update(places)
    for module in classes:
        module.__class__ = vars(module)[_ADOPTED]
    try:
        yield
    finally:
        for place in places:
            del _full[place]
        for module, kind in classes.items():
            module.__class__ = kind


def keras_example(model: Any, batch: int = 2) -> tuple[Any, ...] | None:
    """Return zeros for the inputs of a Keras model that declares them, or None. Open sizes become 8."""
    inputs = getattr(getattr(model, "_functional", None) or model, "_inputs_struct", None) if is_keras(model) else None
    if inputs is None:
        return None
    keras: Any = sys.modules["keras"]

    def zeros(one: Any) -> Tensor:
        shape = [batch, *(size or 8 for size in one.shape[1:])]
        return torch.zeros(shape, dtype=keras.src.backend.torch.core.to_torch_dtype(one.dtype))

    made = keras.tree.map_structure(zeros, inputs)
    return tuple(made) if isinstance(made, list | tuple) and len(made) == 1 else (made,)


def keras_device(model: nn.Module, device: str) -> AbstractContextManager[Any]:
    """Return a context in which a Keras model computes on a device, such as meta; for other models it does nothing."""
    return sys.modules["keras"].device(device) if is_keras(model) else nullcontext()
