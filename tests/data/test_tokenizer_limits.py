"""Untrusted tokenizers: backtracking, memory growth or a panic ends in one error line."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from weft.data.text.tokenizer import import_tokenizer
from weft.data.text.tokenizer_limits import bounded
from weft.errors import DataError


def hostile(kind: str) -> Library:
    library = Library(models.BPE({"a": 0, "b": 1, "</s>": 2}, [], unk_token="</s>"))
    if kind == "regex":
        library.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    elif kind == "alternatives":
        library.pre_tokenizer = pre_tokenizers.Split(Regex("^(?:(a|aa)+)+$"), "isolated")
    elif kind == "normalizer":
        library.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 10) for _ in range(9)])
    elif kind == "decoder":
        library.decoder = decoders.Sequence([decoders.Replace("a", "a" * 10) for _ in range(9)])
    library.add_special_tokens(["</s>"])
    return library


def save(folder: Path, kind: str) -> Path:
    folder.mkdir()
    hostile(kind).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", ["regex", "alternatives"])
def test_panic_of_the_library_is_a_data_error(tmp_path, kind, capfd):
    tokenizer = import_tokenizer(tmp_path / "t", str(save(tmp_path / "s", kind)))
    with pytest.raises(
        DataError, match=r"tokenizer: the tokenizers library failed \(.*retry-limit.*\)\. Check the norm"
    ):
        tokenizer.encode_batch(["a" * 40 + "b"])
    assert "panicked" not in capfd.readouterr().err
    assert tokenizer.encode("b") == [1], "other texts go on"


@pytest.mark.parametrize("kind", ["normalizer", "decoder"])
def test_chain_of_replacements_does_not_exhaust_memory(tmp_path, kind):
    """In a separate process: an abandoned call continues until the process ends."""
    code = (
        "import sys, resource\n"
        "from pathlib import Path\n"
        "from weft.data.text.tokenizer import import_tokenizer\n"
        "from weft.errors import DataError\n"
        "try:\n"
        f"    t = import_tokenizer(Path(sys.argv[1]), {str(save(tmp_path / 's', kind))!r})\n"
        f"    {'t.encode_batch([chr(97)])' if kind == 'normalizer' else 't.decode([0])'}\n"
        "except DataError as error:\n"
        "    print('refused', error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "t")], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    refused, peak_mib = found.stdout.splitlines()
    assert refused.startswith("refused tokenizer: it took more than")
    assert int(peak_mib) < 3000


def test_stderr_of_other_threads_is_preserved(capfd):
    def work():
        print("a line of another thread", file=sys.stderr, flush=True)
        return 3

    assert bounded(work, 1) == 3
    assert "a line of another thread" in capfd.readouterr().err
    with pytest.raises(KeyError):
        bounded(lambda: {}["x"], 1)


def test_time_limit_does_not_count_waiting(monkeypatch):
    """The limit is on CPU time."""
    monkeypatch.setattr("weft.data.text.tokenizer_limits._BASE_S", 0.2)
    waited = threading.Event()
    assert bounded(lambda: waited.wait(0.5) or 1, 0) == 1

    def spin():
        end = time.process_time() + 5
        while time.process_time() < end and not waited.is_set():
            time.sleep(0)

    with pytest.raises(DataError, match=r"it took more than 0 s for 0 characters"):
        bounded(spin, 0)
    waited.set()
