"""Greedy tokens in float64 under layouts of 4 ranks equal a plain loop without a cache."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.choice import gate_runs
from tests.inference.conftest import SMALL
from tests.inference.models import VOCAB, plain_model, write_folder
from weft.cli import app as main
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.generation.batch import Limits, generate_batch
from weft.generation.ranks import MeshRanks
from weft.generation.requests import Request, Sampling
from weft.inference.open_model import open_model
from weft.inference.ranks import inference_plan
from weft.train.tasks.generation import open_text_model
from weft.verify.verifier import Float64Throughout

pytest.importorskip("transformers")

#: Hugging Face families with four blocks, and their own sizes. The last four have states.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4},
    "opt": {"do_layer_norm_before": True},
    "bloom": {},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8},
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16,
                   "shared_expert_intermediate_size": 16},
}  # fmt: skip
RUNS = {
    "decoder": ["model.num_kv_heads=4"],
    "gpt2": ["model.family=gpt2", "model.num_kv_heads=4"],
    "experts": ["model.num_experts=4", "model.top_k=2", "model.expert_ffn_dim=32", "model.num_kv_heads=4"],
}
PLANS = ("tp=2 pp=2", "dp_shard=4 zero=3", "dp_replicate=2 tp=2", "dp_replicate=4", "pp=4", "tp=4", "dp_shard=4 ep=2",
         "dp_replicate=2 dp_shard=2 ep=2", "dp_shard=2 tp=2 zero=3", "dp_replicate=2 pp=2")  # fmt: skip
#: Models of the gate.
IN_GATE = ("mixtral", "falcon_h1")
LENGTHS, NEW = (3, 9, 5, 5, 1), 6


def some_requests() -> list[Request]:
    draw = torch.Generator().manual_seed(2)
    return [
        Request(key, tuple(torch.randint(0, 250, (length,), generator=draw).tolist()))
        for key, length in enumerate(LENGTHS)
    ]


def texts_under(plan: str, sources: dict[str, str]) -> dict[str, dict[int, tuple[int, ...]]]:
    """Return this rank's new ids by key for each model."""
    settled, _ = inference_plan(Plan.parse(plan), "fp64")
    mesh, found = build_mesh(settled), {}
    with Float64Throughout():
        for name, source in sources.items():
            opened = open_model(source, settled, mesh)
            own = some_requests()[mesh.data.rank :: mesh.data.size]
            done = generate_batch(opened.model, own, Sampling(NEW, temperature=0), Limits(VOCAB, 64, rows=2),
                                  together=MeshRanks(opened.mesh))  # fmt: skip
            found[name] = {one.key: one.ids for one in done}
    return found


@torch.no_grad()
def plain_texts(model: Any) -> dict[int, tuple[int, ...]]:
    """Continue each prompt alone, and compute the whole text for each token."""
    found = {}
    for request in some_requests():
        text = list(request.prompt_ids)
        for _ in range(NEW):
            output = model(torch.tensor([text]), **({} if hasattr(model, "spec") else {"use_cache": False}))
            text.append(int(getattr(output, "logits", output)[0, -1, :VOCAB].argmax()))
        found[request.key] = tuple(text[len(request.prompt_ids) :])
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("layouts")


def folders(home: Path, families: Iterable[str] = FAMILIES) -> dict[str, str]:
    """Write models, unless they are there, and return their folders."""
    for family in families:
        if not (home / family).exists():
            write_folder(home / family, family, num_hidden_layers=4, n_layer=4, **FAMILIES[family])
    return {family: str(home / family) for family in families}


@pytest.fixture(scope="module")
def decoders(tmp_path_factory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("decoders")
    (home / "text.txt").write_text("warp and weft " * 200)
    for name, more in RUNS.items():
        words = [*SMALL, "model.num_layers=4", *more, f"data.train={home}/text.txt", f"run.dir={home}"]
        assert main.run(["train", *words, f"run.name={name}"]) == 0
    return {name: str(home / name) for name in RUNS}


@pytest.fixture(scope="module")
def wanted() -> dict[str, dict[int, tuple[int, ...]]]:
    """Plain texts by folder, filled as tests need them."""
    return {}


def expect_plain(ranks4: Any, plan: str, sources: dict[str, str], wanted: Any) -> None:
    for source in sources.values():
        if source not in wanted:
            with Float64Throughout():
                is_folder = (Path(source) / "config.json").is_file()
                model = plain_model(Path(source)) if is_folder else open_text_model(Path(source)).model._model.double()
                wanted[source] = plain_texts(model)
    found: dict[str, dict[int, tuple[int, ...]]] = {name: {} for name in sources}
    for rank in ranks4.run(texts_under, plan, sources):
        for name, texts in rank.items():
            for key, ids in texts.items():
                assert found[name].setdefault(key, ids) == ids, (name, key)
    for name, source in sources.items():
        assert found[name] == wanted[source], (plan, name)


def fitting(plan: str, sources: dict[str, str]) -> dict[str, str]:
    """Return the models that a plan supports."""
    experts = {"mixtral", "qwen3_next", "experts"}
    return {name: source for name, source in sources.items() if "ep=" not in plan or name in experts}


@pytest.mark.parametrize("plan", gate_runs(PLANS, 0))
def test_four_ranks_continue_prompts_like_a_plain_loop(plan, home, wanted, ranks4):
    expect_plain(ranks4, plan, fitting(plan, folders(home, IN_GATE)), wanted)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_all_families_under_four_ranks(plan, home, wanted, ranks4):
    expect_plain(ranks4, plan, fitting(plan, folders(home)), wanted)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_decoders_of_weft_under_four_ranks(plan, decoders, wanted, ranks4):
    expect_plain(ranks4, plan, fitting(plan, decoders), wanted)
