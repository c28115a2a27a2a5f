"""A model and a data set whose samples differ in numbers of patches and tokens, trained with a user's DataLoader.

B samples, T tokens, P patches of all samples, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.parity.dropout_cases import Block
from tests.parity.moe_cases import MOE, MoECase
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.state.gradients import data_parallel
from weft.train.script.script_run import Run
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.parity import ParityResult
from weft.verify.verifier import Float64Throughout

VOCAB, DIM, PATCH = 29, 16, 6
LAYOUT = "blocks.*.attn.{q,k,v}=colwise blocks.*.attn.o=rowwise blocks.*.mlp.0=colwise blocks.*.mlp.3=rowwise"
Sample = dict[str, torch.Tensor]


class Prefix(nn.Module):
    """Token embeddings plus the sum of the sample's patches, with dropout on the patch features."""

    def __init__(self, rate: float):
        super().__init__()
        self.token_embed = nn.Embedding(VOCAB, DIM)
        self.patches = nn.Linear(PATCH, DIM)
        self.drop = nn.Dropout(rate)

    def forward(self, ids_BT: torch.Tensor, patches_P: torch.Tensor, counts_B: torch.Tensor) -> torch.Tensor:
        owner_P = torch.repeat_interleave(torch.arange(len(counts_B)), counts_B)
        x_PD = self.drop(self.patches(patches_P).tanh())
        patch_sum_BD = torch.zeros(len(counts_B), DIM, dtype=x_PD.dtype).index_add(0, owner_P, x_PD)
        return self.drop(self.token_embed(ids_BT) + patch_sum_BD[:, None])


class Ragged(nn.Module):
    """Prefix, two blocks with attention, head."""

    def __init__(self, rate: float):
        super().__init__()
        self.prefix = Prefix(rate)
        self.blocks = nn.ModuleList(Block(DIM, 4, rate) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, patches: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        x = self.prefix(ids, patches, counts)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def samples(count: int) -> list[Sample]:
    """Return samples of three to seven tokens and zero to four patches. The second of every three has no label."""
    rng = torch.Generator().manual_seed(3)
    found = []
    for index in range(count):
        length, patches = 3 + index * 2 % 5, index * 3 % 5
        labels = torch.randint(VOCAB, (length,), generator=rng)
        found.append(
            {
                "ids": torch.randint(VOCAB, (length,), generator=rng),
                "patches": torch.randn(patches, PATCH, generator=rng, dtype=torch.float64),
                "labels": labels if index % 3 != 1 else torch.full_like(labels, -100),
            }
        )
    return found


def collate(rows: list[Sample]) -> dict[str, torch.Tensor]:
    """Concatenate patches and pad tokens to the longest sample."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "ids": pad([row["ids"] for row in rows], batch_first=True),
        "patches": torch.cat([row["patches"] for row in rows]),
        "counts": torch.tensor([len(row["patches"]) for row in rows]),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["labels"]
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def run_of(plan: str) -> Run:
    """Return a `Run` as `weft.init` does, on ranks that are connected already."""
    parsed, ledger = Plan.parse(f"{plan} precision=fp64"), Ledger()
    return Run(parsed, build_mesh(parsed, record=ledger.record), ledger, 0)


def train(plan: str, *, batch_size: int = 5, count: int = 11, rate: float = 0.25) -> tuple[ParityResult, float]:
    """Train two epochs, whose last batches may be short. Return the result and the loss of an evaluation."""
    run = run_of(plan)
    torch.manual_seed(0)
    model = run.parallelize(Ragged(rate).double(), LAYOUT if "tp=" in plan else None)
    loader = run.shard(DataLoader(samples(count), batch_size=batch_size, shuffle=True, collate_fn=collate))
    step = run.train_step(model, torch.optim.AdamW, loss, lr=3e-3, max_grad_norm=1.0)
    result = ParityResult()
    with Float64Throughout():
        for _ in range(2):
            for batch in loader:
                metrics = step(batch)
                result.losses.append(metrics.loss)
                result.grad_norms.append(metrics.grad_norm)
        return _finished(model, result), run.evaluate(model, loader, loss).loss


def _finished(model: nn.Module, result: ParityResult) -> ParityResult:
    engine = data_parallel(model)
    result.grads = {name: grad.clone() for name, grad in engine.gradients()}
    result.weights = {name: weight.detach().clone() for name, weight in engine.weights()}
    return result


def train_all(plans: list[str], settings: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Train each plan with each setting, in one call of a pool of ranks."""
    return {(plan, name): train(plan, **chosen) for plan in plans for name, chosen in settings.items()}


def train_decoder(plan: str) -> ParityResult:
    """Train a decoder with balanced experts on batches of 3 and 1 sequences from a user's loader."""
    case = MoECase(MOE, global_batch=4, masked=0.0)
    full_batch = case.batch(0)
    rows = [{name: tensor[index] for name, tensor in full_batch.items()} for index in range(4)]
    run = run_of(plan)
    model = run.parallelize(case.model())
    loader = run.shard(DataLoader(rows, batch_size=3))
    step = run.train_step(model, torch.optim.SGD, token_cross_entropy, forward=model_forward, lr=0.1)
    result = ParityResult()
    for batch in loader:
        metrics = step(batch)
        result.losses.append(metrics.loss)
        result.grad_norms.append(metrics.grad_norm)
    return _finished(model, result)


def train_decoders(plans: list[str]) -> dict[str, ParityResult]:
    """Run `train_decoder` under each plan."""
    return {plan: train_decoder(plan) for plan in plans}
