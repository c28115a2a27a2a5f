"""Further models and training methods: encoder-decoders, images, audio, adapters on quantized bases,
and
local SGD. Results on the device equal a CPU's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.gpu.cases import Case, Figures, Setting, Skipped, require
from tests.gpu.training import Numbers
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.adapters import add_adapter
from weft.models.registry import build_decoder
from weft.models.speech import build_speech_model
from weft.models.vision import build_image_model
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.verify.parity import DecoderCase, local_microbatches
from weft.verify.rank_pool import RankPool

CPU = torch.device("cpu")
#: Both sizes of every weight are multiples of a quantized base's group size.
WIDE = DecoderSpec(vocab_size=101, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, max_seq_len=64)
#: Plans of ranks on one device, by case.
RARE = ("dp_replicate=2 sync=diloco:2", "dp_replicate=2 sync=average:2", "dp_replicate=2 sync=diloco:2 compress=int8")
CHAINS = (
    "pp=2 microbatches=2 split=4+4",
    "pp=2 microbatches=4 schedule=zb_v virtual_stages=2",
    "tp=2",
    "dp_shard=2 zero=3",
)


@dataclass(frozen=True)
class Sound:
    """Audio clips of different lengths, classified by a small encoder."""

    num_steps: int = 3
    max_grad_norm: float = 1.0

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return build_speech_model("speech-tiny", 5, 16, dropout=0.0)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(step)
        return {
            "features": torch.randn(4, 16, 64, generator=draw),
            "frames": torch.randint(20, 65, (4,), generator=draw),
            "labels": torch.randint(5, (4,), generator=draw),
        }

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["features"], batch["frames"])

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(output.float(), batch["labels"], reduction="sum"), len(output)


@dataclass(frozen=True)
class Pictures(Sound):
    """Images, classified by a residual network."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return build_image_model("resnet18", 5, 32)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 32, 32, generator=draw)
        return {"images": images, "labels": torch.randint(5, (4,), generator=draw)}

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["images"])


@dataclass(frozen=True)
class PackedBase(DecoderCase):
    """An adapter on a base whose weights are stored as bytes."""

    base: str = "nf4"

    def model(self) -> nn.Module:
        model = build_decoder(self.spec, dtype=torch.float32, seed=0)
        add_adapter(model, rank=4, alpha=8, seed=5, base=self.base)
        return model


def steps_of(case: Any, plan_text: str, device: torch.device) -> Numbers:
    """Return losses and norms of a case under a plan, on the connected ranks or on one process."""
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan, device)
    model = case.model()
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    step = TrainStep(model, optimizer, case.loss, mesh, forward=case.forward, max_grad_norm=1.0)
    numbers = Numbers()
    for index in range(case.num_steps):
        metrics = step(local_microbatches(case.batch(index), plan, mesh.data.rank))
        numbers.losses.append(metrics.loss)
        numbers.norms.append(metrics.grad_norm)
    return numbers


def _compare_with_cpu(setting: Setting, cases: dict[str, Any], plan: str, most: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, case in cases.items():
        ours, theirs = (steps_of(case, plan, device) for device in (setting.device, CPU))
        figures[name] = ours.distance(theirs)
        require(figures[name], most, f"{name}: losses or norms apart from the CPU's")
        if not all(map(math.isfinite, ours.losses)):
            raise AssertionError(f"{name}: losses {ours.losses}")
    return figures


def pictures_and_sound(setting: Setting) -> Figures:
    """Train three steps of a residual network and of an audio encoder."""
    return _compare_with_cpu(setting, {"pictures": Pictures(), "sound": Sound()}, "precision=fp32", 1e-3)


def packed_bases(setting: Setting) -> Figures:
    """Adapters on a base in 8 and in 4 bits: dequantized equally on both devices."""
    cases = {base: PackedBase(WIDE, num_steps=3, seq_len=16, base=base) for base in ("int8", "nf4")}
    return _compare_with_cpu(setting, cases, "precision=fp32", 1e-4)


def _chain(kind: str) -> Any:
    try:
        from tests.parity.chain_cases import ChainCase

        case = ChainCase(kind)
        case.model()
    except ImportError:
        raise Skipped("transformers is not installed, and this needs it") from None
    return case


def encoders_with_decoders(setting: Setting) -> Figures:
    """Train T5, BART and Whisper in float64."""
    kinds = ("t5",) if setting.small else ("t5", "bart", "whisper")
    return _compare_with_cpu(setting, {kind: _chain(kind) for kind in kinds}, "precision=fp64", 1e-10)


def _compare_staged_with_cpu(setting: Setting, case: Any, plans: tuple[str, ...]) -> Figures:
    """Compare two ranks on the device, through host memory, with two on the CPU: the same sums in the same order."""
    answers: list[dict[str, Numbers]] = []
    for device, backend in ((setting.device, "cpu:gloo,cuda:gloo" if setting.is_cuda else "gloo"), (CPU, "gloo")):
        with RankPool(2, timeout_s=240, backend=backend) as pool:
            answers.append({plan: pool.run(steps_of, case, f"{plan} precision=fp64", device)[0] for plan in plans})
    figures = {plan: ours.distance(answers[1][plan]) for plan, ours in answers[0].items()}
    require(max(figures.values()), 1e-10, "losses or norms apart from ranks on CPUs")
    return figures


def local_sgd(setting: Setting) -> Figures:
    """Replicas that synchronize every second step."""
    case = DecoderCase(WIDE, num_steps=4, seq_len=16)
    return _compare_staged_with_cpu(setting, case, RARE[:1] if setting.small else RARE)


def chains_over_ranks(setting: Setting) -> Figures:
    """An encoder and a decoder split into stages, over tp and zero=3."""
    return _compare_staged_with_cpu(setting, _chain("t5"), CHAINS[:1] if setting.small else CHAINS)


_CORRECT: dict[str, Callable[[Setting], Figures]] = {
    "pictures and sound": pictures_and_sound,
    "adapters on packed bases": packed_bases,
    "encoders with decoders": encoders_with_decoders,
}
CORRECT = [Case("correct", name, run) for name, run in _CORRECT.items()]
RANKS = [
    Case("ranks", "local SGD", local_sgd, 200),
    Case("ranks", "stages of two chains", chains_over_ranks, 240),
]
