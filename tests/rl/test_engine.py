"""Completions of an engine over HTTP: a small server in this process stands for vLLM and SGLang."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inference.models import plain_model, write_folder
from tests.rl.cases import write_prompts
from tests.train import conftest as train_fixtures
from weft.config.files import load_config
from weft.errors import ActionAsked, CommError, ConfigError
from weft.generation.batch import Limits, generate_batch
from weft.generation.http_engine import HttpEngine
from weft.generation.requests import Request, Sampling
from weft.monitor.events import read_events
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank

pytest.importorskip("transformers")
no_plots = train_fixtures.no_plots

VOCAB = 257
SAMPLING = Sampling(6, temperature=1.0, seed=3, stop_ids=frozenset({256}))


class Engine(http.server.ThreadingHTTPServer):
    """Serves a folder's model in the protocols of vLLM and SGLang."""

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.model = folder, plain_model(folder)
        self.lock, self.reads, self.seen = threading.Lock(), 0, list[dict[str, Any]]()
        self.change: Any = None  # changes an answer
        self.status, self.token = 200, ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path in ("/collective_rpc", "/update_weights_from_disk"):
            self.model, self.reads = plain_model(Path(body.get("model_path", self.folder))), self.reads + 1
            return {"success": True, "message": ""}
        settings = body.get("sampling_params", body)
        prompt = tuple(body["input_ids"] if "input_ids" in body else body["prompt"])
        seed, room = (
            settings.get("seed", settings.get("sampling_seed")),
            settings.get("max_tokens", settings.get("max_new_tokens")),
        )
        sampling = Sampling(
            room, settings["temperature"], None, settings["top_p"], seed, frozenset(settings["stop_token_ids"])
        )
        with self.lock:
            self.seen.append(body)
            one = generate_batch(self.model, [Request(0, prompt)], sampling, Limits(VOCAB))[0]
        if path == "/generate":
            pairs = [[log_prob, token, None] for log_prob, token in zip(one.log_probs, one.ids, strict=True)]
            return {"meta_info": {"finish_reason": {"type": one.reason}, "output_token_logprobs": pairs}}
        choice = {"token_ids": one.ids, "logprobs": {"token_logprobs": one.log_probs}, "finish_reason": one.reason}
        return {"choices": [choice]}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        allowed = not server.token or self.headers.get("Authorization") == f"Bearer {server.token}"
        found = server.answer(self.path, body) if allowed and server.status == 200 else {}
        if server.change is not None:
            found = server.change(self.path, found)
        self.send_response(server.status if allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def engine(tmp_path, monkeypatch) -> Iterator[Engine]:
    monkeypatch.setattr("weft.generation.http_engine._PAUSES_S", (0.01,))
    server = Engine(write_folder(tmp_path / "model", "llama"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def client(engine: Engine, kind: Any = "vllm", token: str | None = None) -> HttpEngine:
    return HttpEngine(kind, engine.url, "served", token, 20.0)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_completions_and_weights_of_both_kinds(kind, engine, tmp_path):
    requests = [Request(key, prompt) for key, prompt in enumerate([(5, 6, 7), (), (300,), (9,)])]
    found = client(engine, kind).complete(requests, SAMPLING, Limits(VOCAB, 64))
    assert [one.key for one in found] == [0, 1, 2, 3]
    assert [one.reason for one in found][1:3] == ["refused", "refused"]
    for one in (found[0], found[3]):
        ids = torch.tensor([[*requests[one.key].prompt_ids, *one.ids]])
        start = len(requests[one.key].prompt_ids) - 1
        own = engine.model(ids).logits[0, start:-1].log_softmax(-1)[range(len(one.ids)), list(one.ids)]
        assert one.log_probs == pytest.approx(own.tolist(), abs=1e-6)
    assert found[0].ids != found[3].ids
    other = write_folder(tmp_path / "other", "llama", seed=9)
    client(engine, kind).load(other)
    assert engine.reads == 1


def test_an_engine_that_answers_wrongly(engine):
    def ask() -> Any:
        return client(engine).complete([Request(0, (5, 6))], SAMPLING, Limits(VOCAB, 64))

    engine.change = lambda path, found: {"choices": [{"text": "no ids"}]}
    with pytest.raises(CommError, match="its answer has no token ids with log probabilities"):
        ask()
    engine.change = lambda path, found: {"choices": [{**found["choices"][0], "token_ids": [999] * 6}]}
    with pytest.raises(CommError, match=r"with ids below 257\. Serve the model that is trained"):
        ask()
    engine.change, engine.status = None, 404
    with pytest.raises(CommError, match=r"/v1/completions failed .*404"):
        ask()
    engine.status = 503
    with pytest.raises(CommError, match=r"503.*Check that the engine runs"):
        ask()
    engine.change, engine.status = (lambda path, found: {"success": False, "message": "no file"}), 200
    with pytest.raises(CommError, match=r"could not read the weights in .* \(no file\)"):
        client(engine, "sglang").load(engine.folder)


def test_a_token_is_sent_and_not_shown(engine):
    engine.token = "s3cret"
    assert client(engine, token="s3cret").complete([Request(0, (5,))], SAMPLING, Limits(VOCAB, 64))[0].ids
    with pytest.raises(CommError, match="401") as caught:
        client(engine, token="wr0ng").complete([Request(0, (5,))], SAMPLING, Limits(VOCAB, 64))
    assert "wr0ng" not in str(caught.value)


SETTINGS = ["task=grpo", "model.path=model", "grpo.reward=own.py:letter", "grpo.completions=4", "grpo.max_tokens=6",
            "train.seq_len=24", "train.global_batch=8", "schedule.kind=constant", "optimizer.lr=0.01", "train.steps=3",
            "monitor.figures=false", "data.train=prompts.jsonl", "data.cache_dir=cache", "run.dir=runs",
            "launch.device=cpu", "grpo.engine_folder=served"]  # fmt: skip


@pytest.fixture
def home(engine, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "own.py").write_text(
        "def letter(completions, letter):\n"
        "    return [float(text.count(one)) for text, one in zip(completions, letter)]\n"
    )
    engine.folder = tmp_path / "served"
    return tmp_path


def mismatches(*more: str) -> list[float]:
    config = load_config(None, [*SETTINGS, *more]).config
    found = prepare_run(config, world_size=1)
    run_rank(found.path, None, io.StringIO())
    figures = [event["figures"] for event in read_events(found.events) if event["event"] == "figures"]
    return [one["rl.mismatch_max"] for one in figures if "rl.mismatch_max" in one]


def test_the_engine_samples_with_the_weights_of_each_step(home, engine):
    found = mismatches(f"grpo.engine={engine.url}", "run.name=fresh")
    assert len(found) == 3
    assert max(found) < 1e-4
    assert engine.reads == 3
    model, engine.answer = (
        engine.model,
        lambda path, body: Engine.answer(engine, path, body) if path == "/v1/completions" else {"success": True},
    )
    found = mismatches(f"grpo.engine={engine.url}", "run.name=stale")
    assert engine.model is model
    assert max(found) > 1e-3


def test_a_dead_engine_pauses_the_run(home, engine):
    engine.status = 503
    with pytest.raises(ActionAsked, match=r"vllm engine http://127.0.0.1:[0-9]+: /collective_rpc failed"):
        mismatches(f"grpo.engine={engine.url}", "run.name=dead")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["grpo.engine=http://127.0.0.1:1", "grpo.engine_folder="], "an engine reads its weights from a folder"),
        (["grpo.engine_folder=x"], "an engine reads its weights from a folder"),
        (["grpo.engine=ftp://x"], "grpo.engine"),
    ],
)
def test_settings_that_do_not_fit(settings, text, home):
    with pytest.raises(ConfigError, match=text):
        prepare_run(load_config(None, [*SETTINGS, *settings]).config, world_size=1)
