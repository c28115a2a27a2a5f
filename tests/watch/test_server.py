"""The page's server: its answers, its refusals, and that reading changes nothing."""

from __future__ import annotations

import json
import random
import string

import pytest

pytest.importorskip("starlette", reason="the page needs starlette: pip install starlette uvicorn")
pytest.importorskip("httpx2", reason="starlette's test client needs httpx2: pip install httpx2")

from starlette.testclient import TestClient

from tests.watch.synthetic_run import SyntheticRun
from weft.errors import LaunchError
from weft.monitor.accounting import Price
from weft.monitor.alerts import RequestQueue
from weft.monitor.dashboard.routes import Page, make_app
from weft.monitor.dashboard.run_index import RunCatalog
from weft.monitor.dashboard.server import COOKIE, AccessRules

LOCAL = frozenset({"localhost", "127.0.0.1"})
HOST = "http://localhost:8765"


def client_of(folder, access=None, **more):
    access = access or AccessRules(LOCAL)
    shelf = RunCatalog(folder)
    shelf.read_all()
    page = Page(shelf, access, **more)
    return TestClient(make_app(page), base_url=HOST, follow_redirects=False), access


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    SyntheticRun(steps=300, until=200, ranks=8, slow_rank=5, slow_from=100).write(root / "one")  # is training now
    SyntheticRun(steps=120, ranks=4, seed=2, lr=1e-3, end=1e9).write(root / "two")
    (root / "secret.txt").write_text("planted")
    return root


@pytest.fixture(scope="module")
def served(runs):
    return client_of(runs, price=Price.parse("2.5usd/h"))


def test_page_and_files_have_restrictive_headers(served):
    client, access = served
    for path in ("/", "/static/js/main.js", "/static/style.css", "/api/runs", "/nowhere", "/api/curves?id=none"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
    page = client.get("/").text
    assert access.csrf in page
    assert "<script>" not in page
    assert "style=" not in page
    assert "http" not in page.replace("http-equiv", "")  # no external resources
    assert client.get("/static/uplot/LICENSE").text.startswith("The MIT License")


def test_runs_are_listed(served):
    client, _ = served
    found = {run["id"]: run for run in client.get("/api/runs").json()["runs"]}
    one, two = found["one"], found["two"]
    assert (one["state"], one["step"], one["steps"], one["ranks"]) == ("running", 200, 300, 8)
    assert (two["state"], two["step"]) == ("finished", 120)
    assert one["planned"]["step_s"] == pytest.approx(0.49)
    ledger = one["ledger"]
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["wall_s"], rel=1e-3)
    assert ledger["cost"]["total"] == pytest.approx(ledger["device_s"] / 3600 * 2.5, rel=1e-3)
    assert ledger["device_s"] == pytest.approx(8 * ledger["wall_s"], rel=1e-3)


def test_curves_are_thinned_and_can_be_zoomed(served):
    client, _ = served
    full = client.get("/api/curves", params={"id": "one", "points": 20}).json()
    assert len(full["x"]) == 20
    assert full["x"][-1] == 200
    loss = full["series"]["loss"]
    assert all(low <= mean <= high for low, mean, high in zip(loss["low"], loss["mean"], loss["high"], strict=True))
    part = client.get("/api/curves", params={"id": "one", "from": 50, "to": 59, "points": 500}).json()
    assert part["x"] == list(range(50, 60))
    assert "low" not in part["series"]["loss"]
    assert part["planned"]["tokens_per_s"] > 0
    assert full["evals"]["step"] == [100, 200]


def test_ranks_events_config_and_plan(served):
    client, _ = served
    ranks = client.get("/api/heat", params={"id": "one"}).json()
    assert (ranks["ranks"], ranks["rows"], ranks["slowest"]["rank"]) == (8, 8, 5)
    kinds = {mark["kind"] for mark in client.get("/api/marks", params={"id": "one"}).json()}
    assert kinds == {"start", "alert"}
    config = client.get("/api/config", params={"id": "one"}).json()
    assert config["optimizer.lr"] == "0.0006"
    assert config["log.api_token"] == "(hidden)"
    assert client.get("/api/planned", params={"id": "one"}).json()["planned"]["over tp"] > 0
    assert client.get("/api/heat", params={"id": "three"}).status_code == 404


