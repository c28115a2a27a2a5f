"""Launching: real processes that run small programs. Every test has a time limit and checks that no process remains."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from weft.cli.app import show_error
from weft.cli.console import print_line
from weft.cli.launch import fork_server as fork_client
from weft.cli.launch.failure import Failure, write_failure
from weft.cli.launch.launch import launch_ranks
from weft.cli.launch.start import Programs
from weft.cli.launch.switchboard import switchboard
from weft.errors import LaunchError, WeftError
from weft.train.folder import run_lock

LIMIT_S = 40.0

# Launchers are forked from a server that has imported torch once. This saves a second in each test.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["weft.comm.mesh", "tests.cli.test_launch"])


def launcher(
    command: list[str],
    by: str,
    ranks: int,
    logs: Path,
    out: str,
    err: str,
    grace_s: float,
    peer_grace_s: float,
    settings: bytes,
) -> None:
    """Run the launcher in a separate process that ends like `weft train`.

    by: whether ranks are "forks" of a server, or "programs". out, err: files for its standard streams.
    """
    for descriptor, path in ((1, out), (2, err)):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, descriptor)
        os.close(target)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    code = 0
    graces = {"grace_s": grace_s, "peer_grace_s": peer_grace_s}
    try:
        with run_lock(logs.parent / "held") as lock, ExitStack() as over:
            starter = Programs(command)
            if by == "forks":
                fork_client._PROGRAM = tuple(command[:-1])
                starter = over.enter_context(closing(fork_client.ForkServer(logs, {}, ["json"], starter)))
            launch_ranks(starter, ranks, logs, settings=settings, lock=lock, notice=print_line, **graces)
    except WeftError as error:
        show_error(error)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


RANK = """
import contextlib, ctypes, os, signal, sys, threading, time
from pathlib import Path
from weft import env
from weft.cli.launch.switchboard import launcher_line
from weft.cli.launch.rank import run_as_rank
from weft.errors import DataError
logs = Path(sys.argv[1])
def ready():
    (logs / f"draft_{place.rank}").write_text(str(os.getpid()))
    os.replace(logs / f"draft_{place.rank}", logs / f"ready_{place.rank}")
def wait_for(name):
    while not (logs / name).exists():
        time.sleep(0.01)
def wait_for_zombie(pid):
    with contextlib.suppress(OSError):  # collected already
        while ") Z" not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.001)
def stop_softly():
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ready()
    while not stop.is_set():
        time.sleep(0.01)
def body(terminal):
"""

BOTH = ["forks", "programs"]

#: How the program continues: as a rank, or as the server that becomes one in each fork. Ranks that do not connect need
#: no store, and importing torch to host one costs two CPU seconds in each test.
ENDING = """
def host_nothing(parent, told, held):
    os.write(told, b"1")
    os.close(told)
    os.read(held, 1)
    os._exit(0)
def main(said=""):
    global place, line
    place, line = env.rank_env(), launcher_line()
    run_as_rank(logs, place, body, line)
if env.rank_env() is None:
    from weft.cli.launch import rank
    from weft.cli.launch import fork_server
    rank.main = main
    if not MEETS:
        fork_server._host_store = host_nothing
    fork_server.main()
else:
    main()
"""


def script_of(body: str, *, meets: bool = False) -> str:
    """Return a rank's program. meets: whether its ranks have a rendezvous store."""
    return f"MEETS = {meets}\n" + RANK + textwrap.indent(textwrap.dedent(body), "    ") + ENDING


