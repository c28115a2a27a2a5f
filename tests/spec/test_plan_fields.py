"""A plan field is described only at its declaration, as shown with a copy of the sources with two more fields."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft.config.fields.plan_values import Integer
from weft.config.plan import PLAN_FIELDS, Plan
from weft.errors import PlanError

#: A switch that the planner searches under tensor parallelism, and a number that refinement moves.
DECLARED = """
    prefetch: bool = described(
        kinds.Switch(), False, "Fetch the next layer early.",
        needs=("tp",), searched=(False, True), tried=(False, True), asks="value",
    )
    lanes: int = described(
        kinds.Integer(1, 8), 1, "Streams for copies.",
        tried=(1, 3), nearby=lambda plan, facts, fine: (plan.lanes + 1,), divides_work=False,
    )
"""
USED = r"""
import json
from weft.planner.report.explanation import search
from weft.planner.search.refine import changed_words, neighbours
from weft.planner.space.columns import Columns
from weft.config.files import config_schema
from weft.config.plan import PLAN_FIELDS, Plan
from weft.verify.matrix import LAYOUT_FIELDS, legal, row_of, values_tried
from weft.verify.subject import techniques_of

plan = Plan.parse("tp=2 prefetch=yes lanes=3")
found = search("tiny", "2xa100", seq_len=256, global_batch=8)
fixed = search("tiny", "2xa100", seq_len=256, global_batch=8, fixed="prefetch=on lanes=2")
columns = Columns.of([plan, Plan(tp=2)], found.question.job)
moves = {changed_words(plan, one) for one in neighbours(plan, found.question)}
few = legal(2, zero=(0,), order=((),), recompute=("none",), offload=((),))
try:
    Plan.parse("lanes=9 prefetch=maybe")
except ValueError as error:
    refused = str(error)
print(json.dumps({
    "text": plan.format(),
    "decoded": columns.plan(0).format(),
    "numbers": [columns.prefetch.tolist(), columns.lanes.tolist()],
    "refused": refused,
    "searched": sorted({(one.plan.tp > 1, one.plan.prefetch) for one in found.ranked}),
    "fixed": sorted({(one.plan.prefetch, one.plan.lanes) for one in fixed.ranked}),
    "moves": sorted(moves & {"prefetch=off", "lanes=4"}),
    "tried": [values_tried(2)[name] for name in ("prefetch", "lanes")],
    "listed": sorted({(one.prefetch, one.lanes) for one in few}),
    "layout": [name in LAYOUT_FIELDS for name in ("prefetch", "lanes")],
    "row": row_of(plan)["layout"],
    "asks": sorted(techniques_of(plan)),
    "schema": config_schema()["properties"]["plan"]["anyOf"][1]["properties"]["lanes"],
}))
"""


@pytest.fixture(scope="module")
def with_two_fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return the outputs of a copy of Weft whose plan declares two more fields."""
    home = tmp_path_factory.mktemp("copy")
    shutil.copytree(Path(weft.__file__).parent, home / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    source = home / "weft" / "config" / "plan.py"
    before, separator, after = source.read_text().partition("\n    def __post_init__")
    source.write_text(before + DECLARED + separator + after)
    done = subprocess.run(
        [sys.executable, "-c", USED], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(home)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_new_field_is_parsed_formatted_and_checked(with_two_fields):
    assert with_two_fields["text"] == "tp=2 prefetch=on lanes=3"
    assert with_two_fields["refused"].splitlines() == [
        "lanes=9: a whole number from 1 to 8 is needed. Use lanes=1 to leave it out.",
        "prefetch=maybe: this is a switch. Use prefetch=on or prefetch=off.",
    ]
    assert with_two_fields["schema"] == {
        "type": "integer", "minimum": 1, "maximum": 8, "description": "Streams for copies."
    }  # fmt: skip


def test_new_field_is_encoded_and_searched(with_two_fields):
    assert with_two_fields["decoded"].split()[:3] == ["tp=2", "prefetch=on", "lanes=3"]
    assert with_two_fields["numbers"] == [[True, False], [3, 1]]
    assert with_two_fields["searched"] == [[False, False], [True, False], [True, True]]
    assert with_two_fields["fixed"] == [[True, 2]]
    assert with_two_fields["moves"] == ["lanes=4", "prefetch=off"]


def test_new_field_is_covered_by_test_matrices(with_two_fields):
    assert with_two_fields["tried"] == [[False, True], [1, 3]]
    assert with_two_fields["listed"] == [[False, 1], [False, 3], [True, 1], [True, 3]]
    assert with_two_fields["layout"] == [True, False]
    assert with_two_fields["row"] == "tp=2 prefetch=on"
    assert with_two_fields["asks"] == ["prefetch=True", "tp"]


@pytest.mark.parametrize("name", PLAN_FIELDS)
def test_every_field_is_described(name):
    field = PLAN_FIELDS[name]
    assert field.name == name
    assert field.help.endswith(".")
    assert field.kind.words()
    assert field.default == getattr(Plan(), name)
    assert field.kind.read(field.kind.write(field.default)) == field.default
    assert set(field.needs) <= set(PLAN_FIELDS)
    if field.columns and field.default != field.auto_value:
        assert field.kind.decode(*field.kind.encode(field.default)) in (field.default, Plan().axis_order)
    assert not field.searched_with or PLAN_FIELDS[field.searched_with].searched


def test_none_is_the_empty_value_of_list_fields():
    assert Plan.parse("order=none split=none offload=none") == Plan()
    with pytest.raises(PlanError, match="order=nine: not one of pp"):
        Plan.parse("order=nine")


def test_integer_field_error_names_its_limits():
    with pytest.raises(PlanError, match=r"^x=3: a whole number from 1 to 2 is needed. Use x=1 to leave it out.$"):
        Integer(1, 2).check("x", 3)
