"""Route choice from measured links: the route by size, the same choice on all ranks, and unchanged bits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.comm.reference import data
from tests.comm.test_two_level import on_hosts
from weft.comm.collectives import all_gather, barrier, reduce_scatter, start_all_reduce
from weft.comm.connect import transports
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ConfigError
from weft.planner.measured.links import LinkProfile, LinkSample
from weft.planner.measured.profile_tables import this_host

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)


def profile_of(seconds: dict[str, tuple[float, float]], hosts: int = 2, ranks: int = 2, **changes) -> LinkProfile:
    """Return a synthetic link profile. `seconds` maps a transport to its seconds per call and per byte."""
    samples = tuple(
        LinkSample(op=op, transport=transport, hosts=hosts, ranks=ranks, size=size, seconds=start + size * each)
        for op in ("all_reduce", "all_gather", "reduce_scatter")
        for transport, (start, each) in seconds.items()
        for size in SIZES
    )
    machine = changes.pop("machine", this_host())
    return LinkProfile(
        machine=machine, hosts=hosts, ranks=ranks, samples=samples, made="2026-01-31T12:00:00", took_s=1.0, **changes
    )


#: Two levels take three exchanges but send less: they are faster from 10 ms / 90 ns = 111 kB on.
CROSSING = {"two levels": (0.015, 1e-8), "gloo exchange": (0.005, 1e-7)}


def test_route_changes_between_the_sizes_where_the_faster_one_changes():
    choices = profile_of(CROSSING).route_choices(2, 2, "two levels", ("two levels", "gloo exchange"))
    assert choices is not None
    border = math.isqrt((1 << 14) * (1 << 18))
    assert choices.best["all_reduce"] == [(0, "gloo exchange"), (border, "two levels")]
    assert choices.transport("all_reduce", border - 1, "two levels") == "gloo exchange"
    assert choices.transport("all_reduce", border, "two levels") == "two levels"
    assert choices.transport("all_to_all", 5, "two levels") == "two levels"
    for transport, (start, each) in CROSSING.items():
        assert choices.seconds("all_gather", 1 << 20, transport) == pytest.approx(start + (1 << 20) * each, rel=1e-6)
    # A transport that the axis does not support is not chosen. A layout that was not measured gives no choice.
    assert profile_of(CROSSING).route_choices(2, 2, "two levels", ("two levels",)).best["all_reduce"] == [
        (0, "two levels")
    ]
    assert profile_of(CROSSING).route_choices(3, 2, "two levels", ("two levels",)) is None
    assert profile_of(CROSSING).route_choices(1, 2, "shared memory", ("shared memory",)) is None


def test_small_gains_are_ignored_and_choices_end_above_measured_sizes():
    near = {"two levels": (0.010, 1e-8), "gloo exchange": (0.0095, 1e-8)}
    choices = profile_of(near).route_choices(2, 2, "two levels", ("two levels", "gloo exchange"))
    assert choices is not None
    assert choices.best["all_reduce"] == [(0, "two levels")]
    assert not choices.gains
    faster = {"two levels": (0.010, 1e-8), "gloo exchange": (0.001, 1e-9)}
    choices = profile_of(faster).route_choices(2, 2, "two levels", ("two levels", "gloo exchange"))
    assert choices is not None
    assert choices.best["all_reduce"] == [(0, "gloo exchange"), (4 * SIZES[-1], "two levels")]


def test_link_profile_round_trips_and_errors_name_the_key(tmp_path: Path):
    path = tmp_path / "links.json"
    made = profile_of(CROSSING)
    made.save(path)
    read = LinkProfile.load(path)
    assert (read.samples, read.machine, read.layouts) == (made.samples, made.machine, ((2, 2),))
    table = json.loads(path.read_text())
    for change, message in (
        ({"weft_links": 2}, "weft_links=2: this Weft reads version 1"),
        ({"more": 1}, "unknown key 'more'"),
        ({"samples": [{**table["samples"][0], "seconds": -1.0}]}, "seconds=-1.0 is not a time"),
    ):
        path.write_text(json.dumps({**table, **change}))
        with pytest.raises(ConfigError, match=message):
            LinkProfile.load(path)
    with pytest.raises(ConfigError, match=r"cannot be read .*weft calibrate --hosts"):
        LinkProfile.load(tmp_path / "none.json")


def sums(path: str) -> tuple[list[torch.Tensor], int, list]:
    """Reduce and gather small and large tensors, waiting in another order on some ranks.

    Return the results, the bytes sent off host and the chosen transports.
    """
    ledger = Ledger()
    mesh = build_mesh(Plan(dp_replicate=4), record=ledger.record, link_profile=path)
    axis = mesh.data
    barrier(axis)
    ledger.clear()
    found: list[torch.Tensor] = []
    for numel in (5, 12288, 400_000):
        mine = data(mesh.rank, numel, torch.float32)
        large, small = start_all_reduce(mine.clone(), axis), start_all_reduce(mine[:3].clone(), axis)
        order = (large, small) if mesh.rank in (1, 2) else (small, large)
        found += [one.wait().clone() for one in order][:: 1 if mesh.rank in (1, 2) else -1]
        found += [all_gather(mine, axis), reduce_scatter(mine[: numel // 4 * 4], axis)]
    return found, ledger.off_host_bytes(), transports(mesh)


def test_measured_routes_do_not_change_bits(ranks4, tmp_path: Path):
    path = tmp_path / "links.json"
    profile_of(CROSSING).save(path)
    flat = ranks4.run(sums, "")
    found = ranks4.run(on_hosts, 2, sums, str(path))
    fixed = ranks4.run(on_hosts, 2, sums, "")
    for one, other, third in zip(found, flat, fixed, strict=True):
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one[0], other[0], third[0], strict=True))
        (choice,) = one[2]
        assert choice.transport == "two levels or gloo exchange"
        assert choice.reason == (
            "2 hosts hold 2 neighboring ranks each; links were measured on 2026-01-31T12:00:00: all_reduce below "
            "64.0 KiB by gloo exchange (0.34 of the time), reduce_scatter below 64.0 KiB by gloo exchange (0.34 of "
            "the time), all_gather below 64.0 KiB by gloo exchange (0.34 of the time)"
        )
        assert choice.planned_s > 3 * 4 * 0.005
        assert third[2][0].planned_s is None
    # Small tensors take the flat route, which sends more bytes between hosts for the 49 kB of 12,288 values.
    assert sum(one[1] for one in found) > sum(one[1] for one in fixed)


def reason_of(path: str) -> str:
    mesh = build_mesh(Plan(dp_replicate=4), link_profile=path)
    try:
        barrier(mesh.data)
    except ConfigError as error:
        return str(error)
    return transports(mesh)[0].reason


def test_unusable_profile_is_reported_on_all_ranks(ranks4, tmp_path: Path):
    path = tmp_path / "links.json"
    assert set(ranks4.run(on_hosts, 2, reason_of, str(path))) == {
        f"links={path}: the file cannot be read (No such file or directory). Measure the links again with: weft "
        "calibrate --hosts"
    }
    profile_of(CROSSING, hosts=3).save(path)
    assert all(
        f"{path} has no measurement of 2 hosts of 2 ranks" in one
        for one in ranks4.run(on_hosts, 2, reason_of, str(path))
    )
    import dataclasses

    profile_of(CROSSING, machine=dataclasses.replace(this_host(), torch="1.0")).save(path)
    assert all("measured with torch 1.0, here" in one for one in ranks4.run(on_hosts, 2, reason_of, str(path)))
