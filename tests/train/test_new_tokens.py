"""New tokens: rows added to a folder's embeddings, trained under every plan, exported for transformers and peft."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.choice import todays
from weft.checkpoint.load import load_checkpoint
from weft.cli.app import run as weft_run
from weft.comm.mesh import build_mesh
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.config.sections import OptimizerSection
from weft.data.text.tokenizer import Tokenizer
from weft.errors import ConfigError, DataError
from weft.optim.build import build_optimizer, freeze
from weft.parallel.parallelize import parallelize
from weft.parallel.zero.magnitudes import load_base
from weft.train.folder import RunFolder
from weft.train.preparation import prepare_run
from weft.train.rank_run import Start, run_rank
from weft.train.states.model_state import capture_model
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import token_cross_entropy
from weft.train.tasks.generation import generate_text
from weft.train.tasks.registry import find_task
from weft.train.weights.added_rows import drawn_rows
from weft.train.weights.decoder_files import tokenizer_of
from weft.train.weights.run_adapter import with_adapter
from weft.verify.parity import local_microbatches

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

NEW = ("<tool>", "</tool>")
ADD = f"tokenizer.add_tokens={json.dumps(NEW)}"
WORDS = ("warp", "weft", "<tool>", "loom", "</tool>", "cloth")
SMALL = ("train.steps=4", "train.seq_len=32", "train.global_batch=4", "eval.every=0", "checkpoint.every=2",
         "checkpoint.keep=9", "optimizer.lr=0.01", "sample.prompt=", "launch.device=cpu", "data.holdout=0",
         "schedule.warmup_steps=1")  # fmt: skip


def save_folder(folder: Path, *, tied: bool, longer: int = 0) -> int:
    """Save a tiny model with a byte-level tokenizer of `longer` more entries than rows. Return the number of rows."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>", "<pad>", "<|endoftext|>", "<unused>"]  # an even number of rows, for tp=2
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(["warp weft loom"] * 5, trainer)
    rows = library.get_vocab_size()
    library.add_tokens([f"<x{number}>" for number in range(longer)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token="</s>", pad_token="<pad>").save_pretrained(
        folder
    )
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=rows, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return rows


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Prepare two folders, with tied and untied embeddings, and texts with the new tokens."""
    here = tmp_path_factory.mktemp("tokens")
    for name in ("tied", "untied"):
        save_folder(here / name, tied=name == "tied")
    lines = [" ".join(WORDS[(i * k) % 6] for k in range(1, 40)) for i in range(1, 41)]
    (here / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return here


def words_of(home: Path, base: str, name: str, *more: str) -> list[str]:
    places = [f"run.dir={home}", f"data.cache_dir={home / 'cache'}", f"data.train={home / 'text.jsonl'}"]
    return [*SMALL, *places, f"model.path={home / base}", f"run.name={name}", *more]


def train(*words: str) -> RunFolder:
    folder = prepare_run(load_config(None, [*words]).config, world_size=1)
    run_rank(folder.path, None, io.StringIO(), Start())
    return RunFolder(folder.path)


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_exports_of_runs_with_new_tokens_load_in_transformers_and_peft(home, base, capsys):
    auto, ids = transformers.AutoModelForCausalLM, torch.arange(24).view(2, 12) * 7 % 250
    rows = auto.from_pretrained(home / base).get_input_embeddings().weight.shape[0]
    ids[:, 3], ids[:, 4] = rows, rows + 1
    full = train(*words_of(home, base, f"{base}-full", ADD))
    run = train(*words_of(home, base, f"{base}-lora", ADD, "adapter.rank=2"))
    ours = Tokenizer.load(tokenizer_of(run))
    assert ours.encode("warp<tool> x</tool>").count(rows) == 1
    for folder, words in {"full": [full], "lora": [run], "merged": [run, "--merge"]}.items():
        assert weft_run(["export", str(words[0].path), str(home / f"{base}-{folder}-out"), *words[1:]]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(home / f"{base}-lora-out")
    assert theirs.encode("warp<tool> x</tool>") == ours.encode("warp<tool> x</tool>")
    merged = auto.from_pretrained(home / f"{base}-merged-out")
    assert merged.config.vocab_size == rows + 2
    resized = auto.from_pretrained(home / base)
    resized.resize_token_embeddings(len(theirs))
    alone = peft.PeftModel.from_pretrained(resized, home / f"{base}-lora-out")
    torch.testing.assert_close(logits(alone, ids), logits(merged, ids), rtol=1e-5, atol=1e-5)
    assert generate_text(run, "warp<tool>", 4, temperature=0.0).startswith("warp<tool>")
    said = json.loads((home / f"{base}-lora-out" / "adapter_config.json").read_text())["trainable_token_indices"]
    assert said == {key: [rows, rows + 1] for key in ["model.embed_tokens"] + ["lm_head"] * (base == "untied")}
    trained = auto.from_pretrained(home / f"{base}-full-out").get_input_embeddings().weight
    start = auto.from_pretrained(home / base).get_input_embeddings().weight
    assert trained.shape[0] == rows + 2
    assert (trained[rows:] - start.mean(0)).abs().max() > 1e-3  # trained
    capsys.readouterr()


def test_run_with_new_tokens_resumes_exactly(home):
    words = words_of(home, "untied", "whole", ADD, "adapter.rank=2", 'adapter.modules_to_save=["lm_head"]')
    whole = train(*words, "plan=dp_replicate=1 precision=fp64")
    half = [*words, "run.name=halves", "plan=dp_replicate=1 precision=fp64", "schedule.kind=constant"]
    again = [*words, "run.name=again", "plan=dp_replicate=1 precision=fp64", "schedule.kind=constant"]
    train(*half, "train.steps=2")
    train(*half, "train.steps=4")
    train(*again, "train.steps=4")

    def losses(name: str) -> list[float]:
        lines = [json.loads(line) for line in (home / name / "events.jsonl").read_text().splitlines()]
        return [one["loss"] for one in lines if one.get("event") == "step"]

    assert losses("halves") == losses("again")
    assert len(losses("whole")) == 4
    assert (whole.path / "base" / "added_rows.safetensors").is_file()


def test_classifier_learns_new_tokens_and_its_new_head(home, capsys):
    rows = [{"text": f"warp {word} loom", "label": word == "<tool>"} for word in ("<tool>", "weft") * 8]
    (home / "labels.jsonl").write_text("".join(json.dumps({**one, "label": str(one["label"])}) + "\n" for one in rows))
    words = [word for word in words_of(home, "untied", "labels", ADD) if not word.startswith(("sample", "data.train"))]
    words += [f"data.train={home / 'labels.jsonl'}", "task=classify_text", "adapter.rank=2"]
    run = train(*words, 'adapter.modules_to_save=["score"]', "train.steps=2")
    names = load_checkpoint(run.checkpoint(2)).entries("model").keys()
    assert {"score.weight", "model.embed_tokens.token_rows"} <= names
    assert weft_run(["export", str(run.path), str(home / "labels-out")]) == 0
    said = json.loads((home / "labels-out" / "adapter_config.json").read_text())
    assert said["modules_to_save"] == ["score"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "labels-out")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(home / "untied", num_labels=2)
    base.resize_token_embeddings(len(tokenizer))
    model = peft.PeftModel.from_pretrained(base, home / "labels-out")
    saved = load_file(home / "labels-out" / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(model.base_model.model.score.modules_to_save["default"].weight.cpu(), saved)
    capsys.readouterr()


def started(plan_text: str, words: list[str]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the weights that a prepared run starts from under a plan, and the losses of three steps."""
    torch.set_num_threads(1)
    config = load_config(None, words).config
    task, plan = find_task(config), Plan.parse(f"{plan_text} precision=fp64")
    task.open(RunFolder(Path(config.run.dir) / config.run.name))
    mesh = build_mesh(plan)
    base = task.initial_model(plan)
    source = task.initial_weights(base)
    assert source is not None
    model = with_adapter(base, config)
    freeze(model, config.optimizer)
    parallelize(model, mesh, seed=config.seed, filled_later=True)
    load_base(model, source)
    weights = {name: tensor.clone() for name, tensor in capture_model(model).items()}
    step = TrainStep(
        model, build_optimizer(model.named_parameters(), OptimizerSection(lr=1e-2), 0), token_cross_entropy, mesh,
        forward=lambda model, batch: model(input_ids=batch["input_ids"], use_cache=False).logits,
    )  # fmt: skip
    rows, found = weights["model.embed_tokens.weight"].shape[0], list[float]()
    for index in range(3):
        ids = torch.randint(rows, (4, 17), generator=torch.Generator().manual_seed(index))
        ids[:, 2], ids[:, 9] = rows - 1, rows - 2
        batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        found.append(step(local_microbatches(batch, plan, mesh.data.rank)).loss)
    return weights, found


PLANS = ("dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=3", "tp=2", "tp=2 sp=on",
         "pp=2 microbatches=2")  # fmt: skip


@pytest.mark.parametrize(
    ("base", "settings"),
    todays(
        [
            ("tied", []),
            ("untied", ["adapter.rank=2"]),
            ("tied", ["adapter.rank=2", 'adapter.modules_to_save=["embed_tokens"]']),
        ],
        parts=3,
    ),
    ids=["full", "rows", "saved"],
)
def test_new_tokens_start_and_train_equally_under_every_plan(home, base, settings, ranks2):
    name = f"plans-{base}-{len(settings)}"
    words = words_of(home, base, name, ADD, *settings)
    prepare_run(load_config(None, words).config, world_size=1)
    wanted, losses = started("dp_replicate=1", words)
    assert len(wanted["model.embed_tokens.weight"]) % 2 == 0
    for plan in PLANS:
        for weights, found in ranks2.run(started, plan, words):
            assert found == pytest.approx(losses, rel=1e-10), plan
            for key, tensor in weights.items():
                assert torch.equal(tensor, wanted[key]), (plan, key)


def test_new_rows_are_drawn_as_transformers_draws_them():
    torch.manual_seed(1)
    config = transformers.Qwen2Config(
        vocab_size=400, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():  # features of different scales that depend on each other
        weight = model.get_input_embeddings().weight
        weight.copy_(torch.randn(400, 16) @ torch.randn(16, 16) + torch.arange(16.0) * 1e-4)
        weight -= weight.mean(0)
    before = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(20_400)
    theirs, ours = model.get_input_embeddings().weight.detach()[400:], drawn_rows(before, 20_000, "embed", 0)
    covariance = torch.cov(before.double().t(), correction=0) * 1e-9
    for rows in (theirs, ours):
        assert (torch.cov(rows.double().t()) - covariance).abs().max() < 0.05 * covariance.abs().max()
    assert torch.equal(ours[:100], drawn_rows(before, 20_000, "embed", 0)[:100])
    assert not torch.equal(ours[:100], drawn_rows(before, 20_000, "embed", 1)[:100])
    few = torch.randn(3, 16)  # their covariance is singular
    torch.testing.assert_close(drawn_rows(few, 2, "embed", 0), few.mean(0).expand(2, 16))


def test_folder_whose_tokenizer_is_longer_than_its_embedding(home, tmp_path, capsys, prepares_locally):
    rows = save_folder(home / "longer", tied=False, longer=3)
    words = words_of(home, "longer", "longer-run")
    assert weft_run(["train", *words]) == 2
    wanted = f"its tokenizer has {rows + 3} entries, and its embedding {rows} rows. Set model.vocab_size={rows + 3} to"
    assert wanted in capsys.readouterr().err
    run = train(*words, f"model.vocab_size={rows + 3}")
    assert json.loads((run.path / "base" / "config.json").read_text())["vocab_size"] == rows + 3
    with pytest.raises(
        ConfigError, match=f"model.vocab_size=20: the embedding of model.path has {rows} rows, and rows"
    ):
        prepare_run(load_config(None, [*words, "model.vocab_size=20", "run.name=fewer"]).config, world_size=1)


MANY = json.dumps([f"<{number}>" for number in range(100_001)])
BAD = {
    'tokenizer.add_tokens=["</s>"]': "tokenizer.add_tokens=</s>: the tokenizer has this token already, with id 1.",
    'tokenizer.add_tokens=["a", ""]': 'tokenizer.add_tokens="": a token has at least one character. Leave the',
    'tokenizer.add_tokens=["<a>", "<a>"]': "tokenizer.add_tokens=<a>: the token is listed twice. List each token once",
    f"tokenizer.add_tokens={MANY}": "tokenizer.add_tokens=100001 tokens: at most 100000 are added. Train a tokenizer",
    "adapter.trainable_tokens=[999]": "adapter.trainable_tokens=999: model.embed_tokens has ",
    "adapter.trainable_tokens=[-1]": "adapter.trainable_tokens=-1: model.embed_tokens has ",
    "adapter.trainable_tokens=[5, 5]": "adapter.trainable_tokens=5: the id is given twice. Give each id once.",
    'adapter.trainable_tokens=["<no>"]': "adapter.trainable_tokens=<no>: the tokenizer has no such token. Add it with",
    'adapter.modules_to_save=["nope"]': "adapter.modules_to_save=nope: no module has such a path or ending. Use",
    'adapter.modules_to_save=["act_fn"]': "adapter.modules_to_save=act_fn: model.layers.0.mlp.act_fn has no parameters",
    'adapter.targets=["q_proj"] adapter.modules_to_save=["self_attn"]': "adapter.targets=model.layers.0.self_attn.q",
    'adapter.trainable_tokens=[5] adapter.modules_to_save=["embed_tokens"]': "adapter.trainable_tokens=model.embed_tok",
}  # fmt: skip


@pytest.mark.parametrize("settings", [*BAD], ids=[one[:40] for one in BAD])
def test_invalid_tokens_and_modules_are_rejected_with_one_message(home, settings):
    more = [settings] if "], " in settings or settings.count("=") == 1 else settings.split(" ")
    rank = ["adapter.rank=2"] if "adapter" in settings else []
    with pytest.raises((ConfigError, DataError)) as caught:
        prepare_run(load_config(None, words_of(home, "untied", "bad", *rank, *more)).config, world_size=1)
    [line] = str(caught.value).splitlines()
    assert BAD[settings] in line
