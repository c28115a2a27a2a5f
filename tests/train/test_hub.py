"""Names on the Hugging Face hub, on a server of this machine that speaks its protocol."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hub_server import TOKEN, Hub, hub_server
from tests.tools.warm_python import FORKS
from weft import env
from weft.cli.app import run as weft_command
from weft.cli.train import _checked_message
from weft.config.files import format_config, load_config
from weft.data.text.source import find_files
from weft.data.text.tokenizer import Tokenizer, find_tokenizer_file, save_bytes_tokenizer
from weft.errors import CommError, ConfigError, ModelError
from weft.hub import HubName, download, local_data, local_folder, model_name, parse, resolve
from weft.models.inspect import hugging_face
from weft.train.folder import run_folder
from weft.train.states.hub_names import download_all, resolved_config
from weft.train.tasks.registry import find_task

transformers = pytest.importorskip("transformers")
constants = pytest.importorskip("huggingface_hub.constants")

QWEN = b'{"model_type": "qwen3"}'
KEY = "data.train.0.path"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "weft"))
    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_URL_HOSTS", frozenset({"127.0.0.1"}))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def go_offline(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def message(call, *words) -> str:
    with pytest.raises((ConfigError, ModelError)) as caught:
        call(*words)
    text = str(caught.value)
    assert not [secret for secret in ("\n", TOKEN, "http") if secret in text], text
    return text


def model(text: str) -> HubName:
    name = model_name(text)
    assert name is not None
    return resolve(name)


def data(text: str) -> HubName:
    return resolve(parse(text, "dataset", KEY))


def test_a_path_that_exists_is_a_path_and_a_spelling_that_may_be_both_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Q").mkdir(parents=True)
    for path in ("", "Qwen/Q", "Qwen", "./Qwen/None", "../a/b", "/a/b", "~/a", "a/b/c", "..", "model.safetensors/x"):
        assert model_name(path) is None, path
    for text, revision in (
        ("org/M-1.5", ""),
        ("org/M@main", ""),
        ("org/M@v2.1", "v2.1"),
        ("org/M@refs/pr/3", "refs/pr/3"),
    ):
        name = model_name(text)
        assert name is not None
        assert (name.repo, name.revision) == (text.partition("@")[0], revision)
        assert parse(name.format(), "model", "") == name
    assert model_name("hf://Qwen/Q").repo == "Qwen/Q"  # the folder of that name is not meant
    for text in ("Qwen/None", "Qwen/Q@v2"):
        assert message(model_name, text) == (
            f"model.path={text}: the folder Qwen exists without it, and it is also a name on the Hugging Face hub. "
            f"Type ./{text} for the folder, or hf://{text} for the hub."
        )


def test_names_of_data_sets():
    sha = "0123456789abcdef0123456789abcdef01234567"
    for text, wanted in {
        "hf://o/n": HubName(KEY, "", "dataset", "o/n"),
        "hf://datasets/squad": HubName(KEY, "", "dataset", "squad"),
        "hf://dataset/name?split=train": HubName(KEY, "", "dataset", "dataset/name", split="train"),
        "hf://datasets/o/n?split=test&config=en&revision=v1": HubName(
            KEY, "", "dataset", "o/n", "v1", config="en", split="test"
        ),
        "hf://o/n@refs/convert/parquet/en/train/*.parquet": HubName(
            KEY, "", "dataset", "o/n", "refs/convert/parquet", path="en/train/*.parquet"
        ),
        "hf://o/n@a%2Fb/x y.csv": HubName(KEY, "", "dataset", "o/n", "a/b", path="x y.csv"),
        f"hf://o/n@{sha}": HubName(KEY, "", "dataset", "o/n", sha, sha),
        f"hf://o/n/data?commit={sha}": HubName(KEY, "", "dataset", "o/n", "", sha, "data"),
    }.items():
        found = parse(text, "dataset", KEY)
        assert found == wanted
        assert parse(found.format(), "dataset", KEY) == found
    assert parse("hf://o/n?columns=text:body,label:stars", "dataset", KEY).columns == {"text": "body", "label": "stars"}
    for text, rule in {
        "hf://dataset/o/n": "either the data set o/n, or n in the data set o of an owner named dataset",
        "hf://models/o/n": "this names one of the hub's models, and a data set is needed",
        "hf://o/n?spilt=train": "no 'spilt' after the question mark. Did you mean 'split'?",
        "hf://o/n?split=train[:10%25]": "is not the name of one split, and parts of a split are not read",
        "hf://o/n?split=a&split=b": "given twice",
        "hf://o/n?split=": "split has no value",
        "hf://o/n@v1?revision=v2": "the revision is given twice",
        "hf://o/n@../x": "is not",
        "hf://o/a--b": "is not a name on the hub",
        "hf:///n": "is not a name on the hub",
        "hf://o/n/x.csv?split=train": "Keep one of them",
        "hf://o/n?commit=abc": "40 hexadecimal digits",
        "hf://o/n/a**.csv": "** is only a part of a name",
        "hf://o/n?columns=text": "columns are pairs",
    }.items():
        assert rule in message(parse, text, "dataset", KEY), text


def test_a_model_is_downloaded_once_without_pickles_and_found_offline(hub: Hub, monkeypatch):
    weights = bytes(range(256)) * 999
    hub.large_from = 5000
    hub.cut.add("model.safetensors")  # the first download ends in the middle
    files = {"config.json": QWEN, "model.safetensors": weights, "tokenizer.json": b"{}", "chat_template.jinja": b"x"}
    repo = hub.model("org/M")
    repo.refusal = "private"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    commit = repo.commit(
        {**files, "pytorch_model.bin": b"p", "m.py": b"", "consolidated.safetensors": b"", "onnx/a.json": b""}
    )
    name = model("org/M")
    assert name.format() == f"hf://org/M?commit={commit}"
    with ThreadPoolExecutor(3) as pool:
        folders = {*pool.map(download, [name] * 3)}
    assert len(folders) == 1
    folder = folders.pop()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {**files, ".gitattributes": b""}
    assert sum(path.endswith("/tokenizer.json") for kind, path in hub.requests if kind == "GET") == 1
    assert len(hub.large_headers) == 2  # the second one continued
    assert not any("Authorization" in headers for headers in hub.large_headers)  # another host gets no token
    assert not any(TOKEN in file.read_bytes().decode("latin1") for file in Path.cwd().rglob("*") if file.is_file())
    hub.requests.clear()
    assert download(name, weights=False) == download(name) == folder == local_folder(name.format())
    repo.commit({**files, "tokenizer.json": b"{2}"})
    go_offline(monkeypatch)
    assert download(model("org/M")) == folder
    assert message(model, "org/M@v2") == (
        "model.path=org/M@v2: there is no such folder, HF_HUB_OFFLINE is set, and the cache does not have all files of "
        "org/M at revision v2. Run the command once without HF_HUB_OFFLINE."
    )
    (folder / "tokenizer.json").unlink()
    assert "the cache does not have all files of org/M." in message(download, name)
    assert not hub.requests


def test_refusals_are_one_sentence_without_the_servers_text(hub: Hub, monkeypatch):
    hub.model("org/gated").commit({"config.json": QWEN, "model.safetensors": b"w"})
    hub.model("org/gated").refusal = "GatedRepo"
    hub.model("org/private").refusal = "private"
    hub.model("org/bin").commit({"config.json": QWEN, "pytorch_model.bin": b"w"})
    hub.model("org/code").commit({"config.json": b'{"model_type": "new", "auto_map": {}}', "model.safetensors": b"w"})
    hub.model("org/gguf").commit({"m.gguf": b"w"})
    hub.model("org/ok").commit({"config.json": QWEN, "model.safetensors": b"w"})
    for number, bad in enumerate(("../x.json", "/etc/x.json", "a\\..\\x.json", "a/../../x.json", "a\n.json")):
        repo = hub.model(f"org/bad{number}")
        repo.commit({"config.json": QWEN, "model.safetensors": b"w"})
        repo.listed = {bad: 2}
        assert "whose name leaves its folder" in message(lambda text: download(model(text)), f"org/bad{number}")
    hub.model("org/sha").revisions["main"] = "../../../x"
    hub.model("org/sha").commits["../../../x"] = {}
    for text, rule in {
        "org/none": "there is no such folder, and the hub has no model org/none, or it is private",
        "hf://org/private": "hf://org/private: the hub has no model org/private, or it is private and your account",
        "org/gated": "only to accounts that accepted its terms. Accept them on its page, and type hf auth login",
        "org/ok@v9": "org/ok has no revision v9. Use a branch, tag or commit of it.",
        "org/bin": "no safetensors weights, and other formats may run code",
        "org/code": "its model_type=new needs code of the folder (trust_remote_code), which Weft does not run",
        "org/gguf": "no config.json",
        "org/sha": "the server's answer is not one of a Hugging Face hub",
    }.items():
        assert rule in message(lambda text: download(model(text)), text), text
    monkeypatch.setenv("HF_TOKEN", TOKEN + "x")
    assert "the hub has no model org/private" in message(model, "org/private")
    assert not any("pytorch_model" in path for _, path in hub.requests if "resolve" in path)
    truncated = model("org/ok")
    (download(truncated) / "model.safetensors").resolve().write_bytes(b"")
    assert "model.safetensors has 0 bytes, and 1 on the hub" in message(download, truncated)
    hub.status = 503
    assert "the hub answered with status 503." in message(model, "org/other")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    text = message(model, "org/ok")  # not the commit in the cache, because it may be an old one
    assert "the download from the hub failed (ConnectError)" in text
    assert "HF_HUB_OFFLINE=1" in text


def test_a_folder_that_needs_its_code_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "new", "auto_map": {"AutoConfig": "c.C"}}')
    assert message(hugging_face.load_model_config, tmp_path) == (
        f"model={tmp_path}: its model_type=new needs code of the folder (trust_remote_code), which Weft does not run. "
        "Use a model of a family that transformers has."
    )


@pytest.mark.parametrize(
    "config",
    [{"model_type": "qwen3"}, {"model_type": "detr", "backbone": "org/ok", "use_timm_backbone": False}],
    ids=["plain", "backbone of the hub"],
)
def test_models_are_built_offline_and_the_process_stays_online(hub: Hub, tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(ModelError), torch.device("meta"):
        hugging_face.headed_model(hugging_face.load_model_config(tmp_path), "", "model")
    assert hub.requests == []
    assert not env.hub_is_offline()
    assert not constants.HF_HUB_OFFLINE


def test_files_of_a_split(hub: Hub):
    row = b'{"text": "a"}\n'
    hub.dataset("o/shards").commit(
        {f"data/{one}-0000{n}-of-00002.jsonl": row for one in ("train", "extra") for n in (0, 1)}
    )
    hub.dataset("o/folders").commit(
        {"train/a.jsonl": row, "train/test_b.jsonl": row, "dev/c.jsonl": row, "readme.md": row}
    )
    hub.dataset("o/names").commit(
        {"my-train.csv": row, "my_valid.csv": row, "test.csv": row, "dataset_infos.json": b"{}"}
    )
    hub.dataset("o/one").commit({"any.jsonl": row, ".hidden.jsonl": row})
    card = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: ["en/*.jsonl", "more/**/x.jsonl"]
  - {split: odd, path: en/deep/z.jsonl}
- config_name: de
  default: true
  data_files: "de/**"
- config_name: fr
  data_dir: fr
---
"""
    files = (
        "en/b.jsonl",
        "en/a.jsonl",
        "en/deep/z.jsonl",
        "more/1/x.jsonl",
        "de/d/1.jsonl",
        "fr/train/1.jsonl",
        "fr/test/2.jsonl",
    )
    hub.dataset("o/card").commit({"README.md": card.encode(), **dict.fromkeys(files, row)})
    tar = b"---\nconfigs:\n- {config_name: a, data_files: data/*}\n---\n"
    hub.dataset("o/tar").commit({"README.md": tar, "data/a.tar": b"", "other.csv": row})
    hub.dataset("o/yaml").commit({"README.md": b"---\n{: [\n---\n", "other.csv": row})
    hub.dataset("o/code").commit({"code.py": b"", "README.md": b""})
    hub.dataset("o/code").commit({"a/train/0.parquet": b"", "b/train/0.parquet": b""}, "refs/convert/parquet")
    for text, wanted in {
        "o/shards": ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"],
        "o/shards?split=extra": ["data/extra-00000-of-00002.jsonl", "data/extra-00001-of-00002.jsonl"],
        "o/folders": ["train/a.jsonl", "train/test_b.jsonl"],
        "o/folders?split=validation": ["dev/c.jsonl"],
        "o/names": ["my-train.csv"],
        "o/names?split=validation": ["my_valid.csv"],
        "o/one": ["any.jsonl"],
        "o/card": ["de/d/1.jsonl"],
        "o/card?config=en": ["en/a.jsonl", "en/b.jsonl", "more/1/x.jsonl"],
        "o/card?config=en&split=odd": ["en/deep/z.jsonl"],
        "o/card?config=fr&split=test": ["fr/test/2.jsonl"],
        "o/code?revision=refs/convert/parquet&config=b": ["b/train/0.parquet"],
        "o/card/en": ["en/a.jsonl", "en/b.jsonl", "en/deep/z.jsonl"],
        "o/card@main/*/*.jsonl": ["en/a.jsonl", "en/b.jsonl"],
    }.items():
        name = data(f"hf://{text}")
        folder = download(name)
        assert [str(file.relative_to(folder)) for file in local_data(name.format(), KEY)[1]] == wanted, text
    for text, rule in {
        "o/names?split=dev": "it has no split dev. Use split=train or split=validation or split=test.",
        "o/card?config=it": "it has no config it. Use config=en or config=de or config=fr.",
        "o/one?config=x": "it has no config x",
        "o/code": "only code.py, which is code, and Weft runs no code of a data set",
        "o/code?revision=refs/convert/parquet": "it has several configs. Use config=a or config=b.",
        "o/one/none.csv": "o/one has no file none.csv.",
        "o/none": "the hub has no data set o/none",
        "o/tar": "its README.md lists no file of the formats",
        "o/yaml": "the header of its README.md cannot be read",
    }.items():
        assert rule in message(lambda text: download(data(text)), f"hf://{text}"), text
    several = resolve(parse("hf://o/names", "dataset", "data.eval.0.path"))
    assert "it has several splits. Use split=train or" in message(download, several)
    # Only the files of the split are downloaded.
    assert not any(path.endswith("test.csv") for kind, path in hub.requests if kind == "GET")
    assert "it has not been downloaded" in message(find_files, "hf://o/one", "data.train.0")


