"""Secrets in addresses of sinks and channels: refused in a config, absent from errors, and never sent elsewhere."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest

from tests.monitor.servers import Recorder
from weft.config.files import parse_config
from weft.config.sections import ChannelSection, hide_secret, holds_secret
from weft.errors import ConfigError
from weft.monitor.channels import AlertMessage, send_message
from weft.monitor.sinks.base import Poster, SinkTrouble, address_of, secret_of

SECRET = "T0PLANTED/B0SECRET/x7Yz-4711"
MESSAGE = AlertMessage("title", "text", {"name": "one", "step": 3})


def channel(kind: str, **settings: object) -> ChannelSection:
    return ChannelSection.model_validate({"name": "ops", "kind": kind, "timeout": "2s", **settings})


class RawServer:
    """A server that answers with given bytes, with a pause after each. `port` is its port."""

    def __init__(self, answer: bytes | None, pause_s: float = 0.0):
        self._answer, self._pause_s = answer, pause_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                call, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer_call, args=(call,), daemon=True).start()

    def _answer_call(self, call: socket.socket) -> None:
        with call:
            try:
                got = call.recv(65536)
                if b"Content-Length: " in got:  # unread bytes at the close would reset the connection
                    length = int(got.split(b"Content-Length: ")[1].split(b"\r\n")[0])
                    while len(got.partition(b"\r\n\r\n")[2]) < length and (more := call.recv(65536)):
                        got += more
                path = got.split(b" ")[1] if got.count(b" ") else b""
                answer = (self._answer or b"").replace(b"{path}", path)
                for at in range(len(answer)):
                    call.sendall(answer[at : at + 1] if self._pause_s else answer)
                    if not self._pause_s:
                        return
                    time.sleep(self._pause_s)
            except OSError:
                return

    def __enter__(self) -> RawServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


ECHOES = [
    b"HTTP/1.1 500 Cannot POST {path}\r\nContent-Length: 200\r\n\r\nCannot POST {path}" + b" " * 200,
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9{path}\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: file://{path}\r\nContent-Length: 0\r\n\r\n",
    b"{path} is no status line\r\n\r\n",
    b"HTTP/1.1 {path} x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{path}\r\n",
    b"HTTP/1.1 999 {path}\r\n\r\n{path}",
    b"",
]


@pytest.mark.parametrize("answer", ECHOES)
def test_server_answers_put_no_secret_into_errors(answer, monkeypatch):
    with RawServer(answer) as server:
        monkeypatch.setenv("HOOK", f"http://me:P4ssw0rd@127.0.0.1:{server.port}/services/{SECRET}?key=K3YPLANTED")
        with pytest.raises(SinkTrouble) as caught:
            send_message(channel("webhook", url="env:HOOK"), MESSAGE)
    message = str(caught.value)
    for part in ("PLANTED", "SECRET", "4711", "P4ssw0rd", "services", "127.0.0.1"):
        assert part not in message, message
    assert caught.value.__cause__ is None


def test_answer_without_secret_is_quoted_in_one_line():
    answer = b"HTTP/1.1 400 No\r\nContent-Length: 29\r\n\r\nno such\r\n\x1b[31mexperiment {path}"
    with RawServer(answer) as server, pytest.raises(SinkTrouble) as caught:
        Poster(f"http://127.0.0.1:{server.port}", {}, 5.0).post("", {})
    assert str(caught.value).startswith("the server answered 400 Bad Request: no such [31mexperiment")


def test_answer_reset_before_its_body_gives_its_status():
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        call, _ = listener.accept()
        call.recv(65536)
        call.sendall(b"HTTP/1.1 400 No\r\nContent-Length: 29\r\n\r\n")
        time.sleep(0.3)  # the client has read the status
        call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        call.close()  # with a reset

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with listener, pytest.raises(SinkTrouble, match=r"^the server answered 400 Bad Request$"):
        Poster(f"http://127.0.0.1:{listener.getsockname()[1]}", {}, 5.0).post("", {})
    thread.join()


@pytest.mark.parametrize(
    "value",
    [
        "file:///etc/passwd", "ftp://host/SECRETPATH", "data:text/plain,SECRETPATH", "SECRETPATH",
        "http://", "//host/x",
        "http://host:SECRETPATH/x", "http://host:0/x", "http://ho st/SECRETPATH", "http://host/SECRETPATH\r\nX: y",
        "http://host/SECRETPATH#x", "http://[::SECRETPATH/x", "http://host/SECRETPATH\u00e9", "HTTP:SECRETPATH",
        "root:SECRETPATH:0:0\nbin:x",
    ],
)  # fmt: skip
def test_only_http_addresses_are_accepted_and_others_are_not_shown(value, tmp_path):
    (tmp_path / "hook").write_text(value)
    with pytest.raises(ConfigError) as caught:
        send_message(channel("webhook", url=f"file:{tmp_path}/hook"), MESSAGE)
    assert "SECRETPATH" not in str(caught.value)
    assert "bin:x" not in str(caught.value)
    assert str(caught.value).startswith(f"channel ops: url=file:{tmp_path}/hook: ")


def test_userinfo_of_an_address_becomes_a_header(monkeypatch):
    with Recorder() as server:
        monkeypatch.setenv("HOOK", server.url.replace("://", "://me:p%40ss@") + "/x")
        send_message(channel("webhook", url="env:HOOK"), MESSAGE)
    (_, path, _, headers) = server.got[0]
    assert (path, headers["Authorization"]) == ("/x", "Basic bWU6cEBzcw==")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000,
        b"HTTP/1.1 500 Oh\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"X-Header: y\r\n" * 1000,
    ],
)
def test_timeout_covers_the_full_request(answer):
    with RawServer(answer, 0.05) as server:
        began = time.monotonic()
        with pytest.raises(SinkTrouble, match=r"^the server did not answer within 500 ms"):
            Poster(f"http://127.0.0.1:{server.port}", {}, 0.5).post("", {})
    assert time.monotonic() - began < 10
    end = time.monotonic() + 20
    while any(thread.name == "weft-request" for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(thread.name == "weft-request" for thread in threading.enumerate())  # no thread is left


def test_slow_handshake_and_mail_end_in_time():
    hello = b"\x16\x03\x03\x40\x00" + b"x" * 10_000
    with RawServer(hello, 0.05) as server, pytest.raises(SinkTrouble, match="did not answer within"):
        Poster(f"https://127.0.0.1:{server.port}", {}, 0.5).post("", {})
    with RawServer(b"220-" + b"x" * 400 + b"\r\n", 0.05) as server:
        listener = channel("mail", to=["a@b.c"], server=f"127.0.0.1:{server.port}", timeout="1s")
        began = time.monotonic()
        with pytest.raises(SinkTrouble, match=r"not sent within 1s|failed"):
            send_message(listener, MESSAGE)
        assert time.monotonic() - began < 10


def test_line_breaks_in_mail_headers_are_removed(monkeypatch):
    from weft.monitor import channels as module

    sent = []
    monkeypatch.setattr(module, "within", lambda seconds, act, end: act())

    class Server:
        def __init__(self, *_: object, **__: object): ...
        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None: ...
        def send_message(self, mail) -> None:
            sent.append(mail)

    monkeypatch.setattr(module, "_Mail", Server)
    title = "loss\r\nBcc: x@evil.example\n\x00\x1bhigh \ud800"
    send_message(channel("mail", to=["a@b.c"]), AlertMessage(title, "text \ud800", {}))
    assert sent[0]["Subject"] == "loss Bcc: x@evil.example high"
    assert sent[0]["Bcc"] is None
    assert "text ?" in sent[0].get_content()


def test_multi_line_secret_or_fifo_is_refused(tmp_path, monkeypatch):
    import os

    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        address_of(f"file:{tmp_path}/fifo", "url")
    monkeypatch.setenv("TWO", "one\r\nX-Header: two")
    with pytest.raises(ConfigError, match="more than one line"):
        secret_of("env:TWO", "token")


SECRET_URLS = [
    "https://hooks.slack.com/services/T0/B0/x", "https://hooks.example.com/services/T000/B000/XXXX",
    "http://127.0.0.1:9911/echo/services/PLAINSECRET", "http://127.0.0.1:9911/services/plainsecret",
    "https://mattermost.example.com/hooks/xjfq8k3ywbd7ipz1h4s6ro9nue", "https://example.com/webhook/a1b2c3d4e5f6",
    "https://example.com/550e8400-e29b-41d4-a716-446655440000", "https://example.com/in/9f86d081884c7d65",
    "https://example.com/aGVsbG8gd29ybGQ", "https://example.com/bot123456:ABC-DEF1234ghIkl/sendMessage",
    "https://example.com/token/correcthorse", "https://example.com/a;key=abc", "https://discord.com/api/webhooks/1/a",
    "https://ntfy.sh/mine", "https://example.com/%74oken/x%37YzPLANTED",
]  # fmt: skip
PLAIN_URLS = [
    "http://localhost:5000", "http://collector:4318/v1/metrics", "http://push.internal:9091", "http://10.0.0.7:8080/",
    "https://mlflow.example.com/team-a", "https://example.com/api/2.0/runs", "https://example.com/otlp/v1/metrics",
    "https://splunk.example.com:8088/services/collector/event", "http://localhost:8080/hook", "http://host/hooks/train",
    "https://example.com/weftAlerts/trainingRuns/2024", "https://example.com/MLOps/prod_eu-west-1/alerts.json",
    "https://ec2-12-34-56-78.compute-1.amazonaws.com/ingest",
]  # fmt: skip


@pytest.mark.parametrize("url", SECRET_URLS)
def test_address_that_may_be_a_secret_is_refused_in_config(url):
    text = f'[[channel]]\nname = "ops"\nkind = "webhook"\nurl = "{url}"\n'
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "run.toml")
    assert "channel.0.url=***: " in str(caught.value)
    assert "env:" in str(caught.value)
    assert url.partition("://")[2].partition("/")[2] not in str(caught.value)
    assert hide_secret(url).endswith("(hidden)")


@pytest.mark.parametrize("url", PLAIN_URLS)
def test_ordinary_address_is_accepted(url):
    assert not holds_secret(url)
    assert hide_secret(url) == url
    parse_config(f'[[sink]]\nkind = "http"\nurl = "{url}"\n', "run.toml")


@pytest.mark.parametrize("key", ["url", "token", "password"])
def test_file_url_is_refused_in_config(key):
    with pytest.raises(ConfigError, match=rf"sink\.0\.{key}=\*\*\*: "):
        parse_config(f'[[sink]]\nkind = "http"\n{key} = "file:///etc/passwd"\n', "run.toml")
