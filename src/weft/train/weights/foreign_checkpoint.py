"""Import of checkpoints of other trainers: sorting tensors into weights and optimizer states, and saving them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import env
from weft.checkpoint.folders import folder_name
from weft.checkpoint.object_store import Location
from weft.checkpoint.safetensors_files import RawArray, block_of
from weft.checkpoint.save import save_checkpoint
from weft.errors import CheckpointError

if TYPE_CHECKING:
    import torch

#: Path of a tensor in the saved tables: ("optimizer", "state", "embed.weight", "exp_avg").
Place = tuple[str | int, ...]
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True, slots=True)
class SortedNames:
    """Saved names by role.

    Attributes:
        weights: path of each weight, by its name.
        states: path of each optimizer state, by "weight/state", such as "embed.weight/exp_avg".
        left_out: paths of all other tensors.
    """

    weights: Mapping[str, Place]
    states: Mapping[str, Place]
    left_out: tuple[Place, ...]


def sorted_names(places: Iterable[Place], model_key: str | None = None) -> SortedNames:
    """Sort saved paths into weights and optimizer states.

    model_key: path of the dict of weights, joined by "."; None finds it.

    Raises:
        CheckpointError: if it is unclear which tensors are the weights, if `model_key` has no tensors, or if optimizer
            states are keyed by number.
    """
    places = list(places)
    weights_at: dict[Place, list[Place]] = defaultdict(list)
    state_places = [place for place in places if _state_at(place) is not None]
    for place in places:
        if _state_at(place) is None:
            weights_at[place[:-1]].append(place)
    chosen = _model_of(weights_at, state_places, model_key)
    weights = _unwrapped({str(place[-1]): place for place in weights_at[chosen]})
    states = dict(_states(state_places, weights))
    taken = {*weights.values(), *states.values()}
    return SortedNames(weights, states, tuple(place for place in places if place not in taken))


def _state_at(place: Place) -> int | None:
    """Return the index of the path element that begins optimizer states: "state", or "state.name..." if joined.

    Return None if there is no such element.
    """
    for number, part in enumerate(place):
        if (part == "state" and len(place) - number == 3) or (isinstance(part, str) and part.startswith("state.")):
            return number
    return None


def _model_of(weights_at: Mapping[Place, list[Place]], states: list[Place], key: str | None) -> Place:
    if key is not None:
        found = [place for place in weights_at if ".".join(map(str, place)) == key]
        if not found:
            raise CheckpointError(f"--model {key}: this table has no tensors. {_tables(weights_at)}")
        return found[0]
    owners = {str(place[-2]) for place in states if place[-3:-2] == ("state",)}
    fits = [place for place, members in weights_at.items() if owners <= {str(one[-1]) for one in members}]
    if len(fits) != 1:
        fits = [place for place in fits or weights_at if place and place[-1] in ("model", "module", "state_dict")]
    if len(fits) != 1:
        raise CheckpointError(f"it is unclear which tensors are the model's weights. {_tables(weights_at)}")
    return fits[0]


def _tables(weights_at: Mapping[Place, list[Place]]) -> str:
    known = ", ".join(".".join(map(str, place)) or "(the top)" for place in weights_at) or "none"
    return f"Name their table with --model, one of: {known}."


def _unwrapped(weights: dict[str, Place]) -> dict[str, Place]:
    """Return the weights without the prefixes that wrappers add to all names."""
    for wrapper in _WRAPPERS:
        if weights and all(name.startswith(wrapper) for name in weights):
            return _unwrapped({name.removeprefix(wrapper): place for name, place in weights.items()})
    return weights


def _states(places: list[Place], weights: Mapping[str, Place]) -> Iterable[tuple[str, Place]]:
    names = sorted(weights, key=len, reverse=True)
    for place in places:
        number = _state_at(place)
        assert number is not None
        if place[number] == "state":
            owner, state = place[number + 1], str(place[number + 2])
            if isinstance(owner, int):
                raise CheckpointError(
                    "the optimizer's states are keyed by number instead of by name. Save again with get_state_dict of "
                    "torch.distributed.checkpoint.state_dict."
                )
        else:
            joined = ".".join(map(str, place[number:])).removeprefix("state.")
            owner, state = next((pair for name in names if (pair := _split(joined, name))), ("", ""))
        owner = _owner(str(owner), weights)
        if owner is not None:
            yield f"{owner}/{state}", place


def _split(joined: str, name: str) -> tuple[str, str] | None:
    """Split a joined name into weight and state: "module.b.w.exp_avg" becomes ("b.w", "exp_avg").

    Return None if the weight is not `name`, apart from prefixes of wrappers.
    """
    start, found, state = joined.rpartition(f"{name}.")
    while start and (wrapper := next((one for one in _WRAPPERS if start.endswith(one)), None)):
        start = start.removesuffix(wrapper)
    return (name, state) if found and not start else None


def _owner(name: str, weights: Mapping[str, Place]) -> str | None:
    while name not in weights:
        wrapper = next((one for one in _WRAPPERS if name.startswith(one)), None)
        if wrapper is None:
            return None
        name = name.removeprefix(wrapper)
    return name


# Conversion of another trainer's checkpoint to Weft's format.

_KINDS = {"dcp": "torch.distributed.checkpoint", "zero": "DeepSpeed ZeRO"}
TABLE = "taken.json"


@dataclass(frozen=True, slots=True)
class BroughtIn:
    """Result of an import.

    Attributes:
        path: the saved checkpoint.
        step: its number of optimizer steps.
        kind: name of the source's format.
        num_weights, num_states: numbers of imported weights and optimizer states.
        left_out: paths in the source that were not imported.
    """

    path: Location
    step: int
    kind: str
    num_weights: int
    num_states: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    tensors: Mapping[Place, torch.Tensor]
    values: Mapping[Place, Any]
    left_out: tuple[str, ...]


def bring_in(
    source: Path, root: Location, *, step: int | None = None, model_key: str | None = None, limit_s: float = 1800.0
) -> BroughtIn:
    """Read a folder of torch.distributed.checkpoint or DeepSpeed, and save it as a checkpoint under `root`.

    The data temporarily exists twice on the disk of `root`; for an object store, once in the temporary folder.

    Args:
        source: the foreign folder.
        root: the parent of the step folders, or a prefix of an object store.
        step: optimizer steps done; None to use the source's value.
        model_key: path of the dict of weights, joined by "."; None finds it.
        limit_s: maximum time for reading in seconds.

    Raises:
        CheckpointError: if the source cannot be read or contains anything except tensors and plain values, if its
            weights or step cannot be found, or if `root` has that step already or cannot be written.
    """
    kind = _kind_of(source)
    try:
        beside = None
        if isinstance(root, Path):
            root.mkdir(parents=True, exist_ok=True)
            beside = root
        with tempfile.TemporaryDirectory(dir=beside, prefix=".import-") as work:
            run_confined(kind, source, Path(work), limit_s)
            found = _read(Path(work))
            return _commit(found, kind, source, root, step, model_key)
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be written ({error.strerror}). Give another run.") from error


def _kind_of(source: Path) -> str:
    if (source / ".metadata").is_file():
        return "dcp"
    if (source / "latest").is_file() or any(source.glob("*_optim_states.pt")):
        return "zero"
    raise CheckpointError(
        f"SOURCE={source}: not a checkpoint that Weft imports. Give a folder of torch.distributed.checkpoint "
        f"(with .metadata) or of DeepSpeed (with `latest`)."
    )


def run_confined(
    kind: str, source: Path, work: Path, limit_s: float, remedy: str = "Import a checkpoint that you saved yourself."
) -> None:
    """Read files in a child process with limited rights.

    Args:
        kind: kind of the files: "dcp", "zero" or "pickled".
        source: their folder.
        work: empty folder for the output of the process.
        limit_s: maximum time for reading in seconds.
        remedy: advice in the error for files that are rejected.

    Raises:
        CheckpointError: if reading fails or takes too long, with the reason.
    """
    command = [sys.executable, "-P", "-m", "weft.train.weights.foreign_reader", kind, str(source.resolve()), str(work)]
    try:
        ended = subprocess.run(command, env=env.bare_env(), capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            f"SOURCE={source}: reading it took longer than {limit_s:g} s. If the checkpoint is large, raise --limit."
        ) from None
    if ended.returncode == 0:
        return
    lines = ended.stdout.strip().splitlines()
    try:
        reason = json.loads(lines[-1])["refused"]
    except (IndexError, ValueError, KeyError, TypeError):
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1][:200]
        reason = f"the process that reads it ended with exit code {ended.returncode} ({last})"
    raise CheckpointError(f"SOURCE={source}: {reason}. {remedy}")


def _read(work: Path) -> _Found:
    from safetensors import safe_open

    said = json.loads((work / TABLE).read_text())
    handles: dict[int, Any] = {}
    tensors: dict[Place, torch.Tensor] = {}
    for one in said["tensors"]:
        number = one["file"]
        if number not in handles:
            handles[number] = safe_open(str(work / f"{number}.safetensors"), framework="pt", device="cpu")
        tensors[tuple(one["place"])] = handles[number].get_tensor(one["name"])
    values = {tuple(place): value for place, value in said["values"]}
    return _Found(tensors, values, tuple(said["left_out"]))


def _commit(
    found: _Found, kind: str, source: Path, root: Location, step: int | None, model_key: str | None
) -> BroughtIn:
    from weft.optim.step_decision import LossScale

    names = sorted_names(found.tensors, model_key)
    weights = {name: found.tensors[place] for name, place in names.weights.items()}
    states = {name: found.tensors[place] for name, place in names.states.items()}
    states |= _numbers(found.values, names)
    shared = _second_names(weights, states, found.values.get(("shared",)) or {})
    for name in shared:
        del weights[name]
    step = _step(found, states) if step is None else step
    if (root / folder_name(step)).exists():
        raise CheckpointError(f"{root}: already has a checkpoint of step {step}. Give another run, or another --step.")
    state = {
        "progress": {"step": step},
        "plan": f"imported from {_KINDS[kind]}",
        "loss_scale": dict(LossScale().state()),
        "evaluated": False,
        "imported": {"source": str(source), "kind": kind, "shared": shared},
    }
    path = save_checkpoint(root, step, {"model": weights, "optimizer": states}, state)
    left_out = [*(".".join(map(str, place)) for place in names.left_out), *found.left_out]
    return BroughtIn(path, step, _KINDS[kind], len(weights), len(states), tuple(left_out))


def _numbers(values: Mapping[Place, Any], names: SortedNames) -> dict[str, torch.Tensor]:
    """Return states that were saved as plain numbers, such as Adam's step."""
    import torch

    places = [place for place, value in values.items() if type(value) in (int, float)]
    found = sorted_names(
        [*names.weights.values(), *places], ".".join(map(str, next(iter(names.weights.values()))[:-1]))
    )
    return {name: torch.tensor(float(values[place])) for name, place in found.states.items()}


