"""Completions of prompts: sampling on the training ranks, and functions with several turns and tools."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.config.sections import GrpoSection
from weft.data.text.tokenizer import Tokenizer
from weft.errors import CommError, StepRefused
from weft.generation.batch import Limits
from weft.generation.http_engine import HttpEngine
from weft.generation.requests import Completion, Request, Sampling
from weft.monitor.sinks.base import secret_of
from weft.parallel.state.gradients import data_parallel
from weft.parallel.state.precision import Precision
from weft.rl.prompt_data import PromptRecord, decoded
from weft.train.engine import derive_seed
from weft.train.generating import complete
from weft.train.script.script_export import export_pretrained
from weft.train.tasks.description import Forwards
from weft.units import parse_seconds


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion of a prompt.

    Attributes:
        prompt_ids: token ids of the prompt.
        ids: token ids after it: sampled ones, and given ones such as the output of a tool.
        trained: True for sampled ids.
        log_probs: the sampler's log probability of each sampled id, 0 for given ids.
        reason: why the last sample ended: stop or length.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    log_probs: tuple[float, ...]
    reason: str

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Sampled:
        """Return the completion of its fields as JSON values."""
        prompt_ids, ids, trained, log_probs, reason = values.values()
        return cls(tuple(prompt_ids), tuple(ids), tuple(trained), tuple(log_probs), reason)


class Sampler:
    """Samples completions with the current weights. All ranks call it with the same requests.

    Args:
        forwards: the sharded model.
        sampling: settings for all requests.
        limits: bounds of the model and of the batch.
    """

    def __init__(self, forwards: Forwards, sampling: Sampling, limits: Limits):
        self._forwards, self._sampling, self._limits = forwards, sampling, limits

    def update(self) -> None:
        """Do nothing: the training ranks sample with their weights."""

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completion of each request, on all ranks.

        Raises:
            StepRefused: if a prompt cannot be continued.
        """
        forwards = self._forwards
        found = complete(forwards.model, forwards.mesh, requests, self._sampling, self._limits)
        if error := next((one.error for one in found if one.error), ""):
            raise StepRefused(f"grpo: {error}")
        return found


class EngineSampler:
    """Samples completions with a vLLM or SGLang server, after writing the current weights for it.

    Args:
        forwards: the sharded model, of transformers.
        grpo: address and folder of the engine.
        sampling: settings for all requests.
        limits: bounds of the model.
    """

    def __init__(self, forwards: Forwards, grpo: GrpoSection, sampling: Sampling, limits: Limits):
        self._forwards, self._sampling, self._limits = forwards, sampling, limits
        self._folder = Path(grpo.engine_folder).absolute()
        assert grpo.engine is not None
        token = secret_of(grpo.engine_token, "grpo.engine_token") if forwards.rank == 0 else None
        timeout_s = parse_seconds(grpo.engine_timeout)
        self._engine = HttpEngine(grpo.engine_kind, grpo.engine, str(self._folder), token, timeout_s)

    def update(self) -> None:
        """Write the weights in the dtype of the plan's forward, and make the engine read them. All ranks call it.

        Raises:
            StepRefused: if the engine cannot read them.
        """
        model, mesh = self._forwards.model, self._forwards.mesh
        data_parallel(model).wait_for_weights()
        export_pretrained(mesh, model, self._folder, Precision.of(mesh.plan).compute, {})
        self._on_first(lambda: self._engine.load(self._folder))

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completion of each request, on all ranks.

        Raises:
            StepRefused: if a prompt cannot be continued, or the engine fails.
        """

        def ask() -> list[Any]:
            found = self._engine.complete(requests, self._sampling, self._limits)
            return [[one.key, one.ids, one.log_probs, one.reason, one.error] for one in found]

        found = [
            Completion(key, tuple(ids), tuple(log_probs), reason, error)
            for key, ids, log_probs, reason, error in self._on_first(ask)
        ]
        if error := next((one.error for one in found if one.error), ""):
            raise StepRefused(f"grpo: {error}")
        return found

    def _on_first(self, act: Callable[[], Any]) -> Any:
        """Return the result of the first rank on all ranks. Raise StepRefused on all of them if the engine fails."""

        def caught() -> list[Any]:
            try:
                return [act(), ""]
            except CommError as error:
                return [None, str(error)]

        result, error = self._forwards.on_first(caught)
        if error:
            raise StepRefused(error)
        return result


AnySampler = Sampler | EngineSampler


def sample_prompts(sampler: AnySampler, prompts: Sequence[PromptRecord], number: int, step: int) -> list[Sampled]:
    """Return `number` completions of each prompt. The completions of one prompt are adjacent.

    The key of a completion derives from the step, the prompt's position and the completion's index.
    """
    requests = [
        Request(derive_seed(step, place, index), prompt.ids)
        for place, prompt in enumerate(prompts)
        for index in range(number)
    ]
    found = sampler.complete(requests)
    return [
        Sampled(request.prompt_ids, one.ids, (True,) * len(one.ids), one.log_probs, one.reason)
        for request, one in zip(requests, found, strict=True)
    ]


# Several turns: a user's function on the first rank, one thread for each completion.


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A sampled turn of a user's rollout function.

    Attributes:
        text: the decoded text, without special tokens.
        ids: sampled token ids.
        prompt_ids: all token ids before them.
        reason: stop or length.
    """

    text: str
    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    reason: str
    log_probs: tuple[float, ...] = field(repr=False)


