"""Data that is tokenised while it is trained on: one file of a source after the other, each before its first sequence.

The order is a function of the sample index, as for prepared data. The files are divided into parts, and each part gives
the same number of consecutive sequences of every global batch, so a rank tokenises only the files of its parts. A part
reads its files in a permuted order, and the sequences of a file in a permuted order. Then it starts again with others.
"""

from __future__ import annotations

import shutil
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from weft import hub
from weft.config.run_config import RunConfig
from weft.data.order.stream import Rows, Sample, SampleStream, count_parts, derive_key, permutation
from weft.data.store.prepared import CachedSource, PreparedData, RequestedSource, key_of, ready_source
from weft.data.text.schema import Schema
from weft.data.text.source import find_files
from weft.data.text.tokenize import ReadLimits, Report
from weft.data.text.tokenizer import Tokenizer
from weft.errors import DataError, WeftError
from weft.files import locked, replace_text

#: Open files of each part: the one in use and the one before it, which a slower rank may still need.
_OPEN_FILES = 2


class _Exiting(Exception):
    """Raised in the thread that tokenises the next file, if the process ends."""


class StreamedFiles:
    """The files of a streamed source: tokenised one at a time in the cache, and deleted after use.

    Args:
        data: prepared data, whose only training source is streamed.
        config: the run's config.
        cache: folder of tokenised data.

    Raises:
        DataError: from all methods, if a file cannot be tokenised, or has changed since the run started.
    """

    def __init__(self, data: PreparedData, config: RunConfig, cache: Path):
        (self.source,) = data.train
        streamed, section = self.source.streamed, config.data
        assert streamed is not None
        self._config, self._files, self._tokenizer = config, streamed["files"], data.tokenizer_dir
        self.schema = Schema(**streamed["schema"])
        self._limits = ReadLimits(streamed["holdout"], section.max_record_bytes, section.max_bad_fraction)
        self._seq_len = config.train.seq_len
        settings = [streamed["schema"], streamed["holdout"], section.max_record_bytes, section.reasoning]
        self._cache = cache / "streamed" / key_of(settings, data.tokenizer.digest, self.source.packing, self._seq_len)
        self._is_on_hub = hub.is_hub_text(section.train[0].path)

    def __len__(self) -> int:
        return len(self._files)

    def names(self, numbers: range) -> list[str]:
        """Return the paths of files by their numbers."""
        return [self._files[number][0] for number in numbers]

    def tokenised(self, number: int) -> tuple[SampleStream, Path]:
        """Return the sequences of a file and the folder of its tokens, which `delete` removes."""
        while True:
            stored = self._ready(number)
            counts, folder, seed = stored.manifest.splits["train"], stored.folder, self._config.seed
            sources = [replace(self.source, folder=folder / "train", counts=counts)] if counts.num_documents else []
            with locked(self._lock(folder)):
                if folder.is_dir():  # no other rank has deleted it since
                    stream = SampleStream(
                        sources, seed=derive_key("file", seed, number), seq_len=self._seq_len,
                        packing=self.source.packing, borders=self._config.data.borders, shuffle=bool(sources),
                    )  # fmt: skip
                    return stream, folder

    def count(self, number: int, compute: Callable[[], int]) -> int:
        """Return the number of sequences of a file from the cache, or compute and store it."""
        name, size = self._files[number]
        # The path of a file on the hub contains the commit, and the file may not be downloaded yet.
        changed_ns = Path(name).stat().st_mtime_ns if Path(name).exists() and not self._is_on_hub else 0
        known = self._cache / f"count-{key_of(name, size, changed_ns)}.txt"
        with suppress(OSError, ValueError):
            return int(known.read_text("utf-8"))
        found = compute()
        replace_text(known, f"{found}\n")
        return found

    def prefetch(self, number: int) -> None:
        """Begin to tokenise a file in a thread."""

        def stop_at_exit(*_: object) -> None:
            if not threading.main_thread().is_alive():
                raise _Exiting

        def work() -> None:
            with suppress(WeftError, OSError, _Exiting):  # errors are raised again when the file is needed
                self._ready(number, stop_at_exit)

        threading.Thread(target=work, name="weft-tokenise").start()

    def delete(self, folder: Path) -> None:
        """Delete the tokens of a file."""
        with locked(self._lock(folder)):
            shutil.rmtree(folder, ignore_errors=True)

    def changed(self, number: int) -> DataError:
        """Return the error for a file that has changed."""
        return DataError(
            f"data.train.0.path={self.source.name}: {self._files[number][0]} has changed since the run started, and "
            "the order of samples depends on it. Bring the old file back, or start a new run."
        )

    def _ready(self, number: int, report: Report | None = None) -> CachedSource:
        name, size = self._files[number]
        if self._is_on_hub:
            hub.fetch(self._config.data.train[0].path, "data.train.0.path", Path(name))
        files, data = find_files(name, "data.train.0"), self._config.data
        if files.size_bytes != size:
            raise self.changed(number)
        wanted = RequestedSource(data.train[0], files, self._limits, reasoning=data.reasoning)
        vars(wanted)["schema"] = self.schema  # of the first file
        tokenizer = Tokenizer.load(self._tokenizer)
        return ready_source(self._cache, wanted, tokenizer, self.source.packing, self._seq_len, report)

    def _lock(self, folder: Path) -> Path:
        return self._cache / "locks" / f"{folder.name}.lock"


