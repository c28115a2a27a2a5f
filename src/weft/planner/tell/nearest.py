"""Where nothing fits: the smallest changes of the question to which the answer is yes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from weft.planner.search import Question, answer
from weft.planner.tell.scenario import Scenario, change
from weft.spec import DeviceSpec
from weft.spec.cluster import devices
from weft.spec.plan import PLAN_FIELDS

#: A look at a few plans is enough to say whether anything fits.
_FEW_PLANS = 60_000
_MOST_DEVICES = 4096


def nearest_yes(question: Question) -> list[Scenario]:
    """Return up to five changed questions that have an answer.

    Fewer decided fields, an adapter, more devices, a larger device, shorter sequences.
    """
    found: list[Scenario] = []
    breaks_rules = bool(question.fixed) and not _keeps_rules(question)
    for ways in (_fewer_words,) if breaks_rules else _WAYS:
        scenario = _first_that_fits(ways(question))
        if scenario is not None:
            found.append(scenario)
    return found


def _first_that_fits(ways: Iterator[tuple[str, Question]]) -> Scenario | None:
    for text, changed in ways:
        asked = replace(changed, most_plans=_FEW_PLANS)
        found = answer(asked)
        if found.best is not None:
            return Scenario(text, asked, found)
    return None


def _changed(question: Question, texts: Iterable[str]) -> Iterator[tuple[str, Question]]:
    return ((text, change(question, text)) for text in texts)


def _fewer_words(question: Question) -> Iterator[tuple[str, Question]]:
    """The decided fields but for one of them, then but for all."""
    names = list(question.fixed)
    for left_out in [*([name] for name in names), *([names] if len(names) > 1 else [])]:
        fixed = {name: value for name, value in question.fixed.items() if name not in left_out}
        words = (f"{name}={PLAN_FIELDS[name].kind.write(question.fixed[name])}" for name in left_out)
        yield f"without {' '.join(words)}", replace(question, fixed=fixed)


def _more_devices(question: Question) -> Iterator[tuple[str, Question]]:
    """The next powers of two; beyond one node, whole nodes of eight."""
    cluster = question.cluster
    count = 1
    while count <= cluster.num_devices:
        count *= 2
    while count <= _MOST_DEVICES:
        per_node = min(count, max(8, cluster.devices_per_node))
        larger = replace(cluster, nodes=count // per_node, devices_per_node=per_node)
        yield f"cluster={count // per_node}x{per_node}x{cluster.device.name}", replace(question, cluster=larger)
        count *= 2


def _larger_devices(question: Question) -> Iterator[tuple[str, Question]]:
    """Known devices of the same maker with more memory, the next one first."""
    cluster = question.cluster
    maker = _maker(cluster.device)
    larger = [
        one
        for one in devices().values()
        if one.memory_bytes > cluster.device.memory_bytes and (not maker or _maker(one) == maker)
    ]
    ranked = sorted(larger, key=lambda one: one.memory_bytes)
    yield from _changed(question, (f"device={one.name}" for one in ranked if _keeps_formats(cluster.device, one)))


def _keeps_formats(now: DeviceSpec, other: DeviceSpec) -> bool:
    """Whether another device multiplies in half precision as today's does: an older one is no way out."""
    return now.peak_flops("bf16") is None or other.peak_flops("bf16") is not None


def _maker(device: DeviceSpec) -> str:
    return device.title.partition(" ")[0]


def _adapters(question: Question) -> Iterator[tuple[str, Question]]:
    """An adapter in place of all weights, on what is there, beside weights in 4 bits; then with shorter sequences."""
    now = question.job.adapter
    if now is not None and now.base != "stored":
        return
    ways = [f"qlora={now.rank}"] if now is not None else ["adapter=16", "qlora=16"]
    if question.model.adapter_of(16).width:
        yield from _changed(question, [*ways, *(f"{way},{shorter}" for way in ways for shorter in _lengths(question))])


def _shorter_sequences(question: Question) -> Iterator[tuple[str, Question]]:
    return _changed(question, _lengths(question))


def _lengths(question: Question) -> Iterator[str]:
    length = question.job.seq_len // 2
    while length >= 512:
        yield f"seq={length}"
        length //= 2


def _keeps_rules(question: Question) -> bool:
    """Whether any plan with the decided fields keeps the rules: else other machines would not help."""
    return answer(replace(question, most_plans=_FEW_PLANS)).num_estimated > 0


_WAYS = (_fewer_words, _adapters, _more_devices, _larger_devices, _shorter_sequences)
