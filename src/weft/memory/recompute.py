"""Recompute (activation checkpointing) of blocks, applied from outside the model.

The class of each repeated block is replaced by a subclass whose forward runs under the block's policy. Module paths,
state_dict names and the block's other methods do not change, also in copies of the model. Hooks of the block, such as
parameter gathering, run outside the recomputed part. torch.compile traces through it.

The bytes that a policy saves are measured in the first training forward, in which `trace_block` runs the first block of
each kind (equal class and shapes) two more times. recompute=full needs no trace, except of blocks with buffers. Under a
budget, this first forward saves as little as possible, and the policies are chosen at its end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Axis
from weft.config.plan import RECOMPUTES, Plan
from weft.devices import access
from weft.errors import ModelError, PlanError, Problem
from weft.memory.policy import Forward, Policy, cheapest_choice, run_block, spare_buffers, without_graph
from weft.memory.trace import BlockTrace, PolicyCost, Storages, num_bytes, storages_of, trace_block
from weft.models.inspect import blocks as model_blocks
from weft.models.inspect import dry_run, hugging_face, layers
from weft.models.inspect.blocks import repeated_blocks, replace_class, revert
from weft.private_torch import tree_leaves, uncompiled
from weft.units import counted, format_bytes, parse_bytes

#: Key of identical blocks: class, parameters and inputs (each by name or order, shape and dtype).
Kind = tuple[Any, ...]
_OF_MODEL = "_weft_recompute_of_model"


def apply_recompute(model: nn.Module, plan: Plan, axis: Axis | None = None) -> Recompute:
    """Make the blocks of `model` recompute according to `plan.recompute`, in place. Compile after this, not before.

    A model without repeated blocks is one block. An earlier call on the model, or on the model that it was copied from,
    is undone first. Returns the object that `recompute_of(model)` then returns.

    Args:
        model: the full model, or a stage.
        plan: provides `recompute` and `recompute_blocks`.
        axis: ranks that run the same blocks and choose equal policies under a budget; None for this rank alone.

    Raises:
        ModelError: if a block's forward was already replaced, or if recompute=full is used without repeated blocks and
            without a pipeline.
        PlanError: if the plan sets the number of blocks to recompute, and there are no repeated blocks.
    """
    for module in model.modules():
        revert(module, _RecomputedModel)
        revert(module, _RecomputedBlock)
    blocks = (_called_blocks(model) or {"": model}) if plan.recompute != "none" else {}
    if "" in blocks and plan.recompute_policy == "full" and plan.pp == 1:
        raise ModelError(
            f"recompute={plan.recompute}: it recomputes one repeated block at a time, and {type(model).__name__} has "
            f"none, so it would save nothing. Put its layers into modules that are repeated in an nn.ModuleList, "
            f"nn.ModuleDict or nn.Sequential, or use recompute=selective or recompute=none."
        )
    if plan.recompute_blocks:
        blocks = _first_blocks(blocks, plan)
    recompute = Recompute(plan.recompute, blocks, axis)
    setattr(model, _OF_MODEL, recompute)
    for path, block in blocks.items():
        if isinstance(block, _RecomputedBlock) or "forward" in vars(block):
            raise ModelError(
                f"recompute={plan.recompute}: the forward of {path or 'the model'} is replaced already. "
                f"Give the model as it was built."
            )
        policy = recompute.at_once(block)
        replace_class(block, _RecomputedBlock, _block_members, recompute=recompute, path=path, policy=policy)
    if recompute.is_budget and "" not in blocks:
        replace_class(model, _RecomputedModel, _model_members, recompute=recompute)
    return recompute


def _called_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks. A container that is not called itself is replaced by its children with parameters.

    This is not checked for models of transformers and Weft, and for models that cannot run on the meta device.
    """
    found = repeated_blocks(model)
    is_known = hugging_face.is_hugging_face(model) or isinstance(model, layers.KnownModel)
    order = None if is_known or not found else dry_run.call_order(model)
    if order is None or all(map(order.is_called, found.values())):
        return found
    return {site.path: site.module for site in order.called(model_blocks.block_sites(model))}