class Launched:
    """One launcher process with its ranks."""

    def __init__(
        self,
        folder: Path,
        body: str,
        *,
        by: str = "forks",
        ranks: int = 2,
        grace_s: float = 20,
        peer_grace_s: float = 2,
        command: list[str] | None = None,
        streams: str = "",
        settings: bytes = b"",
        meets: bool = False,
    ):
        self.logs = folder / "logs"
        program = folder / "rank.py"
        program.write_text(script_of(body, meets=meets))
        self._out, self._err = folder / "out", folder / "err"
        command = command or [sys.executable, str(program), str(self.logs)]
        streams_of = (streams or str(self._out), streams or str(self._err))
        self.process = FORKSERVER.Process(
            target=launcher, args=(command, by, ranks, self.logs, *streams_of, grace_s, peer_grace_s, settings)
        )
        self.process.start()

    def signal(self, signum: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def end(self) -> tuple[int | None, str, str]:
        """Return exit code, stdout and stderr."""
        self.process.join(LIMIT_S)
        return self.process.exitcode, self._out.read_text(), self._err.read_text()

    def wait_ready(self, ranks: int = 2) -> list[int]:
        """Return the ranks' process ids after each has called `ready()`."""
        files = [self.logs / f"ready_{rank}" for rank in range(ranks)]
        wait_until(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def log(self, rank: int) -> str:
        return (self.logs / f"rank_{rank}.log").read_text()


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def launch(tmp_path: Path) -> Generator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(body: str, **options: float) -> Launched:
        started.append(Launched(tmp_path, body, **options))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.is_alive():
            for child in psutil.Process(launched.process.pid).children(recursive=True):
                child.kill()
            launched.process.kill()
        launched.process.join(10)


def test_output_of_python_and_compiled_code_is_in_the_ranks_log(launch):
    launched = launch("""
        print("from python", place.rank)
        ctypes.CDLL(None).puts(b"from C")
        ctypes.CDLL(None).fflush(None)
        os.system("echo from a child")
        print("to stderr", file=sys.stderr)
        if terminal is not None:
            print("seen by the user", file=terminal)
    """)
    code, out, err = launched.end()
    assert (code, out, err) == (0, "seen by the user\n", "")
    for rank in (0, 1):
        log = launched.log(rank)
        assert log.startswith(f"--- rank {rank} of 2, pid ")
        for line in (f"from python {rank}", "from C", "from a child", "to stderr"):
            assert line in log.splitlines()


def test_logs_are_appended_to_and_old_error_is_removed(launch, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").write_text("an earlier start\n")
    write_failure(tmp_path / "logs", Failure(0, 7, kind="DataError", message="old", expected=True, when=time.time()))
    launched = launch("print('again')")
    assert launched.end()[0] == 0
    assert launched.log(0).startswith("an earlier start\n--- rank 0 of 2")
    assert not (tmp_path / "logs" / "rank_0.error.json").exists()


@pytest.mark.parametrize("by", BOTH)
def test_crash_shows_traceback_once_and_ends_peers(launch, by):
    launched = launch(
        """
        ready()
        if place.rank == 1:
            wait_for("ready_0")
            raise ValueError("boom")
        time.sleep(60)
    """,
        by=by,
    )
    code, out, err = launched.end()
    assert code == 1
    assert out == ""
    assert err.count("Traceback (most recent call last)") == 1
    assert "ValueError: boom" in err
    assert "error: rank 1 failed: ValueError: boom" in err
    assert f"(rank 1; its output is in {launched.logs / 'rank_1.log'})" in err
    assert "torch" not in err
    assert "ValueError: boom" in launched.log(1)
    assert not any(map(is_running, launched.wait_ready()))


@pytest.mark.parametrize("by", BOTH)
def test_weft_error_shows_only_its_message_and_keeps_its_exit_code(launch, by):
    launched = launch(
        """
        ready()
        if place.rank == 0:
            wait_for("ready_1")
            raise DataError("data.train=x: there is no such file. Check the path.")
        time.sleep(60)
    """,
        by=by,
    )
    code, _, err = launched.end()
    assert code == 2
    assert err.splitlines() == [
        "error: data.train=x: there is no such file. Check the path.",
        f"  (rank 0; its output is in {launched.logs / 'rank_0.log'})",
    ]


@pytest.mark.parametrize("code", [3, 75])
def test_sys_exit_keeps_its_code(launch, code):
    launched = launch(f"sys.exit({code})")
    seen, _, err = launched.end()
    assert seen == code
    assert f"exited with code {code}" in err


@pytest.mark.parametrize("by", BOTH)
def test_killed_rank_is_named_with_its_signal(launch, by):
    launched = launch(
        """
        ready()
        time.sleep(60)
    """,
        by=by,
    )
    pids = launched.wait_ready()
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 1
    assert "error: rank 1 was killed by signal 9 (SIGKILL). Is the machine out of memory?" in err
    assert not any(map(is_running, pids))


def test_hanging_rank_is_not_waited_for_after_another_was_killed(launch):
    launched = launch(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready()
        time.sleep(60)
        """,
        peer_grace_s=20,
    )
    pids = launched.wait_ready()
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 1
    assert "error: rank 1 was killed by signal 9 (SIGKILL)" in err
    assert time.monotonic() - began < 10
    assert not any(map(is_running, pids))


def test_segfault_leaves_the_python_stack_in_the_log(launch):
    launched = launch("""
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)
    """)
    code, _, err = launched.end()
    assert code == 1
    assert "rank 1 was killed by signal 11 (SIGSEGV)" in err
    assert "Fatal Python error: Segmentation fault" in launched.log(1)


def test_killed_rank_is_named_instead_of_the_disconnected_peer(launch):
    launched = launch("""
        ready()
        if place.rank == 0:
            wait_for("ready_1")
            wait_for_zombie(int((logs / "ready_1").read_text()))
            raise RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1")
        time.sleep(60)
    """)
    os.kill(launched.wait_ready()[1], signal.SIGKILL)
    assert "rank 1 was killed by signal 9" in launched.end()[2]


def test_killed_rank_is_named_if_launcher_kills_another(launch):
    launched = launch(
        """
        if place.rank == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready()
        if place.rank == 0:
            wait_for("ready_1")
            wait_for("ready_2")
            wait_for_zombie(int((logs / "ready_1").read_text()))
            raise RuntimeError("Connection closed by peer")
        time.sleep(60)
        """,
        ranks=3,
        peer_grace_s=0.5,
    )
    os.kill(launched.wait_ready(3)[1], signal.SIGKILL)
    assert "error: rank 1 was killed by signal 9" in launched.end()[2]


def test_two_simultaneous_failures_give_one_report(launch):
    launched = launch("""
        ready()
        wait_for(f"ready_{1 - place.rank}")
        raise ValueError(f"boom of {place.rank}")
    """)
    code, _, err = launched.end()
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.count("error: rank ") == 1


def test_peer_that_ignores_sigterm_after_a_failure_is_killed(launch):
    launched = launch(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready()
        if place.rank == 0:
            wait_for("ready_1")
            raise ValueError("boom")
        time.sleep(60)
        """,
        peer_grace_s=0.5,
    )
    pids = launched.wait_ready()
    begin = time.monotonic()
    code, _, err = launched.end()
    assert (code, time.monotonic() - begin < 10) == (1, True)
    assert "rank 0 failed: ValueError: boom" in err
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_ranks_save_after_a_signal_and_exit_with_0(launch, signum):
    launched = launch("stop_softly()\ntime.sleep(0.3)\nprint('saved')")
    launched.wait_ready()
    launched.signal(signum)
    seen, _, err = launched.end()
    assert seen == 0
    first, last = err.splitlines()
    assert first.startswith("weft: stopping after this step")
    name = signal.Signals(signum).name
    assert last == f"weft: stopped by {name}; everything is saved. Run the same command to resume."
    assert all("saved" in launched.log(rank) for rank in (0, 1))


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_signal_before_training_keeps_its_exit_code(launch, signum, code):
    launched = launch("ready()\ntime.sleep(60)")
    launched.wait_ready()
    launched.signal(signum)
    seen, _, err = launched.end()
    name = signal.Signals(signum).name
    assert seen == code
    assert err.splitlines()[1:] == [
        f"weft: stopped by {name} before training began. Run the same command to start again."
    ]


def test_signal_while_ranks_exit_is_a_success(launch):
    launched = launch("""
        import atexit
        atexit.register(lambda: (ready(), wait_for("sent")))
    """)
    launched.wait_ready()
    launched.signal(signal.SIGTERM)
    (launched.logs / "sent").touch()
    assert launched.end()[0] == 0


@pytest.mark.parametrize("by", BOTH)
def test_settings_are_passed_to_ranks_by_value(launch, by):
    settings = b"plan = 1\n" * 40_000  # more than an environment variable or a pipe can contain
    launched = launch("print(len(line.settings), line.settings[:8])", settings=settings, by=by)
    assert launched.end()[0] == 0
    assert all("360000 b'plan = 1'" in launched.log(rank) for rank in (0, 1))


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_lock_remains_until_launcher_and_ranks_have_exited(launch, tmp_path):
    launched = launch("ready()\ntime.sleep(60)")
    pids = launched.wait_ready()
    os.kill(pids[0], signal.SIGSTOP)  # a stopped process can be killed by SIGKILL
    mark = rf"run.name=held: process {launched.process.pid} is training in"
    with pytest.raises(LaunchError, match=mark), run_lock(tmp_path / "held"):
        pass
    launched.process.kill()
    launched.process.join(10)
    wait_until(lambda: not any(map(is_running, pids)), 5)
    with run_lock(tmp_path / "held"):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is played by /dev/full")
def test_full_disk_for_logs_does_not_hide_the_reason(launch, tmp_path):
    (tmp_path / "logs").mkdir()
    for rank in (0, 1):
        (tmp_path / "logs" / f"rank_{rank}.log").symlink_to("/dev/full")
    launched = launch("""
        print("to a full disk")
        if place.rank == 0:
            (logs / "rank_0.error.tmp").symlink_to("/dev/full")
            raise DataError("run.dir=x: events cannot be written (No space left on device).")
    """)
    code, _, err = launched.end()
    assert code == 2
    assert err.splitlines()[0] == "error: run.dir=x: events cannot be written (No space left on device)."


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is played by /dev/full")
def test_unwritable_log_does_not_fail_a_rank(launch, tmp_path):
    (tmp_path / "logs").mkdir()
    for rank in (0, 1):
        (tmp_path / "logs" / f"rank_{rank}.log").symlink_to("/dev/full")
    assert launch("print('lost')").end()[0] == 0


@pytest.mark.parametrize("by", BOTH)
def test_second_interrupt_kills(launch, by):
    launched = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(60)", by=by)
    pids = launched.wait_ready()
    launched.signal(signal.SIGINT)
    time.sleep(0.05)
    launched.signal(signal.SIGINT)  # the same key press, passed on by a wrapper
    time.sleep(0.65)
    assert all(map(is_running, pids))
    launched.signal(signal.SIGINT)
    code, _, err = launched.end()
    assert code == 130
    assert "before the ranks could save" in err
    assert not any(map(is_running, pids))


def test_ranks_that_do_not_stop_in_time_are_killed(launch):
    launched = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(60)", grace_s=0.5)
    pids = launched.wait_ready()
    launched.signal(signal.SIGTERM)
    assert launched.end()[0] == 143
    assert not any(map(is_running, pids))


def test_error_while_stopping_is_reported(launch):
    launched = launch("stop_softly()\nif place.rank == 0:\n    raise OSError(28, 'No space left on device')")
    launched.wait_ready()
    launched.signal(signal.SIGTERM)
    code, _, err = launched.end()
    assert code == 1
    assert "rank 0 failed: OSError: [Errno 28] No space left on device" in err


@pytest.mark.parametrize("by", BOTH)
def test_killing_the_launcher_leaves_no_process(launch, by):
    launched = launch("ready()\ntime.sleep(60)", by=by)
    pids = launched.wait_ready()
    family = [one.pid for one in psutil.Process(launched.process.pid).children(recursive=True)]
    assert {*pids} < {*family, 0}
    launched.process.kill()
    launched.process.join(10)
    wait_until(lambda: not any(map(is_running, family)), 5)


def server_of(launched: Launched) -> psutil.Process:
    [server] = psutil.Process(launched.process.pid).children()
    return server


def test_ranks_share_modules_of_the_fork_server_and_are_named(launch):
    launched = launch("""
        print(logs.name, "parent", os.getppid(), "named", Path("/proc/self/comm").read_text().strip())
        print("loaded before:", "json" in sys.modules)
        ready()
        wait_for("seen")
    """)
    launched.wait_ready()
    server = server_of(launched)
    assert server.name() == "weft-fork"
    (launched.logs / "seen").touch()
    assert launched.end()[0] == 0
    assert not server.is_running()
    for rank in (0, 1):
        assert f"logs parent {server.pid} named" in launched.log(rank)
        assert "loaded before: True" in launched.log(rank)


def test_killed_fork_server_fails_its_ranks(launch):
    launched = launch("ready()\ntime.sleep(60)")
    pids = launched.wait_ready()
    server_of(launched).kill()
    code, _, err = launched.end()
    assert code == 1
    assert "was killed by signal 9 (SIGKILL)" in err
    assert not any(map(is_running, pids))


def start_twice(command: list[str], logs: Path, kill: bool, unfit: bool, mark: Path) -> None:
    """In a separate process: start ranks twice with the same server, and log the names of their parent processes."""
    fork_client._PROGRAM = tuple(command[:-1])
    if unfit:
        fork_client._PROGRAM = (command[0], "-c", f"{UNFIT}\nexec(open({command[1]!r}).read())")
    with closing(fork_client.ForkServer(logs, {}, ["json"], Programs(command))) as server:
        for attempt in range(2):
            if attempt and kill:
                server._process.kill()
            launch_ranks(server, 2, logs)
    mark.touch()


#: A server that has a file open that the test uses as the CUDA device.
UNFIT = """
from weft.cli.launch import fork_server
fork_server._STARTED_CUDA = "/dev/null"
kept = open("/dev/null")
"""


@pytest.mark.parametrize("kill, unfit, forks", [(False, False, 4), (True, False, 2), (False, True, 0)])
def test_server_forks_again_or_programs_are_started_instead(tmp_path, kill, unfit, forks):
    """After a failure, ranks are forked again. A server that is gone, or that has started CUDA, forks none."""
    program, logs = tmp_path / "rank.py", tmp_path / "logs"
    body = 'print("a fork:", Path(f"/proc/{os.getppid()}/comm").read_text().strip() == "weft-fork")'
    program.write_text(script_of(body))
    words = [sys.executable, str(program), str(logs)]
    process = FORKSERVER.Process(target=start_twice, args=(words, logs, kill, unfit, tmp_path / "told"))
    process.start()
    process.join(LIMIT_S)
    assert (tmp_path / "told").exists()
    logged = "".join((logs / f"rank_{rank}.log").read_text() for rank in (0, 1))
    assert (logged.count("a fork: True"), logged.count("a fork:")) == (forks, 4)


def test_terminal_is_passed_to_rank_0(launch):
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    body = "(logs / f'tty_{place.rank}').write_text(str(terminal and terminal.isatty()))"
    launched = launch(body, streams=os.ttyname(slave))
    launched.process.join(LIMIT_S)
    os.close(slave)
    os.close(master)
    assert launched.process.exitcode == 0
    assert (launched.logs / "tty_0").read_text() == "True"
    assert (launched.logs / "tty_1").read_text() == "None"


def test_program_that_cannot_start_is_one_error_line(launch):
    code, _, err = launch("", by="programs", command=["/no/such/program"]).end()
    assert code == 2
    assert err.startswith("error: the ranks could not be started: ")
    assert len(err.splitlines()) == 1


def test_ranks_of_one_machine_listen_only_on_loopback(launch):
    body = """
        import torch
        from weft.comm.collectives import all_reduce
        from weft.comm.mesh import build_mesh, join_ranks, leave_ranks
        from weft.config.plan import Plan
        join_ranks(place, torch.device("cpu"))
        all_reduce(torch.ones(1), build_mesh(Plan(dp_replicate=2)).data)
        ready()
        wait_for("seen")
        leave_ranks()
    """
    launched = launch(body, meets=True)
    launched.wait_ready()
    root = psutil.Process(launched.process.pid)
    addresses = [
        connection.laddr
        for process in (root, *root.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    (launched.logs / "seen").touch()
    # The launcher's store, and gloo in each rank.
    assert len(addresses) >= 3
    assert {address.ip for address in addresses} == {"127.0.0.1"}
    assert launched.end()[0] == 0


def test_failure_of_rank_that_left_before_its_settings_counts():
    with switchboard(settings=b"x" * 2**22) as board:  # more than the socket buffers: the launcher still sends
        call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        call.connect(f"\0{board.address[1:]}")
        call.recv(8)
        call.sendall(json.dumps(asdict(Failure(3, 1, kind="ValueError"))).encode())
        call.close()
    assert board.failures[3].kind == "ValueError"
