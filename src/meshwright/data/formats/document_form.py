"""What is a document in a record, such as a JSON object or the row of a table: the text of a field, or another form."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from meshwright.data.formats.readers import Broken, Piece
from meshwright.spec.job.sections import DataSection


class DocumentForm(Protocol):
    """How documents are held; readers of files give it records."""

    columns: Sequence[str]
    """Fields that are read of a table: those that it has of these."""
    member_suffix: str | None
    """Members of archives that are documents of text, by the end of their names; None takes .json members, records."""
    takes_text: bool
    """Whether files of plain text are documents, and a document may be cut at data.max_bytes."""
    what: str
    """What a record holds, for messages."""

    def missing(self, present: Sequence[str], where: str) -> Broken | None:
        """Return that a record, or a file of records, lacks the fields of a document; None if it has them."""
        ...

    def document(self, record: Mapping[str, Any], where: str) -> Piece | Broken:
        """Return the document in a record, which may be empty."""
        ...


class TextForm:
    """Text under one key."""

    takes_text = True

    def __init__(self, section: DataSection) -> None:
        self._key = key = section.text_key
        self.columns: Sequence[str] = (key,)
        self.member_suffix = key if key.startswith(".") else None
        self.what = f'its text under data.text_key, such as {{"{key}": "..."}}'

    def missing(self, present: Sequence[str], where: str) -> Broken | None:
        """Return that the key is not among these fields."""
        if self._key in present:
            return None
        keys = ", ".join(repr(key) for key in present) or "none"
        return Broken(
            f"{where} has no field {self._key!r} (its fields: {keys}): set data.text_key to the one that holds the text"
        )

    def document(self, record: Mapping[str, Any], where: str) -> Piece | Broken:
        """Return the text of a record."""
        text = record.get(self._key)
        if text is None and (missing := self.missing([*record], where)) is not None:
            return missing
        if not isinstance(text, str):
            return Broken(
                f"{where}: field {self._key!r} is {json.dumps(text, default=str)[:80]}, not text: "
                "remove the record, or set data.text_key to a field of text"
            )
        try:
            return Piece(text.encode(), ends_document=True)
        except UnicodeEncodeError as error:
            return Broken(
                f"{where}: field {self._key!r} holds half of a surrogate pair ({text[error.start]!a}), "
                "which UTF-8 cannot express: fix or remove the record"
            )


class ObservedForm:
    """Another form, of which it observes what it finds in each record."""

    def __init__(self, form: DocumentForm, observe: Callable[[Piece | Broken, str], None]) -> None:
        self.columns: Sequence[str] = form.columns
        self.member_suffix, self.takes_text, self.what = form.member_suffix, form.takes_text, form.what
        self._form, self._observe = form, observe

    def missing(self, present: Sequence[str], where: str) -> Broken | None:
        """Return what the form does."""
        return self._form.missing(present, where)

    def document(self, record: Mapping[str, Any], where: str) -> Piece | Broken:
        """Return what the form does."""
        found = self._form.document(record, where)
        self._observe(found, where)
        return found


def json_kind(value: object) -> str:
    """Return what JSON calls a value that `json.loads` has read."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {"string": str, "array": list, "object": dict}
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), "number")


_RULES = {"line": "each line of a JSONL file is one", "member": "each .json member of an archive is one"}


def json_document(data: bytes, where: str, form: DocumentForm, unit: Literal["line", "member"]) -> Piece | Broken:
    """Return the document in one JSON object, which is a line of a file or a member of an archive."""
    try:
        # Not json.loads alone, which would take UTF-16 and UTF-32, too.
        record = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = data[error.start : error.start + 1]
        return Broken(f"{where} is no UTF-8 text (byte {byte!r}): convert the file to UTF-8, or change data.source")
    except (ValueError, RecursionError) as error:
        # Of a number that is too long, Python's advice to its programmers comes behind a semicolon.
        reason = str(error).partition(";")[0]
        advice = f"fix or remove the {unit}, or change data.source"
        return Broken(f"{where} is no JSON ({reason}): {_RULES[unit]} JSON object; {advice}")
    if not isinstance(record, dict):
        return Broken(f"{where} is a JSON {json_kind(record)}, not an object: {_RULES[unit]} object with {form.what}")
    return form.document(record, where)
