"""Placement of unequal device groups on a grid of pipeline stages and data ranks, with split and shares.

A group is the devices that share the layers of one stage of one replica (tp), as fast as its slowest device. All
replicas have the same split. The slowest replica decides the time of a step under 1F1B:

    n / m * (sum of stage times + (m - 1) * longest stage time),  stage time = layers * seconds per layer and sample

with n samples in m microbatches. `exact` tries every placement and every split. `anneal` is for more devices.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: A placement: for each stage, the kind of the group of each data rank.
Grid = tuple[tuple[int, ...], ...]
#: Largest number of splits that `exact` enumerates for several replicas, and of grid cells times splits in one array.
_MOST_SPLITS, _AT_ONCE = 200_000, 4_000_000
#: Moves of one annealing, restarts, and the first and last temperature relative to the time of a step.
_MOVES, _RESTARTS, _HOT, _COLD = 500, 3, 0.1, 1e-4
#: Moves times grid cells of a large cluster, whose starts are close to the best, and the fewest moves.
_MOVED_CELLS, _FEWEST = 12_000, 40


@dataclass(frozen=True, slots=True)
class GroupKind:
    """A kind of device group.

    Attributes:
        layer_s: seconds of one layer for one sample.
        most_states: largest number of layers whose states fit, if no sample is computed.
        sample_states: layers whose states have the size of the activations of one layer for one sample.
    """

    layer_s: float
    most_states: float = math.inf
    sample_states: float = 0.0


@dataclass(frozen=True, slots=True)
class GridProblem:
    """Groups to be placed, and the sizes of the grid.

    Attributes:
        kinds: kinds of groups.
        counts: number of groups of each kind; their sum is pp * dp.
        pp, dp: stages, and replicas that read different samples.
        layers: layers of the model.
        samples: samples of a step.
        microbatches: microbatches of one replica.
        before, after: work of the embedding and of the head, in layers.
        given_counts, given_split: samples of each replica and layers of each stage, if the user fixed them; () if not.
    """

    kinds: tuple[GroupKind, ...]
    counts: tuple[int, ...]
    pp: int
    dp: int
    layers: int
    samples: int
    microbatches: int
    before: float = 0.0
    after: float = 0.0
    given_counts: tuple[int, ...] = ()
    given_split: tuple[int, ...] = ()

    @property
    def extras(self) -> Floats:
        """Work of each stage in addition to its layers, in layers."""
        found = np.zeros(self.pp)
        if self.pp > 1:
            found[0] += self.before
            found[-1] += self.after
        else:
            found[0] += self.before + self.after
        return found

    @property
    def least_s(self) -> float:
        """Seconds of a step in which all groups are busy all the time. No placement is faster."""
        speed = sum(count / kind.layer_s for kind, count in zip(self.kinds, self.counts, strict=True))
        return self.samples * (self.layers + self.before + self.after) / speed


@dataclass(frozen=True, slots=True)
class GridPlacement:
    """A placement with its split and shares. `counts` are samples of each replica. `seconds` is inf if nothing fits."""

    seconds: float
    grid: Grid = ()
    split: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


# Times of many placements and splits in one array. P = placements, K = splits, S = stages, D = data ranks.


def _timed(problem: GridProblem, seconds_PSD: Floats, splits_KS: Floats) -> Floats:
    """Return the seconds per sample of each replica (P, K, D)."""
    loads = splits_KS + problem.extras
    stages = loads[None, :, :, None] * seconds_PSD[:, None]
    many = problem.microbatches
    return (stages.sum(2) + (many - 1) * stages.max(2)) / many


def _room(problem: GridProblem, grids: Sequence[Grid], splits_KS: Floats) -> Floats:
    """Return the most samples of each replica that fit into memory (P, K, D), at most all samples."""
    most = np.array([kind.most_states for kind in problem.kinds])
    per_sample = np.array([kind.sample_states for kind in problem.kinds])
    held = min(problem.microbatches, problem.pp) / problem.microbatches
    cells = np.array(grids)
    left = most[cells][:, None] - splits_KS[None, :, :, None]
    each = splits_KS[None, :, :, None] * per_sample[cells][:, None] * held
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(left < 0, 0.0, np.where(each > 0, left / each, np.inf))
    return np.minimum(found.min(2), problem.samples)


def divided(problem: GridProblem, cost_D: Floats, room_D: Floats) -> tuple[Floats, Floats]:
    """Return whole samples of each replica that minimize the slowest replica's time, and that time.

    Leading dimensions are independent problems. The time is inf if the samples do not fit.

    Args:
        cost_D: seconds per sample of each replica (..., D).
        room_D: most samples of each replica (..., D).
    """
    room = np.floor(room_D)
    if problem.given_counts:  # replicas may be exchanged, so the fastest one gets the most samples
        counts = np.empty_like(cost_D)
        most_first = np.broadcast_to(np.sort(problem.given_counts)[::-1].astype(np.float64), cost_D.shape)
        np.put_along_axis(counts, cost_D.argsort(-1, kind="stable"), most_first, -1)
        fits = (counts <= room).all(-1) & (counts.min(-1) >= problem.microbatches)
        return counts, np.where(fits, (counts * cost_D).max(-1), np.inf)
    bound = problem.samples / (1.0 / cost_D).sum(-1, keepdims=True)
    counts = np.minimum(np.maximum(np.floor(bound / cost_D), problem.microbatches), room)
    # Every replica needs a sample in each microbatch. Then give back from the one that is latest.
    for _ in range(problem.dp * (problem.microbatches + 1)):
        over = counts.sum(-1) > problem.samples
        if not over.any():
            break
        times = np.where(counts > problem.microbatches, counts * cost_D, -np.inf)
        last = times.argmax(-1)
        np.put_along_axis(
            counts, last[..., None], np.take_along_axis(counts, last[..., None], -1) - over[..., None], -1
        )
    while True:
        missing = counts.sum(-1) < problem.samples
        following = np.where(counts < room, (counts + 1) * cost_D, np.inf)
        first = following.argmin(-1)
        able = missing & np.isfinite(np.take_along_axis(following, first[..., None], -1)[..., 0])
        if not able.any():
            break
        np.put_along_axis(
            counts, first[..., None], np.take_along_axis(counts, first[..., None], -1) + able[..., None], -1
        )
    fits = (counts.sum(-1) == problem.samples) & (counts.min(-1) >= problem.microbatches)
    return counts, np.where(fits, (counts * cost_D).max(-1), np.inf)


def evaluate(problem: GridProblem, grid: Grid, split: Sequence[int]) -> GridPlacement:
    """Return the best shares of one placement with one split."""
    seconds = np.array([[problem.kinds[kind].layer_s for kind in row] for row in grid])[None]
    splits = np.array([split], float)
    counts, times = divided(problem, _timed(problem, seconds, splits), _room(problem, [grid], splits))
    found = tuple(int(count) for count in counts[0, 0])
    return GridPlacement(float(times[0, 0]), grid, tuple(split), found)


def in_given_order(problem: GridProblem, placed: GridPlacement) -> GridPlacement:
    """Return a placement with its replicas in the order of `given_counts`, or unchanged if none are given."""
    if not problem.given_counts or not placed.grid:
        return placed
    wanted, found = problem.given_counts, placed.counts
    places = sorted(range(problem.dp), key=lambda rank: wanted[rank])
    replica = dict(zip(places, sorted(range(problem.dp), key=lambda rank: found[rank]), strict=True))
    rows = tuple(tuple(row[replica[rank]] for rank in range(problem.dp)) for row in placed.grid)
    return GridPlacement(placed.seconds, rows, placed.split, wanted)


# All placements and splits.


def placements(problem: GridProblem) -> Iterator[Grid]:
    """Yield the placements that differ: replicas may be exchanged, and so may stages with equal extra work."""
    extras: list[float] = problem.extras.tolist()
    seen: set[Grid] = set()
    for order in _arrangements(list(problem.counts), problem.pp * problem.dp):
        grid = [order[stage * problem.dp : (stage + 1) * problem.dp] for stage in range(problem.pp)]
        rows = _transposed(sorted(_transposed(grid)))
        for work in sorted(set(extras)):
            own = [stage for stage in range(problem.pp) if extras[stage] == work]
            for stage, row in zip(own, sorted(rows[stage] for stage in own), strict=True):
                rows[stage] = row
        found = tuple(_transposed(sorted(_transposed(rows))))
        if found not in seen:
            seen.add(found)
            yield found


def _transposed(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [*zip(*rows, strict=True)]


def _arrangements(left: list[int], length: int) -> Iterator[tuple[int, ...]]:
    """Yield every different sequence of kinds with these counts."""
    if not length:
        yield ()
        return
    for kind, count in enumerate(left):
        if count:
            left[kind] -= 1
            for rest in _arrangements(left, length - 1):
                yield (kind, *rest)
            left[kind] += 1


def all_splits(layers: int, stages: int) -> NDArray[np.float64]:
    """Return every split of the layers into stages with at least one layer each, (splits, stages)."""
    cuts = itertools.combinations(range(1, layers), stages - 1)
    ends = np.array([(0, *cut, layers) for cut in cuts], float)
    return np.diff(ends, axis=1)


def exact(problem: GridProblem) -> GridPlacement:
    """Return the best placement, split and shares, by trying all.

    Raises:
        ValueError: if there are more splits than can be tried for several replicas.
    """
    if problem.pp > problem.layers:
        return GridPlacement(math.inf)
    if problem.dp == 1 and not problem.given_split:
        return min((split_of_one(problem, grid) for grid in placements(problem)), key=lambda one: one.seconds)
    if not problem.given_split and math.comb(problem.layers - 1, problem.pp - 1) > _MOST_SPLITS:
        raise ValueError(f"{problem.layers} layers in {problem.pp} stages have too many splits to try all")
    given = problem.given_split
    splits = np.array([given], float) if given else all_splits(problem.layers, problem.pp)
    size = max(1, _AT_ONCE // (len(splits) * problem.pp * problem.dp))
    best, found = math.inf, GridPlacement(math.inf)
    grids = placements(problem)
    while True:
        chunk: list[Grid] = list(itertools.islice(grids, size))
        if not chunk:
            return found
        seconds = np.array([[[problem.kinds[kind].layer_s for kind in row] for row in grid] for grid in chunk])
        cost = _timed(problem, seconds, splits)
        # No whole numbers of samples are faster than fractions of them.
        least = problem.samples / (1.0 / cost).sum(-1)
        rows, columns = np.nonzero(least < best)
        order = np.argsort(least[rows, columns], kind="stable")
        room = _room(problem, chunk, splits)
        for start in range(0, len(order), 256):
            some = order[start : start + 256]
            if least[rows[some[0]], columns[some[0]]] >= best:
                break
            where = rows[some], columns[some]
            counts, times = divided(problem, cost[where], room[where])
            index = int(times.argmin())
            if times[index] < best:
                best = float(times[index])
                split = tuple(int(size) for size in splits[where[1][index]])
                found = GridPlacement(
                    best, chunk[int(where[0][index])], split, tuple(int(one) for one in counts[index])
                )


def split_of_one(problem: GridProblem, grid: Grid) -> GridPlacement:
    """Return the best split of a single replica with this placement, by every bound on the longest stage."""
    kinds = [problem.kinds[row[0]] for row in grid]
    extras, many, samples = problem.extras, problem.microbatches, problem.samples
    held = min(many, problem.pp) / many * samples
    caps = [math.floor(min(problem.layers, kind.most_states / (1 + kind.sample_states * held))) for kind in kinds]
    if min(caps) < 1 or samples < many:
        return GridPlacement(math.inf, grid)
    best, found = math.inf, ()
    order = sorted(range(problem.pp), key=lambda stage: kinds[stage].layer_s)
    bounds = {
        (count + extras[stage]) * kind.layer_s
        for stage, kind in enumerate(kinds)
        for count in range(1, caps[stage] + 1)
    }
    for bound in sorted(bounds):
        most = [
            min(cap, math.floor(bound / kind.layer_s - extra + 1e-9))
            for cap, kind, extra in zip(caps, kinds, extras, strict=True)
        ]
        if min(most) < 1 or sum(most) < problem.layers:
            continue
        counts, left = [1] * problem.pp, problem.layers - problem.pp
        for stage in order:  # the fastest first, for the smallest sum
            more = min(left, most[stage] - 1)
            counts[stage] += more
            left -= more
        times = [(count + extra) * kind.layer_s for count, extra, kind in zip(counts, extras, kinds, strict=True)]
        seconds = samples / many * (sum(times) + (many - 1) * max(times))
        if seconds < best:
            best, found = seconds, tuple(counts)
    return GridPlacement(best, grid, found, (samples,)) if found else GridPlacement(math.inf, grid)


# Annealing, for more devices than `exact` supports.


def moves_for(problem: GridProblem) -> int:
    """Return the moves of one annealing, fewer for large grids, whose moves take longer."""
    return max(_FEWEST, min(_MOVES, _MOVED_CELLS // (problem.pp * problem.dp)))


def anneal(problem: GridProblem, seed: int = 0, moves: int = _MOVES, restarts: int = _RESTARTS) -> GridPlacement:
    """Return a good placement, split and shares by simulated annealing. The result is a function of the arguments.

    A move exchanges two groups of different kinds, or moves layers between two stages. Restarts begin with equal groups
    in each stage, with equal groups in each replica, and at random.
    """
    if problem.pp > problem.layers:
        return GridPlacement(math.inf)
    draw, best = random.Random(seed), GridPlacement(math.inf)
    for number in range(restarts):
        grid = _start(problem, number, draw)
        split = _balanced(problem, grid)
        now = evaluate(problem, _frozen(grid), split)
        best = min(best, now, key=lambda one: one.seconds)
        for move in range(moves):
            heat = _HOT * (_COLD / _HOT) ** (move / moves)
            tried, its_split = _moved(problem, now, draw)
            then = evaluate(problem, tried, its_split)
            worse = (then.seconds - now.seconds) / now.seconds if math.isfinite(now.seconds) else -1.0
            if not worse > 0 or draw.random() < math.exp(-worse / heat):
                now = then
                best = min(best, now, key=lambda one: one.seconds)
    return best


def _frozen(grid: Sequence[Sequence[int]]) -> Grid:
    return tuple(tuple(row) for row in grid)


def _start(problem: GridProblem, number: int, draw: random.Random) -> list[list[int]]:
    fastest = sorted(range(len(problem.kinds)), key=lambda kind: problem.kinds[kind].layer_s)
    order = [kind for kind in fastest for _ in range(problem.counts[kind])]
    if number >= 2:
        draw.shuffle(order)
    if number == 1:  # equal groups in each replica
        return [[order[rank * problem.pp + stage] for rank in range(problem.dp)] for stage in range(problem.pp)]
    return [order[stage * problem.dp : (stage + 1) * problem.dp] for stage in range(problem.pp)]


def _balanced(problem: GridProblem, grid: Sequence[Sequence[int]]) -> list[int]:
    """Return the given split, or layers one after another to the stage that is done first."""
    if problem.given_split:
        return list(problem.given_split)
    speeds = [sum(1.0 / problem.kinds[kind].layer_s for kind in row) for row in grid]
    extras, counts = problem.extras, [1] * problem.pp
    heap = [((2 + extras[stage]) / speeds[stage], stage) for stage in range(problem.pp)]
    heapq.heapify(heap)
    for _ in range(problem.layers - problem.pp):
        _, stage = heap[0]
        counts[stage] += 1
        heapq.heapreplace(heap, ((counts[stage] + 1 + extras[stage]) / speeds[stage], stage))
    return counts


def _moved(problem: GridProblem, now: GridPlacement, draw: random.Random) -> tuple[Grid, list[int]]:
    """Return a neighbor: a placement and a split."""
    grid, split = [list(row) for row in now.grid], list(now.split)
    kind = draw.random()
    if problem.pp > 1 and not problem.given_split and (kind < 0.5 or len({one for row in grid for one in row}) == 1):
        givers = [stage for stage in range(problem.pp) if split[stage] > 1]
        if givers:
            giver = draw.choice(givers)
            taker = draw.choice([stage for stage in range(problem.pp) if stage != giver])
            several = draw.randint(1, max(1, (split[giver] - 1) // 2)) if kind < 0.1 else 1
            split[giver] -= several
            split[taker] += several
        return _frozen(grid), split
    cells = [(stage, rank) for stage in range(problem.pp) for rank in range(problem.dp)]
    one, other = draw.sample(cells, 2) if len(cells) > 1 else (cells[0], cells[0])
    for _ in range(8):
        if grid[one[0]][one[1]] != grid[other[0]][other[1]]:
            break
        other = draw.choice(cells)
    grid[one[0]][one[1]], grid[other[0]][other[1]] = grid[other[0]][other[1]], grid[one[0]][one[1]]
    # A new placement usually needs another split.
    return _frozen(grid), _balanced(problem, grid) if draw.random() < 0.5 else split
