"""State spaces, linear attention and short convolutions: packed documents, and states that pass between ranks."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch

from tests.parity.cases import LLAMA
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.context.context import sequence_in_use, shard_sequence
from weft.parallel.layers.documents import _packed, attend_in_documents, call_in_documents, why_documents_mix
from weft.parallel.layers.state_mixers import Documents, documents_of, state_mixers
from weft.parallel.parallelize import parallelize
from weft.train.microbatches import call_model
from weft.train.tasks.decoder_loss import token_cross_entropy
from weft.verify.parity import DecoderCase, train_case
from weft.verify.verifier import Float64Throughout

transformers: Any = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "experts_implementation": "eager",
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LATENT = {
    "linear_num_heads": 4, "linear_head_dim": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
    "layer_types": ["linear_attention", "full_attention"], **EXPERTS,
}  # fmt: skip
STATES = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_chunk_size": 4,
}  # fmt: skip
FIRST = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}
#: Config names and sizes by family.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "kimi_linear": ("KimiLinearConfig", LATENT),
    "mamba2": ("Mamba2Config", {"state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "mamba": ("MambaConfig", {"state_size": 4}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", {**DELTA, **EXPERTS}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**DELTA, **EXPERTS}),
    "olmo_hybrid": ("OlmoHybridConfig", DELTA),
    "lara_mini": ("LaraMiniConfig", {**DELTA, **EXPERTS}),
    "bailing_hybrid": ("BailingHybridConfig", LATENT),
    "falcon_h1": ("FalconH1Config", {**STATES, "mamba_d_ssm": 32}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {**STATES, **EXPERTS, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 8},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8,
         "n_groups": 2, "chunk_size": 4, **EXPERTS},
    ),
    "lfm2_moe": ("Lfm2MoeConfig", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **EXPERTS}),
    "lfm3": ("Lfm3Config", {"layer_types": ["conv", "full_attention"]}),
    "falcon_mamba": ("FalconMambaConfig", {"state_size": 4}),
    "jamba": ("JambaConfig", {**FIRST, **EXPERTS}),
}  # fmt: skip
LENGTHS = (9, 14, 1, 5, 3)


def built(family: str) -> Any:
    name, sizes = (FAMILIES | MORE)[family]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES | sizes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)  # otherwise tokens hardly affect each other
    return model


@dataclasses.dataclass(frozen=True)
class StateCase(DecoderCase):
    """A transformers model with layers that carry a state. Rows contain two documents, or one with padding."""

    family: str = "qwen3_5"

    def model(self):
        return built(self.family)

    def batch(self, step):
        found = super().batch(step)
        batch = {name: found[name] for name in ("input_ids", "labels")}
        if self.documents:
            return batch | {"position_ids": found["positions"]}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][::2, -3:] = 0
        return batch

    def forward(self, model, batch):
        return call_model(model, batch).logits

    def loss(self, output, batch):
        return token_cross_entropy(output, batch)


def check_documents(family: str) -> None:
    """Compare loss and gradients of a packed row with those of rows of one document."""
    alone = built(family).train()
    packed, documents = copy.deepcopy(alone), torch.randint(5, 61, (sum(LENGTHS),)).split(LENGTHS)
    attend_in_documents(packed)
    with Float64Throughout():
        rows = [alone(input_ids=one[None], use_cache=False).logits.sin() for one in documents]
        torch.cat(rows, 1).square().sum().backward()
        row = call_in_documents(packed, _packed(*documents)).logits.sin()
        row.square().sum().backward()
    torch.testing.assert_close(row, torch.cat(rows, 1), rtol=1e-11, atol=1e-11)
    for (name, ours), theirs in zip(packed.named_parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:
            scale = float(theirs.grad.abs().max()) + 1e-9
            assert float((ours.grad - theirs.grad).abs().max()) / scale < 1e-9, (family, name)


def train_states(plan: str, families: list[str], documents: bool) -> dict[str, Any]:
    found = {}
    for family in families:
        case = StateCase(LLAMA, num_steps=2, family=family, optimizer="sgd", documents=documents, max_grad_norm=0.5)
        with warnings.catch_warnings(), Float64Throughout():
            warnings.simplefilter("ignore")
            found[family] = train_case(f"{plan} precision=fp64", case)
    return found


#: Families that a plan refuses by name. tp: a layer that Weft does not know reads sharded features (Kimi's forget gate,
#: LFM3's gate). sp: nothing but layers that carry a state.
REFUSED = {"tp=2": ("kimi_linear", "lfm3"), "sp=on": ("mamba", "mamba2", "falcon_mamba")}


def check_plan(plan: str, ranks: Any, families: list[str], documents: bool) -> None:
    refused = [family for part, names in REFUSED.items() if part in plan for family in names]
    families = [family for family in families if family not in refused]
    found = ranks.run(train_states, plan, families, documents)[0]
    expected = train_states("", families, documents)
    for family in families:
        assert found[family].losses == pytest.approx(expected[family].losses, rel=1e-11), family
        for name, grad in expected[family].grads.items():
            scale = max(1e-6, float(grad.abs().max()))
            assert float((found[family].grads[name] - grad).abs().max()) / scale < 1e-9, (family, name)


def test_packed_documents_equal_rows_of_their_own():
    for family in FAMILIES:
        check_documents(family)
        assert not why_documents_mix(built(family)), family


@pytest.mark.full
@pytest.mark.parametrize("family", MORE)
def test_more_families_separate_packed_documents(family):
    check_documents(family)
    assert not why_documents_mix(built(family))


def test_documents_form_groups_of_similar_lengths():
    groups, back = Documents([[0, 9, 10, 24], [0, 3, 5, 24]]).indices(torch.device("cpu"))
    assert [tuple(group.shape) for group in groups] == [(1, 19), (2, 14), (2, 3), (1, 1)]
    assert torch.cat([group.flatten() for group in groups])[back].tolist() == list(range(48))
    with pytest.raises(ModelError, match="document_ids: a document continues after another one"):
        documents_of(torch.tensor([[0, 0, 1, 0]]))
    assert documents_of(torch.tensor([[5, 5], [7, 7]])) is None


def test_plans_that_cannot_separate_states_are_rejected():
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    tokens = torch.arange(5, 14)[None]
    compiled = parallelize(built("lfm2"), build_mesh(Plan.parse("precision=fp64 compile=on")))
    with pytest.raises(ModelError, match="compile=on: Lfm2ForCausalLM separates the documents of a row by code"):
        compiled(input_ids=tokens, position_ids=positions)
    model = built("lfm2")
    next(iter(model.model.layers)).gradient_checkpointing = True  # as gradient_checkpointing_enable() does
    model = parallelize(model, build_mesh(Plan.parse("precision=fp64"))).train()
    with pytest.raises(ModelError, match=r"gradient_checkpointing: Lfm2ForCausalLM .* Use recompute=full"):
        model(input_ids=tokens, position_ids=positions)


def test_recomputed_blocks_separate_documents():
    case = StateCase(LLAMA, num_steps=1, documents=True)
    with Float64Throughout():
        plain = train_case("precision=fp64", case)
        for policy in ("full", "selective"):
            again = train_case(f"precision=fp64 recompute={policy}", case)
            assert plain.largest_difference(again) < 1e-12
    packed = StateCase(LLAMA, num_steps=1)
    assert train_case("precision=fp64", packed).losses != plain.losses


@pytest.mark.parametrize("documents", [False, True])
def test_states_over_cp_match_one_process(ranks2, documents):
    check_plan("cp=2", ranks2, [*FAMILIES], documents)


def test_heads_over_tp_match_one_process(ranks2):
    check_plan("tp=2", ranks2, ["qwen3_5", "lfm2", "mamba2"], documents=False)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["cp=2", "tp=2", "tp=2 sp=on", "cp=2 recompute=full", "dp_shard=2 zero=3"])
@pytest.mark.parametrize("documents", [False, True])
def test_more_families_match_one_process(ranks2, plan, documents):
    check_plan(plan, ranks2, [*FAMILIES, *MORE], documents)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["cp=4", "cp=2 tp=2", "cp=2 dp_shard=2 zero=3 recompute=full", "cp=2 pp=2"])
def test_states_under_combined_plans_match_one_process(ranks4, plan):
    check_plan(plan, ranks4, [*FAMILIES], documents=False)


def shared_sizes() -> tuple[dict[str, int], list[int]]:
    """Return the rows of a Gated DeltaNet's weights under tp=2, and the tokens of a short convolution under cp=2."""
    model = parallelize(built("qwen3_5"), build_mesh(Plan.parse("tp=2 precision=fp64")))
    mixer = next(iter(state_mixers(model).values()))
    rows = {name: weight.shape[0] for name, weight in mixer.named_parameters()}
    case, tokens = StateCase(LLAMA, num_steps=1, global_batch=2, family="lfm2"), []
    model = parallelize(built("lfm2"), build_mesh(Plan.parse("cp=2 precision=fp64")))
    projection = next(iter(state_mixers(model).values())).in_proj
    projection.register_forward_hook(lambda module, args, output: tokens.append(args[0].shape[1]))
    with torch.no_grad(), sequence_in_use(model):
        case.forward(model, shard_sequence(model, case.batch(0)))
    return rows, tokens


@pytest.mark.filterwarnings("ignore")
def test_ranks_share_heads_and_tokens(ranks2):
    rows, tokens = ranks2.run(shared_sizes)[0]
    assert rows == {
        "dt_bias": 2, "A_log": 2, "conv1d.weight": 16, "norm.weight": 4, "out_proj.weight": 16,
        "in_proj_qkv.weight": 16, "in_proj_z.weight": 8, "in_proj_b.weight": 2, "in_proj_a.weight": 2,
    }  # fmt: skip
    assert tokens == [8]
