"""Find modules that mix tokens of a sequence, from their classes and from one forward on small inputs.

Under sequence parallelism each rank has its own tokens, so blocks must treat each token separately outside modules that
get all of them. `find_regions` runs the model and follows the tokens from the scatter to the gather. It accepts
the operations in `token_rules.py` and rejects every other operation by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from weft.errors import LayoutError, ModelError
from weft.models.inspect import hugging_face
from weft.models.inspect.blocks import has_params, repeated_blocks
from weft.models.inspect.dry_run import example_of
from weft.models.inspect.layers import KnownModel
from weft.models.inspect.token_regions import TokenDivision, TokenRegions
from weft.models.inspect.token_trace import TokenTrace, hidden_index
from weft.private_torch import named_modules

__all__ = [
    "TokenDivision",
    "TokenRegions",
    "find_mixers",
    "find_regions",
    "hidden_index",
    "mixing",
    "why_fixed_attention",
    "why_mixed",
]

#: Parts of class names of modules that mix tokens: attention, recurrent states, convolutions, and other modules that
#: read several tokens.
_ATTENTION = ("attention", "attn")
_OTHERS = (
    "mamba", "ssm", "rnn", "lstm", "gru", "mixer", "shortconv", "deltanet", "recurrent", "rglru", "rwkv", "lightning",
    "fourier", "compressor",
)  # fmt: skip
#: Suffixes of class names of modules that never mix tokens. Some families have one of the names above in all class
#: names.
_NEVER = ("norm", "mlp", "embedding", "embeddings")

#: Maximum number of attempts in which another module that mixes tokens gets all of them.
_MOST_WIDENED = 12


def mixing(module: nn.Module) -> str:
    """Return how a module mixes tokens, judged by its class.

    - "attention": the class name contains "attention" or "attn".
    - "convolution": Conv2d, or the class name contains "conv1d".
    - "other": nn.Conv1d with a kernel above 1, recurrent layers, and class names such as "Mamba" or "Mixer".
    - "": any other module, and modules without parameters.

    "other" has precedence. Class names that end in "norm", "mlp", "embedding" or "embeddings" are not searched.
    """
    if isinstance(module, nn.Conv1d | nn.RNNBase):
        return "" if isinstance(module, nn.Conv1d) and set(module.kernel_size) == {1} else "other"
    if not has_params(module):
        return ""
    kind = type(module).__name__.lower()
    if not kind.endswith(_NEVER):
        for what, words in (("other", _OTHERS), ("attention", _ATTENTION), ("convolution", ("conv1d",))):
            if any(word in kind for word in words):
                return what
    return "convolution" if isinstance(module, nn.Conv2d) else ""


def find_regions(
    model: nn.Module, blocks: Sequence[Sequence[str]], division: TokenDivision, example: Any = None
) -> TokenRegions:
    """Return the regions of a model in which the sequence can be sharded.

    Tokens stay sharded from the first block to the last if the model allows it. Otherwise they are gathered after each
    block, so that code between blocks gets the full sequence. Modules inside a block that mix tokens also get the full
    sequence.

    Args:
        blocks: paths of the blocks of each chain, in module order.
        division: how the parallelism technique shards tokens.
        example: arguments of a forward, or None for generated ones.

    Raises:
        LayoutError: if an operation inside a block mixes tokens or is unknown, if no module with sharded layers is
            called in the blocks, or if the model cannot be traced.
    """
    runs = tuple((chain[0], chain[-1]) for chain in blocks)
    every = tuple(path for chain in blocks for path in chain)
    if isinstance(model, KnownModel):
        return TokenRegions(runs, every)
    example = example_of(model, batch=2) if example is None else example
    flow, why = _widened(model, TokenRegions(runs, every), division, example)
    if flow.problem is None:
        return TokenRegions(runs, every, flow.summed, "", flow.full, why)
    first, units = flow.problem, _called_units(model, every, flow.called, division)
    if units and not division.has_own_loss:
        apart = TokenRegions(tuple((path, path) for path in units), units)
        flow, why = _widened(model, apart, division, example)
        if flow.problem is None:
            return TokenRegions(apart.runs, units, flow.summed, first, flow.full, why)
    problem = flow.problem or first
    if not units:
        problem = (
            f"{every[0]} ({type(model.get_submodule(every[0])).__name__}) is not called as one module, so there is "
            "no block in which tokens could be sharded. Put the layers of a block into a module with its own "
            "forward, or"
        )
        raise LayoutError(f"{division.where}: {problem} {division.remedy[:1].lower()}{division.remedy[1:]}")
    raise LayoutError(f"{division.where}: {problem} {division.remedy}")


def _widened(model: nn.Module, regions: TokenRegions, division: TokenDivision, example: Any) -> tuple[TokenTrace, str]:
    """Return the trace in which modules that mix tokens get all of them, and the reason for the first such module.

    If that does not suffice, return the first trace, with its problem, and "".
    """
    full: set[str] = set()
    why = ""
    flow = first = _traced(model, regions, division, example)
    for _ in range(_MOST_WIDENED):
        if flow.problem is None or division.has_own_loss:
            break
        found = _next_mixers(model, flow, division, full)
        if not found:
            break
        full |= found
        why = why or flow.problem
        flow = _traced(model, regions, replace(division, full=full), example)
    return (first, "") if flow.problem else (flow, why)


def find_mixers(
    model: nn.Module,
    blocks: Sequence[Sequence[str]],
    division: TokenDivision,
    example: Any = None,
    runs: Sequence[tuple[str, str]] | None = None,
    most: int = _MOST_WIDENED,
) -> tuple[str, ...]:
    """Return the modules that must get all tokens so that the blocks treat each token separately outside them.

    Args:
        blocks: paths of the blocks of each chain, in module order.
        division: how the parallelism technique shards tokens. Its `gathering` is ignored.
        example: arguments of a forward, or None for generated ones.
        runs: first and last block of each region with sharded tokens, or None for one region in each chain.
        most: maximum number of kinds of modules that get all tokens.

    Raises:
        LayoutError: if a block's own code mixes tokens or has an unknown operation, or the model cannot be traced.
    """
    ends = tuple((chain[0], chain[-1]) for chain in blocks) if runs is None else tuple(runs)
    regions = TokenRegions(ends, tuple(path for chain in blocks for path in chain))
    example = example_of(model, batch=2) if example is None else example
    mixers: set[str] = set()
    flow = _traced(model, regions, replace(division, gathering=()), example)
    for _ in range(most):
        found = _next_mixers(model, flow, replace(division, gathering=mixers), mixers) if flow.problem else set[str]()
        if not found:
            break
        mixers |= found
        flow = _traced(model, regions, replace(division, gathering=mixers), example)
    if flow.problem is not None:
        raise LayoutError(f"{division.where}: {flow.problem} {division.remedy}")
    inside = {path for path in mixers if any(path.startswith(f"{other}.") for other in mixers)}
    return tuple(path for path, _ in named_modules(model) if path in mixers - inside)


def why_mixed(model: nn.Module, paths: Sequence[str], division: TokenDivision, example: Any) -> str:
    """Return the reason why modules do not treat each token separately, or "" if they do. Each one is a region."""
    regions = TokenRegions(tuple((path, path) for path in paths), tuple(paths))
    return _traced(model, regions, division, example).problem or ""


def _next_mixers(model: nn.Module, flow: TokenTrace, division: TokenDivision, known: Collection[str]) -> set[str]:
    """Return the innermost module outside `known` that mixed tokens in a trace, and the same module of all blocks.

    The result is empty if there is no such module, or if it is a sharded layer.
    """
    near = next((at for at, path in enumerate(flow.failed) if division.gathers(path)), len(flow.failed))
    path = next((path for path in reversed(flow.failed[: near + 1]) if path not in known), None)
    return set() if path is None or division.style_of(path) else _same_kind(model, path)


def _same_kind(model: nn.Module, path: str) -> set[str]:
    """Return the paths that differ from `path` only in numbers."""
    parts = path.split(".")
    return {
        each
        for each, _ in named_modules(model)
        if len(other := each.split(".")) == len(parts)
        and all(one == two or (one.isdecimal() and two.isdecimal()) for one, two in zip(parts, other, strict=True))
    }


def _traced(model: nn.Module, regions: TokenRegions, division: TokenDivision, example: Any) -> TokenTrace:
    """Return a trace of the tokens in evaluation mode, and also in training mode if the model is in that mode.

    Models of transformers are traced in evaluation mode only. If tracing fails, the trace's `problem` is the reason.
    """
    flow = TokenTrace(model, regions, division)
    try:
        flow.trace(example, training=False)
        if flow.problem is None and model.training and not hasattr(model, "base_model_prefix"):
            flow.trace(example, training=True)
    except (LayoutError, ModelError) as error:
        reason = str(error).removeprefix("layout: ").partition(". Give")[0].rstrip(".")
        flow.problem = flow.problem or f"{reason}, so Weft cannot check that its blocks keep tokens apart."
    return flow


def _called_units(
    model: nn.Module, blocks: Sequence[str], called: Collection[str], division: TokenDivision
) -> tuple[str, ...]:
    """Return the outermost called modules of the blocks that hold sharded layers, except those that get all tokens."""
    modules = dict(named_modules(model))
    cut = [path for path, style in division.styles.items() if style.name in ("colwise", "rowwise")]
    found: list[str] = []

    def look_into(path: str) -> None:
        if not any(one.startswith(f"{path}.") for one in cut):
            return
        if path in called:
            if not division.gathers(path):  # such a module gets all tokens and shards no tokens
                found.append(path)
            return
        for name, _ in modules[path].named_children():
            look_into(f"{path}.{name}")

    for path in blocks:
        look_into(path)
    return tuple(found)


def why_fixed_attention(model: Any) -> str:
    """Return the reason why the attention of a transformers model cannot be replaced, or "" if it can."""
    kind = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        return f"the attention of {kind} cannot be replaced from outside (_supports_attention_backend is not set)"
    if hugging_face.attention_heads(model) is None:
        return f"{kind} has no single number of attention heads"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{kind} has no position_ids"
    if getattr(getattr(model, "config", None), "trigram_input", False):
        return f"{kind} reads the embeddings of neighboring tokens together (trigram_input)"
    for path, block in repeated_blocks(model).items():
        for name, module in named_modules(block):
            if mixing(module) == "other":
                place = f"{path}.{name}" if name else path
                return f"{place} ({type(module).__name__}) mixes tokens by something other than attention"
    return ""
