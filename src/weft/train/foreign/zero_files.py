"""Checkpoints of DeepSpeed, ZeRO stages 1 to 3: flat fp32 partitions of each rank, and tables of names and shapes.

The layout is that of DeepSpeed's own zero_to_fp32.py:
stages 1, 2   each group of parameters is one line, cut into one piece a rank; parameters follow each other in it
stage 3       each parameter is a line of its own, cut into equal pieces, padded; a rank's pieces follow each other
Adam's moments lie as the weights do, group by group.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.train.foreign.taken import NotTaken, Taken, load_weights, numel, within

_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


class _Plain:
    """Stands for DeepSpeed's own classes: it keeps what it is given, and does nothing."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments


_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


@dataclass(frozen=True, slots=True)
class _Lines:
    """One kind of number (weights, exp_avg, ...) of every rank: ranks -> groups -> a flat tensor."""

    stage: int
    groups: list[list[torch.Tensor]]


def read_zero(source: Path, taken: Taken) -> None:
    """Hand over weights and moments, whole, and the counters. Raises NotTaken."""
    torch.serialization.add_safe_globals([argparse.Namespace, *((_Plain, name) for name in _DEEPSPEED)])
    folder = _tag_folder(source)
    ranks = [_load(path) for path in _files(folder, _STATES)]
    models = [_load(path) for path in _files(folder, _MODEL)]
    states = [_table(rank, "optimizer_state_dict") for rank in ranks]
    first = models[0]
    stage = _stage(states[0])
    world_size = _world_size(states[0])
    if world_size != len(states):
        raise NotTaken(f"{len(states)} files of optimizer states of {world_size} are there")
    shapes = _shapes(first.get("param_shapes"))
    paddings = states[0].get("param_alignment_paddings") if stage < 3 else None
    weights = _Lines(stage, [_flat(one, stage) for one in states])
    for name, tensor in _tensors(weights, shapes, paddings):
        taken.tensor(("model", name), tensor)
    _moments(states, stage, shapes, paddings, taken)
    _others(models, shapes, stage, taken)
    for key in ("global_steps", "global_samples", "skipped_steps"):
        taken.value((key,), first.get(key))


def _tag_folder(source: Path) -> Path:
    """The folder of one step: `latest` beside it says its name."""
    if not (source / "latest").is_file():
        return source
    tag = within(source, "latest").read_text(errors="replace").strip()
    folder = source / tag
    if tag != Path(tag).name or tag in (".", "..") or folder.is_symlink() or not folder.is_dir():
        raise NotTaken(f"`latest` names {tag[:80]!r}, and the checkpoint has no such folder")
    return folder


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of a kind by rank."""
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]):
            raise NotTaken(f"{path.name}: it was saved with tensor or pipeline parallelism, which Weft does not import")
        found[int(match[1] or 0)] = within(folder, path.name)
    if sorted(found) != list(range(len(found))) or not found:
        kind = "optimizer states" if pattern is _STATES else "model states"
        raise NotTaken(f"files of {kind} are missing: found only those of ranks {sorted(found)}")
    return [found[rank] for rank in sorted(found)]


def _load(path: Path) -> dict[str, Any]:
    found = load_weights(path, path.name, mapped=True)
    if not isinstance(found, dict):
        raise NotTaken(f"{path.name} holds no table")
    return found


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(table.get(key), dict):
        raise NotTaken(f"it has no {key}")
    return table[key]


def _stage(states: dict[str, Any]) -> int:
    found = states.get("zero_stage")
    value: Any = found.arguments[0] if isinstance(found, _Plain) and found.arguments else found
    if value not in (1, 2, 3):
        raise NotTaken(f"zero_stage is {value!r}; Weft imports stages 1, 2 and 3")
    return value


def _world_size(states: dict[str, Any]) -> int:
    found = states.get("partition_count")
    found = max(found) if isinstance(found, list) and found else found
    if type(found) is not int:
        raise NotTaken("partition_count is not a number")
    return found


def _shapes(found: Any) -> list[dict[str, tuple[int, ...]]]:
    """Groups of parameters: name -> shape, in order."""
    groups = found if isinstance(found, list) else [found]
    if not groups or not all(isinstance(group, dict) for group in groups):
        raise NotTaken("param_shapes is not a list of tables")
    return [{str(name): tuple(shape) for name, shape in group.items()} for group in groups]


def _flat(states: dict[str, Any], stage: int) -> list[torch.Tensor]:
    found = states.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(found, list) or not all(isinstance(one, torch.Tensor) for one in found):
        raise NotTaken("the fp32 partitions are missing: it was saved without optimizer states")
    return [one.reshape(-1) for one in found]


def _tensors(
    lines: _Lines, shapes: Sequence[dict[str, tuple[int, ...]]], paddings: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors by name."""
    if lines.stage == 3:
        yield from _equal_pieces(lines, {name: shape for group in shapes for name, shape in group.items()})
        return
    if len(lines.groups[0]) != len(shapes):
        raise NotTaken(f"{len(lines.groups[0])} partitions for {len(shapes)} groups of parameters")
    for number, group in enumerate(shapes):
        line = torch.cat([rank[number] for rank in lines.groups])
        gaps = paddings[number] if isinstance(paddings, list) and number < len(paddings) else [0] * len(group)
        start = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            yield name, _cut(line, name, start, shape)
            start += numel(shape) + int(gap)


