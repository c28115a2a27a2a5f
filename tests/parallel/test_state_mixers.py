"""State spaces, linear attention and short convolutions: packed documents, heads and tokens of ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.choice import todays
from tests.parity.cases import LLAMA
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.context.context import sequence_in_use, shard_sequence
from weft.parallel.context.state_layers import can_keep_tokens, num_previous_tokens
from weft.parallel.layers.documents import _packed, attend_in_documents, call_in_documents, why_documents_mix
from weft.parallel.layers.state_mixers import Documents, documents_of, state_mixers
from weft.parallel.parallelize import parallelize
from weft.parallel.zero_flat.model import FlatModel
from weft.train.batches.microbatches import call_model
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
    "bamba": ("BambaConfig", {**STATES, "attn_layer_indices": [1]}),
    "zamba2": (
        "Zamba2Config",
        {"n_mamba_heads": 4, "mamba_d_state": 8, "mamba_ngroups": 2, "chunk_size": 4, "use_mem_rope": True,
         "layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4, "adapter_rank": 4},
    ),
    "lfm2_moe": ("Lfm2MoeConfig", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **EXPERTS}),
    "lfm3": ("Lfm3Config", {"layer_types": ["conv", "full_attention"]}),
    "falcon_mamba": ("FalconMambaConfig", {"state_size": 4}),
    "jamba": ("JambaConfig", {**FIRST, **EXPERTS}),
}  # fmt: skip
LENGTHS = (9, 14, 1, 5, 3)
#: A model of one head, which ranks cannot share.
ODD = {
    "one_head": ("Mamba2Config", {"state_size": 8, "num_heads": 1, "head_dim": 32, "n_groups": 1, "chunk_size": 4}),
}
#: Families whose small copy cannot be built, so that rows with several documents are refused.
UNSEEN = ("zamba2",)


def built(family: str) -> Any:
    name, sizes = (FAMILIES | MORE | ODD)[family]
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
    """A transformers model with layers that carry a state. Rows contain several documents, or one with padding."""

    family: str = "qwen3_5"

    def model(self):
        return built(self.family)

    def batch(self, step):
        found = super().batch(step)
        batch = {name: found[name] for name in ("input_ids", "labels")}
        if self.documents:
            place_BT = torch.arange(self.seq_len).repeat(self.global_batch, 1)
            row_B1 = torch.arange(self.global_batch)[:, None]
            # Documents begin at, before and after the ranks' borders.
            cuts_B4 = torch.cat([0 * row_B1, row_B1 + 2, 3 * row_B1 + 7, 2 * row_B1 + 9], 1) % self.seq_len
            begins = (place_BT[:, :, None] >= cuts_B4[:, None]) * cuts_B4[:, None]
            return batch | {"position_ids": place_BT - begins.amax(-1)}
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


def train_states(plan: str, families: list[str], documents: bool, seq_len: int = 16) -> dict[str, Any]:
    found = {}
    given: Any = {"num_steps": 2, "seq_len": seq_len, "optimizer": "sgd", "documents": documents, "max_grad_norm": 0.5}
    for family in families:
        case = StateCase(LLAMA, family=family, **given)
        with warnings.catch_warnings(), Float64Throughout():
            warnings.simplefilter("ignore")
            found[family] = train_case(f"{plan} precision=fp64", case)
    return found


#: Families that a plan refuses by name. tp: a layer that Weft does not know reads sharded features (Kimi's forget gate,
#: LFM3's gate). sp: nothing but layers that carry a state, or concatenated inputs (Zamba 2).
REFUSED = {"tp=2": ("kimi_linear", "lfm3"), "sp=on": ("mamba", "mamba2", "falcon_mamba", "zamba2")}


def check_plan(plan: str, ranks: Any, families: list[str], documents: bool, seq_len: int = 16) -> None:
    refused = [family for part, names in REFUSED.items() if part in plan for family in names]
    refused += UNSEEN if documents else ()
    families = [family for family in families if family not in refused]
    found = ranks.run(train_states, plan, families, documents, seq_len)[0]
    expected = train_states("", families, documents, seq_len)
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
    assert bool(why_documents_mix(built(family))) == (family in UNSEEN)


def test_documents_form_groups_of_similar_lengths():
    groups, back = Documents([[0, 9, 10, 24], [0, 3, 5, 24]]).indices(torch.device("cpu"))
    assert [tuple(group.shape) for group in groups] == [(1, 19), (2, 14), (2, 3), (1, 1)]
    assert torch.cat([group.flatten() for group in groups])[back].tolist() == list(range(48))
    with pytest.raises(ModelError, match="document_ids: a document continues after another one"):
        documents_of(torch.tensor([[0, 0, 1, 0]]))
    assert documents_of(torch.tensor([[5, 5], [7, 7]])) is None
    inner, outer = (Documents([[0, 9, 10, 24], [0, 3, 5, 24]]).between(*span) for span in ((8, 14), (-2, 4)))
    assert [span for span, _ in sorted(inner._spans)] == [0, 1, 2, 6]
    assert sorted(outer._spans) == [(0, 2), (2, 4), (6, 2), (8, 3), (11, 1)]


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


@pytest.mark.parametrize("documents", todays([False, True], parts=2))
def test_states_over_cp_match_one_process(ranks2, documents):
    check_plan("cp=2", ranks2, [*FAMILIES], documents)


@pytest.mark.full
@pytest.mark.parametrize(("families", "seq_len"), [(["one_head"], 16), ([*FAMILIES, "jamba"], 4)])
@pytest.mark.parametrize("documents", [False, True])
def test_layers_that_cannot_keep_tokens_gather_them(ranks2, families, seq_len, documents):
    """A rank with 2 tokens has fewer than a convolution with a kernel of 4 reads."""
    assert num_previous_tokens(next(iter(state_mixers(built("qwen3_5")).values()))) == 3
    check_plan("cp=2", ranks2, families, documents, seq_len)


def test_heads_over_tp_match_one_process(ranks2):
    check_plan("tp=2", ranks2, ["qwen3_5", "lfm2", "mamba2"], documents=False)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["cp=2", "tp=2", "tp=2 sp=on", "cp=2 recompute=full", "dp_shard=2 zero=3"])
@pytest.mark.parametrize("documents", [False, True])
def test_more_families_match_one_process(ranks2, plan, documents):
    check_plan(plan, ranks2, [*FAMILIES, *MORE], documents)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["cp=4", "cp=2 tp=2", "cp=2 dp_shard=2 zero=3 recompute=full", "cp=2 pp=2"])
@pytest.mark.parametrize("documents", [False, True])
def test_states_under_combined_plans_match_one_process(ranks4, plan, documents):
    check_plan(plan, ranks4, [*FAMILIES, "granitemoehybrid"], documents)


def traffic_of(families: list[str]) -> dict[str, list[tuple[str, str, int]]]:
    """Return the collectives of each family under cp=2 in their order. Each parameter has its own gradient bucket."""
    found, record = {}, Ledger.record
    small = patch.object(FlatModel, "usual_bucket_bytes", staticmethod(lambda device: 8))
    for family in families:
        calls = found[family] = []

        def noted(self: Ledger, axis: str, operation: str, num_bytes: int, *args: Any, calls=calls) -> None:
            calls.append((axis, operation, num_bytes))
            record(self, axis, operation, num_bytes, *args)

        with patch.object(Ledger, "record", noted), patch("weft.verify.parity.several_buckets", lambda model: small):
            train_states("cp=2", [family], documents=family not in UNSEEN)
    return found


@pytest.mark.parametrize("families", [["granitemoehybrid"], pytest.param([*FAMILIES, *MORE], marks=pytest.mark.full)])
def test_ranks_call_collectives_in_the_same_order(ranks2, families):
    first, second = ranks2.run(traffic_of, families)
    for family in families:
        operations = [operation for _, operation, _ in first[family]]
        assert first[family] == second[family], family
        # Reductions of gradients are between the exchanges of backward.
        assert "all_reduce" in operations[operations.index("all_to_all") :], family


def test_layers_keep_tokens_if_cp_divides_their_heads():
    for family in FAMILIES:
        mixer = next(iter(state_mixers(built(family)).values()))
        kept = [cp for cp in (2, 3, 4, 8) if can_keep_tokens(mixer, cp)]
        assert kept == ([2, 4] if family in ("qwen3_5", "kimi_linear", "mamba2") else [2, 3, 4, 8]), family
    assert not can_keep_tokens(built("qwen3_5").model.layers[1].self_attn, 2)


def shared_sizes() -> dict[str, int]:
    """Return the rows of a Gated DeltaNet's weights under tp=2."""
    model = parallelize(built("qwen3_5"), build_mesh(Plan.parse("tp=2 precision=fp64")))
    return {name: weight.shape[0] for name, weight in next(iter(state_mixers(model).values())).named_parameters()}


