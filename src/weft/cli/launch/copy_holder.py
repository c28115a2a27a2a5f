"""A process that stores in-memory copies of the training state for the ranks that one torchrun starts on this host.

With `weft train`, the launcher stores the copies. torchrun's agent cannot, so its first rank starts this process, and
the ranks of later starts find it by the agent's process id. It ends with the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace

from weft import env
from weft.checkpoint.peer_copies import CopyHome, CopyServer
from weft.cli.launch.switchboard import is_ours

#: Seconds that a rank waits for the process to start, which may take long on a busy machine.
_START_S = 30.0
_LOOK_S = 0.05


def copy_home(place: env.RankEnv) -> CopyHome | None:
    """Return this host's copy storage for a rank of torchrun, starting its process if needed.

    Return None if torchrun did not start this rank, on systems without pidfd_open, or if the process cannot be reached
    within `_START_S`.
    """
    if place.starter != "torchrun" or not env.get("TORCHELASTIC_RUN_ID") or not hasattr(os, "pidfd_open"):
        return None
    agent, alone = os.getppid(), place.world_size == place.local_world_size
    end, started = time.monotonic() + _START_S, False
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as call:
            call.connect(_name(agent))
            home = CopyHome(**json.loads(call.makefile().read()))
            return home if alone else replace(home, host=_reachable(place))
        if place.local_rank == 0 and not started:
            started = True
            words, null = [sys.executable, "-m", __name__, str(agent), "127.0.0.1" if alone else ""], subprocess.DEVNULL
            # A new session, because torchrun kills the process groups of its ranks.
            subprocess.Popen(words, stdin=null, stdout=null, stderr=null, env=env.bare_env(), start_new_session=True)
        time.sleep(_LOOK_S)
    return None


def _name(agent: int) -> str:
    """Return the process's address: an abstract socket, which leaves no file."""
    return f"\0weft-copies-{os.getuid()}-{agent}"


def _reachable(place: env.RankEnv) -> str:
    with socket.socket(socket.AF_INET6 if ":" in place.master_addr else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((place.master_addr, place.master_port))  # for UDP this sends nothing, but selects the interface
        own = str(way.getsockname()[0])
        # On the host of the rendezvous store, its name may resolve to the loopback interface. Then other hosts need the
        # name.
        return place.master_addr if own == way.getpeername()[0] else own


def main() -> None:
    """Run the process. Its arguments are AGENT_PID HOST."""
    agent, host = int(sys.argv[1]), sys.argv[2]
    try:
        watched = os.pidfd_open(agent)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(_name(agent))
    except OSError:  # the agent has ended, or another process has its copies
        return
    listener.listen(128)
    text = json.dumps(asdict(CopyServer(host).home)).encode()
    while True:
        ready, _, _ = select.select([watched, listener], [], [])
        if watched in ready:
            return
        call, _ = listener.accept()
        with call, contextlib.suppress(OSError):
            if is_ours(call):
                call.sendall(text)


if __name__ == "__main__":
    main()