def _equal_pieces(lines: _Lines, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    ranks = [torch.cat(groups) for groups in lines.groups]
    start = 0
    for name, shape in shapes.items():
        each = -(-numel(shape) // len(ranks))
        if any(start + each > rank.numel() for rank in ranks):
            raise NotTaken(f"{name}: the partitions end before this parameter")
        line = torch.cat([rank[start : start + each] for rank in ranks])
        yield name, _cut(line, name, 0, shape)
        start += each


def _cut(line: torch.Tensor, name: str, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    if start + numel(shape) > line.numel():
        raise NotTaken(f"{name}: the partitions end before this parameter")
    return line[start : start + numel(shape)].view(shape)


def _moments(
    states: list[dict[str, Any]], stage: int, shapes: list[dict[str, tuple[int, ...]]], paddings: Any, taken: Taken
) -> None:
    """States of the optimizer: flat ones lie as weights do, the others hold for each parameter of their group."""
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    base = [one.get(key) for one in states]
    if not all(isinstance(one, dict) and isinstance(one.get("state"), dict) for one in base):
        raise NotTaken(f"{key} has no states; save it again with elastic checkpoints off")
    by_rank: list[list[dict[str, Any]]] = [
        list(_table(one or {}, "state").values()) for one in base
    ]  # a group, or a part of one under stage 3
    if not by_rank[0]:
        return
    for kind, sample in by_rank[0][0].items():
        place = ("optimizer", "state")
        if isinstance(sample, torch.Tensor) and sample.dim() == 1:
            flat = _Lines(stage, [[group[kind].reshape(-1) for group in rank] for rank in by_rank])
            for name, tensor in _tensors(flat, shapes, paddings):
                taken.tensor((*place, name, kind), tensor)
        else:
            value = sample if isinstance(sample, torch.Tensor) else torch.tensor(float(sample))
            for name in (name for group in shapes for name in group):
                taken.tensor((*place, name, kind), value.to(torch.float32))


def _others(models: list[dict[str, Any]], shapes: list[dict[str, tuple[int, ...]]], stage: int, taken: Taken) -> None:
    """Buffers, frozen weights, and which names stand for a tensor that has another one."""
    first = models[0]
    module = _table(first, "module")
    trained = {name for group in shapes for name in group}
    frozen: dict[str, Any] = first.get("frozen_param_shapes") or {}
    for name, shape in frozen.items():
        pieces = [(one.get("frozen_param_fragments") or {})[name].reshape(-1) for one in models]
        line = torch.cat(pieces) if stage == 3 else pieces[0]
        taken.tensor(("model", name), _cut(line, name, 0, tuple(shape)))
    for name in first.get("buffer_names") or []:
        if name in module and name not in trained:
            taken.tensor(("model", name), module[name])
    taken.value(("shared",), {str(a): str(b) for a, b in dict(first.get("shared_params") or {}).items()})
