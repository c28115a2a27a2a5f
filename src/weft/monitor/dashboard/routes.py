"""Routes of the dashboard, and their JSON: a summary of a run, its curves, ranks, events and settings."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from weft.errors import ConfigError, WeftError
from weft.monitor.accounting import PRODUCTIVE, Price, TimeLedger
from weft.monitor.alerts import RunRequest, ask
from weft.monitor.dashboard.history import StepColumns, bucket_edges, thinned
from weft.monitor.dashboard.run_index import RunCatalog, RunIndex
from weft.monitor.dashboard.server import COOKIE, HEADERS, AccessRules, Guard, too_many_guesses
from weft.monitor.events import number
from weft.monitor.redact import text_without_secrets, without_secrets
from weft.monitor.sinks.request_limit import OutOfTime, within

#: Maximum number of points of a curve, which is more than a screen has pixels.
MOST_POINTS = 2000
_MOST_RANKS = 4096
_NOW = ("loss", "lr", "grad_norm", "update_ratio", "rate", "mfu")


def run_line(run: RunIndex, price: Price | None = None) -> dict[str, Any]:
    """Return the summary of a run for the list of runs."""
    with run.lock:
        state, reason = run.state()
        step, wanted, step_s = run.step, run.num_steps, run.step_s()
        found = {
            "id": run.name,
            "version": run.version,
            "state": state,
            "reason": text_without_secrets(reason[:1000])[:300],
            "read": round(run.read_share, 3),
            "step": step,
            "steps": wanted,
            "step_s": _short(step_s),
            "left_s": _short((wanted - step) * step_s) if wanted and step_s and state == "running" else None,
            "time": _short(run.last_time, 14),
            "begun": _short(run.ledger.first, 14),
            "model": str(run.start.get("model", "")),
            "plan": str(run.start.get("plan", "")),
            "ranks": _finite(run.start.get("world_size")),
            "device": str(run.start.get("device", "")),
            "unit": run.rate_unit,
            "now": {name: _short(run.steps.last(name)) for name in _NOW},
            "eval": {name: _short(run.evals.last(name)) for name in run.evals.names if name != run.rate_unit},
            "planned": _planned(run),
            "memory": _short(run.steps.last("memory_bytes")),
            "marks": dict(run.marks.counts),
            "spark": thinned(run.steps.values("loss"), 48)[0],
        }
        found["ledger"] = ledger_view(run.ledger, price)
    return found


def ledger_view(ledger: TimeLedger, price: Price | None) -> dict[str, Any]:
    """Return a ledger as JSON: seconds by cause, productive share, failures, device-seconds and their cost."""
    seconds = ledger.seconds()
    wall = ledger.wall_s
    found: dict[str, Any] = {
        "seconds": {cause: _short(value, 10) or 0.0 for cause, value in seconds.items()},
        "wall_s": _short(wall, 10) or 0.0,
        "share": _short(seconds[PRODUCTIVE] / wall, 4) if wall > 0 else None,
        "failures": ledger.failures,
        "starts": ledger.starts,
        "device_s": _short(ledger.device_s, 10) or 0.0,
    }
    if ledger.energy.is_measured or ledger.energy.devices:
        found["energy"] = ledger.energy_summary().as_json()
    if price is not None:
        found["cost"] = {"total": _short(price.of(ledger.device_s), 8) or 0.0, "currency": price.currency}
    return found


def curves(run: RunIndex, first: float, last: float, points: int) -> dict[str, Any]:
    """Return a run's curves between two steps, in at most `points` buckets, with evaluations and metrics."""
    points = max(2, min(points, MOST_POINTS))
    with run.lock:
        rows = run.steps.rows(first, last)
        steps, times = run.steps.steps[rows], run.steps.times[rows]
        edges = bucket_edges(len(steps), points)
        ends = np.append(edges[1:], len(steps)) - 1 if len(edges) else edges
        return {
            "id": run.name,
            "version": run.version,
            "unit": run.rate_unit,
            "rows": len(steps),
            "x": steps[ends].tolist(),
            "time": [_short(one, 14) for one in times[ends].tolist()],
            "series": {name: _curve(run.steps, name, rows, points) for name in run.steps.names if " " not in name},
            "phases": {name: thinned(run.phase(name)[rows], points)[0] for name in run.phases},
            "evals": _evaluations(run, first, last, points),
            "figures": {
                name: picture
                for name, one in run.metrics.items()
                if (picture := one.picture())["step"] and not name.startswith("planned")
            },
            "last": {name: one.last for name, one in run.metrics.items() if one.last},
            "bad": sorted(run.bad_steps),
            "planned": _planned(run),
        }


