"""Local servers that record requests, and can be slow, refuse or be stopped."""

from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Recorder:
    """An HTTP server that stores the accepted bodies.

    status: HTTP status of the answer. slow_s: delay of the answer. forgets: read bodies in chunks and store nothing.
    """

    def __init__(self, port: int | None = None, answer: object = None):
        self.port, self.answer = port or free_port(), answer
        self.status, self.slow_s, self.forgets = 200, 0.0, False
        self.got: list[tuple[str, str, bytes, dict[str, str]]] = []
        self.num_asked = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Recorder:
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def _take(self) -> None:
                left, forgets = int(self.headers.get("Content-Length") or 0), recorder.forgets
                while forgets and left:
                    left -= len(self.rfile.read(min(left, 2**14)))
                body = self.rfile.read(left)
                recorder.num_asked += 1
                time.sleep(recorder.slow_s)
                if recorder.status == 200 and not forgets:
                    recorder.got.append((self.command, self.path, body, dict(self.headers)))
                answer = json.dumps(recorder.answer).encode() if recorder.answer is not None else b""
                if recorder.status != 200:  # servers may echo the request
                    answer = f"refused {self.headers.get('Authorization')}".encode()
                self.send_response(recorder.status)
                if recorder.status == 302:
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = _take

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that did not wait

        self._server = Server(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def bodies(self) -> list[object]:
        return [json.loads(body) for _, _, body, _ in self.got]

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def until(is_so, seconds: float = 20.0) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to be so"
        time.sleep(0.02)
