"""Arbitrary user code under tp and sp matches one process, or is rejected with the operation's name."""

from __future__ import annotations

import pytest
import torch

from tests.parallel import feature_cases, module_cases, token_cases
from tests.parallel.tp_cases import Net
from weft.errors import LayoutError
from weft.models.inspect.find_layout import find_layout
from weft.parallel.tensor.apply import find_token_regions
from weft.parallel.tensor.read_layout import nowhere

#: Cases that tracing cannot detect, but a trial step does.
UNTRACED = ("log of length", "length of shape", "vmap of length")
#: Cases whose token-mixing module gets all tokens.
GATHERED = ("conv",)
#: Adds a constant to all features, which the following norm removes.
REMOVED = ("length in full",)
#: Blocks in which all ranks get all tokens, and the reason.
UNDIVIDED = {
    "condition for each token": r"blocks\.0 \(Block\) calls `mul`",
    "condition kept by the block": r"blocks\.0 \(Block\) reads a tensor made outside the block",
    "part used outside": "is called outside its block",
    "hidden states kept": "Net reads a value for each token that a block keeps",
    "aux of all": r"blocks\.0 \(AuxBlock\) calls `mean`",
    "aux for each token": "Net reads a value for each token that a block keeps",
    "aux of weights": "Net reads a value with a gradient that a block computed",
    "aux of weights kept for the loss": r"blocks\.0 \(Block\) keeps a number with a gradient in aux",
    "lists of four": r"layers\.0(\.0)? \(\w+\) is not called as one module",
    "lists of two": r"layers\.0(\.0)? \(\w+\) is not called as one module",
    "dicts": r"layers\.0(\.\w+)? \(\w+\) is not called as one module",
}


#: Some cases in the gate, and all of them in the full run.
PARTS = pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.full), 7], ids=["all", "some"])


def traceable_names(part):
    names = [name for name in token_cases.MIXING if name not in (*UNTRACED, *REMOVED, *GATHERED)]
    return names[part]


def expect_refused(names):
    for name in names:
        torch.manual_seed(0)
        model = Net(**token_cases.in_block(token_cases.MIXING[name]))
        with pytest.raises(LayoutError) as caught:
            find_token_regions(model, find_layout(model), nowhere, 2)
        assert str(caught.value).startswith("sp=on: blocks.0"), name
        assert str(caught.value).endswith("Use sp=off."), name


def check(pool, run, names, plan, accepted):
    first, second = pool.run(run, names, plan)
    for name in names:
        assert first[name].split()[0] == second[name].split()[0], name
        assert first[name].startswith(("equal", "refused")), f"{name}: {first[name]}"
        assert name not in accepted or first[name].startswith("equal"), f"{name}: {first[name]}"
    return first


def in_block(names):
    return [f"{name} in a block" for name in names]


def test_token_mixing_in_a_block_is_rejected_by_name():
    expect_refused(traceable_names(slice(0, None, 5)))


@pytest.mark.full
def test_every_token_mixing_case_is_rejected_by_name():
    expect_refused(traceable_names(slice(None)))


def test_mixing_blocks_get_all_tokens(ranks2):
    """Also if only a trial step finds it, as for the first of these."""
    names = in_block((*UNTRACED[1:], "custom backward", "attention", "cumsum", "length", "drop tokens", "scatter"))
    check(ranks2, token_cases.token_outcomes, names, "tp=2 sp=on", set(names))


@pytest.mark.parametrize("name", UNDIVIDED)
def test_reason_why_all_ranks_get_all_tokens(name):
    torch.manual_seed(0)
    case = token_cases.STRUCTURES[name]
    model = case() if callable(case) else Net(**case)
    with pytest.raises(LayoutError, match=UNDIVIDED[name]):
        find_token_regions(model, find_layout(model), nowhere, 2)


@PARTS
def test_block_structures_match_one_process(ranks2, every):
    names = list(token_cases.STRUCTURES)[::every]
    check(ranks2, token_cases.token_outcomes, names, "tp=2 sp=on", set(names))


@PARTS
def test_token_wise_operations_match_one_process(ranks2, every):
    names = in_block(list(token_cases.LEGAL)[::every])
    check(ranks2, token_cases.token_outcomes, names, "tp=2 sp=on", set(names))


def test_token_mixing_between_blocks_matches_one_process(ranks2):
    names = [f"{name} between" for name in ("roll", "positions", "length")]
    check(ranks2, token_cases.token_outcomes, names, "tp=2 sp=on", set(names))