def heat(run: RunIndex) -> dict[str, Any]:
    """Return each rank's busy time relative to the median rank, as base64 bytes (ranks x columns of steps).

    Above 4,096 ranks, a row is the maximum of a group of adjacent ranks.
    """
    with run.lock:
        steps, picture = run.heat.picture()
        slowest = run.heat.slowest()
    group = max(1, math.ceil(picture.shape[0] / _MOST_RANKS))
    if group > 1:  # show the slowest of adjacent ranks
        picture = np.maximum.reduceat(picture, np.arange(0, picture.shape[0], group), axis=0)
    return {
        "ranks": run.heat.num_ranks,
        "rows": picture.shape[0],
        "group": group,
        "steps": steps,
        "cells": base64.b64encode(np.ascontiguousarray(picture).tobytes()).decode(),
        "slowest": {"rank": slowest[0], "ratio": round(slowest[1], 3)} if slowest else None,
    }


def marks(run: RunIndex) -> list[dict[str, Any]]:
    """Return the newest events for users, oldest first."""
    with run.lock:
        found = list(run.marks)
    return [{**one, "time": _short(one["time"], 14), "text": text_without_secrets(one["text"])} for one in found]


def config_of(run: RunIndex) -> dict[str, str]:
    """Return a run's settings by dotted name, and its machine, versions, data digests and profiler files.

    Values that look like secrets are hidden.
    """
    with run.lock:
        start = run.start
    found: dict[str, str] = {}
    _flatten(without_secrets(start.get("config")), "", found)
    _flatten(without_secrets(start.get("machine")), "machine", found)
    _flatten(without_secrets(start.get("data")), "data digest", found)
    for name in ("plan", "model", "world_size", "device", "weft", "torch", "python"):
        if name in start:
            found[f"run: {name}"] = _text(without_secrets(start[name], name))
    for file in profile_files(run.folder):
        found[f"profile: {file.name}"] = f"{file.stat().st_size:,} bytes"
    return found


def profile_files(folder: Path) -> list[Path]:
    """Return the first 100 files that `train.profile` wrote, links excluded."""
    with contextlib.suppress(OSError):
        return sorted(file for file in (folder / "profile").iterdir() if file.is_file() and not file.is_symlink())[:100]
    return []


def planned_and_measured(run: RunIndex) -> dict[str, Any]:
    """Return planned and measured values, from the run's events or (after training) from measured.json."""
    with run.lock:
        planned, actual, table = dict(run.planned), dict(run.actual), run.measured
    if not actual and isinstance(table.get("measured"), dict):
        actual = table["measured"]
    expected = planned or (table["expected"] if isinstance(table.get("expected"), dict) else {})
    drift = actual.get("drift")
    return {
        "basis": str(expected.get("basis", ""))[:200],
        "unknown": "" if expected else str(table.get("unknown") or "")[:500],
        "planned": _numbers(expected.get("parts")),
        "actual": _numbers(actual.get("parts")),
        "step_s": [_finite(expected.get("step_s")), _finite(actual.get("step_s"))],
        "memory_bytes": [_finite(expected.get("memory_bytes")), _finite(actual.get("memory_bytes"))],
        "drift": [str(one)[:500] for one in drift[:20]] if isinstance(drift, list) else [],
    }


