"""Tasks on Hugging Face folders: from a command to an exported folder, and errors before training."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.tuned_folders import CASES, save_model, save_tokenizer, write_tables
from tests.train.tuned_folders import settings as typed
from weft.cli.app import run as weft_run
from weft.config.files import load_config
from weft.data.table_data import ordered_labels
from weft.errors import ConfigError, DataError, PlanError, WeftError
from weft.monitor.events import read_events
from weft.parallel.state.flat_slices import read_full
from weft.train.batches.data_share import Share
from weft.train.preparation import prepare_run
from weft.train.privacy.records import private_records
from weft.train.rank_run import run_rank
from weft.train.tasks import classification
from weft.train.tasks.decoder_loss import perplexity
from weft.train.tasks.registry import find_task
from weft.verify.case_data import Settings
from weft.verify.subject import find_subject

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("tuned")
    (found / "eval").mkdir()
    write_tables(found)
    write_tables(found / "eval", 11)
    for family in ("bert", "llama", "t5"):
        save_model(found / family, family)
    return found


@pytest.fixture
def config(root, tmp_path):
    def read(case: str, *more: str):
        return load_config(None, [*typed(case, root), f"run.dir={tmp_path}", *more]).config

    return read


def refused(kind: type[WeftError], config) -> str:
    with pytest.raises(kind) as caught:
        prepare_run(config, world_size=1)
    return str(caught.value)


# --- full runs ---


def finished(config):
    folder = prepare_run(config, world_size=1)
    terminal = io.StringIO()
    run_rank(folder, None, terminal)
    return folder, terminal.getvalue()


def test_classifier_is_trained_reported_and_exported(config, tmp_path, capsys):
    folder, shown = finished(config("classify", "optimizer.lr=1e-3", f"data.cache_dir={tmp_path / 'cache'}"))
    assert "BertForSequenceClassification" in shown
    assert "weights: 'bert.pooler.dense.bias', 'bert.pooler.dense.weight', 'classifier.bias' and 1 more not in" in shown
    assert "texts.jsonl; 40 rows, 1 truncated" in shown
    found = [event for event in read_events(folder.events) if event["event"] == "eval"]
    assert [event["texts"] for event in found] == [11, 11]
    assert {"accuracy", "macro_f1"} <= found[0].keys()
    out = tmp_path / "out"
    task = find_task(folder.config())
    task.open(folder)
    batches = list(task.eval_batches(Share(8)))
    shutil.rmtree(tmp_path / "cache")  # an export needs no data
    assert weft_run(["export", str(folder.path), str(out)]) == 0
    capsys.readouterr()
    saved_config = json.loads((out / "config.json").read_text())
    assert saved_config["id2label"] == {"0": "bad", "1": "good"}
    assert saved_config["architectures"] == ["BertForSequenceClassification"]
    assert "train: " in (out / "README.md").read_text()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    right, losses = 0, 0.0
    with torch.no_grad():
        for batch in batches:
            labels = batch.pop("labels")
            logits = model(**batch).logits[labels >= 0]
            right += int((logits.argmax(-1) == labels[labels >= 0]).sum())
            losses += float(torch.nn.functional.cross_entropy(logits, labels[labels >= 0], reduction="sum"))
    assert losses / 11 == pytest.approx(found[-1]["loss"], rel=1e-5)
    assert right / 11 == pytest.approx(found[-1]["accuracy"])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_every_export_loads_with_the_weights_of_the_run(case, config, root, tmp_path, capsys):
    if not (root / CASES[case][1]).exists():
        save_model(root / CASES[case][1], CASES[case][1])
    folder, _ = finished(config(case))
    out = tmp_path / "out"
    assert weft_run(["export", str(folder.path), str(out)]) == 0
    task = find_task(folder.config())
    task.open(folder)
    kind = getattr(transformers, f"AutoModelFor{task.head}" if task.head else "AutoModel")
    model, message = kind.from_pretrained(out, output_loading_info=True)
    assert not message["missing_keys"]
    assert not message["unexpected_keys"]
    last = [event for event in read_events(folder.events) if event["event"] == "eval"][-1]
    total = count = 0.0
    with torch.no_grad():
        batches = list(task.eval_batches(Share(8)))
        for batch in batches:
            loss, number = task.loss(task.forward(model.eval(), batch), batch)
            total, count = total + float(loss), count + int(number)
    assert total / count == pytest.approx(last["loss"], rel=1e-4)


@pytest.mark.full
def test_run_resumes_under_another_plan(root, tmp_path, capfd):
    words = [*typed("embed", root), f"run.dir={tmp_path}", "train.steps=6", "schedule.kind=constant"]
    words.append("schedule.warmup_steps=1")  # the first part has the learning rates of the full run
    assert weft_run(["train", *words, "run.name=whole", "plan=dp_replicate=1", "launch.ranks=1"]) == 0
    assert weft_run(["train", *words, "run.name=parts", "train.steps=3", "launch.ranks=2", "plan=dp_replicate=2"]) == 0
    assert weft_run(["train", *words, "run.name=parts", "launch.ranks=2", "plan=dp_shard=2 zero=3 accumulation=2"]) == 0
    assert "resumed from step 3" in capfd.readouterr().out
    losses = [
        {
            event["step"]: event["loss"]
            for event in read_events(tmp_path / name / "events.jsonl")
            if event["event"] == "step"
        }
        for name in ("whole", "parts")
    ]
    assert losses[0].keys() == losses[1].keys() == set(range(1, 7))
    for step, loss in losses[0].items():
        assert losses[1][step] == pytest.approx(loss, rel=1e-4)


def test_verify_trains_the_folders_model_on_the_tasks_batches(root, tmp_path):
    file = tmp_path / "run.toml"
    lines = ["[model]", f'path = "{root / "llama"}"', "[data]", f'cache_dir = "{tmp_path}"', "[[data.train]]"]
    file.write_text("\n".join([*lines, f'path = "{root / "texts.jsonl"}"']))
    subject = find_subject(str(file), Settings(seq_len=16, global_batch=2)).prepared(tmp_path)
    case = subject.build()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "llama", dtype=torch.float64).state_dict()
    ours = case.model().state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    tokens = case.batch(0)["input_ids"]
    assert tokens.shape == (2, 16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "llama")
    words = tokenizer.decode(tokens[0]).split()
    assert set(words) <= set(tokenizer.get_vocab())
    assert len(set(words)) > 3


# --- rows and batches ---


def test_initial_head_depends_only_on_seed_and_name(config):
    task = find_task(config("classify"))
    source = task.initial_weights(task.shapes())
    assert source.new_names == [
        "bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight"
    ]  # fmt: skip
    weight = read_full(source, "bert.pooler.dense.weight")
    assert weight.std() == pytest.approx(0.02, rel=0.2)
    assert torch.equal(weight, read_full(source, "bert.pooler.dense.weight"))
    assert not read_full(source, "classifier.bias").any()
    other = find_task(config("classify", "seed=1"))
    assert not torch.equal(weight, read_full(other.initial_weights(other.shapes()), "bert.pooler.dense.weight"))


def test_masks_depend_on_seed_epoch_row_and_position(config):
    folder = prepare_run(config("masked"), world_size=1)
    task = find_task(folder.config())
    task.open(folder)
    rows, plain = task.samples("train"), task.tables.train
    mask_id = task.tables.found["mask_id"]
    chosen = masked = kept = total = 0
    for epoch in range(12):
        for index in range(len(rows)):
            row, ids = rows.in_epoch(epoch, index), plain[index]["input_ids"]
            is_chosen = row["labels"] != -100
            assert is_chosen.any()
            assert not is_chosen[plain[index]["is_text"] == 0].any()
            np.testing.assert_array_equal(row["labels"][is_chosen], ids[is_chosen])
            np.testing.assert_array_equal(row["input_ids"][~is_chosen], ids[~is_chosen])
            chosen, total = chosen + is_chosen.sum(), total + plain[index]["is_text"].sum()
            masked += (row["input_ids"][is_chosen] == mask_id).sum()
            kept += (row["input_ids"][is_chosen] == ids[is_chosen]).sum()
    assert 0.14 < chosen / total < 0.2  # short rows have at least one
    assert masked / chosen == pytest.approx(0.8, abs=0.04)
    assert kept / chosen == pytest.approx(0.1, abs=0.04)
    again = find_task(folder.config())
    again.open(folder)
    np.testing.assert_array_equal(rows.in_epoch(3, 5)["input_ids"], again.samples("train").in_epoch(3, 5)["input_ids"])
    assert any((rows.in_epoch(0, index)["labels"] != rows.in_epoch(1, index)["labels"]).any() for index in range(5))
    whole = task.batches(Share(8)).batches(7)[0]
    parts = [task.batches(Share(8, 2, rank, 2)).batches(7)[micro] for micro in range(2) for rank in range(2)]
    rows_of = [row[row != 0].tolist() for part in parts for row in part["input_ids"]]
    assert rows_of == [row[row != 0].tolist() for row in whole["input_ids"]]


def test_ids_and_labels_match_transformers(config, root):
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "bert")
    texts = [json.loads(line) for line in (root / "texts.jsonl").read_text().splitlines()]
    folder = prepare_run(config("classify", "task.options.pair=other"), world_size=1)
    task = find_task(folder.config())
    task.open(folder)
    for row, one in zip((task.tables.train[index] for index in range(len(texts))), texts, strict=True):
        wanted = tokenizer(one["text"], one["other"], truncation=True, max_length=24)
        assert row["input_ids"].tolist() == wanted["input_ids"]
        assert row["token_type_ids"].tolist() == wanted["token_type_ids"]
        assert ["bad", "good"][row["label"][0]] == one["label"]
    folder = prepare_run(config("tokens"), world_size=1)
    task = find_task(folder.config())
    task.open(folder)
    one = json.loads((root / "words.jsonl").read_text().splitlines()[3])
    row, names = task.tables.train[3], task.tables.found["labels"]
    wanted = tokenizer(one["tokens"], is_split_into_words=True, truncation=True, max_length=24)
    assert row["input_ids"].tolist() == wanted["input_ids"]
    seen = None
    for word, label in zip(wanted.word_ids(), row["labels"], strict=True):
        assert bool(label == -100) is (word is None or word == seen)
        if label != -100:
            assert names[label] == one["tags"][word]
        seen = word


def test_targets_are_shifted_and_padding_is_not_counted(config):
    folder = prepare_run(config("t5"), world_size=1)
    task = find_task(folder.config())
    task.open(folder)
    batch = task.batches(Share(8)).batches(0)[0]
    labels, read = batch["labels"], batch["decoder_input_ids"]
    assert (read[:, 0] == 0).all()
    counted = labels[:, 1:] != -100
    assert torch.equal(read[:, 1:][counted], labels[:, :-1][counted])
    assert (labels == -100).any()
    assert not (labels == 0).any()
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(task.config.model.path)
    theirs = model(**{name: value for name, value in batch.items() if name != "decoder_input_ids"}).loss
    loss, count = task.loss(task.forward(model, batch), batch)
    assert (loss / count).item() == pytest.approx(theirs.item(), rel=1e-5)


# --- scores ---


@given(
    pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3)), min_size=1, max_size=40),
    cut=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_scores_are_additive_over_parts(pairs, cut):
    predicted, true = (torch.tensor(each) for each in zip(*pairs, strict=True))
    sums = dict.fromkeys(classification.class_sum_names(4), 0.0)
    for part in (slice(None, cut), slice(cut, None)):
        for name, value in classification.class_sums(predicted[part], true[part], 4).items():
            sums[name] += float(value)
    counted = [(one, other) for one, other in pairs if other >= 0]
    if not counted:
        assert classification.accuracy(sums, 4) is None
        return
    assert classification.accuracy(sums, 4) == pytest.approx(sum(one == other for one, other in counted) / len(counted))
    each = []
    for label in {label for pair in counted for label in pair}:
        hit = sum(one == other == label for one, other in counted)
        each.append(2 * hit / sum((one == label) + (other == label) for one, other in counted))
    assert classification.macro_f1(sums, 4) == pytest.approx(sum(each) / len(each))


@given(values=st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=3, max_size=20))
@settings(max_examples=40, deadline=None)
def test_correlation_matches_pearson(values):
    x, y = (torch.tensor(each, dtype=torch.float64) for each in zip(*values, strict=True))
    found = classification.correlation(
        {name: float(value) for name, value in classification.pair_sums(x, y).items()}, len(values)
    )
    if x.std() < 1e-3 or y.std() < 1e-3:
        return
    assert found == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)


def test_labels_are_sorted_numerically_or_alphabetically():
    assert ordered_labels(["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert ordered_labels(["b", "a", "10"]) == ["10", "a", "b"]
    assert perplexity({"loss": 2.0, "count": 4.0}) == pytest.approx(math.exp(0.5))
    assert perplexity({"loss": 0.0, "count": 0.0}) is None


# --- errors ---


def table(tmp_path: Path, *rows: dict) -> str:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train={file}"


GOOD, BAD = {"text": "good film", "label": "good"}, {"text": "bad film", "label": "bad"}


def test_each_data_error_is_one_message_with_its_record(config, tmp_path):
    def error_of(case, *rows, more=()):
        return refused(WeftError, config(case, table(tmp_path, *rows), "data.eval=[]", *more))

    file = tmp_path / "own.jsonl"
    assert error_of("classify", GOOD, {"text": "a", "lable": "b"}) == (
        f"{file}, record 2: it has no column 'label'; it has 'lable', 'text'. Did you mean 'lable'? Give the column's "
        "name with task.options.label=NAME."
    )
    assert error_of("classify", GOOD, BAD, {"text": "  ", "label": "bad"}) == (
        f"{file}, record 3: column 'text' is empty. Leave the record out, or add a text."
    )
    assert error_of("classify", GOOD, BAD, {"text": 3, "label": "bad"}) == (
        f"{file}, record 3: column 'text' holds 3, and a text is needed."
    )
    assert error_of("classify", GOOD, BAD, more=["task.options.labels=good,fine"]) == (
        f"{file}, record 2: label 'bad' is not one of the known labels (good, fine). Correct it, or name all labels "
        "with task.options.labels=FIRST,SECOND."
    )
    assert error_of("classify", GOOD, {**BAD, "label": 0.37}) == (
        f"{file}, record 2: column 'label' holds the number 0.37, and a class is a name or a whole number. To train "
        "on numbers, use task.name=classify_text with task.options.regression=true."
    )
    assert error_of("classify", GOOD, GOOD) == (
        "task.options.labels=: there are 1 classes (good), and a classifier needs 2 to 10000 that differ. Name all "
        "of them."
    )
    assert error_of("classify", GOOD, BAD, more=["task.options.regression=true"]) == (
        f"{file}, record 1: column 'label' holds 'good', and a number is needed. Leave the record out."
    )
    assert error_of("tokens", {"tokens": ["a", "b"], "tags": ["x"]}, {"tokens": ["a"], "tags": ["y"]}) == (
        f"{file}, record 1: it has 2 words in 'tokens' and 1 labels in 'tags'. Give each word a label."
    )
    assert error_of("tokens", {"tokens": [], "tags": ["x"]}, {"tokens": ["a"], "tags": ["y"]}) == (
        f"{file}, record 1: column 'tokens' has no list of words or labels, or an empty one. Leave the record out."
    )
    assert error_of("classify", GOOD, BAD, more=["data.train.0.weight=2"]).startswith(
        "data.train.0.weight=2.0: this task reads columns that task.options name, of all records once an epoch. Leave"
    )


def test_rows_keep_the_unit_of_privacy(config, tmp_path):
    """Records of one user have one number, and a record without a user is refused."""
    words = ["privacy.noise=1.0", "privacy.delta=1e-3", "privacy.unit=user"]
    users = ["ann", "bob", "ann", 7, 7, "ann", "bob", "carl"]
    lines = [{"text": f"film {n}", "label": ("good", "bad")[n % 2], "user": user} for n, user in enumerate(users)]
    path = tmp_path / "users.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = prepare_run(config("classify", f"data.train={path}", "data.holdout=0.0", *words), world_size=1)
    task = find_task(folder.config())
    task.open(folder)
    records = private_records(folder.config(), task)
    assert sorted(unit.tolist() for unit in records.units) == [[0, 2, 5], [1, 6], [3, 4], [7]]
    assert set(records.collate([records.samples[0], records.samples[3]])) == {
        "input_ids", "attention_mask", "token_type_ids", "labels"
    }  # fmt: skip
    lines[5]["user"] = None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = prepare_run(config("classify", f"data.train={path}", "run.name=gap", *words), world_size=1)
    task = find_task(folder.config())
    task.open(folder)
    with pytest.raises(DataError, match=r"privacy.unit=user: record 5 has no single value in it. Its columns: "):
        private_records(folder.config(), task)


def test_class_names_in_parquet_metadata_are_used(config, tmp_path):
    names = {"names": ["bad", "good"], "_type": "ClassLabel"}
    texts = pa.table({"text": [f"text {n}" for n in range(8)], "label": [n % 2 for n in range(8)]})
    described = {"info": {"features": {"text": {"dtype": "string"}, "label": names}}}
    pq.write_table(texts.replace_schema_metadata({"huggingface": json.dumps(described)}), tmp_path / "a.parquet")
    folder = prepare_run(config("classify", f"data.train={tmp_path / 'a.parquet'}"), world_size=1)
    task = find_task(folder.config())
    task.open(folder)
    assert [task.tables.train[n]["label"][0] for n in range(4)] == [0, 1, 0, 1]
    assert task.tables.found["labels"] == ["bad", "good"]


def test_label_only_in_evaluation_data_is_rejected(config, tmp_path):
    own = tmp_path / "eval.jsonl"
    own.write_text(json.dumps({"text": "a", "label": "unheard"}) + "\n")
    message = refused(DataError, config("classify", f"data.eval={own}"))
    assert message.startswith(f"{own}, record 1: label 'unheard' is not one of the known labels (bad, good). ")


def test_unsupported_folders_and_plans_are_rejected(config, root, tmp_path):
    assert refused(ConfigError, config("classify", "train.seq_len=65")) == (
        "train.seq_len=65: the model reads at most 64 tokens. Use 64 or less."
    )
    assert refused(ConfigError, config("masked", f"model.path={root / 'llama'}", "task.options.share=2")).startswith(
        "task.options.share=2: a share above 0 and below 1 is masked."
    )
    assert "no masked language model for model_type=llama" in refused(
        WeftError, config("masked", f"model.path={root / 'llama'}")
    )
    assert refused(ConfigError, config("embed", "task.options.pooling=first")) == (
        "task.options.pooling=first: not one of mean, cls, last. Use mean."
    )
    assert "it is an encoder with a decoder" in refused(ConfigError, config("embed", f"model.path={root / 't5'}"))
    for plan, rule in (
        ("pp=2 microbatches=2", "pp=2: the loss compares all texts of the global batch, and a pipeline goes backward"),
        ("cp=2", "cp=2: context parallelism shards packed causal texts, and this task pads full texts. Use cp=1."),
    ):
        with pytest.raises(PlanError, match=rule):
            prepare_run(config("embed", f"plan={plan}"), world_size=2)
    with pytest.raises(PlanError, match="sp=on: the head reads one token of each text"):
        prepare_run(config("classify", "plan=tp=2 sp=on"), world_size=2)
    without = tmp_path / "without"
    save_model(without, "bert")
    for file in without.glob("tokenizer*"):
        file.unlink()
    assert "it has no tokenizer. Put tokenizer.json" in refused(DataError, config("classify", f"model.path={without}"))
    small = tmp_path / "small"
    save_model(small, "bert")
    assert save_tokenizer(small, "bert") > 0
    original = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**original, "num_hidden_layers": 3}))
    assert "the files lack 'bert.encoder.layer.2" in refused(WeftError, config("classify", f"model.path={small}"))


def test_run_does_not_resume_with_other_rows(config, tmp_path):
    rows = [GOOD, BAD] * 8
    prepare_run(config("classify", table(tmp_path, *rows)), world_size=1)
    message = refused(DataError, config("classify", table(tmp_path, *rows[:-1])))
    assert message.startswith("data: the rows are not those that the run in ")
    assert "run.name=classify-2 for a new run" in message
