"""From a question to ranked plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Answer",
    "Candidate",
    "PlannedModel",
    "Question",
    "UnknownFamily",
    "answer",
    "changed_words",
    "drawn_schedule",
    "estimated",
    "host_message",
    "memory_by_rank",
    "neighbours",
    "of_decoder",
    "read_model",
    "tuned_question",
    "what_fits",
]

if TYPE_CHECKING:
    from weft.planner.search.best_plans import answer, host_message
    from weft.planner.search.candidate import Answer, Candidate
    from weft.planner.search.model_source import PlannedModel, UnknownFamily, of_decoder, read_model
    from weft.planner.search.moves import changed_words, estimated, neighbours
    from weft.planner.search.question import Question
    from weft.planner.search.ranks import drawn_schedule, memory_by_rank
    from weft.planner.search.tuning import tuned_question, what_fits

__getattr__ = loads(
    __name__,
    {
        "Answer": ".candidate",
        "Candidate": ".candidate",
        "PlannedModel": ".model_source",
        "Question": ".question",
        "UnknownFamily": ".model_source",
        "answer": ".best_plans",
        "changed_words": ".moves",
        "drawn_schedule": ".ranks",
        "estimated": ".moves",
        "host_message": ".best_plans",
        "memory_by_rank": ".ranks",
        "neighbours": ".moves",
        "of_decoder": ".model_source",
        "read_model": ".model_source",
        "tuned_question": ".tuning",
        "what_fits": ".tuning",
    },
)
