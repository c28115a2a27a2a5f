"""`weft calibrate --hosts` on ranks that torchrun starts, and its errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft import env
from weft.calibrate.links import calibrate_links
from weft.cli.app import run
from weft.errors import ConfigError
from weft.planner.measured.links import OPS, LinkProfile
from weft.planner.measured.profile_tables import this_host


def test_missing_ranks_are_reported_with_the_start_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "--hosts"]) == 2
    assert "Start it on each host, e.g.: torchrun --nnodes 2" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="links need from 5 s to 30 min"):
        calibrate_links(1.0)


@pytest.mark.full
def test_two_hosts_of_two_ranks_are_measured(tmp_path: Path) -> None:
    """Each host is a separate torchrun whose ranks report another host name. All get equal results."""
    hosts = []
    for number in range(2):
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
        words += ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "29763"]
        words += ["-m", "weft", "calibrate", "--hosts", "--budget", "5s"]
        variables = env.child_env(WEFT_HOST=f"h{number}", WEFT_HOME=str(tmp_path / str(number)), OMP_NUM_THREADS="1")
        hosts.append(
            subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = [host.communicate(timeout=500)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert "2 hosts of 2 ranks  two levels" in said[0]
    found = [LinkProfile.load(tmp_path / str(number) / "links.json") for number in range(2)]
    assert found[0].samples == found[1].samples
    assert found[0].machine == this_host()
    assert found[0].layouts == ((1, 2), (2, 1), (2, 2))
    measured = {(one.hosts, one.ranks, one.transport) for one in found[0].samples if one.op == "all_reduce"}
    assert measured == {
        *((1, 2, way) for way in ("shared memory", "gloo exchange", "backend")),
        *((2, 1, way) for way in ("gloo exchange", "backend")),
        *((2, 2, way) for way in ("two levels", "gloo exchange", "backend")),
    }
    assert {one.op for one in found[0].samples} == {*OPS}
    ways = found[0].route_choices(2, 2, "two levels", ("two levels", "gloo exchange"))
    assert ways is not None
    assert ways.seconds("all_reduce", 1 << 20, "two levels") > 0