def test_files_of_the_profiler_are_listed_and_served(runs, served):
    client, _ = served
    folder = runs / "two" / "profile"
    folder.mkdir()
    (folder / "steps_2-3_rank0.json.gz").write_bytes(b"trace")
    (folder / "link").symlink_to(runs / "secret.txt")
    found = [name for name in client.get("/api/config", params={"id": "two"}).json() if name.startswith("profile: ")]
    assert found == ["profile: steps_2-3_rank0.json.gz"]
    answer = client.get("/api/profile", params={"id": "two", "name": "steps_2-3_rank0.json.gz"})
    assert (answer.status_code, answer.content) == (200, b"trace")
    for name in ("link", "../../secret.txt", "../events.jsonl", "", "."):
        assert client.get("/api/profile", params={"id": "two", "name": name}).status_code == 404
    assert client.get("/api/profile", params={"id": "three", "name": found[0]}).status_code == 404


def test_no_answer_has_a_secret_of_the_config(served):
    client, _ = served
    for name in ("runs", "curves", "heat", "marks", "config", "planned"):
        assert "planted-secret" not in client.get(f"/api/{name}", params={"id": "one"}).text


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "..%2fsecret.txt",
        "%2e%2e/%2e%2e/secret.txt",
        "js/../../secret.txt",
        "/etc/passwd",
        "..\\secret.txt",
        "index.html",
        "js/main.js%00.css",
        "../../../pyproject.toml",
        "",
    ],
)
def test_path_traversal_finds_nothing(served, path):
    client, _ = served
    assert client.get(f"/static/{path}").status_code == 404
    for endpoint in ("curves", "config", "planned"):
        assert client.get(f"/api/{endpoint}", params={"id": path}).status_code == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "evil.example:8765", "", "127.0.0.1.nip.io", "[::2]"]
)
def test_foreign_host_header_is_refused(served, host):
    client, _ = served
    for path in ("/", "/api/runs", "/static/style.css"):
        assert client.get(path, headers={"host": host}).status_code == 421


def post_request(client, access, body, **headers):
    sent = {"content-type": "application/json", "x-weft-csrf": access.csrf, "origin": HOST} | headers
    return client.post("/api/ask", content=json.dumps(body), headers={k: v for k, v in sent.items() if v is not None})


def test_button_writes_a_request_that_the_run_reads(runs, served):
    client, access = served
    box = RequestQueue(runs / "one")
    for action in ("checkpoint", "hold", "stop"):
        assert post_request(client, access, {"id": "one", "action": action}).json() == {"asked": action}
    assert [(wish.action, wish.by) for wish in box.new()] == [
        (action, "a person at the page") for action in ("checkpoint", "hold", "stop")
    ]
    assert post_request(client, access, {"id": "two", "action": "stop"}).status_code == 409
    assert "finished" in post_request(client, access, {"id": "two", "action": "stop"}).json()["error"]
    assert post_request(client, access, {"id": "one", "action": "resume"}).status_code == 409


