"""Documents packed into sequences: their attention, and the effect on a step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.cluster import ClusterSpec
from weft.config.plan import Plan
from weft.errors import ConfigError
from weft.planner.cost.machine import Tables
from weft.planner.estimator import estimate
from weft.planner.search.question import Question
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape
from weft.planner.space.trained_part import DocumentMix

SHAPE = Shape(vocab=32768, hidden=2048, layers=8, heads=16, kv_heads=8, head_dim=128, ffn=8192)
JOB = Job(shape=SHAPE, seq_len=8192, global_batch=8)
CLUSTER = ClusterSpec.parse("8xh100")
mixes = st.dictionaries(st.integers(1, 40_000), st.floats(0.01, 100), min_size=1, max_size=5)


def terms(documents: str | None, text: str = "dp_shard=8 zero=1 precision=bf16", job: Job = JOB) -> dict[str, float]:
    mix = None if documents is None else DocumentMix.parse(documents)
    plan = Plan.parse(text)
    found = estimate(replace(job, documents=mix), CLUSTER, Columns.of([plan], job), Tables.of(CLUSTER.device, "tables"))
    return {name: float(seconds[0]) for name, seconds in found.terms.items()}


@given(mixes, st.integers(1, 20_000))
def test_segments_contain_all_tokens_and_fit_the_sequence(counts: dict[int, float], seq_len: int) -> None:
    mix = DocumentMix(tuple(sorted(counts.items())))
    segments = list(mix.segments(seq_len))
    assert sum(share for _, share in segments) == pytest.approx(1)
    assert all(0 < length <= seq_len and share > 0 for length, share in segments)
    mean = sum(length * count for length, count in counts.items())
    for length, share in segments:  # by hand: full sequences of longer documents, and remainders
        of_it = sum(
            count * (length * (each // seq_len) if length == seq_len else 0)
            + count * length * (each % seq_len == length)
            for each, count in counts.items()
        )
        assert share == pytest.approx(of_it / mean)


def test_one_document_per_sequence_changes_nothing() -> None:
    assert terms("8192") == terms(None) == terms("81920")


def test_only_attention_gets_faster_in_proportion_to_its_keys() -> None:
    whole, halves, short = terms(None), terms("4096"), terms("512")
    assert {name for name in whole if short[name] != whole[name]} <= {"attention", "straggler"}
    assert short["attention"] < halves["attention"] < whole["attention"]
    # Half of the keys at the rate of 4096 tokens.
    longer = terms(None, job=replace(JOB, seq_len=4096, global_batch=16))
    assert halves["attention"] == pytest.approx(longer["attention"], rel=0.01)


def test_mix_lies_between_its_lengths() -> None:
    long, short, mixed = terms("8192"), terms("512"), terms("512:16,8192:1")
    mean = np.mean([long["attention"], short["attention"]])  # half of the tokens are in each
    assert mixed["attention"] == pytest.approx(mean, rel=0.01)


def test_only_ulysses_gains_from_short_documents() -> None:
    ring, ulysses = ("cp=8 cp_mode=ring precision=bf16", "cp=8 cp_mode=ulysses precision=bf16")
    assert terms("512", ring)["attention"] == terms(None, ring)["attention"]
    assert terms("512", ulysses)["attention"] < terms(None, ulysses)["attention"]


@pytest.mark.parametrize("text", ["", "x", "512:", "512:0", "512:-1", "0:1", "512:nan", "512:1:2", "512:1,,8k"])
def test_invalid_text_is_rejected_with_one_message(text: str) -> None:
    with pytest.raises(ConfigError, match=r"documents=.*numbers above 0.*Write e\.g\. --documents 512:9,8k:1\."):
        DocumentMix.parse(text)


def test_question_reports_its_documents() -> None:
    asked = Question.of("llama3-8b", "8xh100", documents="512:9,8k:1")
    assert asked.work == "128 sequences of 8192 tokens a step, documents of 1261 tokens on average"
