"""Optimizer groups with lr=0: the planner's cost of frozen weights."""

from __future__ import annotations

import numpy as np
import pytest

from weft.config.plan import Plan
from weft.config.sections import OptimizerGroup
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import decoder_spec
from weft.planner.cost.machine import Tables
from weft.planner.estimator import estimate
from weft.planner.search.question import Question
from weft.planner.space.columns import Columns
from weft.planner.space.trained_part import TrainedPart, parameters_of

SMALL = {
    "vocab_size": 96,
    "dim": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 48,
    "max_seq_len": 16,
}
SPECS = {
    "llama": DecoderSpec(**SMALL),
    "tied gpt2": DecoderSpec(**{**SMALL, "num_kv_heads": 4}, family="gpt2", tied=True),
    "experts": DecoderSpec(**SMALL, num_experts=4, expert_ffn_dim=24, num_shared_experts=1, first_moe_layer=1),
}


def frozen(*patterns: str) -> list[OptimizerGroup]:
    """Return groups that freeze parameters of these patterns."""
    return [OptimizerGroup(match=pattern, lr=0.0) for pattern in patterns]


@pytest.mark.parametrize("name", SPECS)
def test_names_and_sizes_match_the_model(name: str) -> None:
    pytest.importorskip("torch")
    import torch

    from weft.models.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(SPECS[name])
    wanted = {name: float(param.numel()) for name, param in model.named_parameters()}
    assert {name: size for _, name, size in parameters_of(SPECS[name])} == wanted


def test_shares_of_common_freezing_patterns() -> None:
    spec = SPECS["llama"]
    assert TrainedPart.of(spec, [OptimizerGroup(match="*", lr=1e-3)]) is None
    assert TrainedPart.of(spec, frozen("embed.*")) == TrainedPart(embedding=0.0)
    lower = TrainedPart.of(spec, frozen("embed.*", "blocks.0.*", "blocks.1.*"))
    assert lower is not None
    assert (lower.layers, lower.most, lower.reach) == pytest.approx((1 / 3, 1.0, 1 / 3))
    head = TrainedPart.of(spec, frozen("embed.*", "blocks.*"))
    assert head is not None
    assert (head.layers, head.reach, head.head) == (0.0, 0.0, 1.0)
    # The first matching group applies.
    kept = TrainedPart.of(spec, [OptimizerGroup(match="blocks.2.*", lr=1e-4), *frozen("blocks.*")])
    assert kept is not None
    assert kept.layers == pytest.approx(1 / 3)


@pytest.mark.parametrize("text", ["dp_shard=8 zero=2", "dp_shard=8 zero=3", "dp_shard=4 pp=2 microbatches=4"])
def test_frozen_weights_cost_no_states_and_less_time(text: str) -> None:
    asked = Question.of("llama3-8b", "8xh100", seq_len=4096, global_batch=32)
    plan = Plan.parse(f"{text} precision=bf16")
    tables = Tables.of(asked.cluster.device, "tables")

    def step(*patterns: str) -> tuple[float, dict[str, float]]:
        job = asked.job.with_groups(decoder_spec("llama3-8b"), frozen(*patterns)) if patterns else asked.job
        found = estimate(job, asked.cluster, Columns.of([plan], job), tables)
        return float(found.step_s[0]), {name: float(np.asarray(each)[0]) for name, each in found.memory.items()}

    (whole_s, whole), (none_s, none) = step(), step("embed.*", "head.*", "norm.*", "blocks.?.*", "blocks.[12]?.*")
    states, all_states = (each["gradients"] + each["optimizer"] for each in (none, whole))
    assert states < (0.1 if plan.pp == 1 else 0.9) * all_states  # a stage's most trained layer represents all
    assert none_s < 0.6 * whole_s  # forward, and backward of the last two of 32 layers and through the head
    nothing_s, nothing = step("nothing.of.this.name")
    assert nothing_s == pytest.approx(whole_s)
    assert nothing == pytest.approx(whole)


def test_config_defines_frozen_groups(tmp_path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[model]\nname = "tiny"\n[optimizer]\ngroups = [{match = "embed.*", lr = 0.0}]\n')
    asked = Question.of(str(config), "1xh100")
    assert asked.job.trained == TrainedPart(embedding=0.0, head=0.0)  # they are tied
