"""Hugging Face families: a cell that docs/reference/models.md marks as equal is equal.

The nightly tests try every cell. The gate tries a tenth of the families, another one each day, each in one column.
"""

from __future__ import annotations

import datetime
import re
import time
from pathlib import Path

import pytest

from benchmarks.models import PLANS, families, page, row_of, verifier_of
from tests.choice import gate_runs
from tools.small_configs import small_config
from weft.config.plan import Plan

pytest.importorskip("transformers")
TABLE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
#: Seconds after which the gate starts no other family.
LONGEST_S = 8.0


def equal_cells() -> dict[str, list[str]]:
    """Return the techniques in which each family of the table is equal, without rows of earlier runs (°)."""
    found: dict[str, list[str]] = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 + len(PLANS) and "●" in cells and not cells[0].endswith("°"):
            found[cells[0]] = [name for name, cell in zip(PLANS, cells[2:], strict=True) if cell == "●"]
    return found


EQUAL = equal_cells()


def test_table_names_known_families():
    assert len(EQUAL) >= 100
    assert EQUAL.keys() <= families().keys()


def test_a_tenth_of_the_families_is_equal(ranks2):
    day = datetime.date.today().toordinal()
    start = time.monotonic()
    for number, (family, techniques) in enumerate(list(EQUAL.items())[day % 10 :: 10]):
        if time.monotonic() - start > LONGEST_S:
            break
        technique = techniques[(day + number) % len(techniques)]
        with verifier_of(family, families()[family][0], ranks2) as verifier:
            verdict = verifier.verify(Plan.parse(PLANS[technique]), explain=False)
        assert verdict.passed, f"{family} under {technique}: {verdict.refused or verdict.error or verdict.max_rel_diff}"


@pytest.mark.full
@pytest.mark.parametrize("family", EQUAL)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of families whose small config has width 0
def test_family_is_equal_in_all_cells_of_the_table(ranks2, family):
    """Last bits depend on the machine and the number of threads, so cells that `row_of` calls rounding pass too."""
    cells = row_of(family, families()[family][0], ranks2, EQUAL[family])["cells"]
    assert cells.keys() == set(EQUAL[family])
    assert not {name: cell for name, cell in cells.items() if cell != "equal" and not cell.startswith("rounding")}


@pytest.mark.parametrize(
    ("family", "technique"),
    gate_runs(
        [
            ("inkling_text", "tp"),  # the embedding has its own norm
            ("gemma3n_text", "tp"),  # a feed-forward layer keeps features above a quantile of all
            ("gemma3", "sp"),  # blocks of a vision tower and of the text
            ("resnet", "zero=2"),  # a config without an image size
            ("qwen3_vl_moe", "ep"),  # the config of the text part has the plan of its experts
        ],
        0,
        1,
    ),
)
def test_families_that_gave_other_numbers_are_equal(ranks2, family, technique):
    assert row_of(family, families()[family][0], ranks2, [technique])["cells"] == {technique: "equal"}


def test_cp_refuses_hidden_states_with_tokens_first(ranks2):
    cell = row_of("fsmt", families()["fsmt"][0], ranks2, ["cp"])["cells"]["cp"]
    assert "gets hidden states of (tokens, sequences, features)" in cell


def test_small_config_has_a_layer_of_each_kind_and_small_parts():
    config = small_config("qwen3_5", families()["qwen3_5"][0])
    assert set(config.text_config.layer_types) == {"linear_attention", "full_attention"}
    assert config.text_config.num_hidden_layers == len(config.text_config.layer_types)
    assert max(config.text_config.hidden_size, config.vision_config.hidden_size) == 16
    tokens = [config.image_token_id, config.video_token_id, config.vision_start_token_id]
    assert len(set(tokens)) == 3
    assert max(tokens) < config.text_config.vocab_size


def test_page_counts_cells_and_names_reasons():
    rows = {
        "llama": {"task": "next token", "inputs": ["input_ids"], "cells": {"tp": "equal", "sp": "refused: no. Use x."}},
        "gemma3n": {"reason": "model=/tmp/a: needs timm. You can install it with pip"},
    }
    text = page(rows)
    assert "1 of 2 cells are equal. 1 are refused" in " ".join(text.split())
    assert "- gemma3n: needs timm." in text
    assert re.search(r"\| llama \| next token \| ● \| – 1 \|", text)
