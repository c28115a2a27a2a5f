"""A server on this machine that speaks the protocol of the Hugging Face hub, and one for its large files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_thisIsTheSecretOfTheTest"
_API = re.compile(r"/api/(models|datasets)/((?:[^/]+/)?[^/]+?)(?:/(revision|tree)/([^/]+))?/?")
_FILE = re.compile(r"/(datasets/)?((?:[^/]+/)?[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repo:
    """A repository. `revisions` maps names to commits, `commits` maps commits to files."""

    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refusal: str = ""  # GatedRepo, or "private"
    listed: dict[str, int] = field(default_factory=dict)  # files of the list that do not exist, with their sizes

    def commit(self, files: dict[str, bytes], *names: str) -> str:
        """Add a commit, and let `names` (by default main) be names of it."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha] = {".gitattributes": b"", **files}
        for name in names or ("main",):
            self.revisions[name] = sha
        return sha


class Hub:
    """State of the server.

    Attributes:
        repos: repositories by "models/OWNER/NAME" or "datasets/OWNER/NAME".
        large_from: size from which a file is on the second server.
        cut: files whose next download ends in the middle.
        status: status of all answers, if not 0.
        requests: (method, path) of all requests.
        large_headers: headers of the requests to the second server.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.large_from, self.status = 2**62, 0
        self.cut: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.large_headers: list[dict[str, str]] = []
        self.url = self.large_url = ""

    def model(self, name: str) -> Repo:
        return self.repos.setdefault(f"models/{name}", Repo())

    def dataset(self, name: str) -> Repo:
        return self.repos.setdefault(f"datasets/{name}", Repo())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), Content_Type="application/json")

    def _refuse(self, status: int, code: str) -> None:
        text = f"{code}: the server's own words"
        self._send(status, text.encode(), X_Error_Code=code, X_Error_Message=text)

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if self.hub.status:
            return self._send(self.hub.status)
        api = _API.fullmatch(urlsplit(self.path).path)
        file = None if api else _FILE.fullmatch(urlsplit(self.path).path)
        if api:
            key, revision = f"{api[1]}/{api[2]}", unquote(api[4] or "main")
        elif file:
            key, revision = f"{'datasets' if file[1] else 'models'}/{file[2]}", unquote(file[3])
        else:
            return self._send(404)
        repo = self.hub.repos.get(key)
        login = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.refusal == "private" and not login):
            return self._refuse(404 if login else 401, "RepoNotFound")
        if file and repo.refusal == "GatedRepo":
            return self._refuse(403, "GatedRepo")
        commit = repo.revisions.get(revision, revision)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repo.commits[commit]
        if file:
            return self._file(commit, unquote(file[4]), files)
        if api and api[3] == "tree":
            sizes = {**{name: len(content) for name, content in files.items()}, **repo.listed}
            return self._json([self._entry(name, size, files.get(name)) for name, size in sizes.items()])
        return self._json(
            {"id": key.partition("/")[2], "sha": commit, "siblings": [{"rfilename": one} for one in files]}
        )

    def _entry(self, name: str, size: int, content: bytes | None) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": "0" * 40}
        if content is not None and size >= self.hub.large_from:
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 100}
        return entry

    def _file(self, commit: str, name: str, files: dict[str, bytes]) -> None:
        if name not in files:
            return self._refuse(404, "EntryNotFound")
        content = files[name]
        digest = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest[:40]}"', "Accept-Ranges": "bytes"}
        if len(content) >= self.hub.large_from:
            self.send_response(302)
            place = {"Location": f"{self.hub.large_url}/{commit}/{name}", "X-Linked-Etag": f'"{digest}"'}
            for key, value in {**headers, **place, "X-Linked-Size": str(len(content)), "Content-Length": "0"}.items():
                self.send_header(key, value)
            return self.end_headers()
        return self._content(content, name, headers)

    def _content(self, content: bytes, name: str, headers: dict[str, str]) -> None:
        start = int(re.sub(r"\D.*", "", self.headers.get("Range", "").removeprefix("bytes=")) or 0)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_response(206 if start else 200)
        for key, value in {**headers, "Content-Length": str(len(content) - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.hub.cut:
            self.hub.cut.discard(name)
            self.wfile.write(content[start : start + len(content) // 2])
            self.close_connection = True
            return
        self.wfile.write(content[start:])


class _LargeFiles(_Handler):
    def _answer(self) -> None:
        self.hub.large_headers.append(dict(self.headers))
        _, commit, name = unquote(self.path).split("/", 2)
        content = next(repo.commits[commit][name] for repo in self.hub.repos.values() if commit in repo.commits)
        self._content(content, name, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'})


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve a hub on the loopback interface. Its large files are on another port, under another host name."""
    hub = Hub()
    servers = []
    for kind, host in ((_Handler, "127.0.0.1"), (_LargeFiles, "localhost")):
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (kind,), {"hub": hub}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append((server, f"http://{host}:{server.server_port}"))
    hub.url, hub.large_url = servers[0][1], servers[1][1]
    try:
        yield hub
    finally:
        for server, _ in servers:
            server.shutdown()
            server.server_close()
