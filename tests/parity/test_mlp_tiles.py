"""mlp_tiles: MLPs in tiles of tokens match one process."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from tests.choice import gate_runs, todays
from tests.parity.adapter_cases import AdapterCase
from tests.parity.test_tensor import DECODERS
from tools import live_memory
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import CommError, ModelError
from weft.parallel.parallelize import parallelize
from weft.parallel.tiled_mlp import tile_mlps
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
CHOSEN["lora"] = AdapterCase(DECODERS["decoder"], targets=("attn.q", "mlp.*"))


def check(pool, plan, chosen=CHOSEN):
    expected = train_cases("precision=fp64", chosen)
    for rank in pool.run(train_cases, f"{plan} precision=fp64", chosen):
        for name, result in rank.items():
            assert result.largest_difference(expected[name]) < 1e-10, f"{plan} {name}"


@pytest.mark.parametrize("plan", todays(ONE, parts=3))
def test_tiles_match_untiled_mlps_in_one_process(plan):
    expected = train_cases("precision=fp64", CHOSEN)
    for name, result in train_cases(f"{plan} precision=fp64", CHOSEN).items():
        assert result.largest_difference(expected[name]) < 1e-10, name


@pytest.mark.parametrize("plan", gate_runs(TWO, 3))
def test_tiles_match_one_process_on_two_ranks(plan, ranks2):
    # Adapters with tp_chunks are refused.
    check(ranks2, plan, {name: case for name, case in CHOSEN.items() if name != "lora" or "tp_chunks" not in plan})


@pytest.mark.full
@pytest.mark.parametrize("plan", FOUR)
def test_tiles_match_one_process_on_four_ranks(plan, ranks4):
    check(ranks4, plan)


def test_sequences_that_sp_pads_are_refused(ranks2):
    odd = {"hf-qwen2": dataclasses.replace(DECODERS["hf-qwen2"], seq_len=15, num_steps=1)}
    check(ranks2, "tp=2 sp=on", odd)
    with pytest.raises(CommError, match=r"mlp_tiles=3: sp=on pads this batch.*Use a multiple of tp, or mlp_tiles=1"):
        ranks2.run(train_cases, "tp=2 sp=on mlp_tiles=3 precision=fp64", odd)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_modules_that_are_not_known_are_refused():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    mesh = build_mesh(Plan.parse("mlp_tiles=2"))
    with pytest.raises(ModelError, match=r"the blocks of Plain have no MLP that is known.*Use mlp_tiles=1"):
        parallelize(Plain(), mesh)
    dropping = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with pytest.raises(ModelError, match=r"transformer\.h\.0\.mlp has dropout, whose masks.*Set its dropout to 0"):
        parallelize(dropping, mesh)


@pytest.mark.parametrize("plan", ["mlp_tiles=8", "recompute=full mlp_tiles=8"])
def test_peak_memory_is_less_and_as_planned(plan, monkeypatch):
    sizes = {"vocab_size": 64, "dim": 64, "num_layers": 2, "ffn_dim": 256, "max_seq_len": 1024}
    spec = DecoderSpec(**sizes, num_heads=2, num_kv_heads=2, tied=False)
    plain = plan.replace("mlp_tiles=8", "").strip()
    for text in (plan, plain):
        monkeypatch.setitem(live_memory.FULLEST, Plan.parse(text).format(), (spec, 1, 1024))
    torch.manual_seed(0)
    measured, before = live_memory.measure_peak(plan), live_memory.measure_peak(plain)
    assert measured < (0.75 if "full" in plan else 0.6) * before
    assert sum(live_memory.planned_peak(Plan.parse(plan)).values()) == pytest.approx(measured, rel=0.05)


def test_only_mlps_that_treat_tokens_separately_are_tiled():
    groupvit = pytest.importorskip("transformers.models.groupvit.modeling_groupvit")
    qwen = pytest.importorskip("transformers.models.qwen2.modeling_qwen2")
    glm = pytest.importorskip("transformers.models.glm.modeling_glm")
    config = qwen.Qwen2Config(hidden_size=8, intermediate_size=16)
    assert is_tiled(qwen.Qwen2MLP(config))
    assert is_tiled(glm.GlmMLP(glm.GlmConfig(hidden_size=8, intermediate_size=16)))
    assert not is_tiled(groupvit.GroupViTMixerMLP(groupvit.GroupViTVisionConfig(hidden_size=8), 4, 8, 4))


def is_tiled(mlp: nn.Module) -> bool:
    """Return True if the MLP is tiled as the MLP of each block."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"mlp": one}) for one in (mlp, copy.deepcopy(mlp)))
    try:
        tile_mlps(model, 2)
    except ModelError:
        return False
    return True
