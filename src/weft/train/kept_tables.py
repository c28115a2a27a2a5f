"""The file of a run folder that names a task's tables, so that a resumed run has the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.data.table_data import SplitTables
from weft.errors import DataError
from weft.train.folder import RunFolder, free_name


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file with the folders and digests of tables.

    Attributes:
        name: name of the file in the run folder.
        contents: name of the rows in messages, in the plural.
    """

    name: str
    contents: str

    def refuse_other(self, folder: RunFolder, tables: SplitTables) -> None:
        """Raise DataError if the folder has a run with other tables."""
        if (folder.path / self.name).is_file() and self.read(folder).digests != tables.digests:
            raise DataError(
                f"data: the {self.contents} are not those that the run in {str(folder.path)!r} was started with. Use "
                f"{free_name(folder)} for a new run, or bring the old data back to resume."
            )

    def read(self, folder: RunFolder) -> SplitTables:
        """Return the tables of the folder's run."""
        return SplitTables.from_json(folder.text(self.name))

    def text(self, tables: SplitTables, notes: Sequence[str]) -> Mapping[str, str]:
        """Return the file's content by its name, with notes for users added to the summary."""
        return {self.name: replace(tables, summary=(*tables.summary, *notes)).to_json()}