@pytest.mark.full
def test_every_operation_between_blocks_matches_or_is_rejected(ranks2):
    names = [f"{name} between" for name in token_cases.LEGAL | token_cases.MIXING]
    for start in range(0, len(names), 50):
        check(ranks2, token_cases.token_outcomes, names[start : start + 50], "tp=2 sp=on", ())


@PARTS
@pytest.mark.parametrize("plan", ["tp=2", pytest.param("tp=2 sp=on", marks=pytest.mark.full)])
def test_features_are_sharded_only_if_treated_separately(ranks2, plan, every):
    names = list(feature_cases.CASES)[::every]
    found = check(ranks2, feature_cases.feature_outcomes, names, plan, names if plan == "tp=2" else ())
    if plan == "tp=2":  # legal cases must be sharded, not only correct
        legal = [f"{name} in the feed-forward part" for name in feature_cases.LEGAL]
        divided = [name for name in legal if found.get(name) == found[legal[0]]]
        assert len(divided) > 0.8 * len([name for name in legal if name in found])


#: User blocks in the gate.
SOME_MODULES = ("three layers", "residual ff", "flat ff", "experts by where", "all in one", "each block twice",
                "nanoGPT", "timm", "mixer", "loop over tokens", "loop into a tensor", "mean behind the row layer",
                "mean of an expert", "scale in front", "convolution in front", "norms in a list")  # fmt: skip


@pytest.mark.parametrize("names", [pytest.param(tuple(module_cases.CASES), marks=pytest.mark.full), SOME_MODULES],
                         ids=["all", "some"])  # fmt: skip
@pytest.mark.parametrize("plan", [pytest.param("tp=2", marks=pytest.mark.full), "tp=2 sp=on"])
def test_user_blocks_match_one_process(ranks2, plan, names):
    for start in range(0, len(names), 20):
        check(ranks2, module_cases.module_outcomes, names[start : start + 20], plan, set(module_cases.LEGAL))


def test_model_without_gradients_cannot_be_compared(ranks2):
    for found in ranks2.run(module_cases.module_outcomes, ["no gradients"], "tp=2"):
        assert found["no gradients"] == (
            "refused tp=2: a trial step on small inputs gives no gradients, so sharded layers cannot be compared with "
            "one process. Use tp=1, or set a layout without these layers."
        )


def test_uneven_numbers_of_tokens_are_padded(ranks2):
    names = ("parallel", "attention by hand", "flat ff", "depthwise convolution")
    first, _ = ranks2.run(module_cases.module_outcomes, names, "tp=2 sp=on", 7)
    for name, outcome in first.items():
        assert outcome.startswith("equal"), f"{name}: {outcome}"


@pytest.mark.parametrize("name", ["nanoGPT", "timm", "timm by index", "written heads"])
def test_heads_in_module_attributes_are_sharded(name):
    layout = find_layout(module_cases.CASES[name]())
    layer = "q" if name == "written heads" else "c_attn" if name == "nanoGPT" else "qkv"
    style = layout.style(f"layers.0.attn.{layer}")
    assert style is not None
    assert style.name == "colwise"


@pytest.mark.parametrize("name", ["mean behind the row layer", "mixer", "experts by where"])
def test_token_mixing_module_gets_all_tokens(name):
    model = module_cases.CASES[name]()
    regions = find_token_regions(model, find_layout(model), nowhere, 2)
    assert regions.full
    assert regions.why_full


def test_token_count_argument_to_a_mixing_module_is_rejected():
    model = module_cases.CASES["length given"]()
    with pytest.raises(LayoutError, match="the number of tokens"):
        find_token_regions(model, find_layout(model), nowhere, 2)


#: Legal blocks that cp rejects: attention in the block's code, a block called twice in a row, and a convolution whose
#: input has the tokens last.
REJECTED_BY_CP = ("chunks of tokens", "loop over tokens", "loop into a tensor", "all in one", "each block twice",
                  "convolution in front")  # fmt: skip


@pytest.mark.parametrize("names", [pytest.param(tuple(module_cases.CASES), marks=pytest.mark.full),
                                   ("parallel", "flat ff", "rotary attention", "all in one", "positions")],
                         ids=["all", "some"])  # fmt: skip
def test_user_blocks_under_context_parallelism(ranks2, names):
    for start in range(0, len(names), 10):
        part = names[start : start + 10]
        for name, outcome in ranks2.run(module_cases.context_outcomes, part)[0].items():
            is_expected = name in module_cases.LEGAL and name not in REJECTED_BY_CP
            assert outcome.startswith("equal" if is_expected else ("equal", "refused")), f"{name}: {outcome}"
