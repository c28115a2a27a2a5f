"""Fine-tuning questions: all weights or an adapter, and the plans that fit on given clusters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from weft.errors import ConfigError, Problem, did_you_mean
from weft.planner.search.best_plans import answer
from weft.planner.search.candidate import Answer, Candidate
from weft.planner.search.model_source import PlannedModel, read_model
from weft.planner.search.question import Question

#: Defaults of an adapter's rank and of the batch: fine-tuning reads little data per step.
RANK, SEQ_LEN, BATCH = 16, 2048, 16
TUNES = ("full", "lora", "qlora")
#: Storage of frozen weights with `--tune qlora`.
_PACKED = {"qlora": "nf4"}


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of one tuning method on one cluster."""

    tune: str
    question: Question
    answer: Answer[Candidate]

    @property
    def best(self) -> Candidate | None:
        """Best plan, or None if no plan fits."""
        return self.answer.best

    @property
    def smallest(self) -> Candidate | None:
        """Best plan. If no plan fits, the plan with the least memory."""
        return self.answer.best or self.answer.nearest


def tuned_question(model: str | PlannedModel | Any, cluster: str, tune: str, **options: Any) -> Question:
    """Return the question of fine-tuning a model.

    Args:
        model: as for `read_model`.
        cluster: as for `Question.of`.
        tune: "full", "lora", "qlora" (a base in nf4), or "lora=64" for another rank than 16.
        **options: options of `Question.of`. The defaults of seq_len and global_batch are 2048 and 16, unless a config
            sets them.

    Raises:
        ConfigError: for another value of `tune`, and as in `Question.of`.
    """
    planned = read_model(model)
    rank = _rank(tune)
    if rank and planned.traced is not None and not planned.traced.linears:
        raise _wrong(tune, f"{planned.name} has no linear layer that an adapter fits", "full")
    assumed = list[str]()
    if planned.config is None and planned.reads_sequence:
        for name, usual in (("seq_len", min(SEQ_LEN, planned.spec.max_seq_len)), ("global_batch", BATCH)):
            if options.get(name) is None:
                options[name] = usual
                assumed.append(f"--{name.replace('_', '-')} {usual}")
    asked = Question.of(planned, cluster, **options)
    adapter = planned.adapter_of(rank, _PACKED.get(tune.partition("=")[0], "stored")) if rank else None
    return replace(asked, job=replace(asked.job, adapter=adapter), assumed=(*assumed, *asked.assumed))


def what_fits(model: Any, clusters: str, **options: Any) -> list[Fit]:
    """Return the best plan of each tuning method that the model supports, on each cluster.

    Args:
        model: as for `read_model`.
        clusters: comma-separated clusters, such as "1x4090,8xh100".
        **options: options of `tuned_question`.

    Raises:
        ConfigError: as in `tuned_question`.
    """
    planned, found = read_model(model), list[Fit]()
    for cluster in filter(None, clusters.split(",")):
        for tune in TUNES:
            if planned.is_transposed and tune in _PACKED:
                continue
            asked = tuned_question(planned, cluster, tune, **dict(options))
            found.append(Fit(tune, asked, answer(asked)))
    return found


def _rank(tune: str) -> int:
    """Return the adapter's rank, or 0 if all weights are trained."""
    kind, equals, number = tune.partition("=")
    if kind not in TUNES or (equals and kind == "full"):
        rule = f"it is full, lora, lora=RANK, qlora, qlora=RANK or all.{did_you_mean(kind, TUNES)}"
        raise _wrong(tune, rule, "lora", is_ended=True)
    if not equals:
        return 0 if kind == "full" else RANK
    if not number.isdecimal() or not 1 <= int(number) <= 65536:
        raise _wrong(tune, "an adapter's rank is a whole number from 1 to 65536", "lora=64")
    return int(number)


def _wrong(tune: str, rule: str, remedy: str, *, is_ended: bool = False) -> ConfigError:
    end = "" if is_ended else "."
    return ConfigError([Problem("", f"tune={tune}: {rule}{end} Use --tune {remedy}.")])
