"""Sources of documents: the files of data.source and their text up to data.max_bytes."""

import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from meshwright.data.filtering.document_hashes import DocumentHashes
from meshwright.data.filtering.kept_documents import CountedPieces, LeftOut, kept_documents
from meshwright.data.formats.dataset_folder import dataset_files
from meshwright.data.formats.document_form import DocumentForm, TextForm
from meshwright.data.formats.kinds_not_read import compression_problem, unread_files_note
from meshwright.data.formats.missing_source import missing_source, pattern_words
from meshwright.data.formats.read_documents import READ_SUFFIXES, SUFFIX_WORDS, holds_records, read_documents
from meshwright.data.formats.readers import Broken, Piece, utf8_cut
from meshwright.data.formats.source_file import SourceFile, file_identity, is_url, list_url
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

STDLIB = "stdlib"

_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def describe(section: DataSection) -> str:
    """Return the source as text for a manifest, with the Python version of stdlib."""
    return f"{STDLIB} (Python {platform.python_version()})" if section.source == STDLIB else section.source


def list_files(section: DataSection) -> Sequence[SourceFile]:
    """Return the files of a source in reading order; raises DataError if there are none."""
    if section.source == STDLIB:
        return _stdlib_files()
    if is_url(section.source):
        return _url_files(section.source)
    path = Path(os.path.expanduser(section.source))
    if not os.path.exists(path):
        raise DataError(missing_source(section.source, path))
    if path.is_dir():
        files = dataset_files(path)
        return _folder_files(path) if files is None else files
    if (problem := compression_problem(section.source)) is not None:
        raise DataError(problem)
    if path.suffix.lower() == ".json":
        raise DataError(
            f"data.source = {section.source!r} is a JSON file, which is read neither as text nor as records: "
            f"write one JSON object a line and name the file {path.with_suffix('.jsonl').name}"
        )
    return [path]


def _all_files(section: DataSection) -> Sequence[SourceFile]:
    """Return every file that is not hidden of a folder that does not state which files it consists of; else none."""
    if section.source == STDLIB:
        return []
    if is_url(section.source):
        files, is_folder = list_url(section.source)
        return [file for file in files if file.name[0] != "."] if is_folder else []
    path = Path(os.path.expanduser(section.source))
    return _walk(path, ("",)) if path.is_dir() and dataset_files(path) is None else []


def source_identity(section: DataSection) -> list[Any]:
    """Return what the text of a source follows from, as JSON: the files as they are now, and how they are read."""
    how = [section.max_bytes, section.text_key, section.messages_key, section.on_bad_document, section.deduplicate]
    how += [section.chosen_key, section.rejected_key]
    return [*how, *(file_identity(file) for file in list_files(section))]


class SourceReader:
    """Callable: the documents of a source up to data.max_bytes, for the token cache, which knows it by its name."""

    def __init__(self, form_of: Callable[[DataSection], DocumentForm], name: str) -> None:
        """`name` differs where the same files have other documents for another reader."""
        self._form_of, self.__name__ = form_of, name

    def __call__(self, section: DataSection) -> CountedPieces:
        """Return the documents, without copies if they are left out; raises DataError if there are none."""
        is_new = DocumentHashes().add if section.deduplicate else None
        return CountedPieces(lambda left_out: self.kept(section, left_out, is_new))

    def takes_text(self, section: DataSection) -> bool:
        """Return whether files of plain text are documents, too."""
        return self._form_of(section).takes_text

    def files(self, section: DataSection) -> Sequence[SourceFile]:
        """Return the files of a source that may hold documents, in order; raises DataError if there are none."""
        if self.takes_text(section):
            return list_files(section)
        found = [] if section.source == STDLIB else [file for file in list_files(section) if holds_records(file)]
        if not found:
            raise DataError(
                f"data.source = {section.source!r} holds no records: set it to a JSONL or Parquet file, or a folder of "
                f"them, whose records hold {self._form_of(section).what}"
            )
        return found

    def unread_files_note(self, section: DataSection) -> str | None:
        """Return which files of a folder are not read, since they are of other kinds; None where all are."""
        read = {*self.files(section)}
        unread = [file for file in _all_files(section) if file not in read]
        return unread_files_note(section.source, unread, takes_text=self.takes_text(section))

    def documents(self, file: SourceFile, section: DataSection) -> Iterator[Piece | Broken]:
        """Yield the documents of one file, and those that cannot be read as Broken, as `read_documents` does."""
        return read_documents(file, self._form_of(section))

    def kept(
        self, section: DataSection, left_out: LeftOut, is_new: Callable[[bytes], bool] | None = None
    ) -> Iterator[Piece]:
        """Yield what a call does; documents that are not kept are counted in `left_out`.

        `is_new` says of a document's hash whether it is no copy; None takes copies, too.
        """
        files = self.files(section)
        found = chain.from_iterable(self.documents(file, section) for file in files)
        kept = kept_documents(found, section.on_bad_document, left_out, is_new)
        is_empty = True
        for piece in self.limited(kept, section):
            is_empty = False
            yield piece
        if is_empty:
            raise DataError(no_text(section, len(files), left_out))

    def limited(self, stream: Iterable[Piece], section: DataSection) -> Iterator[Piece]:
        """Yield the first data.max_bytes bytes of a stream; of records that are no text only whole ones."""
        if self.takes_text(section):
            yield from first_bytes(stream, section)
            return
        left = section.max_bytes
        for piece in stream:
            left -= len(piece.utf8)
            if left < 0:
                return
            yield piece