def _second_names(
    weights: Mapping[str, torch.Tensor], states: Mapping[str, torch.Tensor], said: Mapping[str, str]
) -> dict[str, str]:
    """Return the name of the original weight for each alias, such as a tied head.

    Aliases are the names in `said`, and weights of two or more dims that have no optimizer states and are equal to a
    weight that has states.
    """
    import torch

    shared = {name: first for name, first in said.items() if name in weights and first in weights}
    owners = {name.rpartition("/")[0] for name in states}
    if not owners:
        return shared
    for name, tensor in weights.items():
        if name in owners or name in shared or tensor.dim() < 2:
            continue
        twin = next(
            (
                other
                for other in weights
                if other in owners and weights[other].shape == tensor.shape and torch.equal(weights[other], tensor)
            ),
            None,
        )
        if twin is not None:
            shared[name] = twin
    return shared


def _step(found: _Found, states: Mapping[str, torch.Tensor]) -> int:
    """Return the optimizer steps done, from the source or from the optimizer's counter, or raise CheckpointError."""
    for place in (("global_steps",), ("step",), ("global_step",)):
        value = found.values.get(place)
        if type(value) is int and value >= 0:
            return value
        if place in found.tensors and found.tensors[place].numel() == 1:
            return int(found.tensors[place])
    counted = [int(tensor) for name, tensor in states.items() if name.endswith("/step") and tensor.numel() == 1]
    if not counted:
        raise CheckpointError("--step: the checkpoint does not record its optimizer step. Add --step N.")
    return max(counted)


