"""Recorder of a forward whose backward computes per-sample gradient norms instead of parameter gradients.

A torch function mode replaces each operation that reads a trained parameter by one of `operations`. An operation
without a rule raises `UnknownUse`, so no gradient is left out silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.errors import ModelError
from weft.models.experts import Experts, grouped_linear, sort_by_expert
from weft.parallel.layers.deferred_gradients import DeferredProduct, linear
from weft.parallel.tensor.linear import Column, columns
from weft.privacy import operations
from weft.privacy.factors import Direct, Product, Use, kept_bytes, rows_of_samples, squared_norms, summed
from weft.privacy.private_torch import is_checkpointed, without_functions

Put = Callable[[Use], None]

#: Error for a model that already recomputes parts.
CHECKPOINTED = (
    "privacy: the model runs parts of forward again in backward, by torch.utils.checkpoint, where the recorder does "
    "not see them. Turn gradient checkpointing off in the model."
)


class UnknownUse(ModelError):
    """Raised if a parameter is read by an operation whose per-sample gradients are unknown."""

    def __init__(self, param: nn.Parameter, operation: str):
        super().__init__(f"privacy: per-sample gradients of {operation} are unknown.")
        self.param, self.operation = param, operation


class Owner(NamedTuple):
    """Name of a parameter, and how the ranks of tp hold its gradient.

    counts: True if this rank adds the parameter to the norms. is_partial: True if gradients are sums over tp.
    """

    name: str
    counts: bool = True
    is_partial: bool = False


@dataclass(slots=True)
class _Entry:
    """Uses of one parameter: their number in forward, and those that backward has reached."""

    param: nn.Parameter
    owner: Owner
    expected: int = 0
    uses: list[Use] = field(default_factory=list[Use])
    is_done: bool = False


class _Alias(NamedTuple):
    """A parameter in another dtype or transposed. `tensor` keeps the object alive, so that its id stays unique."""

    tensor: Tensor
    param: nn.Parameter
    is_transposed: bool


class GradientRecord:
    """Squared gradient norms of one microbatch's units, and the uses of its parameters.

    A unit is a sample, or `each` adjacent samples whose gradients are added.

    Args:
        samples: number of samples.
        owner_of: returns the owner of a parameter.
        keeps: True to keep the uses, so that `weighted` can compute gradients from them and the norms.
        each: samples of a unit.
    """

    def __init__(self, samples: int, owner_of: Callable[[nn.Parameter], Owner], *, keeps: bool, each: int = 1):
        self.samples, self.units, self._each = samples, samples // each, each
        self._owner_of, self._keeps = owner_of, keeps
        self._entries: dict[int, _Entry] = {}
        self._norms: Tensor | None = None
        self._sums: dict[int, tuple[nn.Parameter, Tensor]] | None = None
        #: For each unit, True if its gradient is not finite, or None if all are.
        self.left_out: Tensor | None = None
        #: Per-sample gradients of parameters whose gradients are sums over tp, by name.
        self.partial: dict[str, Tensor] = {}

    def begin(self, param: nn.Parameter) -> Put:
        """Count a use of a parameter, and return the receiver of its gradient."""
        entry = self._entries.get(id(param))
        if entry is None:
            entry = self._entries[id(param)] = _Entry(param, self._owner_of(param))
        entry.expected += 1

        def put(use: Use) -> None:
            if self._sums is not None:
                self._add(self._sums, param, use)
                return
            entry.uses.append(use if self._each == 1 else use.joined(self._each))
            if len(entry.uses) == entry.expected:
                self._finish(entry)

        return put

    @torch.no_grad()
    def _add(self, sums: dict[int, tuple[nn.Parameter, Tensor]], param: nn.Parameter, use: Use) -> None:
        if self.left_out is not None:
            use = use.without(self.left_out.repeat_interleave(self._each))
        found = use.weighted(None).to(param.dtype)
        before = sums.get(id(param))
        sums[id(param)] = param, found if before is None else before[1] + found

    def second_backward(self, loss: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Run backward again, and return the parameters' gradients of this loss."""
        self._sums = {}
        loss.backward()
        found, self._sums = list(self._sums.values()), None
        return found

    @torch.no_grad()
    def _finish(self, entry: _Entry) -> None:
        if len(entry.uses) == 1 and isinstance(one := entry.uses[0], Product) and self._keeps and one.is_small:
            entry.uses = [Direct(one.per_sample())]
        entry.is_done = True
        if entry.owner.is_partial:
            self.partial[entry.owner.name] = summed(entry.uses)
        elif entry.owner.counts:
            found = squared_norms(entry.uses)
            self._norms = found.double() if self._norms is None else self._norms + found
        if not self._keeps:
            entry.uses = []

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept for `weighted`."""
        return kept_bytes(use for entry in self._entries.values() for use in entry.uses)

    def norms(self, device: torch.device) -> Tensor:
        """Return this rank's sum of squared norms, (units,) float64, without `partial`. Call it after backward."""
        for entry in self._entries.values():
            if not entry.is_done and entry.uses:
                self._finish(entry)
        return torch.zeros(self.units, dtype=torch.float64, device=device) if self._norms is None else self._norms

    def add(self, other: GradientRecord) -> None:
        """Add the norms of the same samples on another stage of this rank, after its backward."""
        found = other.norms(torch.device("cpu") if other._norms is None else other._norms.device)
        if other._norms is not None:
            self._norms = found if self._norms is None else self._norms + found
        self.partial.update(other.partial)

    @torch.no_grad()
    def weighted(self, weights_B: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the weighted sums of the units' gradients by parameter, and free their uses."""
        for entry in self._entries.values():
            if entry.uses:
                if self.left_out is not None:
                    entry.uses = [use.without(self.left_out) for use in entry.uses]
                total = entry.uses[0].weighted(weights_B)
                for use in entry.uses[1:]:
                    total = total + use.weighted(weights_B)
                entry.uses = []
                yield entry.param, total.to(entry.param.dtype)


class GradientRecorder(TorchFunctionMode):
    """Mode in which a forward runs. Backward then fills `record`.

    alone: modules by path whose gradients are computed by vmap.
    """

    def __init__(self, record: GradientRecord, model: nn.Module, alone: Mapping[str, nn.Module]):
        super().__init__()
        self.record, self._model, self._alone = record, model, alone
        self._aliases: dict[int, _Alias] = {}
        self._sample_R: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run a forward in this context."""
        with ExitStack() as stack:
            for module in self._model.modules():
                if isinstance(module, Experts):
                    stack.callback(module.register_forward_pre_hook(self._enter_experts).remove)
            for path, module in self._alone.items():
                stack.enter_context(self._running_alone(path, module))
            stack.enter_context(self)
            yield

    def _enter_experts(self, module: Experts, args: tuple[Tensor, ...]) -> None:
        x_MD, ids_MK = args[:2]
        order = sort_by_expert(ids_MK, module.gate_up.shape[0], module.drops)
        num_tokens, rest = divmod(len(x_MD), self.record.samples)
        if rest:
            rows_of_samples(x_MD, self.record.samples, "a layer of experts")
        self._sample_R = order.source_R // order.top_k // num_tokens

    @contextmanager
    def _running_alone(self, path: str, module: nn.Module) -> Iterator[None]:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with without_functions():
                return operations.run_alone(module, path, own, args, kwargs, self._begin, self.record.samples)

        module.forward = forward
        try:
            yield
        finally:
            del module.forward

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **named)
        if (rule := _RULES.get(func)) is not None:
            return rule(self, func, *args, **named)
        found = next((one for one in _flat((*args, *named.values())) if self._param(one) is not None), None)
        if found is None or func in _PASSIVE:
            return func(*args, **named)
        return self._other(func, found, args, named)

    def _other(self, func: Any, found: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation without a rule on a parameter."""
        name, owner = getattr(func, "__name__", str(func)), getattr(func, "__self__", None)
        param = self._param(found)
        assert param is not None
        if name == "__get__":
            of = getattr(owner, "__name__", "")
            if of in ("T", "mT") and found.dim() == 2 and args[0] is found:
                return self._alias(func(*args), found, turns=True)
            if of not in ("T", "mT", "H", "mH", "real", "imag"):
                return func(*args, **kwargs)
        elif name in _CASTS and args[0] is found:
            result = func(*args, **kwargs)
            return result if result is found else self._alias(result, found)
        elif name in ("t", "transpose") and found.dim() == 2 and args[0] is found:
            return self._alias(func(*args, **kwargs), found, turns=True)
        elif name in _ELEMENTWISE and len(args) == 2 and all(isinstance(one, Tensor) for one in args) and not kwargs:
            other = args[1] if args[0] is found else args[0]
            if self._param(other) is None:
                expanded = self._expanded(found, other)
                if expanded is not None:
                    return func(*[expanded if one is found else one for one in args])
        raise UnknownUse(param, name)

    def _param(self, tensor: Any) -> nn.Parameter | None:
        """Return the trained parameter that a tensor is, or is a view or a copy of."""
        if isinstance(tensor, nn.Parameter):
            return tensor if tensor.requires_grad else None
        if isinstance(tensor, Tensor) and (alias := self._aliases.get(id(tensor))) is not None:
            return alias.param
        return None

    def _alias(self, result: Tensor, of: Tensor, *, turns: bool = False) -> Tensor:
        param = self._param(of)
        assert param is not None
        alias = _Alias(result.detach(), param, self._is_transposed(of) != turns)
        self._aliases[id(alias.tensor)] = alias
        return alias.tensor

    def _begin(self, tensor: Tensor) -> tuple[Tensor, Put]:
        """Return a detached leaf of a parameter or its alias, and the receiver of its gradient."""
        param = self._param(tensor)
        assert param is not None
        if is_checkpointed():
            raise ModelError(CHECKPOINTED)
        return tensor.detach().requires_grad_(), self.record.begin(param)

    def _is_transposed(self, tensor: Tensor) -> bool:
        alias = self._aliases.get(id(tensor))
        return alias is not None and alias.is_transposed

    def _expanded(self, param: Tensor, other: Tensor) -> Tensor | None:
        """Return a parameter repeated for the samples of `other`, or None if `other` has no rows of samples."""
        samples = self.record.samples
        if other.dim() <= param.dim() or self._is_transposed(param) or not samples:
            return None
        is_flat = other.dim() == param.dim() + 1 and other.shape[0] != samples
        if other.shape[0] != samples and not (is_flat and other.shape[0] % samples == 0):
            return None
        leaf, put = self._begin(param)
        every = operations.Expand.apply(leaf, put, samples)
        if is_flat:
            times = other.shape[0] // samples
            return every[:, None].expand(samples, times, *param.shape).flatten(0, 1)
        return every.view(samples, *[1] * (other.dim() - 1 - param.dim()), *param.shape)

    def _apply(self, func: Any, x: Tensor, param: Tensor | None) -> Tensor:
        """Run an element-wise operation on activations and a parameter, or return x if there is no parameter."""
        if param is None:
            return x
        if (found := self._param(param)) is None:
            return func(x, param)
        expanded = self._expanded(param, x)
        if expanded is None:
            raise UnknownUse(found, func.__name__)
        return func(x, expanded)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from value
        else:
            yield value


#: Operations that change no value of a parameter's dtype or layout, and those that cast it.
_CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "detach_copy"}
_PASSIVE = {
    torch.Tensor.detach, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.element_size, torch.Tensor.data_ptr,
    torch.Tensor.is_contiguous, torch.Tensor.__len__, torch.Tensor.untyped_storage, torch.Tensor.get_device,
    torch.Tensor.storage_offset, torch.Tensor.__hash__, torch.Tensor.requires_grad_, torch.is_floating_point,
    torch.numel, torch.is_tensor, torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like,
    torch.Tensor.new_zeros, torch.Tensor.new_empty, torch.Tensor.new_ones, torch.Tensor.new_full,
    torch.Tensor.new_tensor,
}  # fmt: skip
_ELEMENTWISE = {
    "add", "sub", "mul", "div", "true_divide", "subtract", "multiply", "divide", "rsub", "add_", "sub_", "mul_", "div_",
    "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__imul__", "__truediv__",
    "__rtruediv__",
}  # fmt: skip


