"""mlp_tiles: MLPs in tiles of tokens match one process."""

from __future__ import annotations

import pytest

from tests.choice import gate_runs
from tests.parity.test_tensor import DECODERS
from weft.verify.parity import train_cases

#: 3 tiles of a rank's tokens are uneven. The number of tiles is limited to the number of tokens.
ONE = ["mlp_tiles=3", "mlp_tiles=1000 recompute=full accumulation=2", "mlp_tiles=2 recompute=attention"]
TWO = [
    "tp=2 mlp_tiles=3", "dp_shard=2 zero=3 recompute=full mlp_tiles=3", "tp=2 sp=on mlp_tiles=3",
    "cp=2 mlp_tiles=3 zero=2", "pp=2 mlp_tiles=2 microbatches=4 schedule=zb_h1", "tp=2 sp=on tp_chunks=2 mlp_tiles=3",
    "dp_shard=2 zero=3 mlp_tiles=3 accumulation=2 offload=params+activations", "dp_shard=2 zero=1 mlp_tiles=2",
]  # fmt: skip
FOUR = ["dp_shard=2 tp=2 zero=3 sp=on mlp_tiles=3 recompute=full"]
CHOSEN = {name: DECODERS[name] for name in ("decoder", "gpt2", "hf-qwen2", "hf-gpt2")}


def check(pool, plan, chosen=CHOSEN):
    expected = train_cases("precision=fp64", chosen)
    for rank in pool.run(train_cases, f"{plan} precision=fp64", chosen):
        for name, result in rank.items():
            assert result.largest_difference(expected[name]) < 1e-10, f"{plan} {name}"


@pytest.mark.parametrize("plan", ONE)
def test_tiles_match_untiled_mlps_in_one_process(plan):
    expected = train_cases("precision=fp64", CHOSEN)
    for name, result in train_cases(f"{plan} precision=fp64", CHOSEN).items():
        assert result.largest_difference(expected[name]) < 1e-10, name


@pytest.mark.parametrize("plan", gate_runs(TWO, 3))
def test_tiles_match_one_process_on_two_ranks(plan, ranks2):
    check(ranks2, plan)


@pytest.mark.full
@pytest.mark.parametrize("plan", FOUR)
def test_tiles_match_one_process_on_four_ranks(plan, ranks4):
    check(ranks4, plan)
