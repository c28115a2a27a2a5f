"""A model's tensors as one process holds them: recorded before it is laid over a mesh, when all of them are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from weft.errors import ModelError
from weft.parallel.local_tensors.precision import Precision
from weft.spec.plan import Plan
from weft.units import format_bytes


@dataclass(frozen=True, slots=True)
class Original:
    """One entry of the plain model's state_dict.

    first: the first name of the tensor, which is its own where no other entry shares it.
    """

    first: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    is_parameter: bool

    @property
    def num_bytes(self) -> int:
        """Of the values, as they were loaded."""
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return torch.Size(self.shape).numel()

    def bytes_laid_out(self, precision: Precision) -> int:
        """Return the bytes of the values in forward and backward, and of the master where they are rounded."""
        if not self.dtype.is_floating_point:
            return self.num_bytes
        masters = precision.master.itemsize if self.is_trained and precision.is_mixed else 0
        return self.numel * (precision.compute.itemsize + masters)


def originals_of(model: nn.Module) -> dict[str, Original]:
    """Return the entries of a plain model's state_dict by name, in its order.

    Raises:
        ModelError: for a parameter or buffer of a lazy module, which has no shape yet.
    """
    first: dict[int, str] = {}
    found: dict[str, Original] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            if is_lazy(tensor):
                raise ModelError(
                    f"model: {name} belongs to a lazy module, which has no shape before its first forward. Run one "
                    "batch through the model before parallelize, or build the module with its sizes."
                )
            first.setdefault(id(tensor), name)
            is_parameter = isinstance(tensor, nn.Parameter)
            found[name] = Original(
                first[id(tensor)], tuple(tensor.shape), tensor.dtype, tensor.requires_grad, is_parameter
            )
    return found


def refuse_float64(model: nn.Module, plan: Plan) -> None:
    """Refuse a model in float64 under a precision that keeps weights in float32.

    Raises:
        ModelError: with the first such parameter.
    """
    if Precision.of(plan).master == torch.float64:
        return
    wide = [name for name, one in model.named_parameters() if one.dtype == torch.float64]
    if wide:
        raise ModelError(
            f"precision={plan.precision}: parameter {wide[0]!r} is float64, and this precision keeps weights in "
            "float32. Use precision=fp64, or call model.float() before parallelize."
        )


def grown(originals: Mapping[str, Original], precision: Precision) -> str:
    """Tell, in a sentence, of parameters loaded in 16 bits that take more memory from here on; "": there are none."""
    params = [one for name, one in originals.items() if one.is_parameter and one.first == name]
    narrow = {one.dtype for one in params} & {torch.bfloat16, torch.float16}
    before, after = sum(one.num_bytes for one in params), sum(one.bytes_laid_out(precision) for one in params)
    if not narrow or after <= before:
        return ""
    loaded = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
    sizes = f"the model was loaded in {loaded} with {format_bytes(before)} of parameters and has {format_bytes(after)}"
    if not precision.is_mixed:
        kept = str(precision.master).removeprefix("torch.")
        return (
            f"precision: {sizes} from here on, all in {kept}. Use precision=bf16 to compute in bfloat16: "
            f"frozen weights then stay in it, and trained ones have float32 masters beside them."
        )
    return (
        f"precision: {sizes} from here on, since each trained weight has a float32 master beside it. Every plan "
        "keeps these masters. Use zero=1, 2 or 3 to divide them, or offload=optimizer to keep them on the host."
    )
