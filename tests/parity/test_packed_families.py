"""Packed documents in transformers models on two ranks match transformers' own masks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.choice import todays
from tests.parity.compiled import compiled_plan, train_compiled
from tests.parity.dropout_cases import train_throughout
from tests.parity.families import DIM, FAMILIES, FFN, HEADS, LAYERS, LENGTH, VOCAB, Family, FamilyCase
from tests.parity.test_compile import FIRST_RUN, RTOL
from weft.parallel.layers.documents import call_in_documents
from weft.verify.parity import train_plain
from weft.verify.verifier import Float64Throughout

PLANS = [
    "dp_shard=2 zero=3 recompute=full",
    "dp_replicate=2 zero=0 recompute=selective accumulation=2",
    "tp=2 sp=on",
    "pp=2 microbatches=2 recompute=full",
]


#: Plans for models that do not read document boundaries, whose masks transformers makes.
BY_MASKS = ["dp_shard=2 zero=3 recompute=full", "dp_replicate=2 zero=1 accumulation=2", "tp=2", "tp=2 sp=on", "cp=2"]
#: Families for which transformers does not pass document boundaries to the mask.
WITHOUT_BOUNDARIES = {
    "gpt-oss": FAMILIES["gpt-oss"],
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "ffn_dim": FFN, "max_position_embeddings": LENGTH, "word_embed_proj_dim": DIM, "dropout": 0.0,
        },
        kv_heads=HEADS,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PackedFamily(FamilyCase):
    """A family on rows of two or three documents, in the loader's format."""

    @property
    def family(self) -> Family:
        return WITHOUT_BOUNDARIES.get(self.name) or FAMILIES[self.name]

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        batch = super().batch(step)
        position_BT = torch.arange(self.seq_len).expand(self.global_batch, -1)
        row_B1 = torch.arange(self.global_batch)[:, None]
        ids_BT = (position_BT >= 2 + row_B1 % 3).long() + (position_BT >= 6) * (row_B1 % 2)
        first_BT = ids_BT.diff(dim=1, prepend=ids_BT[:, :1] - 1) != 0
        begun_BT = torch.where(first_BT, position_BT, 0).cummax(1).values
        starts_BM = torch.where(first_BT, position_BT, self.seq_len).sort(1).values[:, :4].contiguous()
        return batch | {"positions": position_BT - begun_BT, "document_ids": ids_BT, "document_starts": starts_BM}

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with Float64Throughout():
            return call_in_documents(model, batch).logits


@dataclass(frozen=True)
class PositionFamily(PackedFamily):
    """The same rows from a script, with document boundaries given by positions only."""

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        batch = super().batch(step)
        return {"position_ids": batch["positions"], **{name: batch[name] for name in ("input_ids", "labels")}}

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with Float64Throughout():
            return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_positions_from_a_script_separate_documents(name, ranks2):
    want = train_plain(PackedFamily(name, num_steps=2))
    # Without Weft they do not: transformers makes a cache by default, and then ignores positions.
    assert train_plain(PositionFamily(name, num_steps=2)).largest_difference(want) > 1e-3
    for plan in ("dp_shard=2 zero=3 recompute=full", "dp_replicate=2 accumulation=2", "tp=2 sp=on"):
        for found in ranks2.run(train_throughout, f"{plan} precision=fp64", {name: PositionFamily(name, num_steps=2)}):
            assert found[name].largest_difference(want) < 1e-10, plan


@pytest.mark.parametrize("name", todays(["llama", "mistral", "deepseek-v3"], parts=3))
def test_packed_documents_match_transformers_on_two_ranks(name, ranks2):
    case = PackedFamily(name, num_steps=2)
    want = train_plain(case)
    for plan in PLANS:
        for found in ranks2.run(train_throughout, f"{plan} precision=fp64", {name: case}):
            assert found[name].largest_difference(want) < 1e-10, plan


@pytest.mark.parametrize("name", todays(WITHOUT_BOUNDARIES, parts=2))
def test_masks_separate_documents_on_two_ranks(name, ranks2):
    case = PackedFamily(name, num_steps=2)
    want = train_plain(case)
    plans = BY_MASKS if name == "opt" else [*BY_MASKS, "pp=2 microbatches=2"]  # OPT does not support pipelines
    for plan in plans:
        for found in ranks2.run(train_throughout, f"{plan} precision=fp64", {name: case}):
            assert found[name].largest_difference(want) < 1e-10, plan


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_blocks_with_documents_are_one_graph(name):
    case = PackedFamily(name)
    found = train_compiled(compiled_plan(""), case)
    assert found.result.largest_difference(train_plain(case)) < RTOL
    assert not [reason for reason in found.breaks if FIRST_RUN not in reason]
    assert found.graphs == 1