# Rules of operations that read parameters. Each gets the recorder, the operation and its arguments.


def _linear(
    recorder: GradientRecorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """Rule of F.linear, and of `deferred_gradients.linear`, whose other arguments do not change the result."""
    if recorder._param(weight) is None:
        plain = F.linear(input, weight.t() if named.get("transposed") else weight)
        return recorder._apply(torch.add, plain, bias)
    if named.get("form") is not None:
        raise UnknownUse(recorder._param(weight), "a float8 product")  # pyright: ignore[reportArgumentType] - not None
    leaf, put = recorder._begin(weight)
    is_transposed = bool(named.get("transposed"))
    if recorder._is_transposed(weight):  # the leaf is a view (I, O) of a parameter (O, I), or the other way round
        leaf, is_transposed = leaf.t(), not is_transposed
    leaf_bias, put_bias = (None, None) if bias is None else (bias, None)
    if bias is not None and recorder._param(bias) is not None:
        leaf_bias, put_bias = recorder._begin(bias)
    rows_of_samples(input, recorder.record.samples, "a linear layer")
    return operations.Linear.apply(input, leaf, leaf_bias, (put, put_bias), recorder.record.samples, is_transposed)


def _matmul(recorder: GradientRecorder, func: Any, left: Tensor, right: Tensor, **named: Any) -> Tensor:
    if recorder._param(right) is None or right.dim() != 2 or recorder._param(left) is not None or named:
        return _plain(recorder, func, left, right, **named)
    return _linear(recorder, func, left, right, transposed=True)


def _addmm(
    recorder: GradientRecorder,
    func: Any,
    added: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    if recorder._param(right) is None or recorder._param(left) is not None:
        return _plain(recorder, func, added, left, right, beta=beta, alpha=alpha)
    found = _linear(recorder, func, left, right, transposed=True)
    found = found if alpha == 1 else found * alpha
    if recorder._param(added) is not None:
        return recorder._apply(torch.add, found, added) if beta == 1 else _plain(recorder, func, added, left, right)
    return found + (added if beta == 1 else added * beta)


def _plain(recorder: GradientRecorder, func: Any, *args: Any, **named: Any) -> Any:
    """Run an operation that must not read a trained parameter."""
    for one in _flat((*args, *named.values())):
        if (param := recorder._param(one)) is not None:
            raise UnknownUse(param, getattr(func, "__name__", str(func)))
    return func(*args, **named)


def _embedding(
    recorder: GradientRecorder, func: Any, input: Tensor, weight: Tensor, padding_idx: int | None = None,
    max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    param = recorder._param(weight)
    if param is None:
        return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if max_norm is not None or scale_grad_by_freq:
        raise UnknownUse(param, "an embedding with max_norm or scale_grad_by_freq")
    samples = recorder.record.samples
    if input.dim() > 1 and input.shape[0] == 1 and samples > 1:  # positions, which the samples share
        input = input.expand(samples, *input.shape[1:])
    elif not input.dim() or input.shape[0] != samples:
        shown = ", ".join(map(str, input.shape))
        raise ModelError(
            f"privacy: an embedding reads ids of shape {tuple(input.shape)} in a microbatch of {samples} samples, so "
            f"its rows are not samples. Put samples first: ({samples}, ...), or (1, {shown}) for ids that all samples "
            "share."
        )
    leaf, put = recorder._begin(weight)
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else len(weight) + padding_idx
    return operations.Embedding.apply(input, leaf, put, samples, padding)


def _layer_norm(
    recorder: GradientRecorder, func: Any, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    found = F.layer_norm(input, list(normalized_shape), None, None, eps)
    return recorder._apply(torch.add, recorder._apply(torch.mul, found, weight), bias)


def _rms_norm(
    recorder: GradientRecorder, func: Any, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    return recorder._apply(torch.mul, F.rms_norm(input, list(normalized_shape), None, eps), weight)


def _group_norm(
    recorder: GradientRecorder, func: Any, input: Tensor, num_groups: int, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    found = F.group_norm(input, num_groups, None, None, eps)
    return _by_channel(recorder, torch.add, _by_channel(recorder, torch.mul, found, weight), bias)


def _by_channel(recorder: GradientRecorder, func: Any, x: Tensor, param: Tensor | None) -> Tensor:
    """Run an element-wise operation on activations (B, C, ...) and a parameter (C,)."""
    return x if param is None else recorder._apply(func, x.movedim(1, -1), param).movedim(-1, 1)


def _convolution(
    recorder: GradientRecorder, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    param = recorder._param(weight)
    if param is None and (bias is None or recorder._param(bias) is None):
        return func(input, weight, bias, stride, padding, dilation, groups)
    size = weight.dim() - 2
    if param is None or padding == "same":
        owner = recorder._param(bias) if param is None else param
        raise UnknownUse(owner, f"{func.__name__} with padding='same' or a frozen weight")  # pyright: ignore[reportArgumentType] - one is trained
    padding = 0 if padding == "valid" else padding
    sizes = [(one,) * size if isinstance(one, int) else tuple(one) for one in (stride, padding, dilation)]
    leaf, put = recorder._begin(weight)
    found = operations.Convolution.apply(input, leaf, put, recorder.record.samples, (*sizes, groups))
    return _by_channel(recorder, torch.add, found, bias)


def _grouped(recorder: GradientRecorder, func: Any, x_RD: Tensor, weights_EFD: Tensor, ends_E: Any) -> Tensor:
    param = recorder._param(weights_EFD)
    if param is None:
        return func(x_RD, weights_EFD, ends_E)
    if recorder._sample_R is None:
        raise UnknownUse(param, "experts that are not Weft's own")
    leaf, put = recorder._begin(weights_EFD)
    ends = ends_E.tolist() if isinstance(ends_E, Tensor) else ends_E
    return operations.Grouped.apply(x_RD, leaf, put, recorder._sample_R, ends, recorder.record.samples)


class _Listener:
    """Stands for a `DeferredWeightGrad` that is always open, and hands products to a recorder."""

    is_open = True

    def __init__(self, puts: Mapping[int, Put], samples: int):
        self._puts, self._samples = puts, samples

    def store(self, product: DeferredProduct) -> None:
        """Hand the factors of one weight's gradient to the recorder."""
        x, grad = (rows_of_samples(one, self._samples, "a sharded layer") for one in (product.x_RI, product.grad_RO))
        self._puts[id(product.weight)](Product(x, grad, product.is_transposed))


def _columns(
    recorder: GradientRecorder, func: Any, x: Tensor, whole: Tensor | None, line: Any, members: list[Column], held: Any
) -> tuple[Tensor, ...]:
    """Rule of column-sharded layers. Biases are added afterwards, sample by sample."""
    puts: dict[int, Put] = {}
    read: list[Column] = []
    for member in members:
        weight = member.weight
        if recorder._param(weight) is not None:
            leaf, put = recorder._begin(weight)
            weight = nn.Parameter(leaf.detach())
            puts[id(weight)] = put
        read.append(Column(weight, None, member.is_transposed, member.form))
    listener: Any = _Listener(puts, recorder.record.samples)
    made = columns(x, whole, line, read, listener)
    return tuple(recorder._apply(torch.add, out, member.bias) for out, member in zip(made, members, strict=True))


_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    linear: _linear,
    columns: _columns,
    grouped_linear: _grouped,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.mm: _matmul,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
}