def test_a_run_keeps_the_commit_of_its_first_command(hub: Hub, monkeypatch):
    files = {"config.json": QWEN, "model.safetensors": b"w"}
    first = hub.model("org/M").commit(files, "main", "v1")
    hub.dataset("o/n").commit({"a.jsonl": b"{}"})
    asked = load_config(
        None, ["model.path=org/M", "data.train=hf://o/n?columns=text:body", "data.eval=hf://o/n"]
    ).config
    config = resolved_config(asked, run_folder(asked))
    assert config.model.path == f"hf://org/M?commit={first}"
    assert config.data.train[0].columns == {"text": "body"}
    assert "commit" in config.data.eval[0].path
    lines: list[str] = []
    download_all(config, weights=False, data=False)
    fetched = [path.rpartition("/")[2] for kind, path in hub.requests if kind == "GET" and "/resolve/" in path]
    assert fetched == ["config.json"]
    download_all(config, lines.append)
    assert [line.split(" of the hub")[0].rpartition(" ")[0] for line in lines] == [
        "model.path: org/M at commit", "data.train.0.path: o/n at commit", "data.eval.0.path: o/n at commit"
    ]  # fmt: skip
    folder = run_folder(asked).path
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(format_config(config))
    second = hub.model("org/M").commit({**files, "tokenizer.json": b"{}"}, "main", "v2")

    def path_of(*words: str) -> str:
        config = load_config(None, list(words)).config
        return resolved_config(config, run_folder(config)).model.path

    assert path_of("model.path=org/M") == config.model.path  # main has moved, and the run continues with its commit
    assert path_of("model.path=org/M@v1") == config.model.path
    assert path_of(f"model.path=org/M@{first}") == f"hf://org/M@{first}?commit={first}"
    assert path_of("model.path=org/M@v2") == f"hf://org/M@v2?commit={second}"
    assert path_of("model.path=org/M", "run.name=other") == f"hf://org/M?commit={second}"
    for columns, rule in (
        ("txt:body", "no part 'txt'. Did you mean 'text'?"),
        ("text:a", "also set by data.train.0.columns"),
    ):
        words = [f"data.train=hf://o/n?columns={columns}", "data.train.0.columns.text=b"]
        assert rule in message(resolved_config, load_config(None, words).config)
    assert "replicas on several machines need the same commit. Use @COMMIT" in message(
        path_of, "model.path=org/M", "run.name=third", "launch.replicas_apart=true", "launch.replica=1",
        "launch.meet_at=127.0.0.1:1", "plan=dp_replicate=2 sync=diloco:4",
    )  # fmt: skip
    # Rank 0 may add a commit to the hub name of another rank's command, and nothing else.
    own = load_config(None, ["model.path=org/M"]).config
    for text, same in (
        (config.model.path, True), (f"hf://org/M@v1?commit={first}", True), ("hf://org/N", False), ("org", False)
    ):  # fmt: skip
        settled = own.model_copy(update={"model": own.model.model_copy(update={"path": text})})
        said = {"path": str(run_folder(own).path), "texts": {"config.toml": format_config(settled)}}
        if same:
            assert _checked_message(json.dumps(said).encode(), own)["config"].model.path == text
        else:
            with pytest.raises(CommError, match="another model"):
                _checked_message(json.dumps(said).encode(), own)


