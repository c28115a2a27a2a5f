"""Texts for a file of prompts, under a plan: the ranks' part of `weft generate --prompts`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.comm.mesh import Mesh
from weft.data.store.prepare import stop_ids
from weft.data.text.tokenizer import Tokenizer
from weft.errors import ConfigError, DataError
from weft.generation.batch import Limits, generate_batch
from weft.generation.ranks import MeshRanks
from weft.generation.requests import Completion, Request, Sampling
from weft.inference.open_model import OpenedModel, open_model, read_facts
from weft.inference.open_streamed import open_streamed
from weft.inference.prompts import Prompt, cut_at, read_prompts, result_line
from weft.train.states.state_io import gather, on_first
from weft.train.tasks.generation import answers_chats, open_run
from weft.units import format_seconds

#: Texts per row of the batch between two writes of results. More keep rows busier; fewer lose less if a rank dies.
_CHUNK_ROUNDS = 8
#: Last tokens that are decoded to look for a stop text, beyond its own length in characters.
_STOP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """A call of `weft generate --prompts`.

    Attributes:
        source: a run's folder or a Hugging Face folder.
        prompts: JSONL file.
        out: JSONL file to write.
        sampling: how tokens are sampled; its stop ids are replaced by the tokenizer's.
        samples: texts for each prompt.
        rows: texts in the batch of a rank.
        stops: texts that end a result.
        system: system message, or "".
        raw: True to use prompts without the chat template.
        step: step of a run's checkpoint; None for the newest.
        dtype: precision, or None for the plan's.
        memory_bytes: bound of the weights in memory, the rest of which are streamed from files; None for no bound.
    """

    source: str
    prompts: Path
    out: Path
    sampling: Sampling
    samples: int = 1
    rows: int = 32
    stops: tuple[str, ...] = ()
    system: str = ""
    raw: bool = False
    step: int | None = None
    dtype: str | None = None
    memory_bytes: int | None = None

    def digest(self, step: int | None) -> str:
        """Return a digest of all that determines the texts, to recognize an unfinished result.

        step: step of the checkpoint that is used; another one has other weights.
        """
        values = {**asdict(self), "prompts": hashlib.sha256(self.prompts.read_bytes()).hexdigest(), "step": step}
        for name in ("out", "rows", "memory_bytes"):  # they do not change texts
            del values[name]
        return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class GenerateReport:
    """Counts of a finished job.

    Attributes:
        texts: texts written, without refused ones.
        tokens: new tokens of these texts.
        refused: prompts that the model could not continue.
        seconds: time without loading.
        kept: lines of an earlier, unfinished call.
        streaming: rank 0's figures of streamed weights, or "".
    """

    texts: int
    tokens: int
    refused: int
    seconds: float
    kept: int
    streaming: str = ""


def write_texts(mesh: Mesh, job: GenerateJob) -> GenerateReport:
    """Write the texts of a job. All ranks call it, and rank 0 writes `job.out`.

    Results of finished chunks are kept in `job.out` + ".part". A later call of the same job continues after them.

    Raises:
        ConfigError, DataError: if the prompts or the model cannot be read.
        ModelError: if the model cannot generate in batches.
    """
    stream = None
    if job.memory_bytes is None:
        opened = open_model(job.source, mesh.plan, mesh, job.step, job.dtype)
    else:
        model, stream = open_streamed(Path(job.source), job.memory_bytes, job.dtype, str(mesh.device))
        opened = OpenedModel(model, *read_facts(job.source).shared(), mesh)
    if job.sampling.max_tokens > (most := 2**20) == opened.max_positions:
        raise ConfigError(
            f"--max-tokens={job.sampling.max_tokens}: this model reads texts of any length, so nothing else may end "
            f"one. Use at most {most}."
        )
    mesh = opened.mesh
    prompts = read_prompts(job.prompts)
    sampling = Sampling(**{**asdict(job.sampling), "stop_ids": frozenset(stop_ids(opened.tokenizer))})
    # A model may have more entries than its tokenizer: these are never sampled.
    limits = Limits(min(opened.num_ids, opened.tokenizer.vocab_size), opened.max_positions, job.rows)
    every = _Results(job, opened.step, len(prompts) * job.samples) if mesh.rank == 0 else None
    done = on_first(mesh, lambda: every.kept if every is not None else 0)
    chunk = job.rows * mesh.data.size * _CHUNK_ROUNDS
    ends = _ends(opened.tokenizer, job.stops)
    chats = not job.raw and answers_chats(open_run(job.source, "be opened"), opened.tokenizer)
    began = time.monotonic()
    for start in range(done, len(prompts) * job.samples, chunk):
        keys = range(start, min(start + chunk, len(prompts) * job.samples))
        own = [key for place, key in enumerate(keys) if place % mesh.data.size == mesh.data.rank]
        found = _texts(opened, prompts, own, job, sampling, limits, ends, chats)
        lines = _gathered(mesh, found)
        if every is not None:
            every.write([lines[key] for key in keys])
    texts, tokens, refused = on_first(mesh, lambda: every.finish() if every is not None else None)
    seconds = time.monotonic() - began
    if stream is not None:
        stream.close()
    return GenerateReport(texts, tokens, refused, seconds, done, stream.report.line() if stream is not None else "")


def _texts(
    opened: OpenedModel,
    prompts: Sequence[Prompt],
    keys: Sequence[int],
    job: GenerateJob,
    sampling: Sampling,
    limits: Limits,
    ends: Callable[[Sequence[int]], bool] | None,
    chats: bool,
) -> dict[int, dict[str, Any]]:
    """Return the result lines of this rank's requests by key."""
    requests, lines = [], dict[int, dict[str, Any]]()
    for key in keys:
        prompt = prompts[key // job.samples]
        try:
            requests.append(Request(key, tuple(prompt.ids(opened.tokenizer, job.system, chats))))
        except DataError as error:  # the template rejects the messages
            refused = Completion(key, (), (), "refused", str(error))
            lines[key] = result_line(prompt, key % job.samples, refused, "")
    together = MeshRanks(opened.mesh)
    for one in generate_batch(opened.model, requests, sampling, limits, together=together, ends=ends):
        ids = one.ids[:-1] if one.ids and one.ids[-1] in sampling.stop_ids else one.ids
        text = cut_at(opened.tokenizer.decode(ids), job.stops)
        lines[one.key] = result_line(prompts[one.key // job.samples], one.key % job.samples, one, text)
    return lines


def _gathered(mesh: Mesh, found: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    every: dict[int, dict[str, Any]] = {}
    for record in gather(mesh, json.dumps(found).encode()):
        every |= {int(key): line for key, line in json.loads(record).items()}
    return every


def _ends(tokenizer: Tokenizer, stops: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
    if not stops:
        return None
    last = max(map(len, stops)) + _STOP_TOKENS
    return lambda ids: any(stop in tokenizer.decode(list(ids[-last:])) for stop in stops)


class _Results:
    """The file of results on rank 0, and its progress line.

    Attributes:
        kept: finished lines of an earlier call of the same job.
    """

    def __init__(self, job: GenerateJob, step: int | None, total: int):
        self._out, self._total, self._began = job.out, total, time.monotonic()
        self._part = job.out.with_name(job.out.name + ".part")
        head = json.dumps({"job": job.digest(step)})
        lines = self._part.read_bytes().split(b"\n") if self._part.is_file() else []
        is_same = bool(lines) and lines[0] == head.encode()
        whole = lines[1:-1] if is_same else []  # the last one may be cut off
        self.kept = self._done = len(whole)
        self._part.write_bytes(b"".join(line + b"\n" for line in [head.encode(), *whole]))

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append the lines of a chunk, and flush them to the disk."""
        with self._part.open("ab") as file:
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
        self._done += len(lines)
        if self._done < self._total and sys.stderr.isatty():
            seconds = (time.monotonic() - self._began) / (self._done - self.kept) * (self._total - self._done)
            print(f"{self._done} of {self._total} texts, about {format_seconds(seconds)} left", file=sys.stderr)

    def finish(self) -> tuple[int, int, int]:
        """Write the result, and return the numbers of texts, new tokens and refused prompts."""
        lines = self._part.read_bytes().split(b"\n")[1:-1]
        draft = self._out.with_name(f".{self._out.name}.{os.getpid()}.tmp")
        draft.write_bytes(b"".join(line + b"\n" for line in lines))
        os.replace(draft, self._out)
        self._part.unlink()
        values = [json.loads(line) for line in lines]
        counts = [one["tokens"] for one in values if "error" not in one]
        return len(counts), sum(counts), len(values) - len(counts)
