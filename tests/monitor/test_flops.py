from __future__ import annotations

import pytest

from weft.monitor.guards import flops_per_token, mfu


def test_flops_are_6n_plus_attention_over_the_full_sequence():
    # One layer by hand, forward: scores 2*dim*seq and weighted sum 2*dim*seq. With the backward pass, three times as
    # much.
    assert flops_per_token(1000, 1, 64, 128) == 6 * 1000 + 3 * (2 * 64 * 128 + 2 * 64 * 128)
    assert flops_per_token(1000, 5, 64, 128) - flops_per_token(1000, 4, 64, 128) == 12 * 64 * 128


def test_mfu_matches_the_palm_paper():
    # PaLM 540B: 118 layers, dim 48 heads * 256, 2048 tokens; 238.3 k tokens/s on 6144 chips of 275 TFLOP/s: 46.2 %.
    need = flops_per_token(540_350_000_000, 118, 48 * 256, 2048)
    assert mfu(need, 238_300, 275e12, 6144) == pytest.approx(0.462, abs=0.005)
