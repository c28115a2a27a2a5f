"""`weft export RUN --table PATH`: a table of any styles and ranks as npy or parquet."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.parallel.table_cases import WIDTH, Script, TableCase
from weft.cli import export
from weft.cli.app import run

MIXED = "user=host item=columns genre=replicate seen=one tags=rows"


def save(folder: str) -> dict[str, np.ndarray]:
    script = Script(TableCase(MIXED, "dp_replicate=2"))
    script.train(0, 2)
    script.run.save(folder, step=2, model=script.model, optimizer=script.step)
    return {name: tensor.numpy() for name, tensor in script.weights().items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, ranks2):
    folder = tmp_path_factory.mktemp("run")
    return folder, ranks2.run(save, str(folder))[0]


@pytest.mark.parametrize("table", ["user", "item", "genre", "seen", "tags"])
def test_file_has_all_rows(table, saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export, "_ROWS_BYTES", 3 * WIDTH * 8)  # several reads
    folder, weights = saved
    want = weights[f"{table}.weight"]
    for file in (tmp_path / "out.npy", tmp_path / "out.parquet"):
        assert run(["export", str(folder), str(file), "--table", table]) == 0
        assert f"is in {file}: {len(want)} rows of {WIDTH}." in capsys.readouterr().err
    assert np.array_equal(np.load(tmp_path / "out.npy", allow_pickle=False), want)
    found = pq.read_table(tmp_path / "out.parquet")
    assert found["id"].to_pylist() == list(range(len(want)))
    assert np.array_equal(np.array(found["row"].to_pylist()), want)


def test_default_name_and_dtype(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, weights = saved
    assert run(["export", str(folder), "--table", "item", "--dtype", "fp16"]) == 0
    found = np.array(pq.read_table("item.parquet")["row"].to_pylist())
    assert np.array_equal(found, weights["item.weight"].astype(np.float32).astype(np.float16))


@pytest.mark.parametrize(
    "words, message",
    [
        (["out.npy", "--table", "usr"],
         "--table usr: the checkpoint has no matrix usr.weight. Did you mean 'user'?"),
        (["out.csv", "--table", "user"],
         "OUT=out.csv: a table is written as .npy or .parquet. Write user.parquet."),
        (["there.npy", "--table", "user"],
         "OUT=there.npy: the file exists, and Weft does not overwrite it. Give another name."),
        (["out.npy", "--table", "user", "--merge"],
         "--merge: it sets something else to write than --table. Use one of them."),
    ],
)  # fmt: skip
def test_unusable_words_are_refused(words, message, saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.npy").write_bytes(b"")
    assert run(["export", str(saved[0]), *words]) == 2
    assert message in capsys.readouterr().err
