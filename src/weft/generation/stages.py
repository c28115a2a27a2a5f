"""Blocks of a model divided over pipeline ranks, for passes without gradients.

Each rank runs the model's own forward on all rows. A block of another rank is a placeholder that receives the output of
that rank's last block. So each rank keeps only its own blocks, keys and values, and the parts outside the blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.collectives import broadcast
from weft.comm.mesh import Axis, Mesh
from weft.config.partitioning import divide_layers
from weft.errors import ModelError, PlanError
from weft.models.decoder import Decoder
from weft.models.inspect.blocks import repeated_blocks
from weft.models.inspect.dry_run import call_without_numbers, example_of, without_numbers


class OtherStage(nn.Module):
    """Stands for a block of another rank. It has no parameters.

    Args:
        axis: the pipeline ranks.
        owner: index of the rank that has the block.
        is_last: True for the last block of its rank, whose output it receives. Others return their input.
        count: number of outputs of the block: 0 for a tensor, else the length of the tuple.
    """

    def __init__(self, axis: Axis, owner: int, is_last: bool, count: int):
        super().__init__()
        self._axis, self._owner, self._is_last, self._count = axis, owner, is_last, count

    def forward(self, x_BTD: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the block's rank, in the block's form. A trace on the meta device returns the input."""
        if self._is_last and not x_BTD.is_meta:
            x_BTD = broadcast(torch.empty_like(x_BTD, memory_format=torch.contiguous_format), self._axis, self._owner)
        return (x_BTD, *([None] * (self._count - 1))) if self._count else x_BTD


def keep_stage(model: nn.Module, mesh: Mesh) -> None:
    """Replace the blocks of other pipeline ranks. The model may be on the meta device.

    Raises:
        ModelError: if the model has not one list of blocks.
        PlanError: if it has fewer blocks than the plan has ranks of pp.
    """
    axis, blocks = mesh["pp"], repeated_blocks(model)
    parents = {path.rpartition(".")[0] for path in blocks}
    if len(parents) != 1:
        raise ModelError(
            f"pp={axis.size}: {type(model).__name__} has {len(parents)} lists of blocks, and generation divides one. "
            "Use tp or zero=3."
        )
    if len(blocks) < axis.size:
        raise PlanError(
            f"pp={axis.size}: {type(model).__name__} has {len(blocks)} blocks. Use pp of at most {len(blocks)}."
        )
    sizes = [float(sum(param.numel() for param in block.parameters())) or 1.0 for block in blocks.values()]
    counts = divide_layers(sizes, axis.size)
    owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
    forms = _forms(model, blocks)
    for index, (path, block) in enumerate(blocks.items()):
        owner = owners[index]
        is_last = index + 1 == len(owners) or owners[index + 1] != owner
        if owner != axis.rank:
            model.set_submodule(path, OtherStage(axis, owner, is_last, forms[index]))
        elif is_last:
            block.register_forward_hook(_sends(axis, owner))


def _forms(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[int]:
    """Return the number of outputs of each block, 0 for a tensor, by a forward on the meta device."""
    if isinstance(model, Decoder):  # routers cannot be traced on the meta device
        return [0] * len(blocks)
    found: dict[nn.Module, int] = {}

    def note(block: nn.Module, args: Any, output: Any) -> None:
        found[block] = len(output) if isinstance(output, tuple) else 0

    hooks = [block.register_forward_hook(note) for block in blocks.values()]
    examples = [example_of(model)]
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if isinstance(examples[0], dict) and embedding is not None:  # some models compare the ids with the padding's
        examples.append({"inputs_embeds": torch.zeros(2, 8, embedding.weight.shape[1])})
    error: ModelError | None = None
    try:
        for example in examples:
            try:
                call_without_numbers(model, without_numbers(example, model), contextlib.nullcontext())
                break
            except ModelError as caught:
                error = error or caught
    finally:
        for hook in hooks:
            hook.remove()
    if error is not None and len(found) < len(blocks):
        raise error
    return [found[block] for block in blocks.values()]


def _sends(axis: Axis, owner: int) -> Callable[[nn.Module, Any, Any], None]:
    def send(block: nn.Module, args: Any, output: Any) -> None:
        del block, args
        x_BTD: Tensor = output if isinstance(output, Tensor) else output[0]
        if not x_BTD.is_meta:
            broadcast(x_BTD.contiguous(), axis, owner)

    return send
