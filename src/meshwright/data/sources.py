"""Sources of documents: the files of data.source and their text up to data.max_bytes."""

import difflib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from pathlib import Path

from meshwright.data.readers import JSONL_SUFFIXES, PARQUET_SUFFIXES, Piece, read_file, utf8_cut
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

STDLIB = "stdlib"

TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh"}
)
"""Suffixes of text files that are read from a folder; a file named directly may have any suffix."""

_READ_SUFFIXES = TEXT_SUFFIXES | JSONL_SUFFIXES | PARQUET_SUFFIXES
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def describe(section: DataSection) -> str:
    """Return the source as text for a manifest, with the Python version of stdlib."""
    return f"{STDLIB} (Python {platform.python_version()})" if section.source == STDLIB else section.source


def list_files(section: DataSection) -> list[Path]:
    """Return the files of a source in reading order; raises DataError if there are none."""
    if section.source == STDLIB:
        return _stdlib_files()
    path = Path(os.path.expanduser(section.source))
    if not os.path.exists(path):
        raise DataError(_missing(section.source, path))
    if path.is_dir():
        return _folder_files(path)
    if path.suffix.lower() == ".json":
        raise DataError(
            f"data.source = {section.source!r} is a JSON file, which is read neither as text nor as records: "
            f"write one JSON object a line and name the file {path.with_suffix('.jsonl').name}"
        )
    return [path]


def pieces(section: DataSection) -> Iterator[Piece]:
    """Yield the text of a source up to data.max_bytes; raises DataError if there is none."""
    files = list_files(section)
    is_empty = True
    for piece in first_bytes((piece for path in files for piece in read_file(path, section.text_key)), section):
        is_empty = False
        yield piece
    if is_empty:
        raise DataError(no_text(section, len(files)))


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


def no_text(section: DataSection, num_files: int) -> str:
    """Return the message about a source without text in the first data.max_bytes bytes."""
    return (
        f"data.source = {section.source!r} holds no text in {num_files} file(s) and the first {section.max_bytes} "
        "bytes: set data.source to a corpus that has some"
    )


def _stdlib_files() -> list[Path]:
    """Return the modules of the standard library, without tests, installed packages and build files."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in _walk(folder, {".py"}, skipped=_NOT_THE_LIBRARY)
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
    files = _walk(folder, _READ_SUFFIXES)
    if not files:
        raise DataError(
            f"data.source = {str(folder)!r} is a folder without text: no file in it or its subfolders ends in "
            f"{' '.join(sorted(_READ_SUFFIXES))}: put some there, or name one file of any suffix in data.source"
        )
    return files


def _walk(folder: Path, suffixes: Set[str], skipped: Set[str] = frozenset()) -> list[Path]:
    """Return the non-hidden files with one of `suffixes` below `folder`, sorted by relative path."""
    found: list[Path] = []
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=_raise_unreadable, followlinks=True):
        real_parent = os.path.realpath(parent)
        # A link may form a cycle.
        folders[:] = [] if real_parent in seen else sorted(n for n in folders if n[0] != "." and n not in skipped)
        names = [] if real_parent in seen else names
        seen.add(real_parent)
        found += [
            Path(parent, name) for name in names if name[0] != "." and os.path.splitext(name)[1].lower() in suffixes
        ]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _raise_unreadable(error: OSError) -> None:
    raise DataError(
        f"folder {error.filename} cannot be read ({error.strerror}): change its permissions, or data.source"
    ) from error


def _missing(source: str, path: Path) -> str:
    try:
        names = os.listdir(path.parent)
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, n=1)
    hint = f"; did you mean {str(path.parent / close[0])!r}?" if close else ""
    return (
        f"data.source = {source!r} does not exist (looked in {path.parent.resolve()}){hint}: set it to stdlib, "
        "a text, JSONL or Parquet file, a folder of them, or my_module:MyData"
    )
