"""`weft plan --compile`: steps compiled without arrays, with the compiler's bytes and collectives next to the plan."""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import replace

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.cli.app import run
from weft.cli.planning.plan_compile import compiled_lines, compiled_step, compiled_table, jax_question, planned_bytes
from weft.config.cluster import ClusterSpec, device
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.jax_engine.compiled import Collective, _gathered, _too_large, traffic
from weft.jax_engine.program import devices
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated

_SHAPE = DecoderSpec(vocab_size=512, dim=64, num_layers=1, num_heads=4, num_kv_heads=4, ffn_dim=128, max_seq_len=16)
#: On CPUs, a reduce-scatter may be an all-reduce and a slice.
_REDUCTIONS = ("all-reduce", "reduce-scatter")


@functools.cache
def compiled(text: str) -> tuple:
    """Return the plan with its estimate and its step, compiled for virtual CPU devices."""
    plan = Plan.parse(text)
    slice4 = ClusterSpec(nodes=1, devices_per_node=4, device=device("tpu-v5e"))
    fixed = {"precision": plan.precision, "zero": plan.zero}
    asked = jax_question(Question.of(_SHAPE, slice4, seq_len=8, global_batch=8, fixed=fixed))
    [one] = estimated([plan], asked)
    return one, compiled_step(one, devices(plan.world_size, "cpu"))


@pytest.mark.parametrize(
    ("plan", "kinds"),
    [
        ("dp_shard=4 zero=2", {"reduction", "all-gather"}),
        ("dp_shard=4 zero=3 precision=bf16 accumulation=2", {"reduction", "all-gather"}),
        ("dp_shard=2 tp=2 zero=1", {"reduction", "all-gather"}),
        pytest.param("dp_replicate=4", {"reduction"}, marks=pytest.mark.full),
        pytest.param("dp_shard=4 zero=1", {"reduction", "all-gather"}, marks=pytest.mark.full),
        pytest.param("dp_shard=4 zero=3", {"reduction", "all-gather"}, marks=pytest.mark.full),
        pytest.param("dp_shard=4 zero=1 precision=bf16", {"reduction", "all-gather"}, marks=pytest.mark.full),
    ],
)
def test_states_and_collectives_are_the_planned_ones(plan: str, kinds: set[str]) -> None:
    one, step = compiled(plan)
    planned = planned_bytes(one)["states"]
    assert step.state_bytes == pytest.approx(planned, rel=0.01)
    assert step.argument_bytes == pytest.approx(planned, rel=0.01)
    assert {"reduction" if kind in _REDUCTIONS else kind for kind in step.collectives} == kinds
    assert step.num_gathered == 0
    assert step.peak_bytes > step.argument_bytes


def test_text_and_json_have_the_same_values() -> None:
    one, step = compiled("dp_shard=4 zero=2")
    table = json.loads(json.dumps(compiled_table(one, step)))
    assert table["fits"]
    assert table["planned_bytes"]["states"] == planned_bytes(one)["states"]
    assert table["collectives"]["all-gather"]["calls"] == step.collectives["all-gather"].calls
    text = "\n".join(compiled_lines(one, step))
    assert "does not fit" not in text
    assert f"{step.state_bytes / planned_bytes(one)['states']:.3f}" in text
    full = replace(step, argument_bytes=None, output_bytes=None, temporary_bytes=None, peak_bytes=20 * 2**30,
                   usable_bytes=16 * 2**30)  # fmt: skip
    assert compiled_lines(one, full)[-1] == (
        "  The plan does not fit: the compiled step needs 20.0 GiB of the 16.0 GiB of a chip."
    )
    assert not compiled_table(one, full)["fits"]
    assert "1 array gathered on every chip" in "\n".join(compiled_lines(one, replace(step, num_gathered=1)))


def test_involuntary_rematerialization_is_counted() -> None:
    grid = Mesh(np.array(devices(8, "cpu")).reshape(4, 2), ("x", "y"))
    before, after = (NamedSharding(grid, PartitionSpec(*axes)) for axes in (("y", None, "x"), (None, ("x", "y"), None)))

    def move(a):
        return jax.lax.with_sharding_constraint(jnp.sin(a), after) + 1

    for where, expected in ((before, True), (after, False)):
        array = jax.ShapeDtypeStruct((16, 16, 16), np.float32, sharding=where)
        _, count = _gathered(jax.jit(move, out_shardings=after).lower(array))
        assert (count > 0) == expected


def test_bytes_of_collectives_are_those_of_results() -> None:
    text = """
      %a = (f32[64,8]{1,0:T(8,128)S(1)}, bf16[100]{0}) all-reduce(%x, %y), channel_id=1
      %b = ((f32[16,8]{1,0}), (f32[64,8]{1,0})) all-gather-start(%x), dimensions={0}
      %c = f32[64,8]{1,0} all-gather-done(%b)
      %d = (f32[128]{0}, f32[128]{0}, u32[], u32[]) collective-permute-start(%x)
      %e = f32[] all-reduce(%norm), to_apply=%add
      %f = f32[16,8]{1,0} reduce-scatter(%x), dimensions={0}
      %g = f32[16,8]{1,0} get-tuple-element(%a), index=0
    """
    assert traffic(text) == {
        "all-reduce": Collective(1, 64 * 8 * 4 + 200),
        "all-gather": Collective(1, 64 * 8 * 4),
        "collective-permute": Collective(1, 512),
        "reduce-scatter": Collective(1, 512),
    }


def test_sizes_are_read_from_libtpus_message() -> None:
    said = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (74.58G) exceeds"
    )
    assert _too_large(f"{said} available HBM (15.75G).") == (round(74.58 * 2**30), round(15.75 * 2**30))
    assert _too_large("INTERNAL: 3.5G of 2G") is None


def test_missing_libtpu_is_named_with_its_command(capsys, monkeypatch) -> None:
    monkeypatch.setattr("weft.jax_engine.compiled.find_spec", lambda name: None)
    assert run(["plan", "tiny", "v5e-4", "--compile", "--fix", "dp_shard=4 zero=3"]) == 2
    said = "libtpu is not installed: weft plan --compile needs it. In a checkout of Weft, run: pip install -e "
    assert f'{said}".[tpu]".' in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_plan_is_compiled_for_a_slice(capsys) -> None:
    words = ["--fix", "dp_shard=4 zero=3", "--seq-len", "128", "--global-batch", "8", "--compile", "--json"]
    assert run(["plan", "tiny", "v5e-4", *words]) == 0
    found = json.loads(capsys.readouterr().out)["compiled"]
    assert found["fits"]
    assert found["state_bytes"] == pytest.approx(found["planned_bytes"]["states"], rel=0.01)
    assert found["argument_bytes"] == pytest.approx(found["planned_bytes"]["states"], rel=0.01)
    assert found["gathered_arrays"] == 0
