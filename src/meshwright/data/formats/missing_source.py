"""Messages about a source that does not exist, which may be misspelled, a broken link, a pattern or a list."""

import difflib
import os
from pathlib import Path

_PATTERN = frozenset("*?{},")


def missing_source(source: str, path: Path) -> str:
    """Return the message about a source that is not there, as a path of this machine."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, n=1)
    hint = f"; did you mean {str(path.parent / close[0])!r}?" if close else ""
    if path.is_symlink():
        return (
            f"data.source = {source!r} is a link to {os.readlink(path)}, which leads to no file: set it to "
            "one, or to a folder"
        )
    if advice := pattern_words(source):
        return f"data.source = {source!r} does not exist: {advice}"
    return (
        f"data.source = {source!r} does not exist (looked in {os.path.realpath(path.parent)}){hint}: set it to stdlib, "
        "a file or folder of text, records or tokens, a URL, or my_module:MyData"
    )


def pattern_words(source: str) -> str:
    """Return advice for a missing source that is spelled as a pattern or a list of files; "" for another."""
    if not _PATTERN & {*source}:
        return ""
    return (
        "patterns and lists of files are not read: name the folder, of which all files are read, or give each file or "
        "folder a [[data.mixture]] table of its own"
    )
