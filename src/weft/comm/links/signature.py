"""An operation as one number, which ranks compare before they use each other's data."""

from __future__ import annotations

import torch

from weft.comm.links.link import Operation

KINDS = ("barrier", "broadcast", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
OPS = ("sum", "max", "min")
#: In this order on all ranks; those not listed share the last number.
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


def sign(operation: Operation) -> int:
    """Kind, op, dtype, root and number of elements: two equal signatures fit each other."""
    dtype = operation.source.dtype
    code = DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)
    # What ranks send to each other may differ in size; the most of it may not.
    signature = operation.most if operation.kind == "all_to_all" else operation.source.numel()
    for value, limit in ((operation.root, 1 << 12), (code, 16), (OPS.index(operation.op), 4)):
        signature = signature * limit + value % limit
    return signature * 8 + KINDS.index(operation.kind)


def explain_signature(signature: int) -> str:
    """The words for a signature, such as "all_reduce (sum) of 12 float32"."""
    signature, kind = divmod(signature, 8)
    signature, op = divmod(signature, 4)
    signature, code = divmod(signature, 16)
    numel, root = divmod(signature, 1 << 12)
    name = KINDS[kind]
    if name == "barrier":
        return name
    dtype = str(DTYPES[code]).removeprefix("torch.") if code < len(DTYPES) else "values of another type"
    detail = f" from {root}" if name == "broadcast" else f" ({OPS[op]})" if "reduce" in name else ""
    amount = f"at most {numel}" if name == "all_to_all" else str(numel)
    return f"{name}{detail} of {amount} {dtype}"