def _first_blocks(blocks: dict[str, nn.Module], plan: Plan) -> dict[str, nn.Module]:
    """Return the first blocks of this rank, as many as the plan specifies: their activations are stored longest.

    Raises PlanError if the model has no repeated blocks on this rank.
    """
    if "" in blocks:
        rule = "it counts repeated blocks, and the model has none on this rank"
        raise PlanError([Problem("recompute", f"recompute={plan.recompute}: {rule}. Use {plan.recompute_policy}.")])
    return dict(itertools.islice(blocks.items(), plan.recompute_blocks))


def recompute_of(model: nn.Module) -> Recompute | None:
    """Return the result of `apply_recompute` for this model, or None."""
    return getattr(model, _OF_MODEL, None)


class Recompute:
    """Recompute policies of a model's blocks.

    `policies` maps block paths to policies, as soon as they are chosen. Under a budget, `kept_bytes` are the bytes that
    one forward on this rank saves for backward with these policies, and `full_bytes` the bytes without recompute. Both
    count each storage once, without parameters, and up to the model's output: bytes that the loss saves are not
    included.

    Args:
        setting: the plan's `recompute`.
        blocks: blocks by path. "" is the full model.
        axis: ranks that must choose the same policies under a budget; None if this rank chooses alone.
    """

    def __init__(self, setting: str, blocks: dict[str, nn.Module], axis: Axis | None):
        self.setting = setting
        self.policy = setting.partition(":")[0]
        self.is_budget = self.policy not in RECOMPUTES
        self.policies: dict[str, Policy] = {}
        self.kept_bytes: int | None = None
        self.full_bytes: int | None = None
        self._slowdown = 0.0
        self._blocks = blocks
        self._axis = axis if self.is_budget else None
        self._traces: dict[Kind, BlockTrace] = {}
        self._calls: list[_Call] = []  # calls of the first forward under a budget
        self._fixed: Storages = {}  # kept under every choice
        self._watched = False

    def __deepcopy__(self, memo: dict[int, object]) -> Recompute:
        return self  # a copy of the model uses the same choice

    @property
    def is_chosen(self) -> bool:
        """True if every block has a policy. False until the first training forward."""
        return len(self.policies) == len(self._blocks)

    def prepare(self, model: nn.Module, call: Callable[[], object]) -> None:
        """Choose policies from an example forward now, before the first step, unless they are chosen.

        Does not change the model or the random generators. All ranks call it together.

        call: runs the model on one microbatch.
        """
        if self.is_chosen:
            return
        devices = {tensor.device for tensor in model.parameters()}
        buffers = [name for name, tensor in model.named_buffers() if tensor is not None]
        with access.forked_generators(*devices), spare_buffers(model, buffers), torch.enable_grad():
            call()

    def describe(self) -> str:
        """Describe in one line the recompute of the blocks, and under a budget the saved bytes and the cost."""
        if self.setting == "none":
            return "none: every activation is kept"
        if not self.is_chosen:
            return f"{self.setting}: chosen in the first forward"
        if not self.is_budget:
            return f"{self.setting}, in {_blocks(len(self._blocks))}"
        counts = Counter(_title(self.policies[path]) for path in self._blocks)
        mix = ", ".join(f"{count} {title}" for title, count in counts.items())
        assert self.kept_bytes is not None
        assert self.full_bytes is not None
        return (
            f"{self.setting}: {_blocks(len(self._blocks))} as {mix}; keeps {format_bytes(self.kept_bytes)} of "
            f"{format_bytes(self.full_bytes)} and runs {self._slowdown:.0%} of the blocks' forward again"
        )

    def at_once(self, block: nn.Module) -> Policy | None:
        """Choose and return the block's policy if it does not depend on a trace, else return None."""
        if self.policy != "full" or next(block.buffers(), None) is not None:
            return None
        policy = Policy("full")
        self.policies.update((path, policy) for path, known in self._blocks.items() if known is block)
        return policy

    def first_run(self, block: _RecomputedBlock, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a block that has no policy yet: trace it, and choose its policy unless a budget needs all traces.

        Raises ModelError if the policy cannot recompute this block.

        Args:
            block: a recomputing block.
            forward: its original forward, without recompute.
            args: positional arguments of this call.
            kwargs: keyword arguments of this call.
        """
        path = block._weft_path
        if path in self.policies:  # a copy of a model that has chosen
            block._weft_policy = self.policies[path]
            return block.forward(*args, **kwargs)
        kind = _kind(block, args, kwargs)
        if kind not in self._traces:
            self._traces[kind] = trace_block(block, forward, args, kwargs)
        trace = self._traces[kind]
        if not self.is_budget:
            if self.setting == "attention" and not trace.num_calls:
                raise ModelError(
                    f"recompute=attention: {path or 'the model'} makes no call of scaled_dot_product_attention, which "
                    "is what would be recomputed. Use recompute=selective, or attn_implementation='sdpa' if the model "
                    "offers it."
                )
            if self.policy == "selective" and trace.takes_gradient:
                raise ModelError(
                    f"recompute={self.setting}: the forward of {path or 'the model'} computes a gradient "
                    "(torch.autograd.grad), which only full recompute can repeat. Use recompute=full or none."
                )
            self._choose({path: trace.named(self.policy)})
            return block.forward(*args, **kwargs)
        if not self._watched and any(path == call.path for call in self._calls):
            # The blocks are not called by the model's forward, so bytes saved outside them are not measured.
            self._choose_by_budget()
            return block.forward(*args, **kwargs)
        call = _Call(path, trace)
        self._calls.append(call)
        self._fixed.update(storages_of([args, kwargs]))
        if path == "":
            self._choose_by_budget()
            return block.forward(*args, **kwargs)
        outputs = run_block(trace.named("full"), block, forward, args, kwargs)
        if trace.keeps_output:
            call.outputs = storages_of(outputs)
        return outputs

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Count the bytes that the model's first forward saves outside blocks, and choose the policies on exit."""
        parameters = storages_of(list(model.parameters()))

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            self._fixed.update(storages_of(tensor))
            return without_graph(tensor)

        self._calls, self._fixed, self._watched = [], {}, True
        try:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                yield
        finally:
            self._watched = False
        for key in parameters:
            self._fixed.pop(key, None)
        self._choose_by_budget()

    def _choose_by_budget(self) -> None:
        """Choose the fastest policies that fit on all ranks of the axis. Raises PlanError if none fit."""
        menus = [call.options(self._fixed) for call in self._calls]
        fixed_bytes, sizes = self._agree(num_bytes(self._fixed), menus)
        full_bytes = fixed_bytes + sum(menu[0][0] for menu in sizes)
        budget = _budget_bytes(self.setting, full_bytes)
        choice = cheapest_choice(sizes, budget - fixed_bytes)
        if choice is None:
            raise PlanError([Problem("recompute", self._does_not_fit(fixed_bytes, full_bytes))])
        chosen: dict[str, Policy] = {}
        for call, menu, index in zip(self._calls, menus, choice, strict=True):
            # A block that is called several times gets, among its calls' policies, the one that keeps the fewest bytes.
            if call.path not in chosen or menu[index].num_bytes == 0:
                chosen[call.path] = menu[index].policy
        self.full_bytes = full_bytes
        self.kept_bytes = fixed_bytes + sum(menu[index][0] for menu, index in zip(sizes, choice, strict=True))
        all_s = sum(menu[-1][1] for menu in sizes)
        self._slowdown = sum(menu[index][1] for menu, index in zip(sizes, choice, strict=True)) / max(all_s, 1e-12)
        self._fixed, self._calls = {}, []
        unused = {path: Policy("none") for path in self._blocks if path not in chosen}
        self._choose({**chosen, **unused})

    def _choose(self, policies: dict[str, Policy]) -> None:
        for path, policy in policies.items():
            self.policies[path] = policy
            block = self._blocks[path]
            if isinstance(block, _RecomputedBlock):  # a plain block again if only a copy recomputes now
                block._weft_policy = policy

    def _agree(self, fixed_bytes: int, menus: list[list[PolicyCost]]) -> tuple[int, list[list[tuple[int, float]]]]:
        """Return the fixed bytes and each option's (bytes, seconds) over the axis: maximum bytes, sum of seconds."""
        flat_bytes = [float(fixed_bytes), *(float(option.num_bytes) for menu in menus for option in menu)]
        flat_s = [0.0, *(option.seconds for menu in menus for option in menu)]
        if self._axis is not None and self._axis.size > 1:
            device = next(tensor.device for block in self._blocks.values() for tensor in block.parameters())
            flat_bytes = all_reduce(torch.tensor(flat_bytes, dtype=torch.float64, device=device), self._axis, "max")
            flat_s = all_reduce(torch.tensor(flat_s, dtype=torch.float64, device=device), self._axis)
            flat_bytes, flat_s = flat_bytes.tolist(), flat_s.tolist()
        pairs = iter(list(zip(map(int, flat_bytes), flat_s, strict=True))[1:])
        return int(flat_bytes[0]), [[next(pairs) for _ in menu] for menu in menus]

    def _does_not_fit(self, fixed_bytes: int, full_bytes: int) -> str:
        if self.setting.endswith("%") or "." in self.setting[:2]:
            share = math.ceil(100 * fixed_bytes / full_bytes)
            least = f"{share}%" if share < 100 else "full"
        else:
            least = f"{math.ceil(fixed_bytes / 2**20)}MiB"
        return (
            f"recompute={self.setting}: one microbatch keeps {format_bytes(full_bytes)} for backward on this rank, "
            f"and {format_bytes(fixed_bytes)} of them even with recompute=full (the blocks' inputs and activations "
            f"outside the blocks). Use recompute={least}, or a larger accumulation."
        )


@dataclass(slots=True)
class _Call:
    """One call to a block in the first forward. `outputs` holds the block's outputs if backward needs them."""

    path: str
    trace: BlockTrace
    outputs: Storages = field(default_factory=dict)

    def options(self, kept: Storages) -> list[PolicyCost]:
        """Return the block's possible policies. `kept` are storages that are saved under every policy."""
        return self.trace.options(num_bytes({key: out for key, out in self.outputs.items() if key not in kept}))


def _budget_bytes(setting: str, full_bytes: int) -> int:
    """Return a budget in bytes, from "12GiB" or a share of the bytes without recompute: "50%", "0.5"."""
    if setting.endswith("%"):
        return int(full_bytes * int(setting[:-1]) / 100)
    if setting.lstrip("0").startswith("."):
        return int(full_bytes * float(setting))
    return parse_bytes(setting)


class _RecomputedBlock(nn.Module):
    """Base class of recomputing blocks. `_weft_policy` is None until a policy is chosen."""

    _weft_recompute: Recompute
    _weft_path: str
    _weft_policy: Policy | None


class _RecomputedModel:
    """Base class of models whose policies are chosen by a budget in the first forward."""


def _block_members(kind: type) -> dict[str, Any]:
    return {"forward": _block_forward(kind.forward)}


def _model_members(kind: type) -> dict[str, Any]:
    return {"forward": _model_forward(kind.forward)}


def _block_forward(plain: Forward) -> Forward:
    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(self, *args, **kwargs)
        if self._weft_policy is None:
            return _first_run(self, plain, args, kwargs)
        return run_block(self._weft_policy, self, plain, args, kwargs)

    return forward


def _model_forward(plain: Forward) -> Forward:
    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        recompute: Recompute = self._weft_recompute
        if recompute.is_chosen or not torch.is_grad_enabled():
            return plain(self, *args, **kwargs)
        with recompute.watch(self):
            return plain(self, *args, **kwargs)

    return forward


@uncompiled
def _first_run(block: _RecomputedBlock, plain: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return block._weft_recompute.first_run(block, plain, args, kwargs)


def _kind(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Kind:
    inputs = (leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor))
    return (
        type(block),
        tuple((name, value.shape, value.dtype) for name, value in block.named_parameters()),
        tuple((value.shape, value.dtype, value.requires_grad) for value in inputs),
    )


def _title(policy: Policy) -> str:
    return policy.name if policy.name != "selective" else f"selective({len(policy.saved)} kept)"


def _blocks(count: int) -> str:
    return counted(count, "block")
