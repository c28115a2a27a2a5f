"""Placement of unequal groups: the exact search against trying everything, and annealing against the exact search."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from weft.planner.mixed.placement import GridProblem, GroupKind, anneal, evaluate, exact


def random_problems(seed: int) -> list[GridProblem]:
    """Return the grids of a random cluster of 8 devices of up to four kinds."""
    draw = random.Random(seed)
    kinds = tuple(GroupKind(1 / draw.uniform(0.2, 1)) for _ in range(draw.randint(2, 4)))
    devices = [draw.randrange(len(kinds)) for _ in range(8)]
    counts = tuple(map(devices.count, range(len(kinds))))
    layers, samples, passes = draw.choice([12, 16, 24, 32]), draw.choice([32, 64, 128]), draw.choice([4, 8])
    return [
        GridProblem(kinds, counts, pp, dp, layers, samples, min(passes, samples // dp), 0.2, draw.choice([0, 0.7]))
        for pp, dp in ((1, 8), (2, 4), (4, 2), (8, 1))
    ]


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    return [
        tuple(end - start for start, end in zip((0, *cut), (*cut, total), strict=True))
        for cut in itertools.combinations(range(1, total), parts - 1)
    ]


def step_s(problem: GridProblem, grid, split, counts) -> float:
    """Return the time of a step by the formula of one replica, written out."""
    extras = [0.0] * problem.pp
    extras[0] += problem.before
    extras[-1] += problem.after
    longest = 0.0
    for rank, count in enumerate(counts):
        stages = [
            (split[stage] + extras[stage]) * problem.kinds[grid[stage][rank]].layer_s for stage in range(problem.pp)
        ]
        each = count / problem.microbatches
        longest = max(longest, each * (sum(stages) + (problem.microbatches - 1) * max(stages)))
    return longest


@pytest.mark.parametrize(
    ("pp", "dp", "counts"), [(1, 4, (2, 1, 1)), (2, 2, (1, 2, 1)), (4, 1, (2, 1, 1)), (3, 1, (1, 1, 1))]
)
def test_exact_search_is_the_best_of_everything(pp, dp, counts):
    kinds = (GroupKind(1.0), GroupKind(1.9), GroupKind(3.3))
    problem = GridProblem(kinds, counts, pp, dp, layers=6, samples=9, microbatches=2, before=0.3, after=0.8)
    devices = [kind for kind, count in enumerate(counts) for _ in range(count)]
    best = min(
        step_s(problem, [order[stage * dp : (stage + 1) * dp] for stage in range(pp)], split, samples)
        for order in set(itertools.permutations(devices))
        for split in compositions(6, pp)
        for samples in compositions(9, dp)
        if min(samples) >= 2
    )
    found = exact(problem)
    assert found.seconds == pytest.approx(best, rel=1e-12)
    assert step_s(problem, found.grid, found.split, found.counts) == pytest.approx(best, rel=1e-12)
    assert sorted(kind for row in found.grid for kind in row) == devices


def compare(seeds: range) -> list[float]:
    """Return annealed over exact seconds of the best grid of each random cluster."""
    ratios = []
    for seed in seeds:
        problems = random_problems(seed)
        annealed = min(anneal(problem, seed).seconds for problem in problems)
        ratios.append(annealed / min(exact(problem).seconds for problem in problems))
    return ratios


def test_annealing_is_close_to_the_exact_answer():
    assert max(compare(range(2))) <= 1.01


@pytest.mark.full
def test_annealing_is_within_one_percent_in_95_of_100_clusters():
    ratios = compare(range(200))
    assert sum(ratio <= 1.01 for ratio in ratios) >= 190


def test_annealing_is_a_function_of_its_arguments():
    problem = random_problems(3)[1]
    assert anneal(problem, 7, moves=60) == anneal(problem, 7, moves=60)


def test_samples_follow_the_room_in_memory():
    """A fast group without room for its share gets less, and one without room for its layers is never used."""
    kinds = (GroupKind(1.0, most_states=8.0, sample_states=0.25), GroupKind(4.0))
    problem = GridProblem(kinds, (1, 1), 1, 2, layers=4, samples=10, microbatches=1)
    found = exact(problem)
    assert sorted(found.counts) == [4, 6]  # 8 = 4 layers + 4 samples x 4 layers x 0.25
    assert found.seconds == pytest.approx(96.0)
    none = GridProblem((GroupKind(1.0, most_states=3.0), GroupKind(4.0)), (1, 1), 1, 2, 4, 10, 1)
    assert exact(none).seconds == math.inf
    assert anneal(none, moves=20).seconds == math.inf


def test_every_replica_has_a_sample_in_each_microbatch():
    problem = GridProblem((GroupKind(1.0), GroupKind(100.0)), (1, 1), 1, 2, layers=2, samples=8, microbatches=3)
    assert sorted(exact(problem).counts) == [3, 5]
    assert evaluate(GridProblem((GroupKind(1.0),), (2,), 1, 2, 2, 5, 3), ((0, 0),), (2,)).seconds == math.inf
