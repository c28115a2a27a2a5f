"""What tasks on pictures and sound share: the samples of a run, found once, kept with it, and decoded ahead of use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from weft.data.media import (
    ClassFolder,
    DecodedAhead,
    MediaRecords,
    parse_source,
    usual_workers,
    with_classes,
)
from weft.env import rank_env
from weft.errors import CheckpointError, DataError
from weft.monitor.screen import SheetEntry
from weft.train.folder import RunFolder, free_name
from weft.train.task import Report, Task
from weft.units import format_count

Source = ClassFolder | MediaRecords


class MediaTask(Task):
    """Trains on media of a folder of classes or of records. A subclass says how they are found and what they become.

    data, eval: of the options, what the user named. holdout: share of the samples that is held out without `eval`.
    """

    sections = ("data.cache_dir", "data.workers")
    #: What the run folder keeps the samples in.
    media_file: ClassVar[str]

    data: str
    eval: str = ""
    holdout: float = 0.1

    _media: Mapping[str, Source] | None = None

    # --- what a task says ---

    def source(self, option: str, path: str, told: Callable[[int, int], None] | None) -> Source:
        """Find the samples of a path.

        Args:
            option: that names the path.
            path: as the user typed it.
            told: of (done, all).
        """
        raise NotImplementedError

    def made(self, source: Any, split: str) -> Any:
        """Return what is made of the samples of a split: something that processes can decode."""
        raise NotImplementedError

    def settle(self) -> None:
        """Take note of the samples, before anything asks for the model or a batch."""

    # --- the samples ---

    def check_share(self) -> None:
        """Check that `holdout` is a share.

        Raises:
            DataError: where it is not.
        """
        if not 0.0 < self.holdout < 1.0:
            raise DataError(
                f"holdout={self.holdout}: it is a share of the {self.sample_unit}. Use a number between 0 and 1."
            )

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Find the samples, or those that the run began with.

        Raises:
            CheckpointError: where the run trains on another path.
            DataError: for what is wrong with the data, and for other records than the run was started with.
        """
        kept = folder.path / self.media_file
        if not kept.exists():
            self._find(report)
            return
        self._take(_read(kept))
        train = self.media("train")
        if Path(self.data).absolute() != Path(train.root).absolute():
            raise CheckpointError(
                f"task.options.data={self.data}: this run trains on {train.root}. Use it, or another run.name."
            )
        if any(isinstance(self.media(split), MediaRecords) for split in ("train", "eval")):
            self._refuse_other(folder, report)

    def _refuse_other(self, folder: RunFolder, report: Report | None) -> None:
        """Look at records again, where the cache does not know them, and refuse others than the run began with."""
        begun = {split: self.media(split) for split in ("train", "eval")}
        self._find(report)
        for split, source in begun.items():
            now = self.media(split)
            if isinstance(source, MediaRecords) and not (isinstance(now, MediaRecords) and _same(source, now)):
                raise DataError(
                    f"task.options.data={source.root}: the records are not those that the run in {str(folder.path)!r} "
                    f"was started with. Use {free_name(folder)} for a new run, or bring the old data back to resume."
                )

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        return {self.media_file: "".join(f"{self.media(split).format()}\n" for split in ("train", "eval"))}

    def open(self, folder: RunFolder) -> None:
        self._take(_read(folder.path / self.media_file))

    def media(self, split: str, report: Report | None = None) -> Any:
        """Return the samples of "train" or "eval", which are found when they are first asked for."""
        if self._media is None:
            self._find(report)
        assert self._media is not None
        return self._media[split]

    def _find(self, report: Report | None) -> None:
        whole = self.source("data", self.data, _told(report, self.data))
        if self.eval:
            self._take({"train": whole, "eval": self._held(whole, report)})
            return
        self._take(dict(zip(("train", "eval"), whole.split(self.holdout), strict=True)))

    def _take(self, found: Mapping[str, Source]) -> None:
        self._media = found
        self.settle()

    def _held(self, whole: Source, report: Report | None) -> Source:
        held = self.source("eval", self.eval, _told(report, self.eval))
        if isinstance(held, MediaRecords):
            return with_classes(held, whole.classes, "task.options.eval")
        if held.classes != whole.classes:
            odd = sorted({*held.classes} ^ {*whole.classes})
            raise DataError(
                f"task.options.eval={self.eval}: class {odd[0]!r} is in one of the two folders only. Give both the "
                "same classes."
            )
        return held

    def samples(self, split: str) -> DecodedAhead:
        return DecodedAhead(self.made(self.media(split), split), self._workers())

    def samples_per_epoch(self) -> int:
        return len(self.media("train"))

    def _workers(self) -> int:
        place = rank_env()
        asked = self.config.data.workers
        return usual_workers(place.local_world_size if place is not None else 1) if asked is None else asked

    # --- what people see ---

    def shown(self, place: int, split: str = "train") -> tuple[int, int]:
        """Return (epoch, index) of the sample at a place of the order of training, or of an evaluation."""
        from weft.train.task import sample_place

        samples = self.media(split)
        return sample_place(len(samples), self.config.seed, place) if split == "train" else (0, place % len(samples))

    def described(self, index: int, split: str = "train") -> str:
        """Say where a sample lies, and what is learnt of it."""
        source = self.media(split)
        return f"{source.file(index)}, class {source.classes[source.label(index)]!r}"

    def sheet_entry(self, place: int, split: str) -> SheetEntry:
        """Return the sample at a place as it is drawn on a sheet: what the model gets, and what it learns."""
        raise NotImplementedError

    def sheet_title(self, place: int, split: str) -> str:
        """Say which sample stands at a place, and where it lies."""
        epoch, index = self.shown(place, split)
        return f"sample {place}, epoch {epoch}: {self.media(split).file(index)}"

    def sample_lines(self, place: int) -> Sequence[str]:
        """Say which sample it is and what is learnt of it, beside what is made of it."""
        where, *made = super().sample_lines(place)
        return [where, self.described(self.shown(place)[1]), *made]

    def data_lines(self) -> Sequence[str]:
        train, held = self.media("train"), self.media("eval")
        of = f" of {len(train.classes)} classes" if train.classes else ""
        lines = [
            f"{train.root}: {format_count(len(train))} {self.sample_unit}{of}; {format_count(len(held))} for evaluation"
        ]
        return [*lines, *(f"left out: {reason}" for reason in train.unreadable[:3])]


def _told(report: Report | None, what: str) -> Callable[[int, int], None] | None:
    return None if report is None else lambda done, total: report(f"looking at {what}", done, total)


def _same(begun: MediaRecords, now: MediaRecords) -> bool:
    """Whether these are the same records, wherever they lie."""
    one, other = (replace(source, root="", folder="", files=()) for source in (begun, now))
    return one == other


def _read(path: Path) -> dict[str, Source]:
    lines = path.read_text().splitlines()
    return dict(zip(("train", "eval"), map(parse_source, lines), strict=True))
