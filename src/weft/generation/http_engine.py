"""Completions from vLLM or SGLang over HTTP. The engine runs in another environment, and serves the same model.

Token ids in, token ids out: texts are never tokenized again. Weights go to the engine as a folder of safetensors files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from weft.errors import CommError
from weft.generation.batch import Limits
from weft.generation.requests import Completion, Request, Sampling, refusal
from weft.generation.sampling import uniform
from weft.monitor.sinks.base import Poster, SinkTrouble

EngineKind = Literal["vllm", "sglang"]
#: Requests in flight. The engine schedules them.
_IN_FLIGHT = 256
#: Seconds before a request is sent again, after an error of the connection or the server.
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)


class HttpEngine:
    """An engine that continues prompts.

    Args:
        kind: vllm (its OpenAI-compatible server) or sglang.
        url: address of the server, such as http://127.0.0.1:8000; env:NAME or file:PATH for a secret one.
        model: name of the served model; vllm needs it.
        token: bearer token, or None.
        timeout_s: limit of one request.

    Raises:
        ConfigError: if the URL is not an http or https URL.
    """

    def __init__(self, kind: EngineKind, url: str, model: str, token: str | None, timeout_s: float):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._kind, self._model, self._url = kind, model, url
        self._poster = Poster(url, headers, timeout_s, "grpo.engine")

    def complete(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Completion]:
        """Continue prompts, and return one completion per request, in their order.

        The engine's log probabilities must be at the sampling temperature (vLLM: --logprobs-mode processed_logprobs).
        The seed of a request derives from seed and key. Whether a text is repeatable depends on the engine.

        Raises:
            CommError: if the engine cannot be reached, refuses a request, or answers with something else.
        """
        with ThreadPoolExecutor(min(_IN_FLIGHT, max(1, len(requests)))) as pool:
            return list(pool.map(lambda one: self._complete(one, sampling, limits), requests))

    def load(self, folder: Path) -> None:
        """Make the engine read its weights from a Hugging Face folder, which has the same path for it.

        vLLM reads the folder that it was started with, and needs VLLM_SERVER_DEV_MODE=1.

        Raises:
            CommError: if the engine cannot.
        """
        if self._kind == "vllm":
            self._post("/collective_rpc", {"method": "reload_weights"})
            return
        answer = self._post("/update_weights_from_disk", {"model_path": str(folder)})
        if not isinstance(answer, dict) or answer.get("success") is not True:
            why = answer.get("message") if isinstance(answer, dict) else None
            raise CommError(f"{self._named}: it could not read the weights in {folder} ({str(why)[:200]}).")

    def _complete(self, request: Request, sampling: Sampling, limits: Limits) -> Completion:
        if error := refusal(request, limits.vocab_size, limits.max_positions):
            return Completion(request.key, (), (), "refused", error)
        room = min(sampling.max_tokens, limits.max_positions - len(request.prompt_ids))
        seed = int(uniform(sampling.seed, request.key, 0) * 2**31)
        settings: dict[str, Any] = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1,
            "stop_token_ids": sorted(sampling.stop_ids), "ignore_eos": True,
        }  # fmt: skip
        try:
            if self._kind == "vllm":
                found = self._by_openai(request, {**settings, "max_tokens": room, "seed": seed})
            else:
                found = self._by_sglang(request, {**settings, "max_new_tokens": room, "sampling_seed": seed})
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CommError(
                f"{self._named}: its answer has no token ids with log probabilities ({type(error).__name__}: {error}). "
                "Use a version whose completions return token ids, and check grpo.engine_kind."
            ) from error
        ids, log_probs, ended = found
        if len(ids) != len(log_probs) or not 0 < len(ids) <= room or not 0 <= min(ids) <= max(ids) < limits.vocab_size:
            raise CommError(
                f"{self._named}: {len(ids)} ids and {len(log_probs)} log probabilities, where 1 to {room} of each are "
                f"expected, with ids below {limits.vocab_size}. Serve the model that is trained."
            )
        return Completion(request.key, ids, log_probs, "stop" if ended else "length")

    def _by_openai(self, request: Request, settings: dict[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...], bool]:
        prompt = {"model": self._model, "prompt": list(request.prompt_ids)}
        answer = self._post("/v1/completions", {**prompt, **settings, "logprobs": 0, "return_token_ids": True})
        choice = answer["choices"][0]
        ids = tuple(int(one) for one in choice["token_ids"])
        return ids, tuple(float(one) for one in choice["logprobs"]["token_logprobs"]), choice["finish_reason"] == "stop"

    def _by_sglang(self, request: Request, settings: dict[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...], bool]:
        body = {"input_ids": list(request.prompt_ids), "sampling_params": settings, "return_logprob": True}
        meta = self._post("/generate", body)["meta_info"]
        pairs = [(int(one[1]), float(one[0])) for one in meta["output_token_logprobs"]]
        is_stop = meta["finish_reason"]["type"] == "stop"
        return tuple(token for token, _ in pairs), tuple(log_prob for _, log_prob in pairs), is_stop

    @property
    def _named(self) -> str:
        shown = "" if self._url.startswith(("env:", "file:")) else f" {self._url}"
        return f"{self._kind} engine{shown}"

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer. Errors of the connection and of the server are tried again."""
        for pause_s in (*_PAUSES_S, None):
            try:
                return self._poster.post(path, body)
            except SinkTrouble as error:
                status = getattr(error, "status", None)
                is_refused = status is not None and 400 <= status < 500 and status != 429
                if pause_s is None or is_refused:
                    raise CommError(
                        f"{self._named}: {path} failed ({error}). Check that the engine runs and serves the model."
                    ) from error
                time.sleep(pause_s)
        raise AssertionError("unreachable")
