"""Models of which every cp rank gets full samples match one process: images, padding, dropout and unused towers."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.parity.cases import LLAMA
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError, WeftWarning
from weft.parallel.context.context import sequence_in_use, shard_sequence
from weft.parallel.context.full_samples import choose_full_samples
from weft.parallel.parallelize import parallelize
from weft.verify.parity import DecoderCase, train_case

_TEXT = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None,
}  # fmt: skip
_IMAGES = {
    "image_size": 12, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24,
    "num_attention_heads": 4,
}  # fmt: skip
#: The token that stands for a patch of an image.
_IMAGE_TOKEN = 63


def build_vit(dropout: float = 0.0) -> Any:
    """Return an image classifier. Its 10 tokens, with the class token, are no multiple of 4."""
    from transformers import ViTConfig, ViTForImageClassification

    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return ViTForImageClassification(ViTConfig(**_IMAGES, **drops, num_labels=5))


def build_llava() -> Any:
    """Return a model whose image features replace tokens of its text."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision, text = CLIPVisionConfig(**_IMAGES), LlamaConfig(**_TEXT)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=_IMAGE_TOKEN,
            image_seq_length=9,
            vision_feature_layer=-2,
        )
    )


@dataclasses.dataclass(frozen=True)
class ImageCase(DecoderCase):
    """Images and their classes. The loss counts one sample for each image."""

    dropout: float = 0.0

    def model(self):
        torch.manual_seed(0)
        return build_vit(self.dropout).double()

    def batch(self, step):
        rng = torch.Generator().manual_seed(step)
        images = torch.randn((8, 3, 12, 12), generator=rng, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.randint(5, (8,), generator=rng)}

    def forward(self, model, batch):
        return model(pixel_values=batch["pixel_values"]).logits

    def loss(self, output, batch):
        return F.cross_entropy(output, batch["labels"], reduction="sum"), torch.tensor(len(output))


@dataclasses.dataclass(frozen=True)
class MixedCase(DecoderCase):
    """Texts of 14 tokens, which begin with an image in odd steps and are text alone in the others."""

    def model(self):
        torch.manual_seed(0)
        return build_llava().double()

    def batch(self, step):
        rng = torch.Generator().manual_seed(step)
        ids = torch.randint(60, (8, 14), generator=rng)
        labels = torch.randint(60, (8, 14), generator=rng)
        labels[::3, 9:] = -100
        if step % 2 == 0:
            return {"input_ids": ids, "labels": labels}
        ids[:, :9] = _IMAGE_TOKEN
        images = torch.randn((8, 3, 12, 12), generator=rng, dtype=torch.float64)
        return {"input_ids": ids, "labels": labels, "pixel_values": images}

    def forward(self, model, batch):
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits

    def loss(self, output, batch):
        labels = batch["labels"]
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


CASES = {
    "images": ImageCase(LLAMA, num_steps=2, optimizer="sgd"),
    "dropout": ImageCase(LLAMA, num_steps=2, optimizer="sgd", dropout=0.2),
    "mixed": MixedCase(LLAMA, num_steps=2, optimizer="sgd"),
}


def train_each(plan, names=tuple(CASES)):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeftWarning)
        return {name: train_case(plan, CASES[name]) for name in names}


def _check(found, names=tuple(CASES)):
    for name in names:
        expected = train_case("precision=fp64", CASES[name])
        assert found[name].losses == pytest.approx(expected.losses, rel=1e-12), name
        for param, grad in expected.grads.items():
            scale = max(1e-9, float(grad.abs().max()))
            assert float((found[name].grads[param] - grad).abs().max()) / scale < 1e-10, f"{name}: {param}"


def test_full_samples_match_one_process(ranks2):
    _check(ranks2.run(train_each, "cp=2 precision=fp64")[0])


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    ["cp=4", "cp=2 tp=2", "cp=2 dp_shard=2 zero=3 recompute=full", "cp=2 dp_replicate=2 microbatches=2"],
)
def test_full_samples_with_other_axes_match_one_process(plan, ranks4):
    _check(ranks4.run(train_each, f"{plan} precision=fp64")[0])


class _Mesh(dict):
    """The parts of a mesh that `choose_full_samples` reads."""

    def __init__(self, plan):
        super().__init__(cp=dataclasses.replace(build_mesh(Plan())["cp"], size=plan.cp))
        self.plan = plan


def test_block_lists_are_sharded_around_modules_that_mix_tokens():
    [chain] = choose_full_samples(build_vit(), _Mesh(Plan(cp=2))).chains
    assert [path.rpartition(".")[2] for path in chain.blocks] == ["0", "1"]
    assert chain.runs == ((chain.blocks[0], chain.blocks[1]),)
    assert all(".attention" in path for path in chain.mixers)
    found = choose_full_samples(build_llava(), _Mesh(Plan(cp=2)))
    assert not found.undivided
    assert {chain.blocks[0].split(".")[1] for chain in found.chains} == {"language_model", "vision_tower"}
    # The tower's states are read after its second-last block, and code between decoder blocks may read images.
    assert all(chain.runs == tuple((path, path) for path in chain.blocks) for chain in found.chains)


def test_models_whose_attention_can_be_sharded_get_sharded_batches():
    from transformers import LlamaConfig, LlamaForCausalLM

    assert choose_full_samples(LlamaForCausalLM(LlamaConfig(**_TEXT)), _Mesh(Plan(cp=2))) is None
    assert choose_full_samples(build_vit(), _Mesh(Plan())) is None


@pytest.mark.parametrize(
    ("plan", "setting"),
    [
        (Plan(cp=2, pp=2, microbatches=2), "pp=2"),
        (Plan(cp=2, tp=2, sp=True), "sp=on"),
        (Plan(cp=2, compile=True), "compile=on"),
    ],
)
def test_unsupported_plans_are_rejected(plan, setting):
    with pytest.raises(
        ModelError, match=f"cp=2 {setting}: every rank of cp gets full samples of ViT.*or cp=1 for this model"
    ):
        choose_full_samples(build_vit(), _Mesh(plan))


def test_convolutions_are_rejected():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    with pytest.raises(ModelError, match=r"cp=2: resnet\.encoder\.stages.*Use cp=1 for this model"):
        choose_full_samples(ResNetForImageClassification(config), _Mesh(Plan(cp=2)))


def _call_with(plan, **options):
    model = CASES["images"].model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeftWarning)
        parallelize(model, build_mesh(Plan.parse(plan)))
    images = CASES["images"].batch(0)["pixel_values"]
    try:
        with sequence_in_use(model):
            model(pixel_values=images, **options)
    except ModelError as error:
        return str(error)
    return ""


def test_outputs_from_inside_blocks_are_rejected(ranks2):
    found = ranks2.run(_call_with, "cp=2 precision=fp64", output_hidden_states=True)
    assert found == ["cp=2: output_hidden_states=True returns tensors from blocks, which have one rank's tokens. Leave "
                     "output_hidden_states out, or use cp=1."] * 2  # fmt: skip


def _shard_in_own_loop(plan):
    model = CASES["images"].model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeftWarning)
        parallelize(model, build_mesh(Plan.parse(plan)))
    with pytest.raises(ModelError, match=r"would count each loss on every rank. Use run\.train_step, or cp=1"):
        shard_sequence(model, CASES["images"].batch(0))


def test_loops_of_users_are_rejected(ranks2):
    ranks2.run(_shard_in_own_loop, "cp=2 precision=fp64")
