"""ZeRO stages beyond the matrix: random module trees, unused parameters, half precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.choice import product
from tests.parity.cases import ImageCase, LoopedCase, TreeCase, cases
from tests.parity.plans import ONLY_DATA
from weft.verify.matrix import legal
from weft.verify.parity import train_case, train_cases, train_plain

RTOL = 1e-10

LAYOUTS_2 = ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2"]


@pytest.fixture(scope="module")
def references():
    return train_cases("precision=fp64", cases())


#: Every legal plan over the data axes only, since random trees have no layers and heads.
TREE_PLANS = [
    plan.format()
    for plan in legal(2, passes=(1, 2), recompute=("none", "full"), offload=((),), **dict.fromkeys(ONLY_DATA, (1,)))
]


@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(seed=1610, plan="dp_shard=2 zero=3 precision=fp64")  # one block inside two others
@given(seed=st.integers(0, 10**6), plan=st.sampled_from(TREE_PLANS))
def test_random_module_tree_matches_one_process(ranks2, seed, plan):
    case = TreeCase(seed)
    reference = train_plain(case)
    for result in ranks2.run(train_case, plan, case):
        assert result.largest_difference(reference) < RTOL


@pytest.mark.parametrize("plan", [*LAYOUTS_2, "dp_shard=2 zero=1 accumulation=2", "dp_shard=2 zero=2 accumulation=2"])
def test_gradient_delivered_in_parts_is_reduced_once_complete(plan, ranks2):
    case = LoopedCase()
    reference = train_plain(case)
    for result in ranks2.run(train_case, f"{plan} precision=fp64", case):
        assert result.largest_difference(reference) < RTOL


def test_comparison_detects_a_wrong_reference(references):
    """Check that the comparison can fail."""
    other = train_case("precision=fp64", ImageCase(max_grad_norm=0.0))
    assert references["cnn"].largest_difference(other) > 1e-4


def test_unused_parameters_have_a_zero_gradient_under_every_plan(references, ranks2):
    """So weight decay changes them equally under every plan."""
    unused = [name for name in references["cnn"].grads if name.startswith("unused")]
    assert len(unused) == 2
    for plan in LAYOUTS_2:
        result = ranks2.run(train_case, f"{plan} precision=fp64", ImageCase())[0]
        for name in unused:
            assert not result.grads[name].any()
            assert torch.equal(result.weights[name], references["cnn"].weights[name])
    before = dict(ImageCase().model().named_parameters())
    assert not torch.equal(before["unused.weight"], references["cnn"].weights["unused.weight"])
    assert "frozen.weight" not in references["cnn"].grads


@pytest.mark.parametrize(*product("precision, layout", ["bf16", "fp16"], LAYOUTS_2[1:]))
def test_half_precision_is_close_to_one_process(layout, precision, ranks2):
    """Compare with a bound of a few roundings: ranks split the batch, so sums in matrix products have another order.

    bf16 has 8 bits and fp16 has 11. The bound is relative to the largest element, as in the float64 matrix.
    """
    chosen = cases()
    one = train_cases(f"precision={precision}", chosen)
    bound = {"bf16": 2**-5, "fp16": 2**-8}[precision]
    for name, result in ranks2.run(train_cases, f"{layout} precision={precision}", chosen)[1].items():
        for ours, theirs in zip(result.losses, one[name].losses, strict=True):
            assert ours == pytest.approx(theirs, rel=bound), name
        assert result.grad_norms[0] == pytest.approx(one[name].grad_norms[0], rel=bound), name
        # Adam's first updates have magnitude lr where the gradient's sign is certain.
        for key, weight in one[name].weights.items():
            assert float((result.weights[key] - weight).abs().mean()) < 2e-3, (name, key)


def test_half_precision_stages_agree(ranks2):
    """Stages differ in the sharding only. The order of the norm's sum may change the last bit of the clip factor."""
    chosen = cases()
    runs = [ranks2.run(train_cases, f"{layout} precision=bf16", chosen)[0] for layout in LAYOUTS_2]
    for name in chosen:
        for other in runs[1:]:
            assert other[name].losses[:2] == pytest.approx(runs[0][name].losses[:2], rel=1e-6), name
            assert other[name].grad_norms[0] == pytest.approx(runs[0][name].grad_norms[0], rel=1e-6), name
            for key, weight in runs[0][name].weights.items():
                assert float((other[name].weights[key] - weight).abs().mean()) < 1e-4, (name, key)
