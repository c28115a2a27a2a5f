"""`weft.search`: the best plans as candidates that explain themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from weft.planner.search import Answer, Candidate, Question, answer
from weft.planner.space import Shape
from weft.planner.tell.explanation import explain
from weft.spec import ClusterSpec, DecoderSpec, ModelSpec, TracedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained(Candidate):
    """A candidate that says where its time and memory go."""

    @classmethod
    def of(cls, one: Candidate) -> Explained:
        """The same candidate."""
        return cls(**{each.name: getattr(one, each.name) for each in fields(one)})

    def explain(self, hour_price: float | None = None) -> str:
        """Where time and memory go, as text. hour_price: dollars of one device for one hour."""
        return explain(self, hour_price)


def search(
    model: str | ModelSpec | DecoderSpec | Shape | TracedModel,
    cluster: str | ClusterSpec,
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    fixed: str | Mapping[str, Any] = "",
    built_only: bool = True,
    **options: Any,
) -> Answer[Explained]:
    """Return the best plans for a model on a cluster: `weft.search("llama3-8b", "8xh100")[0].explain()`.

    Args:
        model: a size, a path to a Hugging Face config folder or to a config of Weft, a spec, or weft.trace(...).
        cluster: "2x8xh100", a .toml file, or a ClusterSpec.
        seq_len: tokens of a sequence; None: the config's, else a usual one.
        global_batch: sequences of a step; None: the config's, else a usual one.
        fixed: decided fields as plan text, such as "tp=8 precision=bf16", or by name.
        built_only: only plans that the runtime runs today.
        **options: as in `Question`.

    Raises:
        ModelError, ConfigError, PlanError: for what cannot be read.
    """
    question = Question.of(
        model, cluster, seq_len=seq_len, global_batch=global_batch, fixed=fixed, built_only=built_only, **options
    )
    return answer(question).each(Explained.of)