class _Dialogue(threading.Thread):
    """Runs the user's function for one completion. `asked` has the prompt of the sample that it waits for."""

    def __init__(self, function: Callable[..., Any], prompt: PromptRecord, changed: threading.Condition):
        super().__init__(name="weft-rollout", daemon=True)
        self._function, self.prompt, self._changed = function, prompt, changed
        self.asked: tuple[int, ...] | None = None
        self.answer: SampledTurn | None = None
        self.turns: list[Any] = []
        self.num_samples = 0
        self.error = ""
        self.ended = False

    def run(self) -> None:
        try:
            self.turns = list(self._function(self.prompt, self._sample))
        except Exception as error:  # user code may raise anything
            self.error = f"it raised {type(error).__name__} ({error})"
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def _sample(self, ids: Iterable[int]) -> SampledTurn:
        with self._changed:
            self.asked, self.answer = tuple(map(int, ids)), None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.answer is not None)
            assert self.answer is not None
            return self.answer

    @property
    def waits(self) -> bool:
        """True if the function has ended, or waits for a sample."""
        return self.ended or self.asked is not None

    def sampled(self, num_ids: int) -> dict[str, Any]:
        """Return the completion as JSON values of `Sampled`. Raise ValueError with the reason if turns do not fit.

        num_ids: entries of the tokenizer.
        """
        ids, trained, log_probs, reason = list(self.prompt.ids), list[bool](), list[float](), ""
        for turn in self.turns:
            if isinstance(turn, SampledTurn):
                if tuple(ids) != turn.prompt_ids:
                    raise ValueError("a sampled turn was not sampled after exactly the prompt and the turns before it")
                new, logs, reason = list(turn.ids), list(turn.log_probs), turn.reason
            else:
                new = self.prompt.encode(turn) if isinstance(turn, str) else list(map(int, turn))
                if odd := [token for token in new if not 0 <= token < num_ids]:
                    raise ValueError(f"a turn has the id {odd[0]}, and the tokenizer has {num_ids} entries")
                logs = [0.0] * len(new)
            ids += new
            log_probs += logs
            trained += [isinstance(turn, SampledTurn)] * len(new)
        if not any(trained):
            raise ValueError("it returned no sampled turn. Return the results of sample(ids) in a list")
        own = len(self.prompt.ids)
        return {"prompt_ids": ids[:own], "ids": ids[own:], "trained": trained, "log_probs": log_probs, "reason": reason}


