"""Recompute before torch.compile: the same numbers, one graph for a policy, less kept. The tracer is real; only one
test pays for generated code."""

from __future__ import annotations

import pytest
import torch

from tests.choice import product
from tests.memory.models import HAVE_ATTENTION, MODELS
from tests.memory.test_recompute import two_steps
from tools.live_memory import saved_bytes
from weft.config.plan import Plan
from weft.memory.recompute import apply_recompute
from weft.models.inspect.blocks import repeated_blocks
from weft.parallel.compile_blocks import compile_blocks
from weft.verify.oracles import counted_graphs


def compiled(name: str, setting: str, backend: str):
    model, call = MODELS[name]()
    apply_recompute(model, Plan(recompute=setting))
    for block in repeated_blocks(model).values() or [model]:
        block.compile(backend=backend)
    return model, call


@pytest.mark.parametrize(
    *product("name, setting", ["llama-documents", "hf-gpt2", "cnn", "twice"], ["full", "selective", "attention", "60%"])
)
def test_traced_blocks_give_the_same_numbers_in_whole_graphs(name, setting):
    if setting == "attention" and name not in HAVE_ATTENTION:
        pytest.skip("no attention in it")
    plain, call = MODELS[name]()
    expected = two_steps(plain, call)
    with counted_graphs() as made:
        found = two_steps(*compiled(name, setting, "aot_eager"))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-14)
    # The one break is the first look at each block, which is not compiled.
    assert len(made.breaks) <= 1, made


@pytest.mark.full
@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11's own code for recomputed attention in float64 on CPU takes its log-sum-exp for float32",
)
def test_generated_code_recomputes_under_a_plan_that_compiles():
    torch._dynamo.reset()
    model, call = MODELS["llama"]()
    apply_recompute(model, Plan(recompute="selective"))
    compile_blocks(model)
    expected = two_steps(*MODELS["llama"]())
    found = two_steps(model, call)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("setting", "most"), [("full", 0.25), ("selective", 0.9)])
def test_a_compiled_block_keeps_less(setting, most):
    """Counted by what its backward is given: autograd's node of a compiled graph holds it."""

    def kept(setting: str) -> int:
        torch._dynamo.reset()
        model, call = compiled("llama", setting, "aot_eager")
        call(model).sum().backward()
        return saved_bytes(lambda: call(model), model.parameters())

    assert kept(setting) < most * kept("none")


def test_torchs_flag_for_side_effects_is_on_while_blocks_are_traced_and_at_no_other_time():
    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    flags = torch._dynamo.config
    if not hasattr(flags, name):
        pytest.skip("this torch has no such flag")
    torch._dynamo.reset()
    seen = []

    def backend(graph, inputs):
        seen.append(getattr(flags, name))
        return graph

    model, call = MODELS["llama"]()
    apply_recompute(model, Plan(recompute="full"))
    compile_blocks(model, backend)
    for _ in range(2):
        assert not getattr(flags, name)
        call(model)
    assert seen
    assert all(seen)
    assert not getattr(flags, name)