pieces = SourceReader(TextForm, "text")
"""Reads the text of a source."""


def first_bytes(stream: Iterable[Piece], section: DataSection) -> Iterator[Piece]:
    """Yield the first data.max_bytes bytes of a stream, without a partial last character."""
    left, held = section.max_bytes, None
    for piece in stream:
        end = utf8_cut(piece.utf8, left)
        if held and end:
            yield held
        held = Piece(piece.utf8[:end], piece.ends_document) if end else held
        left -= end
        if end < len(piece.utf8) or not left:
            break
    else:
        yield from [held] if held else []
        return
    if held:
        yield replace(held, ends_document=True)


def no_text(section: DataSection, num_files: int, left_out: LeftOut | None = None) -> str:
    """Return the message about a source without text in the first data.max_bytes bytes."""
    broken = "" if left_out is None or not left_out.num_broken else f"; {'; '.join(left_out.lines())}"
    return (
        f"data.source = {section.source!r} holds no text in {num_files} file(s) and the first {section.max_bytes} "
        f"bytes: set data.source to a corpus that has some{broken}"
    )


def _stdlib_files() -> list[Path]:
    """Return the modules of the standard library, without tests, installed packages and build files."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in _walk(folder, (".py",), skipped=_NOT_THE_LIBRARY)
        # _sysconfigdata holds paths of the build machine; the corpus must depend on the Python version only.
        if not path.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise DataError(
            f"data.source = {STDLIB!r}, but this Python keeps no *.py of its standard library under {folder} "
            "(some are built that way): set data.source to a text file or folder"
        )
    return files


def _folder_files(folder: Path) -> list[Path]:
    files = _walk(folder, READ_SUFFIXES)
    if not files:
        raise DataError(_no_files(str(folder)))
    return files


def _url_files(url: str) -> Sequence[SourceFile]:
    files, is_folder = list_url(url)
    if is_folder:
        found = [file for file in files if file.name[0] != "." and file.name.lower().endswith(READ_SUFFIXES)]
        if not found:
            raise DataError(_no_files(url))
        return found
    if not files:
        raise DataError(f"data.source = {url!r} does not exist: {pattern_words(url) or 'correct it'}")
    if (problem := compression_problem(url)) is not None:
        raise DataError(problem)
    return files


def _no_files(folder: str) -> str:
    return (
        f"data.source = {folder!r} is a folder without text: no file in it or its subfolders ends in "
        f"{SUFFIX_WORDS}: put some there, or name one file of any suffix in data.source"
    )


def _walk(folder: Path, suffixes: tuple[str, ...], skipped: Set[str] = frozenset()) -> list[Path]:
    """Return the non-hidden files with one of `suffixes` below `folder`, sorted by relative path."""
    found: list[Path] = []
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=_raise_unreadable, followlinks=True):
        real_parent = os.path.realpath(parent)
        # A link may form a cycle.
        folders[:] = [] if real_parent in seen else sorted(n for n in folders if n[0] != "." and n not in skipped)
        names = [] if real_parent in seen else names
        seen.add(real_parent)
        found += [Path(parent, name) for name in names if name[0] != "." and name.lower().endswith(suffixes)]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _raise_unreadable(error: OSError) -> None:
    raise DataError(
        f"folder {error.filename} cannot be read ({error.strerror}): change its permissions, or data.source"
    ) from error
