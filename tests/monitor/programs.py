"""Server processes for tests, and a faulty proxy in front of one."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.monitor.servers import until
from weft import env


def fetch(url: str, data: bytes | None = None) -> str:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode()


class Program:
    """A server in a separate process. `ready` is a URL that answers with 200 once it listens."""

    def __init__(self, command: list[str], ready: str, folder: Path):
        self._command, self._ready, self._folder = command, ready, folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, stdout=log, stderr=log, start_new_session=True, env=env.bare_env()
            )
        until(self._answers, 90)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "server.log").read_text()[-2000:]
        try:
            return bool(fetch(self._ready)) or True
        except OSError:
            return False

    def send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()


class FaultyProxy:
    """A proxy in front of a server.

    mode: pass, refuse (503), slow (passes after 30 s), cut (passes, but never answers).
    """

    def __init__(self, behind: str):
        self.behind, self.mode, self.num_asked = behind, "pass", 0
        front = self

        class Handler(BaseHTTPRequestHandler):
            def _take(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                mode = front.mode
                front.num_asked += 1
                if mode == "slow":
                    time.sleep(30)
                status, text = (503, b"busy") if mode == "refuse" else self._pass(body)
                if mode == "cut":
                    self.connection.close()
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def _pass(self, body: bytes) -> tuple[int, bytes]:
                headers = {key: self.headers[key] for key in ("Content-Type", "Authorization") if key in self.headers}
                request = urllib.request.Request(front.behind + self.path, body or None, headers, method=self.command)
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        return answer.status, answer.read()
                except urllib.error.HTTPError as error:
                    return error.code, error.read()
                except OSError:
                    return 502, b"nothing is there"

            do_GET = do_POST = do_PUT = _take

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
