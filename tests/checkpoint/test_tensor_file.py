from __future__ import annotations

import hashlib
import os
import time

from weft.checkpoint.safetensors_files import DigestingFile, sha256_of


class SlowDigest:
    """SHA-256 that is slower than writing the file."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        time.sleep(0.02)
        self._digest.update(data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def test_digest_waits_for_every_byte_in_order(tmp_path):
    chunks = [os.urandom(size) for size in (9_000_000, 10, 4_194_304, 0, 1, 5_000_000)]
    with DigestingFile(tmp_path / "file") as file:
        file._digest = SlowDigest()  # type: ignore[assignment]
        for piece in chunks:
            file.write(memoryview(piece))
        entry = file.close()
    whole = b"".join(chunks)
    assert (tmp_path / "file").read_bytes() == whole
    assert entry.num_bytes == len(whole)
    assert entry.sha256 == hashlib.sha256(whole).hexdigest() == sha256_of(tmp_path / "file")