def _curve(columns: StepColumns, name: str, rows: slice, points: int) -> dict[str, Any]:
    values = columns.values(name)[rows]
    mean, low, high = thinned(values, points)
    return {"mean": mean} if low is mean else {"mean": mean, "low": low, "high": high}


def _evaluations(run: RunIndex, first: float, last: float, points: int) -> dict[str, Any]:
    rows = run.evals.rows(first, last)
    steps = run.evals.steps[rows]
    edges = bucket_edges(len(steps), points)
    ends = np.append(edges[1:], len(steps)) - 1 if len(edges) else edges
    return {
        "step": steps[ends].tolist(),
        "time": [_short(one, 14) for one in run.evals.times[rows][ends].tolist()],
        **{
            name: thinned(run.evals.values(name)[rows], points)[0]
            for name in run.evals.names
            if name not in ("step", "time")
        },
    }


def _planned(run: RunIndex) -> dict[str, float]:
    return _numbers(run.planned.get("figures"))


def _numbers(table: object) -> dict[str, float]:
    pairs = list(table.items())[:100] if isinstance(table, Mapping) else []
    return {str(name): found for name, value in pairs if (found := _finite(value)) is not None}


def _finite(value: object) -> float | None:
    found = number(value)
    return found if math.isfinite(found) else None


def _flatten(value: Any, name: str, into: dict[str, str], depth: int = 0) -> None:
    if isinstance(value, Mapping) and value and depth < 8:
        for key, inside in value.items():
            _flatten(inside, f"{name}.{key}" if name else str(key), into, depth + 1)
    elif value is not None and len(into) < 2000:
        into[name] = _text(value)


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:1000]


def _short(value: float | None, digits: int = 6) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


# The dashboard's routes. Only one of them sends requests to runs; the others change nothing.

_STATIC = Path(__file__).parent / "static"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
#: Actions of the page's buttons. Alerts support more actions.
ACTIONS = ("checkpoint", "hold", "stop", "resume")
_MOST_BODY = 4096
_LOOK_S, _BEAT_S = 0.5, 15.0
#: Time limit (s) for writing to a run's folder.
_ASK_S = 5.0