class StreamedSequences(SampleStream):
    """An endless stream of the sequences of one source.

    Tokens of files that are no longer needed are deleted. Their numbers of sequences stay in the cache, and resuming
    tokenises only the files in use. Without these numbers it also tokenises the earlier files of the rank's parts.

    Args:
        data: prepared data, whose only training source is streamed.
        config: the run's config.
        cache: folder of tokenised data.

    Raises:
        DataError: from all methods, if a file cannot be tokenised, has changed since the run started, or all files of
            a part are empty.
    """

    def __init__(self, data: PreparedData, config: RunConfig, cache: Path):
        self._files = StreamedFiles(data, config, cache)
        self._seed, self._batch, self.seq_len = config.seed, config.train.global_batch, config.train.seq_len
        self.pad_id, self.is_weighted = self._files.source.pad_id, self._files.schema.has_mask
        self.num_sources = self.num_sequences = 0  # there is no epoch of all files
        self._num_parts = count_parts(len(self._files), self._batch)
        #: For each part, the end of each file that it has read, in sequences.
        self._ends: list[list[int]] = [[] for _ in range(self._num_parts)]
        self._open: OrderedDict[tuple[int, int], tuple[SampleStream, Path]] = OrderedDict()

    def fill(self, rows: Rows, row: int, index: int) -> tuple[int, bool]:
        """Write the sample of a global index into a row, as `SampleStream.fill` does."""
        stream, inside = self._find(index)
        return stream.fill(rows, row, inside)

    def sample(self, index: int) -> Sample:
        """Return a sample by its global index, from 0."""
        stream, inside = self._find(index)
        return stream.sample(inside)

    def state_at(self, index: int) -> dict[str, int]:
        """Return the number of samples before the global sample `index`, by the source's name."""
        return {f"0:{self._files.source.name}": index}

    def _find(self, index: int) -> tuple[SampleStream, int]:
        """Return the sequences of a file, and the index of a sample in them."""
        step, rest = divmod(index, self._batch)
        part, offset = divmod(rest, self._batch // self._num_parts)
        position, ends = step * (self._batch // self._num_parts) + offset, self._ends[part]
        files = range(part, len(self._files), self._num_parts)
        while not ends or ends[-1] <= position:
            turn, before = len(ends), ends[-1] if ends else 0
            number, _ = self._file_at(part, turn)
            count = self._files.count(number, lambda turn=turn: self._opened(part, turn).num_sequences)
            ends.append(before + count)
            if len(ends) % len(files) == 0 and ends[-1] == (ends[-len(files) - 1] if len(ends) > len(files) else 0):
                names = ", ".join(self._files.names(files[:4]))
                raise DataError(f"data.train.0.path={self._files.source.name}: {names} have no document to train on.")
        turn = bisect_right(ends, position)
        number, epoch = self._file_at(part, turn)
        stream, start = self._opened(part, turn), ends[turn - 1] if turn else 0
        if stream.num_sequences != ends[turn] - start:
            raise self._files.changed(number)
        return stream, epoch * stream.num_sequences + position - start

    def _file_at(self, part: int, turn: int) -> tuple[int, int]:
        """Return the number of the file that a part reads at a turn, and the epoch of the part."""
        files = range(part, len(self._files), self._num_parts)
        epoch, place = divmod(turn, len(files))
        return files[permutation(len(files), "files", self._seed, part, epoch)(place)], epoch

    def _opened(self, part: int, turn: int) -> SampleStream:
        """Return the sequences of a file. If it was not open, start to tokenise the part's next file in a thread."""
        number, _ = self._file_at(part, turn)
        if (part, number) not in self._open:
            self._open[part, number] = self._files.tokenised(number)
            for key in [key for key in self._open if key[0] == part][:-_OPEN_FILES]:
                self._files.delete(self._open.pop(key)[1])
            self._files.prefetch(self._file_at(part, turn + 1)[0])
        self._open.move_to_end((part, number))
        return self._open[part, number][0]