class Dialogues:
    """Runs a user's rollout function for all completions of a step. It runs on the first rank.

    Args:
        name: the function's name, for messages.
        function: the function: rollout(prompt, sample) -> turns. A turn is a result of `sample`, or a text or token ids
            that are given.
        limit_s: seconds that the function may take between two samples.
        longest: maximum number of tokens of a prompt and its turns.
        max_tokens: tokens of one sample.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], tokenizer: Tokenizer, limit_s: float, longest: int,
        max_tokens: int,
    ):  # fmt: skip
        self._name, self._function, self._tokenizer, self._limit_s = name, function, tokenizer, limit_s
        self._longest, self._max_tokens = longest, max_tokens
        self._changed = threading.Condition()
        self._threads: list[_Dialogue] = []

    def sample(
        self,
        forwards: Forwards,
        sampler: AnySampler,
        prompts: Sequence[PromptRecord],
        number: int,
        step: int,
    ) -> list[Sampled]:
        """Return `number` completions of each prompt. All ranks call it.

        Raises:
            StepRefused: if the function fails, takes too long, or returns turns that do not fit together.
        """
        first = forwards.on_first(lambda: self._start(prompts, number))
        while asked := first["asked"]:
            requests = [Request(derive_seed(step, place, turn), tuple(ids)) for place, turn, ids in asked]
            found = sampler.complete(requests)
            first = forwards.on_first(lambda found=found, asked=asked: self._answered(found, asked))
        if "error" in first:
            raise StepRefused(f"grpo.rollout={self._name}: {first['error']}. Correct it.")
        return [Sampled.from_json(one) for one in first["done"]]

    def _start(self, prompts: Sequence[PromptRecord], number: int) -> dict[str, Any]:
        def encode(text: str) -> list[int]:
            return self._tokenizer.encode_batch([text])[0].tolist()

        every = [replace(prompt, encode=encode) for prompt in prompts for _ in range(number)]
        self._threads = [_Dialogue(self._function, prompt, self._changed) for prompt in every]
        for thread in self._threads:
            thread.start()
        return self._next()

    def _answered(self, found: Sequence[Completion], asked: Sequence[Any]) -> dict[str, Any]:
        with self._changed:
            for one, (place, _, ids) in zip(found, asked, strict=True):
                thread = self._threads[place]
                text = decoded(self._tokenizer, one.ids)
                thread.asked, thread.num_samples = None, thread.num_samples + 1
                thread.answer = SampledTurn(text, one.ids, tuple(ids), one.reason, one.log_probs)
            self._changed.notify_all()
        return self._next()

    def _next(self) -> dict[str, Any]:
        """Wait for all threads. Return the samples that they ask for, or all completions, or an error."""
        try:
            if asked := self._asked():
                return {"asked": asked}
            done = [thread.sampled(self._tokenizer.vocab_size) for thread in self._threads]
            longest = max(len(one["prompt_ids"]) + len(one["ids"]) for one in done)
            if longest > self._longest:
                raise ValueError(f"its turns have {longest} tokens, and train.seq_len allows {self._longest}")
            return {"asked": [], "done": done}
        except (ValueError, TypeError) as error:
            return {"asked": [], "error": str(error)}

    def _asked(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return (completion, number of samples before, token ids) of each sample that a thread waits for."""
        end = time.monotonic() + self._limit_s
        with self._changed:
            while not all(thread.waits for thread in self._threads):
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise ValueError(f"it took more than {self._limit_s:g} s without a sample")
        if error := next((thread.error for thread in self._threads if thread.error), ""):
            raise ValueError(error)
        asked = [
            (number, thread.num_samples, thread.asked)
            for number, thread in enumerate(self._threads)
            if thread.asked is not None and not thread.ended
        ]
        most, longest = self._longest - self._max_tokens, max((len(ids) for *_, ids in asked), default=0)
        if longest > most:
            rule = "train.seq_len and grpo.max_tokens leave"
            raise ValueError(f"it asks for a sample after {longest} tokens, and {rule} {most}")
        return asked
