"""`weft ckpt ls`: every checkpoint of a folder on a line of its own, also those that do not count."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime

from weft.checkpoint import load_checkpoint, step_in_name
from weft.checkpoint.targets import Location, target_at
from weft.cli.console import table
from weft.errors import CheckpointError
from weft.units import format_bytes


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """state: "committed", "unfinished", "set aside" or "unreadable: ...". when: ISO, of the machine's clock."""

    step: int
    name: str
    state: str
    when: str
    num_bytes: int
    num_files: int
    plan: str
    written_by: str

    def as_json(self) -> dict[str, object]:
        """For --json."""
        return asdict(self)


def listed(root: Location) -> list[ListedCheckpoint]:
    """All step folders in a folder, oldest step first. Bytes are not verified."""
    found = []
    present = {path.name for path in root.iterdir()}
    for path in root.iterdir():
        step = step_in_name(path.name.split(".")[0])
        if step is not None and path.is_dir():
            found.append(_one(path, step, ".aside" in path.name or f"{path.name}.aside" in present))
    return sorted(found, key=lambda one: (one.step, one.name))


def _one(path: Location, step: int, is_aside: bool) -> ListedCheckpoint:
    sizes = target_at(path.parent).file_sizes(path)
    commit = path / "COMMIT"
    moment = commit if "COMMIT" in sizes else path / next(iter(sizes)) if sizes else path
    try:
        when = datetime.fromtimestamp(moment.lstat().st_mtime).isoformat(sep=" ", timespec="seconds")
    except FileNotFoundError:  # deleted meanwhile
        when = "-"
    plan = written_by = ""
    state = "set aside" if is_aside else "committed" if "COMMIT" in sizes else "unfinished"
    if state == "committed":
        try:
            opened = load_checkpoint(path, lazily=True)
            plan = str(opened.state.get("plan", ""))
            written_by = ", ".join(f"{name} {version}" for name, version in opened.written_by.items())
        except CheckpointError as error:
            state = f"unreadable: {_reason(error, path)}"
    return ListedCheckpoint(step, path.name, state, when, sum(sizes.values()), len(sizes), plan, written_by)


def _reason(error: CheckpointError, path: Location) -> str:
    return str(error).removeprefix(f"{path}: ").removesuffix(". Use another checkpoint.")


def listing_text(found: list[ListedCheckpoint]) -> list[str]:
    """A table as lines."""
    rows = [("step", "when", "size", "files", "state", "plan")]
    rows += [
        (str(one.step), one.when, format_bytes(one.num_bytes), str(one.num_files), one.state, one.plan) for one in found
    ]
    return table(rows, right=(0, 2, 3))