def test_cross_site_requests_are_refused(runs, served):
    client, access = served
    box, body = RequestQueue(runs / "one"), {"id": "one", "action": "stop"}
    refused = [
        {"x-weft-csrf": None},
        {"x-weft-csrf": ""},
        {"x-weft-csrf": access.csrf[:-1]},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://localhost:8765"},
        {"origin": "http://localhost:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "evil.example", "origin": "http://evil.example"},
    ]
    for headers in refused:
        assert post_request(client, access, body, **headers).status_code in (403, 421), headers
    assert post_request(client, access, body, **{"content-type": "text/plain"}).status_code == 415
    for method in ("get", "head", "put", "delete", "patch", "options"):
        assert getattr(client, method)("/api/ask").status_code == 405
    assert client.post("/api/runs", headers={"x-weft-csrf": access.csrf, "origin": HOST}).status_code == 405
    assert post_request(client, access, {"id": "one", "action": "x" * 5000}).status_code == 400
    assert box.new() == []


def test_paused_run_is_resumed(tmp_path):
    folder = SyntheticRun(steps=50, until=40, ranks=2).write(tmp_path / "run")
    with open(folder / "events.jsonl", "a") as file:
        file.write(
            '{"event": "action", "action": "hold", "time": 1.0}\n'
            '{"event": "held", "time": 2.0, "why": "paused at step 40"}\n'
        )
    resumed = []
    client, access = client_of(folder, go_on=resumed.append)
    assert post_request(client, access, {"id": "run", "action": "hold"}).status_code == 409
    assert post_request(client, access, {"id": "run", "action": "resume"}).json() == {"asked": "resume"}
    assert resumed == [folder]

    def no_command(_):
        raise LaunchError("No command waits there any more.")

    client, access = client_of(folder, go_on=no_command)
    answer = post_request(client, access, {"id": "run", "action": "resume"})
    assert (answer.status_code, answer.json()) == (409, {"error": "No command waits there any more."})


def test_token_is_required_for_everything(runs):
    access = AccessRules(LOCAL, token="a-token-of-enough-letters")
    client, _ = client_of(runs, access)
    assert client.get("/").headers["location"] == "/login"
    for path in ("/api/runs", "/api/stream", "/static/js/main.js", "/api/curves?id=one"):
        assert client.get(path).status_code == 401
    assert client.get("/login").status_code == 200
    assert post_request(client, access, {"id": "one", "action": "stop"}).status_code == 401
    assert client.get("/api/runs", headers={"authorization": "Bearer a-token-of-enough-letters"}).status_code == 200
    assert client.get("/api/runs", headers={"cookie": f"{COOKIE}=x"}).status_code == 401
    wrong = client.post("/login", data={"token": "guess"}, headers={"origin": HOST})
    assert wrong.status_code == 403
    assert (
        client.post("/login", data={"token": access.token}, headers={"origin": "http://evil.example"}).status_code
        == 403
    )
    right = client.post("/login", data={"token": access.token}, headers={"origin": HOST})
    assert (right.status_code, right.headers["location"]) == (303, "/")
    cookie = right.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert access.token not in cookie
    assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize("times", [40, pytest.param(1500, marks=pytest.mark.full)])
def test_random_requests_get_valid_answers(served, times):
    client, access = served
    rng = random.Random(times)
    letters = string.printable + "äß漢\u0000\u202e"
    keys = ("id", "from", "to", "points", "x")

    def random_value():
        odd = ["one", "nan", "inf", "-1", "1e999", "9" * 400, "", "../x", "one\x00", "%00", "null", "[]"]
        return rng.choice(odd) if rng.random() < 0.7 else "".join(rng.choice(letters) for _ in range(rng.randrange(30)))

    for _ in range(times):
        path = rng.choice(["/api/runs", "/api/curves", "/api/heat", "/api/marks", "/api/config", "/api/planned"])
        params = {rng.choice(keys): random_value() for _ in range(rng.randrange(4))}
        answer = client.get(path, params=params)
        assert answer.status_code in (200, 404), (path, params)
        json.loads(answer.text)
    for _ in range(times // 4):
        body = rng.choice(
            [
                random_value().encode(),
                json.dumps({"id": random_value(), "action": random_value()}).encode(),
                b"[" * 3000,
                b'{"id": {}}',
            ]
        )
        headers = {"content-type": "application/json", "x-weft-csrf": access.csrf, "origin": HOST}
        assert client.post("/api/ask", content=body, headers=headers).status_code in (400, 404)
