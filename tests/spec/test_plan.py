"""Plan: parse and format are inverses, and all mistakes are reported together."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.spec.plans import plans
from weft.config.plan import AXES, OFFLOADS, Plan, plan_fields
from weft.errors import PlanError


@settings(max_examples=150, deadline=None)
@given(plans)
def test_parse_and_format_are_inverses(plan):
    assert Plan.parse(plan.format()) == plan
    assert hash(Plan.parse(str(plan))) == hash(plan)
    assert Plan.from_mapping({name: getattr(plan, name) for name in plan_fields()}) == plan
    assert "\n" not in plan.format()


@settings(max_examples=50, deadline=None)
@given(plans, st.sampled_from(AXES), st.integers(1, 64))
def test_open_axis_round_trips_through_text(plan, axis, size):
    text = plan.format(open_axis=axis)
    assert f"{axis}=*" in text.split()
    read, open_axis = Plan.read_open(text)
    assert (read, open_axis) == (plan.replace(**{axis: 1}), axis)
    single_rank = (
        {"zero": 0, "reshard": "after_forward"} if axis == "dp_shard" and size == plan.cp == 1 and plan.zero else {}
    )
    assert Plan.parse(text, read.world_size * size) == plan.replace(**{axis: size}, **single_rank)


def test_open_dp_shard_works_for_any_world_size():
    """On a single rank ZeRO has no effect and is dropped."""
    text = "dp_shard=* zero=3 reshard=after_step precision=bf16"
    assert Plan.parse(text, 1) == Plan.parse("precision=bf16")
    assert Plan.parse(text, 8) == Plan.parse("dp_shard=8 zero=3 reshard=after_step precision=bf16")
    assert Plan.parse("dp_shard=* zero=3 offload=params", 1).zero == 3  # parameters are loaded block by block
    assert Plan.parse("cp=2 dp_shard=* zero=3", 2).zero == 3  # cp ranks have shards too


@settings(max_examples=80, deadline=None)
@given(st.text() | st.lists(st.sampled_from([*plan_fields(), "=", "*", " ", "9", "-1", "x", "+"])).map("".join))
def test_any_text_parses_or_raises_plan_error(text):
    try:
        plan = Plan.parse(text, 8)
    except PlanError as caught:
        error: PlanError | None = caught
    else:
        error = None
        assert Plan.parse(plan.format()) == plan
    assert error is None or len(str(error).splitlines()) == len(error.problems) > 0


def test_format_has_only_changed_fields_in_order():
    assert Plan().format() == ""
    assert str(Plan()) == "dp_replicate=1"
    assert Plan.parse("zero=3 tp=2 dp_shard=4").format() == "dp_shard=4 tp=2 zero=3"
    assert Plan.parse("compile=on offload=params+optimizer").format() == "offload=optimizer+params compile=on"

    assert Plan.parse("offload=activations:50%+optimizer:0.250").format() == "offload=optimizer:0.25+activations:0.5"
    assert Plan.parse("offload=optimizer:1.0+params:100%+none").offload == ("optimizer", "params")


def test_offload_shares_are_parsed():
    plan = Plan(offload=("activations:.125", "optimizer", "optimizer"))
    assert [plan.offload_share(name) for name in OFFLOADS] == [1.0, 0.0, 0.125]
    assert plan.offload == ("optimizer", "activations:0.125")
    assert Plan(offload="params:30%").offload_share("params") == 0.3


def test_plan_is_read_from_a_toml_table():
    table = tomllib.loads('dp_shard = 4\ntp = 2\nzero = 3\ncompile = true\noffload = ["params"]\nrecompute = "12 GiB"')
    assert Plan.from_mapping(table) == Plan(
        dp_shard=4, tp=2, zero=3, compile=True, offload=("params",), recompute="12GiB"
    )


def test_derived_sizes():
    plan = Plan(pp=2, dp_replicate=3, dp_shard=4, cp=5, tp=6, ep=7, microbatches=8, accumulation=9)
    assert plan.world_size == 2 * 3 * 4 * 5 * 6
    assert plan.dp_size == 12
    assert plan.microbatches_per_step == 8
    assert plan.replace(pp=1).microbatches_per_step == 9
    assert tuple(plan.axis_sizes()) == AXES


GOLDEN = {
    "dp_shrad=4": "unknown plan field 'dp_shrad'. Did you mean 'dp_shard'?",
    "tp=0": "tp=0: a whole number from 1 to 999999999 is needed. Use tp=1 to leave it out.",
    "tp=two": "tp=two: a whole number from 1 to 999999999 is needed. Use tp=1 to leave it out.",
    "zero=4": "zero=4: ZeRO has stages 0 to 3. Use zero=0, 1, 2 or 3.",
    "tp=2 tp=4": "plan field 'tp' is set twice in 'tp=2 tp=4'. Keep one.",
    "tp": "plan field 'tp': a plan consists of name=value fields. Write e.g. 'dp_replicate=4 precision=bf16'.",
    "auto": "plan=auto: auto works only for a run of `weft train`, and an explicit plan is needed here. Use e.g. "
    "'dp_replicate=*'.",
    "dp_shard=* tp=*": (
        "dp_shard and tp have '*': only one mesh axis can take the remaining ranks. Use '*' once, on dp_replicate."
    ),
    "zero=*": "zero=*: only one mesh axis can take the remaining ranks. Use '*' once, on dp_replicate.",
    "dp_replicate=* tp=3": (
        "dp_replicate=*: the other axes need 3 ranks, and 8 is not a multiple of 3. "
        "Change them, or start a multiple of 3 ranks."
    ),
    "precision=bf61": "precision=bf61: not one of fp32, bf16, fp16, fp64, fp8, tf32. Did you mean 'bf16'?",
    "reshard=never": (
        "reshard=never: not one of after_forward, after_backward, after_step. Use reshard=after_forward."
    ),
    "zero=3 reshard=after_forward:1": (
        "reshard=after_forward:1: secondary shards are divided over a number of neighboring ranks, from 2 to 999999. "
        "Use reshard=after_forward:8, for 8 ranks on a host."
    ),
    "sync=diloco": (
        "sync=diloco: it is step, or average:H or diloco:H with H steps from 1 to 999999, and perhaps /N for N "
        "fragments, at most H. Use sync=step, or e.g. sync=diloco:50 or sync=diloco:50/4."
    ),
    "sync=diloco:2/3": (
        "sync=diloco:2/3: it is step, or average:H or diloco:H with H steps from 1 to 999999, and perhaps /N for N "
        "fragments, at most H. Use sync=step, or e.g. sync=diloco:50 or sync=diloco:50/4."
    ),
    "cp_mode=ulises": "cp_mode=ulises: not one of auto, gather, ring, ulysses. Did you mean 'ulysses'?",
    "sp=maybe": "sp=maybe: this is a switch. Use sp=on or sp=off.",
    "offload=disk": "offload=disk: not one of optimizer, params, activations. Use offload=optimizer.",
    "offload=optimizer:0": (
        "offload=optimizer:0: a share is a number above 0 and at most 1. Use e.g. offload=optimizer:0.5."
    ),
    "offload=params:101%": (
        "offload=params:101%: a share is a number above 0 and at most 1. Use e.g. offload=params:0.5."
    ),
    "offload=optimizer:2/0": (
        "offload=optimizer:2/0: each rank of pp has a share from 0 to 1, and not all are 0. Use e.g. "
        "offload=optimizer:1/0."
    ),
    "recompute=50%+none": (
        "recompute=50%+none: each rank of pp has one of none, full, attention, selective, and no budget. Use e.g. "
        "recompute=full+none."
    ),
    "offload=params:-1": "offload=params:-1: a share is a number above 0 and at most 1. Use e.g. offload=params:0.5.",
    "offload=params:0.5+params": "offload=params: params already has another share. Keep one.",
    "recompute=0%": (
        "recompute=0%: not one of none, full, attention, selective, nor a budget. "
        "Use one of them, or e.g. recompute=full:8, recompute=12GiB or recompute=50%."
    ),
}


@pytest.mark.parametrize("text", GOLDEN)
def test_plan_parse_errors(text):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text, 8)
    assert str(caught.value) == GOLDEN[text]


def test_all_plan_mistakes_are_reported():
    with pytest.raises(PlanError) as caught:
        Plan.parse("tp=0 zero=9 dp_shrad=2 oops")
    assert {problem.field for problem in caught.value.problems} == {"tp", "zero", "dp_shrad", "oops"}


@pytest.mark.parametrize(
    "changes",
    [{"zero": 2.0}, {"zero": True}, {"tp": True}, {"tp": 10**30}, {"tp": 10**5000}, {"sp": 1}, {"offload": 3},
     {"recompute": None}, {"precision": ["bf16"]}, {"schedule": "1F1B"}],
)  # fmt: skip
def test_wrong_types_are_rejected_at_construction(changes):
    with pytest.raises(PlanError, match=next(iter(changes))):
        Plan(**changes)
    with pytest.raises(PlanError, match=next(iter(changes))):
        Plan.from_mapping(changes)


def test_open_axis_without_world_size_is_rejected():
    with pytest.raises(PlanError, match="the number of ranks is not known here"):
        Plan.parse("dp_replicate=*")


def test_replace_rejects_unknown_fields():
    with pytest.raises(PlanError, match="Did you mean 'tp'"):
        Plan().replace(tpp=2)


def test_config_modules_do_not_import_torch():
    modules = "weft.config.files, weft.config.fields.layout, weft.config.rules.plan_rules"
    code = f"import {modules}, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_cached_values_do_not_admit_equal_values_of_other_types():
    assert Plan(pp=2, split=(1, 2)).split == (1, 2)
    for field, value in (
        ("split", (True, 2)), ("split", (1.0, 2.0)), ("split", ([1], 2)), ("order", (["tp"],)),
        ("offload", (["optimizer"],)), ("tp", True), ("tp", 1.0), ("sp", 1),
    ):  # fmt: skip
        with pytest.raises(PlanError):
            Plan(**{field: value})
