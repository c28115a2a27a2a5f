"""Which of another trainer's tensors are weights, which are states of the optimizer, and of what. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.errors import CheckpointError

#: Where in the saved tables something stands: ("optimizer", "state", "embed.weight", "exp_avg").
Place = tuple[str | int, ...]
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True, slots=True)
class SortedNames:
    """weights: name -> place. states: "weight/state" -> place. left_out: places of what is neither."""

    weights: Mapping[str, Place]
    states: Mapping[str, Place]
    left_out: tuple[Place, ...]


def sorted_names(places: Iterable[Place], model_key: str | None = None) -> SortedNames:
    """Tell weights and states apart. CheckpointError where that cannot be told, with what to type."""
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
    """At which element the states of an optimizer begin: "state", or "state.name..." where names were joined."""
    for number, part in enumerate(place):
        if (part == "state" and len(place) - number == 3) or (isinstance(part, str) and part.startswith("state.")):
            return number
    return None


def _model_of(weights_at: Mapping[Place, list[Place]], states: list[Place], key: str | None) -> Place:
    """The table that holds the weights."""
    if key is not None:
        found = [place for place in weights_at if ".".join(map(str, place)) == key]
        if not found:
            raise CheckpointError(f"--model {key}: this table holds no tensors. {_tables(weights_at)}")
        return found[0]
    owners = {str(place[-2]) for place in states if place[-3:-2] == ("state",)}
    fits = [place for place, members in weights_at.items() if owners <= {str(one[-1]) for one in members}]
    if len(fits) != 1:
        fits = [place for place in fits or weights_at if place and place[-1] in ("model", "module", "state_dict")]
    if len(fits) != 1:
        raise CheckpointError(f"cannot tell which tensors are the model's weights. {_tables(weights_at)}")
    return fits[0]


def _tables(weights_at: Mapping[Place, list[Place]]) -> str:
    known = ", ".join(".".join(map(str, place)) or "(the top)" for place in weights_at) or "none"
    return f"Name their table with --model, one of: {known}."


def _unwrapped(weights: dict[str, Place]) -> dict[str, Place]:
    """Names without what wrappers put before all of them."""
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
    """A joined name as that of its weight and its own: ("b.w", "exp_avg") of "module.b.w.exp_avg"."""
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
