"""Where nothing fits: the smallest changes of the question to which the answer is yes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.planner.search import Question, answer
from weft.planner.tell.scenario import Scenario, change
from weft.spec import DeviceSpec
from weft.spec.cluster import devices

#: A look at a few plans is enough to say whether anything fits.
_FEW_PLANS = 60_000
_MOST_DEVICES = 4096


def nearest_yes(question: Question) -> list[Scenario]:
    """Return up to four changed questions that have an answer.

    An adapter, more devices, a larger device, shorter sequences.
    """
    found: list[Scenario] = []
    for ways in (_adapters, _more_devices, _larger_devices, _shorter_sequences):
        scenario = _first_that_fits(question, ways(question))
        if scenario is not None:
            found.append(scenario)
    return found


def _first_that_fits(question: Question, ways: Iterator[str]) -> Scenario | None:
    for text in ways:
        changed = replace(change(question, text), most_plans=_FEW_PLANS)
        found = answer(changed)
        if found.best is not None:
            return Scenario(text, changed, found)
    return None


def _more_devices(question: Question) -> Iterator[str]:
    """The next powers of two; beyond one node, whole nodes of eight."""
    cluster = question.cluster
    count = 1
    while count <= cluster.num_devices:
        count *= 2
    while count <= _MOST_DEVICES:
        per_node = min(count, max(8, cluster.devices_per_node))
        yield f"cluster={count // per_node}x{per_node}x{cluster.device.name}"
        count *= 2


def _larger_devices(question: Question) -> Iterator[str]:
    """Known devices of the same maker with more memory, the next one first."""
    cluster = question.cluster
    maker = _maker(cluster.device)
    larger = [
        one
        for one in devices().values()
        if one.memory_bytes > cluster.device.memory_bytes and (not maker or _maker(one) == maker)
    ]
    for one in sorted(larger, key=lambda one: one.memory_bytes):
        yield f"device={one.name}"


def _maker(device: DeviceSpec) -> str:
    return device.title.partition(" ")[0]


def _adapters(question: Question) -> Iterator[str]:
    """An adapter in place of all weights, on what is there; then with shorter sequences."""
    if question.job.adapter is not None or question.model.traced is not None:
        return
    yield "adapter=16"
    yield from (f"adapter=16,{shorter}" for shorter in _shorter_sequences(question))


def _shorter_sequences(question: Question) -> Iterator[str]:
    length = question.job.seq_len // 2
    while length >= 512:
        yield f"seq={length}"
        length //= 2