def tiny_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a random Llama with a tokenizer of bytes."""
    torch.manual_seed(0)
    shape = {"vocab_size": 264, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(folder / "tiny")
    save_bytes_tokenizer(folder / "bytes")
    files = {file.name: file.read_bytes() for file in (folder / "tiny").iterdir()}
    return {**files, "tokenizer.json": Tokenizer.load(folder / "bytes").library_json().encode()}


def test_tokenizers_are_names_too(hub: Hub, tmp_path):
    files = tiny_files(tmp_path)
    tokens = {"tokenizer.json": files["tokenizer.json"]}
    first = hub.model("org/tokens").commit(tokens)
    hub.model("org/tokens").commit({**tokens, "model.safetensors": b"not read"}, "v2")
    hub.model("org/none").commit({"config.json": QWEN})

    def config_of(path: str):
        return resolved_config(load_config(None, ["tokenizer.kind=file", f"tokenizer.path={path}"]).config)

    config, newer = config_of("org/tokens"), config_of("org/tokens@v2")
    assert config.tokenizer.path == f"hf://org/tokens?commit={first}"
    download_all(config)
    assert find_tokenizer_file(config.tokenizer.path).read_bytes() == files["tokenizer.json"]
    download_all(newer)
    assert not (local_folder(newer.tokenizer.path) / "model.safetensors").exists()
    assert "the repository has no tokenizer.json." in message(download_all, config_of("org/none"))
    assert config_of("org/tokens/tokenizer.json").tokenizer.path == "org/tokens/tokenizer.json"  # a file


def test_teachers_are_names_too(hub: Hub, tmp_path):
    commit = hub.model("org/tiny").commit(tiny_files(tmp_path))
    words = ["task.name=distill", "model.path=org/tiny", "task.options.teacher=org/tiny"]
    typed = load_config(None, words).config
    config = resolved_config(typed, run_folder(typed))
    assert config.task.options == {"teacher": f"hf://org/tiny?commit={commit}"}
    download_all(config)
    task: Any = find_task(config)
    assert task._teacher.folder == local_folder(config.model.path)
    # Another task may have an option of that name with another meaning.
    other = load_config(None, ["task.name=file.py:Own", "task.options.teacher=org/tiny"]).config
    assert resolved_config(other) == other
    # Rank 0 may add commits to names, and nothing else.
    said = {"path": str(run_folder(typed).path), "texts": {"config.toml": format_config(config)}}
    assert _checked_message(json.dumps(said).encode(), typed)["config"].task == config.task
    changed = config.task.model_copy(update={"options": {"teacher": f"hf://org/other?commit={commit}"}})
    said["texts"] = {"config.toml": format_config(config.model_copy(update={"task": changed}))}
    with pytest.raises(CommError, match="another task"):
        _checked_message(json.dumps(said).encode(), typed)


@pytest.mark.full
def test_verify_takes_names(hub: Hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", constants.HF_HUB_CACHE)  # for the ranks
    hub.model("org/tiny").commit(tiny_files(tmp_path))
    assert weft_command(["verify", "--model", "hf://org/tiny", "--plan", "dp_replicate=1", "--steps", "1"]) == 0
    (tmp_path / "run.toml").write_text('plan = "dp_replicate=1"\nmodel = {path = "org/tiny"}\n')
    assert weft_command(["verify", "--model", str(tmp_path / "run.toml"), "--steps", "1"]) == 0


def test_commands_take_names(hub: Hub, tmp_path, monkeypatch, capfd):
    """The same names offline give the same output, without a request."""
    repo, run = hub.model("org/tiny"), weft_command
    first = repo.commit(tiny_files(tmp_path), "main", "v1")
    lines = [
        ["layout", "hf://org/tiny@v1"],
        ["plan", "org/tiny", "8xh100", "--seq-len", "32"],
        ["plan", "hf://org/tiny", "8xh100", "--seq-len", "32"],
        ["layout", "org/tiny@v1"],
        ["generate", "org/tiny", "--prompt", "a", "--max-tokens", "2", "--temperature", "0"],
    ]
    before: list[str] = []
    for line in lines:
        assert run(line) == 0, line
        before.append(capfd.readouterr().out)
    snapshot = local_folder(f"hf://org/tiny?commit={first}")
    assert (snapshot / "model.safetensors").exists()
    repo.commit({"config.json": QWEN}, "other")
    hub.requests.clear()
    go_offline(monkeypatch)
    assert before[1].count("\n") > 5
    for line, text in zip(lines[:1] + lines[3:5], before[:1] + before[3:5], strict=True):
        assert run(line) == 0, line
        assert capfd.readouterr().out == text
    assert not hub.requests
    assert run(["generate", "org/nothing"]) == 2
    assert "RUN=org/nothing: there is no such folder, HF_HUB_OFFLINE is set" in " ".join(capfd.readouterr().err.split())


def weft(home: Path, *words: str, by_torchrun: bool = False, **variables: str) -> tuple[int, str]:
    environment = env.child_env(
        HF_HOME=str(home / "hf"), WEFT_HOME=str(home / "weft"), OMP_NUM_THREADS="1", **variables, **{FORKS: "1"}
    )
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if by_torchrun else []
    line = [sys.executable, *starter, "-m", "weft", "train", "launch.device=cpu", "launch.ranks=2", *words]
    ended = subprocess.run(line, env=environment, cwd=home, capture_output=True, text=True, timeout=300)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_private_model_and_data_set_train_and_resume_offline(hub: Hub, tmp_path, monkeypatch):
    files = tiny_files(tmp_path)
    repo, rows = hub.model("org/tiny"), hub.dataset("o/n")
    first = repo.commit(files)
    rows.commit({"train/a.jsonl": b"".join(b'{"body": "warp and weft %d"}\n' % n for n in range(40))})
    repo.refusal = rows.refusal = "private"
    command = ["model.path=org/tiny", "data.train=hf://o/n?columns=text:body", "train.seq_len=32", "eval.every=0",
               "train.global_batch=4", "checkpoint.every=1", "sample.prompt=", "plan=dp_shard=2 zero=3",
               "schedule.warmup_steps=1", "data.check=off", "run.name=r"]  # fmt: skip
    code, text = weft(tmp_path, *command, "train.steps=1", HF_ENDPOINT=hub.url)
    assert (code, "model.path=org/tiny: there is no such folder, and the hub has no model" in text) == (2, True), text
    assert "Traceback" not in text
    code, text = weft(tmp_path, *command, "train.steps=1", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert code == 0, text
    assert TOKEN not in text
    assert f'path = "hf://org/tiny?commit={first}"' in (tmp_path / "runs/r/config.toml").read_text()
    assert not any(TOKEN.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    repo.commit({**files, "extra.json": b"{}"}, "main", "v2")
    hub.requests.clear()
    offline = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1"}
    code, text = weft(tmp_path, *command, "train.steps=2", by_torchrun=True, **offline)
    assert (code, hub.requests) == (0, []), text
    assert "step 2" in text
    code, text = weft(
        tmp_path, *command, "model.path=org/tiny@v2", "train.steps=3", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN
    )
    assert code == 2, text
    assert f"was started with hf://org/tiny?commit={first}, and cannot continue with another value" in " ".join(
        text.split()
    )


@pytest.mark.full
def test_a_stream_downloads_files_when_they_are_read(hub: Hub, tmp_path):
    """Compare with the same files in a folder, and resume under another plan."""
    hub.model("org/tiny").commit(tiny_files(tmp_path))
    files = {
        f"data/train-{part:05d}-of-00008.jsonl": b"".join(
            b'{"text": "thread %d of %d"}\n' % (n, part) for n in range(9)
        )
        for part in range(8)
    }
    hub.dataset("o/n").commit(files)
    for name, content in files.items():
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).write_bytes(content)
    common = ["model.path=org/tiny", "train.seq_len=32", "eval.every=0", "train.global_batch=2", "checkpoint.every=1",
              "sample.prompt=", "schedule.warmup_steps=1", "data.check=off", "data.stream=true",
              "schedule.kind=constant"]  # fmt: skip
    for run, path in (("remote", "hf://o/n"), ("local", f"{tmp_path}/local/data")):
        plans = [(2, "dp_shard=2 zero=2"), (4, "dp_replicate=2")] if run == "remote" else [(4, "dp_replicate=2")]
        for steps, plan in plans:
            code, text = weft(
                tmp_path, *common, f"data.train={path}", f"run.name={run}", f"train.steps={steps}", f"plan={plan}",
                HF_ENDPOINT=hub.url,
            )  # fmt: skip
            assert code == 0, text
            read = {part for part in files if any(part in path for _, path in hub.requests)}
            assert run == "local" or 0 < len(read) < len(files)
    losses = []
    for run in ("remote", "local"):
        events = map(json.loads, (tmp_path / "runs" / run / "events.jsonl").read_text().splitlines())
        losses.append({event["step"]: event["loss"] for event in events if event["event"] == "step"})
    assert losses[0].keys() == losses[1].keys() == {1, 2, 3, 4}
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