# Pickled weights of a Hugging Face folder, which the child process converts to plain tensors.


def pickled_weights(source: Path, work: Path, limit_s: float) -> tuple[Iterator[tuple[str, RawArray]], list[str]]:
    """Return an iterator over (name, tensor) with one tensor in memory at a time, and the names of other tensors.

    These are quantized, sparse and complex128 tensors, which are left out.

    Args:
        source: folder with pytorch_model.bin, its index, or other pickles of weights.
        work: an empty folder on a disk with space for a second copy of the weights.
        limit_s: maximum time for reading in seconds.

    Raises:
        CheckpointError: if the files cannot be read, or contain anything except weights.
    """
    if not source.is_dir():
        raise CheckpointError(f"SOURCE={source}: there is no such folder. Give the folder of a Hugging Face model.")
    run_confined("pickled", source, work, limit_s, remedy="Give a folder with the weights of a model.")
    said = json.loads((work / TABLE).read_text())
    return _tensors(said["tensors"], work), list(said["left_out"])


def _tensors(table: list[dict[str, Any]], work: Path) -> Iterator[tuple[str, RawArray]]:
    from safetensors import safe_open

    handles: dict[int, Any] = {}
    for one in table:
        number = one["file"]
        if number not in handles:
            handles.clear()  # files follow each other
            handles[number] = safe_open(str(work / f"{number}.safetensors"), framework="pt", device="cpu")
        yield one["place"][0], block_of(handles[number].get_tensor(one["name"]))
