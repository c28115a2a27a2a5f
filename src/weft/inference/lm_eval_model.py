"""Tasks of lm-evaluation-harness on a model that ranks share. Importing this module imports lm-eval.

Each rank runs lm-eval on all requests, and the ranks compute each batch of them together.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.errors import ConfigError
from weft.generation.batch import Limits, generate_batch
from weft.generation.ranks import MeshRanks
from weft.generation.requests import Request, Sampling
from weft.inference.open_model import OpenedModel, open_model, read_facts
from weft.inference.score import ScoredSpan, Scorer
from weft.models.inspect import hugging_face
from weft.train.tasks.export import write_tokenizer
from weft.train.weights.decoder_files import base_of, tokenizer_of

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false

#: Defaults of lm-eval: longest text, and number of new tokens.
_USUAL_LENGTH, _USUAL_NEW = 2048, 256
#: Settings of a task with the number of new tokens. The first that is set counts.
_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
#: Results that are no figures.
_SILENT = ("alias", "sample_len", "name")


def evaluate_on_rank(
    mesh: Mesh,
    source: str,
    step: int | None,
    tasks: Sequence[str],
    task_folder: str | None,
    rows: int | None,
    settings: dict[str, Any],
) -> dict[str, dict[str, Any]]:
    """Return the figures of each task, as a function for `run_on_ranks`.

    Args:
        mesh: the ranks.
        source: folder of a run or of a Hugging Face model.
        step: step of the run's checkpoint; None for the newest valid one.
        tasks: names of tasks.
        task_folder: folder with further tasks, or None.
        rows: questions that are computed together; None for as many as fit into the usual number of tokens.
        settings: further arguments of lm-eval's `simple_evaluate`.
    """
    if mesh.rank:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = MeshLM(open_model(source, mesh.plan, mesh, step), _library_tokenizer(source), rows)
    with contextlib.redirect_stdout(sys.stderr):  # lm-eval prints its progress, and the command may print JSON
        answers: Any = simple_evaluate(
            model=model, tasks=list(tasks), task_manager=TaskManager(include_path=task_folder), log_samples=False,
            bootstrap_iters=0 if mesh.rank else 1000, **settings,
        )  # fmt: skip
    return {
        task: {key.removesuffix(",none"): value for key, value in figures.items() if key not in _SILENT}
        for task, figures in answers["results"].items()
    }


def _library_tokenizer(source: str) -> Any:
    """Return the transformers tokenizer of a model, which lm-eval's own class uses too."""
    run = read_facts(source).run
    if run is None or base_of(run).is_dir():
        return hugging_face.load_tokenizer(Path(source) if run is None else base_of(run))
    with tempfile.TemporaryDirectory() as draft:
        write_tokenizer(tokenizer_of(run), Path(draft))
        return hugging_face.load_tokenizer(Path(draft))


class MeshLM(TemplateLM):
    """A model of lm-eval whose weights or requests ranks share. Figures equal `HFLM`'s.

    Args:
        opened: the model.
        tokenizer: its transformers tokenizer.
        rows: questions that are computed together; None for as many as fit into the usual number of tokens.
    """

    def __init__(self, opened: OpenedModel, tokenizer: Any, rows: int | None = None):
        super().__init__()
        self.tokenizer, self._opened, self._rows = tokenizer, opened, rows or 32
        known = opened.max_positions if opened.max_positions < 2**20 else tokenizer.model_max_length
        self.max_length = known if known < 2**20 else _USUAL_LENGTH
        self._scorer = Scorer(opened, rows and rows * self.max_length)

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        found = self.tokenizer.eos_token_id
        return self._opened.tokenizer.end_id if found is None else found

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before the first one of a text without context."""
        found = self.tokenizer.bos_token_id
        return self.eot_token_id if found is None else found

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in lm-eval's caches of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text. add_special_tokens: None for the tokenizer's default."""
        del kwargs
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _scores(self, spans: Sequence[ScoredSpan]) -> list[tuple[float, bool]]:
        return self._scorer.in_windows(spans, self.max_length, self.max_length)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        del kwargs
        return self._scores([ScoredSpan((*before, *after), len(after)) for _, before, after in requests])

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text."""
        del disable_tqdm
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return [
            value for value, _ in self._scores([ScoredSpan((self.prefix_token_id, *ids), len(ids)) for ids in texts])
        ]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to the first of the task's ends."""
        del disable_tqdm
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        found = [""] * len(requests)
        for indices in groups.values():
            settings = requests[indices[0]].args[1]
            texts = self._continue([(index, requests[index].args[0]) for index in indices], settings)
            for index, text in zip(indices, texts, strict=True):
                found[index] = text
        return found

    def _continue(self, contexts: Sequence[tuple[int, str]], settings: dict[str, Any]) -> list[str]:
        """Continue contexts, each with its key, under a task's settings of generation."""
        number = int(next((settings[name] for name in _NEW if settings.get(name) is not None), _USUAL_NEW))
        if (room := self.max_length - number) < 1:
            raise ConfigError(f"max_gen_toks={number}: the model reads {self.max_length} tokens. Use fewer.")
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else [one for one in until if one]
        ends = [*until, self.tokenizer.decode(self.eot_token_id)]
        seen = 8 + max((len(end.encode()) for end in until), default=0)  # each token has a byte or more
        warmth = float(settings.get("temperature", 1.0 if settings.get("do_sample") else 0.0))
        sampling = Sampling(
            max_tokens=number,
            temperature=warmth if settings.get("do_sample", warmth > 0) else 0.0,
            top_k=settings.get("top_k"),
            top_p=settings.get("top_p") or 1.0,
            stop_ids=frozenset([self.eot_token_id]),
        )
        requests = [Request(key, tuple(self.tok_encode(text)[-room:])) for key, text in contexts]
        opened, data = self._opened, self._opened.mesh.data
        done = generate_batch(
            opened.model,
            requests[data.rank :: data.size],
            sampling,
            Limits(opened.num_ids, opened.max_positions, self._rows),
            together=MeshRanks(opened.mesh),
            ends=lambda ids: any(end in self.tokenizer.decode(ids[-seen:]) for end in until),
        )
        table = torch.zeros(len(requests), number, dtype=torch.int64, device=opened.mesh.device)  # ids from 1
        for index, one in enumerate(done):
            table[data.rank + index * data.size, : len(one.ids)] = torch.tensor(one.ids, device=table.device) + 1
        texts = [
            self.tokenizer.decode([token - 1 for token in row if token], skip_special_tokens=True)
            for row in all_reduce(table, data).tolist()
        ]
        for end in ends:
            texts = [text.split(end)[0] for text in texts]
        return texts
