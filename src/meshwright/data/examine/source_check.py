"""check_source(): reads all text of a source and collects each document that cannot be read."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.data.cache.content import CountBytes
from meshwright.data.formats.readers import Broken, Piece
from meshwright.data.sources import SourceReader, no_text, pieces
from meshwright.errors import MeshwrightError
from meshwright.spec.data_findings import DataProblem, UnreadRest
from meshwright.spec.job.sections import DataSection

MAX_PROBLEMS = 10_000
"""Problems that are kept of a corpus; further ones are counted only."""


@dataclass
class SourceCheck:
    """What was read of a source, and what could not be."""

    num_files: int = 0
    num_documents: int = 0
    """Good ones."""
    num_bytes: int = 0
    num_empty_files: int = 0
    """Files without a document, good or bad."""
    num_problems: int = 0
    problems: list[DataProblem] = field(default_factory=list)
    """In reading order, up to MAX_PROBLEMS."""
    unread: list[UnreadRest] = field(default_factory=list)
    """Sources of which data.max_bytes left some out."""

    unread_files: list[str] = field(default_factory=list)
    """A line for each folder with files that are not read, since they are of other kinds."""

    def add_problem(self, where: str, reason: str) -> None:
        """Count a problem."""
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(DataProblem(where=where, reason=reason))


def check_source(
    section: DataSection, found: SourceCheck, count: CountBytes | None = None, reader: SourceReader = pieces
) -> None:
    """Add what is wrong with data.source, up to data.max_bytes of good text; raises nothing about its files."""
    try:
        files = reader.files(section)
    except MeshwrightError as error:
        found.add_problem(section.source, str(error))
        return
    if (note := reader.unread_files_note(section)) is not None:
        found.unread_files.append(note)
    left, num_problems, num_read = section.max_bytes, found.num_problems, 0
    for file in files:
        if left <= 0:
            break
        num_read += 1
        documents = _counted(reader.documents(file, section), left, count)
        left -= _check_file(str(file), documents, found)
    num_unread = len(files) - num_read
    if left < 0 or num_unread:
        found.unread.append(
            UnreadRest(
                source=section.source,
                max_bytes=section.max_bytes,
                num_files=len(files),
                num_files_unread=num_unread,
            )
        )
    if left == section.max_bytes and found.num_problems == num_problems:
        found.add_problem(section.source, no_text(section, len(files)))


def _counted(documents: Iterator[Piece | Broken], left: int, count: CountBytes | None) -> Iterator[Piece | Broken]:
    """Yield documents until more than `left` bytes of good ones are there, which `count` takes."""
    for one in documents:
        yield one
        if isinstance(one, Piece):
            left -= len(one.utf8)
            if count is not None:
                count(len(one.utf8))
            if left < 0:
                return


def _check_file(name: str, documents: Iterator[Piece | Broken], found: SourceCheck) -> int:
    """Return the bytes of text that were read."""
    found.num_files += 1
    num_bytes, document_bytes, is_empty = 0, 0, True
    try:
        for one in documents:
            if isinstance(one, Broken):
                is_empty = False
                found.add_problem(name, one.message)
                continue
            num_bytes += len(one.utf8)
            document_bytes += len(one.utf8)
            if one.ends_document and document_bytes:
                # An empty document is left out.
                is_empty, document_bytes = False, 0
                found.num_documents += 1
    except MeshwrightError as error:
        is_empty = False
        found.add_problem(name, str(error))
    if is_empty:
        found.num_empty_files += 1
    found.num_bytes += num_bytes
    return num_bytes
