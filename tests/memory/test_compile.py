"""Recompute with torch.compile: equal results, one graph per policy, and fewer saved bytes.

Tracing is real, and one test generates code.
"""

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


def build_compiled(name: str, setting: str, backend: str):
    model, call = MODELS[name]()
    apply_recompute(model, Plan(recompute=setting))
    for block in repeated_blocks(model).values() or [model]:
        block.compile(backend=backend)
    return model, call


@pytest.mark.parametrize(
    *product("name, setting", ["llama-documents", "hf-gpt2", "cnn", "twice"], ["full", "selective", "attention", "60%"])
)
def test_compiled_recompute_matches_eager_without_graph_breaks(name, setting):
    if setting == "attention" and name not in HAVE_ATTENTION:
        pytest.skip("no attention in it")
    plain, call = MODELS[name]()
    expected = two_steps(plain, call)
    with counted_graphs() as counted:
        found = two_steps(*build_compiled(name, setting, "aot_eager"))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-14)
    # The one break is the first forward of each block, which is not compiled.
    assert len(counted.breaks) <= 1, counted


@pytest.mark.full
@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11's own code for recomputed attention in float64 on CPU takes its log-sum-exp for float32",
)
def test_generated_code_with_recompute_matches_eager():
    torch._dynamo.reset()
    model, call = MODELS["llama"]()
    apply_recompute(model, Plan(recompute="selective"))
    compile_blocks(model)
    expected = two_steps(*MODELS["llama"]())
    found = two_steps(model, call)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("setting", "most"), [("full", 0.25), ("selective", 0.9)])
def test_compiled_recompute_saves_fewer_bytes(setting, most):
    """Count the tensors that autograd's node of a compiled graph saves."""

    def saved(setting: str) -> int:
        torch._dynamo.reset()
        model, call = build_compiled("llama", setting, "aot_eager")
        call(model).sum().backward()
        return saved_bytes(lambda: call(model), model.parameters())

    assert saved(setting) < most * saved("none")


def test_torch_side_effects_flag_is_set_only_while_tracing():
    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    flags = torch._dynamo.config
    if not hasattr(flags, name):
        pytest.skip("this torch has no such flag")
    torch._dynamo.reset()
    flag_values = []

    def backend(graph, inputs):
        flag_values.append(getattr(flags, name))
        return graph

    model, call = MODELS["llama"]()
    apply_recompute(model, Plan(recompute="full"))
    compile_blocks(model, backend)
    for _ in range(2):
        assert not getattr(flags, name)
        call(model)
    assert flag_values
    assert all(flag_values)
    assert not getattr(flags, name)