class Page:
    """HTTP request handlers for the runs of a catalog.

    Args:
        shelf: catalog of the runs.
        access: access rules.
        price: price of one device, for the cost of runs.
        go_on: continues the paused run of a folder. If None, requests to resume are answered with the command for it.
        most_streams: maximum number of open pages with live updates.
    """

    def __init__(
        self,
        shelf: RunCatalog,
        access: AccessRules,
        price: Price | None = None,
        go_on: Callable[[Path], None] | None = None,
        *,
        most_streams: int = 200,
    ):
        self._most_streams, self._num_streams = most_streams, 0
        self.shelf, self.access, self.price, self.go_on = shelf, access, price, go_on

    def routes(self) -> list[Route]:
        """Return all routes."""
        return [
            Route("/", self.index),
            Route("/login", self.login, methods=["GET", "POST"]),
            Route("/static/{name:path}", self.static),
            Route("/api/runs", self.runs),
            Route("/api/curves", self.curves),
            Route("/api/heat", self.heat),
            Route("/api/marks", self.marks),
            Route("/api/config", self.config),
            Route("/api/profile", self.profile),
            Route("/api/planned", self.serve_planned_and_measured),
            Route("/api/stream", self.stream),
            Route("/api/ask", self.ask, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        """Serve the page, with the CSRF secret that its buttons send back."""
        page = static_files()["index.html"].decode().replace("{{csrf}}", self.access.csrf)
        return Response(page, media_type="text/html", headers={"cache-control": "no-store"})

    async def login(self, request: Request) -> Response:
        """Serve the login form, or check the token and set a cookie, so that a browser sends the token only once."""
        if request.method == "GET":
            return Response(static_files()["login.html"], media_type="text/html")
        body = (await _body(request)).decode(errors="replace")
        pairs = (part.partition("=") for part in body.split("&"))
        said = next((value for key, _, value in pairs if key == "token"), "")
        address = request.client.host if request.client else ""
        if wait_s := self.access.guesses.wait_s(address):
            return too_many_guesses(wait_s)
        if not self.access.is_token(said.strip(), address):
            return PlainTextResponse("This is not the token. It is the line in the file of --token-file.", 403)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            COOKIE, self.access.cookie, httponly=True, samesite="strict", secure=self.access.secure, max_age=30 * 86400
        )
        return answer

    async def static(self, request: Request) -> Response:
        """Serve a file of the page from the package."""
        name = request.path_params["name"]
        found = static_files().get(name)
        if found is None or name.endswith(".html"):
            return PlainTextResponse("not found", 404)
        kind = _KINDS.get(Path(name).suffix, "text/plain")
        return Response(found, media_type=kind, headers={"cache-control": "no-cache"})

    async def runs(self, request: Request) -> Response:
        """Serve a summary of each run, the price of a device, and the names of the causes of time."""
        return JSONResponse(await asyncio.to_thread(self.all_runs))

    def all_runs(self) -> dict[str, Any]:
        """Return the JSON response of the `runs` route."""
        lines = [run_line(run, self.price) for run in self.shelf.runs.values()]
        return {
            "root": self.shelf.root.resolve().name,
            "one": self.shelf.is_one,
            "price": None if self.price is None else f"{self.price.per_s * 3600:.4g} {self.price.currency}/h",
            "runs": lines,
            "causes": list(TimeLedger().seconds()),
        }

    async def curves(self, request: Request) -> Response:
        """Serve a run's curves between two steps."""
        query = request.query_params
        bounds = _float(query.get("from"), -1.0), _float(query.get("to"), 2.0**62)
        points = int(_float(query.get("points"), 600.0))
        return await self._of_run(request, lambda run: curves(run, *bounds, points))

    async def heat(self, request: Request) -> Response:
        """Serve the busy time of each rank over a run's steps."""
        return await self._of_run(request, heat)

    async def marks(self, request: Request) -> Response:
        """Serve a run's events."""
        return await self._of_run(request, marks)

    async def config(self, request: Request) -> Response:
        """Serve a run's settings."""
        return await self._of_run(request, config_of)

    async def profile(self, request: Request) -> Response:
        """Serve a file of the profiler. Only names in the run's folder are accepted."""
        run = self.shelf.get(request.query_params.get("id", ""))
        files = [] if run is None else await asyncio.to_thread(profile_files, run.folder)
        found = next((file for file in files if file.name == request.query_params.get("name")), None)
        if found is None:
            return JSONResponse({"error": "There is no such file in the folder of this run."}, 404)
        return FileResponse(found, media_type="application/octet-stream", filename=found.name)

    async def serve_planned_and_measured(self, request: Request) -> Response:
        """Serve a run's planned and measured values."""
        return await self._of_run(request, planned_and_measured)

    async def _of_run(self, request: Request, view: Callable[[RunIndex], Any]) -> Response:
        run = self.shelf.get(request.query_params.get("id", ""))
        if run is None:
            return JSONResponse({"error": "There is no run of this name here."}, 404)
        # Use a thread, because the run's lock may be held for a while.
        return JSONResponse(await asyncio.to_thread(view, run))

    async def ask(self, request: Request) -> Response:
        """Send a request to a run: save, pause, stop or resume."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return JSONResponse({"error": "Send application/json."}, 415)
        try:
            said = json.loads(await _body(request))
            name, action = said["id"], said["action"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return JSONResponse({"error": 'Send {"id": ..., "action": ...}.'}, 400)
        run = self.shelf.get(name) if isinstance(name, str) else None
        if run is None:
            return JSONResponse({"error": "There is no run of this name here."}, 404)
        if action not in ACTIONS:
            return JSONResponse({"error": f"A run accepts the requests {', '.join(ACTIONS)}."}, 400)
        state = run.state()[0]
        if state not in (("held",) if action == "resume" else ("running", "starting", "silent")):
            why = "only a paused run can continue" if action == "resume" else "it does not train"
            return JSONResponse({"error": f"This run is {state}: {why}."}, 409)
        try:
            if action == "resume":
                if self.go_on is None:
                    raise ConfigError(f"Type weft runs resume {run.folder}.")
                act = functools.partial(self.go_on, run.folder)
            else:
                act = functools.partial(ask, run.folder, RunRequest(action, by="a person at the page"))
            await asyncio.to_thread(within, _ASK_S, act)  # its file system may hang
        except OutOfTime:
            return JSONResponse({"error": f"The folder of this run does not answer within {_ASK_S:.0f} s."}, 504)
        except (WeftError, OSError) as error:
            return JSONResponse({"error": str(error)}, 409)
        return JSONResponse({"asked": action})

    async def stream(self, request: Request) -> Response:
        """Serve server-sent events: the summaries of runs that have changed."""
        if self._num_streams >= self._most_streams:
            return PlainTextResponse("Too many pages are open.", 503, headers={"retry-after": "10"})
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._changes(request), media_type="text/event-stream", headers=headers)

    async def _changes(self, request: Request) -> AsyncIterator[str]:
        self._num_streams += 1
        try:
            async for text in self._lines(request):
                yield text
        finally:
            self._num_streams -= 1

    async def _lines(self, request: Request) -> AsyncIterator[str]:
        sent: dict[str, tuple[int, str]] = {}
        quiet = 0.0
        yield "retry: 2000\n\n"
        while not await request.is_disconnected():
            changed = await asyncio.to_thread(self._changed, sent)
            if changed or quiet >= _BEAT_S:
                quiet = 0.0
                yield f"data: {json.dumps(changed)}\n\n" if changed else ": still here\n\n"
            await asyncio.sleep(_LOOK_S)
            quiet += _LOOK_S

    def _changed(self, sent: dict[str, tuple[int, str]]) -> list[dict[str, Any]]:
        """Return the summaries that differ from the last ones sent to this page, and record them as sent."""
        changed: list[dict[str, Any]] = []
        for name, run in self.shelf.runs.items():
            now = (run.version, run.state()[0])
            if sent.get(name) != now:
                sent[name] = now
                changed.append(run_line(run, self.price))
        return changed


def make_app(page: Page) -> Starlette:
    """Return the Starlette application that serves a page's routes, with access checks and compression."""
    return Starlette(
        routes=page.routes(),
        middleware=[Middleware(Guard, access=page.access), Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={404: _plain(404, "not found"), 405: _plain(405, "this address is only read")},
    )


@cache
def static_files() -> dict[str, bytes]:
    """Return the page's files by name, read from the package, so that paths of requests never reach the disk."""
    return {
        file.relative_to(_STATIC).as_posix(): file.read_bytes()
        for file in sorted(_STATIC.rglob("*"))
        if file.is_file() and not file.name.startswith(".")
    }


def _plain(code: int, text: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        return PlainTextResponse(text, code, headers=HEADERS)

    return answer


async def _body(request: Request) -> bytes:
    """Return the request body, or b"" if it exceeds the size limit or the client disconnects."""
    found = b""
    with contextlib.suppress(ClientDisconnect):  # the client is gone
        async for piece in request.stream():
            found += piece
            if len(found) > _MOST_BODY:
                return b""
        return found
    return b""


def _float(text: str | None, usual: float) -> float:
    try:
        found = float(text) if text else usual
    except ValueError:
        return usual
    return found if math.isfinite(found) else usual