@pytest.mark.filterwarnings("ignore")
def test_ranks_share_heads(ranks2):
    assert ranks2.run(shared_sizes)[0] == {
        "dt_bias": 2, "A_log": 2, "conv1d.weight": 16, "norm.weight": 4, "out_proj.weight": 16,
        "in_proj_qkv.weight": 16, "in_proj_z.weight": 8, "in_proj_b.weight": 2, "in_proj_a.weight": 2,
    }  # fmt: skip


def saved_of(plan: str, families: list[str], documents: bool) -> dict[str, tuple[int, int]]:
    """Return the tokens that a layer's last projection gets, and the bytes that the layer saves for backward."""
    found = {}
    for family in families:
        case = StateCase(LLAMA, num_steps=1, family=family, documents=documents)
        model = parallelize(built(family), build_mesh(Plan.parse(f"{plan} precision=fp64"))).train()
        known = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        saved, tokens, stack = {}, [], contextlib.ExitStack()

        def pack(tensor, known=known, saved=saved):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        def enter(*_, pack=pack, stack=stack):
            stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))

        mixer = next(iter(state_mixers(model).values()))
        mixer.register_forward_pre_hook(enter, prepend=True)
        mixer.register_forward_hook(lambda *_, stack=stack: stack.close())
        last = getattr(mixer, "o_proj" if hasattr(mixer, "o_proj") else "out_proj")
        last.register_forward_hook(lambda module, args, output, tokens=tokens: tokens.append(args[0].shape[1]))
        with Float64Throughout(), sequence_in_use(model):
            case.forward(model, shard_sequence(model, case.batch(0)))
        found[family] = tokens[0], sum(size for size, _ in saved.values())
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("families", [["qwen3_5", "mamba2"], pytest.param([*FAMILIES, *MORE], marks=pytest.mark.full)])
def test_each_rank_keeps_its_tokens(ranks2, families):
    alone, found = saved_of("", families, False), ranks2.run(saved_of, "cp=2", families, False)
    for family, (tokens, saved) in alone.items():
        for rank in found:
            assert rank[family][0] == tokens // 2 == 8, family
            # More than half: with 8 tokens, the previous rank's last tokens are a large share.
            assert rank[family][1] / saved < 0.65, (family, rank[family][1] / saved)
    with_documents = ranks2.run(saved_of, "cp=2", [one for one in families if one not in UNSEEN], True)[1]
    assert {tokens for tokens, _ in with_documents.values()} == {8}
