"""Models that several files of tests read."""

from __future__ import annotations

import pytest

from tests.inference.models import FAMILIES, write_folder
from weft.cli import app as main

SMALL = ["model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=64",
         "model.max_seq_len=64", "tokenizer.kind=bytes", "launch.device=cpu", "eval.every=0", "sample.prompt=",
         "train.global_batch=4", "train.steps=3", "train.seq_len=16", "optimizer.lr=1e-2",
         "launch.ranks=1"]  # fmt: skip


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, str]:
    """Write a small Hugging Face model of each family."""
    pytest.importorskip("transformers")
    home = tmp_path_factory.mktemp("families")
    return {family: str(write_folder(home / family, family)) for family in FAMILIES}


@pytest.fixture(scope="session")
def runs(tmp_path_factory, folders) -> dict[str, str]:
    """Train a Weft decoder, one with an adapter, one with experts, and a pretrained model with and without adapters."""
    home = tmp_path_factory.mktemp("runs")
    (home / "text.txt").write_text("warp and weft " * 200)
    experts = ["model.num_experts=4", "model.top_k=2", "model.expert_ffn_dim=32"]
    path = ["model.path=" + folders["llama"], "train.seq_len=16"]
    words = {
        "decoder": SMALL,
        "experts": [*SMALL, *experts],
        "decoder_lora": [*SMALL, "adapter.rank=2"],
        "folder": [*(one for one in SMALL if not one.startswith(("model.", "tokenizer."))), *path],
    }
    words["folder_lora"] = [*words["folder"], "adapter.rank=2", "adapter.kind=dora"]
    for name, settings in words.items():
        assert main.run(["train", *settings, f"data.train={home}/text.txt", f"run.dir={home}", f"run.name={name}"]) == 0
    return {name: str(home / name) for name in words}
