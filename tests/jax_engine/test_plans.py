"""Plans of the JAX engine equal one process of torch: losses, norms, gradients and weights after two steps."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import PlanError
from weft.jax_engine.rules import check
from weft.verify.case_data import Settings
from weft.verify.jax_verifier import verify_plans
from weft.verify.subject import Subject

_SIZES = {"vocab_size": 48, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 24,
          "max_seq_len": 16}  # fmt: skip
_EXPERTS = {"num_experts": 4, "expert_ffn_dim": 8}
_GPT2 = {"family": "gpt2", "num_kv_heads": 4, "tied": True}


def verified(plans: list[str], dtype: str = "float64", global_batch: int = 8, **changes: object) -> None:
    settings = Settings(num_steps=2, seq_len=8, global_batch=global_batch, dtype=dtype)
    shape = DecoderSpec(**{**_SIZES, **changes})  # pyright: ignore[reportArgumentType]
    verdicts = verify_plans(Subject("decoder", "decoder", settings, shape), [Plan.parse(plan) for plan in plans])
    wrong = [(one.plan, one.refused or one.max_rel_diff) for one in verdicts if not one.passed]
    assert not wrong


def test_gate() -> None:
    verified(["dp_shard=2 zero=2 accumulation=2", "dp_shard=2 tp=2 zero=3 sp=on recompute=full"])


def test_experts() -> None:
    verified(["dp_shard=2 ep=2 zero=1"], **_EXPERTS)


@pytest.mark.full
@pytest.mark.parametrize(
    "plans",
    [
        ["", "dp_replicate=2", "dp_replicate=4", "dp_shard=2", "dp_shard=2 zero=1", "dp_shard=4 zero=1"],
        ["dp_shard=2 zero=2", "dp_shard=4 zero=2", "dp_shard=2 zero=3", "dp_shard=4 zero=3 accumulation=2"],
        ["tp=2", "tp=2 sp=on", "tp=4", "dp_replicate=2 tp=2", "dp_shard=2 tp=2 zero=1"],
        ["dp_replicate=2 dp_shard=2 zero=1", "dp_replicate=2 dp_shard=2 zero=3", "dp_shard=2 tp=2 zero=3 sp=on"],
        ["recompute=full dp_shard=2 zero=3", "recompute=full:1 tp=2", "recompute=selective dp_shard=2 zero=1"],
        ["accumulation=4", "accumulation=2 dp_replicate=2 tp=2", "accumulation=2 dp_shard=2 zero=2 recompute=full"],
    ],
)  # fmt: skip
def test_cells(plans: list[str]) -> None:
    verified(plans)


@pytest.mark.full
def test_expert_cells() -> None:
    verified(["", "dp_shard=4 ep=2 zero=3", "tp=2", "dp_shard=2 tp=2 ep=2 zero=2"], **_EXPERTS)


@pytest.mark.full
def test_tied_embeddings() -> None:
    verified(["dp_shard=2 zero=3", "tp=2 sp=on"], **_GPT2)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_precisions(dtype: str) -> None:
    verified(["", "dp_shard=2 zero=2", "dp_replicate=2 tp=2"], dtype)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ("pp=2", "pp=2: under engine=jax, one SPMD program has no pipeline stages. Use pp=1, with tp or zero=3."),
        ("cp=2", "cp=2: under engine=jax, context parallelism is not built for it. Use cp=1, with tp and sp=on."),
        ("offload=optimizer", "offload=optimizer: under engine=jax, its states stay on the device. Use zero=3, or a "
         "smaller model."),
        ("precision=fp16", "precision=fp16: under engine=jax, it computes in fp64, fp32 or bf16. Use precision=bf16."),
    ],
)  # fmt: skip
def test_refusals(plan: str, text: str) -> None:
    with pytest.raises(PlanError) as error:
        check(Plan.parse(plan))
    assert str(error.value) == text


def test_all_refusals_at_once() -> None:
    with pytest.raises(PlanError) as error:
        check(Plan.parse("pp=2 precision=fp16 recompute=attention"))
    assert [problem.field for problem in error.value.problems] == ["plan.pp", "plan.precision", "plan.recompute"]
