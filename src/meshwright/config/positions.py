"""On which line each key of a TOML text stands.

Python's TOML readers report no positions, and messages need the line. The scan below needs to
know only where keys, strings, comments and brackets begin and end, because the text has already been read by tomllib:
it may rely on the text being valid, and is no second parser of values.
"""

import re
import tomllib
from collections.abc import Callable

KeyPath = tuple[str, ...]

_KEY_PART = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[A-Za-z0-9_-]+")
_SPACE = re.compile(r"[ \t]*")
_NEWLINES_AND_COMMENTS = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}|\'\'\'(?:[^\']|\'{1,2}(?!\'))*\'{3,5}'
    r"|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\r\n]+")


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, from 1, on which each key of a valid TOML text is first named; tables count as keys.

    Keys inside arrays have no name of their own and are left out.
    """
    return _Scan(text).document()


class _Scan:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.lines: dict[KeyPath, int] = {}

    def document(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self.take(_NEWLINES_AND_COMMENTS)
        while self.position < len(self.text):
            if self.text[self.position] == "[":
                table = self.header()
            else:
                self.assignment(table)
            self.take(_NEWLINES_AND_COMMENTS)
        return self.lines

    def header(self) -> KeyPath:
        num_brackets = 2 if self.text.startswith("[[", self.position) else 1
        self.position += num_brackets
        table = self.key(())
        self.position += num_brackets
        return table or ()

    def assignment(self, table: KeyPath | None) -> None:
        path = self.key(table)
        self.position += 1  # the equals sign
        self.take(_SPACE)
        self.value(path)

    def key(self, table: KeyPath | None) -> KeyPath | None:
        """Read a dotted key, note its line unless it stands inside an array (`table` is None)."""
        line = self.text.count("\n", 0, self.position) + 1
        path = table
        while True:
            self.take(_SPACE)
            part = _unquoted(self.take(_KEY_PART))
            if path is not None:
                path = (*path, part)
                self.lines.setdefault(path, line)
            self.take(_SPACE)
            if self.text[self.position] != ".":
                return path
            self.position += 1

    def value(self, path: KeyPath | None) -> None:
        match self.text[self.position]:
            case "{":
                self.items("}", lambda: self.assignment(path))
            case "[":
                self.items("]", lambda: self.value(None))
            case '"' | "'":
                self.take(_STRING)
            case _:
                self.take(_SCALAR)

    def items(self, end: str, item: Callable[[], None]) -> None:
        """Scan what lies between brackets, of which `end` is the closing one."""
        self.position += 1
        self.take(_NEWLINES_AND_COMMENTS)
        while self.text[self.position] != end:
            if self.text[self.position] == ",":
                self.position += 1
            else:
                item()
            self.take(_NEWLINES_AND_COMMENTS)
        self.position += 1

    def take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.position)
        assert found is not None, f"the scan lost its way at character {self.position} of a valid TOML text"
        self.position = found.end()
        return found.group()


def _unquoted(part: str) -> str:
    if part[0] not in "\"'":
        return part
    name = tomllib.loads(f"name = {part}")["name"]
    assert isinstance(name, str)
    return name
